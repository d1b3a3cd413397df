"""batches() on four ranks, in one group or several: gradients summed over micro-batches and ranks equal those of one
device, for attention, a convolution and a recurrence."""

import pytest

from tests.gloo import batches_work as work
from tests.lanes import NIGHTLY
from tests.pool import pool

STEPS = 500 if NIGHTLY else 20
pytestmark = pytest.mark.timeout(900 if NIGHTLY else 150)


def test_summed_gradients_are_those_of_one_device():
    assert max(pool(4).run(work.train, 0, STEPS, timeout=850 if NIGHTLY else 120)) <= 1e-12


@pytest.mark.parametrize("mistake", ["lost", "doubled", "weight", "group"])
def test_mistakes_change_them(mistake):
    assert max(pool(4).run(work.train, 2, 4, mistake)) > 1e-6
