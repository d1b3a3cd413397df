"""tests/gpu on 2 and 4 stand-in devices, with small tensors: every test runs and passes.

Each time, most tests of `--quick` run on 2 devices, and a few on 4; at night, all run on both. Times are measured and
compared with their predictions, but none fails: no figure of speed means anything here. Tests of kernels that need
Triton or a package, or that do not take a dtype, are skipped, and say why.
"""

import pytest

from tests.device import gpu_suite_work as work
from tests.device.ranks import ranks
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


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world", [2, 4])
def test_every_test_passes(world):
    found = outcomes_of(world, timeout=3000)
    assert len(found) == NUM_TESTS
    assert {name.partition(".")[0] for name in found} == set(FILES)


NUM_TESTS = 82
"""Of a GPU."""
