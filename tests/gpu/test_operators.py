"""Kernels alone, each against dense float64: output, lse, dq, dk and dv, surrounded by NaN, without host waits.
Those that move and merge rows against plain operators, in calls over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from unittest import mock

import pytest
import torch
from torch import Tensor

from longspan.api import attention
from longspan.kernels import Kernel, kernel_named
from longspan.kernels.contract import TileWork, Upstream
from longspan.run import fused
from longspan.tile import KnownTiles, Tile, accumulation_dtype
from longspan.verification.reference import (
    SAMPLES,
    Answer,
    Budget,
    Jitter,
    Meaning,
    budgets,
    compare_tensor,
    reference_result,
    unit,
    units,
)
from longspan.verification.report import Check
from tests.gpu.guard_zones import GuardedMemory
from tests.gpu.site import Site
from tests.gpu.test_exact import build_plan, dtypes, masks_of, num_tokens

KERNELS = {
    "cpu_flash": [pytest.mark.cpu],
    **{name: [pytest.mark.cuda] for name in ("fa3", "fa4", "cudnn_varlen", "varlen", "efficient", "flash", "cudnn")},
    "flex": [pytest.mark.slow],
    "reference": [],
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_ROUNDINGS = 8
"""Budgets are at least this many roundings of statistics, of the whole tensor's norm."""
LSE_SHARE = 0.1
"""Error of an lse that is not visible, as a share of the rounding of probabilities."""


@dataclass(frozen=True)
class OperatorCase:
    """Tiles with distinct query rows, so that every row's result is final."""

    name: str
    tiles: tuple[Tile, ...]
    num_q: int
    num_k: int
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (64, 64)
    layout: str = "dense"
    batch: int = 1

    @property
    def scale(self) -> float:
        return 0.9 / math.sqrt(self.dims[0])

    def seen(self) -> Tensor:
        """Return which pairs are attended, as (1, 1, query rows, keys)."""
        seen = torch.zeros(1, 1, self.num_q, self.num_k, dtype=torch.bool)
        for tile in self.tiles:
            distance = torch.arange(tile.rows)[:, None] - torch.arange(tile.cols)[None, :]
            pairs = torch.ones(tile.rows, tile.cols, dtype=torch.bool)
            pairs &= True if tile.lo is None else distance >= tile.lo
            pairs &= True if tile.hi is None else distance <= tile.hi
            seen[0, 0, tile.q0 : tile.q1, tile.k0 : tile.k1] |= pairs
        return seen

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v and the gradient of the output."""
        generator = torch.Generator().manual_seed(len(self.name) + 1000 * self.num_q + self.num_k)
        (heads, groups), (d, e) = self.heads, self.dims
        shapes = (heads, self.num_q, d), (groups, self.num_k, d), (groups, self.num_k, e), (heads, self.num_q, e)
        q, k, v, dout = (torch.randn(self.batch, *shape, generator=generator).to(dtype) for shape in shapes)
        return q, k, v, dout


def _slices(count: int) -> tuple[tuple[Tile, ...], int]:
    """Return tiles of causal documents of a few tokens each, and the number of tokens."""
    tiles, at, longest = list[Tile](), 0, max(300 // count, 3)
    for number in range(count):
        size = 1 + number * 7 % longest
        tiles.append(Tile(at, at + size, at, at + size, lo=0))
        at += size
    return tuple(tiles), at


def _tight(*tiles: Tile) -> tuple[Tile, ...]:
    """Return the tiles as kernels get them, without empty rows and columns."""
    return tuple(tight for tile in tiles if (tight := tile.tight()) is not None)


def operator_cases(*, quick: bool) -> tuple[OperatorCase, ...]:
    """Return a case for every shape of tile that plans make, and for every memory layout of tensors."""
    causal, square = (Tile(0, 130, 0, 130, lo=0),), (130, 130)
    whole = (Tile(0, 70, 0, 131),)
    cases = [
        OperatorCase("causal", causal, *square),
        OperatorCase("window", (Tile(0, 130, 0, 130, lo=0, hi=37),), *square),
        OperatorCase("tall window", _tight(Tile(0, 130, 0, 60, lo=-30, hi=100)), 130, 60),
        OperatorCase("far border", _tight(Tile(0, 130, 0, 130, hi=-20)), *square),
        OperatorCase("rectangle", whole, 70, 131),
        OperatorCase("causal rectangle", (Tile(0, 70, 0, 131, lo=-61),), 70, 131),
        OperatorCase("blind rows", _tight(Tile(0, 90, 0, 50, lo=25), Tile(100, 120, 50, 80)), 128, 90),
        OperatorCase("single row", (Tile(5, 6, 0, 100),), 9, 100),
        OperatorCase("single key", (Tile(0, 60, 7, 8),), 60, 9),
        *(OperatorCase(f"{n} slices", tiles, rows, rows) for n in (2, 50, 200) for tiles, rows in [_slices(n)]),
        *(OperatorCase(f"heads {h}:{g}", causal, *square, heads=(h, g)) for h, g in ((4, 4), (8, 2), (8, 1))),
        *(OperatorCase(f"head dim {d}", causal, *square, dims=(d, d)) for d in (96, 128, 192, 256)),
        *(OperatorCase(f"head dims {d}/{e}", causal, *square, dims=(d, e)) for d, e in ((64, 32), (192, 128))),
        OperatorCase("batch 2", causal, *square, batch=2),
        OperatorCase("strided", causal, *square, layout="rows first"),
        OperatorCase("sliced", _tight(Tile(3, 60, 10, 100, lo=-40)), 70, 110, layout="sliced"),
        OperatorCase("odd rows", whole, 70, 131, layout="odd rows"),
        *(OperatorCase("strided slices", tiles, rows, rows, layout="rows first") for tiles, rows in [_slices(20)]),
    ]
    few = ("window", "tall window", "blind rows", "50 slices", "heads 8:1", "head dims 192/128", "strided")
    return tuple(case for case in cases if not quick or case.name in few)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(name, dtype, id=f"{name}.{str(dtype).removeprefix('torch.')}", marks=marks)
        for name, marks in KERNELS.items()
        for dtype in DTYPES
    ],
)
def test_kernel(site: Site, name: str, dtype: torch.dtype) -> None:
    """Each rank runs its share of the cases, so that every device runs some."""
    kernel, used, checks, refused = kernel_named(name), 0.0, 0, list[str]()
    ranks, cases = site.ranks, operator_cases(quick=site.quick)
    for case in cases[ranks.rank :: ranks.size]:
        reason = _refusal(kernel, case, dtype, ranks.device)
        if reason is not None:  # perhaps it takes no groups of heads
            case = replace(case, heads=(case.heads[0], case.heads[0]))
            reason = _refusal(kernel, case, dtype, ranks.device)
        if reason is not None:
            refused.append(f"{case.name}: {reason}")
            continue
        for check in check_case(kernel, case, dtype, ranks.device):
            if check.ratio > 1:
                pytest.fail(
                    f"{case.name}: {check.tensor} is off by {check.error:.2e}, and rounding explains {check.budget:.2e}"
                )
            used, checks = max(used, check.ratio), checks + 1
    if not checks and refused:
        pytest.skip(f"refused here: {refused[0]}")
    left = f", {len(refused)} refused on this rank" if refused else ""
    site.record(f"{len(cases)} cases, off by at most {used:.2f} of what rounding explains{left}", used=used)


@pytest.mark.cuda
@pytest.mark.ranks(2)
@pytest.mark.parametrize("scheme", ["exchange", "ring", "all_to_all"])
def test_fused(site: Site, scheme: str) -> None:
    """Moving rows, merging parts and sums of products by Triton, against plain operators: the same call, both ways."""
    rank, device, group, used = site.ranks.rank, site.ranks.device, site.group(), 0.0
    if not fused.is_fused(torch.device(device)):
        pytest.skip("Triton is not installed")
    mask = masks_of(num_tokens(site))["documents"]
    for dtype in dtypes(site):
        plan, answers = build_plan(site, mask, scheme, dtype), list[list[Tensor]]()
        generator, s = torch.Generator().manual_seed(11 + rank), plan.sizes
        q, k, v, dout = (
            torch.randn(s.batch, heads, plan.layout.num_slots(rank), s.head_dim, generator=generator)
            for heads in (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads)
        )
        inputs = [x.to(device, getattr(torch, dtype)).requires_grad_() for x in (q, k, v)]
        for by_triton in (True, False):
            with mock.patch.object(fused, "is_fused", lambda _, answer=by_triton: answer):
                out, lse = attention(*inputs, plan, group=group, return_lse=True)
                answers.append([out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, dout.to(out))])
        narrow, broad = units(getattr(torch, dtype))
        for name, found, right in zip(("out", "lse", "dq", "dk", "dv"), *answers, strict=True):
            budget = float((2 * (broad if name == "lse" else narrow) + MIN_ROUNDINGS * broad) * right.double().norm())
            error = float((found.double() - right.double()).norm())
            if not error <= budget:
                pytest.fail(f"{dtype}: {name} is off by {error:.2e}, and rounding explains {budget:.2e}")
            used = max(used, error / budget)
    site.record(f"{', '.join(dtypes(site))}: off by at most {used:.2f} of what rounding explains", used=used)


def _refusal(kernel: Kernel, case: OperatorCase, dtype: torch.dtype, device: str) -> str | None:
    q, k, v, _ = (x.to(device) for x in case.tensors(dtype))
    return kernel.refuses(q, k, v)


@lru_cache(maxsize=256)
def _expected(case: OperatorCase, dtype: torch.dtype) -> tuple[Answer, dict[str, Budget]]:
    """Return the float64 result, and the rounding budget of each of its tensors."""
    inputs, meaning = case.tensors(dtype), Meaning(case.seen(), case.scale)
    truth = reference_result(meaning, *inputs)
    narrow, broad = units(dtype)
    jitters = [Jitter(narrow, broad, torch.Generator().manual_seed(1 + number)) for number in range(SAMPLES)]
    played = [reference_result(meaning, *inputs, jitter) for jitter in jitters]
    allowed = budgets(truth, played, 2, MIN_ROUNDINGS * unit(accumulation_dtype(dtype)), 1.0)
    if narrow != broad:
        # An lse that is off by x multiplies a row's probabilities by 1 + x.
        lse, width = allowed["lse"], math.sqrt(case.batch * case.heads[0])
        assert lse.rows is not None
        more = LSE_SHARE * narrow * width
        allowed["lse"] = Budget(lse.total + more * math.sqrt(case.num_q), lse.rows + more)
    return truth, allowed


def check_case(kernel: Kernel, case: OperatorCase, dtype: torch.dtype, device: str) -> list[Check]:
    """Compare every tensor of a case with dense float64."""
    truth, allowed = _expected(case, dtype)
    result, written = _kernel_answer(kernel, case, case.tensors(dtype), truth, device)
    checks = [compare_tensor(result[name], truth[name], allowed[name], name)[0] for name in truth]
    return [*checks, *(Check(f"memory beside {name}", math.inf, 0.0) for name in written)]


def _kernel_answer(
    kernel: Kernel, case: OperatorCase, inputs: tuple[Tensor, ...], truth: Answer, device: str
) -> tuple[Answer, list[str]]:
    """Return the kernel's results on the CPU, and the names of operands that it wrote to or next to."""
    memory, dtype = GuardedMemory(), inputs[0].dtype
    put = lambda name, x: memory.place(name, x.to(device), case.layout)  # noqa: E731
    q, k, v, dout = (put(name, x) for name, x in zip(("q", "k", "v", "dout"), inputs, strict=True))
    out, lse = put("out", truth["out"].to(dtype)), put("lse", truth["lse"].to(accumulation_dtype(dtype)))
    delta = put("delta", (inputs[3].double() * truth["out"]).sum(-1).to(accumulation_dtype(dtype)))
    work = TileWork(q, k, v, KnownTiles(case.tiles), case.scale)
    upstream = Upstream(dout, out, lse, delta)
    for _ in kernel.forward(work):  # what is built once per plan may be copied and waited for
        pass
    for _ in kernel.backward(work, upstream):
        pass
    with no_host_waits(device):
        forward, backward = list(kernel.forward(work)), list(kernel.backward(work, upstream))
    result = {name: torch.zeros_like(x) for name, x in truth.items()}
    result["lse"].fill_(-torch.inf)
    groups = kernel.groups(work.tiles, case.num_q, case.num_k)
    for tiles, outputs, gradients in zip(groups, forward, backward, strict=True):
        rows = torch.cat([torch.arange(tile.q0, tile.q1) for tile in tiles])
        cols = torch.cat([torch.arange(tile.k0, tile.k1) for tile in tiles])
        for name, part in zip(("out", "lse"), outputs, strict=True):
            result[name][:, :, rows] = part.double().cpu()
        for name, part, at in zip(("dq", "dk", "dv"), gradients, (rows, cols, cols), strict=True):
            result[name].index_add_(2, at, part.double().cpu())
    return result, memory.changed()


@contextmanager
def no_host_waits(device: str) -> Iterator[None]:
    """Raise where the host would wait for a GPU."""
    if device == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
