"""Compare the processor time of convolutions and recurrences on two ranks with one device's algorithm.

    python -m benchmarks.mixers                 # all rows, with their bars
    python -m benchmarks.mixers --rounds 3 convolution

Forward and backward in float32, one thread a rank, Gloo on loopback. Processor time is summed over ranks: a ratio above
1 is the cost of sharding, without waiting. Runs come in pairs in the same processes, one device first and then the
ranks, alternating the order; medians of the pairs' ratios count. Fails if a row is above its limit.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

import longspan as ls
from benchmarks.ranks import Ranks
from longspan.layouts import Layout
from longspan.mixers.convolution import depthwise


@dataclass(frozen=True)
class Row:
    """A measurement: a function that one process runs alone, one that every rank runs, and the limit of their ratio."""

    name: str
    alone: Callable[[], float]
    spread: Callable[[], float]
    bar: float


def timed(run: Callable[[], Tensor], dout: Tensor) -> float:
    """Return this process's processor time for forward and backward, all threads included."""
    dist.barrier()
    before = time.process_time()
    run().backward(dout)
    return time.process_time() - before


TOKENS, CHANNELS, WIDTH = 16_384, 2_048, 4
LENGTHS = [1_000] * 16 + [384]


def conv_tensors(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, dout = torch.randn(1, tokens, CHANNELS), torch.randn(1, tokens, CHANNELS)
    weight, bias = torch.randn(CHANNELS, WIDTH), torch.randn(CHANNELS)
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), dout


def conv_alone(convolve: Callable[[Tensor, Tensor, Tensor], Tensor]) -> float:
    if dist.get_rank():
        dist.barrier()
        return 0.0
    x, weight, bias, dout = conv_tensors(TOKENS)
    return timed(lambda: functional.silu(convolve(x, weight, bias)), dout)


def by_conv1d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Convolve as models do: rows with zeros on both sides, then truncated."""
    out = functional.conv1d(x.mT, weight.unsqueeze(1), bias, padding=WIDTH - 1, groups=CHANNELS)
    return out[..., :TOKENS].mT


def by_the_same_kernel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the PyTorch convolution that Longspan calls, with zeros in front."""
    return depthwise(functional.pad(x, (0, 0, WIDTH - 1, 0)), weight, bias)


def by_documents(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Run the same for packed documents, one after the other."""
    return torch.cat([by_the_same_kernel(part, weight, bias) for part in x.split(LENGTHS, 1)], 1)


def conv1d_alone() -> float:
    return conv_alone(by_conv1d)


def same_alone() -> float:
    return conv_alone(by_the_same_kernel)


def packed_alone() -> float:
    return conv_alone(by_documents)


def conv_spread(layout: Callable[[int, int], Layout], documents: list[int] | None = None) -> float:
    built = layout(TOKENS, dist.get_world_size())
    plan = ls.conv_plan(documents, built, channels=CHANNELS, width=WIDTH, dtype="float32")
    x, weight, bias, dout = conv_tensors(built.num_slots(dist.get_rank()))
    group = dist.group.WORLD
    return timed(lambda: ls.causal_conv1d(x, weight, bias, plan=plan, group=group, activation="silu"), dout)


def conv_contiguous() -> float:
    return conv_spread(ls.layouts.contiguous)


def conv_zigzag() -> float:
    return conv_spread(ls.layouts.zigzag)


def conv_packed() -> float:
    return conv_spread(ls.layouts.zigzag, LENGTHS)


SCAN_TOKENS = 4_096
GDN = {"heads": 4, "keys": 128, "values": 128, "maps": "matrix"}
SSD = {"heads": 8, "keys": 128, "values": 64, "maps": "scalar"}


def gdn_call(tokens: int) -> tuple[Callable[..., Tensor], Tensor]:
    """Return the gated delta rule with 4 heads of 128 x 128, and a gradient of its output."""
    q, k, v = (torch.randn(1, tokens, 4, 128).requires_grad_() for _ in range(3))
    g, beta = (-torch.rand(1, tokens, 4)).requires_grad_(), torch.rand(1, tokens, 4).requires_grad_()
    call = partial(ls.gated_delta_rule, q, k, v, g, beta, l2norm=True, kernel="reference")
    return call, torch.randn(1, tokens, 4, 128)


def ssd_call(tokens: int) -> tuple[Callable[..., Tensor], Tensor]:
    """Return Mamba-2 with 8 heads of 128 x 64."""
    x, dt = torch.randn(1, tokens, 8, 64).requires_grad_(), torch.rand(1, tokens, 8).requires_grad_()
    b, c = (torch.randn(1, tokens, 1, 128).requires_grad_() for _ in range(2))
    a, d = (-torch.rand(8)).requires_grad_(), torch.randn(8).requires_grad_()
    return partial(ls.ssd, x, dt, a, b, c, D=d, dt_softplus=True, kernel="reference"), torch.randn(1, tokens, 8, 64)


def scan_alone(make: Callable[[int], tuple[Callable[..., Tensor], Tensor]]) -> float:
    if dist.get_rank():
        dist.barrier()
        return 0.0
    call, dout = make(SCAN_TOKENS)
    return timed(call, dout)


def scan_spread(
    make: Callable[[int], tuple[Callable[..., Tensor], Tensor]],
    layout: Callable[[int, int], Layout],
    sizes: dict[str, Any],
) -> float:
    built = layout(SCAN_TOKENS, dist.get_world_size())
    plan = ls.scan_plan(None, built, **sizes)
    call, dout = make(built.num_slots(dist.get_rank()))
    return timed(lambda: call(plan=plan, group=dist.group.WORLD), dout)


def gdn_alone() -> float:
    return scan_alone(gdn_call)


def gdn_contiguous() -> float:
    return scan_spread(gdn_call, ls.layouts.contiguous, GDN)


def gdn_zigzag() -> float:
    return scan_spread(gdn_call, ls.layouts.zigzag, GDN)


def ssd_alone() -> float:
    return scan_alone(ssd_call)


def ssd_contiguous() -> float:
    return scan_spread(ssd_call, ls.layouts.contiguous, SSD)


def ssd_zigzag() -> float:
    return scan_spread(ssd_call, ls.layouts.zigzag, SSD)


ROWS = (
    Row("convolution, contiguous, conv1d", conv1d_alone, conv_contiguous, 1.1),
    Row("convolution, contiguous, same kernel", same_alone, conv_contiguous, 1.1),
    Row("convolution, zigzag, same kernel", same_alone, conv_zigzag, 1.1),
    Row("convolution, 17 documents, same kernel", packed_alone, conv_packed, 1.1),
    Row("SSD, contiguous", ssd_alone, ssd_contiguous, 1.25),
    Row("SSD, zigzag", ssd_alone, ssd_zigzag, 1.25),
    Row("GDN, contiguous", gdn_alone, gdn_contiguous, 1.6),
    Row("GDN, zigzag", gdn_alone, gdn_zigzag, 1.6),
)


def measured(row: Row, ranks: Ranks, rounds: int) -> tuple[float, float, float]:
    """Return medians: seconds of one device, of all ranks together, and their ratio in a pair. The first pair is not
    counted, because plans, programs and connections are created there."""
    pairs: list[tuple[float, float]] = []
    for number in range(rounds + 1):
        order = ("alone", "spread") if number % 2 else ("spread", "alone")
        result = {way: sum(ranks.run(getattr(row, way))) for way in order}
        pairs.append((result["alone"], result["spread"]))
    alone, spread = zip(*pairs[1:], strict=True)
    ratios = [b / a for a, b in pairs[1:]]
    return statistics.median(alone), statistics.median(spread), statistics.median(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", help="measure rows whose name begins so; all by default")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    short = 0
    with Ranks(2) as ranks:
        for row in ROWS:
            if args.rows and not any(row.name.startswith(name) for name in args.rows):
                continue
            alone, spread, ratio = measured(row, ranks, args.rounds)
            short += ratio > row.bar
            verdict = "fine" if ratio <= row.bar else "TOO SLOW"
            print(
                f"{row.name:40s} one device {alone:6.3f} s   2 ranks {spread:6.3f} s   {ratio:.3f} times"
                f"  (bar {row.bar})  {verdict}",
                flush=True,
            )
    return min(short, 1)


if __name__ == "__main__":
    sys.exit(main())
