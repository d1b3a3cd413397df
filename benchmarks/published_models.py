"""`python -m benchmarks.published_models [--page]`: compare `longspan plan --model` with published training runs.

Everything printed here that is not marked published is SIMULATED; nothing ran on a GPU. One constant, the speed of
matrix products inside of a model, is fixed from one step that is not judged. The command fails if a step's time is more
than 25% off, if memory is more than 15% off, or if that constant is no longer the one in `presets`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace

from benchmarks.published_runs import (
    CONFIGS,
    FIXED,
    FIXED_SECONDS,
    NOT_REPRESENTED,
    SOURCES,
    STAS,
    SUSTAINED,
    Run,
    runs,
)
from longspan import layouts, masks
from longspan.formatting import seconds_text
from longspan.planning.machine import Machine
from longspan.sizing import StepMemory, StepTime, sizes_of, step_memory, step_time
from longspan.sizing.time import PlanOptions, attention_plans, attention_seconds, training_step

MAX_TIME, MAX_MEMORY, MAX_DRIFT = 0.25, 0.15, 0.02
OF_SUSTAINED = 0.66
"""In `presets`: the speed of products inside of a model relative to one product alone."""


@dataclass(frozen=True, slots=True)
class Predicted:
    """Longspan's prediction of a run."""

    time: StepTime
    memory: StepMemory


def predict(run: Run, machine: Machine | None = None) -> Predicted:
    """Predict the run on its machine, or on another."""
    machine, sizes = machine or run.machine, sizes_of(CONFIGS[run.model])
    mask = masks.causal()
    layout = layouts.contiguous(run.tokens, 1) if run.ranks == 1 else layouts.zigzag(run.tokens, run.ranks)
    scheme = "auto" if run.ranks == 1 else "ring"
    plans = attention_plans(sizes, mask, layout, PlanOptions(scheme, machine, batch=run.batch))
    step = training_step(sizes, layout, plans, run.batch, run.recipe, run.data_parallel)
    return Predicted(step_time(step, attention_seconds(plans), machine), step_memory(step))


def fixed_share() -> float:
    """Return the share of peak of matrix products at which the step of `FIXED` takes its measured time, without
    attention."""
    low, high = 0.1, 1.0
    while high - low > 1e-5:
        share = (low + high) / 2
        result = predict(FIXED, replace(FIXED.machine, matmul_share=share)).time
        others = sum(line.seconds for line in result.lines if line.name != "attention")
        low, high = (share, high) if others > FIXED_SECONDS else (low, share)
    return low


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a run, published and ours: seconds of a step, or bytes of a GPU."""

    run: Run
    what: str
    published: float
    ours: float

    @property
    def ratio(self) -> float:
        return self.ours / self.published

    @property
    def outside(self) -> bool:
        """Return whether it is judged, and outside its tolerance."""
        return not self.run.unjudged and abs(self.ratio - 1) > (MAX_TIME if self.what == "time" else MAX_MEMORY)

    @property
    def cells(self) -> tuple[str, ...]:
        """Return model, tokens, GPUs, recipe, published, ours, ratio."""
        run = self.run
        sequences = run.batch * run.data_parallel
        tokens = f"{sequences} x " * (sequences > 1) + f"{run.tokens:,}"
        gpus = f"{run.ranks * run.data_parallel} {run.machine.name}"
        values = (
            seconds_text(value) if self.what == "time" else f"{value / 1e9:.1f} GB"
            for value in (self.published, self.ours)
        )
        return (run.model, tokens, gpus, run.recipe.words, *values, f"{self.ratio:.2f}")

    @property
    def text(self) -> str:
        """Return its row."""
        model, tokens, gpus, words, published, ours, ratio = self.cells
        why = self.run.unjudged
        verdict = f"  not judged: {why}" if why else "  WRONG" if self.outside else ""
        return f"{model:13} {tokens:>11} {gpus:>13}  {words:39} {published:>9} {ours:>9} {ratio:>5}{verdict}"


def figures(run: Run) -> list[Figure]:
    """Return the published figures of a run with ours."""
    result = predict(run)
    both = (("time", run.seconds, result.time.seconds), ("memory", run.peak, float(result.memory.peak.size)))
    return [Figure(run, what, published, ours) for what, published, ours in both if published is not None]


HEADING = f"{'model':13} {'tokens':>11} {'GPUs':>13}  {'with':39} {'published':>9} {'SIMULATED':>9} ratio"


def page() -> str:
    """Print the judged figures as in docs/memory.md."""
    rows = [
        (run.source if first else "", *figure.cells)
        for source in SOURCES
        for first, (run, figure) in _numbered(source)
    ]  # fmt: skip
    heads = ("source", "model", "tokens", "GPUs", "with", "published", "simulated", "ratio")
    lines = [heads, ("---",) * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _numbered(source: str) -> list[tuple[bool, tuple[Run, Figure]]]:
    """Return the judged figures of a source, and whether each is its first."""
    judged = [(run, figure) for run in runs() if run.source == source and not run.unjudged for figure in figures(run)]
    return [(number == 0, one) for number, one in enumerate(judged)]


def main(arguments: list[str] | None = None) -> int:
    """Print every run; return 1 if a judged one is too far off."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published_models", description=__doc__)
    parser.add_argument("--page", action="store_true", help="print the table of docs/memory.md, and nothing else")
    if parser.parse_args(arguments).page:
        print(page(), end="")
        return 0
    share = fixed_share()
    factor = share * FIXED.machine.flops / SUSTAINED
    print(f"Products in a model: {share:.3f} of an H200's peak, {factor:.3f} of what one alone sustains; in presets:")
    print(f"{OF_SUSTAINED}. Fixed from one step of 8,192 tokens ({STAS}), which is not judged.")
    drifted = abs(factor / OF_SUSTAINED - 1) > MAX_DRIFT
    sourced = [(run.source, figure) for run in runs() for figure in figures(run)]
    for source, about in SOURCES.items():
        print(f"\n{source}: {about}\n{HEADING}")
        print("\n".join(figure.text for name, figure in sourced if name == source))
    print("\nNot represented:")
    for name, why in NOT_REPRESENTED:
        print(f"- {name}: {why}")
    judged = [figure for _, figure in sourced if not figure.run.unjudged]
    outside = sum(figure.outside for figure in judged)
    print(
        f"\n{len(judged)} figures judged, {outside} further off than {MAX_TIME:.0%} (time) or {MAX_MEMORY:.0%} (memory)"
    )
    if drifted:
        print(f"WRONG: presets have {OF_SUSTAINED}, but the step gives {factor:.3f}")
    return 1 if outside or drifted else 0


if __name__ == "__main__":
    sys.exit(main())
