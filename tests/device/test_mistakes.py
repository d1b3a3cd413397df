"""The stand-in device is a judge of order, memory and devices only if it sees mistakes: each of `mistakes.MISTAKES`, on
every scheme where it can do harm.

`ring` hid a missing wait from an earlier prototype, which ran messages as soon as it could. The prototype was blind,
and ring is not ordered in another way: a ring computes on its own rows while the first message travels, so on a
machine whose kernels are slow the message was there long before anybody would have had to wait for it, whatever its
delay. Here messages can be late: none starts before something waits for it, so without a wait it is not there, however
long other streams take (`native/streams.h`). On that schedule every scheme shows a missing wait in every run.
"""

import pytest

from tests.device import mistakes
from tests.device.mistakes import MISTAKES, RIGHT
from tests.device.ranks import ranks
from tests.lanes import share

SCHEMES = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2,ring)", *mistakes.EARLY)


def ends(table, name, scheme):
    """How a run ended on each rank. Ranks that met an error are not used again: messages may be under way."""
    pool = ranks(4 if scheme.startswith("hybrid") else 2)
    found = pool.run(mistakes.tried, table, name, scheme, 0, timeout=60)
    if not set(found) <= {"right", "wrong"}:
        pool.end()
    return found


def cases(table):
    """Each mistake on each scheme where it can do harm."""
    return [(name, scheme) for name in table for scheme in SCHEMES if scheme in table[name].schemes]


@pytest.mark.share(6)
@pytest.mark.parametrize(("name", "scheme"), cases(MISTAKES))
def test_mistakes_are_seen(name, scheme):
    assert set(ends("mistakes", name, scheme)) != {"right"}, f"{name}: not seen on {scheme}"


@pytest.mark.share(3)
@pytest.mark.parametrize(("name", "scheme"), cases(RIGHT))
def test_no_false_alarm(name, scheme):
    assert set(ends("right", name, scheme)) == {"right"}


def test_enough_mistakes():
    assert len(MISTAKES) >= 12


def test_ring_shows_a_missing_wait_in_every_run():
    for seed in share(range(10), 3):
        found = ranks(2).run(mistakes.tried, "mistakes", "no wait for messages", "ring", seed, timeout=60)
        assert found == ["wrong", "wrong"]
