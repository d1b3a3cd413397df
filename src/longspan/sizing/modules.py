"""What a model is made of, as numbers: modules of blocks of layers, each with its parameters and with what it keeps of
a token until backward.

A module keeps what PyTorch's autograd saves when transformers' own modules run, without fused kernels: a linear layer
its input, an RMSNorm its input in float32 and the normalised rows, a gated MLP four rows of its inner size. A tensor
that two of them keep is counted by the first. One token of a gated MLP of 4 -> 8 -> 4, in bfloat16: its input, gate,
what the activation gives, up, and their product, 4 + 4 * 8 numbers of 2 bytes:

>>> mlp = Block("mlp", gated_mlp(4, 8))
>>> mlp.params, mlp.kept_bytes(2)
(96, 72)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

WIDE, INDEX = 4, 8


@dataclass(frozen=True, slots=True)
class ModuleSizes:
    """One module: its parameters, and numbers that it keeps of one token."""

    name: str
    params: int = 0
    kept: int = 0
    """In the dtype that the model computes in."""
    kept_wide: int = 0
    """In float32."""
    kept_copies: int = 0
    """In float32, where the model computes in another dtype: copies that float32 does not need."""
    kept_indices: int = 0
    """In int64."""
    working: int = 0
    """In the model's dtype, beside what is kept: gradients of rows, while its backward runs."""
    active: int | None = None
    """Parameters that one token meets; all, unless experts are chosen from."""
    products: int = 0
    """Multiplications of one token, forward, beside those with parameters: a recurrence's. A plan has attention's."""

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes that are kept of one token."""
        copies = self.kept_copies * WIDE if itemsize < WIDE else 0
        return self.kept * itemsize + self.kept_wide * WIDE + copies + self.kept_indices * INDEX


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of an attention."""

    q_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    window: int | None = None
    """Tokens before its own that a token sees, as in `masks.sliding_window`; None: all of them."""


@dataclass(frozen=True, slots=True)
class Block:
    """A residual branch of a layer: an attention, a recurrence, a convolution, an MLP or experts."""

    kind: str
    modules: tuple[ModuleSizes, ...]
    heads: Heads | None = None

    @property
    def params(self) -> int:
        return sum(module.params for module in self.modules)

    @property
    def active_params(self) -> int:
        return sum(module.params if module.active is None else module.active for module in self.modules)

    @property
    def products(self) -> int:
        return sum(module.products for module in self.modules)

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes that are kept of one token until backward."""
        return sum(module.kept_bytes(itemsize) for module in self.modules)

    @property
    def working(self) -> int:
        """Numbers of one token, beside those that are kept, while the backward of its hungriest module runs."""
        return max(module.working for module in self.modules)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What is checkpointed and gathered as one."""

    blocks: tuple[Block, ...]

    @property
    def params(self) -> int:
        return sum(block.params for block in self.blocks)

    @property
    def active_params(self) -> int:
        return sum(block.active_params for block in self.blocks)

    def kept_bytes(self, itemsize: int) -> int:
        """Bytes that are kept of one token until backward."""
        return sum(block.kept_bytes(itemsize) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A language model: layers between an embedding and a head."""

    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[LayerSizes, ...]
    last: ModuleSizes
    """What follows the last layer: a norm."""

    @property
    def root_params(self) -> int:
        """Parameters outside of layers: embedding, last norm, head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.last.params

    @property
    def params(self) -> int:
        """All parameters."""
        return self.root_params + sum(layer.params for layer in self.layers)

    @property
    def active_params(self) -> int:
        """Parameters that one token meets; those of the embedding and the head included."""
        return self.root_params + sum(layer.active_params for layer in self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for layer in self.layers for block in layer.blocks)

    @property
    def num_blocks(self) -> dict[str, int]:
        """How many blocks of each kind there are: full, window, recurrent, convolution, mlp, experts."""
        return dict(Counter(block.kind for block in self.blocks))

    @property
    def attentions(self) -> dict[Heads, int]:
        """How many attentions of each size there are."""
        return dict(Counter(block.heads for block in self.blocks if block.heads is not None))


def linear(name: str, n_in: int, n_out: int, *, bias: bool = False, keeps: bool = True) -> ModuleSizes:
    """A linear layer. Of several that share an input, one `keeps` it."""
    return ModuleSizes(name, n_in * n_out + n_out * bias, n_in * keeps)


def norm(name: str, features: int, groups: int = 1, *, style: str = "rms") -> ModuleSizes:
    """A norm over features, of so many groups of them (heads). The styles: "rms" multiplies by its weight in the
    model's dtype, "wide" (Gemma, OLMo 2, gpt-oss) in float32, "plain" is a LayerNorm without weights."""
    size = features * groups
    if style == "plain":
        return ModuleSizes(name, 0, 0, size + 2 * groups)
    if style == "wide":
        return ModuleSizes(name, features, 0, 2 * size + groups)
    return ModuleSizes(name, features, size, size + groups)


def core(heads: Heads, *, values: int | None = None) -> ModuleSizes:
    """What Longspan's attention keeps: q, k, v, its output, and a logsumexp for each query head. `values` is the row
    of which v is a part, if it is one."""
    q, k = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    v = heads.kv_heads * heads.v_head_dim if values is None else values
    out = heads.q_heads * heads.v_head_dim
    return ModuleSizes("attention", 0, q + k + v + out, heads.q_heads, working=q + k + v + out)


def gated_mlp(hidden: int, inner: int, *, bias: bool = False, keeps: bool = True) -> tuple[ModuleSizes, ...]:
    """down(act(gate) * up): gate, act(gate), up and the product are kept."""
    return (
        linear("gate", hidden, inner, bias=bias, keeps=keeps),
        linear("up", hidden, inner, bias=bias, keeps=False),
        ModuleSizes("activation", 0, 3 * inner, working=2 * inner),
        linear("down", inner, hidden, bias=bias),
    )


def plain_mlp(hidden: int, inner: int, *, bias: bool = False, keeps: bool = True) -> tuple[ModuleSizes, ...]:
    """down(act(up)): what the activation keeps and gives are kept."""
    return (
        linear("up", hidden, inner, bias=bias, keeps=keeps),
        ModuleSizes("activation", 0, inner, working=inner),
        linear("down", inner, hidden, bias=bias),
    )


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Experts of one inner size, and how many of them a token goes to."""

    total: int
    active: int
    inner: int
    gated: bool = True
    bias: bool = False
    kept_inner: int | None = None
    """Rows of the inner size that an expert keeps; 4 where it is gated and 2 where not, unless it does more."""


def experts(hidden: int, choice: ExpertSizes, *, keeps: bool = True) -> tuple[ModuleSizes, ...]:
    """A router and its experts, by grouped products: tokens are sorted by expert, so that every expert of a token has
    a copy of its row, and keeps what an MLP keeps."""
    ways = 3 if choice.gated else 2
    one = ways * hidden * choice.inner + choice.bias * ((ways - 1) * choice.inner + hidden)
    rows = 2 * (ways - 1) if choice.kept_inner is None else choice.kept_inner
    kept = choice.active * (2 * hidden + rows * choice.inner)
    router = ModuleSizes(
        "router", choice.total * (hidden + choice.bias), hidden * keeps, choice.total, kept_indices=4 * choice.active
    )
    working = choice.active * ((ways - 1) * choice.inner + hidden)
    return router, ModuleSizes("experts", choice.total * one, kept, working=working, active=choice.active * one)
