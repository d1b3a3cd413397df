"""Accumulators and sums of tensors, for tests: what they note is played at once; and functions among what is noted."""

import torch

from longspan.run import merge
from longspan.run.moves import Memory
from longspan.run.program import RankProgram, items_of, part_of
from longspan.run.recorder import Called, Recorder
from longspan.run.tables import CACHE
from longspan.tile import accumulation_dtype

CPU = torch.device("cpu")


def changed(function, *rows):
    """Rows that will be what a function makes of the tensors of others; its result is shaped like the first."""
    return rows[0].recorder.call(function, rows, rows[0].shape)


def by_tables(program, device):
    """Memory in which rows are moved by tables, as on GPUs."""
    tables = CACHE.get(program, device)
    return Memory(program.buffers, device, tables.numbers, tables.index)


class Played:
    """A recorder whose rows have tensors."""

    def __init__(self, by_index=False):
        self.recorder, self.given, self.log, self.by_index = Recorder(), {}, [], by_index

    def rows(self, tensor):
        tensor = tensor if tensor.dim() == 4 else tensor.unsqueeze(3)
        rows = self.recorder.new(tensor.shape, tensor.dtype)
        self.given[rows.buffer.number] = tensor
        return rows

    def tensors(self, *rows):
        self.log += self.recorder.take_log()
        program = RankProgram([], items_of(self.log), [], self.recorder.buffers)
        memory = by_tables(program, CPU) if self.by_index else Memory(program.buffers, CPU)
        for number, tensor in self.given.items():
            memory.tensors[number] = tensor
        for item in program.end:
            if isinstance(item, Called):
                sources = [part_of(memory, rows) for rows in item.sources]
                memory.tensors[item.result.number] = item.function(*sources)
            else:
                item.run(memory)
        return [part_of(memory, each) for each in rows]


class _OfTensors:
    def add(self, start, stop, *parts):
        self.inner.add(start, stop, *map(self.played.rows, parts))

    def any(self):
        return self.inner.any()


class Accumulator(_OfTensors):
    def __init__(self, like, dim):
        self.played, self.dtype = Played(), like.dtype
        self.inner = merge.Accumulator(self.played.rows(like), dim)

    def result(self):
        out, lse = self.played.tensors(*self.inner.result())
        return out.to(self.dtype), lse.squeeze(3).to(accumulation_dtype(self.dtype))


class Sum(_OfTensors):
    def __init__(self, like, dtype):
        self.played = Played()
        self.inner = merge.Sum(tuple(map(self.played.rows, like)), dtype)

    def result(self, dtype):
        return tuple(t.to(dtype) for t in self.played.tensors(*self.inner.result(dtype)))
