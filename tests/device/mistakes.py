"""Mistakes of order, of memory and of devices, made in the shipped code for a run, each of which the device must show.

Most change one line of the transport (`run/transports.py`), which is compiled again with that line. Each
is tried on every scheme, and names the schedule on which it does harm for certain (see `native/streams.h`).
"""

import contextlib
import itertools
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import longspan as ls
from longspan.run import tables, transports
from longspan.run.transports import Buffers
from tests.device import attention_work, forms
from tests.simulation.streams_mistakes import replaced, rewritten

LATE = "all late"


@dataclass(frozen=True)
class Mistake:
    changes: tuple[tuple[object, str, str, str], ...] = ()
    """(class, method, text of it, text that takes its place)."""
    methods: tuple[tuple[object, str, object], ...] = ()
    """(class, method, function that takes its place)."""
    schedule: str = "late messages"
    case: str = "plain"
    forbids_waits: bool = False
    """On the second call, as `set_sync_debug_mode("error")` does."""
    schemes: tuple[str, ...] = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2,ring)")
    names: dict[str, object] = field(default_factory=dict)
    """Names that changed texts use."""

    @contextlib.contextmanager
    def made(self):
        with contextlib.ExitStack() as stack:
            for owner, name, old, new in self.changes:
                function = getattr(owner, name)
                function.__globals__.update({"_side": side_stream, "_forms": forms, **self.names})
                stack.enter_context(replaced(owner, name, rewritten(function, old, new)))
            for owner, name, function in self.methods:
                stack.enter_context(replaced(owner, name, function))
            yield


@contextlib.contextmanager
def side_stream():
    """Another stream than the current one, which waits for nothing."""
    module = torch.get_device_module(forms.form)
    with module.stream(module.Stream()):
        yield


def in_run(old, new):
    return ((transports.ProcessGroup, "run", old, new),)


def in_start(old, new):
    return ((transports.ProcessGroup, "_start", old, new),)


def in_wait_due(old, new):
    return ((transports.ProcessGroup, "_wait_due", old, new),)


EARLY = ("staged", "hybrid(2,staged)")
"""Schemes whose messages start a step early."""
START_EARLY = "flying += [(later, *self._start(later)) for later in exchange.later]"
WAIT, SEND = "wait_all(works)", "exchange = program.send(arrived)"
START = "buffers, works = self._start(exchange)"
BACKWARD = "self.call.direction == 'backward'"


def _table_from_overwritten_memory(numbers, device):
    source = torch.from_numpy(numbers).pin_memory()
    table = source.to(device, non_blocking=True)
    source.zero_()  # as if the buffer was used for something else, before the copy is over
    return table


_staging = []


def _table_from_one_buffer(numbers, device):
    """One pinned buffer for all programs, which is written again without waiting for the last copy."""
    if not _staging or len(_staging[0]) < len(numbers):
        _staging[:] = [torch.empty(max(1 << 16, len(numbers)), dtype=torch.int64).pin_memory()]
    part = _staging[0][: len(numbers)]
    return part.copy_(torch.from_numpy(numbers)).to(device, non_blocking=True)


def _table_on_the_host(numbers, device):
    return torch.from_numpy(numbers)


def _table_on_another_device(numbers, device):
    other = (device.index + 1) % torch.accelerator.device_count()
    return torch.from_numpy(numbers).to(torch.device(device.type, other))


_all_reduce = dist.all_reduce


def _sum_without_wait(tensor, group):
    _all_reduce(tensor, group=group, async_op=True)


MISTAKES = {
    # order
    "no wait for messages": Mistake(in_run(WAIT, "pass")),
    "no wait in forward": Mistake(in_run(WAIT, f"{WAIT} if {BACKWARD} else None")),
    "no wait in backward": Mistake(in_run(WAIT, f"None if {BACKWARD} else {WAIT}")),
    "no wait in the first step": Mistake(in_run(WAIT, f"exchange.step == 0 or {WAIT}")),
    "a wait for the works of the step before": Mistake(
        in_run(WAIT, "wait_all(getattr(self, 'last', [])); self.last = works")
    ),
    "a wait on another stream": Mistake(in_run(WAIT, f"with _side(): {WAIT}")),
    "messages are packed on another stream": Mistake(
        in_run(SEND, f"with _side(): {SEND}"), schedule=LATE
    ),
    "messages begin behind another stream": Mistake(
        in_run(START, f"with _side(): {START}"), schedule="late kernels"
    ),
    "no wait for early messages": Mistake(in_wait_due(WAIT, "pass"), schemes=EARLY),
    "no wait for early messages in backward": Mistake(
        in_wait_due(WAIT, f"None if {BACKWARD} else {WAIT}"), schemes=EARLY
    ),
    "early messages are waited for a step late": Mistake(
        in_run("self._wait_due(flying, exchange.step)", "self._wait_due(flying, exchange.step - 1)"), schemes=EARLY
    ),
    "early messages are waited for on another stream": Mistake(
        in_wait_due(WAIT, f"with _side(): {WAIT}"), schemes=EARLY
    ),
    "early messages begin behind another stream": Mistake(
        in_run(START_EARLY, f"with _side(): {START_EARLY}"), schedule="late kernels", schemes=EARLY
    ),
    "sums over ranks are not waited for": Mistake(methods=((dist, "all_reduce", _sum_without_wait),), case="sinks"),
    # memory
    "a message is written to before it was sent": Mistake(
        in_run(START, START + "; [message.zero_() for message in exchange.sends.values()]")
    ),
    "buffers are taken again while they are used": Mistake(
        ((Buffers, "take", "and not is_shared(whole)", ""),), schedule=LATE,
        schemes=("hybrid(2,ring)",),  # a ring of two ranks has no two messages of one size at a time
    ),
    "an early message is written to before it was sent": Mistake(
        in_run(START_EARLY, START_EARLY + "; [m.zero_() for early in exchange.later for m in early.sends.values()]"),
        schemes=EARLY,
    ),
    "early messages are sent from memory that is taken again": Mistake(
        (*in_run(START_EARLY, START_EARLY + "; self.early = [early.sends for early in exchange.later]"),
         *in_start("buffers = exchange.into\n", "buffers = exchange.into; "
                   "[m.fill_(255) for early in self.__dict__.pop('early', ()) for m in early.values()]\n")),
        schemes=EARLY,
    ),
    "a message is unpacked in memory that is not its own": Mistake(
        in_run("arrived = buffers",
               "arrived = {peer: torch.empty_like(buffer) for peer, buffer in buffers.items()}")
    ),
    "a pinned source is overwritten": Mistake(
        methods=((tables, "copy_to_device", _table_from_overwritten_memory),), schedule=LATE
    ),
    "one pinned buffer serves all tables": Mistake(
        methods=((tables, "copy_to_device", _table_from_one_buffer),), schedule="all very late"
    ),
    # devices
    "tables of rows stay on the host": Mistake(
        methods=((tables, "copy_to_device", _table_on_the_host),), schedule="plain"
    ),
    "tables of rows are on another device": Mistake(
        methods=((tables, "copy_to_device", _table_on_another_device),), schedule="plain"
    ),
    "messages are on another device": Mistake(
        ((Buffers, "take", "device=device", "device=torch.device(device.type, (device.index + 1) % 4)"),),
        schedule="plain",
    ),
    "messages are on the host": Mistake(((Buffers, "take", "device=device", "device='cpu'"),), schedule="plain"),
    # host waits
    "the host looks at a message": Mistake(
        in_run(WAIT, WAIT + "; [b.max().item() for b in buffers.values()]"), schedule="plain", forbids_waits=True
    ),
    "a message is copied to the host": Mistake(
        in_run(WAIT, WAIT + "; [b.cpu() for b in buffers.values()]"), schedule="plain", forbids_waits=True
    ),
    "numbers are copied to the device": Mistake(
        in_run(WAIT, WAIT + "; torch.tensor([1]).to(exchange.device)"), schedule="plain", forbids_waits=True
    ),
}  # fmt: skip

# What differs from a mistake in one thing, and is right.
RIGHT = {
    "a second wait for early messages": Mistake(
        in_wait_due(WAIT, "wait_all(works * 2)"), schedule=LATE, schemes=EARLY
    ),
    "a second wait": Mistake(in_run(WAIT, "wait_all(works * 2)"), schedule=LATE),
    "messages are packed on another stream, which waits and is waited for": Mistake(
        in_run(SEND, f"with _joined(): {SEND}"), schedule=LATE,
    ),
    "tables from pinned memory that is not touched again": Mistake(
        methods=((tables, "copy_to_device", lambda numbers, device: torch.from_numpy(numbers).pin_memory().to(
            device, non_blocking=True)),), schedule=LATE,
    ),
}  # fmt: skip


@contextlib.contextmanager
def joined_stream():
    module = torch.get_device_module(forms.form)
    before, other = torch.accelerator.current_stream(), module.Stream()
    other.wait_stream(before)
    try:
        with module.stream(other):
            yield
    finally:
        before.wait_stream(other)


_sizes = itertools.count(step=4)


def tried(table, name, scheme, seed):
    """How a run with the mistake ended on this rank: "right", "wrong", or the first words of the error."""
    mistake = {"mistakes": MISTAKES, "right": RIGHT}[table][name]
    tokens = 96 + next(_sizes)  # a plan that no run before had: what it needs on the device is kept
    # Stripes: rows are copied by tables, which are on the device.
    case = attention_work.extras_case(mistake.case, scheme, seed=seed, tokens=tokens, stripe=5)
    expected = attention_work.step(case, "cpu", "reference")
    module = torch.get_device_module(forms.form)
    try:
        with forms.schedule(mistake.schedule), mistake.made():
            if mistake.forbids_waits:
                return _with_waits_forbidden(case, module)
            found = attention_work.step(case, attention_work.here(), "reference")
    except (RuntimeError, ls.LongspanError) as error:
        return " ".join(str(error).split()[:12])
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return "right" if same else "wrong"


def _with_waits_forbidden(case, module):
    plan, whole, *_ = case
    *own, dout = (plan.layout.shard(x, dist.get_rank(), 2).to(attention_work.here()) for x in whole)
    own = [x.requires_grad_() for x in own]
    for forbidden in (False, True):
        if forbidden:
            module.set_sync_debug_mode("error")
        try:
            out = ls.attention(*own, plan, group=dist.group.WORLD, kernel="reference")
            torch.autograd.grad(out, own, dout)
        finally:
            module.set_sync_debug_mode("default")
    return "right"


for _mistake in RIGHT.values():
    _mistake.names["_joined"] = joined_stream
