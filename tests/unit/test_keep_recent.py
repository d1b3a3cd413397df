"""`keep_recent`: results that were used last, bounded by bytes; block masks and tables of scans are kept by it."""

import weakref

import numpy as np
import pytest
import torch

from longspan.kernels import flex
from longspan.mixers.scan_reference import Segments, cut, packing
from longspan.planning import kernel_memory
from longspan.planning.kernel_memory import keep_recent
from longspan.tile import Tile


@pytest.fixture
def limit():
    yield kernel_memory.set_table_limit
    kernel_memory.set_table_limit()


def test_the_least_recently_used_results_go_first(limit):
    made = []

    @keep_recent(least=2)
    def table(number):
        made.append(number)
        return (np.zeros(number, dtype=np.int64),)

    limit(700)
    for number in (10, 20, 30, 10, 40):  # 800 bytes with 40: 20 goes
        assert len(table(number)[0]) == number
    assert made == [10, 20, 30, 40]
    assert [len(table(number)[0]) for number in (10, 40)] == [10, 40]
    assert made == [10, 20, 30, 40]
    table(20)
    assert made[-1] == 20
    table(1000)  # above the limit by itself, and still kept: every layer uses it
    table(1000)
    assert made[-2:] == [20, 1000]


def test_an_error_is_not_kept(limit):
    @keep_recent(least=1)
    def fail(number):
        raise ValueError(number)

    for _ in range(2):
        with pytest.raises(ValueError, match="3"):
            fail(3)


def test_tables_of_a_hundred_batches_are_freed(limit):
    limit(1 << 20)
    device, made = torch.device("cpu"), {"blocks": [], "chunks": [], "packing": []}
    for number in range(100):
        length = 4096 + 128 * number
        blocks = flex._blocks_of((Tile(0, length, 0, length, 0, None),), (length, length), device)
        segments = Segments(np.array([[0, 0, 1000 + number], [0, 1000 + number, 4096]]))
        chunks = cut(segments, 64, 1, 4096, device)
        chunks.fold(torch.zeros(1, 4096, 2, 1))
        for kind, value in (("blocks", blocks), ("chunks", chunks), ("packing", packing(segments, 1, 4096, device))):
            made[kind].append(weakref.ref(value))
        assert flex._blocks_of((Tile(0, length, 0, length, 0, None),), (length, length), device) is blocks
        assert cut(segments, 64, 1, 4096, device) is chunks
        del blocks, chunks, value
    for kind, values in made.items():
        assert 1 <= sum(value() is not None for value in values) <= 16, kind
