"""Mask and score functions as PyTorch's pages and tests spell them, against PyTorch's eager flex attention."""

import functools
import time

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import longspan as ls
from benchmarks.document_spelling import document_mods
from longspan import layouts, masks
from longspan.errors import MaskError
from longspan.run.flex import mask_of_block_mask
from longspan.scoring.biases import Extras
from longspan.testing import run_loopback
from tests.unit.test_flex import close

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile",
    "ignore:There is a performance drop",  # PyTorch's vmap of isin
    "ignore:torch.searchsorted",  # PyTorch's vmap passes values that are not contiguous
)
B, H, S, D = 2, 4, 60, 8
F64 = torch.float64
DRAW = torch.Generator().manual_seed(3)
IDS = torch.randint(0, 7, (B, S), generator=DRAW).sort(-1).values
ROW = IDS[0]
OFFSETS = torch.stack([torch.searchsorted(row, torch.arange(8)) for row in IDS])
STARTS = torch.tensor([0, 9, 25, 50])
ROW_STARTS = torch.tensor([[0, 9, 25, 50], [0, 3, 40, 59]])
LENGTHS, PREFIX, WIDTHS = torch.tensor([48, 21]), torch.tensor([5, 16]), torch.tensor([2, 5, 20, 60])
KEPT = torch.rand(B, S, generator=DRAW) > 0.3
DENSE = torch.rand(B, H, S, S, generator=DRAW) > 0.5


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def window(b, h, q_idx, kv_idx):
    return q_idx - kv_idx < 12


def prefix(b, h, q_idx, kv_idx):
    return kv_idx < 7


def documents(b, h, q_idx, kv_idx):
    return IDS[b][q_idx] == IDS[b][kv_idx]


def neighbourhood(b, h, q_idx, kv_idx, width=10, reach=2):
    (q_x, q_y), (kv_x, kv_y) = (q_idx // width, q_idx % width), (kv_idx // width, kv_idx % width)
    x, y = q_x.clamp(reach, 5 - reach), q_y.clamp(reach, width - 1 - reach)
    return ((x - kv_x).abs() <= reach) & ((y - kv_y).abs() <= reach)


def within_documents(inner):
    def mod(b, h, q_idx, kv_idx):
        same = ROW[q_idx] == ROW[kv_idx]
        return same & inner(b, h, q_idx - OFFSETS[0][ROW[q_idx]], kv_idx - OFFSETS[0][ROW[kv_idx]])

    return mod


def logical(b, h, q_idx, kv_idx):
    allowed = torch.tensor(True, device=q_idx.device)
    for mod in (causal, window):
        allowed = torch.logical_and(allowed, mod(b, h, q_idx, kv_idx))
    return allowed


def in_place(b, h, q_idx, kv_idx):
    allowed = q_idx >= kv_idx
    allowed &= q_idx - kv_idx < 12
    return allowed


class Documents:
    def __init__(self):
        self.ids = IDS

    def __call__(self, b, h, q_idx, kv_idx):
        return self.ids[b][q_idx] == self.ids[b][kv_idx]


ANY_ROW = {
    "and_masks": and_masks(causal, window),
    "or_masks": or_masks(window, prefix),
    "and_masks of or_masks": and_masks(causal, or_masks(window, prefix)),
    "or_masks of and_masks": or_masks(and_masks(causal, window), and_masks(prefix, lambda b, h, i, j: i < 30)),
    "and_masks of nothing": and_masks(),
    "and_masks in documents": within_documents(and_masks(causal, window)),
    "b.new_zeros": lambda b, h, i, j: b.new_zeros((), dtype=torch.bool) | (i >= j),
    "h.new_tensor": lambda b, h, i, j: i - j < h.new_tensor(12),
    "b.new_empty": lambda b, h, i, j: b.new_empty((), dtype=torch.bool).fill_(True) & (i >= j),
    "ones_like(b)": lambda b, h, i, j: torch.ones_like(b, dtype=torch.bool) & (i >= j),
    "full_like(h)": lambda b, h, i, j: torch.full_like(h, 12) >= i - j,
    "b.device": lambda b, h, i, j: i.to(b.device) >= torch.zeros(b.shape, device=b.device) + j,
    "to(b)": lambda b, h, i, j: i.int().to(b) >= j.type_as(b),
    "q_idx.new_full": lambda b, h, i, j: i.new_full((), 12) >= i - j,
    "q_idx.new_ones": lambda b, h, i, j: i.new_ones(i.shape, dtype=torch.bool) & (i >= j),
    "zeros_like(q_idx)": lambda b, h, i, j: torch.where(i >= j, torch.ones_like(i), torch.zeros_like(i)).bool(),
    "to(int32)": lambda b, h, i, j: i.to(torch.int32) >= j.int(),
    "float": lambda b, h, i, j: torch.sqrt((i - j).abs().float()) < 4,
    "clamp": neighbourhood,
    "partial": functools.partial(neighbourhood, reach=1),
    "bucketize": lambda b, h, i, j: torch.bucketize(i, STARTS, right=True) == torch.bucketize(j, STARTS, right=True),
    "searchsorted": lambda b, h, i, j: torch.searchsorted(STARTS, i) == torch.searchsorted(STARTS, j),
    "sum": lambda b, h, i, j: (i >= STARTS).sum() == (j >= STARTS).sum(),
    "argmax": lambda b, h, i, j: (i < STARTS).int().argmax() == (j < STARTS).int().argmax(),
    "any": lambda b, h, i, j: (j == STARTS).any() | (i == j),
    "isin": lambda b, h, i, j: torch.isin(j, STARTS) | (i == j),
    "stack": lambda b, h, i, j: torch.stack([i >= j, i - j < 40]).all(dim=0),
    "dot": lambda b, h, i, j: torch.dot(functional.one_hot(ROW)[i].float(), functional.one_hot(ROW)[j].float()) > 0,
    "table[i][j]": lambda b, h, i, j: DENSE[0, 0][i][j],
    "torch.tensor(True)": logical,
    "in place": in_place,
    "div": lambda b, h, i, j: torch.div(i, 16, rounding_mode="floor") == j // 16,
    "product": lambda b, h, i, j: (i >= j) * (i - j < 12),
    "bits": lambda b, h, i, j: ((i ^ j) & (i ^ j) - 1) == 0,
}
BY_ROW = {
    "ids[b][i]": documents,
    "ids[b, i]": lambda b, h, i, j: IDS[b, i] == IDS[b, j],
    "offsets[b, ids[b, i]]": lambda b, h, i, j: (
        (IDS[b][i] == IDS[b][j]) & (i - OFFSETS[b, IDS[b, i]] >= j - OFFSETS[b, IDS[b, j]])
    ),
    "offsets[b][ids[b][i]]": lambda b, h, i, j: (
        (IDS[b][i] == IDS[b][j]) & (i - OFFSETS[b][IDS[b][i]] >= j - OFFSETS[b][IDS[b][j]])
    ),
    "and_masks": and_masks(causal, documents),
    "class": Documents(),
    "prefix[b]": lambda b, h, i, j: (j < PREFIX[b]) | (i >= j),
    "where": lambda b, h, i, j: torch.where(i < LENGTHS[b], i >= j, torch.zeros_like(i, dtype=torch.bool)),
    "kept[b][j]": lambda b, h, i, j: KEPT[b][j] & (i >= j),
    "gather": lambda b, h, i, j: IDS[b].gather(0, i.long()) == IDS[b].gather(0, j.long()),
    "flat": lambda b, h, i, j: IDS.view(-1)[b * S + i] == IDS.view(-1)[b * S + j],
    "transposed": lambda b, h, i, j: IDS.T[i, b] == IDS.T[j, b],
    "searchsorted": lambda b, h, i, j: torch.searchsorted(ROW_STARTS[b], i) == torch.searchsorted(ROW_STARTS[b], j),
    "sum": lambda b, h, i, j: (i >= ROW_STARTS[b]).sum(-1) == (j >= ROW_STARTS[b]).sum(-1),
    "b == 0": lambda b, h, i, j: (i >= j) & ((b == 0) | (i - j < 12)),
}
BY_HEAD = {
    "widths[h]": lambda b, h, i, j: (i - j).abs() <= WIDTHS[h],
    "dense[b, h, i, j]": lambda b, h, i, j: DENSE[b, h, i, j],
    "dense[b][h][i][j]": lambda b, h, i, j: DENSE[b][h][i][j],
    "dense[b, h][i, j]": lambda b, h, i, j: DENSE[b, h][i, j],
}
MODS = {
    f"{kind} {name}": (mod, rows, heads)
    for kind, mods, rows, heads in (
        ("any row", ANY_ROW, None, None),
        ("by row", BY_ROW, B, None),
        ("by head", BY_HEAD, B, H),
    )
    for name, mod in mods.items()
}


@pytest.fixture(autouse=True)
def no_graph(monkeypatch):
    """PyTorch's eager flex attention traces functions with Dynamo before it calls them, which takes seconds each."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def random_tensors(count, seed=0):
    return torch.randn(count, B, H, S, D, dtype=F64, generator=torch.Generator().manual_seed(seed))


def over_two_ranks(mask, q, k, v, score_mod=None):
    plan = ls.plan(mask, layouts.zigzag(S, 2), batch=B, q_heads=H, kv_heads=H, head_dim=D, dtype="float64")
    return run_loopback(plan, q, k, v, q, extras=None if score_mod is None else Extras(score_mod=score_mod))[0]


@pytest.mark.parametrize(("mod", "rows", "heads"), MODS.values(), ids=MODS)
def test_mask_functions_equal_pytorch(mod, rows, heads):
    q, k, v = random_tensors(3)
    block_mask = create_block_mask(mod, rows, heads, S, S, device="cpu", BLOCK_SIZE=16)
    expected = flex_attention.flex_attention(
        q, k, v, block_mask=create_block_mask(mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    )
    close(ls.flex_attention(q, k, v, block_mask=block_mask), expected)
    close(ls.attention(q, k, v, masks.from_mask_mod(mod, S, rows=rows, heads=heads)), expected)
    close(over_two_ranks(mask_of_block_mask(block_mask, batch=B, heads=H), q, k, v), expected)


TABLE = torch.randn(B, S, dtype=F64, generator=DRAW)
RELATIVE = torch.randn(H, 2 * S, dtype=F64, generator=DRAW)
BIAS = torch.randn(B, H, S, S, dtype=F64, generator=DRAW)
VECTORS = torch.randn(B, S, 3, dtype=F64, generator=DRAW)
SLOPES = torch.rand(H, dtype=F64, generator=DRAW)
SCORES = {
    "table[b][j]": lambda s, b, h, i, j: s + TABLE[b][j],
    "table[b, j]": lambda s, b, h, i, j: s + TABLE[b, j],
    "table[h][i - j]": lambda s, b, h, i, j: s + RELATIVE[h][i - j + S],
    "clamped distance": lambda s, b, h, i, j: s + RELATIVE[h, torch.clamp(i - j, -8, 8) + S],
    "bias[b][h][i][j]": lambda s, b, h, i, j: s + BIAS[b][h][i][j],
    "bias[0, 0][i][j]": lambda s, b, h, i, j: s + BIAS[0, 0][i][j],
    "documents": lambda s, b, h, i, j: torch.where(IDS[b][i] == IDS[b][j], s, -1e4),
    "offsets": lambda s, b, h, i, j: s + 0.1 * (i - OFFSETS[b][IDS[b][i]]) - 0.1 * (j - OFFSETS[b, IDS[b, j]]),
    "vectors": lambda s, b, h, i, j: s + (VECTORS[b][i] * VECTORS[b][j]).sum(-1),
    "dot": lambda s, b, h, i, j: s + torch.dot(VECTORS[b, i], VECTORS[b, j]),
    "slopes[h]": lambda s, b, h, i, j: s + SLOPES[h] * (j - i),
    "to(s.dtype)": lambda s, b, h, i, j: s * (1 + (h + 1).to(s.dtype)) / (1 + b.type_as(s)),
    "new_full": lambda s, b, h, i, j: s + s.new_full((), 0.5) * b.new_ones((), dtype=s.dtype) * h,
    "buckets": lambda s, b, h, i, j: s + RELATIVE[h, torch.bucketize(i, STARTS)],
    "rows of buckets": lambda s, b, h, i, j: s + RELATIVE[h, torch.searchsorted(ROW_STARTS[b], j)],
    "sum of starts": lambda s, b, h, i, j: s + RELATIVE[h][(i >= ROW_STARTS[b]).sum()],
    "isin": lambda s, b, h, i, j: s + torch.isin(j, STARTS).to(s.dtype),
    "masked_fill": lambda s, b, h, i, j: s.masked_fill(IDS[b][j] == 3, -5.0),
    "soft cap": lambda s, b, h, i, j: 2 * torch.tanh(s / 2),
    "and_masks": lambda s, b, h, i, j: torch.where(and_masks(causal, window)(b, h, i, j), s, -1e4),
    "log distance": lambda s, b, h, i, j: s - torch.log2((i - j).abs() + 1) * SLOPES[h],
}


@pytest.mark.parametrize("name", SCORES)
def test_score_functions_equal_pytorch(name):
    q, k, v = random_tensors(3)
    score_mod = SCORES[name]
    expected = flex_attention.flex_attention(
        q, k, v, score_mod, create_block_mask(causal, None, None, S, S, device="cpu")
    )
    close(ls.flex_attention(q, k, v, score_mod, masks.causal()), expected)
    close(over_two_ranks(masks.causal(S), q, k, v, score_mod), expected)


CHAINED = {
    "table[b][j]": ((B, S), lambda t, s, b, h, i, j: s + t[b][j], lambda t, s, b, h, i, j: s + t[b, j]),
    "table[h][i - j]": (
        (H, 2 * S),
        lambda t, s, b, h, i, j: s + t[h][i - j + S],
        lambda t, s, b, h, i, j: s + t[h, i - j + S],
    ),
    "table[b][h][i][j]": (
        (B, H, S, S),
        lambda t, s, b, h, i, j: s + t[b][h][i][j],
        lambda t, s, b, h, i, j: s + t[b, h, i, j],
    ),
}


@pytest.mark.parametrize("name", CHAINED)
def test_gradients_of_chained_indices(name):
    shape, *functions = CHAINED[name]
    q, k, v, dout = random_tensors(4)
    results = []
    for function in functions:
        table = torch.randn(shape, dtype=F64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = ls.flex_attention(*leaves, functools.partial(function, table), masks.causal())
        results.append([out.detach(), *torch.autograd.grad(out, [*leaves, table], dout)])
    for chained, single in zip(*results, strict=True):
        close(chained, single)


USES = {
    "value": lambda b, i, j: (i >= j) & (b == 0),
    "arithmetic": lambda b, i, j: i + b >= j,
    "index": lambda b, i, j: IDS[b][i] == IDS[b][j],
    "lookup": lambda b, i, j: IDS[b, i] == 1,
    "keyword": lambda b, i, j: torch.add(i, other=b) >= j,
    "list": lambda b, i, j: torch.stack([b, b]).sum() >= j,
    "power": lambda b, i, j: 2**b >= j,
    "bits": lambda b, i, j: (b & 1) >= j,
    "item": lambda b, i, j: b.item() >= j,
    "copy": lambda b, i, j: b.clone() >= j,
    "fill value": lambda b, i, j: b.new_full((), b) >= j,
    "full_like": lambda b, i, j: torch.full_like(b, b) >= j,
    "inside and_masks": lambda b, i, j: and_masks(causal, documents)(b, b, i, j),
}


@pytest.mark.parametrize("name", USES)
def test_functions_that_use_the_value_of_b_or_h_are_refused(name):
    uses, position = USES[name], np.arange(S)
    for mod, letter, words in (
        (lambda b, h, i, j: uses(b, i, j), "b", ("rows=", "B=")),
        (lambda b, h, i, j: uses(h, i, j), "h", ("heads=", "H=")),
    ):
        with pytest.raises(MaskError, match=f"mask_mod uses {letter}.*{words[0]}.*{words[1]}"):
            masks.from_mask_mod(mod, S).allows(position[:, None], position[None])


def test_a_block_mask_of_one_row_is_refused_only_if_the_function_uses_b():
    q, k, v = random_tensors(3)
    refused = create_block_mask(and_masks(causal, documents), None, None, S, S, device="cpu", BLOCK_SIZE=16)
    with pytest.raises(MaskError, match=r"mask_mod uses b.*create_block_mask"):
        ls.flex_attention(q, k, v, block_mask=refused)
    with pytest.raises(MaskError, match=r"mask_mod uses b.*create_block_mask"):
        over_two_ranks(mask_of_block_mask(refused, batch=B, heads=H), q, k, v)
    one_row = [t[:1] for t in (q, k, v)]
    close(ls.flex_attention(*one_row, block_mask=refused), flex_attention.flex_attention(*one_row, block_mask=refused))


def processor_seconds(call, repeats=5):
    """The least processor time of a call after the first."""
    call()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def test_chained_indices_cost_no_more_than_one():
    """`ids[b]` once copied a row for every pair, which took 70 times as long at this size."""
    q = torch.randn(2, 4, 512, 16)
    chained, single = document_mods(0, 2, 512, 9)
    blocks = [create_block_mask(mod, 2, 1, 512, 512, device="cpu") for mod in (chained, single)]
    slow, fast = (processor_seconds(lambda b=b: ls.flex_attention(q, q, q, block_mask=b)) for b in blocks)
    assert slow < 4 * fast


@pytest.mark.parametrize("rows", [1, 2])
def test_chained_indices_of_score_functions_cost_little_more(rows):
    q, table = torch.randn(rows, 4, 256, 16), torch.randn(rows, 256)
    scores = lambda s, b, h, i, j: s + table[b][j], lambda s, b, h, i, j: s + table[b, j]
    slow, fast = (processor_seconds(lambda f=f: ls.flex_attention(q, q, q, f, masks.causal())) for f in scores)
    assert slow < 8 * fast
