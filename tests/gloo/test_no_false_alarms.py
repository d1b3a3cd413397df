"""Who is healthy is not named, however long it is silent; who is dead is, also from another host.

LONGSPAN_ALARM_MINUTES=5 runs the long variants (locks held for 60 s, 5 minutes of busy cores).
"""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.gloo import alarm_work
from tests.gloo.selected import selected
from tests.pool import context

MINUTES = float(os.environ.get("LONGSPAN_ALARM_MINUTES", "1"))
AT_ONCE, LIMIT, BAR = 4, 150 + 60 * MINUTES, 3.0
HOLDS = (2.0, 10.0) if MINUTES <= 1 else (2.0, 10.0, 60.0)
HELD = [
    ("held", 2, (where, who, seconds, False))
    for seconds in HOLDS
    for where in ("forward", "between", "backward")
    for who in (0, "all")
]
HELD += [("held", 2, (where, who, HOLDS[-1], True)) for where, who in (("forward", 0), ("between", "all"))]
STOPPED = [("stopped", 3, (1.0, far)) for far in (False, True)]
QUIET = HELD + STOPPED


class Job:
    """The ranks of one case, in fresh processes, with a store of the test's own."""

    def __init__(self, store, name, world, args):
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context().Pipe()
            process = context().Process(target=alarm_work.main, args=(name, rank, world, store.port, args, there))
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def heard(self, rank):
        """What a rank says next; None if it died."""
        try:
            return self.pipes[rank].recv() if self.pipes[rank].poll(LIMIT) else ("silent", 0.0, "")
        except (EOFError, OSError):
            return None

    def end(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)


@pytest.fixture(scope="module")
def store():
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def ran(store, name, world, args):
    job = Job(store, name, world, args)
    try:
        return [job.heard(rank) for rank in range(world)]
    finally:
        job.end()


@pytest.mark.share(2)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("what", ["kill", "stop", "lost"])
def test_who_is_struck_on_another_host_is_named(what, store):
    job = Job(store, "struck", 3, (what,))
    watcher = None
    try:
        kind, when, watcher = job.heard(1)
        assert kind == "struck"
        for rank in (0, 2):
            kind, named, text = job.heard(rank)
            assert kind == "RankError", text
            assert {"kill": "rank 1 is dead: its process", "stop": "rank 1 has been stopped (SIGSTOP)"}.get(
                what, "rank 1 is lost: its host"
            ) in text
            assert named - when < BAR * (2 if os.getloadavg()[0] > 4 else 1), text
        if what == "kill":  # a watcher does not outlive its rank
            job.processes[1].join(10)
            end = time.monotonic() + 5
            while os.path.exists(f"/proc/{watcher}") and time.monotonic() < end:
                time.sleep(0.1)
            assert not os.path.exists(f"/proc/{watcher}")
    finally:
        job.end()
        if what == "lost" and watcher:
            os.kill(watcher, signal.SIGCONT)


@pytest.mark.timeout(300)
def test_a_second_thread_is_refused_and_the_first_goes_on(store):
    for kind, _, refused in ran(store, "threads", 2, ()):
        assert kind == "fine", refused
        assert len(refused) == 2
        assert all("in use by another thread of this process" in text for text in refused)


@pytest.fixture(scope="module")
def quiet(request, store):
    """All cases that were selected, some at a time: most of their time is waiting."""
    chosen = selected(request, "case")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {str(case): pool.submit(ran, store, *case) for case in chosen}


@pytest.mark.share(3)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", QUIET, ids=lambda case: f"{case[0]}-{'-'.join(map(str, case[2]))}")
def test_who_lives_is_waited_for(case, quiet):
    name, world, args = case
    heard = quiet[str(case)].result()
    assert [kind for kind, _, _ in heard] == ["fine"] * world, heard
    if name == "held" and args[1] == 0 and args[2] > 11:
        assert any("rank 1 has waited 10 s for rank 0" in line and "rank 0 is alive" in line for line in heard[1][2])


@pytest.mark.nightly
@pytest.mark.timeout(120 + 120 * MINUTES)
def test_busy_cores_are_no_fault(store):
    crowd = [context().Process(target=alarm_work.busy, daemon=True) for _ in range(16)]
    try:
        for process in crowd:
            process.start()
        heard = ran(store, "crowded", 4, (60 * MINUTES, False))
    finally:
        for process in crowd:
            process.kill()
            process.join(10)
    assert [kind for kind, _, _ in heard] == ["fine"] * 4, heard
