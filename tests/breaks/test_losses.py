"""Attacks on losses and other numbers of tokens: dead and stopped ranks, random losses, labels of narrow types."""

import pytest

from tests.gloo.fault_jobs import LIMIT, Launcher, name_of
from tests.gloo.fault_work import KILL, STOP, Case
from tests.gloo.selected import selected
from tests.lanes import NIGHTLY

# -- ranks that die, or stop -------------------------------------------------------------------------------------------

FACTS = {KILL: "rank 1 is dead: its process (pid ", STOP: "rank 1 has been stopped (SIGSTOP) for "}
FUNCTIONS = ("token_loss", "gather_tokens", "gather_outputs", "relayout", "per_sequence", "per_token", "check_same")


def fault(what, function, where="idle", victim=1, **more):
    settings = {"call": "loss", "function": function}
    return Case(what, where, 3, victim, "none", settings=settings, **{"named": FACTS[what], **more})


CASES = [fault(what, function) for what in (KILL, STOP) for function in FUNCTIONS]
CASES += [fault(what, function, "between") for what in (KILL, STOP) for function in ("per_token", "relayout")]
CASES += [fault(what, "token_loss", victim=0, store="rank 0", named="store") for what in (KILL, STOP)]
if not NIGHTLY:
    CASES = CASES[::3]


@pytest.fixture(scope="module")
def launcher():
    return Launcher(CASES, 1)


@pytest.fixture(scope="module")
def wanted(request):
    chosen = selected(request, "case")
    return [case for case in CASES if case in chosen]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_survivor_of_a_loss_over_ranks_names_the_rank_in_time(case, launcher, wanted, tries):
    (heard,) = launcher.result(case, wanted)
    (struck,) = [when for rank in heard for kind, when, _ in rank if kind == "struck"]
    for rank, reports in enumerate(heard):
        if rank != case.victim:
            assert reports, f"rank {rank} reported nothing within {LIMIT} s"
            kind, when, text = reports[-1]
            assert (kind, case.named in text) == ("RankError", True), f"rank {rank}: {kind}: {text}"
            assert when - struck < 9.0, f"rank {rank} took {when - struck:.1f} s"  # 3 s, on crowded cores
    tries("faults in losses", 1, 0, 1)
