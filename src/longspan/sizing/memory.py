"""Memory of one training step on the rank that needs most, line by line, at each moment of the step.

The peak of a step is the largest sum over its moments, not the sum of everything: logits are freed before a layer is
recomputed, and gradients of parameters grow while inputs of layers are freed. Parameters, gradients and optimizer state
are those of FSDP over all ranks (`fully_shard` for each layer and for the model): shards stay, and the parameters of a
layer are gathered while it runs and while the layer before it runs. With `offload_policy=CPUOffloadPolicy()`, shards
are on the host, and Adam runs there.

With tensor or expert parallelism (`sizing.parallel`), FSDP shards a rank's part of the model: over the ranks of data
and context parallel, and its experts over all GPUs / ep.

Counted are the bytes of tensors, as PyTorch requests them. Fragmentation and the memory of CUDA and NCCL are not
counted: `RESERVE` is an assumption for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.planning.steps import ITEMSIZE
from longspan.sizing.modules import WIDE, Heads, LayerSizes, ModelSizes, ModuleSizes

RESERVE = 3 << 30
"""Bytes for CUDA itself, NCCL's buffers and gaps between tensors. An assumption, not a measurement."""
WHOLE = 12
"""Bytes of a logit of all tokens at once, in transformers' own loss: bfloat16, float32, its log-softmax and gradient;
measured."""
SLAB_PARTS, SLAB_LEAST, SLAB_MOST = 24, 1 << 24, 1 << 30
"""As in `longspan.training.loss_without_logits`, which needs torch; a test compares the two."""


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes with a name and a reason."""

    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """Options of a training step that save memory, and its dtypes.

    >>> Recipe(offload=True).words
    'checkpointing, offload'
    """

    checkpointing: bool = True
    """Every layer is recomputed in backward from its input."""
    offload: bool = False
    """The inputs of layers are kept on the host."""
    mlp_chunks: int = 1
    """MLPs and norms run over this many chunks of tokens, one after the other, each recomputed in backward, as
    `training.tile` does."""
    logits: bool = False
    """The logits of all tokens are in memory at once."""
    dtype: str = "bfloat16"
    """Dtype of computation."""
    state: str = "float32"
    """Dtype in which parameters, gradients and optimizer state are kept and reduced."""
    lora: int = 0
    """Rank of LoRA adapters of all linear layers but the head: only they train, and the rest is kept in `dtype`. 0: all
    parameters train."""
    offload_optimizer: bool = False
    """Shards of parameters, gradients and optimizer state are on the host, and Adam runs there."""

    def __post_init__(self) -> None:
        if self.lora < 0:
            raise PlanError(f"`lora` must be the rank of adapters, >= 1, but got {self.lora}. Use 0 for none.")
        if self.mlp_chunks < 1:
            raise PlanError(f"`mlp_chunks` must be >= 1, but got {self.mlp_chunks}. Use 1 for no chunks.")
        for argument in ("dtype", "state"):
            if (name := getattr(self, argument)) not in ITEMSIZE:
                raise PlanError(f"`{argument}` must be one of {', '.join(ITEMSIZE)}, but got {name!r:.40}.")
        if self.state_size < self.itemsize:
            raise PlanError(
                f"`state` must be at least as wide as `dtype`, but got state {self.state} for computing in"
                f" {self.dtype}. Keep parameters in {self.dtype} or a wider dtype."
            )
        if self.offload and not self.checkpointing:
            raise PlanError(
                "`offload` requires checkpointing: it moves the inputs of recomputed layers to the host. Leave"
                " checkpointing on."
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def state_size(self) -> int:
        return ITEMSIZE[self.state]

    @property
    def words(self) -> str:
        """The options that are on, as text."""
        chunks = f"tiled in {self.mlp_chunks} chunks" if self.mlp_chunks > 1 else ""
        first = "checkpointing" if self.checkpointing else "no checkpointing"
        lora = f"LoRA of rank {self.lora}" if self.lora else ""
        others = (
            (self.offload, "offload"), (chunks, chunks), (self.logits, "whole logits"), (lora, lora),
            (self.offload_optimizer, "optimizer on the host"),
        )  # fmt: skip
        return ", ".join((first, *(word for on, word in others if on)))


@dataclass(frozen=True, slots=True)
class AttentionBytes:
    """Memory of one attention while it runs, in addition to its own tensors."""

    peak: int
    """Remote keys and values, messages, and sums in float32, in the step of backward that needs most."""
    workspace: int | None
    """Bytes that its kernel allocates inside, in that step; None if not known."""
    forward: int = 0
    """`peak` of forward."""


@dataclass(frozen=True, slots=True)
class Moment:
    """The memory at one moment of a step."""

    name: str
    lines: tuple[MemoryLine, ...]

    @property
    def size(self) -> int:
        return sum(line.size for line in self.lines)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """All moments of a step; bytes on the host for each rank."""

    moments: tuple[Moment, ...]
    host: int = 0

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.size)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A model, the tokens of the rank that has most, the number of ranks, and the memory of attentions."""

    sizes: ModelSizes
    tokens: int
    ranks: int
    attentions: Mapping[Heads, AttentionBytes]
    recipe: Recipe

    def __post_init__(self) -> None:
        sizes, recipe = self.sizes, self.recipe
        if recipe.lora and (why := why_no_lora(sizes)) is not None:
            raise PlanError(f"`lora` must be 0 for this model: {why}. Leave it out.")
        if sizes.tp > 1 and recipe.lora:
            raise PlanError(f"`lora` must be 0 with tensor parallelism, but got {recipe.lora}. Leave one of them out.")
        if sizes.tp > 1 and recipe.mlp_chunks > 1:
            raise PlanError(
                f"`mlp_chunks` must be 1 with tensor parallelism, but got {recipe.mlp_chunks}: `training.tile` is not"
                " tested on modules that are split. Leave one of them out."
            )
        if self.ranks * sizes.tp % sizes.ep:
            raise PlanError(f"`ep` must divide the {self.ranks * sizes.tp} GPUs, but got {sizes.ep}. Use a divisor.")

    def num_trained(self, part: LayerSizes | ModelSizes) -> int:
        """Return how many parameters of a layer or model train."""
        return part.adapters(self.recipe.lora) if self.recipe.lora else part.params

    def frozen(self, part: LayerSizes | ModelSizes) -> int:
        """Return how many of them do not."""
        return part.params if self.recipe.lora else 0

    def shard(self, part: LayerSizes | ModelSizes, *, frozen: bool = False) -> int:
        """Return how many of the parameters of a layer or model that train, or of those that do not, a rank holds."""
        count = self.frozen(part) if frozen else self.num_trained(part)
        experts = part.expert_params if self.sizes.ep > 1 else 0
        return -(-(count - experts) // self.ranks) + -(-experts // self.expert_ranks)

    @property
    def expert_ranks(self) -> int:
        """Ranks that FSDP shards experts over."""
        return self.ranks * self.sizes.tp // self.sizes.ep


def step_without_attention(sizes: ModelSizes, tokens: int, ranks: int, recipe: Recipe) -> TrainingStep:
    """Return a step without remote K/V and without memory inside kernels, for lower bounds."""
    return TrainingStep(sizes, tokens, ranks, {heads: AttentionBytes(0, 0) for heads in sizes.attentions}, recipe)


def why_no_lora(sizes: ModelSizes) -> str | None:
    """Return why adapters of this model are not sized, or None: adapters are compared with those that peft makes."""
    kinds = sorted(sizes.num_blocks.keys() & {"experts", "recurrent"})
    if kinds:
        return f"adapters of {' and '.join(kinds)} layers are not sized"
    return "adapters of projections that are one matrix are not sized" if sizes.model_type == "phi3" else None


def step_memory(step: TrainingStep) -> StepMemory:
    """Return the memory at each moment of a step.

    >>> from longspan.sizing.families import sizes_of
    >>> tiny = sizes_of({"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    ...                  "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100})
    >>> heads, = tiny.attentions
    >>> memory = step_memory(TrainingStep(tiny, 1000, 4, {heads: AttentionBytes(10_000, 0)}, Recipe()))
    >>> [(line.name, line.size) for line in memory.moments[-1].lines]
    [('parameters', 107328), ('optimizer', 214656), ('gradients', 107328), ('square roots', 107328)]
    """
    sizes, recipe, layers = step.sizes, step.recipe, step.sizes.layers
    itemsize, state_size, dtype, state = recipe.itemsize, recipe.state_size, recipe.dtype, recipe.state

    # The shards of a rank, and the parameters outside of layers, which FSDP keeps gathered.
    shard, frozen = step.shard(sizes), step.shard(sizes, frozen=True)
    over = " on a rank of tp and ep" if sizes.whole is not None else ""
    over += f" / {step.ranks:,} ranks" if step.ranks > 1 else ""
    of, trains = f"{sizes.params / 1e9:,.2f}e9{over}, ", "parameters" if not recipe.lora else "adapters"
    if recipe.lora:
        parameters = (
            MemoryLine("parameters", frozen * itemsize, f"{of}{dtype}, frozen"),
            MemoryLine("adapters", shard * state_size, f"{step.num_trained(sizes) / 1e6:,.1f}e6{over}, {state}"),
        )
    else:
        parameters = (MemoryLine("parameters", shard * state_size, f"{of}{state}"),)
    optimizer = MemoryLine("optimizer", 2 * shard * state_size, f"two moments of Adam, {state}")
    gradients = MemoryLine("gradients", shard * state_size, f"of all {trains}, {state}")
    roots = MemoryLine("square roots", shard * state_size, f"Adam's, of all {trains}; none if it is fused")
    root = MemoryLine("embedding and head", sizes.root_params * itemsize, f"whole, as FSDP gathers them, {dtype}")
    largest = max(layers, key=lambda layer: layer.params)
    held, grown, last_moment = (*parameters, optimizer), (gradients,), (*parameters, optimizer, gradients, roots)
    on_host = 0
    if recipe.offload_optimizer:
        on_host = sum(line.size for line in (*held, *grown))
        size = step.shard(largest) * state_size + step.shard(largest, frozen=True) * itemsize
        held, grown, last_moment = (MemoryLine("shards in transit", 2 * size, "of two layers, from the host"),), (), ()
    before, after = (*held, root), (*held, *grown, root)

    # Rows that layers keep for backward.
    rows = _input_bytes(step)
    if not recipe.checkpointing:
        size = sum(_layer_kept(step, layer) for layer in layers)
        kept = MemoryLine("activations", size, f"all that {len(layers)} layers keep, no checkpointing")
    elif recipe.offload:
        kept = MemoryLine("inputs of layers", 2 * rows, f"2 of {len(layers)} in transit; the rest on the host")
    else:
        kept = MemoryLine("inputs of layers", len(layers) * rows, f"{len(layers)} layers, checkpointed")
    last = _kept_bytes(step, sizes.last)
    size = last + step.tokens * sizes.hidden * itemsize
    last_rows = MemoryLine("last hidden states", size, "with what the last norm keeps")

    # The layer whose backward needs most, and what FSDP gathers and reduces around one layer.
    worst = max(dict.fromkeys(layers), key=lambda layer: sum(line.size for line in _backward(step, layer)))
    gathered, reduced = step.num_trained(largest) + step.frozen(largest), step.num_trained(largest)
    around = (
        MemoryLine("gathered layers", 2 * gathered * itemsize, f"this one and the next, {dtype}"),
        MemoryLine("gradient of a layer", reduced * (itemsize + state_size), f"whole; also in {state}, being reduced"),
    )
    first = MemoryLine("input of a layer", rows, "the only one that is left")
    if not recipe.checkpointing:
        first = MemoryLine("activations", _layer_kept(step, worst), "of the only layer that is left")

    # FSDP reduces the gradient of the head with the embedding's, at the end. Both are frozen if adapters train.
    head = root_gradient = ()
    if not recipe.lora:
        why = f"{dtype}, until the embedding's is there"
        head = (MemoryLine("gradient of the head", sizes.vocab * sizes.hidden * itemsize, why),)
        why = f"of embedding and head; also in {state}, being reduced"
        root_gradient = (MemoryLine("gradient", sizes.root_params * (itemsize + state_size), why),)
    moments = (
        Moment("loss", (*before, kept, last_rows, *loss_lines(sizes, step.tokens, recipe))),
        Moment("backward of the last layer", (*before, kept, *head, *around, *_backward(step, worst))),
        Moment("backward of the first layer", (*after, first, *head, *around, *_backward(step, worst))),
        Moment("end of backward", (*after, *root_gradient)),
        Moment("optimizer", last_moment),
    )
    return StepMemory(moments, on_host + (rows * len(layers) if recipe.offload else 0))


def slab_rows(tokens: int, words: int, itemsize: int) -> int:
    """Return how many tokens have their logits in memory at once, where the logits are computed in slabs.

    >>> slab_rows(32768, 128256, 4)
    1365
    """
    row = max(words, 1) * itemsize
    size = min(max(tokens * row // SLAB_PARTS, SLAB_LEAST), SLAB_MOST)
    return max(min(size // row, tokens), 1)


def loss_lines(sizes: ModelSizes, tokens: int, recipe: Recipe) -> tuple[MemoryLine, ...]:
    """Return the lines of the moment in which the loss is computed."""
    rows = MemoryLine("gradient of hidden states", tokens * sizes.hidden * recipe.itemsize, recipe.dtype)
    if recipe.logits:
        text = f"{tokens:,} tokens x {sizes.vocab:,} words at {WHOLE} bytes"
        return MemoryLine("logits", tokens * sizes.vocab * WHOLE, text), rows
    some = slab_rows(tokens, sizes.vocab, WIDE)
    slab = MemoryLine("slab of logits", some * sizes.vocab * WIDE * 6 // 5, f"{some:,} tokens at a time, and a fifth")
    if recipe.lora:  # the head is frozen
        return slab, rows
    head = sizes.vocab * sizes.hidden * (WIDE + recipe.itemsize)
    return slab, MemoryLine("gradient of the head", head, f"its sum in float32, and in {recipe.dtype}"), rows


def _input_bytes(step: TrainingStep) -> int:
    return step.tokens * step.sizes.row * step.recipe.itemsize


def _kept_bytes(step: TrainingStep, module: ModuleSizes, *, in_chunks: bool = False, inputs: int | None = None) -> int:
    """Return the bytes that a module keeps; in chunks, those of one chunk, and of its inputs (numbers of a token)."""
    size, recipe = module.kept_bytes(step.recipe.itemsize, step.recipe.lora), step.recipe
    rows = step.tokens
    if recipe.mlp_chunks > 1 and (module.tiled or in_chunks):
        rows = -(-rows // recipe.mlp_chunks)
    inputs = module.tiled if inputs is None else inputs
    return rows * size + (step.tokens - rows) * inputs * recipe.itemsize


def _layer_kept(step: TrainingStep, layer: LayerSizes, num_blocks: int | None = None) -> int:
    """Return the bytes that the blocks of a layer, or the first of them, keep."""
    size = 0
    for number, block in enumerate(layer.blocks[:num_blocks]):
        in_chunks = block.kind in ("mlp", "experts")
        for place, module in enumerate(block.modules):
            # The input of the first norm is the layer's, and an MLP in chunks keeps its own once.
            is_first = number == place == 0 or (in_chunks and not module.tiled)
            size += _kept_bytes(step, module, in_chunks=in_chunks, inputs=0 if is_first else None)
        if in_chunks and step.recipe.mlp_chunks > 1:
            size += (step.tokens - -(-step.tokens // step.recipe.mlp_chunks)) * step.sizes.hidden * step.recipe.itemsize
    return size


def _backward(step: TrainingStep, layer: LayerSizes) -> tuple[MemoryLine, ...]:
    """Return the lines of a layer's backward at the block where they are most.

    They are what the blocks up to that one keep, and the gradients that its backward works on. The blocks after it are
    freed by then.
    """
    return max(_backward_of_blocks(step, layer), key=lambda lines: sum(line.size for line in lines))


def _backward_of_blocks(step: TrainingStep, layer: LayerSizes) -> Iterator[tuple[MemoryLine, ...]]:
    recipe = step.recipe
    for number, block in enumerate(layer.blocks):
        kept = _layer_kept(step, layer, number + 1)
        rows, inputs = step.tokens, 2
        if block.kind in ("mlp", "experts") and recipe.mlp_chunks > 1:
            rows, inputs = -(-rows // recipe.mlp_chunks), 3  # gradients of chunks are joined
        working = rows * block.working * recipe.itemsize + inputs * _input_bytes(step)
        if step.sizes.tp > 1 and block.gathers:  # the gradient of its output is gathered
            working += step.tokens * step.sizes.hidden * recipe.itemsize
        again: tuple[MemoryLine, ...] = ()
        if recipe.checkpointing:
            again = (MemoryLine("one layer", kept, f"recomputed: {kept / step.tokens:,.0f} bytes a token"),)
        rows = MemoryLine("gradients of rows", working, f"backward of {block.kind}")
        if block.heads is None:
            yield *again, rows
            continue
        attention = step.attentions[block.heads]
        why, of_plan = (
            "what attention's kernel allocates, from the plan",
            "with messages and float32 sums, from the plan",
        )
        if attention.workspace is None:
            why = "not known of this kernel"
        inside = MemoryLine("inside kernels", attention.workspace or 0, why)
        yield *again, rows, MemoryLine("remote K/V", attention.peak, of_plan), inside
        # While the layer is recomputed, only the gradient of its output exists.
        rows = MemoryLine("gradients of rows", _input_bytes(step), f"forward of {block.kind}, again")
        yield *again, rows, MemoryLine("remote K/V", attention.forward, of_plan)
