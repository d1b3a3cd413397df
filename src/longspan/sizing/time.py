"""Time and cost of a training step, part by part. All times are simulated, from a machine's rates and few assumptions.

attention        forward and backward of its plans, and forward once more where layers are recomputed
matrix products  2 operations for each parameter that a token meets, forward; twice that backward
between them     what a layer keeps is written and read forward; backward it is read, and a gradient as large is written
                 and read
loss             the head's products, and passes over logits
FSDP             parameters of a layer are gathered, and its gradient is reduced, while another layer runs: exposed is
                 the time beyond that of the layer; embedding and head are always exposed
tensor parallel  every block gathers its input and reduce-scatters its output, forward and backward, and so do the
                 embedding and the head; nothing hides it
expert parallel  rows go to their experts and back, forward and backward, as if every expert had as many; nothing hides
                 it
offload          inputs of layers, to the host and back, in line with everything else
optimizer        Adam's passes over a rank's shard; if it is on the host, shards go to the device twice and gradients
                 back, and Adam's time there is not known: the time of the step is a lower bound then

With LoRA, products with frozen weights have no second half in backward, and only adapters are reduced and stepped.

Four ranks with links of 1 GB/s gather a layer of 1 GB: each receives three quarters of it.

>>> from longspan.planning.machine import CPU
>>> from dataclasses import replace
>>> from longspan.planning.machine import Link
>>> gather_seconds(1e9, 4, replace(CPU, links=(Link(1 << 30, 1e9, 0.0),)))
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
from longspan.sizing.modules import Heads, LayerSizes, ModelSizes
from longspan.sizing.parallel import axis_machine

KEPT_FORWARD, KEPT_BACKWARD = 2, 3
"""How often a byte that a layer keeps passes through memory. An assumption: kernels that fuse more move less."""
LOGIT_BYTES = 16
"""A logit is written and read in float32, and so is its gradient."""
ADAM_PASSES = 7
"""Parameter, gradient and two moments are read; all but the gradient are written."""


@dataclass(frozen=True, slots=True)
class AttentionSeconds:
    """Times of one attention, and the operations that its mask needs forward, on average of all ranks."""

    forward: float
    backward: float
    flop: float


@dataclass(frozen=True, slots=True)
class TimeLine:
    """Seconds of a step with a name and a reason."""

    name: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of a step by its parts."""

    lines: tuple[TimeLine, ...]
    at_least: bool = False
    """Whether a part is not known and left out: Adam on the host."""

    @property
    def seconds(self) -> float:
        return sum(line.seconds for line in self.lines)


@dataclass(frozen=True, slots=True)
class _Parts:
    """Seconds of some of a layer's work."""

    attention: float = 0.0
    products: float = 0.0
    between: float = 0.0
    tensor: float = 0.0
    """Messages of tensor parallelism."""
    expert: float = 0.0
    """Messages of expert parallelism."""

    def __add__(self, other: _Parts) -> _Parts:
        return _Parts(
            self.attention + other.attention, self.products + other.products, self.between + other.between,
            self.tensor + other.tensor, self.expert + other.expert,
        )  # fmt: skip

    def times(self, number: int) -> _Parts:
        return _Parts(
            self.attention * number, self.products * number, self.between * number, self.tensor * number,
            self.expert * number,
        )  # fmt: skip

    @property
    def seconds(self) -> float:
        """Without messages of tensor and expert parallelism, behind which nothing is hidden."""
        return self.attention + self.products + self.between


def why_no_time(step: TrainingStep, machine: Machine) -> str | None:
    """Return why the time of a step is not known on this machine, or None where it is."""
    if not machine.matmul_share:
        return f"{machine.name} has no matmul_share, the speed of matrix products as a share of its flops"
    if step.recipe.itemsize != 2:
        return f"speeds are known of bfloat16 and float16, not of {step.recipe.dtype}"
    if (step.recipe.offload or step.recipe.offload_optimizer) and not machine.host_bandwidth:
        return f"{machine.name} has no host_bandwidth, which offload needs"
    return None


def step_time(step: TrainingStep, seconds: Mapping[Heads, AttentionSeconds], machine: Machine) -> StepTime:
    """Return the time of a step by its parts, on the rank with most tokens."""
    if (why := why_no_time(step, machine)) is not None:
        raise PlanError(f"the time of a step is not known: {why}.")
    sizes, recipe = step.sizes, step.recipe
    total, exposed = _Parts(), 0.0
    for layer, number in Counter(sizes.layers).items():
        forward, backward = _layer(step, layer, seconds, machine)
        total += (forward + backward).times(number)
        params = step.num_trained(layer) + step.frozen(layer), step.num_trained(layer), layer.expert_params
        exposed += number * _exposed_seconds(step, params, (forward.seconds, backward.seconds), machine)
    root = sizes.root_params
    exposed += _exposed_seconds(step, (root, 0 if recipe.lora else root, 0), (0.0, 0.0), machine)
    logits, rate = float(step.tokens) * sizes.vocab, machine.flops * machine.matmul_share
    head = 4 if recipe.lora else 6
    loss = head * logits * sizes.hidden / rate + LOGIT_BYTES * logits / machine.copy_bandwidth
    shard = step.shard(sizes) * recipe.state_size
    adam = TimeLine("optimizer", ADAM_PASSES * shard / machine.copy_bandwidth, "Adam over a rank's shard")
    if recipe.offload_optimizer:
        moved = 3 * shard + 2 * step.shard(sizes, frozen=True) * recipe.itemsize
        why = "shards from the host, twice, and gradients to it; Adam there is not counted"
        adam = TimeLine("optimizer", moved / machine.host_bandwidth, why)
    again = ", forward twice" if recipe.checkpointing else ""
    lines = [
        TimeLine("attention", total.attention, f"from the plans{again}"),
        TimeLine("matrix products", total.products, f"at {rate / 1e12:,.0f} TFLOP/s{again}"),
        TimeLine("between them", total.between, "norms, activations and the like: bytes through memory"),
        TimeLine("loss", loss, "the head's products, and passes over logits"),
        TimeLine("FSDP", exposed, f"what layers do not hide, over {step.ranks:,} ranks"),
        adam,
    ]
    if sizes.tp > 1:  # the embedding's output is reduced, the head's input is gathered, and the reverse in backward
        messages = total.tensor + 4 * gather_seconds(_row_bytes(step), sizes.tp, machine)
        lines.append(TimeLine("tensor parallel", messages, f"gathers and reductions over {sizes.tp} ranks{again}"))
    if sizes.ep > 1:
        lines.append(TimeLine("expert parallel", total.expert, f"rows to {sizes.ep} ranks and back{again}"))
    if recipe.offload:
        size = float(step.tokens) * sizes.row * recipe.itemsize
        moved = 2 * len(sizes.layers) * size / machine.host_bandwidth
        lines.append(TimeLine("offload", moved, "inputs of layers to the host and back"))
    return StepTime(tuple(lines), recipe.offload_optimizer)


def gather_seconds(size: float, ranks: int, machine: Machine) -> float:
    """Return the time to all-gather `size` bytes that are sharded over all ranks, or to reduce-scatter them.

    Every rank receives what it does not hold. Bytes of other nodes enter a node once, over the links of all its ranks.
    """
    slowest, inner = 0.0, 1
    for link in machine.links:
        outer = min(link.ranks, ranks)
        if outer > inner:
            there = size * (1 - inner / ranks) / (inner * link.bandwidth)
            slowest = max(slowest, there + (-(-outer // inner) - 1) * link.latency)
        inner = max(inner, outer)
    return slowest


def exchange_seconds(size: float, ranks: int, machine: Machine) -> float:
    """Return the time of an all-to-all in which every rank has `size` bytes for all ranks, itself included.

    >>> from longspan.planning.machine import CPU, Link
    >>> exchange_seconds(1e9, 4, replace(CPU, links=(Link(2, 1e9, 0.0), Link(1 << 30, 1e8, 0.0))))
    5.0
    """
    slowest, inner = 0.0, 1
    for link in machine.links:
        outer = min(link.ranks, ranks)
        if outer > inner:
            there = size * (1 - inner / ranks) / link.bandwidth
            slowest = max(slowest, there + (-(-outer // inner) - 1) * link.latency)
        inner = max(inner, outer)
    return slowest


def _row_bytes(step: TrainingStep) -> float:
    """Return the bytes of whole rows, which tensor parallelism gathers."""
    return float(step.tokens) * step.sizes.hidden * step.recipe.itemsize


def _layer(
    step: TrainingStep, layer: LayerSizes, seconds: Mapping[Heads, AttentionSeconds], machine: Machine
) -> tuple[_Parts, _Parts]:
    """Return the parts of forward, and of backward with what is recomputed in it."""
    forward, backward, lora = _Parts(), _Parts(), step.recipe.lora
    rate, sizes = machine.flops * machine.matmul_share, step.sizes
    for block in layer.blocks:
        tensor = 2 * gather_seconds(_row_bytes(step), sizes.tp, machine) * block.gathers
        sent = float(step.tokens) * sum(module.sent for module in block.modules) * step.recipe.itemsize
        expert = 2 * exchange_seconds(sent, sizes.ep, machine) if sent else 0.0
        flop = 2.0 * step.tokens * (block.active_params + block.products + block.adapters(lora))
        frozen = 2.0 * step.tokens * block.active_params if lora else 0.0
        moved = step.tokens * block.kept_bytes(step.recipe.itemsize, lora)
        times = AttentionSeconds(0.0, 0.0, 0.0) if block.heads is None else seconds[block.heads]
        products, between = flop / rate, KEPT_FORWARD * moved / machine.copy_bandwidth
        one = _Parts(times.forward, products, between, tensor, expert)
        in_chunks = step.recipe.mlp_chunks > 1
        again = step.recipe.checkpointing + (in_chunks and block.kind in ("mlp", "experts"))
        if in_chunks and block.kind not in ("mlp", "experts"):  # its norms run once more
            norms = sum(module.kept_bytes(step.recipe.itemsize, lora) for module in block.modules if module.tiled)
            backward += _Parts(between=KEPT_FORWARD * step.tokens * norms / machine.copy_bandwidth)
        forward += one
        back = 2 * products - frozen / rate, KEPT_BACKWARD / KEPT_FORWARD * between
        backward += _Parts(times.backward, *back, tensor, expert)
        backward += one.times(again)
    return forward, backward


def _exposed_seconds(
    step: TrainingStep, params: tuple[int, int, int], hidden_behind: tuple[float, float], machine: Machine
) -> float:
    """Return how much of two gathers of parameters, and of reducing the gradient of those that train, is not hidden
    behind the layer; `params` are all parameters, those that train, and those of experts."""
    sizes, (held, trained, experts) = step.sizes, params
    separate = experts if sizes.ep > 1 else 0
    dense, sparse = axis_machine(machine, sizes.tp), axis_machine(machine, sizes.ep)
    gather, reduce = (
        gather_seconds((number - separate) * itemsize, step.ranks, dense)
        + gather_seconds(separate * itemsize, step.expert_ranks, sparse)
        for number, itemsize in ((held, step.recipe.itemsize), (trained, step.recipe.state_size))
    )
    forward, backward = hidden_behind
    if not forward:  # embedding and head: they stay gathered
        return gather + reduce
    return max(gather - forward, 0.0) + max(gather + reduce - backward, 0.0)


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
    """Return the mask of these heads: the documents' mask, with their window."""
    return mask if heads.window is None else mask & masks.sliding_window(heads.window)


def widest_mask(sizes: ModelSizes, mask: Mask) -> Mask:
    """Return the mask that the layout is balanced for: that of the attentions with the widest window."""
    heads = max(sizes.attentions, key=lambda one: 1 << 60 if one.window is None else one.window, default=None)
    return mask if heads is None else mask_for(mask, heads)


def attention_plans(sizes: ModelSizes, mask: Mask, layout: Layout, options: PlanOptions) -> dict[Heads, Plan]:
    """Plan each size of attention that the model has, over one layout. `options.machine` is that of all ranks."""
    machine = options.machine if options.machine is None else axis_machine(options.machine, sizes.tp)
    return {
        heads: plan(
            mask_for(mask, heads), layout, q_heads=heads.q_heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim, dtype=options.dtype, batch=options.batch, scheme=options.scheme,
            machine=machine, keep=options.keep, fetch_bytes=options.fetch_bytes,
        )
        for heads in sizes.attentions
    }  # fmt: skip


def attention_seconds(plans: Mapping[Heads, Plan]) -> dict[Heads, AttentionSeconds]:
    """Return the times of each size of attention, from its plan."""
    times: dict[Heads, AttentionSeconds] = {}
    for heads, one in plans.items():
        chosen = one.chosen
        flop = 2.0 * (heads.head_dim + heads.v_head_dim) * float(one.scheme.work.mean())
        times[heads] = AttentionSeconds(chosen.forward_seconds, chosen.backward_seconds, flop)
    return times


def training_step(
    sizes: ModelSizes, layout: Layout, plans: Mapping[Heads, Plan], batch: int, recipe: Recipe, data_parallel: int = 1
) -> TrainingStep:
    """Return the training step of the rank with most tokens. FSDP is over the ranks of all sequences."""
    attentions: dict[Heads, AttentionBytes] = {}
    for heads, one in plans.items():
        chosen = one.chosen
        peak, inside = chosen.backward_peak
        workspace = None if chosen.workspace_bytes is None else inside
        attentions[heads] = AttentionBytes(peak, workspace, chosen.forward_peak_bytes)
    slots = layout.local_len or int(layout.num_tokens.max())
    return TrainingStep(sizes, slots * batch, layout.world_size * data_parallel, attentions, recipe)


def recipes(base: Recipe, tp: int = 1) -> list[Recipe]:
    """Return recipes from the one that needs most memory to the one that needs least, and `base`. Dtypes, adapters and
    the place of the optimizer are those of `base`. With tensor parallelism, none is in chunks.

    >>> for recipe in recipes(Recipe()):
    ...     print(recipe.words)
    no checkpointing, whole logits
    no checkpointing
    checkpointing
    checkpointing, tiled in 8 chunks
    checkpointing, offload
    checkpointing, offload, tiled in 8 chunks
    """
    plain = replace(base, checkpointing=False, offload=False, mlp_chunks=1, logits=True)
    without = replace(plain, logits=False)
    again = replace(without, checkpointing=True)
    chunked = replace(again, mlp_chunks=base.mlp_chunks if base.mlp_chunks > 1 else CHUNKS)
    all_recipes = [plain, without, again, chunked, replace(again, offload=True), replace(chunked, offload=True)]
    all_recipes = [one for one in all_recipes if tp == 1 or one.mlp_chunks == 1]
    return all_recipes if base in all_recipes else [*all_recipes, base]


# -- Tokens per second, share of a machine's peak, and price -----------------------------------------------------------


HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """The cost of a step of `tokens` tokens on `gpus` GPUs.

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
    """Operations of the model, on all GPUs together, without recomputation."""
    peak: float
    """Operations of one GPU per second."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: operations per second that the model needs, as a share of peak."""
        return self.flop / (self.seconds * self.gpus * self.peak)

    def per_billion(self, price: float) -> float:
        """Return the price of a billion tokens, where an hour of a GPU costs `price`."""
        if not math.isfinite(price) or price <= 0:
            raise PlanError(f"`price` of an hour of one GPU must be a finite number above 0, but got {price!r}.")
        return self.gpus * price * self.seconds / HOUR / self.tokens * 1e9


def model_flop(
    sizes: ModelSizes, tokens: int, seconds: Mapping[Heads, AttentionSeconds], ranks: int, lora: int = 0
) -> float:
    """Return the operations of a step as published figures of utilisation count them: 6 for each token and parameter
    that it meets (4 if it is frozen), and three times the forward pass of attention over the pairs of the mask."""
    attention = sum(number * seconds[heads].flop for heads, number in sizes.attentions.items())
    active = (sizes.whole or sizes).active_params
    weights = 4.0 * active + 6.0 * sizes.adapters(lora) if lora else 6.0 * active
    return weights * tokens + 3.0 * attention * ranks
