"""Runs attention, forward and backward, on the ranks of torchrun and writes the measured trace.

  torchrun --nproc-per-node 4 -m longspan bench --seq 8k --q-heads 8 --head-dim 64 --machine machine.json --out ran.json

With a machine of `longspan calibrate` it also says how long the plan was predicted to take.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli import trace as chrome
from longspan.cli.launch import JobRanks, add_backend, device_used, joined, kernel_used
from longspan.cli.output import Column, Row, Screen, count, print_json, progress, screen_of, to_write
from longspan.cli.trace import described, show
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import LongspanError
from longspan.formatting import seconds_text
from longspan.planning.simulator import simulate

# How right an attention was, scheme by scheme: errors as shares of what rounding explains, as a table.


if TYPE_CHECKING:
    from longspan.verification import Report

LEGEND = (
    "Shares: the error against one device in float64, of the most that rounding explains; above 100% is wrong. Tokens"
    " that the mask hides were changed, too, and nothing else may move."
)


@dataclass(frozen=True, slots=True)
class CheckedScheme:
    """What verify found about one scheme in one dtype; by the tensor's name, its error over its budget."""

    scheme: str
    dtype: str
    ok: bool
    shares: dict[str, float]

    @staticmethod
    def of(report: Report, scheme: str, dtype: str) -> CheckedScheme:
        return CheckedScheme(scheme, dtype, report.ok, {check.tensor: check.ratio for check in report.checks})

    def as_json(self) -> dict[str, Any]:
        """Plain values; a share that is infinite, of what is not finite, becomes None."""
        shares = {name: share if math.isfinite(share) else None for name, share in self.shares.items()}
        return {"scheme": self.scheme, "dtype": self.dtype, "ok": self.ok, "shares": shares}

    @staticmethod
    def from_json(found: dict[str, Any]) -> CheckedScheme:
        shares = {name: math.inf if share is None else share for name, share in found["shares"].items()}
        return CheckedScheme(found["scheme"], found["dtype"], found["ok"], shares)


def share_text(share: float | None) -> str:
    """A share in per cent.

    >>> share_text(0.123), share_text(0.0), share_text(0.001), share_text(77.0), share_text(math.inf), share_text(None)
    ('12%', '0%', '<1%', '>999%', 'infinite', '-')
    """
    if share is None:
        return "-"
    if not math.isfinite(share):
        return "infinite"
    if share > 9.99:
        return ">999%"
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def show_shares(checked: Sequence[CheckedScheme], screen: Screen) -> None:
    """A row for each scheme and dtype, a column for each tensor."""
    names = list(dict.fromkeys(name for one in checked for name in one.shares))
    heads = [name.replace("gradient of ", "d") for name in names]
    columns = (Column("scheme", False), Column("dtype", False), *map(Column, heads), Column("", False))
    rows = [
        Row((one.scheme, one.dtype, *(share_text(one.shares.get(name)) for name in names), _verdict(one)))
        for one in checked
    ]
    screen.table(columns, rows)


def _verdict(one: CheckedScheme) -> str:
    return "right" if one.ok else "WRONG"


# -- The command -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, ranks="group")
    add_backend(parser)
    parser.add_argument("--repeats", type=count, default=5, help="timed repetitions (5)")
    parser.add_argument("--out", type=to_write(), metavar="FILE", help="where the trace goes")


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    with joined("bench", args.backend, alone=True) as ranks:
        _check_trace(args.out, ranks)
        from longspan.cli.measure import MeasuredRun, clocks_ahead, profile_slices, time_passes

        plan = workload.plan(ranks.size)
        ahead = clocks_ahead(ranks)
        real = MeasuredRun(plan, ranks)
        with progress(args, "attention", args.repeats, speaks=ranks.speaks) as advance:
            passes = time_passes(real, args.repeats, ahead, advance)
            slices = profile_slices(real, ahead) if ranks.device == "cpu" else []
    if not ranks.speaks:
        return 0
    took = {name: passes.median(name) for name in ("forward", "backward")}
    predicted = {name: simulate(plan.schedule(name), plan.machine).seconds for name in took}
    about = described(workload, plan, took, "measured")
    about |= {
        "backend": ranks.backend,
        "device": ranks.device,
        "kernel": kernel_used(plan.sizes, plan.dtype, ranks.device),
        "repeats": {"forward_seconds": passes.forward, "backward_seconds": passes.backward},
        "predicted": {"machine": plan.machine.name, **{f"{k}_seconds": v for k, v in predicted.items()}},
        "file": None if args.out is None else str(args.out),
    }
    if args.out is not None:
        chrome.write(args.out, chrome.trace(slices, ranks.size, about))
    if args.json:
        print_json("bench", about)
        return 0
    screen = screen_of(args)
    show(about, plan, slices, screen)
    show_passes(about, screen, workload.machine_given)
    screen.notes(_notes(about, workload, args.out))
    return 0


def _check_trace(out: Path | None, ranks: JobRanks) -> None:
    """Refuses to trace GPUs: there the profiler sees when the host starts a step, not when it runs."""
    if out is not None and ranks.device != "cpu":
        raise LongspanError(
            f"--out {out} asks for a trace, but steps are taken apart on CPUs only. Leave it out, or say --backend"
            f" gloo; torch.profiler shows what GPUs do."
        )


def show_passes(about: dict[str, Any], screen: Screen, is_predicted: bool) -> None:
    """Each pass: its median, how far repetitions lie apart, and what was predicted for the machine that was named."""
    predicted = about["predicted"]
    heads = ("median", "quickest", "slowest", f"predicted for {predicted['machine']}")[: 4 if is_predicted else 3]
    rows: list[Row] = []
    for name in ("forward", "backward"):
        each = about["repeats"][f"{name}_seconds"]
        seconds = (about[f"{name}_seconds"], min(each), max(each), predicted[f"{name}_seconds"])
        rows.append(Row((name, *map(seconds_text, seconds[: len(heads)]))))
    screen.table((Column("pass", False), *map(Column, heads)), rows)
    screen.text()


def _notes(about: dict[str, Any], workload: Workload, out: Path | None) -> list[str]:
    times = len(about["repeats"]["forward_seconds"])
    notes = [f"Medians of {times} repetitions, on {device_used(about['device'])} by {about['kernel']}."]
    total = sum(value for key, value in about["predicted"].items() if key.endswith("seconds"))
    if workload.machine_given:
        off = total / about["seconds"] - 1
        notes.append(
            f"Predicted for {workload.machine.name}: {seconds_text(total)} together, {off:+.0%} against measured."
        )
    if out is not None:
        notes.append(f"Wrote {out}, one more repetition with the profiler on. Open it in ui.perfetto.dev.")
    return notes
