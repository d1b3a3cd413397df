"""Faults over a group that behaves like NCCL (`nccl_like`): every survivor raises one message that names the rank,
within three seconds, though its host waits for a device; and what only looks like a fault is none.

Ranks are real processes, killed and stopped by real signals. What stands in for NCCL is the group and the device.
"""

import os
from dataclasses import replace

import pytest

from tests.gloo import nccl_work
from tests.gloo.fault_jobs import LIMIT, Launcher, name_of
from tests.gloo.fault_work import KILL, LEAVE, RAISE, STOP, Case
from tests.gloo.selected import selected

BAR = 3.0
NCCL, MIXED = {"group": "nccl"}, {"group": "mixed"}
FACTS = {KILL: "is dead: its process (pid ", STOP: "has been stopped (SIGSTOP) for "}
TEXT = "ValueError: mask_mod met a token it did not like"
STRUCK = [
    Case(what, where, world, victim, scheme, named=FACTS[what], settings=settings)
    for what in (KILL, STOP)
    for where, world, victim, scheme, settings in (
        ("first", 2, 1, "ring", NCCL),
        ("joining", 3, 2, "ring", MIXED),
        ("joining", 3, 1, "ring", NCCL),
        ("idle", 3, 0, "exchange", NCCL),
        ("forward", 4, 2, "ring", NCCL),
        ("forward", 3, 1, "exchange", MIXED),
        ("backward", 3, 1, "ring", NCCL),
        ("between", 3, 2, "all_gather", NCCL),
        ("layers", 4, 3, "ring", NCCL),
        ("ahead", 3, 1, "ring", NCCL),
    )
]
RAISED = [
    Case(RAISE, "forward", 4, 1, named=TEXT, settings=NCCL),
    Case(RAISE, "backward", 3, 2, named=TEXT, settings=MIXED),
    Case(RAISE, "outside", 3, 0, "exchange", named=TEXT, settings=NCCL),
    Case(RAISE, "swallowed", 3, 1, named=TEXT, everyone=True, settings=NCCL),
    Case(RAISE, "refused", 3, 1, named="but got (1, 2, 63, 16)", settings=NCCL),
    Case(LEAVE, "left", 3, 1, named="ended", settings=NCCL),
    Case(LEAVE, "left", 2, 1, named="ended", settings=MIXED),
]
APART = [
    Case(RAISE, "skipped forward", 3, 1, named="something else", settings=NCCL),
    Case(RAISE, "skipped backward", 4, 2, "exchange", named="something else", settings=NCCL),
    Case(RAISE, "skipped step", 3, 1, named="something else", settings=NCCL),
    Case(RAISE, "swapped", 3, 2, named="something else", settings=NCCL),
    Case(RAISE, "swapped", 2, 1, named="something else", settings=MIXED),
]
APART += [
    Case(RAISE, "different", world, victim, "exchange", named="else", settings={**kind, "differs": differs})
    for world, victim, differs, kind in (
        (3, 2, "cached", NCCL),
        (3, 2, "one scale", MIXED),
        (3, 1, "one scale", NCCL),
        (4, -1, "half", NCCL),
        (3, 2, "one sink", NCCL),
    )
]
DIFFERENT = [
    Case(RAISE, "different", world, 1, "exchange", named=named, kind="AgreementError", everyone=True,
         settings={**kind, "differs": differs})
    for world, differs, named, kind in (
        (3, "mask", "mask", NCCL),
        (2, "shapes", "head_dim=32", NCCL),
        (4, "scheme", "scheme", NCCL),
        (3, "layout", "layout", MIXED),
        (2, "scale", "0.125", NCCL),
    )
]  # fmt: skip
DIFFERENT.append(
    Case(RAISE, "other kernel", 3, 1, named="cuda, FA3 on rank 1", kind="AgreementError", everyone=True, settings=NCCL)
)
HOSTS = [Case(what, "layers", 3, 0, store="rank 0", named="store", settings=NCCL) for what in (KILL, STOP)]
FAULTS = STRUCK + RAISED + APART + DIFFERENT + HOSTS
HARMLESS = [
    Case("nothing", where, world, victim, scheme, settings=settings)
    for where, world, victim, scheme, settings in (
        ("nothing", 3, 1, "exchange", MIXED),
        ("long kernel", 3, 1, "ring", NCCL),
        ("long kernel", 2, 1, "exchange", MIXED),
        ("long kernels", 3, 1, "ring", NCCL),
        ("many in flight", 3, 2, "ring", NCCL),
        ("slow host", 3, 1, "all_gather", NCCL),
        ("lock", 2, 0, "ring", NCCL),
        ("short stop", 3, 1, "ring", NCCL),
        ("unneeded stop", 3, 1, "ring", NCCL),
        ("debugger", 2, 1, "ring", NCCL),
        ("early end", 3, 0, "exchange", NCCL),
        ("disagreement", 3, 1, "exchange", NCCL),
    )
]
BY_NAME = {name_of(case): case for case in FAULTS + HARMLESS}
MUTANTS = {
    "nothing is polled": "nccl-nothing-unneeded stop",
    "nobody looks": "nccl-kill-layers",
    "nothing is aborted": "nccl-kill-ahead",
    "nobody is interrupted": "nccl-raise-swapped",
    "patience is ignored": "nccl-nothing-short stop",
    "devices are taken for hosts": "nccl-kill-ahead",
    "who has delivered is not known": "nccl-nothing-early end",
    "calls are not compared": "mixed-raise-swapped",
    "calls are compared too early": "nccl-nothing-disagreement",
    "rows are not compared": "nccl-raise-other kernel",
    "debuggers are stops": "nccl-nothing-debugger",
    "the start is not watched": "nccl-stop-joining",
}
MUTATED = [
    replace(case, settings={**case.settings, "mutant": mutant, "limit": 12.0})
    for mutant, begin in MUTANTS.items()
    for case in [next(case for name, case in BY_NAME.items() if name.startswith(begin))]
]
CASES = FAULTS + HARMLESS + MUTATED


@pytest.fixture(scope="module")
def launcher():
    return Launcher(CASES, 1, at_once=3)


@pytest.fixture(scope="module")
def wanted(request):
    """The cases that this run selected, in order."""
    chosen = selected(request, "case")
    return [case for case in CASES if case in chosen]


def test_there_are_enough_cases():
    assert len(FAULTS) >= 30
    assert len({name_of(case) for case in CASES}) == len(CASES)


def check_named(case, heard):
    """That every survivor has named the victim in time."""
    moments = [when for rank in heard for kind, when, _ in rank if kind == "struck"]
    assert moments, f"nothing happened: {heard}"
    took = 0.0
    for rank, said in enumerate(heard):
        if rank == case.victim and not case.everyone:
            continue
        assert said[-1:], f"rank {rank} said nothing within {LIMIT} s"
        assert said[-1][0] != "struck", f"rank {rank} said nothing within {LIMIT} s"
        kind, when, text = said[-1]
        assert kind == case.kind, f"rank {rank}: {kind}: {text}\n{heard}"
        assert case.named in text, f"rank {rank}: {text}"
        if kind == "RankError" and rank != case.victim >= 0 and case.store != "rank 0":
            assert f"rank {case.victim}" in text, f"rank {rank}: {text}"
            assert "aborted: True" in text, f"rank {rank}: {text}"
        took = max(took, when - max(moments))
    assert took < BAR * (2 if os.getloadavg()[0] > 4 else 1), f"named after {took:.1f} s: {heard}"


def check_undisturbed(heard):
    """That nobody was named, and nothing aborted."""
    for rank, said in enumerate(heard):
        assert said, f"rank {rank} said nothing within {LIMIT} s"
        kind, _, text = said[-1]
        assert kind == "fine", f"rank {rank}: {kind}: {text}\n{heard}"
        assert "aborted: False, errors: 0" in text, f"rank {rank}: {text}"


@pytest.mark.share(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", FAULTS, ids=name_of)
def test_every_survivor_names_the_rank_in_time(case, launcher, wanted):
    check_named(case, launcher.result(case, wanted)[0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", HARMLESS, ids=name_of)
def test_who_is_slow_disturbs_nobody(case, launcher, wanted):
    check_undisturbed(launcher.result(case, wanted)[0])


@pytest.mark.share(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", MUTATED, ids=name_of)
def test_mutants_are_noticed(case, launcher, wanted):
    (heard,) = launcher.result(case, wanted)
    with pytest.raises(AssertionError):
        check_undisturbed(heard) if case.what == "nothing" else check_named(case, heard)


def test_every_mutant_has_its_case():
    assert set(MUTANTS) == set(nccl_work.MUTANTS)
