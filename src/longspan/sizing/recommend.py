"""Recommend configurations of a training step: search, keep what fits, and order by predicted time per token.

The search tries all meshes of data x context parallel that use every GPU and the kernels that `kernel="auto"` may run
there. On each mesh it tries the scheme that "auto" chooses, a ring, an all-to-all, and an exchange with limited remote
K/V; checkpointing, offload of layer inputs, MLPs and norms in chunks, and shards with their optimizer on the host. The
time of the last is a lower bound, so it comes after all others.

Tensor and expert parallelism are as the request states them. They are not searched, and neither is what changes
results: adapters, dtypes, and the length of the sequence. All of these are proposed where nothing fits. Pipeline
parallelism is not modelled.

The set of configurations does not depend on memory, so that more memory never gives a slower one.

>>> from longspan.planning.machine import machines_of_gpu
>>> from longspan.sizing import built_in_config, sizes_of
>>> request = Request(sizes_of(built_in_config("qwen3-8b")), 32768, 8, machines_of_gpu("h100"), memory=80)
>>> first = recommend(request).best[0]
>>> first.data_parallel * first.ranks, first.memory.peak.size <= request.room
(8, True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from longspan import layouts, masks
from longspan.errors import LongspanError, PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.kernel_memory import why_not
from longspan.planning.machine import GPU_MEMORY, Machine, machines_of_gpu
from longspan.planning.plan import Plan
from longspan.planning.steps import Sizes
from longspan.sizing.memory import (
    RESERVE,
    Recipe,
    StepMemory,
    step_memory,
    step_without_attention,
    why_no_lora,
)
from longspan.sizing.modules import Heads, ModelSizes
from longspan.sizing.parallel import axis_machine, split_model
from longspan.sizing.time import (
    PlanOptions,
    StepCost,
    StepTime,
    attention_plans,
    attention_seconds,
    model_flop,
    recipes,
    step_time,
    training_step,
    why_no_time,
    widest_mask,
)

NUMBER = 3
DIFFERENCE = 0.01
"""Of two configurations, the slower one is listed only if it needs at least this share less memory."""
SCHEMES = ("auto", "ring", "all_to_all")
MAX_LIMITED_RANKS = 32
"""Ranks up to which an exchange with limited remote K/V is tried, where all GPUs share a sequence: its stages, and the
time to plan them, grow with the ranks."""
MAX_GPUS, MAX_NODES = 1024, 16
"""The search for GPUs on which a step fits tries powers of two up to this, and this many whole nodes."""
SPLITS = (2, 4, 8)
"""Numbers of ranks for tensor and expert parallelism that are proposed where nothing fits."""
LORA = 16
"""Rank of adapters that is proposed where nothing fits."""


@dataclass(frozen=True)
class Request:
    """A model, its sequences, and the GPUs it is trained on."""

    sizes: ModelSizes
    seq_len: int
    gpus: int
    machines: tuple[Machine, ...]
    """The GPU with each kernel that may be used."""
    memory: int
    """GB of a GPU."""
    recipe: Recipe = field(default_factory=Recipe)
    """Dtypes, adapters, and whether logits are whole; the other options are searched."""
    mask: Mask | None = None
    """One causal document by default."""
    batch: int = 1
    scheme: str | None = None
    """The only scheme to use."""
    keep: bool = False
    fetch_bytes: int | None = None
    """The only limit of remote K/V to use, as in `longspan.plan`. By default an exchange is also tried whose limit is
    the size of a rank's own K/V."""
    tp: int = 1
    """Ranks that share heads and inner sizes (tensor parallel)."""
    ep: int = 1
    """Ranks that share experts (expert parallel); they are ranks of the other axes as well."""

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.gpus > 1 << 16:
            raise PlanError(f"`gpus` must be from 1 to {1 << 16}, but got {self.gpus}.")
        part = self.part  # raises an error if tp or ep does not divide the model
        if self.gpus % self.tp:
            raise PlanError(f"`tp` must divide the {self.gpus} GPUs, but got {self.tp}. Use a divisor.")
        for machine in self.machines:  # raises an error if an axis does not divide a node
            axis_machine(machine, self.tp)
            axis_machine(machine, self.ep)
        on_host = replace(self.recipe, offload_optimizer=True)
        step = step_without_attention(part, 1, self.sequence_ranks, on_host)
        whys = [self._why_no_kernel(machine) or why_no_time(step, machine) for machine in self.machines]
        if None not in whys:
            raise PlanError(
                f"configurations are ordered by time, which is not known: {whys[0]}. Use bfloat16, or another machine."
            )
        usable = [machine for machine, why in zip(self.machines, whys, strict=True) if why is None]
        object.__setattr__(self, "machines", tuple(usable))

    def _why_no_kernel(self, machine: Machine) -> str | None:
        """Return why attentions of the model would run another kernel than the machine's."""
        for heads in self.part.attentions:
            sizes = Sizes(heads.q_heads, heads.kv_heads, heads.head_dim, heads.v_head_dim, self.recipe.itemsize)
            why = why_not(machine.kernel, sizes, functions=not self.planned_mask.is_structured)
            if why is not None:
                return why
        return None

    @cached_property
    def part(self) -> ModelSizes:
        """The part of the model that a rank of tensor and expert parallelism has."""
        return split_model(self.sizes, self.tp, self.ep)

    @property
    def sequence_ranks(self) -> int:
        """Ranks of data and context parallel."""
        return self.gpus // self.tp

    @cached_property
    def planned_mask(self) -> Mask:
        """The mask of the documents, without windows."""
        return masks.causal(self.seq_len) if self.mask is None else self.mask

    @property
    def room(self) -> int:
        """Bytes of a GPU for tensors."""
        return (self.memory << 30) - RESERVE

    @property
    def recipes(self) -> list[Recipe]:
        """The recipes to try."""
        choices = [replace(one, logits=self.recipe.logits) for one in recipes(self.recipe, self.tp)]
        on_host = (True,) if self.recipe.offload_optimizer else (False, True)
        return list(dict.fromkeys(replace(one, offload_optimizer=value) for value in on_host for one in choices))

    def least_bytes(self, ranks: int, recipe: Recipe) -> int:
        """Return a lower bound of memory: tokens spread evenly, and no attention."""
        tokens = -(-self.seq_len // ranks) * self.batch
        return step_memory(step_without_attention(self.part, tokens, self.sequence_ranks, recipe)).peak.size

    def plans(self, ranks: int) -> Iterator[Planned]:
        """Yield the plans of all schemes and kernels for sequences over this many ranks, each once."""
        layout = layouts.balanced(widest_mask(self.part, self.planned_mask), world_size=ranks, seq_len=self.seq_len)
        tokens, itemsize, attentions = (
            -(-self.seq_len // ranks) * self.batch,
            self.recipe.itemsize,
            self.part.attentions,
        )
        own = max((heads.kv_heads * (heads.head_dim + heads.v_head_dim) for heads in attentions), default=0)
        schemes: list[tuple[str, int | None]]
        if self.scheme is None:
            schemes = [(scheme, self.fetch_bytes if scheme == "auto" else None) for scheme in SCHEMES]
        else:
            schemes = [(self.scheme, self.fetch_bytes)]
        has_all = 1 < ranks == self.sequence_ranks <= MAX_LIMITED_RANKS
        if self.scheme is None and self.fetch_bytes is None and own and has_all:
            schemes.append(("exchange", tokens * own * itemsize))
        for machine in self.machines:
            seen: set[tuple[str, ...]] = set()
            for scheme, limit in schemes:
                if scheme != "auto" and (ranks == 1 or not attentions) and seen:
                    continue
                if scheme == "all_to_all" and any(ranks > heads.q_heads for heads in attentions):
                    continue
                options = PlanOptions(scheme, machine, self.keep, limit, self.batch, self.recipe.dtype)
                try:
                    plans = attention_plans(self.part, self.planned_mask, layout, options)
                except LongspanError:  # the named scheme does not take this many ranks
                    continue
                stages = max((one.scheme.problem.num_stages for one in plans.values()), default=1)
                names = (*(one.scheme.name for one in plans.values()), *("in stages",) * (stages > 1))
                if names not in seen:
                    seen.add(names)
                    yield Planned(self, layout, machine, plans, limit if stages > 1 or self.fetch_bytes else None)


@dataclass(frozen=True)
class Planned:
    """Plans of all attentions of a model over some ranks, on a machine."""

    request: Request
    layout: Layout
    machine: Machine
    plans: dict[Heads, Plan]
    fetch_bytes: int | None = None

    def with_recipe(self, recipe: Recipe) -> Configuration:
        """Return the configuration with this recipe."""
        request, ranks = self.request, self.layout.world_size
        data_parallel = request.sequence_ranks // ranks
        step = training_step(request.part, self.layout, self.plans, request.batch, recipe, data_parallel)
        seconds = attention_seconds(self.plans)
        time = step_time(step, seconds, self.machine)
        tokens = request.seq_len * request.batch * data_parallel
        flop = model_flop(request.part, tokens, seconds, request.gpus, recipe.lora)
        cost = StepCost(request.gpus, tokens, time.seconds, flop, self.machine.flops)
        schemes = tuple(one.scheme.name for one in self.plans.values())
        is_known = all(one.chosen.workspace_bytes is not None for one in self.plans.values())
        memory = step_memory(step)
        return Configuration(
            self.machine, data_parallel, ranks, schemes, recipe, memory, time, cost, is_known, self.fetch_bytes,
            request.tp, request.ep,
        )  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """A mesh, a kernel, schemes and a recipe, with the memory and time of a step."""

    machine: Machine
    data_parallel: int
    ranks: int
    """Ranks that share a sequence."""
    schemes: tuple[str, ...]
    """One for each size of attention."""
    recipe: Recipe
    memory: StepMemory
    time: StepTime
    cost: StepCost
    memory_known: bool = True
    """Whether the memory that the kernel allocates is known, and counted."""
    fetch_bytes: int | None = None
    """Limit of remote K/V, as in `longspan.plan`."""
    tp: int = 1
    ep: int = 1

    @property
    def seconds_per_token(self) -> float:
        return self.time.seconds / self.cost.tokens

    @property
    def order(self) -> tuple[bool, float, int]:
        """What configurations are ordered by: known times before lower bounds, then time per token, then memory."""
        return self.time.at_least, self.seconds_per_token, self.memory.peak.size

    @property
    def scheme(self) -> str:
        """The scheme to name in a call for all attentions: "auto" if they differ."""
        return self.schemes[0] if len(set(self.schemes)) == 1 else "auto"


@dataclass(frozen=True)
class Change:
    """A change of the request with which a configuration fits."""

    option: str
    configuration: Configuration


@dataclass(frozen=True)
class Recommendation:
    """The best configurations, or why there is none."""

    request: Request
    best: tuple[Configuration, ...]
    without_install: Configuration | None = None
    """The best with PyTorch's own kernel, where another is best."""
    least: Configuration | None = None
    """Where nothing fits: the one that needs least memory."""
    changes: tuple[Change, ...] = ()
    """Where nothing fits: what would."""


def divisors(number: int) -> list[int]:
    """Return the divisors of a number.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [n for n in range(1, number + 1) if number % n == 0]


def numbers_of_gpus(node: int) -> list[int]:
    """Return powers of two and whole nodes, from the smallest.

    >>> numbers_of_gpus(8)[:8]
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    powers = {1 << power for power in range(MAX_GPUS.bit_length())}
    return sorted(powers | {node * number for number in range(1, MAX_NODES + 1) if 1 < node <= MAX_GPUS})


def recommend(request: Request) -> Recommendation:
    """Return the best configurations that fit, or what would fit."""
    fitting = list(fitting_configurations(request))
    if not fitting:
        return Recommendation(request, (), least=thriftiest(request), changes=tuple(changes_that_fit(request)))
    best = best_of(fitting)
    own = min((one for one in fitting if one.machine.kernel == "FA2"), key=lambda one: one.order, default=None)
    return Recommendation(request, best, own if best[0].machine.kernel != "FA2" else None)


def fitting_configurations(request: Request) -> Iterator[Configuration]:
    """Yield every configuration that fits."""
    for ranks in divisors(request.sequence_ranks):
        may_fit = [one for one in request.recipes if request.least_bytes(ranks, one) <= request.room]
        if may_fit:
            for planned in request.plans(ranks):
                for recipe in may_fit:
                    configuration = planned.with_recipe(recipe)
                    if configuration.memory.peak.size <= request.room:
                        yield configuration


def best_of(fitting: Iterable[Configuration]) -> tuple[Configuration, ...]:
    """Return the fastest, without those that a faster one beats in memory as well."""
    best: list[Configuration] = []
    for one in sorted(fitting, key=lambda one: one.order):
        if all(one.memory.peak.size < (1 - DIFFERENCE) * other.memory.peak.size for other in best):
            best.append(one)
    return tuple(best[:NUMBER])


def thriftiest(request: Request) -> Configuration | None:
    """Return the configuration that needs least memory: over as many ranks as a sequence can have."""
    for ranks in reversed(divisors(request.sequence_ranks)):
        configurations = [one.with_recipe(recipe) for one in request.plans(ranks) for recipe in request.recipes]
        if configurations:
            return min(configurations, key=lambda one: one.memory.peak.size)
    return None


def changes_that_fit(request: Request) -> Iterator[Change]:
    """Yield changes of the request with which it fits: more GPUs, experts or heads over several ranks, larger GPUs, and
    what changes results."""
    room = request.room
    for gpus in numbers_of_gpus(request.machines[0].node):
        if gpus <= request.gpus or gpus % request.tp or gpus % request.ep:
            continue
        more = replace(request, gpus=gpus)
        if min(more.least_bytes(more.sequence_ranks, one) for one in more.recipes) <= room:
            smallest = thriftiest(more)
            if smallest is not None and smallest.memory.peak.size <= room:
                yield Change(f"--gpus {gpus}", smallest)
                break
    changed: list[tuple[str, Request]] = [*_splits(request)]
    if not request.recipe.lora and request.tp == 1 and why_no_lora(request.sizes) is None:
        changed.append((f"--lora {LORA}", replace(request, recipe=replace(request.recipe, lora=LORA))))
    if request.recipe.state_size > request.recipe.itemsize:
        narrow = replace(request.recipe, state=request.recipe.dtype)
        changed.append((f"--state {request.recipe.dtype}", replace(request, recipe=narrow)))
    if request.machines[0].name.partition("-")[0] in GPU_MEMORY:
        larger = sorted((size, gpu) for gpu, size in GPU_MEMORY.items() if size > request.memory and gpu != "a100")
        changed += [
            (f"--gpu {gpu}", replace(request, machines=machines_of_gpu(gpu), memory=size)) for size, gpu in larger
        ]
    if request.mask is None:
        shorter = (1 << (request.seq_len - 1).bit_length() - 1 >> times for times in range(12))
        changed += [
            (f"--seq {_short(length)}", replace(request, seq_len=length)) for length in shorter if length > 1023
        ]
    found_option: set[str] = set()
    for option, other in changed:
        name = option.partition(" ")[0]
        if (
            name in found_option
            or min(other.least_bytes(other.sequence_ranks, one) for one in other.recipes) > other.room
        ):
            continue
        smallest = thriftiest(other)
        if smallest is not None and smallest.memory.peak.size <= other.room:
            found_option.add(name)
            yield Change(option, smallest)


def _splits(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests with expert or tensor parallelism that divide the model and its GPUs."""
    for name in ("ep", "tp"):
        for number in SPLITS if getattr(request, name) == 1 else ():
            try:
                yield f"--{name} {number}", replace(request, **{name: number})
            except PlanError:  # it does not divide, or the model has no experts
                continue


def _short(length: int) -> str:
    """Return a number of tokens as the command takes it.

    >>> _short(1 << 20), _short(1 << 15)
    ('1M', '32k')
    """
    return f"{length >> 20}M" if length >= 1 << 20 else f"{length >> 10}k"
