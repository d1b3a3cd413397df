"""State of a process group in this process: safety settings, backends, call numbers, agreement and watching."""

from __future__ import annotations

import hashlib
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import _torch
from longspan.errors import AgreementError, BusyError, PlanError, RankError
from longspan.planning.machine import Machine
from longspan.planning.steps import MAX_BATCH
from longspan.run import agreement
from longspan.run.agreement import Comparison, Header, Record, rows_alone
from longspan.watch.detector import Direction, Phase
from longspan.watch.monitor import Watch, job_store
from longspan.watch.store_client import Store

# -- Safety settings of a scope. A backward pass uses those of the last forward pass ----------------------------------


@dataclass(frozen=True, slots=True)
class Safety:
    """Timeouts, and whether messages are verified. No setting changes a result."""

    patience: float = 2.0
    """Seconds that a rank may be stopped, or its host silent, before it counts as failed; 0 disables the watch."""
    timeout: float | None = None
    """Seconds to wait for a rank that is alive but does not arrive; None uses the timeout of the group."""
    checked: bool = False
    """Add a header and a checksum to every message."""

    def __post_init__(self) -> None:
        for name in ("patience", "timeout"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                raise PlanError(f"{name} must be a number of seconds >= 0, but got {value!r}.")
        if self.timeout is not None and self.timeout < 1:
            raise PlanError(
                f"timeout must be at least 1 s, but got {self.timeout}. A healthy rank may be late by a second."
            )
        if 0 < self.patience < 0.5:
            raise PlanError(
                f"patience must be 0 or at least 0.5 s, but got {self.patience}. Ranks are polled every 0.25 s, so a"
                f" shorter time would blame healthy ones."
            )


_safety: ContextVar[Safety] = ContextVar("longspan_safety")


def safety(last: Safety | None = None) -> Safety:
    """Return the settings of this scope. Threads of autograd have no scope and use `last`, those of the last call."""
    settings = _safety.get(None)
    if settings is None and last is not None and threading.current_thread() is not threading.main_thread():
        return last
    return settings or Safety()


@contextmanager
def use_safety(settings: Safety) -> Iterator[None]:
    """Use these settings for all calls inside the context."""
    token = _safety.set(settings)
    try:
        yield
    finally:
        _safety.reset(token)


# -- Backends of a group -----------------------------------------------------------------------------------------------


def message_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """Return a device whose tensors this group can send: the CPU, else `wanted`, else the current accelerator.

    An accelerator always has an index: without one NCCL uses the current device, which may be the same on all ranks.
    """
    if "cpu" in backends_of(str(dist.get_backend_config(group))):
        return torch.device("cpu")
    device = wanted
    if device is None or device.type == "cpu":
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.index is not None:
        return device or torch.device("cpu")
    return group.bound_device_id or torch.device(device.type, torch.accelerator.current_device_index())


def first_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether the group's first operation on such a device waits for all ranks (any backend except Gloo)."""
    backend = backends_of(str(dist.get_backend_config(group))).get(device.type, "gloo")
    return group.size() > 1 and backend != "gloo"


def is_captured(device: torch.device) -> bool:
    """Return whether a CUDA graph is being captured: its operations cannot be polled."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def token_on(device: torch.device) -> Tensor:
    """Return one byte to send."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def backends_of(config: str) -> dict[str, str]:
    """Parse PyTorch's backend config into backends by device type.

    >>> backends_of("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)


# -- Members of a group, and a running call ----------------------------------------------------------------------------


T = TypeVar("T")
MAX_AGREED = 1024
CPU = torch.device("cpu")
ROWS, VERDICT, TABLE, COMPARED = 1023, 1022, 1021, 1020
"""Step numbers reserved for the messages by which ranks compare calls."""
_known: WeakKeyDictionary[dist.ProcessGroup, Members] = WeakKeyDictionary()


@dataclass(frozen=True)
class Call:
    """One pass over one plan."""

    fingerprint: str
    direction: str
    num_steps: int
    dtype: torch.dtype
    device: torch.device
    safety: Safety
    record: Record | None = None
    """Compared between ranks before data moves; None for a backward pass, whose forward was compared."""
    name: str = ""
    """The user's name for the call, which distinguishes calls of one plan."""
    forward: int = 0
    """For a backward pass, the number of its forward."""

    @property
    def plan(self) -> bytes:
        return bytes.fromhex(self.fingerprint[:16])

    @cached_property
    def identity(self) -> int:
        """Checksum of plan, direction, name and forward: different calls collide with a chance of 1 in 4 billion."""
        text = f"{self.fingerprint} {self.direction} {self.forward} {self.name}"
        return zlib.crc32(text.encode())


PREFETCHING: set[int] = set()
"""Threads of `longspan.training.prefetch`, which must not send messages."""


def check_may_send(caller: str) -> None:
    """Raise in a thread of `longspan.training.prefetch`."""
    if threading.get_ident() in PREFETCHING:
        raise BusyError(
            f"A function of longspan.training.prefetch must not send messages, but called {caller}: its order with the"
            f" calls of the training step may differ between ranks. Plan, shard and prepare there, and call in the"
            f" loop."
        )


class Members:
    """State of one process group in this process."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)  # weak, so that a destroyed group is freed
        self.rank, self.size = group.rank(), group.size()
        self.calls = 0
        self.settings: Safety | None = None
        """Settings of the last forward call."""
        self.training_step = -1
        self.agreed: dict[bytes, None] = {}
        self.met: set[str] = set()
        """Device types whose first operation all ranks have joined."""
        self.compared = ""
        """Name of the last comparison through the store."""
        self.machines: dict[bool, tuple[Machine, bool]] = {}
        """The machine that the ranks run on, and whether it is assumed, for masks without and with functions."""
        self._watch: Watch | None = None
        self._inside = threading.RLock()
        own = _torch.timeout_of(group, message_device(group)) or 1800.0
        self._timeout = own - min(0.5, 0.05 * own)  # before the group's own timeout, which names no rank

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "a group outlives the calls over it"
        return group

    @cached_property
    def store(self) -> Store | None:
        """The part of the job's store for this group, this restart of the job and this creation of the group."""
        group, store = self.group, job_store(self.group)
        if store is None:
            return None
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        name = hashlib.sha256(f"{group.group_name} {ranks}".encode()).hexdigest()[:16]
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        generation = store.add(f"{attempt}/{name}/made/{self.rank}", 1)
        part = store.part(f"{attempt}/{name}/{generation}")
        store.close()
        finalize(group, part.close)
        return part

    def watch(self, safety: Safety) -> Watch | None:
        """Return the watch of this group, started at first use; None if it is disabled."""
        if not safety.patience or self.store is None:
            return None
        if self._watch is None:
            ranks = dist.get_process_group_ranks(self.group)
            self._watch = Watch(self.store, self.rank, ranks, world_size=dist.get_world_size())
            finalize(self.group, self._watch.stop)
            self._watch.status.training_step = self.training_step
        return self._watch

    def timeout(self, safety: Safety) -> float:
        """Return the seconds to wait for a rank that is alive."""
        return self._timeout if safety.timeout is None else safety.timeout

    def enter(self) -> threading.RLock:
        """Acquire the group's lock; the caller releases it. Raise if another thread is inside a call: the order of the
        two calls may differ between ranks, and their messages would be mixed up."""
        check_may_send("an operator over this group")
        if not self._inside.acquire(blocking=False):
            raise BusyError(
                "This group is in use by another thread of this process, whose call goes on; nothing was sent. The"
                " order of two calls may differ between ranks. Call from one thread, or create a group for each thread"
                " (torch.distributed.new_group)."
            )
        return self._inside

    @contextmanager
    def call(self, call: Call) -> Iterator[Running]:
        """Number the call, compare it between ranks if it is new, and report to the other ranks if it fails here."""
        lock = self.enter()
        try:
            yield from self._run_call(call)
        finally:
            lock.release()

    def _run_call(self, call: Call) -> Iterator[Running]:
        self.calls += 1
        watch = self.watch(call.safety)
        running = Running(self, call, self.calls, watch)
        if watch is None:
            running.agree()
            running.meet(call.device)
            yield running
            return
        is_new = running.is_new
        identity = zlib.crc32(f"{call.identity} {self.training_step} {is_new}".encode())
        abort = None if call.device.type == "cpu" else partial(_abort, self._group, call.device)
        watch.begin_call(
            self.calls, identity, call.name, patience=call.safety.patience, abort=abort, num_steps=call.num_steps,
            direction=Direction[call.direction.upper()], plan=call.plan, forward=call.forward, is_new=is_new,
            phase=Phase.AGREEING if is_new else Phase.RUNNING,
        )  # fmt: skip
        try:
            running.agree()
            if call.device.type != "cpu":
                watch.detector.remember(self.calls, identity)
            running.meet(call.device)
            watch.status.phase = Phase.RUNNING
            yield running
        except AgreementError:
            raise  # raised on all ranks
        except BaseException as error:
            if not (isinstance(error, RankError) and watch.failed):
                watch.report(error)
            raise
        finally:
            watch.status.phase = Phase.IDLE

    def tell_step(self) -> None:
        if self._watch is not None:
            self._watch.status.training_step = self.training_step

    def check_told(self) -> None:
        if self._watch is not None:
            self._watch.check(once=True)

    def tell(self, error: BaseException, safety: Safety) -> None:
        """Report to the other ranks that this rank leaves its loop with an error, unless a call has done so."""
        watch = self.watch(safety)
        if watch is not None and watch.failed is None:
            watch.report(error)

    def announce_refusal(self, error: BaseException, safety: Safety) -> None:
        """Report to the other ranks that this rank refused a call, which they may have entered."""
        self.calls += 1
        watch = self.watch(safety)
        if watch is not None:
            watch.report(error, refused=self.calls)


@dataclass(frozen=True)
class Running:
    """One call in progress."""

    members: Members
    call: Call
    number: int
    watch: Watch | None

    @property
    def is_new(self) -> bool:
        return self.call.record is not None and self.call.record.digest not in self.members.agreed

    def agree(self) -> None:
        """Compare the record of this call between ranks, unless an equal one was compared before."""
        if self.call.record is None or not self.is_new:
            return
        agreement.compare(self.rows(self.call.record.row()))
        agreed = self.members.agreed
        agreed[self.call.record.digest] = None
        if len(agreed) > MAX_AGREED:  # all ranks made the same calls, so all forget the same one
            del agreed[next(iter(agreed))]

    def rows(self, row: bytes) -> list[bytes]:
        """Return every rank's row if they differ, else this rank's alone. Uses no accelerator, whose queue may be
        long."""
        if message_device(self.members.group, self.call.device).type == "cpu":
            return self._rows_by_messages(row)
        return self._rows_by_store(row)

    def _rows_by_messages(self, row: bytes) -> list[bytes]:
        """Compare through rank 0. Not by a collective: a process that leaves one unfinished cannot exit."""
        mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
        others = self._others
        if self.members.rank == 0:
            rows = {rank: torch.empty_like(mine) for rank in others}
            self._exchange({}, rows, ROWS)
            same = all(torch.equal(entry, mine) for entry in rows.values())
            self._exchange(dict.fromkeys(others, torch.tensor([same], dtype=torch.uint8, device=CPU)), {}, VERDICT)
            table = torch.stack([mine, *rows.values()]) if not same else mine[None]
            if not same:
                self._exchange(dict.fromkeys(others, table), {}, TABLE)
        else:
            same = torch.empty(1, dtype=torch.uint8, device=CPU)
            self._exchange({0: mine}, {}, ROWS)
            self._exchange({}, {0: same}, VERDICT)
            table = mine[None]
            if not same.item():
                table = torch.empty(self.members.size, len(row), dtype=torch.uint8, device=CPU)
                self._exchange({}, {0: table}, TABLE)
        return [entry.tobytes() for entry in table.numpy()]

    def _rows_by_store(self, row: bytes) -> list[bytes]:
        members, timeout = self.members, self.members.timeout(self.call.safety)
        if members.store is None:
            return [row]
        names, members.compared = (f"agree/{self.number}/{members.training_step}", members.compared), ""
        place = members.rank, members.size
        if self.watch is None:
            rows = rows_alone(members.store, place, names, row, timeout)
        else:
            comparison = Comparison(self.watch.connection, place, names, row)
            self.watch.wait([(members.rank, comparison)], members.group, timeout, self._others)
            rows = comparison.rows
        members.compared = names[0]
        return list(rows)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.members.size) if rank != self.members.rank]

    def meet(self, device: torch.device) -> None:
        """Wait for all ranks in the first operation on devices of this type.

        NCCL creates a group's communicator in the first operation, which waits for all ranks, but a plan may leave some
        of them without a message. Records are compared before, so that a rank with tensors on another device is named
        instead of waited for.
        """
        met = self.members.met
        if device.type in met:
            return
        if first_waits(self.members.group, device):
            token = token_on(device)
            self._collect(lambda group: dist.all_reduce(token, group=group, async_op=True), device)
        met.add(device.type)

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], step: int) -> None:
        """Exchange messages of CPU tensors."""
        group, tag = self.members.group, self.tag(step)
        ops = [dist.P2POp(dist.isend, t, group=group, group_peer=peer, tag=tag) for peer, t in sends.items()]
        ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer, tag=tag) for peer, t in receives.items()]
        for first in range(0, len(ops), MAX_BATCH):
            batch = ops[first : first + MAX_BATCH]
            peers = [op.group_peer for op in batch]
            works = self.start(lambda batch=batch: dist.batch_isend_irecv(batch), peers, CPU)
            self.wait(list(zip(peers, works, strict=False)), peers, CPU)

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group, in place."""
        self.collective(lambda group: dist.all_reduce(tensor, group=group, async_op=True))

    def collective(self, start: Callable[[dist.ProcessGroup], dist.Work | None]) -> None:
        """Start a collective of PyTorch when all ranks are in this call, and return when it is done.

        Collectives have no tags: without a check, those of different calls could match. And a process that leaves a
        collective unfinished cannot exit, so messages detect a missing rank before it starts. After the exchange at
        distance d, a rank knows of the 2d - 1 ranks before it. On accelerators messages have no tags either, and the
        watch detects ranks that make different calls.
        """
        size, rank, distance = self.members.size, self.members.rank, 1
        while distance < size and self.call.device.type == "cpu":
            token = token_on(CPU)
            self._exchange({(rank + distance) % size: token}, {(rank - distance) % size: token.clone()}, COMPARED)
            distance *= 2
        self._collect(start, self.call.device)

    def _collect(self, start: Callable[[dist.ProcessGroup], dist.Work | None], device: torch.device) -> None:
        group = self.members.group
        work = self.start(lambda: start(group), self._others, device)
        assert work is not None
        self.wait([(self.members.rank, work)], self._others, device)

    def start(self, start: Callable[[], T], peers: Sequence[int], device: torch.device | None = None) -> T:
        """Return the works of `start()`. If it raises, a connection is closed, and the watch names the rank.

        Works of an accelerator are polled from here on, because the host does not wait for them.
        """
        flight, device = None, device or self.call.device
        if self.watch is not None and peers and device.type != "cpu" and not is_captured(device):
            flight = self.watch.track(peers, self.members.timeout(self.call.safety))
        try:
            works = start()
        except RuntimeError as error:
            if self.watch is not None and peers:
                self.watch.diagnose(error, peers)
            raise
        if flight is not None:  # one work, a list of works, or a list of (peer, work)
            entries: list[Any] = works if isinstance(works, list) else [works]
            flight.works = [entry[1] if isinstance(entry, tuple) else entry for entry in entries]
        return works

    def begin_step(self, step: int) -> None:
        if self.watch is not None:
            if self.watch.failed is not None:
                self.watch.check()
            self.watch.status.step = step

    def wait(
        self,
        works: Sequence[tuple[int, dist.Work]],
        peers: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Wait until all works are done. Works of an accelerator are only ordered on the current stream."""
        if not works:
            return
        if self.watch is not None and (device or self.call.device).type == "cpu":
            self.watch.wait(works, self.members.group, self.members.timeout(self.call.safety), peers)
            return
        try:
            for _, work in works:
                work.wait()
        except RuntimeError as error:
            if self.watch is not None:
                self.watch.diagnose(error, [peer for peer, _ in works] if peers is None else peers)
            raise

    def tag(self, step: int) -> int:
        """Return the tag of a step's messages.

        With tags (Gloo), messages of different calls or training steps never match: if a rank skips or swaps a call,
        others wait, which the watch explains, and no data is mixed up. Tags have 31 bits. The upper 21 distinguish
        calls: those of one plan within two million calls, those of different plans, or backward passes of different
        forwards, with a chance of error of 1 in two million. Messages that compare records use the call's number alone.
        Steps that share a tag arrive in order.
        """
        which = 0 if step in (ROWS, VERDICT, TABLE) else self.call.identity
        number = which + self.number * 0x9E3779B1 + self.members.training_step * 0x85EBCA77
        return (number & 0x1FFFFF) << 10 | (step if step >= COMPARED else step % COMPARED)

    def header(self, src: int, dst: int, step: int, pieces: int, num_bytes: int) -> Header:
        """Return the header of a message of this call."""
        call = self.call
        dtype = str(call.dtype).removeprefix("torch.").encode()[:8].ljust(8, b"\0")
        direction = int(Direction[call.direction.upper()])
        where = (self.number, self.members.training_step, direction, step, src, dst)
        return Header(
            call.plan, *where, pieces, num_bytes, dtype, call.forward, zlib.crc32(call.name.encode()) & 0xFFFF
        )


class report_errors:  # noqa: N801
    """If the body raises before its call has started, report the error to the other ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.members = members_of(group)

    def __enter__(self) -> None:
        self.lock = self.members.enter()
        self.calls = self.members.calls

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        members = self.members
        try:
            if isinstance(error, Exception) and members.calls == self.calls:
                members.announce_refusal(error, safety(members.settings))
        finally:
            self.lock.release()


def run_collective(
    name: str, tensor: Tensor, group: dist.ProcessGroup, start: Callable[[dist.ProcessGroup], dist.Work | None]
) -> None:
    """Run a collective of PyTorch on a tensor of the same shape and dtype on every rank.

    On CPUs a rank that dies, stops or makes another call is named on all others.
    """
    check_may_send(name)
    if tensor.device.type != "cpu" or group.size() == 1:  # the host does not wait for an accelerator
        work = start(group)
        if work is not None:
            work.wait()
        return
    members = members_of(group)
    text = f"{name} {tuple(tensor.shape)} {tensor.dtype}"
    settings = members.settings = safety(members.settings)
    call = Call(
        hashlib.sha256(text.encode()).hexdigest(), "forward", 1, tensor.dtype, tensor.device, settings, name=name
    )
    with members.call(call) as running:
        running.collective(start)


def members_of(group: dist.ProcessGroup) -> Members:
    """Return the state of a group in this process."""
    members = _known.get(group)
    if members is None:
        members = _known[group] = Members(group)
    return members


def _abort(weak_group: ref[dist.ProcessGroup], device: torch.device) -> None:
    """Abort the group's operations on this device, if the group still exists."""
    group = weak_group()
    if group is not None:
        _torch.abort(group, device)
