"""Batches that a thread prepares while a step runs: new documents in every step."""

import pytest

from tests.gloo import prefetch_work as work
from tests.pool import pool

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize("scheme", ["ring", "exchange", "all_to_all", "auto"])
def test_every_step_has_other_documents_and_is_exact(scheme):
    steps = 12
    for error, in_loop, num_recorded in pool(2).run(work.train, steps, scheme):
        assert error <= 1e-12
        assert not in_loop  # the thread recorded every program
        assert num_recorded == 2 * steps
