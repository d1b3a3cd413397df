"""`keep_recent`: results that were used last, bounded by bytes; block masks, tables of scans and positions of functions
are kept by it."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import longspan as ls
from longspan import device_tables
from longspan.device_tables import Copied, keep_recent
from longspan.kernels import flex
from longspan.mixers import scan_reference
from longspan.mixers.scan_reference import Segments, build_chunk_table, packing
from longspan.planning import kernel_memory
from longspan.run import walk
from longspan.spans import Span
from longspan.testing import loopback
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
        chunks = build_chunk_table(segments, 64, 1, 4096, device)
        chunks.fold(torch.zeros(1, 4096, 2, 1))
        for kind, value in (("blocks", blocks), ("chunks", chunks), ("packing", packing(segments, 1, 4096, device))):
            made[kind].append(weakref.ref(value))
        assert flex._blocks_of((Tile(0, length, 0, length, 0, None),), (length, length), device) is blocks
        assert build_chunk_table(segments, 64, 1, 4096, device) is chunks
        del blocks, chunks, value
    for kind, values in made.items():
        assert 1 <= sum(value() is not None for value in values) <= 16, kind


class Stream:
    """Notes for which events it waits."""

    def __init__(self):
        self.waited = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited.append(event)


@keep_recent(least=2)
def doubled(numbers, device):
    """Tables as those of recurrences: computed on the device from what was copied there."""
    return (torch.tensor(numbers, device=device) * 2,)


def test_other_streams_wait_for_tables(monkeypatch):
    first, other, used = Stream(), Stream(), []
    current = [first]
    monkeypatch.setattr(device_tables, "stream_of", lambda _: current[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: used.append((tensor, stream)))
    device = torch.device("cpu")
    (table,) = doubled((1, 2), device)
    assert doubled((1, 2), device)[0] is table
    assert not first.waited
    current[0] = other
    assert doubled((1, 2), device)[0] is table
    assert other.waited == [first]
    assert used == [(table, other)]


def test_new_tables_in_a_capture_are_refused(monkeypatch):
    device = torch.device("cpu")
    doubled((3,), device)
    monkeypatch.setattr(device_tables, "is_capturing", lambda _: True)
    doubled((3,), device)
    with pytest.raises(ls.PlanError, match="captured in a CUDA graph"):
        doubled((4,), device)


def scores_that_learn():
    slopes = torch.ones(2, requires_grad=True)

    def alibi(score, b, h, q, kv):
        return score + slopes[h] * q * kv.float()

    q, k, v = (torch.ones(1, 2, 11, 4) for _ in range(3))
    return lambda: ls.attention(q, k, v, ls.masks.causal(11), score_mod=alibi)


def many_documents():
    x, weight = torch.ones(1, 102, 2, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    return lambda: ls.causal_conv1d(x, weight, documents=[2] * 49 + [4])


def recurrence():
    a, b = (torch.full((1, 13, 2), 0.5, requires_grad=True) for _ in range(2))
    return lambda: ls.linear_recurrence(a, b, documents=[5, 8])


def recurrence_of_a_plan():
    a, b = (torch.full((1, 13, 2), 0.5, requires_grad=True) for _ in range(2))
    plan = ls.scan_plan([5, 8], ls.layouts.contiguous(13, 1), heads=1, keys=2, values=1, maps="elements")
    return lambda: ls.linear_recurrence(a, b, plan=plan)


CALLS = scores_that_learn, many_documents, recurrence, recurrence_of_a_plan


def forget(monkeypatch):
    walk.tile_positions.cache_clear()
    scan_reference._build_chunk_table.cache_clear()
    scan_reference._tables.cache_clear()
    monkeypatch.setattr(walk, "_built", weakref.WeakKeyDictionary())


@pytest.mark.parametrize("make", CALLS)
def test_training_uses_tables_that_inference_built(make, monkeypatch):
    forget(monkeypatch)
    call = make()
    with torch.inference_mode():
        expected = call()
    out = call()
    assert torch.equal(out, expected)
    out.sum().backward()


@pytest.mark.parametrize("make", CALLS)
def test_tables_without_contents_are_not_kept(make, monkeypatch):
    call = make()
    expected = call()
    forget(monkeypatch)
    with contextlib.suppress(DataDependentOutputException), FakeTensorMode(allow_non_fake_inputs=True):
        call()
    out = call()
    assert type(out) is torch.Tensor
    assert torch.equal(out, expected)


def run_with_function(monkeypatch, tokens, is_capturing=False):
    """Run both passes over two ranks with a mask function; return the positions that were used."""
    used = []
    make = walk.tile_positions

    def noted(*args):
        used.append(make(*args))
        return used[-1]

    mask = ls.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 != 1, tokens, within=ls.masks.causal())
    sizes = {"q_heads": 2, "kv_heads": 1, "head_dim": 4, "dtype": "float32"}
    plan = ls.plan(mask, ls.layouts.zigzag(tokens, 2), scheme="exchange", **sizes)
    whole = [torch.randn(1, heads, tokens, 4) for heads in (2, 1, 1, 2)]
    with monkeypatch.context() as patch:
        patch.setattr(walk, "tile_positions", noted)
        loopback.run_loopback(plan, *whole, kernel="reference")
        if is_capturing:
            patch.setattr(device_tables, "is_capturing", lambda device: device.type == "cpu")
            loopback.run_loopback(plan, *whole, kernel="reference")
    return used


def test_positions_of_functions_are_shared_and_freed(limit, monkeypatch):
    limit(1 << 14)
    alive = []
    for number in range(40):
        used = run_with_function(monkeypatch, 64 + 4 * number)
        assert len({id(each) for each in used}) <= len(used) / 2  # both directions have the same
        alive += [weakref.ref(each) for each in set(used)]
        del used
    gc.collect()
    assert len(alive) >= 80
    assert 1 <= sum(value() is not None for value in alive) <= 16


def test_positions_in_a_graph_stay(limit, monkeypatch):
    limit(0)
    stream = Stream()
    monkeypatch.setattr(Copied, "in_graphs", set())
    monkeypatch.setattr(device_tables, "stream_of", lambda _: stream)
    captured, free = (
        [weakref.ref(x) for each in set(run_with_function(monkeypatch, tokens, is_capturing)) for x in each.tensors]
        for tokens, is_capturing in ((300, True), (304, False))
    )
    for number in range(16):
        walk.tile_positions(Span(0, 1), Span(number, number + 1), b"", b"", torch.device("cpu"))
    gc.collect()
    assert all(value() is not None for value in captured)
    assert all(value() is None for value in free)
