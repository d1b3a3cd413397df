"""Time and cost of a training step, part by part. All times are simulated, from a machine's rates and few assumptions.

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

>>> from longspan.planning.machine import CPU
>>> from dataclasses import replace
>>> from longspan.planning.machine import Link
>>> gathered_seconds(1e9, 4, replace(CPU, links=(Link(1 << 30, 1e9, 0.0),)))
0.75
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from longspan import masks
from longspan.api import plan
from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.sizing.memory import AttentionBytes, Recipe, TrainingStep
from longspan.sizing.modules import Block, Heads, LayerSizes, ModelSizes

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


# -- Plans of all attentions of a model, and the recipes to try --------------------------------------------------------


CHUNKS = 8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Arguments of `longspan.plan` that all attentions of a model share."""

    scheme: str = "auto"
    machine: Machine | None = None
    keep: bool = False
    fetch_bytes: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"


def mask_for(mask: Mask, heads: Heads) -> Mask:
    """What these heads see of what the documents allow."""
    return mask if heads.window is None else mask & masks.sliding_window(heads.window)


def widest(sizes: ModelSizes, mask: Mask) -> Mask:
    """The mask that the layout is balanced for: that of the attentions that see most."""
    heads = max(sizes.attentions, key=lambda one: 1 << 60 if one.window is None else one.window, default=None)
    return mask if heads is None else mask_for(mask, heads)


def attention_plans(sizes: ModelSizes, mask: Mask, layout: Layout, options: PlanOptions) -> dict[Heads, Plan]:
    """A plan for each size of attention that the model has, over one layout."""
    return {
        heads: plan(
            mask_for(mask, heads), layout, q_heads=heads.q_heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim, dtype=options.dtype, batch=options.batch, scheme=options.scheme,
            machine=options.machine, keep=options.keep, fetch_bytes=options.fetch_bytes,
        )
        for heads in sizes.attentions
    }  # fmt: skip


def attention_seconds(plans: Mapping[Heads, Plan]) -> dict[Heads, AttentionSeconds]:
    """How long each size of attention takes, by its plan."""
    found = {}
    for heads, one in plans.items():
        chosen = next(reason for reason in one.reasons if reason.chosen)
        flop = 2.0 * (heads.head_dim + heads.v_head_dim) * float(one.scheme.work.mean())
        found[heads] = AttentionSeconds(chosen.forward_seconds, chosen.backward_seconds, flop)
    return found


def training_step(
    sizes: ModelSizes, layout: Layout, plans: Mapping[Heads, Plan], batch: int, recipe: Recipe, data_parallel: int = 1
) -> TrainingStep:
    """What is needed to know what the step takes, on the rank with most tokens; FSDP is over the ranks of all
    sequences."""
    found = {}
    for heads, one in plans.items():
        chosen = next(reason for reason in one.reasons if reason.chosen)
        found[heads] = AttentionBytes(chosen.peak_bytes, chosen.workspace_bytes)
    slots = layout.local_len or int(layout.num_tokens.max())
    return TrainingStep(sizes, slots * batch, layout.world_size * data_parallel, found, recipe)


def recipes(given: Recipe) -> list[Recipe]:
    """From what takes most to what takes least, in the order in which one would switch things on; and what was given.

    >>> for recipe in recipes(Recipe()):
    ...     print(recipe.words)
    no checkpointing, whole logits
    no checkpointing
    checkpointing
    checkpointing, MLP in 8 chunks
    checkpointing, offload
    checkpointing, offload, MLP in 8 chunks
    """
    plain = replace(given, checkpointing=False, offload=False, mlp_chunks=1, logits=True)
    without = replace(plain, logits=False)
    again = replace(without, checkpointing=True)
    chunked = replace(again, mlp_chunks=given.mlp_chunks if given.mlp_chunks > 1 else CHUNKS)
    found = [plain, without, again, chunked, replace(again, offload=True), replace(chunked, offload=True)]
    return found if given in found else [*found, given]


# -- Tokens per second, share of a machine's peak, and price -----------------------------------------------------------


HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of so many tokens on so many GPUs.

    1,000 tokens in 2 seconds on 4 GPUs of 1 PFLOP/s, 2e15 operations in all; an hour of a GPU costs 3.60, so that all
    of them cost 0.004 a second:

    >>> cost = StepCost(gpus=4, tokens=1000, seconds=2.0, flop=2e15, peak=1e15)
    >>> cost.tokens_per_second, cost.tokens_per_second_per_gpu, cost.mfu
    (500.0, 125.0, 0.25)
    >>> round(cost.per_billion(3.60), 2)
    8000.0
    """

    gpus: int
    tokens: int
    seconds: float
    flop: float
    """Of the model, on all GPUs together, without what is computed again."""
    peak: float
    """Of one GPU, a second."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: operations a second that the model needs, as a share of peak."""
        return self.flop / (self.seconds * self.gpus * self.peak)

    def per_billion(self, price: float) -> float:
        """What a billion tokens cost, where an hour of a GPU costs `price`."""
        if not math.isfinite(price) or price <= 0:
            raise PlanError(f"a price of {price!r} an hour was given. Give what an hour of one GPU costs, above 0.")
        return self.gpus * price * self.seconds / HOUR / self.tokens * 1e9


def model_flop(sizes: ModelSizes, tokens: int, seconds: Mapping[Heads, AttentionSeconds], ranks: int) -> float:
    """Operations that a step needs: 6 for each token and parameter that it meets, and three times attention's forward
    pass, of pairs that the mask has; as published figures of utilisation are counted."""
    attention = sum(number * seconds[heads].flop for heads, number in sizes.attentions.items())
    return 6.0 * sizes.active_params * tokens + 3.0 * attention * ranks
