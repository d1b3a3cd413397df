"""Watching what a device has under way, piece by piece: flights, the detector's rules for them in virtual time, rows
compared through a store, and an error that is raised in the main thread."""

import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist

from longspan.errors import RankError
from longspan.run.agreement import Comparison, rows_alone
from longspan.watch import devices
from longspan.watch.detector import BEAT, LOOK, Detector, Direction, Phase, Status, Verdict
from longspan.watch.devices import DevicePoller, Interrupt, WorkQueue
from longspan.watch.monitor import TorchStore
from longspan.watch.processes import GONE, STOPPED, TRACED, Process, ProcessState
from longspan.watch.store_client import StoreClient

pytestmark = pytest.mark.timeout(60)
TIMEOUT = 100.0


class Work:
    def __init__(self, is_done=False):
        self.is_done = is_done

    def is_completed(self):
        return self.is_done


class Broken:
    def is_completed(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def status(call, **more):
    more = {"direction": Direction.FORWARD, "num_steps": 1, "phase": Phase.IDLE, **more}
    return replace(Status().enter(call, 7, ""), **more)


# -- flights ----------------------------------------------------------------------------------------------------------


def test_flights_are_over_in_their_order():
    queue, works = WorkQueue(), [Work() for _ in range(3)]
    for call, (peer, work) in enumerate(zip((1, 2, 1), works, strict=True), start=4):
        queue.add(status(call), [peer], TIMEOUT).works = [work]
    assert (queue.oldest.status.call, {p: s.call for p, s in queue.pending().items()}) == (4, {1: 6, 2: 5})
    works[1].is_done = True
    queue.poll()
    assert queue.num_done == 0, "the oldest is not done"
    works[0].is_done = True
    queue.poll()
    assert (queue.num_done, queue.oldest.status.call) == (2, 6)
    assert {p: s.call for p, s in queue.pending().items()} == {1: 6}
    works[2].is_done = True
    queue.poll()
    assert (queue.num_done, queue.pending(), queue.oldest) == (3, {}, None)


def test_what_is_over_is_let_go_by_the_next_call():
    """Works may hold the memory of their messages: a loop must not gather them until somebody polls."""
    queue, held = WorkQueue(), []
    for call in range(50):
        work = Work(is_done=True)
        queue.add(status(call), [1], TIMEOUT).works = [work]
        held.append(weakref.ref(work))
        del work
    assert sum(each() is not None for each in held) <= 1


def test_two_threads_may_poll():
    queue, num = WorkQueue(), 2000
    works = [Work() for _ in range(num)]
    for call, work in enumerate(works):
        queue.add(status(call), [1], TIMEOUT).works = [work]
    threads = [threading.Thread(target=lambda: [queue.poll() for _ in range(500)]) for _ in range(3)]
    for thread in threads:
        thread.start()
    for work in works:
        work.is_done = True
    for thread in threads:
        thread.join()
    queue.poll()
    assert (queue.num_done, queue.oldest) == (num, None)


def test_what_the_host_has_not_begun_is_not_over():
    queue = WorkQueue()
    batch = queue.add(status(1), [1], TIMEOUT)
    queue.poll()
    assert queue.oldest is batch
    batch.works = []
    queue.poll()
    assert queue.oldest is None


def test_a_device_that_is_broken_is_nobody_elses_fault():
    queue = WorkQueue()
    queue.add(status(1), [1], TIMEOUT).works = [Broken()]
    queue.poll()
    assert queue.oldest is None


@pytest.mark.parametrize("is_loaded", [True, False])
def test_polling_leaves_captures_alone(is_loaded, monkeypatch):
    """CUDA refuses questions about events while a graph is captured on another thread, unless this one is relaxed."""
    modes = []

    class Runtime:
        def __init__(self, name, mode):
            if not is_loaded:
                raise OSError(name)
            assert (name, bool(mode & os.RTLD_NOLOAD)) == ("libcudart.so.13", True)

        def cudaThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
            modes.append(mode._obj.value)

    monkeypatch.setattr(devices.torch.version, "cuda", "13.2")
    monkeypatch.setattr(devices.ctypes, "CDLL", Runtime)
    devices.allow_polling_during_capture()
    assert modes == ([devices.RELAXED] if is_loaded else [])


# -- rules, in virtual time -------------------------------------------------------------------------------------------


class World:
    """Rank 0 looks at rank 1, whose process and status are what a test says."""

    def __init__(self):
        self.state, self.theirs, self.store = "S", status(3), {}
        me = Process(b"h" * 16, 1, 1)
        self.detector = Detector(0, (0, 1), me, None, lambda process: ProcessState(self.state))
        self.detector.status = status(3)
        self.queue = WorkQueue()
        self.poller = DevicePoller.__new__(DevicePoller)  # without its thread
        self.poller.detector, self.poller.queue = self.detector, self.queue
        self.poller._since, self.poller._num_done = None, 0
        self.peer = self.detector.peers[1]
        self.peer.process = Process(b"h" * 16, 2, 2)
        self.now = 1000.0

    def track(self, call, timeout=TIMEOUT, work=None):
        self.queue.add(status(call), [1], timeout).works = [work or Work()]

    def found_within(self, seconds):
        """What is found in this time, and when."""
        begin = self.now
        while self.now < begin + seconds:
            self.now += LOOK
            self.peer.status, self.peer.queried = self.theirs, self.now
            verdict = self.poller.tick(self.now)
            if verdict is not None:
                return self.now - begin, verdict.text
        return None


@pytest.mark.parametrize(
    ("state", "bar", "text"), [(GONE, 1.6, "is dead"), (STOPPED, 2.6, "has been stopped (SIGSTOP)")]
)
def test_who_owes_something_is_named(state, bar, text):
    world = World()
    world.track(3)
    world.state, world.theirs = state, status(3, pending=3)
    took, found = world.found_within(10)
    assert took < bar
    assert text in found


@pytest.mark.parametrize("state", [GONE, STOPPED])
@pytest.mark.parametrize("theirs", [status(3), status(9, pending=4), status(3, phase=Phase.ENDED)])
def test_who_has_delivered_everything_is_not_needed_any_more(state, theirs):
    world = World()
    world.track(3)
    world.state, world.theirs = state, theirs
    assert world.found_within(5 * TIMEOUT) is None


def test_nobody_is_looked_at_while_the_device_gets_on():
    world = World()
    world.state, world.theirs = STOPPED, status(9, pending=1)
    for call in range(1, 200):  # the host of rank 1 is stopped; its device works on
        work = Work()
        world.track(call, work=work)
        assert world.found_within(BEAT - LOOK) is None
        work.is_done = True
        assert world.found_within(LOOK) is None


@pytest.mark.parametrize("state", ["R", "S", "D", TRACED])
def test_who_lives_and_has_come_may_take_any_time(state):
    world = World()
    world.track(3)
    world.state, world.theirs = state, status(9, pending=2)
    assert world.found_within(20 * TIMEOUT) is None


def test_who_lives_and_does_not_come_is_waited_for_until_the_timeout():
    world = World()
    world.track(3)
    world.theirs = status(2)
    took, found = world.found_within(2 * TIMEOUT)
    assert TIMEOUT < took < TIMEOUT + 1
    assert "no answer for 100 s, though all are alive: rank 1 was last seen after call 2" in found


def test_who_stood_still_itself_has_seen_nobody_stopped():
    world = World()
    world.track(3)
    world.theirs, world.state = status(3, pending=3), STOPPED
    assert world.found_within(1.0) is None
    world.now += 500  # all were stopped; the other one goes on a moment later
    assert world.found_within(0.5) is None
    world.state = "S"
    assert world.found_within(50) is None


@pytest.mark.parametrize("is_flying", [False, True])
def test_other_calls_are_noticed_also_when_nobody_waits(is_flying):
    world = World()
    world.detector.remember(3, 7)
    world.theirs = status(3)
    if is_flying:
        world.track(3)
    assert world.found_within(5) is None
    world.theirs = replace(Status().enter(3, 8, "").enter(4, 7, ""), direction=Direction.FORWARD)
    took, found = world.found_within(5)
    assert took < 1
    assert "rank 1 did something else in call 3" in found


def test_calls_that_only_one_rank_knows_are_not_compared():
    world = World()
    world.detector.remember(30, 7)
    world.theirs = status(3)  # far behind: its trail tells of other calls
    assert world.found_within(5) is None
    world.theirs = replace(Status().enter(50, 9, ""), direction=Direction.FORWARD)  # far ahead
    assert world.found_within(5) is None


@pytest.mark.parametrize("is_flying", [False, True])
@pytest.mark.parametrize("spoils", [False, True])
def test_a_fault_of_others_disturbs_only_who_needs_them_unless_it_spoils_results(is_flying, spoils):
    world = World()
    world.detector.remember(3, 7)
    world.detector.fault = Verdict(1, "rank 1 raised ValueError", spoils)
    if is_flying:
        world.track(3)
    found = world.found_within(5)
    assert (found is not None) == (is_flying or spoils)
    assert found is None or (found[0] < 0.5 and "ValueError" in found[1])


# -- rows, through a store --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server():
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def connections(server, tmp_path):
    """Connections to a store of this kind, as many as asked for; closed in the end."""
    opened = []

    def connect(size, kind="tcp"):
        for _ in range(size):
            if kind == "tcp":
                opened.append(StoreClient(("127.0.0.1", server.port), f"test/{tmp_path.name}"))
            else:
                opened.append(TorchStore(dist.FileStore(str(tmp_path / "store"), size), "test"))
        return opened

    yield connect
    for store in opened:
        store.close()


def compared(stores, names, rows):
    found = [Comparison(store, (rank, len(stores)), names, rows[rank]) for rank, store in enumerate(stores)]
    with ThreadPoolExecutor(len(stores)) as pool:
        list(pool.map(Comparison.wait, found))
    return [list(each.rows) for each in found]


@pytest.mark.parametrize("kind", ["tcp", "file"])
def test_every_rank_sees_every_row_where_they_differ(kind, connections):
    stores = connections(4, kind)
    assert compared(stores, ("one", ""), [b"a"] * 4) == [[b"a"]] * 4
    for odd in range(4):
        rows = [b"b" if rank == odd else b"a" for rank in range(4)]
        assert compared(stores, (f"two {odd}", ""), rows) == [rows] * 4
    assert compared(stores, ("three", ""), [b"a", b"b", b"c", b"d"]) == [[b"a", b"b", b"c", b"d"]] * 4


def test_nobody_goes_on_before_all_have_come(connections):
    stores = connections(3)
    waits = [Comparison(store, (rank, 3), ("all", ""), b"a") for rank, store in enumerate(stores)]
    threads = [threading.Thread(target=each.wait) for each in waits[:2]]
    for thread in threads:
        thread.start()
    time.sleep(0.3)
    assert all(thread.is_alive() for thread in threads)
    waits[2].wait()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_comparisons_leave_nothing_behind(server, connections):
    stores, before, sizes = connections(3), "", []
    for number in range(20):
        compared(stores, (f"call {number}", before), [b"a" * 700] * 3)
        before = f"call {number}"
        sizes.append(server.num_keys())
    assert max(sizes[2:]) == min(sizes[2:]), sizes


def test_a_wait_for_the_store_ends_when_its_connection_is_closed(connections):
    (store,), errors = connections(1), []

    def waits():
        try:
            store.wait("never")
        except Exception as error:
            errors.append(type(error).__name__)

    thread = threading.Thread(target=waits)
    thread.start()
    time.sleep(0.2)
    store.close()
    thread.join(10)
    assert errors == ["LostError"]


def test_who_compares_unwatched_gives_up_at_the_timeout(connections):
    store, _ = connections(2)
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"ank 0 of 2 .*1 s"):
        rows_alone(store, (0, 2), ("alone", ""), b"a", 1.0)
    assert 0.9 < time.monotonic() - begin < 10


# -- an error in the main thread --------------------------------------------------------------------------------------


def loop(seconds):
    """What a training loop does: something in Python."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.001)


def test_the_main_thread_gets_the_error_with_its_text():
    interrupt = Interrupt()
    threading.Timer(0.1, interrupt.send, ("rank 1 is dead",)).start()
    with pytest.raises(RankError, match="rank 1 is dead") as caught:
        loop(10)
    assert type(caught.value).__name__ == "RankError"
    loop(0.1)  # once is enough


def test_an_error_that_a_call_has_raised_does_not_come_again():
    interrupt = Interrupt()
    interrupt.cancel()
    interrupt.send("rank 1 is dead")
    loop(0.1)


def test_an_error_that_is_on_its_way_is_taken_back():
    """Another thread has raised it, and the main thread was in no line of Python meanwhile."""
    interrupt, inside, go = Interrupt(), threading.Event(), threading.Event()

    def other():
        inside.wait()
        time.sleep(0.1)  # the main thread waits in C
        interrupt.send("rank 1 is dead")
        interrupt.cancel()
        go.set()

    thread = threading.Thread(target=other)
    thread.start()
    inside.set()
    go.wait()
    loop(0.1)
    thread.join()
