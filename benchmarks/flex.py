"""Compare flex attention on one device with PyTorch's eager (forward and backward) and compiled (forward) versions.

    python -m benchmarks.flex            # exits with 1 when a bar is missed; about 10 minutes, 8 GB
    python -m benchmarks.flex --quick    # S = 4096

H = 8, D = 64, bfloat16, one thread. PyTorch's flex attention rejects a backward on CPUs; the check is bypassed here,
and its results are then right. Every measurement runs in its own process: CPU seconds, and the peak of resident memory
above inputs and gradients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

HEADS, DIM, WINDOW = 8, 64, 1024
LONG = 32768


def inputs(seq_len: int) -> list[Any]:
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, HEADS, seq_len, DIM, dtype=torch.bfloat16) for _ in range(4)]


def mask_mod(kind: str, seq_len: int) -> Callable[..., Any]:
    import torch

    if kind == "window":
        return lambda b, h, i, j: (i >= j) & (i - j < WINDOW)
    document = torch.arange(seq_len) // 1000
    return lambda b, h, i, j: (document[i] == document[j]) & (i >= j)


def our_mask(kind: str, seq_len: int) -> Any:
    from longspan import masks

    if kind == "window":
        return masks.sliding_window(WINDOW - 1).resized(seq_len)
    lengths = [1000] * (seq_len // 1000) + ([seq_len % 1000] if seq_len % 1000 else [])
    return masks.documents(lengths) & masks.causal()


def score_mod(name: str) -> Any:
    import torch

    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    return {
        "none": None,
        "alibi": lambda s, b, h, i, j: s - slopes[h] * (i - j),
        "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    }[name]


def block_mask_of(kind: str, seq_len: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(mask_mod(kind, seq_len), None, None, seq_len, seq_len, device="cpu")


def memory(what: str) -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what)) / 1024


def measure(who: str, kind: str, score: str, seq_len: int, backward: bool, repeats: int) -> tuple[float, float]:
    """Return (CPU seconds, MB above the memory before) of one contender, best of several."""
    import torch

    torch.set_num_threads(1)
    q, k, v, dout = inputs(seq_len)
    change = score_mod(score)
    if who.startswith("longspan"):
        import longspan as ls

        where = block_mask_of(kind, seq_len) if who == "longspan, BlockMask" else our_mask(kind, seq_len)
        call = ls.flex_attention
    else:
        from torch.nn.attention import flex_attention as flex

        flex._validate_device = lambda *_: None  # its check rejects a backward on CPUs
        where, call = block_mask_of(kind, seq_len), flex.flex_attention
        if who == "compiled":
            call = torch.compile(call)
    if backward:
        for t in (q, k, v):
            t.requires_grad_()
            t.grad = torch.zeros_like(t)

    def once() -> None:
        with torch.set_grad_enabled(backward):
            out = call(q, k, v, change, where)
        if backward:
            out.backward(dout)

    if repeats > 1:
        once()  # compiles, plans, classifies
    best = float("inf")
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")
    before = memory("VmRSS")
    for _ in range(repeats):
        begin = time.process_time()
        once()
        best = min(best, time.process_time() - begin)
    return best, memory("VmHWM") - before


def apart(*args: Any) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, args)


class Report:
    def __init__(self) -> None:
        self.missed = 0

    def line(self, text: str, figure: float, bar: float | None, at_least: bool = False, unit: str = "x") -> None:
        bad = bar is not None and (figure < bar if at_least else figure > bar)
        self.missed += bad
        sign = ">=" if at_least else "<="
        print(
            f"  {text:74s} {figure:8.2f}{unit} {'' if bar is None else f'{sign} {bar}'} {'MISSED' if bad else ''}",
            flush=True,
        )


def forward_and_backward(report: Report, seq_len: int) -> None:
    print(f"\nForward and backward, S = {seq_len}: PyTorch eager (check bypassed) over longspan")
    for kind in ("documents", "window"):
        eager, eager_mb = apart("eager", kind, "none", seq_len, True, 1)
        for score in ("none", "alibi"):
            ours, ours_mb = apart("longspan", kind, score, seq_len, True, 3)
            report.line(f"{kind}, score {score}: {eager:.1f} s against {ours:.2f} s", eager / ours, 20.0, True)
            text = f"{kind}, score {score}: peak memory, {ours_mb:.0f} MB against {eager_mb:.0f} MB"
            report.line(text, 100 * ours_mb / eager_mb, 5.0, unit="%")


def forward_alone(report: Report, seq_len: int, rounds: int) -> None:
    print(f"\nForward, S = {seq_len}: longspan over PyTorch compiled, median of {rounds} pairs")
    contenders = ("longspan", "longspan, BlockMask", "compiled")
    for kind in ("documents", "window"):
        for score, bar in (("none", 2.0), ("alibi", 4.0), ("softcap", 4.0)):
            times = [[apart(who, kind, score, seq_len, False, 5)[0] for who in contenders] for _ in range(rounds)]
            for i, who in enumerate(contenders[:2]):
                ours, theirs = (statistics.median(row[at] for row in times) * 1e3 for at in (i, 2))
                text = f"{kind}, score {score}, {who}: {ours:.0f} ms against {theirs:.0f} ms"
                report.line(text, statistics.median(row[i] / row[2] for row in times), bar)


def long_sequence(report: Report) -> None:
    print(f"\nForward and backward, S = {LONG}: PyTorch's eager would write 100 GB of scores")
    for kind in ("documents", "window"):
        ours, ours_mb = apart("longspan", kind, "alibi", LONG, True, 1)
        report.line(f"{kind}, score alibi: {ours:.1f} s, peak extra MB", ours_mb, 1000.0, unit=" ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="S = 4096, one round")
    quick = parser.parse_args().quick
    report, seq_len = Report(), 4096 if quick else 8192
    forward_alone(report, seq_len, 1 if quick else 3)
    forward_and_backward(report, seq_len)
    long_sequence(report)
    print("all bars met" if not report.missed else f"{report.missed} bars MISSED")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
