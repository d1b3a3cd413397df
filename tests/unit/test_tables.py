"""Tables of programs on a device: their size, the bound on all of them, what they hold, and when they are refused."""

import gc
import weakref

import numpy as np
import pytest
import torch

from longspan import PlanError, device_tables, layouts, masks, plan, planning
from longspan.kernels.cuda_flash import Flash
from longspan.planning.kernel_memory import table_bytes
from longspan.planning.machine import H100
from longspan.run import tables, walk
from longspan.run.tables import CACHE, HostTables, TableCache
from tests.flat_rows import by_tables
from tests.gpu.programs import RankPrograms, drive, no_backward, no_forward
from tests.kernel_models import rows as models

META = torch.device("meta")
KERNEL = Flash(op=no_forward, backward_op=no_backward)


def packed(seed, tokens=1 << 13, ranks=4, scheme="all_to_all", heads=8, **more):
    draw, lengths = np.random.default_rng(seed), []
    while sum(lengths) < tokens:
        lengths.append(int(min(tokens - sum(lengths), max(8, draw.lognormal(5, 1)))))
    mask = masks.documents(lengths) & masks.causal()
    sizes = {"q_heads": heads, "kv_heads": heads // 2, "head_dim": 16, "dtype": "bfloat16"}
    return plan(mask, layouts.zigzag(tokens, ranks), scheme=scheme, machine=H100, **sizes, **more)


def both_passes(made, rank=1):
    """Run a rank on tensors without data, as on a GPU; return the sizes of its programs' tables."""
    with models.installed(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "memory_for", by_tables)
        for name in ("move_rows", "merge_rows", "finish_rows"):
            patch.setattr(models.fused, name, lambda *_, **__: True)
        programs = RankPrograms.of(made, rank, "meta", KERNEL)
        drive(programs.program("backward"), zeros=False)
    return [program.host_tables.numbers.nbytes for *_, program in walk._built[made].values()]


@pytest.mark.parametrize("scheme", ["all_to_all", "hybrid(2,exchange)"])
def test_sizes_do_not_grow_with_heads_or_tokens(scheme):
    mask = masks.documents([40, 88, 100, 28]) & masks.causal()
    larger = masks.documents([640, 1408, 1600, 448]) & masks.causal()

    def size(mask, tokens, heads):
        made = plan(
            mask, layouts.contiguous(tokens, 4), scheme=scheme, q_heads=heads, kv_heads=heads, head_dim=16,
            dtype="bfloat16", machine=H100,
        )  # fmt: skip
        return both_passes(made)

    few = size(mask, 256, 4)
    assert size(mask, 256, 32) == few
    assert size(larger, 4096, 4) == few


def test_all_plans_together_are_bounded(monkeypatch):
    """Tables that are alive, counted by themselves, stay below the limit; those of the last plans are kept."""
    alive, copy = [], tables.copy_to_device

    def noted(numbers, device):
        alive.append(weakref.ref(found := copy(numbers, device)))
        return found

    monkeypatch.setattr(tables, "copy_to_device", noted)
    one = sum(both_passes(packed(0)))
    planning.set_table_limit(limit := 6 * one)
    try:
        kept = [packed(seed) for seed in range(1, 13)]  # plans and programs stay
        for made in kept:
            both_passes(made)
        gc.collect()
        found = sum(t.nbytes for ref in alive if (t := ref()) is not None)
        assert limit / 2 < found <= limit
        assert found == CACHE.num_bytes(META)
        copies = len(alive)
        both_passes(kept[-1])
        assert len(alive) == copies, "the last plan's tables were dropped"
        both_passes(kept[0])
        assert len(alive) == copies + 2, "the first plan's tables are copied again, one copy for each direction"
    finally:
        planning.set_table_limit()


class Owner:
    """As a program: its tables are 240 bytes."""

    host_tables = HostTables([np.ones((3, 10), dtype=np.int64)], {})


def test_tables_go_with_their_program():
    cache, owner = TableCache(), Owner()
    cache.get(owner, META)
    assert cache.num_bytes(META) == 240
    del owner
    gc.collect()
    assert cache.num_bytes(META) == 0


class Stream:
    """Notes events that it waits for."""

    def __init__(self):
        self.waited = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited.append(event)


@pytest.mark.parametrize("is_other", [False, True])
def test_tables_in_a_graph_stay(is_other, monkeypatch):
    """A graph has their address, whichever stream was captured; without a graph another stream waits for the copy."""
    first, other = Stream(), Stream()
    cache, owner, current, capturing = TableCache(), Owner(), [first], [False]
    monkeypatch.setattr(device_tables, "stream_of", lambda _: current[0])
    monkeypatch.setattr(device_tables, "is_capturing", lambda _: capturing[0])
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    table = weakref.ref(cache.get(owner, META).numbers)
    current[0] = other if is_other else first
    cache.get(owner, META)
    assert (first.waited, other.waited) == ([], [first] if is_other else [])
    capturing[0] = True
    cache.get(owner, META)
    assert len(other.waited) == is_other, "an event from outside of the capture"
    del owner
    gc.collect()
    assert cache.num_bytes(META) == 0
    assert table() is not None


def test_a_limit_of_nothing_still_runs():
    planning.set_table_limit(0)
    try:
        both_passes(packed(40))
        assert CACHE.num_bytes(META) == 0
    finally:
        planning.set_table_limit()
    for wrong in (-1, 1.5, None):
        with pytest.raises(PlanError, match="num_bytes"):
            planning.set_table_limit(wrong)


def test_index_arrays_are_those_that_the_kernel_would_copy():
    made = packed(7, scheme="exchange", batch=2)
    both_passes(made)
    arrays = 0
    for *_, program in walk._built[made].values():
        host = program.host_tables
        short = torch.from_numpy(host.numbers).view(torch.int32)
        for launch in (item for step in program.steps for item in step.work if hasattr(item, "tiles")):
            batch, _, num_q, _ = launch.inputs[0].shape
            for each in KERNEL._launches(launch.tiles, num_q, launch.inputs[1].shape[2]):
                known = [(side, b) for side in (each.rows, each.cols) for b in (None, batch)]
                for side, b in known:
                    name = each.number, side.name, b
                    if name in host.places.get(id(launch), {}):
                        start, size = host.places[id(launch)][name]
                        expected = each._index(side, b, torch.device("cpu"), None)
                        assert torch.equal(short[start : start + size], expected)
                        assert start % 4 == 0
                        arrays += 1
    assert arrays > 4


def test_a_first_call_inside_a_capture_is_refused(monkeypatch):
    monkeypatch.setattr(device_tables, "is_capturing", lambda _: True)
    with pytest.raises(PlanError, match="captured in a CUDA graph"):
        both_passes(packed(41))


@pytest.mark.parametrize("scheme", ["exchange", "all_to_all", "hybrid(2,exchange)", "ring"])
def test_the_memory_figure_counts_tables(scheme):
    """Within 5% of the memory beyond own tensors: tables are the smallest part of it."""
    for seed in range(5):
        made = packed(seed, 1 << 14, scheme=scheme)
        found = sum(both_passes(made))
        planned = table_bytes(made.steps(1), made.steps(1, "backward"), H100)
        figure = made.peak_bytes(1) + made.workspace_bytes(1)
        assert abs(found - planned) <= 0.05 * figure, (found, planned, figure)
    assert "at most 64.0 MiB" in str(made)
