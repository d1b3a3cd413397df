"""Memory that a call really takes, beside what its plan says.

On a GPU that is what the allocator had handed out at the peak. On CPUs it is the tensors that operators made, looked
into our own operators as well; what a fused kernel allocates inside itself is not seen there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longspan._torch import TorchDispatchMode
from longspan.api import attention
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, right, wrong
from longspan.cli.acceptance.timing import tokens_of, workload_plan
from longspan.cli.measure import MeasuredRun
from longspan.formatting import bytes_text
from longspan.planning.plan import Plan
from longspan.run import ops

MOST = 1.5
"""Times the plan's figure, and the kernel's room beside it, from which a line is red: allocators round up."""
OWN = {"attention": ops.run_forward, "attention_backward": ops.run_backward}


def memory_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    def line(scheme: str, word: str, size: str) -> AcceptanceLine:
        return AcceptanceLine(f"memory.{scheme}.{word}", partial(_memory, scheme, word, size), 2)

    size = "256k" if is_gpu else "2k"
    return [line("exchange", "causal", size), line("exchange", "window", size), line("ring", "causal", size)]


class Ledger(TorchDispatchMode):
    """Bytes of all tensors that were made and are still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "longspan" and name in OWN:
            with self:  # operators inside of it are to be seen, too
                found = OWN[name](*args, **(kwargs or {}))
        else:
            found = func(*args, **(kwargs or {}))
        self.note(found)
        return found

    def note(self, value: Any) -> None:
        for key, (storage, size) in list(self.alive.items()):
            if storage.expired():
                self.held -= size
                del self.alive[key]
        for tensor in _tensors(value):
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage.cdata not in self.alive and tensor.device.type != "meta":
                self.alive[storage.cdata] = storage, tensor.untyped_storage().nbytes()
                self.held += tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.held)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []


def kernel_room(plan: Plan, rank: int) -> int:
    """Bytes that a fused kernel may take beside its results in one launch: float32 sums of dq, and copies of what it is
    given, with as many key heads as query heads."""
    sizes, most = plan.sizes, 0
    for way in ("forward", "backward"):
        for step in plan.steps(rank, way):
            for compute in step.computes:
                rows, keys = (sum(span.stop - span.start for span in piece.spans) for piece in (compute.q, compute.kv))
                dims = sizes.head_dim + sizes.v_head_dim
                most = max(most, sizes.batch * sizes.q_heads * dims * (rows * (4 + 2 * sizes.itemsize) + 4 * keys))
    return most


def _memory(scheme: str, word: str, size: str, site: Site) -> Outcome:
    made = workload_plan(site, word, tokens_of(size), scheme)
    run, group = MeasuredRun(made, site.ranks), site.group()
    peak = _gpu_peak if site.is_gpu else _cpu_peak
    taken = 0
    for _ in range(2):  # tables of a plan are made once, and stay: the second time counts
        out, forward = peak(lambda: (_forward(run, group),), site.ranks.device)
        _, backward = peak(lambda out=out: torch.autograd.grad(out, run.inputs, run.upstream), site.ranks.device)
        taken = max(forward, backward)
        del out
        gc.collect()
    planned, room = made.peak_bytes(site.ranks.rank), kernel_room(made, site.ranks.rank)
    figures = {"taken_bytes": taken, "planned_bytes": planned, "kernel_bytes": room}
    used = taken / (planned + room)
    text = (
        f"{bytes_text(taken)} beside inputs and results; the plan says {bytes_text(planned)}, and a kernel may take"
        f" {bytes_text(room)}"
    )
    return (wrong if used > MOST else right)(text, used=used, **figures)


def _forward(run: MeasuredRun, group: Any) -> Tensor:
    q, k, v = run.inputs
    return attention(q, k, v, run.plan, group=group)


def _gpu_peak(act: Callable[[], tuple[Tensor, ...]], device: str) -> tuple[tuple[Tensor, ...], int]:
    """What the act gives, and the most memory beside it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = act()
    torch.cuda.synchronize(device)
    return results, torch.cuda.max_memory_allocated(device) - before - _bytes(results)


def _cpu_peak(act: Callable[[], tuple[Tensor, ...]], device: str) -> tuple[tuple[Tensor, ...], int]:  # noqa: ARG001
    with Ledger() as ledger:
        results = act()
    return results, ledger.peak - _bytes(results)


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)
