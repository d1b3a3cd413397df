"""The attention of one rank as `torch.library` operators: compiled graphs, checkpointing and autograd see plain ops.

An operator takes strings and numbers beside tensors, so plans and groups go by name: a plan by its fingerprint, which
every call makes known here before it runs, a group by the name PyTorch gave it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.execution import _torch
from longspan.execution.agreement import Record, record_of
from longspan.execution.backward import Backward
from longspan.execution.forward import Forward
from longspan.execution.kernels import kernel_named
from longspan.execution.members import Call, members_of, told
from longspan.execution.runner import Job
from longspan.execution.safety import Safety, safety
from longspan.execution.scores import Scoring
from longspan.execution.transports import Loopback, ProcessGroup, Program
from longspan.schedules.plan import Plan

MAX_PLANS = 256
MAX_OPAQUE = 64
_plans: dict[str, Plan] = {}
"""A lookup from names to values: it changes no result. The oldest of very many are forgotten."""


_numbers: WeakKeyDictionary[Plan, int] = WeakKeyDictionary()
_count = count()
_scorings: WeakValueDictionary[str, Scoring] = WeakValueDictionary()
"""As above, for functions of scores. A call keeps its own alive until its backward has run."""


def known_scoring(scoring: Scoring | None) -> str:
    """The name under which operators find what happens to scores; "" for nothing."""
    if scoring is None:
        return ""
    _scorings[str(id(scoring))] = scoring
    return str(id(scoring))


def known(plan: Plan) -> str:
    """The name under which operators find the plan."""
    name = plan.fingerprint
    if not plan.mask.is_structured:  # a fingerprint samples a function; here it must be this very one
        name += f"#{_numbers.setdefault(plan, next(_count))}"
    return _remembered(name, plan)


def _remembered(name: str, plan: Plan) -> str:
    _plans[name] = _plans.pop(name, plan)
    if len(_plans) > MAX_PLANS:
        del _plans[next(iter(_plans))]
    opaque = [other for other in _plans if "#" in other] if "#" in name else []
    if len(opaque) > MAX_OPAQUE:  # their functions may hold large tensors
        del _plans[opaque[0]]
    return name


def plan_named(name: str) -> Plan:
    """The plan that was made known under this name."""
    if name not in _plans:
        raise PlanError(
            f"plan {name[:12]} is not known in this process, or {MAX_PLANS} others were used since. Call"
            f" longspan.attention with the plan again before running a graph that was compiled with it."
        )
    return _plans[name]


def _run(program: Program[Any], group: str, call: Call) -> Any:
    with torch.autocast(call.device.type, enabled=False):  # it would narrow the products of float32 inside
        if not group:
            return Loopback().run([program])[0]
        with members_of(_torch.group_named(group)).call(call) as running:
            return ProcessGroup(running).run(program)


def _settings(group: str, *, backward: bool = False) -> Safety:
    """How safely to run. Read when the operator runs: compiled code keeps no settings of its compilation."""
    if not group:
        return Safety()
    members = members_of(_torch.group_named(group))
    if not backward:
        members.settings = safety(members.settings)
    return members.settings or safety()


def _call(job: Job, direction: str, device: torch.device, safety: Safety, record: Record | None = None) -> Call:
    steps = job.plan.steps(job.rank, direction)
    return Call(job.plan.fingerprint, direction, len(steps), job.dtype, device, safety, record)


def _apart(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, none of them in memory of another or of an input: dk and dv may come from one message."""
    taken = {t.untyped_storage().data_ptr() for t in inputs}
    made: list[Tensor] = []
    for result in results:
        result = result.clone() if result.untyped_storage().data_ptr() in taken else result
        taken.add(result.untyped_storage().data_ptr())
        made.append(result)
    return made


def _scoring(name: str) -> Scoring | None:
    return _scorings[name] if name else None


@torch.library.custom_op("longspan::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    sinks: Tensor | None,
    plan: str,
    group: str,
    rank: int,
    kernel: str,
    scale: float,
    scoring: str,
    sums: bool,
    saves: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output and lse of the rank's rows, and what its backward needs of other ranks' rows."""
    job = Job(plan_named(plan), rank, kernel_named(kernel), scale, q.dtype, _scoring(scoring), sinks)
    job.plan.mask.read_anew()
    settings = _settings(group)
    record = record_of(job.plan, q.device, scale, job.scoring, sinks, sums, saves, settings) if group else None
    call = _call(job, "forward", q.device, settings, record)
    out, lse, kept = _run(Forward(job, q, k, v, captured).program(saves=saves), group, call)
    out, lse = _apart((out.contiguous(), lse.contiguous()), (q, k, v))
    return out, lse, kept


@attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, captured: Any, sinks: Any, plan: str, group: str, rank: int, *rest: Any
) -> tuple[Tensor, Tensor, list[Tensor]]:
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    made = plan_named(plan)
    kept = made.kept(rank) if rest[-1] else ()
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=wide),
        [q.new_empty(piece.num_bytes(made.sizes), dtype=torch.uint8) for piece in kept],
    )


@torch.library.custom_op("longspan::attention_backward", mutates_args=())
def attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    kept: list[Tensor],
    plan: str,
    group: str,
    rank: int,
    kernel: str,
    scale: float,
    scoring: str,
    sums: bool,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Gradients of the rank's rows, of captured tensors and, last, of the sinks."""
    with told(_torch.group_named(group)) if group else nullcontext():
        # Fused kernels take the output and work out delta themselves; a gradient of lse changes delta alone.
        chosen = kernel_named(kernel if dlse is None else "reference")
        functions = _scoring(scoring)
        if functions is not None:
            functions.check_unchanged()
        job = Job(plan_named(plan), rank, chosen, scale, q.dtype, functions, sinks)
        job.plan.mask.check_as_read()
        backward = Backward(job, q, k, v, out, lse, dout, dlse, kept, captured)
        call = _call(job, "backward", q.device, _settings(group, backward=True))
        dq, dk, dv = _apart(_run(backward.program(), group, call), (dout, q, k, v, out, lse, *kept))
        shared = backward.shared_gradients()
        if sums and group and shared:
            shared = _summed(shared, group, call)
        return dq, dk, dv, [t.to(like.dtype) for t, like in zip(shared, _shared(captured, sinks), strict=True)]


def _shared(captured: list[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """What every rank has a copy of."""
    return [*captured, *([] if sinks is None else [sinks])]


def _summed(gradients: list[Tensor], group: str, call: Call) -> list[Tensor]:
    """Added up over the group, in one message."""
    flat = torch.cat([t.flatten() for t in gradients])
    with members_of(_torch.group_named(group)).call(call) as running:
        running.all_reduce(flat)
    parts = flat.split([t.numel() for t in gradients])
    return [part.view(t.shape).clone() for part, t in zip(parts, gradients, strict=True)]


@attention_backward.register_fake
def _(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, captured: Any, sinks: Any, *_: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, [t.new_empty(t.shape) for t in _shared(captured, sinks)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, list[Tensor]]) -> None:
    q, k, v, captured, sinks, *ctx.names, _ = inputs
    out, lse, kept = output
    ctx.scoring = _scorings.get(ctx.names[5])  # both kept alive until backward has run
    ctx.plan = _plans[ctx.names[0]]
    ctx.reads = ctx.plan.mask.last_reads
    ctx.num_captured, ctx.has_sinks = len(captured), sinks is not None
    ctx.save_for_backward(q, k, v, *_shared(captured, sinks), out, lse, *kept)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _kept: Any) -> tuple[Any, ...]:
    q, k, v, *rest = ctx.saved_tensors
    _remembered(ctx.names[0], ctx.plan)
    if ctx.reads and not torch.compiler.is_compiling():  # compiled, only the operator looks
        ctx.plan.mask.check_as_read(ctx.reads)
    captured, rest = rest[: ctx.num_captured], rest[ctx.num_captured :]
    sinks = rest.pop(0) if ctx.has_sinks else None
    out, lse, *kept = rest
    if dout is None:
        dout = torch.zeros_like(out)
    *gradients, shared = attention_backward(dout, dlse, q, k, v, captured, sinks, out, lse, kept, *ctx.names)
    dsinks = shared.pop() if ctx.has_sinks else None
    return (*gradients, shared, dsinks, *[None] * 8)


attention.register_autograd(_backward, setup_context=_setup)
