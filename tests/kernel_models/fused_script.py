"""The Triton kernels by Triton's interpreter, on CPU tensors in guarded memory. Prints one line of JSON.

    TRITON_INTERPRET=1 python -m tests.kernel_models.fused_script [FILE ...]

FILE: kernels to be used instead of ours, for mutants; a line for each.
"""

import importlib.util
import json
import sys

import torch

from longspan import layouts, masks, plan
from longspan.run import fused, walk
from longspan.run import merge as engine_merge
from longspan.testing import loopback
from tests.flat_rows import by_tables

OURS = "longspan.run.triton_kernels"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
GUARD = 7


def table(rows, kind):
    """Rows as a kernel is given them, with others behind the last: a kernel that goes on too far writes to one of them,
    and not just anywhere, which would end the process."""
    return torch.cat((rows, torch.zeros(16, dtype=rows.dtype))).to(kind)[: len(rows)]


def guarded(tensor, value=torch.nan):
    """A view that holds the tensor inside of larger memory of one value, and what checks that the rest still has it.

    Around what is only read that is NaN, which spoils whatever it gets into; around what is written it is a number,
    since NaN would be written over NaN.
    """
    shape = [size + 2 * GUARD for size in tensor.shape]
    memory = torch.full(shape, value, dtype=tensor.dtype)
    before = memory.clone()
    inside = tuple(slice(GUARD, GUARD + size) for size in tensor.shape)
    memory[inside] = tensor
    left = torch.ones(shape, dtype=torch.bool)
    left[inside] = False
    return memory[inside], lambda: torch.equal(memory[left].nan_to_num(-1.0), before[left].nan_to_num(-1.0))


def state(generator, shape, wide):
    """(acc, top, num) of rows of which some saw nothing."""
    acc, top, num = torch.randn(shape, generator=generator).to(wide), torch.randn(shape[:3], generator=generator), 1.0
    top = (top * 40).to(wide)
    blind = torch.rand(shape[2], generator=generator) < 0.2
    num = (torch.rand(shape[:3], generator=generator) + 0.5).to(wide).masked_fill(blind, 0.0)
    return acc.masked_fill(blind[:, None], 0.0), top.masked_fill(blind, -torch.inf), num


def merges(generator):
    """The largest relative error of a merge, infinite where a guard was written to."""
    pick = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    dtype = DTYPES[pick(0, 4)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (pick(1, 3), pick(1, 4), pick(1, 60), pick(1, 40))
    mine = state(generator, shape, wide)
    out, lse, _ = state(generator, shape, wide)
    out = out.to(dtype)
    expected = [t.clone() for t in mine]
    both = [*(guarded(t, 3.0) for t in mine), guarded(out), guarded(lse)]
    views, checks = zip(*both, strict=True)
    if pick(0, 2):
        size = pick(1, shape[2] + 1)
        here, there = (torch.randperm(shape[2], generator=generator)[:size] for _ in range(2))
        rows = [t[:, :, there] for t in expected]
        engine_merge.merge(*rows, out[:, :, here], lse[:, :, here])
        for t, part in zip(expected, rows, strict=True):
            t[:, :, there] = part
        kind = torch.int32 if pick(0, 2) else torch.int64
        fused.merge_rows(views[:3], *views[3:], table(here, kind), table(there, kind))
    else:
        engine_merge.merge(*expected, out, lse)
        fused.merge(*views)
    if not all(check() for check in checks):
        return float("inf")
    return max(error(found, right) for found, right in zip(views, expected, strict=False))


def error(found, right):
    found, right = found.double(), right.double()
    same = (found == right) | (found.isnan() & right.isnan())
    return float(((found - right).abs() / (1 + right.abs())).masked_fill(same, 0.0).nan_to_num(torch.inf).max())


def moves(generator):
    """The largest error of rows that are moved or added, which are exact; of one move, or of two at once."""
    pick = lambda low, high: int(torch.randint(low, high, (), generator=generator))  # noqa: E731
    adds = bool(pick(0, 2))
    drawn = [move(generator, pick, adds) for _ in range(pick(1, 3))]
    rows = [(source, view, here, there) for source, view, here, there, _ in drawn]
    if len(rows) == 1:
        fused.move_rows(*rows[0], adds=adds)
    else:
        fused.move_two(*rows, adds=adds)
    return max(found() for *_, found in drawn)


def move(generator, pick, adds):
    """A source, a target, the rows of a move between them, and what finds its error."""
    dtype = DTYPES[pick(0, 4)]
    batch, heads, dim, long, other = pick(1, 3), pick(1, 4), pick(1, 40), pick(1, 60), pick(1, 60)
    source = torch.randn((batch, heads, long, dim), generator=generator).to(dtype)
    target = torch.randn((batch, heads, other, dim), generator=generator).to(torch.float32 if adds else dtype)
    size = pick(1, min(long, other) + 1)
    here, there = (torch.randperm(n, generator=generator)[:size] for n in (long, other))
    expected = target.clone()
    if adds:
        expected[:, :, there] += source[:, :, here].to(expected.dtype)
    else:
        expected[:, :, there] = source[:, :, here]
    (source, source_check), (view, check) = guarded(source), guarded(target, 3.0)
    kind = torch.int32 if pick(0, 2) else torch.int64
    found = lambda: error(view, expected) if check() and source_check() else float("inf")  # noqa: E731
    return source, view, table(here, kind), table(there, kind), found


def whole_runs(generator):
    """The largest difference that the kernels make to forward and backward over ranks, and how often they ran."""
    calls = 0
    worst = 0.0
    for scheme in ("ring", "exchange", "all_to_all"):
        mask = masks.documents([9, 30, 5, 20]) & masks.causal()
        made = plan(
            mask, layouts.striped(64, 4, stripe=4), q_heads=4, kv_heads=4, head_dim=8, dtype="float32", scheme=scheme
        )
        inputs = [torch.randn((1, 4, 64, 8), generator=generator) for _ in range(4)]
        right = loopback.run_loopback(made, *inputs, kernel="reference", scale=0.3)
        counted = {name: getattr(fused, name) for name in ("is_fused", "merge", "merge_rows", "move_rows", "move_two")}

        def count(name, counted=counted):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                return counted[name](*args, **kwargs)

            return run

        fused.is_fused = lambda tensor: tensor.dim() == 4 and tensor.stride(3) == 1
        for name in ("merge", "merge_rows", "move_rows", "move_two"):
            setattr(fused, name, count(name))
        memory_for, walk.memory_for = walk.memory_for, by_tables
        try:
            found = loopback.run_loopback(made, *inputs, kernel="reference", scale=0.3)
        finally:
            walk.memory_for = memory_for
            for name, function in counted.items():
                setattr(fused, name, function)
        worst = max(worst, *(error(a, b) for a, b in zip(found, right, strict=True)))
    return worst, calls


def used(path):
    spec = importlib.util.spec_from_file_location(OURS, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[OURS] = module
    spec.loader.exec_module(module)


def main(*paths):
    torch.set_num_threads(1)
    for path in paths or (None,):
        generator = torch.Generator().manual_seed(0)
        if path is not None:
            used(path)
        cases = 60 if path is None else 14
        results = {"merge": max(merges(generator) for _ in range(cases))}
        results["moves"] = max(moves(generator) for _ in range(cases))
        if path is None:
            results["runs"], results["calls"] = whole_runs(generator)
        print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
