"""The Triton kernels by Triton's interpreter, on CPU tensors in guarded memory. Prints one line of JSON.

    TRITON_INTERPRET=1 python -m tests.kernel_models.fused_script [FILE ...]

FILE: kernels to be used instead of ours, for mutants; a line for each.
"""

import importlib.util
import itertools
import json
import os
import sys

import torch

from longspan import layouts, masks, plan
from longspan.run import fused, walk
from longspan.run import merge as engine_merge
from longspan.run.recorder import Kind
from longspan.testing import loopback
from tests.flat_rows import Played, by_tables

OURS = "longspan.run.triton_kernels"
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
GUARD = 7


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


def runs_between(pick, generator, long, other):
    """Up to five runs of tokens, (there, here, number): apart from each other in the target, anywhere in the source."""
    cuts = torch.randperm(other, generator=generator)[: pick(1, 10)].sort().values.tolist()
    runs = []
    for start, stop in itertools.pairwise([*cuts, other]):
        size = min(stop - start, long, pick(1, 30))
        if size and pick(0, 3):
            runs.append((start, pick(0, long - size + 1), size))
    return runs or [(0, 0, 1)]


def picker(generator):
    return lambda low, high: int(torch.randint(low, high, (), generator=generator))


def merges(generator):
    """The largest relative error of merges and of finished rows, infinite where a guard was written to."""
    pick = picker(generator)
    dtype = DTYPES[pick(0, 4)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (pick(1, 3), pick(1, 4), pick(1, 60), pick(1, 40))
    mine = state(generator, shape, wide)
    out, lse, _ = state(generator, (*shape[:2], pick(1, 60), shape[3]), wide)
    finished = torch.randn(shape, generator=generator).to(dtype), torch.randn(shape[:3], generator=generator).to(wide)
    given = [*mine, out.to(dtype), lse, *finished]
    expected = [t.clone() if t.dim() == 4 else t.unsqueeze(3).clone() for t in given]
    both = [
        guarded(t if t.dim() == 4 else t.unsqueeze(3), 3.0 if i not in (3, 4) else torch.nan)
        for i, t in enumerate(given)
    ]
    views, checks = zip(*both, strict=True)
    played = Played(by_index=True)
    rows = [played.rows(view) for view in views]
    heads = slice(0, shape[1]) if pick(0, 2) else slice(pick(0, shape[1]), shape[1])
    for there, here, size in runs_between(pick, generator, out.shape[2], shape[2]):
        to, of = ((slice(None), heads, slice(at, at + size)) for at in (there, here))
        played.recorder.note(Kind.MERGE, *(x[to] for x in rows[:3]), *(x[of] for x in rows[3:5]))
        acc, top, num = (t[to] for t in expected[:3])
        engine_merge.merge(acc, top[..., 0], num[..., 0], expected[3][of], expected[4][of][..., 0])
    for there, here, size in runs_between(pick, generator, shape[2], shape[2]):
        to, of = ((slice(None), heads, slice(at, at + size)) for at in (there, here))
        played.recorder.note(Kind.FINISH, *(x[to] for x in rows[5:]), *(x[of] for x in rows[:3]))
        for target, found in zip(expected[5:], engine_merge.finished_rows(*(t[of] for t in expected[:3])), strict=True):
            target[to] = found.to(target.dtype)
    played.tensors()
    if not all(check() for check in checks):
        return float("inf")
    # Half types are rounded from sums whose last bits differ.
    unit = 1.0 if dtype in (torch.float32, torch.float64) else 1e-6 / torch.finfo(dtype).eps
    errors = [error(found, right) for found, right in zip(views, expected, strict=True)]
    return max(*errors[:5], errors[5] * unit, errors[6])


def error(found, right):
    found, right = found.double(), right.double()
    same = (found == right) | (found.isnan() & right.isnan())
    return float(((found - right).abs() / (1 + right.abs())).masked_fill(same, 0.0).nan_to_num(torch.inf).max())


def moves(generator):
    """The largest error of rows that are copied, added and filled, which are exact: between tensors and parts of a
    message, of some heads, in one call for many runs, or for two pairs of tensors."""
    pick = picker(generator)
    kind = ("copy", "add", "fill")[pick(0, 3)]
    batch, heads = pick(1, 3), pick(1, 4)
    played, drawn = Played(by_index=True), []
    message = played.recorder.message(0)
    for _ in range(pick(1, 3)):
        dtype = DTYPES[pick(0, 4)]
        dim, long, other = pick(1, 40), pick(1, 60), pick(1, 60)
        source = torch.randn((batch, heads, long, dim), generator=generator).to(dtype)
        kinds = (torch.float32,) if kind == "add" else (dtype, torch.float32)
        target = torch.randn((batch, heads, other, dim), generator=generator).to(kinds[pick(0, len(kinds))])
        drawn.append((source, target, runs_between(pick, generator, long, other)))
    written = pick(0, 2)
    ends = []
    for source, target, runs in drawn:
        sides = []
        for is_target, tensor in enumerate((source, target)):
            if pick(0, 2) and is_target == written:  # a part of the message
                size = message.shape[2]
                offset = -(-size // tensor.element_size()) * tensor.element_size()
                message.shape = (1, 1, offset + tensor.nbytes, 1)
                part = played.recorder.new(tensor.shape, tensor.dtype, inside=message, offset=offset)
                sides.append((part, None, (offset, tensor)))
            else:
                turned = not is_target and not pick(0, 3)  # features are not neighbours in memory
                view, check = guarded(tensor.mT if turned else tensor, 3.0 if is_target else torch.nan)
                sides.append((played.rows(view.mT if turned else view), check, view))
        ends.append((sides, runs))
    given = torch.full((message.shape[2] + 64,), 3, dtype=torch.uint8)
    played.given[message.number] = given[: message.shape[2]]
    for sides, _ in ends:
        for _, check, content in sides:
            if check is None:
                offset, tensor = content
                given[offset : offset + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
    few = slice(0, heads) if pick(0, 2) else slice(pick(0, heads), heads)
    answers = []
    for (source, target, runs), (sides, _) in zip(drawn, ends, strict=True):
        expected = target.clone()
        for there, here, size in runs:
            to, of = ((slice(None), few, slice(at, at + size)) for at in (there, here))
            rows, (from_rows, *_) = sides[1][0], sides[0]
            if kind == "fill":
                rows[to].fill_(-1.5)
                expected[to] = -1.5
            elif kind == "add":
                rows[to].add_(from_rows[of])
                expected[to] += source[of].to(expected.dtype)
            else:
                rows[to].copy_(from_rows[of])
                expected[to] = source[of].to(expected.dtype)
        answers.append((sides, source, expected))
    found = played.tensors(*(sides[number][0] for sides, *_ in answers for number in (0, 1)))
    checks = [check for sides, *_ in answers for _, check, _ in sides if check is not None]
    if not all(check() for check in checks) or not bool((given[message.shape[2] :] == 3).all()):
        return float("inf")
    right = [tensor for _, source, expected in answers for tensor in (source, expected)]
    return max(error(a, b) for a, b in zip(found, right, strict=True))


def products(generator):
    """The largest error of row sums of products, as a share of the bound of a sum in any order; infinite where values
    beyond the rows were read."""
    pick = picker(generator)
    dtype = DTYPES[pick(0, 4)]
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    shape = (pick(1, 3), pick(1, 4), pick(0, 60), pick(1, 40) if pick(0, 2) else 16 * pick(1, 9))
    rows = []
    for _ in range(2):
        turned, tensor = not pick(0, 3), torch.randn(shape, generator=generator).to(dtype)
        if not pick(0, 3):  # as the gradient of a sum, or of a slice of tokens that lie before heads
            tensor = tensor[:, :, :1].expand(shape)
        elif pick(0, 2):
            tensor = guarded(tensor.mT if turned else tensor)[0]
            tensor = tensor.mT if turned else tensor
        elif pick(0, 2):
            tensor = tensor.transpose(1, 2).contiguous().transpose(1, 2)
        rows.append(tensor)
    if shape[2] and pick(0, 2):
        rows[0] = rows[0].clone()
        rows[0][:, :, 0, 0] = (torch.inf, torch.nan)[pick(0, 2)]
    found = fused.sum_products(*rows, wide)
    assert (found.shape, found.dtype) == ((*shape[:3], 1), wide)
    each = rows[0].double() * rows[1].double()
    right, size = each.sum(-1, keepdim=True), each.abs().sum(-1, keepdim=True)
    bound = torch.finfo(wide).eps * shape[3] * size
    if wide == torch.float64:  # both are sums of roundings
        bound = 2 * bound
    same = found.double() == right
    same |= ~right.isfinite() & (found.isnan() == right.isnan())
    errors = ((found.double() - right).abs() / bound).masked_fill(same, 0.0).nan_to_num(torch.inf, torch.inf)
    return float(errors.max()) if errors.numel() else 0.0


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
        names = ("merge_rows", "finish_rows", "move_rows", "sum_products")
        counted = {name: getattr(fused, name) for name in names}

        def count(name, counted=counted):
            def run(*args, **kwargs):
                nonlocal calls
                calls += 1
                return counted[name](*args, **kwargs)

            return run

        for name in names:
            setattr(fused, name, count(name))
        memory_for, walk.memory_for = walk.memory_for, by_tables
        is_fused, fused.is_fused = fused.is_fused, lambda _: True
        try:
            found = loopback.run_loopback(made, *inputs, kernel="reference", scale=0.3)
        finally:
            walk.memory_for, fused.is_fused = memory_for, is_fused
            for name, function in counted.items():
                setattr(fused, name, function)
        worst = max(worst, *(error(a, b) for a, b in zip(found, right, strict=True)))
    return worst, calls


def used(path):
    spec = importlib.util.spec_from_file_location(OURS, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[OURS] = module
    spec.loader.exec_module(module)


def results_of(path):
    generator = torch.Generator().manual_seed(0)
    if path is not None:
        used(path)
    cases = 40 if path is None else 14
    results = {"merge": max(merges(generator) for _ in range(cases))}
    results["moves"] = max(moves(generator) for _ in range(cases))
    results["products"] = max(products(generator) for _ in range(2 * cases))
    if path is None:
        results["runs"], results["calls"] = whole_runs(generator)
    return results


def main(*paths):
    torch.set_num_threads(1)
    if not paths:
        print(json.dumps(results_of(None)))
    for path in paths:  # each in a process of its own: mutants may write where they must not, which ends it
        if not (child := os.fork()):
            print(json.dumps(results_of(path)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps(dict.fromkeys(("merge", "moves", "products"), torch.inf)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
