"""Mistakes in what keeps streams in order. Most are made in the shipped transport itself, whose text is changed for a
run; some in the simulated NCCL and in its memory.

Each names the schemes and numbers of ranks where it can do harm, and how it is found: by results that differ ("wrong"),
or by the error of the simulation.
"""

import __future__

import inspect
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

from longspan.run import transports
from longspan.run.transports import Buffers
from longspan.run.walk import PlanWalk
from tests.simulation.streams import DeadlockError, Event, HostCopyError, HostWaitError
from tests.simulation.streams_cases import AHEAD, case_of, on_gpus, same
from tests.simulation.streams_group import SimulatedNccl

ANY = ("ring", "exchange", "all_gather", "all_to_all")
MANY = ("all_gather", "all_to_all")
"""With several sources in a step."""
OVERLAPPING = ("ring", "exchange", "all_gather")
EARLY = ("staged",)
"""With messages that start a step before the step that waits for them."""
"""Which compute while messages travel."""


@dataclass(frozen=True)
class Mistake:
    found: str | type[Exception]
    changes: tuple[tuple[object, str, str, str], ...] = ()
    """(where, name of the function, text of it, text that takes its place)."""
    nccl: type[SimulatedNccl] = SimulatedNccl
    records: bool = True
    schemes: tuple[str, ...] = ANY
    worlds: tuple[int, ...] = (3,)
    layers: int = 1
    set: dict[str, object] = field(default_factory=dict)
    """Other values of names in `transports`."""

    @contextmanager
    def made(self):
        """Inside, the code has the mistake."""
        with ExitStack() as stack:
            for where, name, old, new in self.changes:
                stack.enter_context(replaced(where, name, rewritten(getattr(where, name), old, new)))
            for name, value in self.set.items():
                stack.enter_context(replaced(transports, name, value))
            yield


@contextmanager
def replaced(where, name, value):
    before = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, before)


def rewritten(function, old, new):
    """The function with another text in one place."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {function.__qualname__}: adapt the mistake"
    made = {}
    code = compile(source.replace(old, new), "<mistake>", "exec", flags=__future__.annotations.compiler_flag)
    exec(code, function.__globals__, made)
    return made[function.__name__]


def in_run(old, new):
    return ((transports.ProcessGroup, "run", old, new),)


def in_start(old, new):
    return ((transports.ProcessGroup, "_start", old, new),)


def in_wait_due(old, new):
    return ((transports.ProcessGroup, "_wait_due", old, new),)


WAIT, SEND, START = "wait_all(works)", "exchange = program.send(arrived)", "self._start(exchange)"
ON_SIDE = "with dist.simulation.on(dist.simulation.gpu.side): "
EACH = "for n in sorted(lists)"
LET_GO = START + "; exchange.sends.clear()"
NOT_HELD = (Buffers, "take", "return self._all[-1]", "return self._all.pop()")


class NoSync(SimulatedNccl):
    """Messages do not wait for what is on the current stream."""

    def before(self, gpu):
        return Event(gpu.current, 0)


class StaleSync(SimulatedNccl):
    """They wait for what was there when the messages before them began."""

    def __init__(self, simulation):
        super().__init__(simulation)
        self.last = {}

    def before(self, gpu):
        stale = self.last.get(gpu, Event(gpu.current, 0))
        self.last[gpu] = gpu.current.event()
        return stale


class EarlyEvent(SimulatedNccl):
    """The event that a work waits for is recorded before its messages instead of behind them."""

    def after(self, gpu, event):
        return Event(event.stream, event.count - 1)


MISTAKES = {
    "no wait before messages are unpacked": Mistake("wrong", in_run(WAIT, "pass")),
    "no wait in backward": Mistake("wrong", in_run(WAIT, f"self.call.direction == 'backward' or {WAIT}")),
    "no wait in forward": Mistake("wrong", in_run(WAIT, f"self.call.direction == 'forward' or {WAIT}")),
    "no wait in the first step": Mistake("wrong", in_run(WAIT, f"exchange.step == 0 or {WAIT}")),
    "a wait for the step before": Mistake(
        "wrong", in_run(WAIT, "wait_all(getattr(self, 'last', [])); self.last = works")
    ),
    "a wait on a stream that is not the current one": Mistake("wrong", in_run(WAIT, ON_SIDE + WAIT)),
    "a wait for the first of several works": Mistake(
        "wrong", in_run(WAIT, "wait_all(works[:1])"), schemes=MANY, set={"MAX_BATCH": 2}
    ),
    "no wait for messages that started early": Mistake("wrong", in_wait_due(WAIT, "pass"), schemes=EARLY),
    "a wait for early messages a step too late": Mistake(
        "wrong",
        ((PlanWalk, "program", "MessageBatch(number + early, ", "MessageBatch(number + early + (early > 0), "),),
        schemes=EARLY,
    ),
    "early messages are unpacked a step too soon": Mistake(
        "wrong",
        ((PlanWalk, "program", "arriving.setdefault(number + early, [])", "arriving.setdefault(number, [])"),),
        schemes=EARLY,
    ),
    "send buffers of early messages are freed before they were sent": Mistake(
        "wrong",
        (*in_run("(later, *self._start(later))", "(later, *self._start(later), later.sends.clear())[:3]"), NOT_HELD),
        records=False,
        schemes=EARLY,
    ),
    "messages do not wait for what packs them": Mistake("wrong", nccl=NoSync),
    "messages wait for an event that is too early": Mistake("wrong", nccl=StaleSync),
    "a work's event is recorded too early": Mistake("wrong", nccl=EarlyEvent),
    "packed on a stream that nobody waits for": Mistake("wrong", in_run(SEND, ON_SIDE + SEND)),
    "unpacked on a stream that computing does not wait for": Mistake(
        "wrong",
        in_run(
            SEND,
            "here = dist.simulation.gpu; here.side.wait(here.compute.event()); here.current = here.side; "
            "exchange = program.send(arrived); here.comm.wait(here.side.event()); here.current = here.compute",
        ),
        layers=2,
        schemes=OVERLAPPING,
    ),
    "a send buffer is written to before it was sent": Mistake(
        "wrong", in_run(START, START + "; [message.zero_() for message in exchange.sends.values()]")
    ),
    "a send buffer is freed before it was sent, and not recorded": Mistake(
        "wrong", (*in_run(START, LET_GO), NOT_HELD), records=False, schemes=OVERLAPPING
    ),
    "buffers are taken again while they are used": Mistake(
        "wrong", ((Buffers, "take", "and not is_shared(whole)", ""),), layers=2, schemes=OVERLAPPING
    ),
    "a message goes into another rank's buffer": Mistake(
        "wrong",
        in_start(
            "for peer, buffer in buffers.items()", "for peer, buffer in zip(buffers, list(buffers.values())[::-1])"
        ),
        schemes=MANY,
    ),
    "batches begin in another order on some ranks": Mistake(
        DeadlockError,
        in_start(EACH, "for n in sorted(lists, reverse=bool(me % 2))"),
        schemes=MANY,
        set={"MAX_BATCH": 2},
    ),
    "messages begin one by one": Mistake(
        DeadlockError,
        in_start(
            "for work in dist.batch_isend_irecv(lists[n])",
            "for op in lists[n] for work in dist.batch_isend_irecv([op])",
        ),
    ),
    "the host looks at a message": Mistake(
        HostWaitError, in_run(WAIT, WAIT + "; [b.max().item() for b in buffers.values()]")
    ),
    "the host compares messages": Mistake(
        HostWaitError, in_run(WAIT, WAIT + "; [torch.equal(b, b) for b in buffers.values()]")
    ),
    "a message is copied to the host": Mistake(
        HostWaitError, in_run(WAIT, WAIT + "; [b.cpu() for b in buffers.values()]")
    ),
    "sizes are copied from the host": Mistake(
        HostCopyError, in_run(START, START + "; torch.tensor([len(buffers)]).to(exchange.device)"), layers=2
    ),
}


def dense_case(seed, worlds, layers, name):
    """A case in which every rank needs rows of every other, made anew: a plan's tables lie on the simulated GPUs."""
    return case_of(seed, worlds=worlds, layers=(layers,), tokens=(9, 16), name=name, dense=True)


@lru_cache(maxsize=256)
def plain_results(*about):
    return dense_case(*about).plainly()


def tried(mistake, seed):
    """How a run with the mistake ended: "right", "wrong", or the type of an error."""
    about = seed, mistake.worlds, mistake.layers, mistake.schemes[seed % len(mistake.schemes)]
    case, expected = dense_case(*about), plain_results(*about)
    with mistake.made():
        try:
            found, _ = on_gpus(case, seed, ahead=AHEAD[seed % 3], nccl=mistake.nccl, records=mistake.records)
        except (DeadlockError, HostCopyError, HostWaitError) as error:
            return type(error)
        except (IndexError, RuntimeError):  # of an operation that was given what is not there yet
            return "wrong"
    return "right" if same(found, expected) else "wrong"
