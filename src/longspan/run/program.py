"""Program: what a rank does in one direction of a plan, as data: messages, launches and operations on rows.

A program is recorded once for a plan, rank and kernel (`run/walk.py`). It holds no tensors except tables of row
numbers, by device. `run` replays it on the tensors of a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longspan.planning.steps import Moved
from longspan.run.moves import Cut, Group, Memory, Move, cut_of, grouped
from longspan.run.recorder import Buffer, Called, Event, Launched, Note, Rows, Taken
from longspan.run.transports import Exchange, Program, mark, marks

Attend = Callable[[Launched, Sequence[Tensor]], Iterator[tuple[Tensor, ...]]]
"""Starts a launch on its inputs; gives its results one by one."""
Item = Move | Event


@dataclass(frozen=True, eq=False)
class Mail:
    """Messages from or to several peers in one buffer: where each begins, and how long it is, in bytes."""

    buffer: Buffer
    places: dict[int, tuple[int, int]]

    def slices(self, message: Tensor) -> dict[int, Tensor]:
        room, made = message.numel(), {}
        for peer, (start, size) in self.places.items():
            made[peer] = message if size == room else message[start : start + size]
        return made


@dataclass(eq=False)
class FlatStep:
    """One step: what fills its messages, the messages, what is computed meanwhile, what is done to those that came."""

    pack: list[Item]
    sends: Mail | None
    receives: list[Mail]
    pieces: dict[tuple[int, int], list[Moved]]
    work: list[Item]
    unpack: list[Item]
    loose: list[Buffer] = field(default_factory=list)
    """Parts of the messages to send that begin at no multiple of their numbers' size, and are tensors of their own."""
    sizes: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = {peer: size for mail in self.receives for peer, (_, size) in mail.places.items()}


@dataclass(eq=False)
class FlatProgram:
    """A rank's run in one direction."""

    steps: list[FlatStep]
    end: list[Item]
    results: list[Rows]
    buffers: list[Buffer]
    loose: list[Buffer] = field(default_factory=list)
    """As those of a step, of messages among the results."""
    gone: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Buffers of which an item makes the last use, by the item's id; of a step's messages by the step's."""
    found: list[Cut] = field(init=False)
    """Where the results are."""
    inputs: dict[int, list[Cut]] = field(init=False)
    """What launches and functions are given, by the item's id."""

    def __post_init__(self) -> None:
        last: dict[Buffer, int] = {}
        for where, buffers in self._uses():
            last.update((each, where) for buffer in buffers for each in {buffer, buffer.root})
        kept = {rows.buffer.root for rows in self.results}
        for buffer, where in last.items():
            if buffer.root not in kept:
                self.gone[where] = (*self.gone.get(where, ()), buffer.number)
        self.found = [_cut(rows) for rows in self.results]
        self.inputs = {
            id(item): [_cut(rows) for rows in (item.inputs if isinstance(item, Launched) else item.sources)]
            for item in self._items()
            if isinstance(item, Launched | Called)
        }

    def _items(self) -> Iterator[Item]:
        for step in self.steps:
            yield from (*step.pack, *step.work, *step.unpack)
        yield from self.end

    def _uses(self) -> Iterator[tuple[int, list[Buffer]]]:
        for step in self.steps:
            yield from ((id(item), _buffers(item)) for item in step.pack)
            yield id(step), [mail.buffer for mail in (step.sends, *step.receives) if mail is not None] + step.loose
            yield from ((id(item), _buffers(item)) for item in (*step.work, *step.unpack))
        yield from ((id(item), _buffers(item)) for item in self.end)

    def run(self, memory: Memory, attend: Attend, direction: str, rank: int, *, alone: bool = False) -> Program[None]:
        """Plays it back; results are in the memory then. `alone`: there is one rank, and no messages."""
        launches: dict[int, Iterator[tuple[Tensor, ...]]] = {}
        for number, step in enumerate(self.steps):
            if alone:
                with mark(direction, rank, number):
                    self._do([*step.pack, *step.work], memory, attend, launches)
                continue
            if step.pack:
                self._do(step.pack, memory, attend, launches)
                put_back(memory, step.loose)
            sends = {} if step.sends is None else step.sends.slices(memory.get(step.sends.buffer))
            into: dict[int, Tensor] = {}
            for mail in step.receives:
                into |= mail.slices(memory.get(mail.buffer))
            memory.messages.release()
            yield Exchange(number, sends, step.sizes, memory.device, step.pieces, into)
            memory.drop(self.gone.get(id(step), ()))
            del sends  # the transport lets go of the messages when they are delivered
            if step.work or marks():
                with mark(direction, rank, number):
                    self._do(step.work, memory, attend, launches)
            found = yield None
            if into:
                take_in(into, found or {})
                self._do(step.unpack, memory, attend, launches)
        if not alone:
            memory.messages.release()
        if self.end:
            self._do(self.end, memory, attend, launches)
        if self.loose:
            put_back(memory, self.loose)

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
                    tensors.append(memory.cut(number, parts) if parts or tensor is None else tensor)
                if isinstance(item, Launched):
                    launches[id(item)] = attend(item, tensors)
                else:
                    memory.tensors[item.result.number] = item.function(*tensors)
            if (gone := self.gone.get(id(item))) is not None:
                memory.drop(gone)


def take_in(into: dict[int, Tensor], found: dict[int, Tensor]) -> None:
    """What came for each peer is where it belongs then; a transport may have used memory of its own."""
    while into:
        peer, part = into.popitem()
        if (came := found.pop(peer)) is not part:
            part.copy_(came)


def part_of(memory: Memory, rows: Rows) -> Tensor:
    return memory.cut(*_cut(rows))


def _cut(rows: Rows) -> Cut:
    return cut_of(rows.buffer, rows.batch, rows.heads, rows.tokens)


def put_back(memory: Memory, loose: Sequence[Buffer]) -> None:
    """Writes parts of messages that had to be tensors of their own into their messages."""
    for buffer in loose:
        assert buffer.inside is not None
        message, part = memory.get(buffer.inside), memory.get(buffer)
        message[buffer.offset : buffer.offset + buffer.num_bytes] = part.reshape(-1).view(torch.uint8)


def items_of(log: Sequence[Note | Event]) -> list[Item]:
    """What was noted as operations, two of a kind together where neither waits for the other."""
    made: list[Item] = []
    for item in grouped(log):
        move = Move(item) if isinstance(item, Group) else item
        last = made[-1] if made else None
        if isinstance(move, Move) and isinstance(last, Move) and last.twin is None and last.fits(move):
            last.twin = move
            last.buffers += move.buffers
        else:
            made.append(move)
    return made


def _buffers(item: Item) -> list[Buffer]:
    if isinstance(item, Move):
        return item.buffers
    if isinstance(item, Taken):
        return [*item.results, *(rows.buffer for rows in item.launch.inputs)]
    if isinstance(item, Launched):
        return [rows.buffer for rows in item.inputs]
    assert isinstance(item, Called)
    return [item.result, *(rows.buffer for rows in item.sources)]


def memory_for(program: FlatProgram, device: torch.device) -> Memory:
    return Memory(program.buffers, device, by_index=device.type != "cpu")
