"""tests/gpu on four ranks over Gloo: whole and right by literal torchrun; each planted mistake fails its own test."""

import re

import pytest

from tests.gloo.gpu_suite_work import planted
from tests.jobs.runner import ROOT, torchrun
from tests.pool import pool

RANKS = 4
QUICK = ("--quick", "operators", "exact", "memory", "time", "host")


def failed(plant, *words, timeout=280):
    """The tests that failed on all ranks of a pool with something planted, with their texts; and all that ran."""
    found = pool(RANKS).run(planted, plant, *words, timeout=timeout)
    assert len({status for status, _ in found}) == 1, found
    outcomes = [{name: outcome for name, (outcome, _) in tests.items()} for _, tests in found]
    assert all(each == outcomes[0] for each in outcomes), "ranks agree"
    texts = {name: text for name, (outcome, text) in found[0][1].items() if outcome == "failed"}
    assert found[0][0] == bool(texts)
    return texts, outcomes[0]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        pytest.param(["--quick"], "24 passed, 69 deselected", id="quick"),
        pytest.param([], "50 passed, 43 deselected", id="all", marks=pytest.mark.nightly),
    ],
)
def test_by_torchrun(tmp_path, words, counts):
    launch = ["--nproc-per-node", "4", "-m", "pytest", str(ROOT / "tests" / "gpu")]
    done = torchrun([*launch, *words], tmp_path, timeout=280 if words else 900)
    assert done.status == 0, done.report()
    assert re.search(rf"=+ {counts}", done.out), done.report()
    assert done.out.count("test session starts") == 1, "rank 0 speaks"
    for line in ("ranks: 4 over gloo", "exact.py::test_scheme[ring]: documents"):
        assert line in done.out


PLANTED = {
    "wrong_kernel": (["operators.kernel[cpu_flash.float16]"], "dq is off by"),
    "kernel_reads_beside": (["operators.kernel[cpu_flash.float16]"], "is off by"),
    "slow_link": (["time.links"], "from rank 1 to rank 2"),
    "sync": (["host.waits"], "(_local_scalar_dense"),
    "copy": (["host.waits"], "copies"),
    "hoard": ([f"memory.peak[{name}]" for name in ("exchange.causal", "exchange.window", "ring.causal")], "the plan"),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_fails_its_own_test_and_no_other(plant):
    texts, _ = failed(plant, *QUICK)
    expected, text = PLANTED[plant]
    assert sorted(texts) == sorted(expected)
    assert all(text in each for each in texts.values()), texts


PLANTED_IN_ONE = {
    "raises": (
        ("--quick", "exact::test_scheme", "exact::test_repeat"), ["exact.scheme[exchange]"], "rank 2, after 0 s: OSErr",
    ),
    "far_rows": (("--quick", "exact::test_scheme", "long"), ["long.sampled[exchange]"], "dk of sampled rows"),
    "kept_messages": (("--quick", "memory"), ["memory.batches[batches.all_to_all]"], "2 batches of 512 tokens"),
    "part_of_group": (("--quick", "exact::test_part", "exact::test_scheme"), ["exact.part[cp_inside_tp]"], "out"),
    "recurrence": (("--quick", "training"), ["training.mixer[recurrence]"], "out is off by"),
    "convolution": (("--quick", "training"), ["training.mixer[convolution]"], "out is off by"),
    "recomputed": (("--quick", "training"), ["training.step[checkpointing]"], "gradient of"),
}  # fmt: skip
PLANTED_AT_NIGHT = {
    "far_rows": (
        ("long", "exact::test_repeat"),
        [f"long.sampled[{name}]" for name in ("exchange", "ring", "all_gather", "all_to_all", "hybrid")], "dk of",
    ),
    "compiled": (("training::test_step[compile]", "exact::test_repeat"), ["training.step[compile]"], "logits"),
    "averaged": (("training::test_step[fsdp2]", "exact::test_repeat"), ["training.step[fsdp2]"], "gradient of"),
    "huggingface_loss": (("training::test_huggingface", "exact::test_repeat"), ["training.huggingface"], "loss"),
    "slow_call": (
        ("time::test_workload[documents.4k]", "time::test_links"), ["time.workload[documents.4k]"], "the prediction",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "words", "expected", "text"),
    [
        *(pytest.param(plant, *row, id=plant, marks=pytest.mark.share(3)) for plant, row in PLANTED_IN_ONE.items()),
        *(
            pytest.param(plant, *row, id=f"{plant}.slow", marks=pytest.mark.nightly)
            for plant, row in PLANTED_AT_NIGHT.items()
        ),
    ],
)
def test_what_is_planted_fails_one_test(plant, words, expected, text):
    texts, outcomes = failed(plant, *words)
    assert sorted(texts) == sorted(expected), outcomes
    assert all(text in each for each in texts.values()), texts
    assert len(outcomes) > len(expected)


def test_tests_for_more_ranks_are_skipped():
    found = pool(2).run(planted, "nothing", "--quick", "exact::test_part", "exact::test_scheme", timeout=240)
    status, tests = found[0]
    assert status == 0
    assert tests["exact.scheme[ring]"][0] == "passed"
    assert tests["exact.part[cp_inside_tp]"] == ("skipped", "Skipped: it needs 4 ranks, and there are 2")
