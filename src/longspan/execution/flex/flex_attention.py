"""PyTorch's flex attention, by its own signature: any device, forward and backward, on one device or under a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.errors import KernelError, PlanError
from longspan.execution.call import Request, attention
from longspan.execution.engine.flat.recorder import Launched
from longspan.execution.engine.forward import Forward
from longspan.execution.engine.runner import Job
from longspan.execution.engine.transports import Loopback
from longspan.execution.fitting import one_device_plan
from longspan.execution.flex.block_masks import check_lengths, mask_of_block_mask
from longspan.execution.inputs import check_inputs
from longspan.execution.kernels import kernel_named
from longspan.execution.kernels.reference import highest
from longspan.execution.scoring.biases import Extras
from longspan.execution.scoring.pipeline import ScoreMod
from longspan.masks import Mask, full
from longspan.masks.bands import rectangles
from longspan.schedules.plan import Plan
from longspan.span import shortened


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
    plan: Plan | None = None,
    group: Any = None,
    captured_grads: str = "sum",
    name: str = "",
) -> Any:
    """See `longspan.flex_attention`."""
    check_inputs(query, key, value, scale, name=name)
    _check(query, key, value, enable_gqa, return_lse, return_aux, kernel_options)
    extras = None if score_mod is None else Extras(score_mod)
    wants_max = return_aux is not None and return_aux.max_scores
    if plan is None:
        q, k, v, plan_or_mask = _whole(query, key, value, block_mask)
    else:
        _check_plan(plan, block_mask, wants_max)
        q, k, v, plan_or_mask = query, key, value, plan
    asked = Request(plan_or_mask, group, scale, True, extras=extras, captured_grads=captured_grads, name=name)
    out, lse = attention(q, k, v, asked)
    out, lse = out.narrow(2, 0, query.shape[2]), lse.narrow(2, 0, query.shape[2])
    if return_aux is None:
        return (out, lse) if return_lse else out
    top = None
    if wants_max:
        assert isinstance(plan_or_mask, Mask)
        top = _max_scores(q, k, v, plan_or_mask, scale, extras).narrow(2, 0, query.shape[2])
    return out, _aux(lse if return_aux.lse else None, top)


def _aux(lse: Tensor | None, max_scores: Tensor | None) -> Any:
    from torch.nn.attention.flex_attention import AuxOutput

    return AuxOutput(lse=lse, max_scores=max_scores)


def _check(q: Tensor, k: Tensor, v: Tensor, enable_gqa: bool, return_lse: bool, aux: Any, options: Any) -> None:
    if aux is not None and not (hasattr(aux, "lse") and hasattr(aux, "max_scores")):
        raise PlanError(
            f"return_aux = {shortened(aux)} was given. It is torch.nn.attention.flex_attention.AuxRequest(lse=True), or"
            f" None."
        )
    if any(t.ndim != 4 for t in (q, k, v)):
        raise PlanError(
            f"query, key and value have 4 dims (batch, heads, tokens, features), but shapes {tuple(q.shape)},"
            f" {tuple(k.shape)} and {tuple(v.shape)} were given."
        )
    if not enable_gqa and q.shape[1] != k.shape[1]:
        raise PlanError(
            f"query has {q.shape[1]} heads and key {k.shape[1]}. Pass enable_gqa=True if query heads share key/value"
            f" heads."
        )
    if return_lse and aux is not None:
        raise PlanError("return_lse and return_aux were both given. Use return_aux=AuxRequest(lse=True) alone.")
    if options:
        raise KernelError(
            f"kernel_options = {options} tune PyTorch's Triton kernels, which this call does not launch by itself."
            f" Leave them out, or name a kernel with longspan.attention(..., kernel=...)."
        )


def _check_plan(plan: Plan, block_mask: Any, wants_max: bool) -> None:
    if not isinstance(plan, Plan):
        raise PlanError(f"plan = {shortened(plan)} was given. Make one with longspan.plan(mask, layout, ...).")
    if block_mask is not None and block_mask != plan.mask:
        raise PlanError(
            f"block_mask and plan were both given, but the plan was made for {plan.mask}. Its mask is the one that"
            f" counts: leave block_mask out, or plan for that mask."
        )
    if wants_max:
        raise PlanError(
            "max_scores under a plan was asked for: maxima are not sent between ranks. Ask for lse, or leave plan out."
        )


def _whole(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> tuple[Tensor, Tensor, Tensor, Mask]:
    """Tensors of one batch size and one length with a mask that says what was there: padding sees and shows nothing."""
    (batch, heads, num_q), num_kv = q.shape[:3], k.shape[2]
    if k.shape[0] != batch:
        if k.shape[0] != 1:
            raise PlanError(f"query has {batch} batch rows and key {k.shape[0]}. Give key as many, or one for all.")
        k, v = (t.expand(batch, -1, -1, -1) for t in (k, v))
    length = max(num_q, num_kv)
    if block_mask is None:
        mask = full(length)
    elif isinstance(block_mask, Mask):
        mask = block_mask.resized(length)
    else:
        mask = _of_block_mask(block_mask, batch, heads, num_q, num_kv)
    if num_q != num_kv:
        mask = mask & Mask.of_bands(rectangles(0, num_q, 0, num_kv), length, f"{num_q} x {num_kv}")
        q = pad(q, (0, 0, 0, length - num_q))
        k, v = (pad(t, (0, 0, 0, length - num_kv)) for t in (k, v))
    return q, k, v, mask


def _of_block_mask(block_mask: Any, batch: int, heads: int, num_q: int, num_kv: int) -> Mask:
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise PlanError(
            f"block_mask is a BlockMask of PyTorch or a mask of longspan.masks, but {type(block_mask).__name__} was"
            f" given. Wrap a function with masks.from_mask_mod or create_block_mask, a table with masks.from_dense."
        )
    check_lengths(block_mask, (num_q, num_kv), "block_mask", PlanError)
    return mask_of_block_mask(block_mask, batch=batch, heads=heads)


class _MaxScores(Forward):
    """A run on one device that keeps only the highest score of every row."""

    def __init__(self, job: Job, q: Tensor, k: Tensor, v: Tensor, captured: Any) -> None:
        super().__init__(job, q, k, v, captured)
        self.top = torch.full(q.shape[:3], -torch.inf, dtype=job.format.wide, device=q.device)

    def attend(self, launch: Launched, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        work, (batch, heads) = self.work(launch, tensors), (launch.batch, launch.heads)
        part = self.top[batch.start : batch.stop, heads.start : heads.stop]
        for tile in work.tiles:
            at = part[:, :, tile.q0 : tile.q1]
            at.copy_(torch.maximum(at, highest(replace(work, tiles=[tile]))))
            yield at.new_zeros((*at.shape, work.v_BGKE.shape[3])), at  # which nobody looks at


def _max_scores(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, extras: Extras | None) -> Tensor:
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    plan = one_device_plan(*shapes, q.dtype, mask)
    scoring = None if extras is None else extras.scoring(q, plan)
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    job = Job(plan, 0, kernel_named("reference"), scale, q.dtype, scoring)
    with torch.no_grad():
        run = _MaxScores(job, q.detach(), k.detach(), v.detach(), () if scoring is None else scoring.captured)
        Loopback().run([run.program(saves=False)])
    return run.top
