"""One rank's forward and backward without the others, its messages alone, and modes that count launches and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from longspan._torch import TorchDispatchMode
from longspan.cli.measure import DIRECTIONS
from longspan.kernels import Kernel, choose_kernel, kernel_named
from longspan.kernels.cuda_flash import Flash
from longspan.planning.plan import Plan
from longspan.planning.steps import MAX_BATCH
from longspan.run import ops
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Program
from longspan.run.walk import Job, messages_of

Messages = dict[int, int]
"""Bytes by peer."""
VIEWS = {"view", "slice", "select", "transpose", "unsqueeze", "squeeze", "expand", "alias", "detach", "as_strided"}
VIEWS |= {"split", "permute", "_unsafe_view", "unbind", "split_with_sizes", "lift_fresh", "_reshape_alias", "unfold"}
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "set_"}
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}
OWN_OPERATORS = {"attention": ops.run_forward, "attention_backward": ops.run_backward}


def drive(program: Program[Any], *, zeros: bool = True) -> Any:
    """Return the result of a program whose messages arrive at once, filled with zeros or uninitialised."""
    arrived: dict[int, Tensor] | None = None
    try:
        while True:
            exchange = program.send(arrived)
            assert exchange is not None
            next(program)
            arrived = dict(exchange.into)
            messages = [message for each in (exchange, *exchange.later) for message in each.into.values()]
            for message in messages if zeros and exchange.device.type != "meta" else ():
                message.zero_()
    except StopIteration as stop:
        return stop.value


@dataclass(frozen=True, eq=False)
class RankPrograms:
    """A rank's part of a plan, with tensors of its own."""

    job: Job
    saved: Saved
    dout: Tensor

    @staticmethod
    def of(plan: Plan, rank: int, device: str, kernel: Kernel | None = None) -> RankPrograms:
        """Run forward, for what backward needs, with this kernel or the one that `auto` chooses."""
        s, dtype = plan.sizes, getattr(torch, plan.dtype)
        slots = plan.layout.num_slots(rank)
        shapes = (
            (s.q_heads, s.head_dim),
            (s.kv_heads, s.head_dim),
            (s.kv_heads, s.v_head_dim),
            (s.q_heads, s.v_head_dim),
        )
        q, k, v, dout = (torch.ones(s.batch, h, slots, d, dtype=dtype, device=device) for h, d in shapes)
        chosen = kernel or kernel_named(choose_kernel("auto", q, k, v))
        job = Job(plan, rank, chosen, s.head_dim**-0.5, dtype)
        out, lse, kept = drive(Forward(job, q, k, v).program(saves=True))
        return RankPrograms(job, Saved(q, k, v, out, lse, kept), dout)

    def program(self, direction: str) -> Program[Any]:
        if direction == "forward":
            return Forward(self.job, self.saved.q, self.saved.k, self.saved.v).program(saves=True)
        return Backward(self.job, self.saved, self.dout).program()


def no_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return uninitialised output and lse, in the shapes of the operator."""
    if q.dim() == 4:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def no_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def programs_without_kernel(plan: Plan, rank: int, device: str) -> RankPrograms:
    """Return a rank's programs with a GPU kernel that computes nothing, warm in both directions."""
    kernel = Flash(op=no_forward, backward_op=no_backward)
    programs = RankPrograms.of(plan, rank, device, kernel)
    for direction in DIRECTIONS:
        drive(programs.program(direction))
    return programs


def messages_by_step(plan: Plan, rank: int, direction: str) -> list[tuple[Messages, Messages]]:
    """Return what the rank sends and receives in each step.

    >>> from longspan import layouts, masks
    >>> from longspan.api import plan
    >>> causal = plan(masks.causal(), layouts.contiguous(8, 2), q_heads=1, kv_heads=1, head_dim=4, dtype="float32",
    ...               scheme="exchange")
    >>> messages_by_step(causal, 1, "forward")[0]
    ({}, {0: 128})
    """
    steps: list[tuple[Messages, Messages]] = []
    for step in plan.steps(rank, direction):
        messages = messages_of(step, rank)
        sends, receives = (
            {peer: sum(t.piece.num_bytes(plan.sizes) for t in transfers) for peer, transfers in table.items()}
            for table in (messages.sends, messages.receives)
        )
        steps.append((sends, receives))
    return steps


class BareMessages:
    """The messages of a rank's steps, one step after another, without computing anything."""

    def __init__(self, steps: Sequence[tuple[Messages, Messages]], group: dist.ProcessGroup, device: str) -> None:
        self.group, self.steps = group, steps
        most = max((size for step in steps for table in step for size in table.values()), default=1)
        self.outgoing = torch.zeros(most, dtype=torch.uint8, device=device)
        self.incoming = {
            peer: torch.zeros(most, dtype=torch.uint8, device=device) for _, receives in steps for peer in receives
        }

    def run(self) -> None:
        size, me = self.group.size(), self.group.rank()
        for sends, receives in self.steps:
            lists: dict[int, list[dist.P2POp]] = {}
            for kind, table, sign in ((dist.isend, sends, 1), (dist.irecv, receives, -1)):
                for peer, num_bytes in table.items():
                    memory = self.outgoing if sign == 1 else self.incoming[peer]
                    op = dist.P2POp(kind, memory[:num_bytes], group=self.group, group_peer=peer)
                    # Both ends put a message into the list that its distance gives, so lists match.
                    lists.setdefault((sign * (peer - me) % size - 1) // (MAX_BATCH // 2), []).append(op)
            for number in sorted(lists):
                for work in dist.batch_isend_irecv(lists[number]):
                    work.wait()


class LaunchCounter(TorchDispatchMode):
    """Count operators that launch a kernel on a device, copies to it, and operators that wait for it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.launches = self.copies = self.waits = 0
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in WAITS and self.device in _devices((args, kwargs)):
            self.waits += 1
            self.waited.append(name)
        result = func(*args, **kwargs)
        if func.is_view or name in VIEWS or name in ALLOCATIONS or name in WAITS:
            return result
        devices = _devices((args, kwargs, result))
        if name in ("_to_copy", "copy_") and len(devices) > 1:
            self.copies += 1
            self.waited.append("copy")
        elif self.device in devices:
            self.launches += 1
        return result


class MemoryLedger(TorchDispatchMode):
    """Count the bytes of all tensors that were made and are alive, and their peak, also inside our own operators."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.held = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace == "longspan" and name in OWN_OPERATORS:
            with self:
                result = OWN_OPERATORS[name](*args, **(kwargs or {}))
        else:
            result = func(*args, **(kwargs or {}))
        self.note(result)
        return result

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
    """Return all tensors in nested arguments."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [t for inner in value for t in _tensors(inner)] if isinstance(value, list | tuple) else []


def _devices(value: Any) -> set[str]:
    return {tensor.device.type for tensor in _tensors(value)}
