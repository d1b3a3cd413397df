"""Measure how long a rank's BlockMask takes on one core, built from the mask's bands and never from its pairs.

    python -m benchmarks.block_masks         # exits with 1 when a bar is missed

The limit applies to the fastest of several runs of the slowest rank, because machines are shared. PyTorch's own
function, which evaluates every pair, is timed for a sequence that fits into memory.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from torch.nn.attention.flex_attention import create_block_mask

from benchmarks.layouts import best_ms
from benchmarks.workloads import document_lengths
from longspan import layouts, masks
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.masks.functions import MaskMod
from longspan.run import flex

SEQ_LEN, WORLD_SIZE, BAR_MS = 1 << 17, 8, 100.0
SHORT_LEN = 1 << 14


def cases(seq_len: int) -> dict[str, Mask]:
    return {
        "causal": masks.causal(seq_len),
        "documents & causal": masks.documents(document_lengths("longtail", seq_len)) & masks.causal(),
        "window of 4,096": masks.causal(seq_len) & masks.sliding_window(4095),
    }


def fresh(mask: Mask, layout: Layout, rank: int) -> object:
    """Build a BlockMask without cached results."""
    flex._build_block_mask.cache_clear()
    return flex.block_mask(mask, layout, rank)


def slowest_rank_ms(mask: Mask, layout: Layout) -> float:
    return max(best_ms(lambda rank=rank: fresh(mask, layout, rank), repeats=5) for rank in range(layout.world_size))


def written_out(seq_len: int) -> dict[str, MaskMod]:
    """Return the same masks as functions for PyTorch."""
    lengths = torch.as_tensor(document_lengths("longtail", seq_len))
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return {
        "causal": lambda _b, _h, q, kv: q >= kv,
        "documents & causal": lambda _b, _h, q, kv: (ids[q] == ids[kv]) & (q >= kv),
        "window of 4,096": lambda _b, _h, q, kv: (q >= kv) & (kv > q - 4096),
    }


def main() -> int:
    torch.set_num_threads(1)
    missed = 0
    print(f"{SEQ_LEN:,} tokens on {WORLD_SIZE} ranks, blocks of 128, milliseconds for the slowest rank")
    print(f"{'mask':20s} {'layout':10s} {'ms':>7s} {'bar':>5s} {'again':>7s}")
    for name, mask in cases(SEQ_LEN).items():
        for layout in (layouts.balanced(mask, world_size=WORLD_SIZE), layouts.striped(SEQ_LEN, WORLD_SIZE)):
            took = slowest_rank_ms(mask, layout)
            again = best_ms(lambda a=mask, b=layout: flex.block_mask(a, b, WORLD_SIZE - 1))
            missed += took > BAR_MS
            print(f"{name:20s} {layout.name:10s} {took:7.1f} {BAR_MS:5.0f} {again:7.3f}")
    print(f"\n{SHORT_LEN:,} tokens on 1 rank: all rows from bands, and with PyTorch's create_block_mask")
    print(f"{'mask':20s} {'bands':>8s} {'PyTorch':>8s}")
    mods = written_out(SHORT_LEN)
    for name, mask in cases(SHORT_LEN).items():
        ours = slowest_rank_ms(mask, layouts.contiguous(SHORT_LEN, 1))
        make = partial(create_block_mask, mods[name], None, None, SHORT_LEN, SHORT_LEN, device="cpu")
        print(f"{name:20s} {ours:8.1f} {best_ms(make, repeats=2):8.0f}")
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
