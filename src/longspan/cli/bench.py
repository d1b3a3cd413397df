"""Run attention, forward and backward, on the ranks of torchrun, and write the measured trace.

  torchrun --nproc-per-node 4 -m longspan bench --seq 8k --q-heads 8 --head-dim 64 --machine machine.json --out ran.json

With a machine of `longspan calibrate` it also says how long the plan was predicted to take.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from longspan.cli import trace as chrome
from longspan.cli.launch import JobRanks, add_backend, describe_device, describe_kernel, join_ranks
from longspan.cli.output import Column, Row, count, print_json, progress, screen_of, to_write
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import LongspanError
from longspan.formatting import seconds_text
from longspan.planning.simulator import simulate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser, ranks="group")
    add_backend(parser)
    parser.add_argument("--repeats", type=count, default=5, help="timed repetitions (5)")
    parser.add_argument("--out", type=to_write(), metavar="FILE", help="where the trace goes")


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    with join_ranks("bench", args.backend, alone=True) as ranks:
        _check_trace(args.out, ranks)
        from longspan.cli.measure import MeasuredRun, clocks_ahead, profile_slices, time_passes

        plan = workload.plan(ranks.size)
        ahead = clocks_ahead(ranks)
        measured = MeasuredRun(plan, ranks)
        with progress(args, "attention", args.repeats, is_main=ranks.is_main) as advance:
            passes = time_passes(measured, args.repeats, ahead, advance)
            slices = profile_slices(measured, ahead) if ranks.device == "cpu" else []
    if not ranks.is_main:
        return 0
    seconds = {name: passes.median(name) for name in chrome.DIRECTIONS}
    predicted = {name: simulate(plan.schedule(name), plan.machine).seconds for name in chrome.DIRECTIONS}
    repeats = {"forward_seconds": passes.forward, "backward_seconds": passes.backward}
    about = chrome.describe(workload, plan, seconds, "measured")
    about |= {
        "backend": ranks.backend,
        "device": ranks.device,
        "kernel": describe_kernel(plan.sizes, plan.dtype, ranks.device),
        "repeats": repeats,
        "predicted": {"machine": plan.machine.name, **{f"{k}_seconds": v for k, v in predicted.items()}},
        "file": None if args.out is None else str(args.out),
    }
    if args.out is not None:
        chrome.write(args.out, chrome.trace(slices, ranks.size, about))
    if args.json:
        print_json("bench", about)
        return 0
    screen = screen_of(args)
    chrome.show(about, plan, slices, screen)
    heads = ["median", "quickest", "slowest"] + [f"predicted for {plan.machine.name}"] * workload.is_machine_named
    rows: list[Row] = []
    for name in chrome.DIRECTIONS:
        each = repeats[f"{name}_seconds"]
        figures = (seconds[name], min(each), max(each), predicted[name])
        rows.append(Row((name, *map(seconds_text, figures[: len(heads)]))))
    screen.table((Column("pass", False), *map(Column, heads)), rows)
    screen.text()
    device = describe_device(ranks.device)
    notes = [f"Medians of {len(passes.forward)} repetitions, on {device} by {about['kernel']}."]
    if workload.is_machine_named:
        total = sum(predicted.values())
        off = total / about["seconds"] - 1
        notes.append(
            f"Predicted for {workload.machine.name}: {seconds_text(total)} together, {off:+.0%} against measured."
        )
    if args.out is not None:
        notes.append(f"Wrote {args.out}, one more repetition with the profiler on. Open it in ui.perfetto.dev.")
    screen.notes(notes)
    return 0


def _check_trace(out: Path | None, ranks: JobRanks) -> None:
    """Refuse to trace GPUs: there the profiler sees when the host starts a step, not when it runs."""
    if out is not None and ranks.device != "cpu":
        raise LongspanError(
            f"--out {out} needs a trace, and steps are measured on CPUs only. Leave it out, or use --backend gloo;"
            f" torch.profiler shows what GPUs do."
        )
