"""The production failure detector in a simulated world, thousands of seeds: no false alarm, no missed death, one name.

A failing seed prints itself: `judged(World(seed))` runs it again.
"""

import math

import pytest

from longspan.execution import detector
from longspan.testing.detection import HARMLESS, KINDS, World

NUM_SEEDS, CHUNK = 2080, 260
SLACK = 1.0
"""Virtual seconds for the store and for connections to tell."""


def judged(world):
    """Runs a seed and checks all that is promised; returns what became of it."""
    ranks = world.run()
    raised = [rank for rank in ranks if rank.finding is not None]
    gone = {r.number for r in ranks if r.ended is None and r.process.state in ("X", "T")}
    for rank in ranks:
        assert rank.ended is not None or rank.number in gone, f"rank {rank.number} hangs in call {rank.call}"
    if world.kind in HARMLESS:
        assert not raised, f"nothing is wrong, but {raised[0].finding}"
        return f"{world.kind}: fine"
    names = {rank.finding.rank for rank in raised}
    texts = [rank.finding.text for rank in raised]
    assert len(names) <= 1 or (world.kind == "two kills" and world.holder in gone), f"different names: {texts}"
    if world.kind.startswith("store"):
        assert names <= {-1, world.holder}, texts
    elif world.kind == "two kills":
        assert names <= {world.victim, (world.victim + 1) % world.size, -1}, texts
    elif world.kind == "host":
        assert names <= gone, texts
    else:
        assert names <= ({world.victim, -1} if world.victim == world.holder else {world.victim}), texts
    far = len({rank.process.process.host for rank in ranks}) > 1
    granted = detector.SLOW_SIGNS if far and not world.was_watched else 3.0
    for rank in raised:
        begin = max(world.strike_time, rank.waits_since, 0.0 if -1 in names else world.direct)
        if math.isfinite(begin):
            assert rank.ended - begin < granted + SLACK, f"named after {rank.ended - begin:.1f} s: {rank.finding}"
    return f"{world.kind}: {'named' if raised else 'fine'}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", range(0, NUM_SEEDS, CHUNK))
def test_seeds(first):
    for seed in range(first, first + CHUNK):
        try:
            judged(World(seed))
        except BaseException as error:
            error.add_note(f"run again with: judged(World({seed}))")
            raise


def test_there_are_enough_seeds_and_all_kinds_are_met():
    assert NUM_SEEDS >= 2000
    found = {judged(World(seed)) for seed in range(20 * len(KINDS))}
    assert {f"{kind}: {'fine' if kind in HARMLESS else 'named'}" for kind in KINDS} <= found
