"""The production failure detector in a simulated world, thousands of seeds: no false alarm, no missed death, one name.

A failing seed prints itself: `judged(World(seed))` runs it again.
"""

import math

import pytest

from longspan.watch import detector
from tests.simulation.detection import HARMLESS, KINDS, World

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
    needs = [rank.needs_since for rank in raised if rank.left[:1] and rank.left[0] in gone]
    for rank in raised:
        begin = max(world.strike_time, rank.waits_since, 0.0 if -1 in names else min(needs, default=math.inf))
        if math.isfinite(begin):
            assert rank.ended - begin < granted + SLACK, f"named after {rank.ended - begin:.1f} s: {rank.finding}"
    return f"{world.kind}: {'named' if raised else 'fine'}"


@pytest.mark.share(8)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.quick), *range(CHUNK, NUM_SEEDS, CHUNK)])
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


# -- mutants: each breaks one thing, and the seeds must notice ------------------------------------------------------


def unpatient(patch):
    """Time in which this rank stood still counts as silence of the others."""
    patch.setattr(detector, "STRIDE", math.inf)


def hasty(patch):
    """Who has ended is named at once, though its last message is on its way."""
    patch.setattr(detector, "DELIVERY", 0.0)
    patch.setattr(detector, "LATE", 0.0)


def impatient(patch):
    """Who has ended is named after a second, though it had finished the call."""
    patch.setattr(detector, "LATE", detector.DELIVERY)


def blind_to_death(patch):
    """A process that is gone is waited for."""
    patch.setattr(detector, "GONE", "none")


def blind_to_stops(patch):
    """A process that is stopped is waited for."""
    patch.setattr(detector, "STOPPED", "none")


def blind_to_the_store(patch):
    """The store's host is not looked at; whoever does not answer at once is lost."""
    original = detector.Detector.__init__
    patch.setattr(detector.Detector, "__init__", lambda self, a, b, c, d, e: original(self, a, b, c, None, e))


def all_are_near(patch):
    """Processes of other hosts are looked for on this one."""
    patch.setattr(detector.Detector, "_is_local", lambda self, peer: peer.process is not None)


def deaf(patch):
    """What others wrote down is not read."""
    patch.setattr(detector.Verdict, "parse", classmethod(lambda cls, raw, size: None))


def without_watchers(patch):
    """Ranks of other hosts are judged by their own signs of life, which need the interpreter's lock."""
    patch.setattr(detector, "SLOW_SIGNS", 2.0)
    patch.setattr(detector, "parse_heartbeat", lambda raw: (-1, detector.ProcessState("R")))


def blames_the_first(patch):
    """Of several ranks whose messages could not be begun, only the first is looked at."""
    check = detector.Detector.check

    def checks(self, now, current, num_waits, **options):
        return check(self, now, self.wait.peers[0] if current == self.rank else current, num_waits, **options)

    patch.setattr(detector.Detector, "check", checks)


MUTANTS = {
    blames_the_first: ("kill", "two kills"),
    unpatient: ("all stand still",),
    impatient: ("late messages",),
    hasty: ("nothing", "lock", "all stand still"),
    blind_to_death: ("kill", "two kills"),
    blind_to_stops: ("stop",),
    blind_to_the_store: ("slow store",),
    all_are_near: ("host",),
    deaf: ("raise",),
    without_watchers: ("lock",),
}


@pytest.mark.share(5)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutate", MUTANTS, ids=lambda mutate: mutate.__name__)
def test_mutants_are_noticed(mutate, monkeypatch):
    seeds = [seed for seed in range(150 * len(KINDS)) if KINDS[seed % len(KINDS)] in MUTANTS[mutate]]
    for seed in seeds[:8]:
        judged(World(seed))  # as it is, all is well
    mutate(monkeypatch)
    for seed in seeds:
        try:
            judged(World(seed))
        except (AssertionError, AttributeError):
            return
    pytest.fail(f"{mutate.__doc__} {len(seeds)} seeds did not notice")
