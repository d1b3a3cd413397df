"""tests/gpu on 2 and 4 stand-in devices, and with 2 ranks on one, with small tensors: every test runs and passes.

Each time, most tests of `--quick` run on 2 devices, and a few on 4; at night, all run on both. Times are measured and
compared with their predictions, but none fails: no figure of speed means anything here. Tests of kernels that need
Triton or a package, or that do not take a dtype, are skipped, and say why.
"""

from functools import partial

import pytest

from tests.device import gpu_suite_work as work
from tests.device.ranks import ranks
from tests.gpu.claims import verdicts
from tests.lanes import share

PACKAGES = ("fa3", "fa4", "cudnn_varlen")
REFUSED = (
    *(f"operators.kernel[{name}" for name in ("varlen.float32", "flash.float32", "cudnn.float32", "flex.", *PACKAGES)),
    *(f"long.kernel[{name}" for name in PACKAGES),
    "long.activated",
)
FILES = ("operators", "exact", "long", "training", "memory", "time", "host")


def outcomes_of(world, *words, timeout=900):
    """The outcomes by name, after all ranks have ended well."""
    found = ranks(world, "cuda").run(work.on_device, *words, timeout=timeout)
    failed = {name: text for name, (outcome, text) in found[0][1].items() if outcome == "failed"}
    assert ([status for status, _ in found], failed) == ([0] * world, {})
    for name, (outcome, text) in found[0][1].items():
        if outcome == "skipped":
            assert name.startswith(REFUSED) or (world < 4 and "it needs 4 ranks" in text), (name, text)
            assert len(text) > 20, "why"
        else:
            assert outcome == "passed", name
    return found[0][1]


def test_quick_tests_pass_on_two_devices():
    names = ("exact", "memory", "time", "host", *share(("operators", "long", "training"), 2))
    found = outcomes_of(2, "--quick", *names)
    assert {name.partition(".")[0] for name in found} == set(names)


def test_tests_that_need_four_devices_pass():
    words = "-khybrid or cp_inside_tp or first_call or (peak and ring) or waits"
    found = outcomes_of(4, "--quick", words, "exact", "memory", "host")
    assert {"exact.part[cp_inside_tp]", "memory.peak[ring.causal]", "host.waits"} <= found.keys()
    assert {outcome for outcome, _ in found.values()} == {"passed"}


def test_scores_that_learn_are_verified_on_the_device():
    found = outcomes_of(2, "-kscore", "exact")
    assert {"exact.scores[score]", "exact.scores[sinks]"} <= found.keys()


# -- All ranks on one card ---------------------------------------------------------------------------------------------


ONE_CARD = ("--one-gpu", "--quick")
NO_CARDS = "it needs a card for each rank"


def one_card(*words, plant=None):
    """The outcomes by name of two ranks that share a card."""
    found = ranks(2, "cuda").run(partial(work.on_device, plant=plant), *words, timeout=900)
    assert len({status for status, _ in found}) == 1
    return found[0][1]


def words_of(found):
    return {each.claim: each.word for each in verdicts(found)}


def test_quick_tests_pass_on_one_card():
    found = one_card(*ONE_CARD)
    failed = {name: text for name, (outcome, text) in found.items() if outcome == "failed"}
    assert not failed
    for name, (outcome, text) in found.items():
        if outcome == "skipped":
            assert name.startswith(REFUSED) or NO_CARDS in text or "it needs 4 ranks" in text, (name, text)
    words = words_of(found)
    assert {claim for claim, word in words.items() if word == "not run"} == {"groups of NCCL", "times are as predicted"}
    assert set(words.values()) == {"right", "not run"}


PLANTED = {  # the claims that must turn wrong, and tests of them
    "stale_buffer": ("attention over ranks equals one device", "exact::test_scheme[ring]"),
    "wrong_alignment": ("a kernel alone equals dense float64", "operators::test_kernel[varlen.bfloat16]"),
    "lse_in_log2": ("a kernel alone equals dense float64", "operators::test_kernel[varlen.bfloat16]"),
    "real_clamp": ("a kernel alone equals dense float64", "operators::test_kernel[varlen.bfloat16]"),
}


@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_is_wrong_on_one_card(plant):
    claim, *words = PLANTED[plant]
    found = one_card(*ONE_CARD, *words, plant=plant)
    assert words_of(found)[claim] == "wrong", found


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_every_test_passes_on_one_card():
    found = one_card("--one-gpu")
    assert not {name: text for name, (outcome, text) in found.items() if outcome == "failed"}


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_every_test_passes(world):
    found = outcomes_of(world, timeout=3000)
    assert len(found) == NUM_TESTS
    assert {name.partition(".")[0] for name in found} == set(FILES)


NUM_TESTS = 85
"""Of a GPU."""
