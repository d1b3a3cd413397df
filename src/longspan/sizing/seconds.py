"""How long a training step takes, part by part. All of it is simulated, from a machine's rates and few assumptions.

attention        forward and backward of its plans, and forward once more where layers are computed again
matrix products  2 operations for each parameter that a token meets, forward; twice that backward
between them     what a layer keeps is written and read forward; backward it is read, and a gradient as large is written
                 and read
loss             the head's products, and passes over logits
FSDP             parameters of a layer are gathered, and its gradient is reduced, while another layer runs: seen is what
                 takes longer than a layer; embedding and head are always seen
offload          inputs of layers, to the host and back, in line with everything else
optimizer        Adam's passes over a rank's shard

Four ranks of one link of 1 GB/s gather a layer of 1 GB: each takes in three quarters of it.

>>> from longspan.schedules.cost.presets import CPU
>>> from dataclasses import replace
>>> from longspan.schedules.cost.machine import Link
>>> gathered_seconds(1e9, 4, replace(CPU, links=(Link(1 << 30, 1e9, 0.0),)))
0.75
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.schedules.cost.machine import Machine
from longspan.sizing.memory import TrainingStep
from longspan.sizing.modules import Block, Heads, LayerSizes

KEPT_FORWARD, KEPT_BACKWARD = 2, 3
"""How often a byte that a layer keeps passes through memory. Assumed: kernels that fuse more pass over less."""
LOGIT_BYTES = 16
"""A logit is written and read in float32, and so is its gradient."""
ADAM_PASSES = 7
"""Parameter, gradient and two moments are read; all but the gradient are written."""


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """One attention's passes, and the operations of its forward pass that the mask needs, on average of all ranks."""

    forward: float
    backward: float
    flop: float


@dataclass(frozen=True, slots=True)
class TimeLine:
    """Seconds of a step under a name, and what they are made of."""

    name: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the time of a step goes."""

    lines: tuple[TimeLine, ...]

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of some of a layer's work."""

    attention: float = 0.0
    products: float = 0.0
    between: float = 0.0

    def __add__(self, other: _Parts) -> _Parts:
        return _Parts(
            self.attention + other.attention, self.products + other.products, self.between + other.between
        )  # fmt: skip

    def times(self, number: int) -> _Parts:
        return _Parts(self.attention * number, self.products * number, self.between * number)

    @property
    def seconds(self) -> float:
        return self.attention + self.products + self.between


def why_no_time(step: TrainingStep, machine: Machine) -> str | None:
    """Why the time of a step is not known on this machine, or None where it is."""
    if not machine.matmul_share:
        return f"{machine.name} has no matmul_share, the speed of matrix products as a share of its flops"
    if step.recipe.itemsize != 2:
        return f"speeds are known of bfloat16 and float16, not of {step.recipe.dtype}"
    if step.recipe.offload and not machine.host_bandwidth:
        return f"{machine.name} has no host_bandwidth, which offload needs"
    return None


def step_time(step: TrainingStep, seconds: Mapping[Heads, AttentionSeconds], machine: Machine) -> StepTime:
    """Where the time of a step goes, on the rank with most tokens."""
    if (why := why_no_time(step, machine)) is not None:
        raise PlanError(f"how long a step takes was asked for, but {why}.")
    total, waited = _Parts(), 0.0
    for layer, number in Counter(step.sizes.layers).items():
        forward, backward = _layer(step, layer, seconds, machine)
        total += (forward + backward).times(number)
        waited += number * _exposed(step, layer.params, (forward.seconds, backward.seconds), machine)
    waited += _exposed(step, step.sizes.root_params, (0.0, 0.0), machine)
    again = ", forward twice" if step.recipe.checkpointing else ""
    lines = [
        TimeLine("attention", total.attention, f"from the plans{again}"),
        TimeLine("matrix products", total.products, f"at {_rate(machine) / 1e12:,.0f} TFLOP/s{again}"),
        TimeLine("between them", total.between, "norms, activations and the like: bytes through memory"),
        TimeLine("loss", _loss(step, machine), "the head's products, and passes over logits"),
        TimeLine("FSDP", waited, f"what layers do not hide, over {step.ranks:,} ranks"),
        TimeLine("optimizer", _optimizer(step, machine), "Adam over a rank's shard"),
    ]
    if step.recipe.offload:
        lines.append(TimeLine("offload", _offload(step, machine), "inputs of layers to the host and back"))
    return StepTime(tuple(lines))


def gathered_seconds(size: float, ranks: int, machine: Machine) -> float:
    """How long gathering so many bytes takes that are spread over all ranks, or reducing them back.

    Every rank takes in what is not its own. From other nodes it enters a node once, over the links of all its ranks
    at a time.
    """
    slowest, inner = 0.0, 1
    for link in machine.links:
        outer = min(link.ranks, ranks)
        if outer > inner:
            there = size * (1 - inner / ranks) / (inner * link.bandwidth)
            slowest = max(slowest, there + (-(-outer // inner) - 1) * link.latency)
        inner = max(inner, outer)
    return slowest


def _rate(machine: Machine) -> float:
    return machine.flops * machine.matmul_share


def _block(step: TrainingStep, block: Block, seconds: Mapping[Heads, AttentionSeconds], machine: Machine) -> _Parts:
    """One forward pass of a block, but for how long attention's is."""
    flop = 2.0 * step.tokens * (block.active_params + block.products)
    moved = step.tokens * block.kept_bytes(step.recipe.itemsize)
    attention = 0.0 if block.heads is None else seconds[block.heads].forward
    return _Parts(attention, flop / _rate(machine), KEPT_FORWARD * moved / machine.copy_bandwidth)


def _layer(
    step: TrainingStep, layer: LayerSizes, seconds: Mapping[Heads, AttentionSeconds], machine: Machine
) -> tuple[_Parts, _Parts]:
    """Forward, and backward with what is computed again in it."""
    forward, backward = _Parts(), _Parts()
    for block in layer.blocks:
        one = _block(step, block, seconds, machine)
        attention = 0.0 if block.heads is None else seconds[block.heads].backward
        again = step.recipe.checkpointing + (step.recipe.mlp_chunks > 1 and block.kind in ("mlp", "experts"))
        forward += one
        backward += _Parts(attention, 2 * one.products, KEPT_BACKWARD / KEPT_FORWARD * one.between)
        backward += one.times(again)
    return forward, backward


def _exposed(step: TrainingStep, params: int, beside: tuple[float, float], machine: Machine) -> float:
    """How much of gathering parameters, twice, and of reducing their gradient takes longer than what runs beside."""
    gather = gathered_seconds(params * step.recipe.itemsize, step.ranks, machine)
    reduce = gathered_seconds(params * step.recipe.state_size, step.ranks, machine)
    forward, backward = beside
    if not forward:  # embedding and head: they stay gathered
        return gather + reduce
    return max(gather - forward, 0.0) + max(gather + reduce - backward, 0.0)


def _loss(step: TrainingStep, machine: Machine) -> float:
    logits = float(step.tokens) * step.sizes.vocab
    return 6 * logits * step.sizes.hidden / _rate(machine) + LOGIT_BYTES * logits / machine.copy_bandwidth


def _optimizer(step: TrainingStep, machine: Machine) -> float:
    shard = -(-step.sizes.params // step.ranks)
    return ADAM_PASSES * shard * step.recipe.state_size / machine.copy_bandwidth


def _offload(step: TrainingStep, machine: Machine) -> float:
    size = float(step.tokens) * step.sizes.hidden * step.recipe.itemsize
    return 2 * len(step.sizes.layers) * size / machine.host_bandwidth
