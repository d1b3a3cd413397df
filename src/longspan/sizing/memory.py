"""Memory of one training step on the rank with the most, line by line, at each moment of the step.

A step's peak is the largest sum over its moments, not the sum of everything: logits are gone when a layer is computed
again, and gradients of parameters come while inputs of layers go. Parameters, gradients and optimizer are those of
FSDP over all ranks (`fully_shard` for each layer and for the whole): shards stay, and a layer's parameters are gathered
while it runs and while the one before it does.

Counted are the bytes of tensors, as PyTorch requests them. Fragmentation and the memory of CUDA and NCCL are not
counted: `RESERVE` is an assumption for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.planning.steps import ITEMSIZE
from longspan.sizing.modules import WIDE, Block, Heads, LayerSizes, ModelSizes

# -- The recipe of a training step, and a line of its memory -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes under a name, and why they are there."""

    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """What saves memory, and the dtypes.

    >>> Recipe(offload=True).words
    'checkpointing, offload'
    """

    checkpointing: bool = True
    """Every layer is computed again in backward from its input."""
    offload: bool = False
    """Those inputs wait on the host."""
    mlp_chunks: int = 1
    """MLPs run over so many runs of tokens, one after the other, each computed again in backward."""
    logits: bool = False
    """Logits of all tokens are there at once."""
    dtype: str = "bfloat16"
    """What is computed in."""
    state: str = "float32"
    """Of parameters, gradients and optimizer, as they are kept and summed."""

    def __post_init__(self) -> None:
        if self.mlp_chunks < 1:
            raise PlanError(f"{self.mlp_chunks} chunks of an MLP were asked for. One is the whole.")
        for name in (self.dtype, self.state):
            if name not in ITEMSIZE:
                raise PlanError(f"dtype {name!r:.40} was asked for. Choose one of {', '.join(ITEMSIZE)}.")
        if self.state_size < self.itemsize:
            raise PlanError(
                f"parameters kept in {self.state} were asked for, and computing in {self.dtype}. Keep them in"
                f" {self.dtype} or a wider dtype."
            )
        if self.offload and not self.checkpointing:
            raise PlanError(
                "inputs of layers are sent to the host where layers are computed again. Leave checkpointing on."
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def state_size(self) -> int:
        return ITEMSIZE[self.state]

    @property
    def words(self) -> str:
        """What is switched on."""
        chunks = f"MLP in {self.mlp_chunks} chunks" if self.mlp_chunks > 1 else ""
        first = "checkpointing" if self.checkpointing else "no checkpointing"
        others = (self.offload, "offload"), (chunks, chunks), (self.logits, "whole logits")
        return ", ".join((first, *(word for on, word in others if on)))


# -- Memory of the loss: whole logits, or slabs of them ----------------------------------------------------------------


WHOLE = 12
"""Bytes of a logit of all tokens at once, in transformers' own loss: bfloat16, float32, its log-softmax and gradient;
measured."""
SLAB_PARTS, SLAB_LEAST, SLAB_MOST = 24, 1 << 24, 1 << 30
"""As in `longspan.training.head`, which needs torch; a test holds them together."""


def slab_rows(tokens: int, words: int, itemsize: int) -> int:
    """Tokens whose logits are there at once, where they never are whole.

    >>> slab_rows(32768, 128256, 4)
    1365
    """
    row = max(words, 1) * itemsize
    size = min(max(tokens * row // SLAB_PARTS, SLAB_LEAST), SLAB_MOST)
    return max(min(size // row, tokens), 1)


def loss_lines(sizes: ModelSizes, tokens: int, recipe: Recipe) -> tuple[MemoryLine, ...]:
    """Lines of the moment in which the loss is computed."""
    rows = MemoryLine("gradient of hidden states", tokens * sizes.hidden * recipe.itemsize, recipe.dtype)
    if recipe.logits:
        text = f"{tokens:,} tokens x {sizes.vocab:,} words at {WHOLE} bytes"
        return MemoryLine("logits", tokens * sizes.vocab * WHOLE, text), rows
    some = slab_rows(tokens, sizes.vocab, WIDE)
    head = sizes.vocab * sizes.hidden * (WIDE + recipe.itemsize)
    return (
        MemoryLine("slab of logits", some * sizes.vocab * WIDE * 6 // 5, f"{some:,} tokens at a time, and a fifth"),
        MemoryLine("gradient of the head", head, f"its sum in float32, and in {recipe.dtype}"),
        rows,
    )


# -- Memory of a step --------------------------------------------------------------------------------------------------


RESERVE = 3 << 30
"""Bytes for CUDA itself, NCCL's buffers and gaps between tensors. Assumed; it was measured nowhere."""


@dataclass(frozen=True, slots=True)
class AttentionBytes:
    """What one attention takes beside its own tensors, while it runs."""

    peak: int
    """Remote keys and values, messages, and sums in float32."""
    workspace: int | None
    """What its kernel allocates inside; None where it is not known."""


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a step and what is in memory then."""

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
        """The moment that takes most."""
        return max(self.moments, key=lambda moment: moment.size)


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """A model, the tokens of the rank that has most, how many ranks there are, and what attentions take."""

    sizes: ModelSizes
    tokens: int
    ranks: int
    attentions: Mapping[Heads, AttentionBytes]
    recipe: Recipe


def step_memory(step: TrainingStep) -> StepMemory:
    """What is in memory at each moment.

    >>> from longspan.sizing.families import sizes_of
    >>> tiny = sizes_of({"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
    ...                  "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100})
    >>> heads, = tiny.attentions
    >>> found = step_memory(TrainingStep(tiny, 1000, 4, {heads: AttentionBytes(10_000, 0)}, Recipe()))
    >>> [(line.name, line.size) for line in found.moments[-1].lines]
    [('parameters', 107328), ('optimizer', 214656), ('gradients', 107328), ('square roots', 107328)]
    """
    loss = loss_lines(step.sizes, step.tokens, step.recipe)
    before, after = (*_state(step, grads=False), _root(step)), (*_state(step, grads=True), _root(step))
    kept, head = _kept(step), _head_gradient(step)
    passed = _last_rows(step)
    worst = max(range(len(step.sizes.layers)), key=lambda i: sum(x.size for x in _backward(step, step.sizes.layers[i])))
    layer = step.sizes.layers[worst]
    first = MemoryLine("input of a layer", _input(step), "the only one that is left")
    if not step.recipe.checkpointing:
        first = MemoryLine("activations", _layer_kept(step, layer), "of the only layer that is left")
    moments = (
        Moment("loss", (*before, kept, passed, *loss)),
        Moment("backward of the last layer", (*before, kept, *head, *_fsdp(step), *_backward(step, layer))),
        Moment("backward of the first layer", (*after, first, *head, *_fsdp(step), *_backward(step, layer))),
        Moment("end of backward", (*after, *_root_gradient(step))),
        Moment("optimizer", (*_state(step, grads=True), _square_roots(step))),
    )
    return StepMemory(moments, _input(step) * len(step.sizes.layers) if step.recipe.offload else 0)


def _state(step: TrainingStep, *, grads: bool) -> tuple[MemoryLine, ...]:
    """What a rank keeps of parameters, all the time."""
    shard, size, dtype = -(-step.sizes.params // step.ranks), step.recipe.state_size, step.recipe.state
    of = (
        f"{step.sizes.params / 1e9:,.2f}e9 / {step.ranks:,} ranks"
        if step.ranks > 1
        else f"{step.sizes.params / 1e9:,.2f}e9"
    )
    lines = (
        MemoryLine("parameters", shard * size, f"{of}, {dtype}"),
        MemoryLine("optimizer", 2 * shard * size, f"two moments of Adam, {dtype}"),
    )
    return (*lines, MemoryLine("gradients", shard * size, f"of all parameters, {dtype}")) if grads else lines


def _root(step: TrainingStep) -> MemoryLine:
    size = step.sizes.root_params * step.recipe.itemsize
    return MemoryLine("embedding and head", size, f"whole, as FSDP gathers them, {step.recipe.dtype}")


def _input(step: TrainingStep) -> int:
    return step.tokens * step.sizes.hidden * step.recipe.itemsize


def _kept(step: TrainingStep) -> MemoryLine:
    """What layers leave for backward."""
    layers, recipe = step.sizes.layers, step.recipe
    if not recipe.checkpointing:
        size = sum(_layer_kept(step, layer) for layer in layers)
        return MemoryLine("activations", size, f"all that {len(layers)} layers keep, no checkpointing")
    if recipe.offload:
        return MemoryLine(
            "inputs of layers", 2 * _input(step), f"2 of {len(layers)} on their way; the rest on the host"
        )
    return MemoryLine("inputs of layers", len(layers) * _input(step), f"{len(layers)} layers, checkpointed")


def _block_kept(step: TrainingStep, block: Block) -> int:
    """What a block keeps; of an MLP in chunks the inputs, and one chunk."""
    size, recipe = block.kept_bytes(step.recipe.itemsize), step.recipe
    if block.kind not in ("mlp", "experts") or recipe.mlp_chunks == 1:
        return step.tokens * size
    rows = -(-step.tokens // recipe.mlp_chunks)
    return rows * size + (step.tokens - rows) * step.sizes.hidden * recipe.itemsize


def _layer_kept(step: TrainingStep, layer: LayerSizes) -> int:
    return sum(_block_kept(step, block) for block in layer.blocks)


def _backward(step: TrainingStep, layer: LayerSizes) -> tuple[MemoryLine, ...]:
    """A layer's backward at its worst: what its blocks up to one keep, and that one's gradients at work. What
    follows that block in the layer is gone by then."""
    return max(_backwards(step, layer), key=lambda lines: sum(line.size for line in lines))


def _backwards(step: TrainingStep, layer: LayerSizes) -> Iterator[tuple[MemoryLine, ...]]:
    recipe, again = step.recipe, "computed again" if step.recipe.checkpointing else ""
    for number, block in enumerate(layer.blocks):
        kept = sum(_block_kept(step, one) for one in layer.blocks[: number + 1])
        rows = step.tokens
        if block.kind in ("mlp", "experts"):
            rows = -(-rows // recipe.mlp_chunks)
        working = rows * block.working * recipe.itemsize + 2 * _input(step)
        lines = [MemoryLine("gradients of rows", working, f"backward of {block.kind}")]
        if recipe.checkpointing:
            lines.insert(0, MemoryLine("one layer", kept, f"{again}: {kept / step.tokens:,.0f} bytes a token"))
        if block.heads is not None:
            lines += _attending(step.attentions[block.heads])
        yield tuple(lines)


def _attending(found: AttentionBytes) -> list[MemoryLine]:
    lines = [MemoryLine("remote K/V", found.peak, "with messages and float32 sums, from the plan")]
    if found.workspace is None:
        return [*lines, MemoryLine("inside kernels", 0, "not known of this kernel")]
    return [*lines, MemoryLine("inside kernels", found.workspace, "what attention's kernel allocates, from the plan")]


def _fsdp(step: TrainingStep) -> tuple[MemoryLine, ...]:
    """What FSDP gathers and reduces around one layer."""
    largest = max(one.params for one in step.sizes.layers)
    gathered = 2 * largest * step.recipe.itemsize
    reduced = largest * (step.recipe.itemsize + step.recipe.state_size)
    return (
        MemoryLine("gathered layers", gathered, f"this one and the next, {step.recipe.dtype}"),
        MemoryLine("gradient of a layer", reduced, f"whole; also in {step.recipe.state}, being reduced"),
    )


def _last_rows(step: TrainingStep) -> MemoryLine:
    last = step.tokens * step.sizes.last.kept_bytes(step.recipe.itemsize)
    return MemoryLine("last hidden states", last + _input(step), "with what the last norm keeps")


def _head_gradient(step: TrainingStep) -> tuple[MemoryLine, ...]:
    """FSDP reduces the head's gradient with the embedding's, at the end."""
    size = step.sizes.vocab * step.sizes.hidden * step.recipe.itemsize
    return (MemoryLine("gradient of the head", size, f"{step.recipe.dtype}, until the embedding's is there"),)


def _root_gradient(step: TrainingStep) -> tuple[MemoryLine, ...]:
    size = step.sizes.root_params * (step.recipe.itemsize + step.recipe.state_size)
    what = f"of embedding and head; also in {step.recipe.state}, being reduced"
    return (MemoryLine("gradient", size, what),)


def _square_roots(step: TrainingStep) -> MemoryLine:
    shard = -(-step.sizes.params // step.ranks)
    return MemoryLine("square roots", shard * step.recipe.state_size, "Adam's, of all parameters; none if it is fused")
