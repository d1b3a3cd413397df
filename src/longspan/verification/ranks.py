"""Run the user's call on this rank, and combine the results of all ranks.

Ranks exchange tensors of known shapes: first a row of integers per rank, so that no rank waits for a tensor that
another rank does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.planning.plan import Plan
from longspan.scoring.biases import Extras
from longspan.testing import run_loopback
from longspan.training import BatchError, check_same, gather_outputs
from longspan.training.groups import message_device, process_group
from longspan.verification.report import Finding

# -- All ranks of a plan in one process, as one differentiable function of whole tensors -------------------------------


def loopback_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Plan,
    *,
    scale: float | None = None,
    kernel: str = "auto",
    sinks: Tensor | None = None,
    **extras: Any,
) -> Tensor:
    """See `longspan.verification.loopback_attention`."""
    asked = Extras(**extras)
    scoring = asked.scoring(q, plan) if asked.any() else None
    captured = [*(() if scoring is None else scoring.captured), *([] if sinks is None else [sinks])]
    options = {"scale": scale, "kernel": kernel, "sinks": sinks, "extras": asked if asked.any() else None}
    return _Loopback.apply(plan, options, q, k, v, *captured)  # type: ignore[return-value]


class _Loopback(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: Plan, options: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, *rest: Tensor
    ) -> Tensor:
        ctx.plan, ctx.options, ctx.num_rest = plan, options, len(rest)
        ctx.save_for_backward(q, k, v)
        nothing = q.new_zeros((*q.shape[:3], v.shape[3]))
        return run_loopback(plan, q, k, v, nothing, **options)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        # A loopback runs both directions at once: forward again costs little at the sizes that are verified.
        q, k, v = ctx.saved_tensors
        results = run_loopback(ctx.plan, q, k, v, grads[0].contiguous(), **ctx.options)
        return None, None, *results[2:5], *results[5 : 5 + ctx.num_rest]


# -- The call on this rank ---------------------------------------------------------------------------------------------


SEQ_DIM = 2


@dataclass(frozen=True)
class RankView:
    """All ranks of a layout: one per process of a group, or all of them in this process (no group)."""

    layout: Layout
    group: dist.ProcessGroup | None

    @staticmethod
    def of(layout: Layout, group: Any) -> RankView:
        members = None if group is None else process_group(group, "verify", real=True)
        if members is not None and members.size() != layout.world_size:
            raise PlanError(
                f"verify got {layout} and a group of {members.size()} ranks. Plan for the group that holds the"
                f" sequence, or pass that group."
            )
        return RankView(layout, members)

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def shard(self, x: Tensor, dim: int = SEQ_DIM) -> Tensor:
        """This rank's part; without a group, all of it."""
        return x if self.group is None else self.layout.shard(x, self.rank, dim)

    def slots_of(self, rank: int) -> int:
        """How many tokens a rank's tensor has, padding included."""
        if self.group is None:
            return self.layout.seq_len
        return self.layout.num_slots(rank)

    def gathered(self, x: Tensor, dim: int = SEQ_DIM) -> Tensor:
        """The whole tensor, in global order, on every rank."""
        x = x.detach()
        if self.group is None:
            return x
        return _not_none(gather_outputs(x.to(message_device(self.group)), self.layout, self.group, dim)).to(x.device)

    def each(self, x: Tensor) -> list[Tensor]:
        """Every rank's tensor; all have one shape."""
        if self.group is None:
            return [x.detach()]
        mine = x.detach().contiguous().to(message_device(self.group))
        parts = [torch.empty_like(mine) for _ in range(self.group.size())]
        dist.all_gather(parts, mine, group=self.group)
        return [part.to(x.device) for part in parts]

    def summed(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        if self.group is None:
            return x.detach()
        total = x.detach().clone().contiguous().to(message_device(self.group))
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def numbers(self, row: Sequence[int]) -> list[list[int]]:
        """Every rank's row of whole numbers."""
        return [part.tolist() for part in self.each(torch.tensor(row, dtype=torch.int64))]

    def any(self, flag: bool) -> list[int]:
        """Ranks on which the flag is set."""
        return [rank for rank, (is_set,) in enumerate(self.numbers([int(flag)])) if is_set]


def _not_none(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


@dataclass(frozen=True)
class Found:
    """What the call gave: whole tensors, and shared gradients rank by rank."""

    tensors: dict[str, Tensor]
    shared: dict[str, list[Tensor]]
    missing: dict[str, tuple[int, ...]]
    """Tensors that got no gradient at all, and on which ranks."""


def same_data(values: dict[str, Any], ranks: RankView) -> Finding | None:
    """A finding if ranks were fed different data."""
    if ranks.group is None:
        return None
    try:
        check_same(values, ranks.group)
    except BatchError as error:
        return Finding(
            "the input", "is not the same on all ranks", torch.inf, 0.0, (), (), None,
            "ranks fed different data", str(error)[:1].upper() + str(error)[1:],
        )  # fmt: skip
    return None


def run_call(
    fn: Callable[..., Any], ranks: RankView, tensors: Sequence[Tensor], shared: dict[str, Tensor], width: int
) -> Found | Finding:
    """The call's output and gradients for whole q, k, v and dout; `width` is the number of features of the output."""
    q, k, v = (ranks.shard(t).detach().requires_grad_() for t in tensors[:3])
    dout = ranks.shard(tensors[3])
    result = fn(q, k, v)
    out, lse = result if isinstance(result, tuple) else (result, None)
    problem = _shape_problem(ranks, out, (*q.shape[:3], width))
    if problem is not None:
        return problem
    leaves = [q, k, v, *shared.values()]
    grads: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if out.requires_grad:
        wanted = [t for t in leaves if t.requires_grad]
        got = iter(torch.autograd.grad(out, wanted, dout.to(out.dtype), allow_unused=True))
        grads = tuple(next(got) if t.requires_grad else None for t in leaves)
    names = ("dq", "dk", "dv", *shared)
    flags = ranks.numbers([int(g is None) for g in grads])
    missing = {
        name: tuple(r for r, row in enumerate(flags) if row[i])
        for i, name in enumerate(names)
        if any(f[i] for f in flags)
    }
    filled = [torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)]
    whole = {"out": ranks.gathered(out)}
    if isinstance(lse, Tensor) and not ranks.any(lse.shape != q.shape[:3]):
        whole["lse"] = ranks.gathered(lse)
    whole.update({name: ranks.gathered(g) for name, g in zip(names[:3], filled, strict=False)})
    each = {name: ranks.each(g) for name, g in zip(names[3:], filled[3:], strict=True)}
    return Found(whole, each, missing)


def _shape_problem(ranks: RankView, out: Any, wanted: tuple[int, ...]) -> Finding | None:
    shape = tuple(out.shape) if isinstance(out, Tensor) else ()
    rows = ranks.numbers([int(shape != wanted), *[*shape, -1, -1, -1, -1][:4]])
    wrong = [rank for rank, row in enumerate(rows) if row[0]]
    if not wrong:
        return None
    got = tuple(n for n in rows[wrong[0]][1:] if n >= 0)
    cause, hint = "output of another shape", "Return the output (batch, heads, local tokens, features)."
    if len(got) == 4 and (got[0], got[2], got[1], got[3]) == wanted:
        cause, hint = "heads and tokens swapped", "The output has tokens before heads: transpose dims 1 and 2."
    elif len(got) == 4 and got[2] == ranks.layout.seq_len and ranks.size > 1:
        cause, hint = "whole output returned", "Every rank returns its own rows: shard the output with the layout."
    return Finding(
        "out", f"has shape {got} on rank {wrong[0]}, which holds {ranks.slots_of(wrong[0])} tokens",
        torch.inf, 0.0, tuple(wrong), (), None, cause, "No number was compared.", hint,
    )  # fmt: skip


def elsewhere(ranks: list[int]) -> Finding:
    """The finding of a rank that found nothing while others did, so that the verdict is the same on all."""
    return Finding(
        "the comparison", "failed on other ranks", torch.inf, 0.0, tuple(ranks), (), None,
        "machines compute differently", "Ranks compare the same gathered numbers, and not all of them found fault.",
    )  # fmt: skip
