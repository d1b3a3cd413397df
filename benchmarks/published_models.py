"""`python -m benchmarks.published_models`: what `longspan plan --model` says, beside published training runs.

Everything printed here that is not marked published is SIMULATED; nothing ran on a GPU. One constant, the speed of matrix
products inside of a model, is fixed from one step that is not judged. The command fails if a step's time is more than
25 % off, if memory is more than 15 % off, or if that constant is no longer the one in `presets`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from benchmarks.published_runs import CONFIGS, FIXED, FIXED_SECONDS, NOT_REPRESENTED, SOURCES, SUSTAINED, Run, runs
from longspan import layouts, masks
from longspan.number_words import count_text, seconds_text
from longspan.schedules.cost.machine import Machine
from longspan.sizing import ModelSizes, StepMemory, StepTime, sizes_of, step_memory, step_time
from longspan.sizing.fit import PlanOptions, attention_plans, attention_seconds, training_step

MAX_TIME, MAX_MEMORY, MAX_DRIFT = 0.25, 0.15, 0.02
OF_SUSTAINED = 0.66
"""In `presets`: what products inside of a model reach of what one product alone sustains."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """What Longspan says of a run."""

    time: StepTime
    memory: StepMemory


def predict(run: Run, machine: Machine | None = None) -> Predicted:
    """The run on its machine, or on another."""
    machine, sizes = machine or run.machine, sizes_of(CONFIGS[run.model])
    mask = masks.causal()
    layout = layouts.contiguous(run.tokens, 1) if run.ranks == 1 else layouts.zigzag(run.tokens, run.ranks)
    scheme = "auto" if run.ranks == 1 else "ring"
    plans = attention_plans(sizes, mask, layout, PlanOptions(scheme, machine, batch=run.batch))
    step = training_step(sizes, layout, plans, run.batch, run.recipe, run.data_parallel)
    return Predicted(step_time(step, attention_seconds(plans), machine), step_memory(step))


def fixed_share() -> float:
    """The share of peak at which matrix products make the step of `FIXED` as long as it was, attention aside."""
    low, high = 0.1, 1.0
    while high - low > 1e-5:
        share = (low + high) / 2
        found = predict(FIXED, replace(FIXED.machine, matmul_share=share)).time
        others = sum(line.seconds for line in found.lines if line.name != "attention")
        low, high = (share, high) if others > FIXED_SECONDS else (low, share)
    return low


def about(run: Run, sizes: ModelSizes) -> str:
    gpus = run.ranks * run.data_parallel
    sequences = run.batch * run.data_parallel
    several = f"{sequences} x " if sequences > 1 else ""
    return f"{run.model:13} {several + count_text(run.tokens):>9} {gpus:3} x {run.machine.name:10} {run.recipe.words}"


def lines_of(run: Run) -> tuple[list[str], list[str]]:
    """A run's lines, and what is wrong with them."""
    found, sizes = predict(run), sizes_of(CONFIGS[run.model])
    lines: list[str] = []
    wrong: list[str] = []
    figures = (
        ("time", run.seconds, found.time.seconds, MAX_TIME, seconds_text),
        ("memory", run.peak, float(found.memory.peak.size), MAX_MEMORY, lambda size: f"{size / 1e9:.1f} GB"),
    )
    for what, published, ours, bar, text in figures:
        if published is None:
            continue
        ratio, judged = ours / published, not run.unjudged
        name = about(run, sizes)
        note = "" if judged else f"  not judged: {run.unjudged}"
        lines.append(f"{name:67} {what:6} {text(published):>9} {text(ours):>9} {ratio:5.2f}{note}")
        if judged and abs(ratio - 1) > bar:
            wrong.append(f"{what} of {name.strip()} ({run.source}) is {ratio - 1:+.0%} off, more than {bar:.0%}")
    return lines, wrong


def main(arguments: list[str] | None = None) -> int:
    """Prints every run; 1 if a judged one is too far off."""
    argparse.ArgumentParser(prog="python -m benchmarks.published_models", description=__doc__).parse_args(arguments)
    share = fixed_share()
    factor = share * FIXED.machine.flops / SUSTAINED
    print(f"matrix products: {share:.3f} of peak on an H200, {factor:.3f} of what one alone sustains; presets have {OF_SUSTAINED}")
    wrong = [f"presets have {OF_SUSTAINED}, but the step gives {factor:.3f}"] if abs(factor / OF_SUSTAINED - 1) > MAX_DRIFT else []
    last = ""
    judged = 0
    for run in runs():
        if run.source != last:
            print(f"\n{run.source}: {SOURCES[run.source]}")
            print(f"{'':67} {'':6} {'published':>9} {'SIMULATED':>9} ratio")
            last = run.source
        lines, bad = lines_of(run)
        print("\n".join(lines))
        wrong += bad
        judged += 0 if run.unjudged else len(lines)
    print("\nNot represented:")
    for name, why in NOT_REPRESENTED:
        print(f"- {name}: {why}")
    print(f"\n{judged} figures judged, {len(wrong)} outside of {MAX_TIME:.0%} for time and {MAX_MEMORY:.0%} for memory")
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
