"""The attention of one rank as `torch.library` operators, which compiled graphs, checkpointing and autograd can see.

An operator takes strings and numbers besides tensors. A mask or plan is passed as its handle, a tensor with a number,
and is looked up when the operator runs; a group is passed by the name that PyTorch gave it. A forward pass returns a
ticket, a tensor with the number of what its backward needs, which lives as long as the ticket's memory does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from math import sqrt
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from longspan import _torch
from longspan._compile import found_under, number_of, untraced
from longspan.errors import PlanError
from longspan.kernels import Features, choose_kernel, kernel_named, why_not_inside
from longspan.kernels.cuda_flash import implementation
from longspan.masks import Mask
from longspan.masks.captures import Reads
from longspan.planning.plan import Plan
from longspan.run.agreement import WIDTH, Record
from longspan.run.group import Call, Safety, members_of, safety, told
from longspan.run.halo import HaloTask
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import ProcessGroup, Program, run_alone
from longspan.run.walk import Job, Task
from longspan.scoring.biases import check_bias
from longspan.scoring.pipeline import Scoring
from longspan.scoring.recorded import Operands, bias_in, scoring_of
from longspan.tile import wide
from longspan.validate import fitting_plan
from longspan.versions import VERSION

# -- Registering operators ---------------------------------------------------------------------------------------------
# `torch.library.custom_op` inspects all arguments several times in every call, which takes 0.2 ms of host time. The
# functions here make the same registrations and take 0.05 ms.


_runs: dict[Any, Callable[..., Any]] = {}
"""What operators run, by operator."""


def _library(name: str, *, anew: bool = False) -> torch.library.Library:
    """The library of one operator. It is kept where PyTorch keeps operators: when modules of ours are imported again (a
    notebook that reloads them), the one of before must go first."""
    kept: dict[str, torch.library.Library] = vars(torch.ops.longspan).setdefault("_libraries", {})
    if anew and name in kept:
        _torch.destroy(kept.pop(name))
    if name not in kept:
        kept[name] = torch.library.Library("longspan", "FRAGMENT")
    return kept[name]


def defined(name: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The operator of this name, for all devices. Its schema is that of `run`, which changes no argument and returns
    nothing that shares memory with one; `fake` makes results without data."""
    schema = torch.library.infer_schema(run, mutates_args=())
    short = name.partition("::")[2]
    library = _library(name, anew=True)
    library.define(short + schema, tags=(torch.Tag.pt2_compliant_tag, *_torch.CUDAGRAPH_UNSAFE))

    def called(*args: Any) -> Any:
        with _torch.as_in_eager():
            return run(*args)

    library.impl(short, untraced(called), "CompositeExplicitAutograd")
    torch.library.register_fake(name, fake, lib=library)
    operator = getattr(torch.ops.longspan, short).default
    _runs[operator] = run
    return operator


def run_of(operator: Any, *tensors: torch.Tensor | None) -> Callable[..., Any]:
    """What to call below autograd: the operator, or, where nobody looks on, what it runs. PyTorch's dispatcher hands
    arguments from Python to Python, which takes 20 us of the host each time."""
    known = operator in _runs  # not after this module was imported again
    return _runs[operator] if known and _torch.is_unobserved(tensors) else operator


def differentiate(operator: Any, run: Callable[..., Any]) -> None:
    """Runs this instead of the operator where autograd looks on; it calls the operator below autograd."""
    _library(operator.name()).impl(operator, run, "Autograd")


def refuse_derivative(operator: Any) -> None:
    """Lets the operator run, and refuses a gradient of what it returns."""

    @wraps(operator)
    def run(*args: Any) -> Any:
        with _torch.below_autograd():
            found = operator(*args)
        tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, torch.Tensor)]
        if not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors)):
            return found
        return _torch.tree_map(lambda t: _NoDerivative.apply(t, *tensors) if t.is_floating_point() else t, found)

    _library(operator.name()).impl(operator, run, "Autograd")


class _NoDerivative(torch.autograd.Function):
    """A tensor as it is, of which there is no gradient."""

    @staticmethod
    def forward(ctx: Any, found: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # noqa: ARG004
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:  # type: ignore[override]  # noqa: ARG004
        raise PlanError(
            "a second derivative of an operator of Longspan was asked for (a backward through gradients, as"
            " create_graph=True makes it possible), and there is none. Use first derivatives only."
        )


# -- What a forward pass leaves for its backward besides tensors, and its ticket ---------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """What compiled code says about scores: a text (see `ScoreText`) and the numbers in it. Its tensors are arguments
    of both operators: memory of a graph's own is used again."""

    text: str = ""
    numbers: Sequence[int] = ()
    reals: Sequence[float] = ()

    def scoring(self, captured: Sequence[Tensor], constants: Sequence[Tensor], like: Tensor, plan: Plan) -> Scoring:
        operands = Operands(captured, constants, self.numbers, self.reals)
        scoring = scoring_of(self.text, operands, like)
        if (bias := bias_in(self.text, operands)) is not None:
            check_bias(bias, plan.sizes.batch, plan.sizes.q_heads, plan.layout.seq_len)
        return scoring


NOTHING = Said()


class Kept(list[Tensor]):
    """What a plan keeps of other ranks' rows, from forward to backward."""


@dataclass(eq=False)  # frozen ones take three times as long to make
class Pass:
    """A forward pass, as its backward needs to know it."""

    job: Job
    group: str
    number: int
    """Which call over the group it was; 0 without a group."""
    name: str
    sums: bool
    """Whether gradients of what all ranks share are added up."""
    reads: tuple[Reads, ...]
    """What functions of the mask had read."""
    kept: ref[Kept]
    said: Said = NOTHING
    """What compiled code says about scores."""


class _Memory(bytearray):
    """A ticket's memory: tensors that share it keep alive what the ticket is for."""

    held: tuple[object, ...]


def ticket_of(made: object, *more: object) -> Tensor:
    """The ticket of a forward pass, which keeps it alive, and what more it needs."""
    memory = _Memory(number_of(made).to_bytes(8, "little"))
    memory.held = made, *more
    return torch.frombuffer(memory, dtype=torch.int64)


def pass_of(ticket: Tensor, kind: type[T]) -> T:
    """The forward pass of a ticket."""
    found = found_under(int(ticket))
    if not isinstance(found, kind):
        raise PlanError(
            "a backward pass was started, but its forward pass is not known in this process any more: what compiled"
            " code saved for it was copied, and the original let go. Compile without hooks that copy saved tensors"
            " (torch.autograd.graph.save_on_cpu, saved_tensors_hooks), or let them pass integer tensors on."
        )
    return found


# -- The record of a call that ranks compare ---------------------------------------------------------------------------


MAX_OF_ONE = 64
_records: WeakKeyDictionary[Plan, dict[tuple[str, ...], Record]] = WeakKeyDictionary()
"""A plan's records, by what may differ between its calls: a plan is called many times, and its texts are long."""


def record_of(job: Job | HaloTask, device: torch.device, sums: bool | None, name: str, safety: Safety) -> Record:
    """What this rank was asked for; `sums` is None where no gradients are wanted."""
    texts = (
        job.plan.fingerprint[: WIDTH - 1],
        _device(device),
        *_asked(job),
        "not wanted" if sums is None else "sum" if sums else "share",
        str(safety.checked),
        repr(name) if name else "none",
    )
    known = _records.setdefault(job.plan, {})
    if texts not in known:
        while len(known) >= MAX_OF_ONE:
            del known[next(iter(known))]
        known[texts] = _build(job.plan, *texts)
    return known[texts]


def _build(plan: Plan, fingerprint: str, *texts: str) -> Record:
    parts = plan.mask.fingerprint[:16], plan.layout.fingerprint[:16], plan.sizes.text(), plan.dtype
    return Record(VERSION, str(torch.__version__), fingerprint, *parts, *texts)


def _asked(job: Job | HaloTask) -> tuple[str, str, str, str]:
    """Scheme, scale, scores and sinks; a convolution has nothing but a width."""
    if isinstance(job, HaloTask):
        return f"convolution of width {job.conv.width}", "none", "none", "none"
    sinks = "none" if job.sinks is None else f"{tuple(job.sinks.shape)}"
    return _scheme(job.plan), repr(job.scale), _scores(job.scoring), sinks


def _device(device: torch.device) -> str:
    """Ranks must not only compute on devices of one kind, but by one implementation of flash attention."""
    return device.type if device.type == "cpu" else f"{device.type}, {implementation()}"


def _scheme(plan: Plan) -> str:
    name = plan.scheme.name + (", keep" if plan.keep else "")
    return name if plan.chunks is None else f"{name}, chunks = {plan.chunks}, threads = {torch.get_num_threads()}"


def _scores(scoring: Scoring | None) -> str:
    if scoring is None:
        return "none"
    captured = [tuple(t.shape) for t in scoring.captured]
    return f"{len(scoring.functions)} of them, captured {captured}, {scoring.dropout}"


# -- Forward and backward ----------------------------------------------------------------------------------------------


FORM = 3
"""The form of both operators. PyTorch keeps compiled code on disk and finds it by the arguments of the forward: a new
signature of the backward needs a new number, or code of an older version would call it."""


def place_in(group: str) -> tuple[int, int] | None:
    """This process's rank in the group and the group's size; None without a group."""
    if not group:
        return None
    found = _torch.group_named(group)
    return found.rank(), found.size()


def _value_of(handle: Tensor) -> Mask | Plan:
    found = found_under(int(handle))
    if not isinstance(found, (Mask, Plan)):
        raise PlanError(
            "the mask or plan of this call is gone: compiled code was given its handle, but nobody holds it any more."
            " Keep a reference to it as long as the call runs."
        )
    return found


_NOTHING = nullcontext()


def told_in(group: str) -> AbstractContextManager[None]:
    return told(_torch.group_named(group)) if group else _NOTHING


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Run with this device current and without autocast, which would narrow products of float32 inside. NCCL and
    compiled kernels go by the current device, and a process may not have said which of several is its own."""
    if device.index is None and not torch.is_autocast_enabled(device.type):
        return _NOTHING
    return _on_device(device)


@contextmanager
def _on_device(device: torch.device) -> Iterator[None]:
    current = _NOTHING if device.index is None else torch.accelerator.device_index(device.index)
    narrows = torch.is_autocast_enabled(device.type)
    with torch.autocast(device.type, enabled=False) if narrows else _NOTHING, current:
        yield


def run_over(program: Program[Any], group: str, call: Call) -> tuple[Any, int]:
    """What the program gives, and the number of the call over the group."""
    with on_device(call.device):
        if not group:
            return run_alone(program), 0
        with members_of(_torch.group_named(group)).call(call) as running:
            return ProcessGroup(running).run(program), running.number


_ALONE = Safety()


def settings_of(group: str, *, backward: bool = False) -> Safety:
    """How safely to run. Read when the operator runs: compiled code keeps no settings of its compilation."""
    if not group:
        return _ALONE
    members = members_of(_torch.group_named(group))
    if not backward:
        members.settings = safety(members.settings)
    return members.settings or safety()


def call_of(job: Task, direction: str, device: torch.device, safety: Safety, **more: Any) -> Call:
    steps = job.plan.steps(job.rank, direction)
    return Call(job.plan.fingerprint, direction, len(steps), job.dtype, device, safety, **more)


def apart(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The results, none of them in memory of another or of an input: dk and dv may come from one message."""
    taken: set[int] = set()
    for tensor in inputs:
        taken.add(tensor.untyped_storage().data_ptr())
    made: list[Tensor] = []
    for result in results:
        result = result.clone() if result.untyped_storage().data_ptr() in taken else result
        taken.add(result.untyped_storage().data_ptr())
        made.append(result)
    return made


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
    sums: bool,
    saves: bool,
    learns: bool,
    name: str,
    form: int,
    text: str = "",
    numbers: list[int] | None = None,
    reals: list[float] | None = None,
    num_constants: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and lse of the rank's rows, and the ticket of this pass.

    `saves` says that a backward may come, `learns` that it gives gradients to what all ranks share. What happens to
    scores has a number, or in compiled code a text with the numbers that it reads. The last `num_constants` of what is
    captured get no gradient.
    """
    with told_in(group):
        assert form == FORM, "compiled code of another version"
        said = Said(text, tuple(numbers or ()), tuple(reals or ())) if text else NOTHING
        captured, constants = _parted(captured, num_constants) if num_constants else (captured, [])
        place = place_in(group) if group else None
        plan = fitting_plan(_value_of(handle), q, k, v, place)
        functions: Scoring | None = None
        if text:
            functions = said.scoring(captured, constants, q, plan)
        elif scoring:
            functions = found_under(scoring)
        drops = functions is not None and functions.dropout is not None
        honours = Features(not plan.is_structured, functions is not None, drops, plan.chunks is not None)
        why_not = lambda: why_not_inside(plan.mask, functions, q)  # noqa: E731
        chosen = kernel_named(choose_kernel(kernel, q, k, v, honours, why_not))
        if learns and plan.chunks is not None:
            raise PlanError(
                f"the plan has chunks = {plan.chunks}, which promises the same bits on any number of ranks, but sinks"
                f" or a tensor that a score function uses needs a gradient, which is summed over ranks in an order that"
                f" their number decides. Detach it, or plan without chunks."
            )
        scale = 1 / sqrt(q.shape[3]) if scale is None else scale
        job = Job(plan, place[0] if place else 0, chosen, scale, q.dtype, functions, sinks)
        plan.mask.read_anew()
        program = Forward(job, q, k, v, captured).program(saves=saves)
        number = 0
        if group:
            settings = settings_of(group)
            record = record_of(job, q.device, sums if saves else None, name, settings)
            call = call_of(job, "forward", q.device, settings, record=record, name=name)
            (out, lse, kept), number = run_over(program, group, call)
        else:
            with on_device(q.device):
                out, lse, kept = run_alone(program)
        out, lse = apart((out.contiguous(), lse.contiguous()), (q, k, v))
        made, reads = Kept(kept), job.plan.mask.settled_reads()
        if text:
            job = replace(job, scoring=None)
        elif job.scoring is not None:
            job.scoring.settle()
        done = Pass(
            job if job.sinks is None else replace(job, sinks=None), group, number, name, sums, reads, ref(made), said
        )
        return out, lse, ticket_of(done, made)


def _fake_forward(
    q: Tensor, k: Tensor, v: Tensor, _captured: Any, _sinks: Any, handle: Tensor, group: str, *_: Any
) -> tuple[Tensor, Tensor, Tensor]:
    if type(handle) is Tensor:  # not traced: tensors without data, which must fit all the same
        fitting_plan(_value_of(handle), q, k, v, place_in(group))
    return (
        q.new_empty((*q.shape[:3], v.shape[3])),
        q.new_empty(q.shape[:3], dtype=wide(q.dtype)),
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
    """Gradients of the rank's rows, of captured tensors and, last, of the sinks.

    `kept` are the rows that the plan keeps, where autograd has saved them; compiled code leaves them with the ticket.
    It also wants `plain` strides, which it has to know beforehand; elsewhere a copy would be for nothing.
    """
    forward = pass_of(ticket, Pass)
    captured, constants = _parted(captured, num_constants)
    kept = kept or forward.kept() or []
    with told_in(forward.group):
        _check_unchanged(forward)
        job = forward.job if sinks is None else replace(forward.job, sinks=sinks)
        if forward.said.text:
            job = replace(job, scoring=forward.said.scoring(captured, constants, q, job.plan))
        if dlse is not None:
            # Fused kernels take the output and work out delta themselves; a gradient of lse changes delta alone.
            job = replace(job, kernel=kernel_named("reference"))
        backward = Backward(job, Saved(q, k, v, out, lse, kept, captured), dout, dlse)
        call: Call | None = None
        if forward.group:
            settings = settings_of(forward.group, backward=True)
            call = call_of(job, "backward", q.device, settings, name=forward.name, forward=forward.number)
            gradients, _ = run_over(backward.program(), forward.group, call)
        else:
            with on_device(q.device):
                gradients = run_alone(backward.program())
        gradients = [t.contiguous() for t in gradients] if plain else gradients
        dq, dk, dv = apart(gradients, (dout, q, k, v, out, lse, *kept))
        shared = backward.shared_gradients()
        if forward.sums and call is not None and shared:
            shared = _summed(shared, forward.group, call)
        return dq, dk, dv, [t.to(like.dtype) for t, like in zip(shared, _shared(captured, sinks), strict=True)]


def _check_unchanged(forward: Pass) -> None:
    """Refuses a backward that would not see what its forward saw: functions of masks and scores are called again."""
    if forward.job.scoring is not None:
        forward.job.scoring.check_unchanged()
    if forward.reads:
        forward.job.plan.mask.check_as_read(forward.reads)


def _parted(captured: list[Tensor], num_constants: int) -> tuple[list[Tensor], list[Tensor]]:
    """What gets gradients, and what does not."""
    at = len(captured) - num_constants
    return captured[:at], captured[at:]


def _shared(captured: Sequence[Tensor], sinks: Tensor | None) -> list[Tensor]:
    """What every rank has a copy of."""
    return [*captured, *([] if sinks is None else [sinks])]


def _summed(gradients: list[Tensor], group: str, call: Call) -> list[Tensor]:
    """Added up over the group, in one message."""
    flat = torch.cat([t.flatten() for t in gradients])
    with members_of(_torch.group_named(group)).call(call) as running:
        running.all_reduce(flat)
    parts = flat.split([t.numel() for t in gradients])
    return [part.view(t.shape).clone() for part, t in zip(parts, gradients, strict=True)]


def _fake_backward(
    dout: Tensor, dlse: Any, q: Tensor, k: Tensor, v: Tensor, captured: Any, sinks: Any, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    captured, _ = _parted(captured, rest[5] if len(rest) > 5 else 0)  # PyTorch leaves out what is as by default
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    return dq, dk, dv, [t.new_empty(t.shape) for t in _shared(captured, sinks)]


attention = defined("longspan::attention", run_forward, _fake_forward)
attention_backward = defined("longspan::attention_backward", run_backward, _fake_backward)


Run = Callable[..., Any]
"""The operator, or what it runs."""
_TO_CONSTANTS = 13
"""Arguments of the operator from the handle to the number of constants; PyTorch leaves out what is as by default."""


class _Attention(torch.autograd.Function):
    """The forward operator with the backward one behind it."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, run: Run, others: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor, sinks: Any, *captured: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        with _torch.below_autograd():
            out, lse, ticket = run(q, k, v, list(captured), sinks, *others)
        kept: Sequence[Tensor] = ()
        ctx.is_traced = type(ticket) is not Tensor
        if not ctx.is_traced:  # when it is, there is no pass yet
            ctx.forward_pass = pass_of(ticket, Pass)  # the copy of a ticket, which hooks may make, holds nothing
            kept = ctx.forward_pass.kept() or ()
        ctx.num_kept, ctx.has_sinks = len(kept), sinks is not None
        ctx.num_constants = others[_TO_CONSTANTS] if len(others) > _TO_CONSTANTS else 0
        ctx.save_for_backward(q, k, v, out, lse, ticket, *kept, *_shared(captured, sinks))
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
        run = attention_backward
        if not torch.is_grad_enabled():  # where it is, a second derivative is refused by the operator
            run = run_of(attention_backward, dout, dlse, q, k, v, out, lse, sinks, *captured)
        saved = captured, sinks, out, lse, ticket, kept
        with _torch.below_autograd() if run is not attention_backward else nullcontext():
            *gradients, shared = run(dout, dlse, q, k, v, *saved, ctx.is_traced, ctx.num_constants)
        dsinks = shared.pop() if ctx.has_sinks else None
        return (None, None, *gradients, dsinks, *shared, *(None,) * ctx.num_constants)


def attend(
    q: Tensor, k: Tensor, v: Tensor, captured: list[Tensor], sinks: Tensor | None, *others: Any, run: Run = attention
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator with its gradient; `run` is the operator, or what it runs."""
    needs = q.requires_grad or k.requires_grad or v.requires_grad
    needs = needs or (bool(captured or sinks is not None) and any(t.requires_grad for t in _shared(captured, sinks)))
    if needs and torch.is_grad_enabled():
        return _Attention.apply(run, others, q, k, v, sinks, *captured)  # type: ignore[return-value]
    with _torch.below_autograd():
        return run(q, k, v, captured, sinks, *others)


differentiate(attention, attend)
refuse_derivative(attention_backward)
