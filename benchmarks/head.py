"""Compare losses without logits with the plain head and cross-entropy: memory and processor time.

    python -m benchmarks.head                     # all, with their bars
    python -m benchmarks.head --part memory --width 128

Memory: 8,192 tokens x a vocabulary of 128,256, forward and backward, each in its own process: the peak resident memory
during the call, minus the memory before (inputs included) and minus gradients, that of the head in float32, as it is
summed. Limits: a twentieth of all logits in float32, and 1.2 of one slab. The plain head is measured with an eighth of
the tokens, since it takes three times the logits.

Time: processor time of one thread, forward and backward, alternating with the plain head, the median of the ratios,
1,024 tokens x a vocabulary of 128,256. Limit for the loss: 1.15. Log-probabilities compute logits a second time in
backward and have no limit.
"""

import argparse
import gc
import multiprocessing
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from longspan.formatting import bytes_text
from longspan.training import loss_without_logits as head
from longspan.training import token_logprobs, token_loss

TOKENS, WORDS, FEWER = 8192, 128_256, 8
LOGITS_BAR, SLAB_BAR, TIME_BAR = 1 / 20, 1.2, 1.15
DTYPES = ("float32", "bfloat16")


def inputs(tokens: int, width: int, dtype: str, *, words: int = WORDS) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states and a head that require gradients, and labels."""
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=draw).to(getattr(torch, dtype))
    weight = torch.randn(words, width, generator=draw).div_(width**0.5).to(hidden.dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, words, (tokens,), generator=draw)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    F.cross_entropy(F.linear(hidden, weight).float(), labels).backward()


def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    token_loss(hidden, labels, group=None, gradients="sum", head=weight).backward()


def logprobs(hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
    result = token_logprobs(hidden, labels, head=weight)
    (result.entropies.mean() - result.logprobs.mean()).backward()


CALLS = {"plain": plain, "loss": loss, "logprobs": logprobs}


# -- memory ------------------------------------------------------------------------------------------------------------


def resident() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * resource.getpagesize()


def most_resident() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def peak(what: str, tokens: int, width: int, dtype: str) -> int:
    """Return the bytes beyond inputs and gradients, in a fresh process."""
    torch.set_num_threads(1)
    CALLS[what](*inputs(4, width, dtype, words=64))  # libraries are loaded and have their own memory
    given = inputs(tokens, width, dtype)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = resident()
    CALLS[what](*given)
    hidden, weight, _ = given
    return most_resident() - before - hidden.numel() * hidden.itemsize - weight.numel() * 4


def apart(*args: Any) -> int:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(peak, args)


def memory(width: int) -> list[str]:
    """Return the number of missed limits."""
    logits, missed = TOKENS * WORDS * 4, []
    slab = head.rows_for(TOKENS, WORDS, 4) * WORDS * 4
    print(f"memory of {TOKENS:,} tokens x {WORDS:,} words, width {width}, beyond inputs and gradients")
    print(f"  logits of all tokens in float32: {bytes_text(logits)}; a slab: {bytes_text(slab)}")
    for dtype in DTYPES:
        fewer = apart("plain", TOKENS // FEWER, width, dtype)
        share = fewer / (logits / FEWER)
        print(f"  {dtype:9} plain     {share:6.3f} of logits (measured with {TOKENS // FEWER:,} tokens)")
        for what in ("loss", "logprobs"):
            taken = apart(what, TOKENS, width, dtype)
            print(f"  {dtype:9} {what:9} {taken / logits:6.3f} of logits, {taken / slab:.3f} of a slab")
            if taken > logits * LOGITS_BAR or taken > slab * SLAB_BAR:
                missed.append(f"memory of {what} in {dtype}: {bytes_text(taken)}")
    return missed


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(what: str, given: tuple[Tensor, Tensor, Tensor]) -> float:
    for x in given[:2]:
        x.grad = None
    gc.collect()
    began = time.process_time()
    CALLS[what](*given)
    return time.process_time() - began


def times(widths: list[int], rounds: int) -> list[str]:
    """Return the number of missed limits."""
    missed = []
    torch.set_num_threads(1)
    print(f"processor time of {TOKENS // FEWER:,} tokens x {WORDS:,} words, in that of the plain head; {rounds} rounds")
    for width in widths:
        for dtype in DTYPES:
            given = inputs(TOKENS // FEWER, width, dtype)
            seconds("loss", given)
            rows = [[seconds(what, given) for what in ("plain", "loss", "logprobs")] for _ in range(rounds)]
            ours, others = (statistics.median(row[i] / row[0] for row in rows) for i in (1, 2))
            took = statistics.median(row[0] for row in rows)
            print(f"  width {width:4} {dtype:9} plain {took:6.2f} s   loss {ours:.2f}   logprobs {others:.2f}")
            if ours > TIME_BAR:
                missed.append(f"time of loss, width {width}, {dtype}: {ours:.2f}")
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=("memory", "time", "all"), default="all")
    parser.add_argument("--width", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    missed = []
    if options.part != "time":
        missed += memory(options.width[0])
    if options.part != "memory":
        missed += times(options.width, options.rounds)
    for text in missed:
        print(f"MISSED: {text}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
