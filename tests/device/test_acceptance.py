"""The GPU half of `longspan acceptance` on 2 and 4 stand-in devices, at small sizes: every line runs and passes.

Left out: `time` (no figure of speed means anything here) and `faults` (tests/gloo/test_nccl_faults.py has a group for
these, whose operations can be aborted and time out).
"""

import pytest

from tests.device import acceptance_work as work
from tests.device.ranks import ranks
from tests.lanes import NIGHTLY

LINES = ("operators", "exact", "memory", "host.waits")


@pytest.mark.parametrize("world", [2, 4])
def test_every_line_passes(world):
    lines = LINES if world == 2 else ("exact", "memory", "host.waits")
    for found in ranks(world, "cuda").run(work.outcomes, lines, not NIGHTLY, timeout=900):
        assert {"exact.sinks", "exact.ring", "memory.exchange.causal"} <= set(found)
        for name, (judgement, text, _) in found.items():
            allowed = {"right"} | ({"not run"} if name.startswith("operators") or world < 4 else set())
            assert judgement in allowed, f"{name}: {judgement}: {text}"


def test_scores_that_learn_are_verified_on_the_device():
    for found in ranks(2, "cuda").run(work.outcomes, ("exact.score", "exact.sinks"), False, timeout=300):
        assert {name: judgement for name, (judgement, _, _) in found.items()} == {
            "exact.score": "right",
            "exact.sinks": "right",
        }
