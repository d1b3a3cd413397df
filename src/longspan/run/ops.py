"""The attention of one rank as `torch.library` operators, for compiled graphs, checkpointing and autograd.

Operators take tensors, strings and numbers. A mask or plan is passed as its handle, a tensor with a number, and looked
up when the operator runs; a group is passed by PyTorch's name for it. A forward pass returns a ticket: a tensor with
the number of the context that its backward needs, which lives as long as the ticket's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from math import sqrt
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _torch
from longspan._compile import lookup_value, register_value, run_eagerly
from longspan.derivatives import FirstDerivative, check_derivatives
from longspan.errors import PlanError
from longspan.kernels import Features, Kernel, choose_kernel, full_name, kernel_named, why_not_inside
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.run.agreement import WIDTH, Record
from longspan.run.group import Call, members_of
from longspan.run.halo import HaloTask
from longspan.run.passes import Backward, BackwardWalk, Forward, ForwardWalk, Saved
from longspan.run.program import memory_for
from longspan.run.transports import ProcessGroup, Program, run_alone
from longspan.run.walk import Job, record_once
from longspan.scoring.biases import check_bias
from longspan.scoring.pipeline import Scoring
from longspan.scoring.recorded import Operands, bias_in, scoring_of
from longspan.tile import accumulation_dtype
from longspan.validate import resolve_plan
from longspan.versions import VERSION

# -- Registering operators ---------------------------------------------------------------------------------------------
# `torch.library.custom_op` inspects all arguments several times per call, which takes 0.2 ms of host time. The same
# registrations take 0.05 ms here.


_implementations: dict[Any, Callable[..., Any]] = {}


def _libraries() -> dict[str, torch.library.Library]:
    """Libraries by operator, stored with PyTorch's operators, so that they survive a reload of this module."""
    return vars(torch.ops.longspan).setdefault("_libraries", {})


def define_operator(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Register an operator for all devices, with the schema of `run`.

    `run` must not modify its arguments nor return views of them; `fake` returns results without data.
    """
    schema = torch.library.infer_schema(run, mutates_args=())
    short = name.partition("::")[2]
    if name in _libraries():
        _torch.destroy(_libraries().pop(name))
    library = _libraries()[name] = torch.library.Library("longspan", "FRAGMENT")
    library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag, *_torch.CUDAGRAPH_UNSAFE))

    def called(*args: Any) -> Any:
        with _torch.as_in_eager():
            return run(*args)

    library.impl(short, run_eagerly(called), "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    operator = getattr(torch.ops.longspan, short).default
    _implementations[operator] = run
    return operator


def implementation_of(operator: Any, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """Return the implementation of an operator if no mode or subclass observes it, else the operator.

    PyTorch's dispatcher takes 20 us of host time to pass arguments from Python to Python.
    """
    run = _implementations.get(operator)  # None after this module was reloaded
    return run if run is not None and _torch.is_unobserved(tensors) else operator


def differentiate(operator: Any, run: Callable[..., Any]) -> None:
    """Register the autograd implementation of an operator."""
    _libraries()[operator.name()].impl(operator, run, "Autograd")


# -- The context that a forward pass leaves for its backward, and its ticket -------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class ScoreProgram:
    """Score functions as compiled code passes them: a text (see `ScoreText`) and the numbers in it. Tensors are
    arguments of both operators, because a graph reuses its memory."""

    text: str = ""
    numbers: Sequence[int] = ()
    reals: Sequence[float] = ()

    def scoring(self, captured: Sequence[Tensor], constants: Sequence[Tensor], like: Tensor, plan: Plan) -> Scoring:
        operands = Operands(captured, constants, self.numbers, self.reals)
        scoring = scoring_of(self.text, operands, like)
        if (bias := bias_in(self.text, operands)) is not None:
            check_bias(bias, plan.sizes.batch, plan.sizes.q_heads, plan.layout.seq_len)
        return scoring


EMPTY_SCORE_PROGRAM = ScoreProgram()


class SavedRemoteKV(list[Tensor]):
    """Rows of other ranks that a plan keeps from forward to backward."""


@dataclass(eq=False)  # not frozen: creating a frozen dataclass takes three times as long
class ForwardContext:
    """The context of a forward pass for its backward."""

    job: Job
    group: str
    number: int
    """Number of the call over the group; 0 without a group."""
    name: str
    reduce_shared_grads: bool
    kept: ref[SavedRemoteKV]
    scores: ScoreProgram = EMPTY_SCORE_PROGRAM


class _TicketMemory(bytearray):
    """Memory of a ticket. Tensors that share it keep the context alive."""

    held: tuple[object, ...]


def create_ticket(context: object, *more: object) -> Tensor:
    """Return a ticket that keeps the context of a forward pass alive, and `more` with it."""
    memory = _TicketMemory(register_value(context).to_bytes(8, "little"))
    memory.held = context, *more
    return torch.frombuffer(memory, dtype=torch.int64)


def context_of(ticket: Tensor, kind: type[T]) -> T:
    """Return the context of a forward pass by its ticket."""
    context = lookup_value(int(ticket))
    if not isinstance(context, kind):
        raise PlanError(
            "The forward pass of this backward pass is not known in this process any more: tensors saved by compiled"
            " code were copied, and the originals freed. Compile without hooks that copy saved tensors"
            " (torch.autograd.graph.save_on_cpu, saved_tensors_hooks), or let them pass integer tensors on."
        )
    return context


# -- The record of a call that ranks compare ---------------------------------------------------------------------------


MAX_RECORDS = 64
_records: WeakKeyDictionary[Plan, dict[tuple[str, ...], Record]] = WeakKeyDictionary()
"""Records of a plan, by the fields that may differ between its calls."""


def create_record(job: Job | HaloTask, device: torch.device, sums: bool | None, name: str) -> Record:
    """Return the record of a call that ranks compare; `sums` is None if no gradients are needed."""
    plan = job.plan
    kernel = scale = scores = sinks = "none"
    if isinstance(job, HaloTask):
        scheme = f"convolution of width {job.conv.width}"
    else:
        scheme, scale = plan.scheme.name + (", keep" if plan.keep else ""), repr(job.scale)
        kernel = full_name(job.kernel.name)
        if job.scoring is not None:
            captured = [tuple(t.shape) for t in job.scoring.captured]
            scores = f"{len(job.scoring.functions)} of them, captured {captured}, {job.scoring.dropout}"
        if job.sinks is not None:
            sinks = f"{tuple(job.sinks.shape)}"
    gradients = "not wanted" if sums is None else "sum" if sums else "share"
    fingerprint = plan.fingerprint[: WIDTH - 1]
    name = repr(name) if name else "none"
    fields = fingerprint, device.type, kernel, scheme, scale, scores, sinks, gradients, name
    records = _records.setdefault(plan, {})
    record = records.get(fields)
    if record is None:
        while len(records) >= MAX_RECORDS:
            del records[next(iter(records))]
        parts = plan.mask.fingerprint[:16], plan.layout.fingerprint[:16], plan.sizes.text(), plan.dtype
        record = records[fields] = Record(VERSION, str(torch.__version__), fingerprint, *parts, *fields[1:])
    return record


# -- Forward and backward ----------------------------------------------------------------------------------------------


FORM = 3
"""Version of both operators' signatures. PyTorch caches compiled code on disk by the arguments of the forward. Change
it when the signature of the backward changes, or cached code of an older version would call it."""


def rank_and_size(group: str) -> tuple[int, int] | None:
    """Return (rank, size) of this process in the group; None without a group."""
    if not group:
        return None
    process_group = _torch.group_named(group)
    return process_group.rank(), process_group.size()


def _value_of(handle: Tensor) -> Mask | Plan:
    value = lookup_value(int(handle))
    if not isinstance(value, (Mask, Plan)):
        raise PlanError(
            "The mask or plan of this call was freed: compiled code holds only its handle. Keep a reference to it as"
            " long as the call runs."
        )
    return value


_NULL_CONTEXT = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Make this device current, which NCCL and compiled kernels rely on, and disable autocast, which would round
    float32 products."""
    if device.index is None and not torch.is_autocast_enabled(device.type):
        return _NULL_CONTEXT
    return _on_device(device)


@contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    current = _NULL_CONTEXT if device.index is None else torch.accelerator.device_index(device.index)
    is_autocast = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if is_autocast else _NULL_CONTEXT, current:
        yield


def run_program(program: Program[Any], group: str, call: Call) -> tuple[Any, int]:
    """Run a program; return its result and the number of the call over the group."""
    with on_device(call.device):
        if not group:
            return run_alone(program), 0
        process_group = _torch.group_named(group)
        number = members_of(process_group).begin(call)
        return ProcessGroup(process_group, call, number).run(program), number


def clone_if_aliased(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Clone results that share memory with an input or with each other, as dk and dv from one message do."""
    storages: set[int] = set()
    for tensor in inputs:
        storages.add(tensor.untyped_storage().data_ptr())
    separate: list[Tensor] = []
    for result in results:
        storage = result.untyped_storage().data_ptr()
        separate.append(result.clone() if storage in storages else result)
        storages.add(storage)
    return separate


def kernel_for(plan: Plan, kernel: str, q: Tensor, k: Tensor, v: Tensor, functions: Scoring | None) -> Kernel:
    """Return the kernel of a call with a plan and score functions."""
    drops = functions is not None and functions.dropout is not None
    features = Features(not plan.is_structured, functions is not None, drops)
    return kernel_named(choose_kernel(kernel, q, k, v, features, lambda: why_not_inside(plan.mask, functions, q)))


def run_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    sinks: Tensor | None,
    handle: Tensor,
    group: str,
    kernel: str,
    scale: float | None,
    scoring: int,
    reduce_shared_grads: bool,
    needs_backward: bool,
    needs_shared_grads: bool,
    name: str,
    form: int,
    text: str = "",
    numbers: list[int] | None = None,
    reals: list[float] | None = None,
    num_constants: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return output and lse of the rank's rows, and the ticket of this pass.

    Shared gradients are those of sinks and captured tensors, which all ranks hold. Score functions are passed by
    number, or in compiled code as a text with the numbers that it reads. The last `num_constants` captured tensors get
    no gradient.
    """
    assert form == FORM, "compiled code of another version"
    scores = ScoreProgram(text, tuple(numbers or ()), tuple(reals or ())) if text else EMPTY_SCORE_PROGRAM
    captured, constants = _split_constants(captured, num_constants) if num_constants else (captured, [])
    place = rank_and_size(group) if group else None
    plan = resolve_plan(_value_of(handle), q, k, v, place)
    functions: Scoring | None = None
    if text:
        functions = scores.scoring(captured, constants, q, plan)
    elif scoring:
        functions = lookup_value(scoring)
    chosen = kernel_for(plan, kernel, q, k, v, functions)
    scale = 1 / sqrt(q.shape[3]) if scale is None else scale
    job = Job(plan, place[0] if place else 0, chosen, scale, q.dtype, functions, sinks)
    plan.mask.check_unchanged()
    program = Forward(job, q, k, v, captured).program(saves=needs_backward)
    number = 0
    if group:
        record = create_record(job, q.device, reduce_shared_grads if needs_backward else None, name)
        call = Call(plan.fingerprint, "forward", q.device, record, name)
        (out, lse, kept), number = run_program(program, group, call)
    else:
        with on_device(q.device):
            out, lse, kept = run_alone(program)
    out, lse = clone_if_aliased((out.contiguous(), lse.contiguous()), (q, k, v))
    if not needs_backward:
        return out, lse, torch.empty(1, dtype=torch.int64)
    saved = SavedRemoteKV(kept)
    if text:
        job = replace(job, scoring=None)
    job = job if job.sinks is None else replace(job, sinks=None)
    context = ForwardContext(job, group, number, name, reduce_shared_grads, ref(saved), scores)
    return out, lse, create_ticket(context, saved)


def prepare(plan: Plan, rank: int, device: torch.device, kernel: str, *, backward: bool) -> None:
    """Do what the first call with a plan does on a rank before its messages: record programs, copy their tables."""
    q, k, v = zeros_for(plan, rank, device)
    chosen = kernel_for(plan, kernel, q, k, v, None)
    plan.mask.check_unchanged()
    prepare_job(Job(plan, rank, chosen, 1.0, q.dtype), device, backward=backward)


def zeros_for(plan: Plan, rank: int, device: torch.device) -> list[Tensor]:
    """Return a rank's q, k and v, all zeros: one number each, seen as tensors of the plan's shapes."""
    sizes, zero = plan.sizes, torch.zeros((), dtype=getattr(torch, plan.dtype), device=device)
    kinds = (sizes.q_heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim)
    tokens = int(plan.layout.num_slots(rank))
    return [zero.expand(sizes.batch, heads, tokens, dim) for heads, dim in kinds]


def prepare_job(job: Job, device: torch.device, *, backward: bool) -> None:
    by = id(job.kernel), job.kernel
    memory_for(record_once(job, "forward", by, backward, lambda: ForwardWalk(job, saves=backward)), device)
    if backward:
        memory_for(record_once(job, "backward", by, False, lambda: BackwardWalk(job)), device)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, _captured: Any, _sinks: Any, handle: Tensor, group: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if type(handle) is Tensor:  # fake tensors outside of tracing: check them, too
        resolve_plan(_value_of(handle), q, k, v, rank_and_size(group))
    return results_like(q, v)


def results_like(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, lse and ticket of a forward pass without contents."""
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=accumulation_dtype(q.dtype)),
        torch.empty(1, dtype=torch.int64, device="cpu"),
    )


def run_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    captured: list[Tensor],
    sinks: Tensor | None,
    out: Tensor,
    lse: Tensor,
    ticket: Tensor,
    kept: list[Tensor],
    plain: bool,
    num_constants: int = 0,
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    """Return gradients of q, k and v, and of captured tensors with the sinks last.

    `kept` are rows that the plan keeps, if autograd saved them; compiled code leaves them with the ticket. Compiled
    code also needs `plain` (contiguous) results, because it fixes strides in advance.
    """
    forward = context_of(ticket, ForwardContext)
    captured, constants = _split_constants(captured, num_constants)
    kept = kept or forward.kept() or []
    forward.job.plan.mask.check_unchanged()
    job = forward.job if sinks is None else replace(forward.job, sinks=sinks)
    if forward.scores.text:
        job = replace(job, scoring=forward.scores.scoring(captured, constants, q, job.plan))
    if dlse is not None and q.dtype == torch.float16:
        # Fused kernels compute delta from an output that `Backward` makes up, which float16 may not have room for.
        job = replace(job, kernel=kernel_named("reference"))
    with on_device(q.device):
        backward = Backward(job, Saved(q, k, v, out, lse, kept, captured), dout, dlse)
    if forward.group:
        call = Call(job.plan.fingerprint, "backward", q.device, name=forward.name, forward=forward.number)
        gradients, _ = run_program(backward.program(), forward.group, call)
    else:
        with on_device(q.device):
            gradients = run_alone(backward.program())
    gradients = [t.contiguous() for t in gradients] if plain else gradients
    dq, dk, dv = clone_if_aliased(gradients, (dout, q, k, v, out, lse, *kept))
    shared = backward.shared_gradients()
    if forward.reduce_shared_grads and forward.group and shared:
        flat = torch.cat([t.flatten() for t in shared])
        dist.all_reduce(flat, group=_torch.group_named(forward.group))
        parts = flat.split([t.numel() for t in shared])
        shared = [part.view(t.shape).clone() for part, t in zip(parts, shared, strict=True)]
    return dq, dk, dv, [t.to(like.dtype) for t, like in zip(shared, _shared_tensors(captured, sinks), strict=True)]


def _split_constants(captured: list[Tensor], num_constants: int) -> tuple[list[Tensor], list[Tensor]]:
    at = len(captured) - num_constants
    return captured[:at], captured[at:]


def _shared_tensors(captured: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """Return the tensors that all ranks hold."""
    return [*captured, *([] if sinks is None else [sinks])]


def _fake_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, captured: Any, sinks: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    captured, _ = _split_constants(captured, rest[5] if len(rest) > 5 else 0)  # PyTorch omits default arguments
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, [t.new_empty(t.shape) for t in _shared_tensors(captured, sinks)]


attention = define_operator("longspan::attention", run_forward, _fake_forward)
attention_backward = define_operator("longspan::attention_backward", run_backward, _fake_backward)


Run = Callable[..., Any]
"""An operator, or its implementation."""
NUM_CONSTANTS = 13
"""Index of `num_constants` among the arguments of the operator after `sinks`; PyTorch omits default arguments."""


class _Attention(FirstDerivative):
    """The forward operator with the backward operator as its gradient."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: Run, others: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, sinks: Any, *captured: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _torch.below_autograd():
            out, lse, ticket = run(q, k, v, list(captured), sinks, *others)
        kept: Sequence[Tensor] = ()
        ctx.is_traced = type(ticket) is not Tensor
        if not ctx.is_traced:
            ctx.forward_pass = context_of(
                ticket, ForwardContext
            )  # hooks may copy the ticket, which keeps nothing alive
            kept = ctx.forward_pass.kept() or ()
        ctx.num_kept, ctx.has_sinks = len(kept), sinks is not None
        ctx.num_constants = others[NUM_CONSTANTS] if len(others) > NUM_CONSTANTS else 0
        ctx.save_for_backward(q, k, v, out, lse, ticket, *kept, *_shared_tensors(captured, sinks))
        ctx.mark_non_differentiable(ticket)
        ctx.set_materialize_grads(False)
        return out, lse, ticket

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _ticket: Any) -> tuple[Any, ...]:  # type: ignore[override]
        q, k, v, out, lse, ticket, *rest = ctx.saved_tensors
        kept, captured = rest[: ctx.num_kept], rest[ctx.num_kept :]
        sinks = captured.pop() if ctx.has_sinks else None
        if dout is None:
            dout = torch.zeros_like(out)
        run = implementation_of(attention_backward, dout, dlse, q, k, v, out, lse, sinks, *captured)
        saved = captured, sinks, out, lse, ticket, kept
        with _torch.below_autograd() if run is not attention_backward else nullcontext():
            *gradients, shared = run(dout, dlse, q, k, v, *saved, ctx.is_traced, ctx.num_constants)
        dsinks = shared.pop() if ctx.has_sinks else None
        return (None, None, *gradients, dsinks, *shared, *(None,) * ctx.num_constants)


def attend(
    q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], sinks: Tensor | None, *others: Any, run: Run = attention
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the operator, or its implementation, with autograd."""
    check_derivatives(q, k, v, sinks, *captured)
    needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
    if not needs_grad and (captured or sinks is not None):
        needs_grad = any(t.requires_grad for t in _shared_tensors(captured, sinks))
    if needs_grad and torch.is_grad_enabled():
        return _Attention.apply(run, others, q, k, v, sinks, *captured)  # type: ignore[return-value]
    with _torch.below_autograd():
        return run(q, k, v, captured, sinks, *others)


differentiate(attention, attend)
