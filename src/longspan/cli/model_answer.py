"""What `longspan plan` answers of a whole model: bytes and seconds of its step, whether and where it fits."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from longspan.cli.workload import Workload
from longspan.errors import LongspanError, PlanError
from longspan.layouts import Layout
from longspan.number_words import bytes_text
from longspan.schedules.cost.machine import Machine
from longspan.schedules.plan import Plan
from longspan.sizing import (
    RESERVE,
    AttentionBytes,
    Heads,
    ModelSizes,
    Recipe,
    StepCost,
    StepMemory,
    StepTime,
    TrainingStep,
    model_flop,
    step_memory,
    step_time,
    why_no_time,
)
from longspan.sizing.fit import PlanOptions, attention_plans, attention_seconds, recipes, training_step, widest

MOST_RANKS, MOST_NODES = 1024, 16
"""Up to which powers of two, and how many whole nodes, it is tried on how many ranks a step fits."""


@dataclass(frozen=True)
class ModelQuestion:
    """A model, and how its step was asked for."""

    name: str
    sizes: ModelSizes
    workload: Workload
    recipe: Recipe
    data_parallel: int
    notes: tuple[str, ...] = ()
    _answers: dict[int, Answer] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(args: argparse.Namespace, name: str, sizes: ModelSizes, notes: tuple[str, ...]) -> ModelQuestion:
        workload = Workload.of(args)
        dtype = workload.tensors["dtype"]
        recipe = Recipe(not args.no_checkpointing, args.offload, args.mlp_chunks, args.logits, dtype, args.state)
        if args.keep and args.no_checkpointing:
            raise PlanError(
                "--keep and --no-checkpointing were given: every layer would keep remote K/V until its backward, which"
                " is not counted here. Leave one of them out."
            )
        return ModelQuestion(name, sizes, workload, recipe, args.data_parallel, notes)

    @property
    def batch(self) -> int:
        return self.workload.tensors["batch"]

    def on(self, ranks: int) -> Answer:
        """The answer for so many ranks to a sequence; made once."""
        if ranks not in self._answers:
            self._answers[ranks] = self._planned(ranks)
        return self._answers[ranks]

    def _planned(self, ranks: int) -> Answer:
        workload = self.workload
        layout = replace(workload, mask=widest(self.sizes, workload.mask), _layouts={}).layout(ranks)
        options = PlanOptions(
            workload.scheme, workload.machine if workload.machine_given else None, workload.keep, workload.fetch_bytes,
            self.batch, workload.tensors["dtype"],
        )  # fmt: skip
        return Answer(self, layout, attention_plans(self.sizes, workload.mask, layout, options))

    def least_bytes(self, ranks: int, allowed: list[Recipe]) -> int:
        """What it takes on so many ranks at least: spread evenly, attention aside, by the thriftiest recipe."""
        tokens = -(-self.workload.seq_len // ranks) * self.batch
        nothing = {heads: AttentionBytes(0, 0) for heads in self.sizes.attentions}
        steps = (TrainingStep(self.sizes, tokens, ranks * self.data_parallel, nothing, recipe) for recipe in allowed)
        return min(step_memory(step).peak.size for step in steps)


@dataclass(frozen=True)
class Answer:
    """What was asked, and how its attentions were planned."""

    asked: ModelQuestion
    layout: Layout
    plans: dict[Heads, Plan]

    def step(self, recipe: Recipe | None = None) -> TrainingStep:
        """The step with this recipe, or with the one that was asked for."""
        asked = self.asked
        return training_step(
            asked.sizes, self.layout, self.plans, asked.batch, recipe or asked.recipe, asked.data_parallel
        )

    def memory(self, recipe: Recipe | None = None) -> StepMemory:
        return step_memory(self.step(recipe))

    @property
    def machine(self) -> Machine:
        return next((plan.machine for plan in self.plans.values()), self.asked.workload.machine)

    @property
    def gpus(self) -> int:
        return self.layout.world_size * self.asked.data_parallel

    def why_no_time(self, recipe: Recipe | None = None) -> str | None:
        return why_no_time(self.step(recipe), self.machine)

    def time(self, recipe: Recipe | None = None) -> StepTime:
        return step_time(self.step(recipe), attention_seconds(self.plans), self.machine)

    def cost(self, recipe: Recipe | None = None) -> StepCost:
        """Tokens of all sequences of a step, on all GPUs."""
        asked = self.asked
        tokens = asked.workload.seq_len * asked.batch * asked.data_parallel
        flop = model_flop(asked.sizes, tokens, attention_seconds(self.plans), self.gpus)
        return StepCost(self.gpus, tokens, self.time(recipe).seconds, flop, self.machine.flops)


def numbers_of_ranks(machine: Machine) -> list[int]:
    """Powers of two, and whole nodes, from the smallest.

    >>> from longspan.schedules.cost.presets import H100
    >>> numbers_of_ranks(H100)[:8]
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    powers = {1 << power for power in range(MOST_RANKS.bit_length())}
    node = machine.node if machine.node <= MOST_RANKS else 1
    return sorted(powers | {node * number for number in range(1, MOST_NODES + 1) if node > 1})


def answers(asked: ModelQuestion, room: int, allowed: list[Recipe], above: int = 0) -> Iterator[Answer]:
    """Answers for more and more ranks, where it may fit."""
    for ranks in numbers_of_ranks(asked.workload.machine):
        if ranks <= above or asked.least_bytes(ranks, allowed) > room:
            continue
        try:
            yield asked.on(ranks)
        except LongspanError:  # a layout or a scheme that was named does not go with so many
            continue


def verdict(answer: Answer, memory: int) -> dict[str, Any]:
    """Whether it fits into so many GB, why not, what would make it, and the smallest number of GPUs that can."""
    room = (memory << 30) - RESERVE
    peak = answer.memory().peak
    found: dict[str, Any] = {
        "memory": memory, "fits": peak.size <= room, "bytes_left": room - peak.size, "fits_with": None,
        "fits_with_ranks": None, "smallest": smallest(answer, room),
    }  # fmt: skip
    aside = f"and {bytes_text(RESERVE)} set aside for CUDA and NCCL"
    if found["fits"]:
        return {**found, "why": f"{bytes_text(peak.size)} at the peak, {aside}"}
    most = max(peak.lines, key=lambda line: line.size)
    why = f"{bytes_text(peak.size)} at the peak ({peak.name}), {bytes_text(most.size)} of it {most.name}, {aside}"
    asked, ranks = answer.asked, answer.layout.world_size
    better = next((one for one in recipes(asked.recipe) if answer.memory(one).peak.size <= room), None)
    wider = answers(asked, room, [asked.recipe], ranks)
    more = next((one for one in wider if one.memory().peak.size <= room), None)
    found["fits_with"] = None if better is None else better.words
    found["fits_with_ranks"] = None if more is None else more.layout.world_size
    return {**found, "why": why, "advice": _advice(answer, found)}


def _advice(answer: Answer, found: dict[str, Any]) -> str:
    """What would make it fit."""
    with_, ranks = found["fits_with"], found["fits_with_ranks"]
    yes = [] if with_ is None else [f"with {with_}: yes"]
    yes += [] if ranks is None else [f"with --ranks {ranks}: yes"]
    if yes:
        return "; ".join(yes)
    least = min(answer.memory(one).peak.size for one in recipes(answer.asked.recipe))
    return f"the thriftiest recipe below takes {bytes_text(least)}"


def smallest(answer: Answer, room: int) -> dict[str, Any] | None:
    """The smallest number of GPUs on which it fits, with the first recipe that makes it; None where none was found."""
    allowed = recipes(answer.asked.recipe)
    for one in answers(answer.asked, room, allowed):
        for recipe in allowed:
            if one.memory(recipe).peak.size <= room:
                ranks = one.layout.world_size
                return {"gpus": one.gpus, "ranks": ranks, "with": recipe.words}
    return None
