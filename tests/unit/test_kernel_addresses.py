"""GPU kernels by address: random layouts in memory full of NaN, and mistakes in layout that tensors do not show."""

import random
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import pad

import longspan
from longspan import layouts, masks
from longspan.kernels import cuda_flash, cuda_sdpa, panels
from longspan.kernels.cpu_flash import CpuFlash
from longspan.kernels.cuda_flash import Flash, Launch
from longspan.kernels.cuda_sdpa import Cudnn, Efficient
from longspan.testing import loopback
from longspan.testing.oracle import allowed
from longspan.tile import Tile
from tests.kernel_models import operators
from tests.kernel_models.cases import Case, check, close, dense, one_call, random_case, shrink_blocks
from tests.kernel_models.memory import GUARD, AddressError, Reads, read, written


def _package(name, version):
    """FA3 or FA4, by the model of flash attention with its rules."""
    ops = (partial(op, version=version) for op in (operators.flash, operators.flash_backward))
    return Flash(name.lower(), True, *ops, package=name)


KERNELS = {
    "varlen": Flash("varlen", True, operators.flash, operators.flash_backward),
    "flash": Flash("flash", False, operators.flash, operators.flash_backward),
    "fa3": _package("FA3", operators.FA3),
    "fa4": _package("FA4", operators.FA4),
    "cudnn_varlen": cuda_flash.cudnn_varlen(
        (operators.cudnn_packed, operators.cudnn_packed_backward), (operators.flash, operators.flash_backward)
    ),
    "efficient": Efficient(op=operators.efficient, backward_op=operators.efficient_backward),
    "cudnn": Cudnn(op=operators.cudnn, backward_op=operators.cudnn_backward),
}
HALF = (torch.bfloat16, torch.float16)
DTYPES = dict.fromkeys(KERNELS, HALF) | {"efficient": (*HALF, torch.float32)}
MLA = ((192, 128), (184, 120))
PARTS, PER_PART = 5, 32
assert len(KERNELS) * PARTS * PER_PART >= 500


@pytest.fixture(autouse=True)
def short_slices(monkeypatch):
    """Lets cuDNN take packed slices of any length and number."""
    monkeypatch.setattr(cuda_flash, "CUDNN_ROWS", 0)
    monkeypatch.setattr(cuda_flash, "CUDNN_GRAPHS", 1 << 20)
    monkeypatch.setattr(operators, "CUDNN_ROWS", 0)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def _in_order(x, order, start=GUARD):
    """The same numbers in a storage of NaN, dims in this order, beginning somewhere."""
    strides, step = [0] * x.dim(), 1
    for dim in reversed(order):
        strides[dim], step = step, step * x.shape[dim]
    found = torch.full((start + step + GUARD,), torch.nan, dtype=x.dtype).as_strided(x.shape, strides, start)
    return found.copy_(x)


def _part(x, before, after):
    """A slice of something larger, which is NaN."""
    return pad(x, [n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair], value=torch.nan)[
        tuple(slice(b, b + n) for b, n in zip(before, x.shape, strict=True))
    ]


def _fused(x):
    """One of three that a projection made, (B, S, 3, H, D)."""
    b, heads, rows, dim = x.shape
    whole = torch.full((b, rows, 3, heads, dim), torch.nan, dtype=x.dtype)
    whole[:, :, 1] = x.transpose(1, 2)
    return whole[:, :, 1].transpose(1, 2)


LAYOUTS = {
    "heads first": lambda x: _in_order(x, (0, 1, 2, 3)),
    "rows first": lambda x: _in_order(x, (0, 2, 1, 3)),
    "rows before batch": lambda x: _in_order(x, (2, 0, 1, 3)),
    "heads innermost": lambda x: _in_order(x, (0, 2, 3, 1)),
    "numbers outermost": lambda x: _in_order(x, (3, 0, 1, 2)),
    "odd start": lambda x: _in_order(x, (0, 1, 2, 3), GUARD + 3),
    "some rows": lambda x: _part(x, (0, 0, 5, 0), (0, 0, 2, 0)),
    "some heads": lambda x: _part(x, (0, 1, 0, 0), (0, 2, 0, 0)),
    "some numbers": lambda x: _part(x, (0, 0, 0, 3), (0, 0, 0, 2)),
    "some aligned numbers": lambda x: _part(x, (0, 0, 0, 8), (0, 0, 0, 8)),
    "fused": _fused,
    "one head for all": lambda x: x[:, :1].clone().expand_as(x),
    "one number for all": lambda x: x[..., :1].clone().expand_as(x),
}
LEFT = {
    "dense": lambda x: x,
    "rows first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "some rows": lambda x: _part(x, (0, 0, 3, 0)[: x.dim()], (0, 0, 4, 0)[: x.dim()]),
    "column of many": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
}


# ---- cases -----------------------------------------------------------------------------------------------------------


def _documents(rng):
    """Causal documents, some of one token: slices of one packed launch."""
    edges = sorted({0, 48, *(rng.randint(1, 47) for _ in range(rng.randint(1, 8)))})
    tiles = [Tile(a, b, a, b, lo=0) for a, b in pairwise(edges)]
    return Case(torch.float32, tiles, 48, 48)


def _single_rows(rng):
    """Rows alone against keys of different number, as in decoding."""
    tiles = [Tile(i, i + 1, 0, rng.randint(1, 40)) for i in range(rng.randint(1, 9))]
    return Case(torch.float32, tiles, 9, 40)


def _case(seed, name):
    """A case, and what a function answers, if the kernel takes one."""
    rng = random.Random(seed)
    kind = rng.choice(("bands", "bands", "documents", "single rows", "asks"))
    case = {"documents": _documents, "single rows": _single_rows}.get(kind, lambda rng: random_case(seed, 40))(rng)
    heads = rng.choice(((1, 1), (2, 2), (4, 2), (6, 2), (3, 1), (4, 4)))
    dims = rng.choice(((16, 16), (16, 16), (8, 8), (7, 7), (24, 8), (5, 11), (32, 32)))
    dims = rng.choice((*MLA, dims)) if name in ("fa3", "fa4") else dims
    case = replace(case, dtype=rng.choice(DTYPES[name]), heads=heads, dims=dims, batch=rng.choice((1, 1, 2)), seed=seed)
    answers = None
    if kind == "asks" and KERNELS[name].honours.mask_function:
        draw = np.random.default_rng(seed)
        answers = torch.from_numpy(draw.random((case.num_q, case.num_k)) < 0.4)
        answers[torch.from_numpy(draw.random(case.num_q) < 0.3)] = False  # rows that see nothing
        case = replace(case, tiles=[replace(tile, asks=True) for tile in case.tiles])
    return case, answers


def _checked(kernel, name, seed):
    rng = random.Random(seed + 1)
    case, answers = _case(seed, name)
    chosen = [rng.choice(tuple(LAYOUTS)) for _ in range(4)]
    left = rng.choice(tuple(LEFT))
    tensors = tuple(LAYOUTS[how](x) for how, x in zip(chosen, case.tensors(), strict=True))
    try:
        check(kernel, case, tensors, answers, LEFT[left])
    except AssertionError as error:
        raise AssertionError(f"{name}, seed {seed}, {case}, {chosen}, {left}: {error}") from error


@pytest.mark.share(4)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_read_and_write_what_is_theirs(name, part, monkeypatch):
    shrink_blocks(monkeypatch)
    for seed in range(1000 * part, 1000 * part + PER_PART):
        _checked(KERNELS[name], name, seed)


@pytest.mark.share(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["cpu_flash", *KERNELS])
def test_every_layout_of_every_operand(name, layout, monkeypatch):
    shrink_blocks(monkeypatch)
    kernel = {"cpu_flash": CpuFlash(), **KERNELS}[name]
    tiles = [Tile(2, 20, 1, 30, lo=-11, hi=4), Tile(20, 33, 0, 30), Tile(0, 1, 0, 30)]
    for dims in ((16, 16), (8, 24)):
        case = Case(torch.bfloat16, tiles, 33, 30, (4, 2), dims, 2)
        for operand in range(4):
            tensors = list(case.tensors())
            tensors[operand] = LAYOUTS[layout](tensors[operand])
            check(kernel, case, tuple(tensors))


# ---- mistakes in layout ----------------------------------------------------------------------------------------------


def _as_it_comes(patch):
    """What `efficient` did once: `out` is handed on as (B, H, Q, E)."""
    patch.setattr(cuda_sdpa, "_rows_first", lambda x: x)


def _rows_anywhere(patch):
    """What was done once: rows need only be contiguous."""

    def padded(x, width, _):
        return pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x if x.stride(-1) == 1 else x.contiguous()

    patch.setattr(cuda_flash, "pad_last_dim", padded)
    patch.setattr(panels, "pad_last_dim", padded)


def _lse_as_it_lies(patch):
    def lse(self, x, index):
        rows = self._pick_rows(x, 2, self.rows, index)
        return rows if len(self.tiles) == 1 else rows.transpose(0, 1).flatten(1)

    patch.setattr(Launch, "lse", lse)


def _narrow_bias(patch):
    additive = panels.additive
    patch.setattr(panels, "additive", lambda *args, **more: additive(*args, **more).contiguous())


def _lse_of_other_length(patch):
    patch.setattr(cuda_sdpa, "LSE_MULTIPLE", 8)


def _one_key(patch):
    patch.setattr(cuda_sdpa, "_with_hidden_key", lambda q, k, v, bias: (k, v, bias))


def _strides_as_they_are(patch):
    patch.setattr(torch.Tensor, "contiguous", lambda x: x)


def _any_starts(patch):
    """Causal slices that are no squares, whose diagonals cuDNN puts elsewhere."""
    patch.setattr(Launch, "is_square", True)


MISTAKES = {
    "efficient: out as it comes": ("efficient", _as_it_comes),
    "efficient: rows anywhere": ("efficient", _rows_anywhere),
    "efficient: narrow bias": ("efficient", _narrow_bias),
    "efficient: lse of other length": ("efficient", _lse_of_other_length),
    "varlen: rows anywhere": ("varlen", _rows_anywhere),
    "varlen: lse as it lies": ("varlen", _lse_as_it_lies),
    "flash: rows anywhere": ("flash", _rows_anywhere),
    "flash: lse as it lies": ("flash", _lse_as_it_lies),
    "fa3: rows anywhere": ("fa3", _rows_anywhere),
    "fa4: lse as it lies": ("fa4", _lse_as_it_lies),
    "cudnn: rows anywhere": ("cudnn", _rows_anywhere),
    "cudnn: one key": ("cudnn", _one_key),
    "cudnn_varlen: strides as they are": ("cudnn_varlen", _strides_as_they_are),
    "cudnn_varlen: any causal slices": ("cudnn_varlen", _any_starts),
    "cudnn_varlen: lse as it lies": ("cudnn_varlen", _lse_as_it_lies),
}


@pytest.mark.share(3)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_caught(mistake, monkeypatch):
    shrink_blocks(monkeypatch)
    name, make = MISTAKES[mistake]
    make(monkeypatch)
    caught = 0
    for seed in range(PER_PART):
        try:
            _checked(KERNELS[name], name, seed)
        except AssertionError:
            caught += 1
    assert caught


@pytest.mark.parametrize(
    ("name", "dims", "reach"),
    [
        ("fa3", (192, 128), (192, 128)),
        ("fa3", (190, 121), (192, 128)),
        ("fa3", (192, 64), (192, 192)),
        ("fa3", (64, 128), (128, 128)),
        ("fa4", (192, 128), (192, 128)),
        ("fa4", (136, 32), (192, 128)),
        ("fa4", (72, 8), (96, 96)),
        ("varlen", (192, 128), (192, 192)),
    ],
)
def test_values_are_padded_only_where_the_kernel_has_no_narrower_ones(name, dims, reach):
    seen = set()

    def note(op):
        def run(*args, **more):
            q, k, v = args[1:4] if len(args) > 10 else args[:3]
            seen.add((q.shape[-1], k.shape[-1], v.shape[-1]))
            return op(*args, **more)

        return run

    kernel = KERNELS[name]
    kernel = replace(kernel, op=note(kernel.op), backward_op=note(kernel.backward_op))
    check(kernel, Case(torch.bfloat16, [Tile(0, 20, 0, 20, lo=0), Tile(20, 25, 0, 30)], 25, 30, (4, 2), dims))
    assert seen == {(reach[0], reach[0], reach[1])}


def _noted(calls):
    """`cudnn_varlen` on models that note which of the two ran."""

    def note(name, op):
        def run(*args):
            calls.append(name)
            return op(*args)

        return run

    cudnn = (note("cudnn", op) for op in (operators.cudnn_packed, operators.cudnn_packed_backward))
    return cuda_flash.cudnn_varlen(
        tuple(cudnn), tuple(note("flash", op) for op in (operators.flash, operators.flash_backward))
    )


@pytest.mark.parametrize(
    ("tiles", "ran"),
    [
        ([Tile(0, 20, 0, 20, lo=0)], "cudnn"),
        ([Tile(0, 20, 0, 20, lo=0), Tile(20, 33, 17, 30, lo=0)], "cudnn"),
        ([Tile(0, 20, 0, 30), Tile(20, 33, 0, 11)], "cudnn"),
        ([Tile(0, 20, 0, 30, lo=-10)], "flash"),  # causal to the last key, and no square
        ([Tile(0, 30, 0, 20, lo=0)], "cudnn"),  # causal from the first key: a square, and rows that see all
        ([Tile(0, 21, 0, 20, lo=0)], "flash"),  # the same with one row more than keys: a window of flash attention
        ([Tile(0, 20, 0, 20, lo=0, hi=4)], "flash"),
        ([Tile(0, 20, 0, 20, hi=0)], "flash"),
    ],
)
def test_cudnn_gets_full_and_square_causal_slices_only(tiles, ran):
    calls = []
    check(_noted(calls), Case(torch.bfloat16, tiles, 33, 30, (4, 4), batch=2))
    assert set(calls) == {ran}


def test_cudnn_gets_neither_short_slices_nor_large_tensors_nor_ever_new_shapes(monkeypatch, caplog):
    calls, kernel = [], None

    def ran(rows, fresh=True):
        nonlocal kernel
        kernel = _noted(calls) if fresh else kernel
        calls.clear()
        check(kernel, Case(torch.bfloat16, [Tile(0, rows, 0, rows, lo=0)], rows, rows, (2, 2)))
        return calls

    monkeypatch.setattr(cuda_flash, "CUDNN_ROWS", 12)
    assert ran(12) == ["flash"] * 2
    assert ran(13) == ["cudnn"] * 2
    monkeypatch.setattr(cuda_flash, "CUDNN_NUMBERS", 20 * 2 * 16)
    assert ran(20) == ["flash"] * 2
    assert ran(19) == ["cudnn"] * 2
    monkeypatch.setattr(cuda_flash, "CUDNN_GRAPHS", 4)
    assert not caplog.records
    assert [ran(rows, rows == 13)[0] for rows in (13, 14, 15, 13, 14, 15)] == ["cudnn", "cudnn", "flash"] * 2
    assert len(caplog.records) == 2, "once for each of the two kernels"
    assert {record.getMessage().split(",")[0] for record in caplog.records} == {"cuDNN has graphs for 4 shapes"}


@pytest.mark.parametrize("wrong", ["dout", "out", "lse"])
def test_cudnn_takes_what_backward_is_given_for_dense(wrong):
    """Each of the three in another layout, handed to the operator itself, is a wrong gradient or a refusal."""
    place = {"dout": 0, "out": 4, "lse": 5}[wrong]

    def other(*args):
        args = list(args)
        args[place] = args[place].transpose(1, 2).contiguous().transpose(1, 2)
        return operators.cudnn_backward(*args)

    case = Case(torch.bfloat16, [Tile(0, 20, 0, 30)], 20, 30, (4, 2))
    with pytest.raises(AssertionError):
        check(replace(KERNELS["cudnn"], backward_op=other), case)


@pytest.mark.parametrize(
    ("dtype", "heads", "wrong"),
    [
        (torch.bfloat16, (8, 2), True),
        (torch.float16, (2, 2), True),
        (torch.bfloat16, (1, 1), False),
        (torch.float32, (8, 2), False),
    ],
)
def test_old_efficient_was_wrong_in_half_precision_with_several_heads(dtype, heads, wrong, monkeypatch):
    """float32 and single heads were right: delta is made by operators that look, or there is no other head between."""
    case = Case(dtype, [Tile(0, 64, 0, 64, lo=0)], 64, 64, heads, (32, 32))
    check(KERNELS["efficient"], case)
    _as_it_comes(monkeypatch)
    if not wrong:
        return check(KERNELS["efficient"], case)
    with pytest.raises(AddressError, match=r"out: .* numbers beyond the end"):
        check(KERNELS["efficient"], case)
    monkeypatch.setitem(operators.EFFICIENT, "out", operators.EFFICIENT["out in float32"])
    return check(KERNELS["efficient"], case)  # as a model by tensors would have it: nothing to see


# ---- the memory itself -----------------------------------------------------------------------------------------------


def test_memory_shows_what_is_read_elsewhere():
    x = torch.arange(24.0).reshape(1, 2, 3, 4)
    assert np.array_equal(read("x", x, Reads("tttd")), x.double().numpy())
    inner = _part(x, (0, 0, 0, 4), (0, 0, 0, 0))
    assert np.array_equal(read("x", inner, Reads("tttd")), x.double().numpy())
    assert np.isnan(read("x", inner, Reads("dddd"))).any(), "numbers between rows are not the tensor's"
    rows = x.transpose(1, 2)
    assert not np.array_equal(read("x", rows, Reads("dddd")), rows.double().numpy()), "other rows and heads"
    assert np.array_equal(read("x", rows, Reads("dddd", copied=True)), rows.double().numpy())
    with pytest.raises(AddressError, match=r"x: .* beyond the end"):
        read("x", x[:, :, :1].expand(1, 2, 99, 4), Reads("dddd"))
    with pytest.raises(AddressError, match="vectors of 16 bytes"):
        read("x", torch.zeros(25)[1:].view(1, 2, 3, 4), Reads("tttd"))
    with pytest.raises(AddressError, match="runs of 16 reach beyond"):
        read("x", torch.zeros(2, 3), Reads("td", vectors=False, run=16))
    read("x", torch.zeros(2, 16)[:, :3], Reads("td", vectors=False, run=16))


def test_results_are_written_once_and_whole():
    values = np.arange(24.0).reshape(1, 2, 3, 4)
    found = written("x", values, torch.float32, (0, 2, 1, 3))
    assert found.stride() == (24, 4, 8, 1)
    assert np.array_equal(found.numpy(), values)
    around = torch.as_strided(found, (GUARD,), (1,), 0), torch.as_strided(found, (GUARD,), (1,), GUARD + 24)
    assert all(part.isnan().all() for part in around)
    for strides in ((24, 4, 4, 1), (24, 12, 5, 1), (48, 24, 8, 2)):
        with pytest.raises((AddressError, IndexError)):
            written("x", values, torch.float32, strides=strides)


# ---- whole calls -----------------------------------------------------------------------------------------------------

PLANS = {
    "causal": lambda: masks.causal().resized(48),
    "documents": lambda: masks.documents([5, 17, 1, 25]) & masks.causal(),
    "window": lambda: masks.sliding_window(9).resized(48),
    "heads": lambda: masks.per_head(*[masks.sliding_window(n).resized(48) for n in (3, 48, 7, 20)]),
    "function": lambda: masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 5 != 1, 48, within=masks.causal()),
}
SCHEMES = ("exchange", "ring", "all_gather", "all_to_all", "hybrid(2,ring)")


@pytest.mark.share(5)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", KERNELS)
def test_whole_calls_by_address(name, scheme, monkeypatch):
    """What reaches operators from plans: rows of messages, merged outputs, outputs made up from delta."""
    shrink_blocks(monkeypatch)
    monkeypatch.setattr(loopback, "choose_kernel", lambda *_: name)
    monkeypatch.setattr(loopback, "kernel_named", KERNELS.__getitem__)
    for number, (kind, make) in enumerate(PLANS.items()):
        mask = make()
        if not mask.is_structured and not KERNELS[name].honours.mask_function:
            continue
        for layout, dims in ((layouts.zigzag(48, 4), (16, 16)), (layouts.contiguous(48, 2), (7, 8))):
            if scheme.startswith("hybrid") and layout.world_size < 4:
                continue
            plan = longspan.plan(
                mask, layout, q_heads=4, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype="bfloat16",
                scheme=scheme,
            )  # fmt: skip
            case = Case(torch.bfloat16, [], 48, 48, (4, 2), dims, seed=number)
            q, k, v, dout = case.tensors()
            seen = allowed(plan.mask, 1, 4, 48)
            out, lse, dq, dk, dv = loopback.run_loopback(plan, q, k, v, dout, scale=0.3)
            true_out, true_lse, *true = dense(q, k, v, seen, 0.3, dout)
            theirs = one_call(q, k, v, seen, 0.3, dout)
            assert torch.allclose(lse.double(), true_lse, atol=1e-4)
            for what, mine, exact, their in zip(
                ("out", "dq", "dk", "dv"), (out, dq, dk, dv), (true_out, *true), theirs, strict=True
            ):
                close(f"{what} of {kind} over {layout.name}", mine, exact, their, torch.bfloat16)
