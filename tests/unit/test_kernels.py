"""Kernels against a dense float64 oracle; GPU calls by fake tensors, and by models that read by address."""

import ast
import math
import random
import re
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from longspan.errors import KernelError
from longspan.kernels import choose_kernel, kernel_named, reference
from longspan.kernels import cpu_flash as sdpa
from longspan.kernels import panels as pieces
from longspan.kernels.contract import TileWork, Upstream
from longspan.kernels.cpu_flash import CpuFlash
from longspan.kernels.cuda_flash import Flash, launches
from longspan.kernels.cuda_sdpa import Cudnn, Efficient
from longspan.kernels.reference import Reference
from longspan.tile import Tile
from tests.kernel_models.cases import FLOOR, WIDE, Case, allowed, by_tile, check, cut, dense, random_case, shrink_blocks
from tests.kernel_models.operators import (
    cudnn,
    cudnn_backward,
    efficient,
    efficient_backward,
    flash,
    flash_backward,
    window_mask,
)

INF = math.inf

KERNELS = {
    "reference": Reference(),
    "cpu_flash": CpuFlash(),
    "efficient": Efficient(op=efficient, backward_op=efficient_backward),
    "cudnn": Cudnn(op=cudnn, backward_op=cudnn_backward),
    "varlen": Flash("varlen", True, flash, flash_backward),
    "flash": Flash("flash", False, flash, flash_backward),
}
ON_GPU = tuple(KERNELS)[2:]  # no float64 there


@pytest.fixture
def small_blocks(monkeypatch):
    shrink_blocks(monkeypatch)


@pytest.mark.share(3)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("part", range(4))
def test_random_tiles_are_exact(name, part, small_blocks):
    for seed in range(100 * part, 100 * part + 40):
        case = random_case(seed, dtypes=tuple(FLOOR)[name in ON_GPU :])
        try:
            check(KERNELS[name], case)
        except AssertionError as error:
            raise AssertionError(f"{name}, seed {seed}, {case}: {error}") from error


LARGE = [
    ("causal", Tile(0, 1100, 0, 1100, lo=0)),
    ("offset", Tile(3, 903, 5, 1700, lo=-795)),
    ("short offset", Tile(0, 100, 0, 700, lo=-600)),
    ("narrow window", Tile(0, 1300, 0, 1300, lo=0, hi=200)),
    ("wide window", Tile(0, 2500, 0, 2500, lo=0, hi=2100)),
    ("far side", Tile(0, 1200, 0, 700, lo=None, hi=-100)),
    ("dead rows", Tile(0, 1000, 0, 600, lo=300, hi=350)),
]


@pytest.mark.share(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tile", [tile for _, tile in LARGE], ids=[name for name, _ in LARGE])
@pytest.mark.parametrize("name", ["reference", "cpu_flash"])
def test_real_block_sizes(name, tile, dtype):
    check(KERNELS[name], Case(dtype, [tile], tile.q1, tile.k1, (1, 1), (8, 8)))


@pytest.mark.parametrize("name", KERNELS)
def test_logits_of_ten_thousand(name, small_blocks):
    for seed, dtype in product(range(6), (torch.float64, torch.float32, torch.bfloat16)[name in ON_GPU :]):
        tiles = [tile.tight() for tile in cut(random.Random(seed), 40, 50, 3, 30)]
        case = Case(dtype, tiles, 40, 50, seed=seed, gain=2500.0)
        q, k, v, dout = case.tensors()
        found = list(by_tile(KERNELS[name], TileWork(q, k, v, tiles, 1.0)))
        mask = torch.stack([allowed(t, 40, 50) for t in tiles]).any(0)
        out, lse, *_ = dense(q, k, v, mask, 1.0, dout)
        assert all(part.isfinite().all() and not part_lse.isnan().any() for _, part, part_lse in found)
        wide = WIDE.get(dtype, torch.float32)
        upstream = Upstream(dout, out.to(dtype), lse.to(wide), (dout.double() * out).sum(-1).to(wide))
        for tile, *grads in by_tile(KERNELS[name], TileWork(q, k, v, tiles, 1.0), upstream):
            assert all(x.isfinite().all() for x in grads), (name, seed, dtype, tile)


@pytest.mark.parametrize("name", KERNELS)
def test_rows_without_a_key_anywhere_add_exact_zeros(name, small_blocks):
    case = Case(torch.float32, [Tile(0, 12, 0, 12, lo=0), Tile(0, 12, 12, 20)], 12, 20)
    q, k, v, dout = case.tensors()
    mask = torch.stack([allowed(t, 12, 20) for t in case.tiles]).any(0)
    out, lse, *_ = (x.float() for x in dense(q, k, v, mask, 0.25, dout))
    lse[:, :, 3] = -INF  # as the runner would say of a row that saw nothing, here one that this tile could see
    delta = (dout * out).sum(-1)
    work = TileWork(q, k, v, case.tiles, 0.25)
    with_it = list(by_tile(KERNELS[name], work, Upstream(dout, out, lse, delta)))
    silent = dout.clone()
    silent[:, :, 3] = 0
    lse[:, :, 3] = 1e30
    without = list(by_tile(KERNELS[name], work, Upstream(silent, out, lse, (silent * out).sum(-1))))
    for (_, dq, dk, dv), (_, _, dk0, dv0) in zip(with_it, without, strict=True):
        assert not dq[:, :, 3].any()
        assert dq.isfinite().all()
        torch.testing.assert_close(dk, dk0)
        torch.testing.assert_close(dv, dv0)


@pytest.mark.parametrize("name", KERNELS)
def test_strided_views(name, small_blocks):
    case = Case(torch.float32, [Tile(2, 20, 1, 30, lo=-11, hi=4), Tile(20, 33, 0, 30)], 33, 30, (4, 2), (16, 16), 2)
    q, k, v, dout = case.tensors()
    rows_first = tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v, dout))
    part = tuple(pad(x, (0, 0, 3, 5))[:, :, 3:-5] for x in (q, k, v, dout))
    last = tuple(x.mT.contiguous().mT for x in (q, k, v, dout))  # the operators read this wrongly, without a word
    spread = (q, k, v, dout[:, :, :, :1].expand_as(dout))  # what the gradient of a sum looks like
    for tensors in (rows_first, part, last, spread):
        check(KERNELS[name], case, tensors)


def test_split_is_exact_and_its_biases_small():
    rng = random.Random(0)
    for _ in range(60):
        num_q, num_k = rng.choice(((700, 300), (2100, 2100), (1500, 2600), (2600, 1200), (1, 900), (900, 1)))
        lo, hi = sorted((rng.randint(-num_k + 1, num_q - 1), rng.randint(-num_k + 1, num_q - 1)))
        tile = Tile(0, num_q, 0, num_k, rng.choice((lo, None, 0 if hi >= 0 else lo)), rng.choice((hi, None)))
        count = torch.zeros(num_q, num_k, dtype=torch.int8)
        for piece in pieces.split(tile):
            i, j = torch.arange(piece.rows)[:, None], torch.arange(piece.cols)
            mask = torch.ones(piece.rows, piece.cols, dtype=torch.bool)
            mask &= i - j >= (-INF if piece.lo is None else piece.lo)
            mask &= i - j <= (INF if piece.hi is None else piece.hi)
            assert mask.any(0).all()
            assert mask.any(1).all()
            if piece.hi is not None or piece.lo not in (None, 0):
                assert mask.numel() <= 1 << 20
                bias = pieces.additive(piece.rows, piece.cols, piece.lo, piece.hi, torch.zeros(1))
                assert torch.equal(bias == 0, mask)
                assert torch.equal(bias == -INF, ~mask)
            count[piece.q0 : piece.q1, piece.k0 : piece.k1] += mask
        assert torch.equal(count.bool(), allowed(tile, num_q, num_k))
        assert count.max() <= 1


def test_launches_put_documents_together():
    ends = [0, 5, 12, 13, 40]
    documents = [Tile(a, b, a, b, lo=0).tight() for a, b in pairwise(ends)]
    launch, single = launches(documents, 40, 40)
    assert single.tiles == documents[2:3], "one row under its own key is not causal but full"
    assert launch.tiles == [documents[i] for i in (0, 1, 3)]
    documents[2] = Tile(12, 14, 12, 14, lo=0)
    documents[3] = Tile(14, 40, 14, 40, lo=0)
    ends[3] = 14
    (launch,) = launches(documents, 40, 40)
    x = torch.randn(1, 2, 40, 8)
    assert launch.queries(x).data_ptr() == x.data_ptr(), "neighbours are not copied"
    assert launch.starts(x)[0].tolist() == ends
    shared = [Tile(i, i + 1, 0, 40) for i in range(40)]  # every row against all keys: packing them all is 40 copies
    assert len(launches(shared, 40, 40)) == 40
    assert [launch.window for launch in launches([*documents, Tile(0, 9, 0, 5)], 99, 99)] == [(-1, 0), (-1, -1)]


# ---- mutants: each must be caught ------------------------------------------------------------------------------------


def _bottom_right(q, k, v, bias, causal, scale):
    if causal:
        bias = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
        bias = bias.masked_fill(~torch.from_numpy(window_mask(*bias.shape, (-1, 0))), -INF)
    return FORTH(q, k, v, bias, False, scale)


def _mean(out, lse, part, part_lse):
    out.add_(part).mul_(0.5)
    lse.copy_(torch.logaddexp(lse, part_lse))


class Dead(CpuFlash):
    def forward(self, *args):
        return ((out, lse.masked_fill(lse == -INF, 0.0)) for out, lse in super().forward(*args))


class LocalLse(CpuFlash):
    def backward(self, work, upstream):
        for tile in work.tiles:
            alone = replace(work, tiles=[tile])
            ((_, local),) = self.forward(alone)
            lse = upstream.lse_BHQ.clone()
            lse[:, :, tile.q0 : tile.q1] = local
            upstream = replace(upstream, lse_BHQ=lse)
            yield from super().backward(alone, upstream)


def _wrapped(op, change):
    return lambda *args: change(op(*args), args)


FORTH, BACK = sdpa.forward_op, sdpa.backward_op
CPU, VARLEN = KERNELS["cpu_flash"], KERNELS["varlen"]
MUTANTS = {
    "forward scale": replace(CPU, op=lambda *a: FORTH(*a[:-1], a[-1] * 1.02)),
    "backward scale": replace(CPU, backward_op=lambda *a: BACK(*a[:-1], a[-1] * 1.02)),
    "dead rows at 0.0": Dead(),
    "lse of the tile": LocalLse(),
    "dv of other keys": replace(CPU, backward_op=_wrapped(BACK, lambda g, _: (g[0], g[1], g[2].roll(1, 2)))),
    "dk and dv swapped": replace(CPU, backward_op=_wrapped(BACK, lambda g, _: (g[0], g[2], g[1]))),
    "no bias in backward": replace(CPU, backward_op=lambda *a: BACK(*a[:6], None, *a[7:])),
    "bottom-right causal": replace(CPU, op=_bottom_right),
    "base-2 lse": replace(CPU, op=_wrapped(FORTH, lambda r, _: (r[0], r[1] / math.log(2)))),
    "out of other heads": replace(CPU, op=_wrapped(FORTH, lambda r, _: (r[0].flip(1), r[1]))),
    "window one short": replace(VARLEN, op=lambda *a: flash(*a[:6], (a[6][0] - (a[6][0] > 0), a[6][1]), a[7])),
    "top-left varlen": replace(VARLEN, op=lambda *a: flash(*a[:6], (-1, -1), a[7])),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant, small_blocks):
    kernel, caught = MUTANTS[mutant], 0
    for seed in range(30):
        case = replace(random_case(seed), dtype=torch.float32, heads=(4, 2), dims=(16, 16))
        try:
            check(kernel, case)
            if kernel.honours.mask_function:  # rows of a tile that see nothing are those that a function leaves so
                asking = Case(torch.float32, [Tile(0, 12, 0, 20, asks=True)], 12, 20)
                check(kernel, asking, answers=torch.rand(12, 20, generator=torch.Generator().manual_seed(seed)) < 0.1)
        except AssertionError:
            caught += 1
    assert caught, f"no case noticed: {mutant}"


def test_mutant_merge_is_caught(small_blocks, monkeypatch):
    monkeypatch.setattr(pieces, "merge", _mean)
    case = Case(torch.float32, [Tile(0, 30, 0, 40, lo=-10)], 30, 40)
    with pytest.raises(AssertionError, match="out"):
        check(CPU, case)


# ---- calls on a GPU, by fake tensors ---------------------------------------------------------------------------------


class Called(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


GPU = [
    ("varlen", "_flash_attention", torch.bfloat16),
    ("flash", "_flash_attention", torch.float16),
    ("efficient", "_scaled_dot_product_efficient_attention", torch.float32),
    ("efficient", "_scaled_dot_product_efficient_attention", torch.bfloat16),
    ("cudnn", "_scaled_dot_product_cudnn_attention", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "operator", "dtype"), GPU)
def test_gpu_calls_have_the_right_form(name, operator, dtype, monkeypatch):
    # The Python bindings of these two ask for a CUDA build, the operators do not.
    monkeypatch.setattr(torch.Tensor, "copy_", lambda x, y: torch.ops.aten.copy_(x, y))
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda x: torch.ops.aten.contiguous(x))
    tiles = [
        Tile(0, 40, 0, 40, lo=0),
        Tile(40, 100, 40, 100, lo=0),
        Tile(0, 100, 3, 90, lo=-5, hi=9),
        Tile(7, 8, 0, 100),
    ]
    tiles = [tile.tight() for tile in tiles]
    with FakeTensorMode(), Called() as called:
        new = lambda *shape, dtype=dtype: torch.empty(*shape, dtype=dtype, device="cuda")  # noqa: E731
        q, k, v, dout = new(2, 6, 100, 20), new(2, 2, 100, 20), new(2, 2, 100, 12), new(2, 6, 100, 12)
        kernel = kernel_named(choose_kernel(name, q, k, v))
        assert kernel.name == name
        lse = new(2, 6, 100, dtype=torch.float32)
        for tile, out, part_lse in by_tile(kernel, TileWork(q, k, v, tiles, 0.1)):
            assert out.shape == (2, 6, tile.rows, 12)
            assert part_lse.shape == out.shape[:3]
            assert part_lse.dtype == torch.float32
            assert out.device.type == part_lse.device.type == "cuda"
            assert out.dtype in (dtype, torch.float32)
        for tile, dq, dk, dv in by_tile(kernel, TileWork(q, k, v, tiles, 0.1), Upstream(dout, dout, lse, lse)):
            assert dq.shape == (2, 6, tile.rows, 20)
            assert dk.shape == (2, 2, tile.cols, 20)
            assert dv.shape == (2, 2, tile.cols, 12)
            assert dq.device.type == "cuda"
    forward = f"{operator}_forward" if operator == "_flash_attention" else operator
    assert {forward, f"{operator}_backward"} <= called.names


def test_auto_on_a_gpu():
    with FakeTensorMode():
        new = lambda dim, dtype: (torch.empty(1, 2, 8, dim, dtype=dtype, device="cuda"),) * 3  # noqa: E731
        assert choose_kernel("auto", *new(64, torch.bfloat16)) == "varlen"
        assert choose_kernel("sdpa", *new(512, torch.bfloat16)) == "efficient"
        assert choose_kernel("auto", *new(64, torch.float32)) == "efficient"
        assert choose_kernel("auto", *new(64, torch.float64)) == "reference"
        with pytest.raises(KernelError, match=r"'sdpa' .*varlen: it takes bfloat16.*efficient: .*Use 'reference'"):
            choose_kernel("sdpa", *new(64, torch.float64))
        with pytest.raises(KernelError, match="head dims up to 256, and one here is 300"):
            choose_kernel("flash", *new(300, torch.bfloat16))


# ---- the registry ----------------------------------------------------------------------------------------------------


def test_names_are_obeyed_or_refused():
    cpu = (torch.zeros(1, 2, 8, 16),) * 3
    assert choose_kernel("auto", *cpu) == choose_kernel("sdpa", *cpu) == "cpu_flash"
    assert choose_kernel("reference", *cpu) == "reference"
    with pytest.raises(KernelError, match=r"kernel must be one of .*, but got 'fast'"):
        choose_kernel("fast", *cpu)
    for name in ("varlen", "flash", "efficient", "cudnn"):
        with pytest.raises(
            KernelError, match=r"runs on GPUs, and the tensors are on cpu\. Use 'cpu_flash' or 'reference'"
        ):
            choose_kernel(name, *cpu)
    with pytest.raises(KernelError, match=r"takes float64.*float8"):
        choose_kernel("cpu_flash", *(x.to(torch.float8_e4m3fn) for x in cpu))


def test_no_kernel_imports_another():
    folder = Path(reference.__file__).parent
    shared = {"longspan.kernels.contract", "longspan.kernels.panels"}
    for path in folder.glob("*.py"):
        if path.name in ("__init__.py",):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("longspan.kernels"):
                assert node.module in shared, f"{path.name}:{node.lineno} imports {node.module}"


def test_private_names_are_in_one_file():
    folder = Path(reference.__file__).parents[1]
    for path in folder.rglob("*.py"):
        calls = re.search(r"torch\.ops\.aten\.(?!\{)", path.read_text())  # a message may name one
        assert path.name == "_torch.py" or calls is None, path
