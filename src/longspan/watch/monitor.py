"""Watch: publish heartbeats and where this rank is, and find out why another rank does not arrive.

Ranks of one host are inspected directly, those of other hosts through a watcher process next to each rank. A rank
publishes its status and its errors in the job's store, in records of fixed layout. The first rank that detects a fault
writes it there, so that all ranks raise the same message. The `Detector` decides; this file has the threads, the clock
and the store.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import queue
import secrets
import subprocess  # nosec B404  # the watcher process of the rank
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from longspan._torch import default_store
from longspan.errors import RankError
from longspan.watch.detector import BEAT, DELIVERY, LOOK, Detector, Phase, Request, Status, Verdict
from longspan.watch.devices import DevicePoller, Interrupt, WorkBatch, join_unless_asleep
from longspan.watch.processes import GONE, UNKNOWN_HOST, Process, current_process, find_listener, inspect_process
from longspan.watch.store_client import LostError, Store, StoreClient

LARGE_WORLD = 2048
"""With this many ranks or more, heartbeats become rarer: one store serves them all."""
GRACE = 0.75
"""Seconds for which a process that holds the store stays after a failure, so that all ranks can read of it."""
LAST = 5.0
"""Seconds for which it stays after a normal exit, until the others have ended as well."""
ADVICE = "End this process, so that the launcher can start all ranks again (torchrun --max-restarts)."
_store_hosts: dict[tuple[str, int], Process | None] = {}
_log = logging.getLogger("longspan")


class Watch:
    """Publishes this rank's state in one group, and detects failures of the others.

    `begin_call` publishes a call, `wait` waits for messages on CPUs and `track` registers those of a device; `diagnose`
    explains messages that failed, `check` raises once the group has failed, `report` publishes an error of this rank,
    and `stop` ends the threads. `status.step`, `status.phase` and `status.training_step` are assigned directly.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], *, world_size: int) -> None:
        self.store = store
        self.failed: str | None = None
        """Why this group cannot be used any more."""
        host = _find_store_host(store) if isinstance(store, StoreClient) and store.is_local else None
        self.detector = Detector(rank, names, current_process(), host, inspect_process)
        self.status = self.detector.status
        self._hosts_store = host is not None and host.pid == os.getpid()
        self._abort: Callable[[], None] = lambda: None
        self._poller: DevicePoller | None = None
        self._host_waits = threading.Lock()
        self._interrupt = Interrupt()
        self._is_main = False
        """Whether calls came from the main thread."""
        self._interval = BEAT * max(1.0, world_size / LARGE_WORLD)  # all groups share one store
        self._stop, self._wake = threading.Event(), threading.Event()
        self._exchange()  # others see this rank from here on
        self._waiter = Waiter()
        self._thread = threading.Thread(target=self._run, daemon=True, name="longspan-heartbeat")
        self._thread.start()
        self._pid = os.getpid()
        atexit.register(self._exit)

    # -- Calls ---------------------------------------------------------------------------------------------------------

    def begin_call(
        self,
        call: int,
        identity: int,
        name: str,
        *,
        patience: float,
        abort: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        """Publish that this rank enters a call, or raise if the group has failed.

        `fields` are those of `Status`; `abort` ends the works of a device, and is None on CPUs.
        """
        if self.failed is not None:
            self.check()
        if abort is not None:
            self._abort = abort
            if self.detector.fault is not None:  # the host waits in no call of a device, and would not see it
                self._raise(self.detector.fault)
        self._is_main = self._is_main or threading.current_thread() is threading.main_thread()
        self.detector.patience = patience
        self.status = self.detector.status = self.status.enter(call, identity, name, step=0, **fields)
        if time.monotonic() - self._exchanged > BEAT / 4:
            self._wake.set()

    def check(self, *, once: bool = False) -> None:
        """Raise if the group has failed: its messages may be half sent. With `once`, only if no call has raised yet."""
        if self.failed is not None and not (once and self._interrupt.is_delivered):
            self._interrupt.cancel()
            raise RankError(f"this group failed before, and cannot be used any more: {self.failed}")

    def report(self, error: BaseException, refused: int | None = None) -> None:
        """Publish that this rank raised an error; the group has failed, unless the error only `refused` the call of
        this number before anything was sent."""
        text, name = f"{type(error).__name__}: {error}", self.detector.name(self.detector.rank)
        if refused is not None:
            verdict = Verdict(self.detector.rank, f"{name} refused call {refused}: {text}")
            self._send(("set", f"refused/{refused}", verdict.pack()))
        else:
            self._interrupt.cancel()
            self._fail(Verdict(self.detector.rank, f"{name} raised {self.status}: {text}"))

    # -- Waiting -------------------------------------------------------------------------------------------------------

    def wait(
        self, works: Works, group: dist.ProcessGroup, timeout: float, peers: Collection[int] | None = None
    ) -> None:
        """Return when all works, each with a peer, are done, or raise a `RankError` that names the rank at fault.

        A wait for Gloo can be neither polled nor ended, so another thread waits and this one checks the ranks.
        """
        with self._host_waits:
            status, phase = self.status, self.status.phase
            if phase is not Phase.AGREEING:
                status.phase = Phase.WAITING
            self.detector.begin_wait(time.monotonic(), dict(works) if peers is None else peers, timeout)
            try:
                error = self._waiter.wait(works, group, self._check_ranks, BEAT / 4)
                if error is not None:
                    self._raise_broken(self._waiter.current, error)
            finally:
                self.detector.wait = None
                status.phase = phase

    def diagnose(self, error: Exception, peers: Sequence[int]) -> None:
        """Raise a `RankError` for messages with these ranks that could not be started."""
        self.check()  # the communicator may have been aborted
        with self._host_waits:
            self.detector.begin_wait(time.monotonic(), peers, math.inf)
            try:
                self._raise_broken(self.detector.rank, first_line(error))
            finally:
                self.detector.wait = None

    def _check_ranks(self) -> None:
        verdict = self.detector.check(time.monotonic(), self._waiter.current, self._waiter.num_waits)
        if verdict is not None:
            self._raise(verdict)
        warning = self.detector.warning()
        if warning is not None:
            _log.warning(warning)

    def _raise_broken(self, peer: int, error: str) -> None:
        """Raise for a failed message of this peer or, if it is this rank, of any rank waited for. The peer may be dead,
        or have ended because of another rank."""
        for _ in range(int((self.detector.patience + DELIVERY) / (BEAT / 4))):  # a count: all may have been stopped
            self._wake.set()
            time.sleep(BEAT / 4)
            verdict = self.detector.check(time.monotonic(), peer, -2, broken=True)
            if verdict is not None:
                self._raise(verdict)
        self._raise(self.detector.explain_failure(peer, error))

    def _raise(self, verdict: Verdict) -> None:
        self._interrupt.cancel()
        raise RankError(self._fail_with(verdict, self.status))

    def _fail_with(self, verdict: Verdict, status: Status) -> str:
        """Mark the group as failed and return the error's text. The first verdict of all ranks counts."""
        if verdict.rank >= 0:
            self._fail(verdict)
        else:
            self.failed = verdict.text
            if self._poller is not None:
                self._poller.has_failed.set()
        name = self.detector.name(self.detector.rank)
        return f"{str(self.failed).rstrip('.')}. Meanwhile {name} was waiting {status}. {ADVICE}"

    def _fail(self, verdict: Verdict) -> None:
        self.failed = verdict.text
        raw = self._send(("claim", "fault", verdict.pack()))
        if raw:
            with suppress(RankError):  # no record of Longspan
                self.failed = Verdict.parse(raw, len(self.detector.names)).text
        if self._poller is not None:
            self._poller.has_failed.set()

    # -- Devices -------------------------------------------------------------------------------------------------------

    def track(self, peers: Sequence[int], timeout: float) -> WorkBatch:
        """Register messages of a device that are about to be started; they are polled from here on."""
        if self._poller is None:
            self._poller = DevicePoller(self.detector, self._host_waits, self._on_device_failure)
        return self._poller.queue.add(replace(self.status), peers, timeout)

    def _on_device_failure(self, verdict: Verdict | None) -> None:
        """Abort works of the device, for which the host may be waiting, and raise the verdict in the main thread."""
        text = None
        if verdict is not None:
            oldest = None if self._poller is None else self._poller.queue.oldest
            text = self._fail_with(verdict, self.status if oldest is None else oldest.status)
            _log.error(text)
        try:
            self._abort()
        except RuntimeError as error:
            name = self.detector.name(self.detector.rank)
            _log.error(f"{name} could not abort the works of its device: {first_line(error)}")
        if text is not None and self._is_main and not self._stop.is_set():
            self._interrupt.send(text)

    @property
    def _oldest_pending(self) -> int:
        oldest = None if self._poller is None else self._poller.queue.oldest
        return 0 if oldest is None else oldest.status.call

    # -- The store -----------------------------------------------------------------------------------------------------

    @cached_property
    def connection(self) -> Store:
        """Another connection to the store, for requests of the waiting thread; `stop` closes it."""
        return self.store.again(None)

    def _run(self) -> None:
        """Publish and read, until the store is lost or this rank ends."""
        while not self._stop.is_set():
            try:
                self._exchange()
            except RankError as error:
                self.detector.fault = Verdict(-1, str(error))
                return
            except Exception as error:
                if not self._stop.is_set():
                    self.detector.lost = first_line(error)
                return
            self._wake.wait(self._interval if self.detector.wait is None else min(LOOK, self._interval))
            self._wake.clear()

    def _exchange(self) -> None:
        self._exchanged = time.monotonic()
        detector, answer = self.detector, None
        requests = detector.exchange(time.monotonic, self._oldest_pending)
        with suppress(StopIteration):
            while True:
                request = requests.send(answer)
                detector.mark_request_sent(time.monotonic())
                answer = _send(self.store, request)
                detector.mark_answered(time.monotonic())
        if not detector.is_single_host and not detector.must_beat:
            detector.must_beat = not start_watcher(self.store, detector.me, f"heartbeat/{detector.rank}")

    def _send(self, request: Request) -> bytes | None:
        """Send a request over a connection of its own. A lost store is ignored, so that it does not hide the error that
        is reported. PyTorch's own clients may wait forever, so a thread uses them that is abandoned then."""
        answers: list[bytes | None] = []

        def send() -> None:
            with suppress(Exception):
                store = self.store.again(2 * BEAT)
                try:
                    answers.append(_send(store, request))
                finally:
                    store.close()

        if isinstance(self.store, StoreClient):
            send()
        else:
            thread = threading.Thread(target=send, daemon=True)
            thread.start()
            thread.join(2 * BEAT)
        return answers[0] if answers else None

    # -- The end -------------------------------------------------------------------------------------------------------

    def _exit(self) -> None:
        """Stop when the interpreter exits. A process that holds the store stays until all could read it."""
        if os.getpid() != self._pid:  # a forked child is not this rank
            return
        if self._hosts_store and self.failed is None and getattr(sys, "last_value", None) is None:
            self._send(("set", "closes", b"1"))
        self.stop(lingers=self._hosts_store)

    def stop(self, *, lingers: bool = False) -> None:
        """Publish that this rank has ended, with the error that ends the process if there is one, and end the threads.
        With `lingers`, wait until the other ranks have ended as well."""
        if self._stop.is_set() or os.getpid() != self._pid:
            return
        atexit.unregister(self._exit)
        error = getattr(sys, "last_value", None)
        if error is not None and self.failed is None:
            self.report(error)
        if self._poller is not None and self.failed is None:
            self._poller.wait_all(LAST)
        self._stop.set()
        self._wake.set()
        self.status.phase = Phase.ENDED
        last = replace(self.status, beat=self.detector.beat + 1, pending=self._oldest_pending)
        self._send(("set", f"status/{self.detector.rank}", last.pack()))
        deadline = time.monotonic() + (LAST if self.failed is None else GRACE)
        others = set(range(len(self.detector.names))) - {self.detector.rank} if lingers else set()
        while others and time.monotonic() < deadline:
            time.sleep(BEAT / 4)
            raws = {n: self._send(("get", f"status/{n}", b"")) for n in others}
            with suppress(RankError):
                others = {n for n, raw in raws.items() if raw and Status.parse(raw).phase is not Phase.ENDED}
        self.store.close()
        if "connection" in self.__dict__:
            self.connection.close()
        self._waiter.stop()
        if self._poller is not None:
            self._poller.stop()
        if self._thread is not threading.current_thread():
            join_unless_asleep(self._thread)


def _find_store_host(store: StoreClient) -> Process | None:
    """Return the process that holds the store; it is searched for once, as long as it is alive."""
    process = _store_hosts.get(store.address)
    if process is None or inspect_process(process).state == GONE:
        process = _store_hosts[store.address] = find_listener(store.address[1])
    return process


def _send(store: Store, request: Request) -> bytes | None:
    kind, key, value = request
    if kind == "get":
        return store.get(key)
    return store.set(key, value) if kind == "set" else store.claim(key, value)


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0][:200]


# -- A thread that waits for Gloo --------------------------------------------------------------------------------------


CLOSING_TAG = 0x7FFFFFF0
"""A tag that no message has."""


Works = Sequence[tuple[int, Any]]
"""Works that are waited for, each with a peer."""


class Waiter:
    """A thread that waits for works, one list after the other, until it is left with one that does not end."""

    def __init__(self) -> None:
        self.current = -1
        """The rank whose message is waited for."""
        self.num_waits = 0
        """The number of messages waited for so far, including that one."""
        self._requests: queue.SimpleQueue[Works | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True, name="longspan-wait")
        self._thread.start()
        self._abandoned: dist.ProcessGroup | None = None

    def wait(self, works: Works, group: dist.ProcessGroup, check: Callable[[], None], pause: float) -> str | None:
        """Return None when all is done, or why a message (of `current`) failed. `check` is called every `pause` seconds
        and may raise; the works are abandoned then, and the group is kept until its connections are closed."""
        self._abandoned = group
        self._requests.put(works)
        while True:
            try:
                error = self._answers.get(timeout=pause)
                break
            except queue.Empty:
                check()
        self._abandoned = None
        return error

    def stop(self) -> None:
        """End the thread, by closing the group's connections if it waits for one."""
        self._requests.put(None)
        if threading.current_thread() is self._thread:
            return
        group = self._abandoned
        if group is not None:
            # Gloo closes all connections of a group when a wait times out. Every rank is tried, since a connection that
            # is closed already cannot time out; after the first that does, the others return at once.
            others = [rank for rank in range(group.size()) if rank != group.rank()]
            for tag in range(CLOSING_TAG, CLOSING_TAG + 8):  # each network interface has connections of its own
                for other in others:
                    with suppress(RuntimeError):
                        buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
                        group.recv([buffer], other, tag).wait(timedelta(milliseconds=1))
        # A thread that is asleep now will not wake: Gloo never ends a message whose peer died in the middle of it. It
        # sleeps until the group's timeout, long after this process has ended.
        join_unless_asleep(self._thread)
        self._abandoned = None

    def _run(self) -> None:
        while (works := self._requests.get()) is not None:
            answer = self._wait_all(works)
            del works  # no work is referenced when the answer is sent
            self._answers.put(answer)

    def _wait_all(self, works: Works) -> str | None:
        for peer, work in works:
            self.current = peer
            self.num_waits += 1
            try:
                work.wait()
            except Exception as error:
                return first_line(error)
        return None


# -- The watcher process -----------------------------------------------------------------------------------------------


MAX_STARTS = 3
"""How many watchers are started for a process, should they end by themselves."""
_watchers: dict[tuple[str, int], WatcherProcess] = {}
_watchers_lock = threading.Lock()


class WatcherProcess:
    """A watcher of this process (see `processes.py`) that writes to one store."""

    def __init__(self, address: tuple[str, int], me: Process, num_starts: int) -> None:
        self.num_starts, self.pid, self.keys = num_starts, os.getpid(), set[bytes]()
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("processes.py"))]
        self.process = subprocess.Popen(  # noqa: S603  # nosec B603  # a file of this package, with numbers
            [*command, address[0], str(address[1]), str(me.pid), str(me.start)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the rank; the watcher reports that
        )
        atexit.register(self.stop)

    def add_key(self, key: bytes) -> bool:
        """Make it write heartbeats under this key; return whether it does."""
        if self.process.poll() is not None or self.process.stdin is None:
            return False
        if key not in self.keys:
            self.keys.add(key)
            try:
                self.process.stdin.write(key + b"\n")
                self.process.stdin.flush()
            except OSError:
                return False
        return True

    def stop(self) -> None:
        if os.getpid() != self.pid or self.process.stdin is None:  # a forked child has no watcher
            return
        try:
            self.process.stdin.write(b"end\n")
            self.process.stdin.close()
            self.process.wait(2.0)
        except OSError:
            self.process.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_watcher(store: Store, me: Process, key: str) -> bool:
    """Make a watcher write heartbeats of this process under this key, started if needed; return whether it does."""
    if not isinstance(store, StoreClient) or me.host == UNKNOWN_HOST or not sys.executable:
        return False
    with _watchers_lock:
        watcher = _watchers.get(store.address)
        if watcher is None or watcher.pid != os.getpid() or watcher.process.poll() is not None:
            num_starts = watcher.num_starts if watcher is not None and watcher.pid == os.getpid() else 0
            if num_starts == MAX_STARTS:
                return False
            try:
                watcher = _watchers[store.address] = WatcherProcess(store.address, me, num_starts + 1)
            except OSError:
                return False
    return watcher.add_key(store.full_key(key))


# -- The job's store ---------------------------------------------------------------------------------------------------
# A client in plain Python connects to PyTorch's TCPStore. Other stores (files, a user's own) are used through PyTorch.


ROOT = "longspan"
PAUSE = 0.01
"""Seconds between queries to one of PyTorch's stores for a value that is not there yet."""


class TorchStore:
    """A store that is used through PyTorch."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._inner, self._prefix = store, prefix
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def part(self, prefix: str) -> TorchStore:
        return TorchStore(self._inner, f"{self._prefix}/{prefix}")

    def again(self, deadline: float | None) -> TorchStore:  # noqa: ARG002
        """Return the same store; PyTorch's clients have no deadline."""
        return TorchStore(self._inner, self._prefix)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        return self._store.get(key) if self._store.check([key]) else None

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def claim(self, key: str, value: bytes) -> bytes:
        """Set the value if there is none; return the value that is there then. (`compare_set` takes strings only, no
        bytes.) The first rank may not have written yet, and has a second for it."""
        if self.add(f"{key}/claims", 1) == 1:
            self.set(key, value)
            return value
        for _ in range(int(1 / PAUSE)):
            if (current := self.get(key)) is not None:
                return current
            time.sleep(PAUSE)
        return b""

    def wait(self, key: str) -> None:
        """Return when the key has a value. Polls, since a wait inside of PyTorch cannot be ended."""
        while (store := self._store) is not None and not store.check([key]):
            time.sleep(PAUSE)
        if store is None:
            raise LostError("the connection was closed")

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def close(self) -> None:
        self._store = self._inner = None


def job_store(group: dist.ProcessGroup) -> Store | None:
    """Return a new connection to the job's store, under a prefix of its own; None if there is no store.

    Several jobs may use one store under prefixes that cannot be queried: so the job's ranks agree on a name, under
    their prefix, and the new prefix has that name.
    """
    if "fake" in str(dist.get_backend_config(group)):
        return None
    store: Any = default_store()
    name = store.compare_set(f"{ROOT}/name", "", secrets.token_hex(16)).decode(errors="replace")
    if len(name) != 32 or not name.isalnum():
        raise RankError(
            f"the job's store holds {len(name)} characters where the name of this job should be. Another version or"
            f" another program writes there: run one version on all ranks, on a network of your own."
        )
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    inner: Any = store
    prefix = f"{ROOT}/{name}"
    is_tcp: bool = isinstance(inner, dist.TCPStore)  # type: ignore[attr-defined]
    client = _connect_client(inner, prefix) if is_tcp else None
    return client or TorchStore(inner.clone(), prefix)


def _connect_client(store: Any, prefix: str) -> StoreClient | None:
    """Return a client in plain Python if it can read what PyTorch's client wrote, and vice versa."""
    proof, key = secrets.token_hex(16), f"proof/{secrets.token_hex(16)}"
    client = None
    try:
        client = StoreClient((store.host, store.port), prefix, deadline=30.0)
        store.set(f"{prefix}/{key}", proof)
        store.get(f"{prefix}/{key}")  # setting a value has no answer: later requests come after this one
        if client.get(key) == proof.encode():
            client.set(key, proof[::-1].encode())
            client.get(key)
            if store.get(f"{prefix}/{key}") == proof[::-1].encode():
                return client.again(None)
    except LostError:
        pass
    finally:
        if client is not None:
            client.close()
        store.delete_key(f"{prefix}/{key}")
    return None
