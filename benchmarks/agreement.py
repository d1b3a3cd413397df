"""Measure the agreement of a repeated call: building its record and looking it up.

    python -m benchmarks.agreement

Fails above 50 microseconds, for any number of documents and for a mask function.
"""

import statistics
import sys
import time

import torch

import longspan as ls
from longspan.kernels import kernel_named
from longspan.masks import Mask
from longspan.run.ops import create_record
from longspan.run.walk import Job

BAR, ROUNDS, TOKENS = 50e-6, 2000, 65536


def job_of(mask: Mask) -> Job:
    """Return a rank's job under a plan for two ranks."""
    layout = ls.layouts.zigzag(TOKENS, 2)
    plan = ls.plan(mask, layout, q_heads=8, kv_heads=8, head_dim=64, dtype="float32", scheme="exchange")
    return Job(plan, 0, kernel_named("reference"), 0.125, torch.float32)


def seconds(job: Job) -> float:
    """Return the median time of one repeated call."""
    agreed, times = {create_record(job, torch.device("cpu"), True, "").digest}, []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        known = create_record(job, torch.device("cpu"), True, "").digest in agreed
        times.append(time.perf_counter() - begin)
        assert known
    return statistics.median(times)


def masks() -> dict[str, Mask]:
    """Return the measured masks; the function counts its calls."""
    ids = torch.arange(TOKENS) // 1000
    documents = {
        f"{n:,} documents": [TOKENS // n] * (n - 1) + [TOKENS - TOKENS // n * (n - 1)] for n in (100, 1000, 10000)
    }
    result = {name: ls.masks.documents(lengths) & ls.masks.causal() for name, lengths in documents.items()}
    function = ls.masks.from_mask_mod(lambda b, h, q, kv: ids[q] == ids[kv], TOKENS, within=ls.masks.causal())
    return {**result, "a function at 64k": function}


def main() -> int:
    worst = 0.0
    for name, mask in masks().items():
        took = seconds(job_of(mask))
        worst = max(worst, took)
        print(f"{name:20} {took * 1e6:6.1f} us")
    print(f"the bar is {BAR * 1e6:.0f} us")
    return int(worst > BAR)


if __name__ == "__main__":
    sys.exit(main())
