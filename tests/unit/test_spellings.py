"""Mask and score functions as PyTorch's pages and tests spell them, against PyTorch's eager flex attention."""

import time

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from benchmarks.document_spelling import document_mods
from longspan import masks


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
