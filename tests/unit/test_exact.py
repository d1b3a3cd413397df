"""Exactness on all ranks in one process, against a dense float64 oracle: random inputs, random output gradients."""

import dataclasses
import math
import random

import numpy as np
import pytest
import torch

from longspan import layouts, masks
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning import Problem, Sizes, scheme
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan
from longspan.run.merge import Accumulator, Sum
from longspan.run.transports import Loopback
from longspan.testing import loopback, run_loopback
from tests.exact_cases import DTYPES, KINDS, NAMES, SCHEMES, WORLDS, Oracle, anew, assert_exact, exact_case, fused

CHUNKS, CHUNK = 20, 33
SEEDS = range(CHUNKS * CHUNK)
KERNELS = ("reference", "auto")
NARROW = {"float64": False, "float32": False, "bfloat16": True, "float16": True}


def test_cases_cover_what_they_should():
    cases = [exact_case(seed) for seed in SEEDS]
    real = [case for case in cases if case.kind != "empty"]
    assert len(real) * len(DTYPES) * len(KERNELS) >= 5000
    assert {case.kind for case in cases} == {*KINDS, "empty"}
    for kind in KINDS:
        assert {c.layout.world_size for c in cases if c.kind == kind} == set(WORLDS)
    for name in ("contiguous", "zigzag", "striped", "per_document", "round_robin_by_work", "balanced", "scattered"):
        found = {c.scheme.partition("(")[0] for c in cases if c.layout.name == name}
        assert found == {"ring", "exchange", "staged", "all_gather", "all_to_all", "hybrid"}, name
    assert {c.scheme.partition("(")[2].partition(",")[2] for c in cases} == {"", "exchange)", "all_gather)", "staged)"}
    assert len(SCHEMES) == 9
    many = {
        "an empty shard": lambda c: (c.layout.num_tokens == 0).any(),
        "fewer tokens than ranks": lambda c: c.layout.seq_len < c.layout.world_size,
        "shards of unequal length": lambda c: len(set(c.layout.num_tokens.tolist())) > 1,
        "padding": lambda c: any(c.layout.num_padding(rank) for rank in range(c.layout.world_size)),
        "grouped heads": lambda c: c.sizes.group > 1,
        "odd head dims": lambda c: c.sizes.head_dim % 2,
        "unequal head dims": lambda c: c.sizes.head_dim != c.sizes.v_head_dim,
        "nodes": lambda c: c.node is not None and 1 < c.node < c.layout.world_size,
        "several stages": lambda c: c.max_rows is not None,
        "kept K/V": lambda c: c.keep,
    }
    for what, has in many.items():
        assert sum(bool(has(case)) for case in real) >= 20, what


@pytest.mark.share(20)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_exact(chunk):
    squares = {}  # per dtype and kernel: squares of our errors and of the fused kernel's, in roundings
    for seed in SEEDS[chunk * CHUNK : (chunk + 1) * CHUNK]:
        case = exact_case(seed)
        oracles = {narrow: _oracle(case, narrow) for narrow in (False, True)}
        for name, dtype in DTYPES.items():
            inputs, oracle = oracles[NARROW[name]]
            rounded = [t.to(dtype) for t in inputs]
            assert all(torch.equal(a.double(), b) for a, b in zip(rounded, inputs, strict=True))
            baseline = None
            if name != "float64":
                baseline = oracle.errors(fused(*rounded, oracle.seen, case.scale))
            for kernel in KERNELS:
                found = run_loopback(case.plan(name), *rounded, kernel=kernel, scale=case.scale)
                assert_exact(oracle, found, baseline, f"{name}, kernel {kernel}, {case}")
                if baseline is not None:
                    size = np.maximum(oracle.roundings(dtype), 1e-300)
                    both = np.stack((oracle.errors(found), baseline)) / size
                    squares[name, kernel] = squares.get((name, kernel), 0) + both**2
    for which, (ours, theirs) in squares.items():  # over many cases chance is out of the game, and no floor is needed
        for i, name in enumerate(NAMES):
            assert ours[i] <= 2**2 * theirs[i], f"{which}, {name}: {math.sqrt(ours[i] / theirs[i])} x the fused kernel"


def _oracle(case, narrow):
    inputs = case.inputs(narrow=narrow)
    return inputs, Oracle.of(*inputs, case.mask, case.scale)


# -- errors do not grow with the number of chunks ----------------------------------------------------------------------

S, DIM, FEW = 1024, 16, 32


def _of_bands(q, kv):
    return Mask.of_bands(np.array([[*q, *kv, -S, S]], dtype=np.int64), S, f"{q} x {kv}")


def _backwards(count):
    """One rank that holds `count` spans, the last one first, so that no two can be taken together."""
    size = S // count
    return Layout.from_spans(S, [[(i * size, i * size + size) for i in reversed(range(count))]], name="backwards")


def _plan(mask, layout, name, dtype, stages=None):
    sizes = Sizes(1, 1, DIM, DIM, dtype.itemsize)
    problem = dataclasses.replace(Problem.make(mask, layout, sizes), stages=stages)
    return Plan(mask, layout, sizes, str(dtype).removeprefix("torch."), scheme(name, problem), CPU, True, False)


@pytest.fixture
def most_merges(monkeypatch):
    """The most contributions that any row of a result, and of a gradient, was put together from."""
    most = {Accumulator: 0, Sum: 0}
    for kind in most:

        def add(self, start, stop, *part, original=kind.add, kind=kind):
            seen = self.__dict__.setdefault("contributions", np.zeros(S, dtype=np.int64))
            seen[start:stop] += 1
            most[kind] = max(most[kind], int(seen[start:stop].max()))
            original(self, start, stop, *part)

        monkeypatch.setattr(kind, "add", add)
    return most


def _errors(plan, dtype, kernel):
    draw = torch.Generator().manual_seed(7)
    q, k, v, dout = (torch.randn(1, 1, S, DIM, generator=draw).to(dtype) for _ in range(4))
    oracle = Oracle.of(q, k, v, dout, plan.mask, 1.0)
    found = run_loopback(plan, q, k, v, dout, kernel=kernel, scale=1.0)
    return np.array(oracle.errors(found)), np.array(oracle.errors(fused(q, k, v, dout, oracle.seen, 1.0)))


def _assert_flat(errors):
    """Never more than twice the fused kernel's error, nor than our own in one chunk."""
    one = errors[0][0]
    for number, (ours, theirs) in enumerate(errors):
        for name, error, alone, limit in zip(NAMES, ours, one, theirs, strict=True):
            assert error <= 2 * min(alone, limit), f"{name} of run {number}: {error:.3e}; {alone:.3e} in one chunk"


@pytest.mark.share(6)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", ["all", "rows", "columns"])
def test_errors_stay_flat_in_the_number_of_chunks(which, dtype, kernel, most_merges):
    """A few query rows meet up to 256 chunks of keys, a few keys as many of queries, and all meet in 32 x 32 chunks."""
    mask = {"all": masks.full(S), "rows": _of_bands((0, FEW), (0, S)), "columns": _of_bands((0, S), (0, FEW))}[which]
    errors = []
    for count in (1, 4, 16, 32) if which == "all" else (1, 4, 16, 64, 256):
        errors.append(_errors(_plan(mask, _backwards(count), "exchange", dtype), dtype, kernel))
        assert most_merges[Sum] == count
        assert most_merges[Accumulator] == (count if which != "columns" else max(count * FEW // S, 1))
    _assert_flat(errors)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_errors_stay_flat_in_the_number_of_ranks_and_stages(dtype, most_merges):
    mask, errors = masks.full(S), []
    for world in (1, 4, 16):
        errors.append(_errors(_plan(mask, layouts.contiguous(S, world), "ring", dtype), dtype, "auto"))
        assert most_merges[Accumulator] == world
    for world in (4, 64):
        errors.append(_errors(_plan(mask, layouts.zigzag(S, world), "exchange", dtype), dtype, "auto"))
    for stages in (16, 256):
        errors.append(_errors(_plan(mask, layouts.contiguous(S, 2), "exchange", dtype, stages), dtype, "auto"))
    assert most_merges[Accumulator] > 256
    _assert_flat(errors)


# -- the same bits every time ------------------------------------------------------------------------------------------


class Shuffled(Loopback):
    """Messages arrive in any order, and ranks take turns in any order."""

    order = random.Random(0)

    def _resume(self, rank, program, arrived, started, results):
        if arrived:
            arrived = dict(self._mixed(arrived))
        super()._resume(rank, program, arrived, started, results)
        mixed = self._mixed(started)
        started.clear()
        started.update(mixed)

    def _mixed(self, items):
        items = list(items.items())
        self.order.shuffle(items)
        return items


@pytest.mark.share(2)
@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_whatever_arrives_first(kernel, monkeypatch):
    for seed in range(1000, 1030):
        case = exact_case(seed)
        name = list(DTYPES)[seed % 4]
        inputs = [t.to(DTYPES[name]) for t in case.inputs(narrow=NARROW[name])]
        plan = case.plan(name)
        runs = [run_loopback(plan, *inputs, kernel=kernel) for _ in range(2)]
        with monkeypatch.context() as patch:
            patch.setattr(loopback, "Loopback", Shuffled)
            runs += [run_loopback(plan, *inputs, kernel=kernel) for _ in range(2)]
        fresh = anew(plan)  # planned anew, not from the steps remembered above
        runs.append(run_loopback(fresh, *inputs, kernel=kernel))
        for run in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True)), str(case)
