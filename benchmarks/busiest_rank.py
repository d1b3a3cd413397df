"""Compute the bytes that the busiest rank receives in a training step of one attention layer, beside PyTorch's flex.

    python -m benchmarks.busiest_rank

1,048,576 tokens, causal, 32 query and 8 key/value heads of 128, bfloat16, forward and backward. Longspan: the scheme
that "auto" chooses for H100s (nodes of 8) over `layouts.balanced`; the most of any rank. PyTorch's flex context
parallelism does not depend on the mask or the balancer: each rank gathers all K and V once, and receives the gradients
of its own K and V from every other rank, both in the dtype of the tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import longspan as ls
from benchmarks.workloads import document_lengths
from longspan.masks import Mask

SEQ_LEN, Q_HEADS, KV_HEADS, HEAD_DIM, BYTES = 1 << 20, 32, 8, 128, 2
RANKS = (8, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """One workload on so many ranks: the chosen scheme, and the bytes of the busiest rank."""

    name: str
    ranks: int
    scheme: str
    longspan: int
    torch_flex: int

    @property
    def factor(self) -> float:
        return self.torch_flex / self.longspan

    def __str__(self) -> str:
        mine, theirs = (f"{count / 2**30:.2f} GiB" for count in (self.longspan, self.torch_flex))
        times = f"{self.factor:.3g}" if self.factor >= 10 else f"{self.factor:.1f}"
        return f"{self.name:25} {self.ranks:5}  {self.scheme:18} {mine:>9} {theirs:>13} {times:>6}x"


def workloads() -> dict[str, Mask]:
    """Return the masks by name."""
    causal = ls.masks.causal()
    packed = {name: document_lengths(name, SEQ_LEN) for name in ("longtail", "short")}
    return {
        **{
            f"{len(lengths)} documents, {name}": ls.masks.documents(lengths) & causal
            for name, lengths in packed.items()
        },
        "one document, window 4,096": ls.masks.sliding_window(4095, seq_len=SEQ_LEN),
        "one document": ls.masks.causal(SEQ_LEN),
    }


def torch_flex(ranks: int) -> int:
    """Return the bytes that each rank of PyTorch's flex context parallelism receives: K and V, then dK and dV."""
    return 2 * (2 * SEQ_LEN * KV_HEADS * HEAD_DIM * BYTES) * (ranks - 1) // ranks


def rows() -> Iterator[Row]:
    sizes = {"q_heads": Q_HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "dtype": "bfloat16", "machine": "h100"}
    for name, mask in workloads().items():
        for ranks in RANKS:
            plan = ls.plan(mask, ls.layouts.balanced(mask, world_size=ranks), **sizes)
            received = [plan.bytes_received(rank) + plan.bytes_received(rank, "backward") for rank in range(ranks)]
            yield Row(name, ranks, plan.scheme.name, max(received), torch_flex(ranks))


if __name__ == "__main__":
    print(f"{'workload':25} {'ranks':>5}  {'scheme':18} {'longspan':>9} {'PyTorch flex':>13} {'fewer':>7}")
    for row in rows():
        print(row)
