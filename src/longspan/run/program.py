"""Recorded program of one rank and direction: messages, kernel launches and operations on rows, as data.

A program is recorded once per plan, rank and kernel (`run/walk.py`). It holds no tensors: the tables that GPUs read are
in `run/tables.py`. `run` replays it on the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from longspan import _torch
from longspan.run import fused
from longspan.run.moves import Cut, Group, Memory, Move, cut_of, group_operations, table_of
from longspan.run.recorder import Buffer, Called, Event, Launched, Note, Rows, Taken
from longspan.run.tables import CACHE, HostTables
from longspan.run.transports import NO_RANGE, Exchange, Program, step_range

Attend = Callable[[Launched, Sequence[Tensor]], Iterator[tuple[Tensor, ...]]]
"""Starts a launch on its inputs and yields its results one by one."""
Item = Move | Event


@dataclass(frozen=True, eq=False)
class MessageBuffer:
    """Messages from or to several peers in one buffer: offset and size of each, in bytes."""

    buffer: Buffer
    places: dict[int, tuple[int, int]]

    def slices(self, message: Tensor) -> dict[int, Tensor]:
        size = message.numel()
        parts: dict[int, Tensor] = {}
        for peer, (start, num_bytes) in self.places.items():
            parts[peer] = message if num_bytes == size else message[start : start + num_bytes]
        return parts


@dataclass(eq=False)
class MessageBatch:
    """Messages that start together, and that the end of step `due` waits for."""

    due: int
    sends: MessageBuffer | None
    receives: list[MessageBuffer]
    sizes: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = {peer: size for messages in self.receives for peer, (_, size) in messages.places.items()}


@dataclass(eq=False)
class ProgramStep:
    """One step: pack its messages, send and receive them while computing, unpack what arrived."""

    pack: list[Item]
    batches: list[MessageBatch]
    """First the messages that the step itself waits for, even if there are none, then those of later steps."""
    work: list[Item]
    unpack: list[Item]
    unaligned: list[Buffer] = field(default_factory=list)
    """Parts of sent messages whose offset is no multiple of their item size; they are tensors of their own."""


@dataclass(eq=False)
class RankProgram:
    """A rank's run in one direction."""

    steps: list[ProgramStep]
    end: list[Item]
    results: list[Rows]
    buffers: list[Buffer]
    unaligned: list[Buffer] = field(default_factory=list)
    """Unaligned parts of messages among the results."""
    last_use: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Buffers to free after an item, by the item's id; those of a step's messages by the step's id."""
    result_cuts: list[Cut] = field(init=False)
    inputs: dict[int, list[Cut]] = field(init=False)
    """Inputs of launches and functions, by the item's id."""
    releases: frozenset[int] = field(init=False)
    """Launches, by id, before which messages are freed: all of their rows were copied, earlier in the step."""

    def __post_init__(self) -> None:
        uses: list[tuple[int, list[Buffer]]] = []
        items: list[Item] = []
        for step in self.steps:
            uses += [(id(item), _buffers(item)) for item in step.pack]
            messages = [message for batch in step.batches for message in (batch.sends, *batch.receives)]
            buffers = [message.buffer for message in messages if message is not None]
            uses.append((id(step), buffers + step.unaligned))
            uses += [(id(item), _buffers(item)) for item in (*step.work, *step.unpack)]
            items += [*step.pack, *step.work, *step.unpack]
        uses += [(id(item), _buffers(item)) for item in self.end]
        last: dict[Buffer, int] = {}
        for where, buffers in uses:
            last.update((each, where) for buffer in buffers for each in {buffer, buffer.root})
        kept = {rows.buffer.root for rows in self.results}
        for buffer, where in last.items():
            if buffer.root not in kept:
                self.last_use[where] = (*self.last_use.get(where, ()), buffer.number)
        releases: list[int] = []
        for step in self.steps:
            is_freed = False
            for item in step.work:
                if isinstance(item, Launched) and is_freed:
                    releases.append(id(item))
                    is_freed = False
                is_freed |= any(self.buffers[number].is_message for number in self.last_use.get(id(item), ()))
        self.releases = frozenset(releases)
        self.result_cuts = [_cut_of_rows(rows) for rows in self.results]
        self.inputs = {
            id(item): [_cut_of_rows(rows) for rows in (item.inputs if isinstance(item, Launched) else item.sources)]
            for item in (*items, *self.end)
            if isinstance(item, Launched | Called)
        }

    @cached_property
    def host_tables(self) -> HostTables:
        """The lines of all moves, and the index arrays of all launches."""
        items = [item for step in self.steps for part in (step.pack, step.work, step.unpack) for item in part]
        table = table_of([item for item in (*items, *self.end) if isinstance(item, Move)])
        return HostTables([table], {id(item): item.index_arrays() for item in items if isinstance(item, Launched)})

    def run(self, memory: Memory, attend: Attend, direction: str, rank: int, *, alone: bool = False) -> Program[None]:
        """Replay on the tensors in `memory`, which holds the results afterwards. `alone`: one rank, no messages."""
        launches: dict[int, Iterator[tuple[Tensor, ...]]] = {}
        is_profiling = _torch.is_profiling()
        for number, step in enumerate(self.steps):
            if alone:
                with step_range(direction, rank, number) if is_profiling else NO_RANGE:
                    self._do([*step.pack, *step.work], memory, attend, launches)
                continue
            if step.pack:
                self._do(step.pack, memory, attend, launches)
                if step.unaligned:
                    copy_unaligned_back(memory, step.unaligned)
            started: list[Exchange] = []
            sends: dict[int, Tensor] = {}
            for batch in step.batches:
                sends = {} if batch.sends is None else batch.sends.slices(memory.get(batch.sends.buffer))
                into: dict[int, Tensor] = {}
                for messages in batch.receives:
                    into |= messages.slices(memory.get(messages.buffer))
                started.append(Exchange(number, sends, batch.sizes, memory.device, into, batch.due))
            memory.messages.release()
            exchange, into = started[0], started[0].into
            exchange.later = started[1:]
            yield exchange
            if (last_use := self.last_use.get(id(step))) is not None:
                memory.drop(last_use)
            del sends, started, exchange  # the transport frees messages when they are delivered
            if step.work or is_profiling:  # steps without work have a range, too
                with step_range(direction, rank, number) if is_profiling else NO_RANGE:
                    self._do(step.work, memory, attend, launches)
            arrived = yield None
            if into:
                copy_into(into, arrived or {})
            if step.unpack:
                self._do(step.unpack, memory, attend, launches)
        if not alone:
            memory.messages.release()
        if self.end:
            self._do(self.end, memory, attend, launches)
        if self.unaligned:
            copy_unaligned_back(memory, self.unaligned)

    def _do(
        self,
        items: Sequence[Item],
        memory: Memory,
        attend: Attend,
        launches: dict[int, Iterator[tuple[Tensor, ...]]],
    ) -> None:
        for item in items:
            if isinstance(item, Move):
                item.run(memory)
            elif isinstance(item, Taken):
                results = launches[id(item.launch)]
                for buffer, result in zip(item.results, next(results), strict=True):
                    shape, expected = result.shape, buffer.shape
                    assert shape[2] == expected[2], f"{item!r} has {shape[2]} rows, not {expected[2]}"
                    memory.tensors[buffer.number] = result if len(shape) == 4 else result.unsqueeze(3)
                if item.is_last:
                    more = next(results, None)
                    assert more is None, f"a kernel gave more than the {item.number + 1} results it had named"
                    del launches[id(item.launch)]
            else:
                tensors: list[Tensor] = []
                for number, parts in self.inputs[id(item)]:
                    tensor = memory.tensors[number]
                    tensors.append(memory.narrow(number, parts) if parts or tensor is None else tensor)
                if isinstance(item, Launched):
                    if id(item) in self.releases:
                        memory.messages.release()
                    launches[id(item)] = attend(item, tensors)
                else:
                    memory.tensors[item.result.number] = item.function(*tensors)
            if (last_use := self.last_use.get(id(item))) is not None:
                memory.drop(last_use)


def copy_into(into: dict[int, Tensor], arrived: dict[int, Tensor]) -> None:
    """Copy messages that the transport received in memory of its own. Empties both, so that memory can be freed."""
    while into:
        peer, part = into.popitem()
        if (message := arrived.pop(peer)) is not part:
            part.copy_(message)


def part_of(memory: Memory, rows: Rows) -> Tensor:
    return memory.narrow(*_cut_of_rows(rows))


def _cut_of_rows(rows: Rows) -> Cut:
    return cut_of(rows.buffer, rows.batch, rows.heads, rows.tokens)


def copy_unaligned_back(memory: Memory, unaligned: Sequence[Buffer]) -> None:
    """Copy parts of messages that had to be tensors of their own into their messages."""
    for buffer in unaligned:
        assert buffer.inside is not None
        message, part = memory.get(buffer.inside), memory.get(buffer)
        message[buffer.offset : buffer.offset + buffer.num_bytes] = part.reshape(-1).view(torch.uint8)


def items_of(log: Sequence[Note | Event]) -> list[Item]:
    """Group the recorded operations; fuse two independent neighbours of one kind."""
    items: list[Item] = []
    for item in group_operations(log):
        move = Move(item) if isinstance(item, Group) else item
        last = items[-1] if items else None
        if isinstance(move, Move) and isinstance(last, Move) and last.fused_with is None and last.can_fuse(move):
            last.fused_with = move
            last.buffers += move.buffers
        else:
            items.append(move)
    return items


def _buffers(item: Item) -> list[Buffer]:
    if isinstance(item, Move):
        return item.buffers
    if isinstance(item, Taken):
        return [*item.results, *(rows.buffer for rows in item.launch.inputs)]
    if isinstance(item, Launched):
        return [rows.buffer for rows in item.inputs]
    assert isinstance(item, Called)
    return [item.result, *(rows.buffer for rows in item.sources)]


def memory_for(program: RankProgram, device: torch.device) -> Memory:
    """Return the memory of a run, with the program's tables if it is not on a CPU."""
    if device.type == "cpu":
        return Memory(program.buffers, device)
    tables = CACHE.get(program, device)
    return Memory(program.buffers, device, tables.numbers if fused.is_fused(device) else None, tables.index)
