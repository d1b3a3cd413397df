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
from longspan.planning.steps import MAX_BATCH
from longspan.run import agreement
from longspan.run.agreement import Comparison, Header, Record, rows_alone
from longspan.watch.detector import Direction, Phase
from longspan.watch.monitor import Watch, job_store
from longspan.watch.store_client import Store

# -- Safety settings of a scope ----------------------------------------------------------------------------------------
# A backward pass uses those of the last forward pass.


@dataclass(frozen=True, slots=True)
class Safety:
    """How long to wait for whom, and whether every message is checked. None of it changes a result."""

    patience: float = 2.0
    """Seconds for which a rank is stopped, or its host silent, before that is a fault; 0: nobody watches."""
    timeout: float | None = None
    """Seconds to wait for a rank that is alive but does not come; None: as long as the group itself does."""
    checked: bool = False
    """Every message carries a header and a checksum."""

    def __post_init__(self) -> None:
        for name in ("patience", "timeout"):
            value = getattr(self, name)
            if name == "timeout" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
                raise PlanError(f"{name} = {value!r} was asked for. It is a number of seconds, 0 or more.")
        if self.timeout is not None and self.timeout < 1:
            raise PlanError(f"timeout = {self.timeout} s was asked for. A rank may be late by a second at any time.")
        if 0 < self.patience < 0.5:
            raise PlanError(
                f"patience = {self.patience} s was asked for. Ranks are looked at every 0.25 s: less than 0.5 s would"
                f" name healthy ones."
            )


_safety: ContextVar[Safety] = ContextVar("longspan_safety")


def safety(last: Safety | None = None) -> Safety:
    """The settings of this scope; on threads of autograd, which have no scope, the `last` that a call had."""
    settings = _safety.get(None)
    if settings is None and last is not None and threading.current_thread() is not threading.main_thread():
        return last
    return settings or Safety()


@contextmanager
def safely(settings: Safety) -> Iterator[None]:
    """These settings for all calls inside."""
    token = _safety.set(settings)
    try:
        yield
    finally:
        _safety.reset(token)


# -- Backends: what a group can send, and from which device ------------------------------------------------------------


def message_device(group: dist.ProcessGroup, wanted: torch.device | None = None) -> torch.device:
    """A device whose tensors this group can send: the CPU, or else the wanted one, or else this process's own.

    Never one without its index: NCCL would take the current device for it, which may be the same on all ranks.
    """
    if "cpu" in _backends(str(dist.get_backend_config(group))):
        return torch.device("cpu")
    device = wanted
    if device is None or device.type == "cpu":
        device = torch.accelerator.current_accelerator(check_available=True)
    if device is None or device.index is not None:
        return device or torch.device("cpu")
    return group.bound_device_id or torch.device(device.type, torch.accelerator.current_device_index())


def first_waits(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's first operation on such a device waits for all ranks. All backends but Gloo are assumed
    to."""
    backend = _backends(str(dist.get_backend_config(group))).get(device.type, "gloo")
    return group.size() > 1 and backend != "gloo"


def is_captured(device: torch.device) -> bool:
    """Whether what is begun here goes into a CUDA graph: it is done whenever that is replayed, and cannot be polled."""
    return device.type == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def token_on(device: torch.device) -> Tensor:
    """One byte to send."""
    return torch.zeros(1, dtype=torch.uint8, device=device)


def works_of(started: Any) -> list[Any]:
    """The works in what was started: one, several, or several each with its peer.

    >>> works_of("a"), works_of(["a", "b"]), works_of([(1, "a"), (2, "b")])
    (['a'], ['a', 'b'], ['a', 'b'])
    """
    found = started if isinstance(started, list) else [started]
    return [entry[1] if isinstance(entry, tuple) else entry for entry in found]


def _backends(config: str) -> dict[str, str]:
    """The backend for each type of device, as PyTorch writes it.

    >>> _backends("cpu:gloo,cuda:nccl")
    {'cpu': 'gloo', 'cuda': 'nccl'}
    """
    return dict(part.split(":", 1) for part in config.split(",") if ":" in part)


# -- Members of a group, and a running call ----------------------------------------------------------------------------


T = TypeVar("T")
MAX_AGREED = 1024
CPU = torch.device("cpu")
ROWS, VERDICT, TABLE, ALIKE = 1023, 1022, 1021, 1020
"""Steps that no tag of a schedule has, for the messages by which ranks compare calls."""
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
    """What to compare before data moves; a backward pass is agreed on by its forward."""
    name: str = ""
    """What the user calls it, which tells apart calls of one plan."""
    forward: int = 0
    """Of a backward pass: the number of its forward."""

    @property
    def plan(self) -> bytes:
        return bytes.fromhex(self.fingerprint[:16])

    @cached_property
    def identity(self) -> int:
        """A number that differs, but for one chance in 4 billion, when the plan, pass, name or forward does."""
        text = f"{self.fingerprint} {self.direction} {self.forward} {self.name}"
        return zlib.crc32(text.encode())


class Members:
    """A group, seen from one of its ranks."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = ref(group)  # not held: a group that is destroyed must be let go
        self.rank, self.size = group.rank(), group.size()
        self.calls = 0
        self.settings: Safety | None = None
        """Those of the last forward call."""
        self.training_step = -1
        self.agreed: dict[bytes, None] = {}
        self.met: set[str] = set()
        """Types of devices on which all ranks have made an operation together."""
        self.compared = ""
        """The last comparison that went through the store."""
        self._watch: Watch | None = None
        self._inside = threading.RLock()
        own = _torch.timeout_of(group, message_device(group)) or 1800.0
        self._timeout = own - min(0.5, 0.05 * own)  # before the group gives up, which would name nobody

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None, "a group outlives the calls over it"
        return group

    @cached_property
    def store(self) -> Store | None:
        """The part of the job's store that belongs to this group; None where there is no store."""
        store = job_store(self.group)
        if store is None:
            return None
        part = _private(store, self)
        finalize(self.group, part.close)
        return part

    def watch(self, safety: Safety) -> Watch | None:
        """The watch of this group, started when first asked for; None if nobody watches."""
        if not safety.patience or self.store is None:
            return None
        if self._watch is None:
            ranks = dist.get_process_group_ranks(self.group)
            self._watch = Watch(self.store, self.rank, ranks, world_size=dist.get_world_size())
            finalize(self.group, self._watch.stop)
            self._watch.status.training_step = self.training_step
        return self._watch

    def timeout(self, safety: Safety) -> float:
        """Seconds to wait for a rank that is alive."""
        return self._timeout if safety.timeout is None else safety.timeout

    @contextmanager
    def enter(self) -> Iterator[None]:
        """One thread at a time. A second one is refused: which of the two calls comes first may differ from rank to
        rank, and their messages would meet."""
        if not self._inside.acquire(blocking=False):
            raise BusyError(
                "a call over this group was asked for while another thread of this process is in one. Which of them"
                " comes first may differ from rank to rank, so nothing was sent, and the other call goes on. Call from"
                " one thread, or give each thread a group of its own (torch.distributed.new_group)."
            )
        try:
            yield
        finally:
            self._inside.release()

    @contextmanager
    def call(self, call: Call) -> Iterator[Running]:
        """Numbers the call, compares what is new about it, and tells the others when it fails here."""
        with self.enter(), self._run_call(call) as running:
            yield running

    @contextmanager
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
            raise  # on all ranks alike
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
        """Tells the others that this rank leaves its loop because of an error, unless a call has told them already."""
        watch = self.watch(safety)
        if watch is not None and watch.failed is None:
            watch.report(error)

    def announce_refusal(self, error: BaseException, safety: Safety) -> None:
        """Tells the others that this rank refused a call, which they may have entered."""
        self.calls += 1
        watch = self.watch(safety)
        if watch is not None:
            watch.report(error, refused=self.calls)


@dataclass(frozen=True)
class Running:
    """One call under way."""

    members: Members
    call: Call
    number: int
    watch: Watch | None

    @property
    def is_new(self) -> bool:
        return self.call.record is not None and self.call.record.digest not in self.members.agreed

    def agree(self) -> None:
        """Compares what this call is with the other ranks, unless the same was agreed before."""
        if self.call.record is None or not self.is_new:
            return
        agreement.compare(self._rows(self.call.record.row()))
        agreed = self.members.agreed
        agreed[self.call.record.digest] = None
        if len(agreed) > MAX_AGREED:  # all ranks made the same calls, so all forget the same one
            del agreed[next(iter(agreed))]

    def _rows(self, row: bytes) -> list[bytes]:
        """Every rank's row where they differ, this rank's alone where not. No device takes part: it may have much to
        do, and nobody waits for that here."""
        if message_device(self.members.group, self.call.device).type == "cpu":
            return self._rows_by_messages(row)
        return self._rows_by_store(row)

    def _rows_by_messages(self, row: bytes) -> list[bytes]:
        """Through rank 0, not by a collective: a process that leaves one unfinished cannot end."""
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
            found = Comparison(self.watch.connection, place, names, row)
            self.watch.wait([(members.rank, found)], members.group, timeout, self._others)
            rows = found.rows
        members.compared = names[0]
        return list(rows)

    @property
    def _others(self) -> list[int]:
        return [rank for rank in range(self.members.size) if rank != self.members.rank]

    def meet(self, device: torch.device) -> None:
        """Returns when all ranks have taken part in one operation on their devices of this kind, unless they have
        before.

        NCCL makes a group's communicator in the first operation, which waits for all ranks, and a plan may leave some
        of them without a message: they would never come. What ranks compare is no such operation; it comes first, so
        that a rank with tensors of another device is named instead of waited for.
        """
        met = self.members.met
        if device.type in met:
            return
        if first_waits(self.members.group, device):
            token = token_on(device)
            self._collect(lambda group: dist.all_reduce(token, group=group, async_op=True), device)
        met.add(device.type)

    def _exchange(self, sends: dict[int, Tensor], receives: dict[int, Tensor], step: int) -> None:
        """Messages of CPUs."""
        group, tag = self.members.group, self.tag(step)
        ops = [dist.P2POp(dist.isend, t, group=group, group_peer=peer, tag=tag) for peer, t in sends.items()]
        ops += [dist.P2POp(dist.irecv, t, group=group, group_peer=peer, tag=tag) for peer, t in receives.items()]
        for first in range(0, len(ops), MAX_BATCH):
            batch = ops[first : first + MAX_BATCH]
            peers = [op.group_peer for op in batch]
            works = self.started(lambda batch=batch: dist.batch_isend_irecv(batch), peers, CPU)
            self.wait(list(zip(peers, works, strict=False)), peers, CPU)

    def all_reduce(self, tensor: Tensor) -> None:
        """Adds a tensor up over the group, in place."""
        self.collective(lambda group: dist.all_reduce(tensor, group=group, async_op=True))

    def collective(self, start: Callable[[dist.ProcessGroup], dist.Work | None]) -> None:
        """Start a collective of PyTorch when all ranks are in this call, and return when it is done."""
        self._check_alike()
        self._collect(start, self.call.device)

    def _collect(self, start: Callable[[dist.ProcessGroup], dist.Work | None], device: torch.device) -> None:
        group = self.members.group
        work = self.started(lambda: start(group), self._others, device)
        assert work is not None
        self.wait([(self.members.rank, work)], self._others, device)

    def _check_alike(self) -> None:
        """Return when all ranks are in the same call.

        Collectives have no tags: without this, sums of different calls would meet. And a process that leaves a
        collective unfinished cannot end: of a rank that will not come, messages tell before it is begun. After the
        exchange at distance d, a rank knows of the 2d - 1 ranks before it. On a device no message has a tag, and ranks
        that make different calls are found by the lookout.
        """
        size, rank, distance = self.members.size, self.members.rank, 1
        while distance < size and self.call.device.type == "cpu":
            token = token_on(CPU)
            self._exchange({(rank + distance) % size: token}, {(rank - distance) % size: token.clone()}, ALIKE)
            distance *= 2

    def started(self, start: Callable[[], T], peers: Sequence[int], device: torch.device | None = None) -> T:
        """The result of `start`, which raises when a connection is closed. That names nobody: the watch finds out who
        it was. Works of a device are polled from here on: nobody waits for them, nor for the host while it is inside of
        PyTorch to begin them."""
        flight, device = None, device or self.call.device
        if self.watch is not None and peers and device.type != "cpu" and not is_captured(device):
            flight = self.watch.track(peers, self.members.timeout(self.call.safety))
        started = self._blamed(start, peers)
        if flight is not None:
            flight.works = works_of(started)
        return started

    def _blamed(self, act: Callable[[], T], peers: Sequence[int]) -> T:
        """What it gives; if it raises, the watch finds out who of these ranks is to blame."""
        try:
            return act()
        except RuntimeError as error:
            if self.watch is None or not peers:
                raise
            self.watch.diagnose(error, peers)
            raise

    def at(self, step: int) -> None:
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
        """Returns when all is done. Work of a device is only put in order here, on the stream of this thread."""
        if self.watch is None or (device or self.call.device).type != "cpu":
            peers = [peer for peer, _ in works] if peers is None else peers
            self._blamed(lambda: [work.wait() for _, work in works], peers)
        elif works:
            self.watch.wait(works, self.members.group, self.members.timeout(self.call.safety), peers)

    def tag(self, step: int) -> int:
        """Messages of different calls, or of different training steps, never meet where tags count (Gloo): what a rank
        skips or swaps is a wait, which the watch explains, and no mix-up.

        Tags have 31 bits. The upper 21 tell calls apart: for one plan surely within two million calls, for different
        ones, or backward passes of different forwards, but for one chance in two million. Only what ranks compare
        before they agree on a plan is found by its number alone. Steps that share a tag arrive in their order.
        """
        which = 0 if step in (ROWS, VERDICT, TABLE) else self.call.identity
        number = which + self.number * 0x9E3779B1 + self.members.training_step * 0x85EBCA77
        return (number & 0x1FFFFF) << 10 | (step if step >= ALIKE else step % ALIKE)

    def header(self, src: int, dst: int, step: int, pieces: int, num_bytes: int) -> Header:
        """What a message of this call must say of itself."""
        call = self.call
        dtype = str(call.dtype).removeprefix("torch.").encode()[:8].ljust(8, b"\0")
        way = Direction[call.direction.upper()]
        where = (self.number, self.members.training_step, int(way), step, src, dst)
        return Header(
            call.plan, *where, pieces, num_bytes, dtype, call.forward, zlib.crc32(call.name.encode()) & 0xFFFF
        )


@contextmanager
def told(group: dist.ProcessGroup) -> Iterator[None]:
    """If the body raises before its call has begun, tells the other ranks."""
    members = members_of(group)
    with members.enter():
        before = members.calls
        try:
            yield
        except Exception as error:
            if members.calls == before:
                members.announce_refusal(error, safety(members.settings))
            raise


def run_collective(
    name: str, tensor: Tensor, group: dist.ProcessGroup, start: Callable[[dist.ProcessGroup], dist.Work | None]
) -> None:
    """Run a collective of PyTorch on a tensor of this shape and dtype, the same on every rank. On CPUs it is a call
    like others: a rank that dies, stops or does something else is named on all others."""
    if tensor.device.type != "cpu" or group.size() == 1:  # on a device the host does not wait
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
    """What this process knows about the group."""
    if group not in _known:
        _known[group] = Members(group)
    return _known[group]


def _abort(group: ref[dist.ProcessGroup], device: torch.device) -> None:
    """Ends what is under way on this device, if the group is still there."""
    found = group()
    if found is not None:
        _torch.abort(found, device)


def _private(store: Store, members: Members) -> Store:
    """A part of the job's store for this group, this attempt of the launcher, and this creation of the group."""
    ranks = ",".join(map(str, dist.get_process_group_ranks(members.group)))
    group = hashlib.sha256(f"{members.group.group_name} {ranks}".encode()).hexdigest()[:16]
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    generation = store.add(f"{attempt}/{group}/made/{members.rank}", 1)  # destroyed and made again, it starts anew
    part = store.part(f"{attempt}/{group}/{generation}")
    store.close()
    return part
