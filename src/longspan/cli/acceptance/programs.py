"""One rank's forward and backward without the others: what it computes, and what its messages are, each alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.kernels import Kernel, choose_kernel, kernel_named
from longspan.planning.plan import Plan
from longspan.planning.steps import MAX_BATCH
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Program
from longspan.run.walk import Job, messages_of

Messages = dict[int, int]
"""Bytes by peer."""


def driven(program: Program[Any], *, zeros: bool = True) -> Any:
    """What the program returns when every message that it waits for is there at once: full of zeros, or of whatever is
    in memory, which costs nothing."""
    arrived: dict[int, Tensor] | None = None
    try:
        while True:
            exchange = program.send(arrived)
            assert exchange is not None
            next(program)
            arrived = dict(exchange.into)
            for message in arrived.values() if zeros and exchange.device.type != "meta" else ():
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
        """With the kernel that `auto` takes here, unless one is given; forward has run, for what backward needs."""
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
        out, lse, kept = driven(Forward(job, q, k, v).program(saves=True))
        return RankPrograms(job, Saved(q, k, v, out, lse, kept), dout)

    def program(self, way: str) -> Program[Any]:
        if way == "forward":
            return Forward(self.job, self.saved.q, self.saved.k, self.saved.v).program(saves=True)
        return Backward(self.job, self.saved, self.dout).program()


def messages_by_step(plan: Plan, rank: int, way: str) -> list[tuple[Messages, Messages]]:
    """What the rank sends and receives in each step.

    >>> from longspan import layouts, masks
    >>> from longspan.api import plan as planned
    >>> made = planned(masks.causal(), layouts.contiguous(8, 2), q_heads=1, kv_heads=1, head_dim=4, dtype="float32",
    ...                scheme="exchange")
    >>> messages_by_step(made, 1, "forward")[0]
    ({}, {0: 128})
    """
    found: list[tuple[Messages, Messages]] = []
    for step in plan.steps(rank, way):
        messages = messages_of(step, rank)
        sends, receives = (
            {peer: sum(t.piece.num_bytes(plan.sizes) for t in transfers) for peer, transfers in table.items()}
            for table in (messages.sends, messages.receives)
        )
        found.append((sends, receives))
    return found


class BareMessages:
    """The messages of a rank's steps alone, one step after another, with nothing computed and nothing in them."""

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
