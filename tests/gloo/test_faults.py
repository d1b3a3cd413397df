"""Faults on real Gloo processes: every survivor raises one message that names the rank, within three seconds.

Every case runs three times (LONGSPAN_FAULT_REPEATS); seconds are judged by the median of these. Ranks are fresh
processes, since most cases end some.
"""

import os
import signal
import statistics
import time

import pytest

from tests.gloo.fault_jobs import LIMIT, Launcher, name_of
from tests.gloo.fault_work import KILL, LEAVE, RAISE, STOP, Case, leave_after_the_fault, stand_still
from tests.gloo.selected import selected
from tests.pool import context

REPEATS = int(os.environ.get("LONGSPAN_FAULT_REPEATS", "3"))
BAR = 3.0

FACTS = {KILL: "is dead: its process (pid ", STOP: "has been stopped (SIGSTOP) for "}
KILLS = [
    Case(what, where, world, victim, scheme, named=FACTS[what])
    for what in (KILL, STOP)
    for where in ("idle", "forward", "backward", "between")
    for world, victim, scheme in ((3, 1, "exchange"), (4, 2, "ring"), (4, 3, "all_gather"))
]
MESSAGES = [
    Case(what, "message", 3, 1, scheme, megabytes, named=FACTS[what])
    for what in (KILL, STOP)
    for megabytes in (1, 16, 100)
    for scheme in ("ring", "all_gather")
]
HOSTS = [
    Case(what, where, 3, 0, "ring", store="rank 0", named="store")
    for what in (KILL, STOP)
    for where in ("idle", "forward", "backward", "between")
]
TEXT = "ValueError: mask_mod met a token it did not like"
RAISES = [
    Case(RAISE, where, world, victim, scheme, named=TEXT)
    for where, world, victim, scheme in (
        ("forward", 3, 1, "ring"),
        ("forward", 4, 2, "exchange"),
        ("forward", 4, 0, "all_gather"),
        ("backward", 3, 1, "ring"),
        ("backward", 4, 2, "exchange"),
        ("outside", 3, 0, "ring"),
        ("outside", 4, 2, "exchange"),
    )
]
OTHERS = [
    Case(RAISE, "swallowed", 3, 1, named=TEXT, everyone=True),
    Case(RAISE, "swallowed", 4, 2, "exchange", named=TEXT, everyone=True),
    Case(RAISE, "skipped forward", 3, 1),
    Case(RAISE, "skipped forward", 4, 2, "exchange"),
    Case(RAISE, "skipped backward", 3, 1),
    Case(RAISE, "skipped backward", 4, 2, "exchange"),
    Case(RAISE, "skipped step", 3, 1, named="training step"),
    Case(RAISE, "skipped step", 4, 2, "exchange", named="training step"),
    Case(RAISE, "refused", 3, 1, named="but got (1, 2, 63, 16)"),
    Case(RAISE, "refused", 4, 2, "exchange", named="but got (1, 2, 63, 16)"),
    Case(LEAVE, "left", 3, 1, named="ended"),
    Case(RAISE, "late", 3, 2, "exchange", named="mask", kind="AgreementError", everyone=True),
    Case(STOP, "forward", 3, 1, named=FACTS[STOP], settings={"interfaces": "lo,lo"}),
    Case(RAISE, "damaged", 3, 1, named="checksum", everyone=True, settings={"watch": {"checked": True}}),
    Case(RAISE, "damaged", 4, 2, "exchange", named="checksum", everyone=True, settings={"watch": {"checked": True}}),
    Case(RAISE, "mislabelled", 3, 1, named="in step:", everyone=True, settings={"watch": {"checked": True}}),
    Case(
        RAISE,
        "mislabelled",
        4,
        2,
        "exchange",
        named="in step:",
        everyone=True,
        settings={"watch": {"checked": True}},
    ),
]
CONVOLUTIONS = [
    Case(KILL, "convolving", 3, 1, "exchange", named=FACTS[KILL]),
    Case(STOP, "convolved", 3, 1, "exchange", named=FACTS[STOP]),
    Case(RAISE, "skipped backward of a convolution", 3, 1, "exchange"),
]
ASKED = (
    (3, "mask", "mask"),
    (4, "mask", "mask"),
    (3, "layout", "layout"),
    (3, "scheme", "scheme"),
    (4, "dtype", "dtype"),
    (3, "shapes", "head_dim=32"),
    (3, "keep", "keep"),
    (3, "scale", "0.125"),
    (4, "seed", "seed"),
    (3, "sinks", "sinks"),
    (3, "gradients", "share"),
    (3, "function", "scores"),
)
DIFFERENT = [
    Case(
        RAISE,
        "different",
        world,
        scheme="exchange",
        named=name,
        kind="AgreementError",
        everyone=True,
        settings={"differs": differs},
    )
    for world, differs, name in ASKED
]
DIFFERENT += [
    Case(RAISE, "different", 3, scheme="exchange", named="something else", settings={"differs": differs})
    for differs in ("cached", "one scale", "one sink", "one function")
]
DIFFERENT.append(Case(RAISE, "different", 4, -1, "exchange", named="something else", settings={"differs": "half"}))
CASES = KILLS + MESSAGES + HOSTS + RAISES + OTHERS + CONVOLUTIONS + DIFFERENT


@pytest.fixture(scope="module")
def launcher():
    return Launcher(CASES, REPEATS)


@pytest.fixture(scope="module")
def wanted(request):
    """The cases that this run selected, in order."""
    chosen = selected(request, "case")
    return [case for case in CASES if case in chosen]


def test_there_are_enough_cases():
    assert len(CASES) >= 60
    assert len({name_of(case) for case in CASES}) == len(CASES)


@pytest.mark.share(3)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_survivor_names_the_rank_in_time(case, launcher, wanted):
    slowest = []
    for heard in launcher.result(case, wanted):
        moments = [when for rank in heard for kind, when, _ in rank if kind == "struck"]
        assert moments, f"nothing happened: {heard}"
        struck = max(moments)
        took = 0.0
        for rank, said in enumerate(heard):
            if rank == case.victim and not case.everyone:
                continue
            assert said, f"rank {rank} said nothing within {LIMIT} s"
            kind, when, text = said[-1]
            assert kind == case.kind, f"rank {rank}: {kind}: {text}\n{heard}"
            assert case.named in text, f"rank {rank}: {text}"
            if case.kind == "RankError" and rank != case.victim >= 0 and case.store != "rank 0":
                assert f"rank {case.victim}" in text, f"rank {rank}: {text}"
            took = max(took, when - struck)
        slowest.append(took)
    # Several jobs share two cores here, and one of three may be held up by that; named it must be in all of them.
    assert statistics.median(slowest) < BAR, slowest
    assert max(slowest) < 3 * BAR, slowest


def test_a_survivor_can_leave(launcher):
    """Nothing that is left unfinished may keep a process from ending: the launcher waits for that."""
    pipes, processes = [], []
    for rank in range(2):
        here, there = context().Pipe()
        args = (rank, launcher.store.port, there)
        processes.append(context().Process(target=leave_after_the_fault, args=args))
        processes[-1].start()
        pipes.append(here)
    try:
        assert pipes[0].poll(LIMIT), "the survivor said nothing"
        kind, _, text = pipes[0].recv()
        assert kind == "RankError", text
        assert "rank 1 has been stopped (SIGSTOP)" in text
        processes[0].join(8)
        assert processes[0].exitcode is not None, "the survivor hangs"
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def test_a_pause_of_all_ranks_is_no_fault(launcher):
    """Whoever stood still himself has not seen how long the others, or the store, did."""
    pipes, processes = [], []
    for rank in range(2):
        here, there = context().Pipe()
        processes.append(context().Process(target=stand_still, args=(rank, launcher.store.port, there)))
        processes[-1].start()
        pipes.append(here)
    try:
        for pipe in pipes:
            assert pipe.poll(LIMIT)
            assert pipe.recv()[0] == "ready"
        time.sleep(0.5)
        for step in (signal.SIGSTOP, signal.SIGCONT):
            for process in processes:
                os.kill(process.pid, step)
            time.sleep(3.5 if step == signal.SIGSTOP else 0)
        for pipe in pipes:
            assert pipe.poll(LIMIT)
            kind, _, text = pipe.recv()
            assert kind == "fine", text
    finally:
        for process in processes:
            process.kill()
            process.join(10)
