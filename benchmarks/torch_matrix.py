"""Run PyTorch's own matrix of context-parallel tests on two Gloo ranks, with PyTorch and with Longspan.

    python -m benchmarks.torch_matrix    # exits with 1 when a cell of Longspan is off or refused; some minutes

The axes are those of PyTorch's test/distributed/tensor/test_attention.py: SDPA as context or wrapped module x causal x
balancing x rotation x forward only, and flex attention with causal and document masks x balancer. Every cell has random
inputs and, with backward, random gradients of the output; errors are the largest difference from one device in float64.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental import _attention as theirs
from torch.distributed.tensor.experimental._context_parallel import _load_balancer as balancers
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import longspan as ls
from benchmarks.ranks import Ranks
from longspan import torch_api as ours
from longspan.testing import dense_gradients

WORLD, ROWS, HEADS, DIM = 2, 2, 2, 16
SDPA_LEN, FLEX_LEN = 64, 256
"""PyTorch's flex context parallelism accepts only multiples of 128 tokens a rank."""
DOCUMENTS = [64, 24, 120, 48]
PER_ROW = [DOCUMENTS, [148, 108]]
"""Multiples of 2 * WORLD, as PyTorch's per-document balancer needs."""
TIMEOUT = 600.0
"""PyTorch takes minutes to place full attention on CPUs, once per process."""
LIMIT = 2e-5


@dataclass(frozen=True)
class Cell:
    """One case of the matrix. `kind` is "context", "wrapper" or "flex"."""

    kind: str
    mask: str
    balancer: str
    rotation: str
    backward: bool

    def __str__(self) -> str:
        way = "forward + backward" if self.backward else "forward"
        return f"{self.kind:8s} {self.mask:18s} {self.balancer:13s} {self.rotation:10s} {way}"


def cells() -> list[Cell]:
    """Return the cells of PyTorch's tests: SDPA without causality is not balanced there, flex has one rotation."""
    matrix = [
        Cell(kind, mask, balancer, rotation, backward)
        for kind, mask, balancer, rotation, backward in itertools.product(
            ("context", "wrapper"), ("causal", "full"), ("head-tail", "none"), ("allgather", "alltoall"), (False, True)
        )
        if mask == "causal" or balancer == "none"
    ]
    for mask, balancer, backward in itertools.product(
        ("causal", "documents", "documents per row"),
        ("none", "head-tail", "per-document", "round-robin"),
        (False, True),
    ):
        matrix.append(Cell("flex", mask, balancer, "allgather", backward))
    return matrix


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))


def whole(seq_len: int) -> list[Tensor]:
    """Return q, k, v and a gradient of the output, the same on every rank."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(ROWS, HEADS, seq_len, DIM, generator=draw) for _ in range(4)]


def mask_of(cell: Cell) -> ls.masks.Mask:
    """Return the mask of the cell."""
    causal = ls.masks.causal()
    if cell.mask == "full":
        return ls.masks.full()
    if cell.mask == "documents":
        return ls.masks.documents(DOCUMENTS) & causal
    if cell.mask == "documents per row":
        return ls.masks.per_row(*(ls.masks.documents(lengths) & causal for lengths in PER_ROW))
    return causal


def error_of(cell: Cell, tensors: list[Tensor], outputs: list[Tensor]) -> float:
    q, k, v, dout = tensors
    out, _, *gradients = dense_gradients(q, k, v, mask_of(cell).resized(q.shape[2]), DIM**-0.5, dout)
    right = [out, *gradients] if cell.backward else [out]
    return max(float((a.double() - b).abs().max()) for a, b in zip(outputs, right, strict=True))


class Sdpa(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)


class Flex(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
        return self.function(query, key, value, block_mask=block_mask)


def results(cell: Cell, run: Callable[..., Tensor], leaves: list[Tensor], dout: Tensor, *args: Any) -> list[Tensor]:
    """Return shards of the output and, with backward, of the gradients."""
    if not cell.backward:
        with torch.no_grad():
            return [run(*leaves, *args)]
    try:
        for leaf in leaves:
            leaf.requires_grad_()
        out = run(*leaves, *args)
        out.backward(dout)
        return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    finally:  # buffers that require gradients could not be restored
        for leaf in leaves:
            leaf.requires_grad_(False)


def block_mask_of(cell: Cell) -> BlockMask:
    """Return the cell's mask as a PyTorch BlockMask."""
    rows = PER_ROW if cell.mask == "documents per row" else [DOCUMENTS] * ROWS
    if cell.mask == "causal":
        rows = [[FLEX_LEN]] * ROWS
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in rows])
    return create_block_mask(
        lambda b, h, i, j: (ids[b, i] == ids[b, j]) & (i >= j), ROWS, None, FLEX_LEN, FLEX_LEN, device="cpu"
    )


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def by_pytorch(cell: Cell) -> float:
    """Return the error of PyTorch's own context parallelism."""
    mesh = mesh_of_all()
    theirs.set_rotate_method(cell.rotation)
    theirs._cp_options.enable_load_balance = cell.balancer != "none"
    tensors = whole(FLEX_LEN if cell.kind == "flex" else SDPA_LEN)
    if cell.kind == "context":
        q, k, v, dout = (t.clone() for t in tensors)
        with theirs.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
            run = F.scaled_dot_product_attention
            outputs = results(cell, lambda *x: run(*x, is_causal=cell.mask == "causal"), [q, k, v], dout)
            return error_of(cell, tensors, theirs.context_parallel_unshard(mesh, outputs, [2] * len(outputs)))
    if cell.kind == "flex":
        blocks = block_mask_of(cell)
        balancer = _their_balancer(cell, blocks)
        *leaves, dout, part = _their_shards(mesh, [*tensors, blocks], balancer)
        style = theirs._ContextParallel(2, theirs._ContextParallel.AttentionType.FLEX)
        module, args = parallelize_module(Flex(flex_attention), mesh, style), (part,)
    else:
        balancer = _their_balancer(cell, None)
        theirs._enable_context_parallel_dispatcher()
        *leaves, dout = _their_shards(mesh, tensors, balancer)
        style = theirs._ContextParallel(2, theirs._ContextParallel.AttentionType.SDPA)
        module, args = parallelize_module(Sdpa(), mesh, style), (cell.mask == "causal",)
    try:
        outputs = results(cell, module, leaves, dout, *args)
    finally:
        if cell.kind == "wrapper":
            theirs._disable_context_parallel_dispatcher()
    return error_of(cell, tensors, theirs.context_parallel_unshard(mesh, outputs, [2] * len(outputs), balancer))


def _their_shards(mesh: DeviceMesh, whole: list[Any], balancer: Any) -> list[Any]:
    return theirs._context_parallel_shard(mesh, whole, [2] * len(whole), balancer)


def _their_balancer(cell: Cell, blocks: Any) -> Any:
    length = FLEX_LEN if cell.kind == "flex" else SDPA_LEN
    rows = PER_ROW if cell.mask == "documents per row" else [DOCUMENTS]
    rows = [[FLEX_LEN]] if cell.mask == "causal" else rows
    return {
        "none": lambda: None,
        "head-tail": lambda: balancers._HeadTailLoadBalancer(length, WORLD, "cpu"),
        "per-document": lambda: balancers._PerDocumentHeadTailLoadBalancer(rows, WORLD, "cpu"),
        "round-robin": lambda: balancers._PTRRLoadBalancer(blocks, WORLD),
    }[cell.balancer]()


# -- Longspan ----------------------------------------------------------------------------------------------------------


def by_longspan(cell: Cell) -> float:
    """Return the error of the same call after changing the import."""
    mesh, balancer = mesh_of_all(), _our_balancer(cell)
    tensors = whole(FLEX_LEN if cell.kind == "flex" else SDPA_LEN)
    causal = cell.mask == "causal"
    with ours.set_rotate_method(cell.rotation):
        if cell.kind == "context":
            q, k, v, dout = (t.clone() for t in tensors)
            with ours.context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4, load_balancer=balancer):
                outputs = results(cell, Sdpa(), [t.clone() for t in (q, k, v)], dout, causal)
        else:
            *leaves, dout = ours.context_parallel_shard(mesh, tensors, [2] * 4, balancer)
            flex = cell.kind == "flex"
            style = ours.ContextParallel(2, "flex" if flex else "sdpa", load_balancer=balancer)
            module = parallelize_module(Flex(ours.flex_attention) if flex else Sdpa(), mesh, style)
            outputs = results(cell, module, leaves, dout, block_mask_of(cell) if flex else causal)
    return error_of(cell, tensors, ours.context_parallel_unshard(mesh, outputs, [2] * len(outputs), balancer))


def _our_balancer(cell: Cell) -> Any:
    documents = {"documents": DOCUMENTS, "causal": [FLEX_LEN]}.get(cell.mask)
    return {
        "none": ours.Contiguous,
        "head-tail": ours.HeadTail,
        "per-document": lambda: ours.Balanced(mask_of(cell)) if documents is None else ours.PerDocument(documents),
        "round-robin": lambda: ours.RoundRobin(mask_of(cell)),
    }[cell.balancer]()


# -- the table ---------------------------------------------------------------------------------------------------------


def outcome(function: Callable[[Cell], float], cell: Cell) -> tuple[float | None, str]:
    """Return the error, or the exception's message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return function(cell), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def all_by_longspan() -> list[tuple[Cell, float | None, str]]:
    """Run every cell on this rank, for tests with their own ranks."""
    return [(cell, *outcome(by_longspan, cell)) for cell in cells()]


class Pair:
    """Two ranks, recreated after a hang."""

    def __init__(self) -> None:
        self.ranks: Ranks | None = None

    def run(self, function: Callable[[Cell], float], cell: Cell) -> tuple[float | None, str]:
        if self.ranks is None:
            self.ranks = Ranks(WORLD, timeout=TIMEOUT)
        try:
            by_rank = self.ranks.run(outcome, function, cell)
        except TimeoutError as error:
            self.end(error)
            return None, f"hangs (more than {TIMEOUT:.0f} s)"
        message = next((text for error, text in by_rank if error is None), "")
        return (None, message) if message else (max(error for error, _ in by_rank if error is not None), "")

    def end(self, error: BaseException | None = None) -> None:
        if self.ranks is not None:
            self.ranks.__exit__(None if error is None else type(error), error, None)
        self.ranks = None


def main() -> int:
    pair, missed, run_by_pytorch, shown = Pair(), 0, [0, 0], list[str]()
    print(f"{'':68s} {'PyTorch ' + torch.__version__:>18s} {'Longspan':>10s}")
    for cell in cells():
        error, message = pair.run(by_pytorch, cell)
        own, refused = pair.run(by_longspan, cell)
        fine = own is not None and own <= LIMIT
        missed += not fine
        run_by_pytorch[cell.backward] += error is not None and error <= LIMIT
        if message and message not in shown:
            shown.append(message)
        left = f"[{shown.index(message) + 1}]" if message else f"{error:.1e}"
        print(f"{cell!s:68s} {left:>18s} {refused or f'{own:.1e}':>10s}{'' if fine else '  MISSED'}", flush=True)
    pair.end()
    for number, text in enumerate(shown, 1):
        print(f"[{number}] {text}")
    forward, backward = run_by_pytorch
    print(f"PyTorch is right in {forward} forward cells and {backward} with backward, of {len(cells()) // 2} each.")
    print("every cell of Longspan is right" if not missed else f"{missed} cells of Longspan are not right")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
