"""What a call leaves behind, and what it costs the host: no thread, process, socket or file, and few Python calls."""

import pytest

from tests.gloo import footprint_work as work
from tests.pool import end_all, pool

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _fresh_ranks():
    """First calls are those that would start something."""
    end_all()
    yield
    end_all()  # audit hooks cannot be removed


def test_calls_start_no_thread_and_no_process_and_open_nothing():
    for events, opened, num_tasks, left, _ in pool(2).run(work.started, "calls"):
        assert events == []
        assert opened == []
        assert num_tasks == 0
        assert left == []


def test_prefetch_has_one_thread_which_ends_with_the_loop():
    for events, opened, num_tasks, left, during in pool(2).run(work.started, "prefetch"):
        assert (events, opened, num_tasks, left) == ([], [], 0, [])
        assert during == ["longspan-prefetch_0"]


BARS = {
    "first forward": 2700, "prepared forward": 200, "warm forward": 200,
    "first backward": 3900, "prepared backward": 270, "warm backward": 270,
}  # fmt: skip
"""Python calls inside of Longspan over two ranks; the bars of backward are today's counts and a little more. Prepared:
the first call of a plan after `plan.prepare(rank, group=group)`."""


def test_attention_makes_few_python_calls():
    for found in pool(2).run(work.python_calls):
        assert {name: count for name, count in found.items() if count > BARS[name]} == {}, found
