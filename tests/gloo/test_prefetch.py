"""Batches that a thread prepares while a step runs: new documents in every step, and no messages from the thread."""

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


@pytest.mark.parametrize("world", [1, 2])  # a program for one rank must not fail on two
@pytest.mark.parametrize("what", ["attention", "check_same"])
def test_messages_from_the_thread_are_refused_and_the_group_stays_usable(what, world):
    for text, largest in pool(world).run(work.messages, what):
        assert "prefetch must not send messages" in text
        assert largest == 0.0
