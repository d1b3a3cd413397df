"""Windows of flash attention as FA2's host code changes them: random tiles, the tiles of plans, and whole calls."""

import random

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.kernels import cuda_flash, kernel_named
from longspan.kernels.cuda_flash import Flash, fa2_parts, window_of
from longspan.run.passes import ForwardWalk
from longspan.run.walk import Job
from longspan.testing import loopback
from longspan.testing.oracle import dense_attention
from longspan.tile import Tile
from tests.kernel_models import operators
from tests.lanes import NIGHTLY

NUM_TILES = 200_000 if NIGHTLY else 20_000
TOKENS, WORLDS = (131_072, (8, 64)) if NIGHTLY else (16_384, (8,))
LARGEST_ERROR = 0.01


def columns(rows, cols, low, high):
    """First and last columns that each row sees, for lowest and highest values of column - row."""
    i = np.arange(rows)
    first = np.maximum(0, i + low) if low is not None else np.zeros(rows, dtype=np.int64)
    last = np.minimum(cols - 1, i + high) if high is not None else np.full(rows, cols - 1)
    return first, np.maximum(last, first - 1)


def is_wrong(tile, window, longest):
    """Whether FA2 computes other pairs than the tile's, in a launch of this window whose longest slice is `longest`."""
    left, right = operators.fa2_window(window, longest)
    shift = tile.cols - tile.rows
    low, high = None if left < 0 else shift - left, None if right < 0 else shift + right
    wanted = None if tile.hi is None else -tile.hi, None if tile.lo is None else -tile.lo
    pairs = zip(columns(tile.rows, tile.cols, low, high), columns(tile.rows, tile.cols, *wanted), strict=True)
    return not all(np.array_equal(*pair) for pair in pairs)


def allowed_pairs(tile):
    rows, cols = np.arange(tile.q0, tile.q1)[:, None], np.arange(tile.k0, tile.k1)
    distance = rows - tile.q0 - (cols - tile.k0)
    mask = np.ones(distance.shape, dtype=bool)
    mask &= True if tile.lo is None else distance >= tile.lo
    mask &= True if tile.hi is None else distance <= tile.hi
    i, j = np.nonzero(mask)
    return set(zip((i + tile.q0).tolist(), (j + tile.k0).tolist(), strict=True))


def test_parts_of_random_tiles_mean_the_same_to_fa2():
    rng, wrong_whole, wrong = random.Random(0), 0, 0
    for number in range(NUM_TILES):
        rows, cols = rng.randint(1, 40), rng.randint(1, 40)
        bounds = (rng.choice([None, rng.randint(-cols, rows)]) for _ in range(2))
        tile = Tile(3, 3 + rows, 5, 5 + cols, *bounds).tight()
        if tile is None:
            continue
        wrong_whole += is_wrong(tile, window_of(tile), (tile.rows, tile.cols))
        parts = fa2_parts(tile)
        for part in parts:  # beside longer slices of the same window
            wrong += is_wrong(part, window_of(part), (part.rows + rng.randint(0, 5), part.cols + rng.choice([0, 5])))
        if number % 40 == 0:
            found = [allowed_pairs(part) for part in parts]
            assert set().union(*found) == allowed_pairs(tile)
            assert sum(map(len, found)) == len(allowed_pairs(tile)), "a pair twice"
    assert wrong_whole > NUM_TILES // 20, "FA2 has no trouble with these tiles: the test shows nothing"
    assert wrong == 0


def lengths(total):
    """Lengths of random documents, most of them short."""
    drawn = np.clip(np.random.default_rng(0).lognormal(np.log(total / 64), 1.3, total), 32, total // 2).astype(int)
    ends = np.append(np.cumsum(drawn)[: np.searchsorted(np.cumsum(drawn), total)], total)
    return np.diff(ends, prepend=0).tolist()


WIDE, NARROW = TOKENS // 32, TOKENS // 256
MASKS = {
    "window": lambda: ls.masks.sliding_window(WIDE - 1, seq_len=TOKENS),
    "documents and window": lambda: ls.masks.documents(lengths(TOKENS)) & ls.masks.sliding_window(WIDE - 1),
    "documents and narrow window": lambda: ls.masks.documents(lengths(TOKENS)) & ls.masks.sliding_window(NARROW - 1),
    "window both ways": lambda: ls.masks.documents(lengths(TOKENS)) & ls.masks.sliding_window(NARROW, NARROW),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("kind", MASKS)
def test_fa2_computes_the_tiles_of_plans(kind, world_size, monkeypatch):
    made, launches = [], cuda_flash.launches
    monkeypatch.setattr(cuda_flash, "launches", lambda *args: made.extend(found := launches(*args)) or found)
    mask = MASKS[kind]()
    for layout in (
        ls.layouts.balanced(mask, world_size=world_size),
        ls.layouts.zigzag(TOKENS, world_size),
        ls.layouts.contiguous(TOKENS, world_size),
    ):
        for scheme in ("exchange", "ring"):
            plan = ls.plan(mask, layout, q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", scheme=scheme)
            for rank in range(0, world_size, world_size // 8):
                ForwardWalk(Job(plan, rank, kernel_named("varlen"), 1.0, torch.bfloat16), saves=False).program()
    tiles = [(tile, launch) for launch in made for tile in launch.tiles]
    assert len(tiles) > 100
    assert not [tile for tile, launch in tiles if is_wrong(tile, launch.window, launch.longest)]


@pytest.mark.parametrize("scheme", ["exchange", "ring"])
@pytest.mark.parametrize(("world_size", "width"), [(8, 128), (4, 256)])
def test_a_causal_window_over_ranks_is_right_on_fa2(world_size, width, scheme, monkeypatch):
    tokens = 4096 if NIGHTLY else 1024
    kernel = Flash("varlen", True, operators.flash, operators.flash_backward)
    monkeypatch.setattr(loopback, "choose_kernel", lambda *_: "varlen")
    monkeypatch.setattr(loopback, "kernel_named", lambda _: kernel)
    mask = ls.masks.causal(tokens) & ls.masks.sliding_window(width - 1)
    layout = ls.layouts.balanced(mask, world_size=world_size)
    plan = ls.plan(mask, layout, q_heads=2, kv_heads=1, head_dim=16, dtype="bfloat16", scheme=scheme)
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, tokens, 16).bfloat16() for heads in (2, 1, 1, 2))
    found = loopback.run_loopback(plan, q, k, v, dout)
    inputs = [x.double().requires_grad_() for x in (q, k, v)]
    true, true_lse = dense_attention(inputs[0], *(x.repeat_interleave(2, 1) for x in inputs[1:]), mask, 0.25)
    grads = torch.autograd.grad(true, inputs, dout.double())
    for name, x, exact in zip(("out", "lse", "dq", "dk", "dv"), found, (true, true_lse, *grads), strict=False):
        size = 1.0 if name in ("out", "lse") else exact.abs().max().item()
        assert (x.double() - exact).abs().max() < LARGEST_ERROR * size, name
