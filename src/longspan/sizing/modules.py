"""Parts of a model as numbers: parameters, and bytes saved per token until backward.

A module saves what PyTorch's autograd saves when transformers' own modules run, without fused kernels: a linear layer
its input, an RMSNorm its input in float32 and the normalised rows, a gated MLP four rows of its inner size. A tensor
that two of them keep is counted by the first. One token of a gated MLP of 4 -> 8 -> 4, in bfloat16: its input, gate,
what the activation gives, up, and their product, 4 + 4 * 8 numbers of 2 bytes:

>>> mlp = Block("mlp", gated_mlp(4, 8))
>>> mlp.params, mlp.kept_bytes(2)
(96, 72)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longspan.sizing.config import ConfigReader

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
    """In the model's dtype, in addition to what is kept: gradients of rows, while its backward runs."""
    active: int | None = None
    """Parameters that one token meets; all of them, unless a router chooses experts."""
    products: int = 0
    """Multiplications of one token, forward, without those with parameters: a recurrence's. A plan has attention's."""
    adapted: int = 0
    """Inputs and outputs of a linear layer: parameters of its LoRA adapter for each rank."""
    for_weight: int = 0
    """Of what is kept, what only the gradient of its own weight needs; of a linear layer, its adapter needs it too."""
    for_weight_wide: int = 0
    """The same in float32."""
    sent: int = 0
    """Numbers of one token that go to its experts, and come back, where those are on other ranks."""
    tiled: int = 0
    """Numbers of its input, which is all that it keeps of a token where `training.tile` runs it over a few tokens at a
    time; 0: it is not tiled by itself."""

    @property
    def active_params(self) -> int:
        return self.params if self.active is None else self.active

    def kept_bytes(self, itemsize: int, lora: int = 0) -> int:
        """Return the bytes of one token that are kept; with `lora`, where weights are frozen, next to adapters of this
        rank, which keep their inner rows."""
        copies = self.kept_copies * WIDE if itemsize < WIDE else 0
        size = self.kept * itemsize + self.kept_wide * WIDE + copies + self.kept_indices * INDEX
        if lora:
            size += (lora * (self.adapted > 0) - self.for_weight) * itemsize - self.for_weight_wide * WIDE
        return size


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
    gathers: bool = True
    """Whether tensor parallelism gathers its input and reduces its output."""

    @property
    def params(self) -> int:
        return sum(module.params for module in self.modules)

    @property
    def active_params(self) -> int:
        return sum(module.active_params for module in self.modules)

    @property
    def expert_params(self) -> int:
        return sum(module.params for module in self.modules if module.name == "experts")

    @property
    def products(self) -> int:
        return sum(module.products for module in self.modules)

    def adapters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank, one for each linear layer."""
        return rank * sum(module.adapted for module in self.modules)

    def kept_bytes(self, itemsize: int, lora: int = 0) -> int:
        """Return the bytes of one token that are kept until backward."""
        return sum(module.kept_bytes(itemsize, lora) for module in self.modules)

    @property
    def working(self) -> int:
        """Numbers of one token, in addition to those kept, while the backward of its largest module runs."""
        return max(module.working for module in self.modules)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """A layer, which is checkpointed and gathered as a whole."""

    blocks: tuple[Block, ...]

    @property
    def params(self) -> int:
        return sum(block.params for block in self.blocks)

    @property
    def active_params(self) -> int:
        return sum(block.active_params for block in self.blocks)

    @property
    def expert_params(self) -> int:
        return sum(block.expert_params for block in self.blocks)

    def adapters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank."""
        return sum(block.adapters(rank) for block in self.blocks)

    def kept_bytes(self, itemsize: int, lora: int = 0) -> int:
        """Return the bytes of one token that are kept until backward."""
        return sum(block.kept_bytes(itemsize, lora) for block in self.blocks)


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """A language model: layers between an embedding and a head."""

    model_type: str
    hidden: int
    vocab: int
    tied: bool
    layers: tuple[LayerSizes, ...]
    last: ModuleSizes
    """The norm after the last layer."""
    config: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The configuration that these are the sizes of."""
    tp: int = 1
    ep: int = 1
    whole: ModelSizes | None = field(default=None, repr=False)
    """Where these are the sizes of one rank's part, with tensor and expert parallelism: those of the model."""

    @property
    def row(self) -> int:
        """Numbers of one token between blocks, which tensor parallelism shards."""
        return -(-self.hidden // self.tp)

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
    def expert_params(self) -> int:
        return sum(layer.expert_params for layer in self.layers)

    def adapters(self, rank: int) -> int:
        """Return the parameters of LoRA adapters of this rank, in layers only: head and embedding have none."""
        return sum(layer.adapters(rank) for layer in self.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for layer in self.layers for block in layer.blocks)

    @property
    def num_blocks(self) -> dict[str, int]:
        """Number of blocks by kind: full, window, recurrent, convolution, mlp, experts."""
        return dict(Counter(block.kind for block in self.blocks))

    @property
    def attentions(self) -> dict[Heads, int]:
        """Number of attentions by size."""
        return dict(Counter(block.heads for block in self.blocks if block.heads is not None))


def linear(name: str, n_in: int, n_out: int, *, bias: bool = False, keeps: bool = True) -> ModuleSizes:
    """A linear layer. Of several that share an input, one `keeps` it."""
    return ModuleSizes(name, n_in * n_out + n_out * bias, n_in * keeps, adapted=n_in + n_out)


def norm(name: str, features: int, groups: int = 1, *, style: str = "rms") -> ModuleSizes:
    """A norm over features, of so many groups of them (heads). The styles: "rms" multiplies by its weight in the
    model's dtype, "wide" (Gemma, OLMo 2, gpt-oss) in float32, "plain" is a LayerNorm without weights."""
    size = features * groups
    if style == "plain":
        return ModuleSizes(name, 0, 0, size + 2 * groups, tiled=size)
    if style == "wide":
        return ModuleSizes(name, features, 0, 2 * size + groups, for_weight_wide=size, tiled=size)
    return ModuleSizes(name, features, size, size + groups, for_weight=size, tiled=size)


def core(heads: Heads, *, values: int | None = None) -> ModuleSizes:
    """Longspan's attention, which keeps q, k, v, its output, and a logsumexp for each query head. `values` is the size
    of the row of which v is a part, if it is one."""
    q, k = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    v = heads.kv_heads * heads.v_head_dim if values is None else values
    out = heads.q_heads * heads.v_head_dim
    # In backward, gradients of q, k and v: that of the output takes the place of the next projection's input.
    return ModuleSizes("attention", 0, q + k + v + out, heads.q_heads, working=q + k + v)


def gated_mlp(hidden: int, inner: int, *, bias: bool = False, keeps: bool = True) -> tuple[ModuleSizes, ...]:
    """down(act(gate) * up): gate, act(gate), up and the product are kept."""
    return (
        linear("gate", hidden, inner, bias=bias, keeps=keeps),
        linear("up", hidden, inner, bias=bias, keeps=False),
        ModuleSizes("activation", 0, 3 * inner, working=2 * inner),
        linear("down", inner, hidden, bias=bias),
    )


def plain_mlp(hidden: int, inner: int, *, bias: bool = False, keeps: bool = True) -> tuple[ModuleSizes, ...]:
    """down(act(up)): the input and the output of the activation are kept."""
    return (
        linear("up", hidden, inner, bias=bias, keeps=keeps),
        ModuleSizes("activation", 0, inner, working=inner),
        linear("down", inner, hidden, bias=bias),
    )


def experts(
    hidden: int, total: int, active: int, inner: int, *, gated: bool = True, bias: bool = False, kept_inner: int = 0
) -> tuple[ModuleSizes, ...]:
    """A router and `total` experts, of which a token goes to `active`, by grouped products.

    Tokens are sorted by expert, so that every expert of a token has a copy of its row, and keeps what an MLP keeps:
    `kept_inner` rows of the inner size, by default 4 with a gate and 2 without.
    """
    ways = 3 if gated else 2
    one = ways * hidden * inner + bias * ((ways - 1) * inner + hidden)
    kept = active * (2 * hidden + (kept_inner or 2 * (ways - 1)) * inner)
    working = active * ((ways - 1) * inner + hidden)
    router = ModuleSizes("router", total * (hidden + bias), hidden, total, kept_indices=4 * active)
    return router, ModuleSizes("experts", total * one, kept, working=working, active=active * one, sent=active * hidden)


# -- MLPs and experts of a layer, from a configuration -----------------------------------------------------------------


def dense(reader: ConfigReader, _layer: int) -> Block:
    hidden, inner = reader.size("hidden_size"), reader.size("intermediate_size")
    return Block("mlp", gated_mlp(hidden, inner, bias=reader.flag("mlp_bias")))


def all_experts(reader: ConfigReader, _layer: int, **traits: Any) -> Block:
    """Experts in every layer, of the MLP's size (Mixtral)."""
    total, active = reader.size("num_local_experts"), reader.size("num_experts_per_tok")
    return Block(
        "experts", experts(reader.size("hidden_size"), total, active, reader.size("intermediate_size"), **traits)
    )


def gpt_oss_experts(reader: ConfigReader, layer: int) -> Block:
    """Experts with biases; clamping gate and up keeps three more rows."""
    return all_experts(reader, layer, bias=True, kept_inner=7)


def qwen_experts(reader: ConfigReader, layer: int) -> Block:
    """Experts in every layer, or in every so many, or an MLP; with an expert for all tokens, if it is named."""
    hidden, step = reader.size("hidden_size"), reader.size("decoder_sparse_step", default=1)
    total = reader.count("num_experts", "num_local_experts")
    if layer in (reader.indices("mlp_only_layers") or []) or not total or (layer + 1) % step:
        return dense(reader, layer)
    modules = experts(hidden, total, reader.size("num_experts_per_tok"), reader.size("moe_intermediate_size"))
    if reader.model_type != "qwen3_moe":
        shared = reader.size("shared_expert_intermediate_size")
        modules += (
            *gated_mlp(hidden, shared, keeps=False),
            ModuleSizes("gate of the shared expert", hidden, hidden + 1),
        )
    return Block("experts", modules)


def deepseek_experts(reader: ConfigReader, layer: int) -> Block:
    """An MLP in the first layers, then experts and one for all tokens; the router computes in float32."""
    if layer < reader.count("first_k_dense_replace"):
        return dense(reader, layer)
    hidden, inner = reader.size("hidden_size"), reader.size("moe_intermediate_size")
    routed = experts(hidden, reader.size("n_routed_experts"), reader.size("num_experts_per_tok"), inner)
    shared = gated_mlp(hidden, inner * reader.size("n_shared_experts"), keeps=False)
    return Block("experts", (*routed, ModuleSizes("router's input", 0, 0, hidden), *shared))


# -- Blocks that mix tokens: attention, recurrences, convolutions ------------------------------------------------------
# A recurrence saves what the kernels that train it on GPUs save (fla for delta rules, mamba_ssm for Mamba-2): its
# inputs, and per head and token a row of its chunk's triangle or its output. A kernel in plain PyTorch saves more.


DELTA_CHUNK = 64
"""Tokens of a chunk in fla: of each head and token a row of the chunk's inverted triangle is kept."""
SSD_CHUNK = 256
"""Tokens of a chunk in mamba_ssm."""


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """The differences between attentions of families."""

    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: str | None = None
    """None, or the style of a norm of every head's queries and keys."""
    whole_qk_norm: bool = False
    """The norm is over all heads together."""
    gated: bool = False
    """The output is multiplied by a sigmoid of a gate as large (Qwen3-Next)."""
    sinks: bool = False


def attention(hidden: int, heads: Heads, norms: tuple[ModuleSizes, ...], traits: AttentionTraits) -> Block:
    """Projections, norms of queries and keys, attention, and the output projection."""
    q, k = heads.q_heads * heads.head_dim, heads.kv_heads * heads.head_dim
    v, out = heads.kv_heads * heads.v_head_dim, heads.q_heads * heads.v_head_dim
    modules = [
        *norms,
        linear("q", hidden, q * (2 if traits.gated else 1), bias=traits.qkv_bias),
        linear("k", hidden, k, bias=traits.qkv_bias, keeps=False),
        linear("v", hidden, v, bias=traits.qkv_bias, keeps=False),
        core(heads),
        linear("out", out, hidden, bias=traits.out_bias),
    ]
    if traits.qk_norm is not None:
        sizes = (
            ((q, 1), (k, 1))
            if traits.whole_qk_norm
            else ((heads.head_dim, heads.q_heads), (heads.head_dim, heads.kv_heads))
        )
        modules += [norm(f"{name} norm", *size, style=traits.qk_norm) for name, size in zip("qk", sizes, strict=True)]
    if traits.gated:  # the sigmoid and what it multiplies
        modules.append(ModuleSizes("gate", 0, 2 * out))
    if traits.sinks:
        modules.append(ModuleSizes("sinks", heads.q_heads))
    return Block("full" if heads.window is None else "window", tuple(modules), heads)


def latent_attention(reader: ConfigReader, norms: tuple[ModuleSizes, ...]) -> Block:
    """Multi-head latent attention (DeepSeek): keys and values come from a small row that all heads share."""
    hidden, num_heads, v_dim = reader.size("hidden_size"), reader.size("num_attention_heads"), reader.size("v_head_dim")
    nope_dim, rope_dim = reader.size("qk_nope_head_dim"), reader.size("qk_rope_head_dim")
    kv_rank, q_rank = reader.size("kv_lora_rank"), reader.optional_size("q_lora_rank")
    bias, head_dim = reader.flag("attention_bias"), nope_dim + rope_dim
    heads = Heads(num_heads, num_heads, head_dim, v_dim)
    both = num_heads * (nope_dim + v_dim)
    if q_rank is None:
        query = (linear("q", hidden, num_heads * head_dim),)
    else:
        query = (
            linear("q down", hidden, q_rank, bias=bias),
            norm("q norm", q_rank),
            linear("q up", q_rank, num_heads * head_dim),
        )
    modules = (
        *norms,
        *query,
        linear("kv down", hidden, kv_rank + rope_dim, bias=bias, keeps=False),
        norm("kv norm", kv_rank),
        linear("kv up", kv_rank, both),
        core(heads, values=both),
        linear("out", num_heads * v_dim, hidden, bias=bias),
    )
    return Block("full", modules, heads)


def gated_delta(reader: ConfigReader, norms: tuple[ModuleSizes, ...]) -> Block:
    """A gated delta rule: projections, a convolution, the recurrence, a gated norm, and the output projection."""
    hidden, width = reader.size("hidden_size"), reader.size("linear_conv_kernel_dim")
    key_heads, value_heads = reader.size("linear_num_key_heads"), reader.size("linear_num_value_heads")
    key_dim, value_dim = reader.size("linear_key_head_dim"), reader.size("linear_value_head_dim")
    values = value_heads * value_dim
    channels = 2 * key_heads * key_dim + values
    # in a chunk: scores, the triangle and what it multiplies; with the state: read twice, written once
    inside = DELTA_CHUNK * (3 * key_dim + 2 * value_dim)
    recurrence = ModuleSizes(
        "recurrence",
        2 * value_heads,
        channels + (DELTA_CHUNK + 1) * value_heads,
        5 * value_heads,
        working=2 * key_heads * key_dim + 2 * values,
        products=value_heads * (inside + 3 * key_dim * value_dim),
    )
    modules = (
        *norms,
        linear("q, k, v, gate", hidden, channels + values),
        linear("beta, decay", hidden, 2 * value_heads, keeps=False),
        ModuleSizes("convolution", channels * width, 2 * channels),
        recurrence,
        ModuleSizes("gated norm", value_dim, 2 * values, 3 * values + value_heads),
        linear("out", values, hidden),
    )
    return Block("recurrent", modules)


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """A Mamba-2 mixer."""

    heads: int
    head_dim: int
    groups: int
    state: int
    width: int
    conv_bias: bool = True
    bias: bool = False
    out_bias: bool = False
    gated_norm: bool = True


def mamba2(hidden: int, sizes: MambaSizes, norms: tuple[ModuleSizes, ...]) -> Block:
    """One projection, a convolution, the recurrence, a gated norm, and the output projection."""
    inner = sizes.heads * sizes.head_dim
    channels = inner + 2 * sizes.groups * sizes.state
    projected = inner + channels + sizes.heads
    gate = (
        ModuleSizes("gated norm", inner, inner, 2 * inner + 1, 2 * inner, working=6 * inner)  # three rows in float32
        if sizes.gated_norm
        else ModuleSizes("gate", 0, 2 * inner)
    )
    # in a chunk: scores of a group, and what they multiply; the state is written and read
    scores = sizes.groups * SSD_CHUNK * sizes.state
    products = scores + sizes.heads * sizes.head_dim * (SSD_CHUNK + 2 * sizes.state)
    return Block(
        "recurrent",
        (
            *norms,
            linear("in", hidden, projected, bias=sizes.bias),
            # rows with their halo, a copy over ranks, and what the activation keeps
            ModuleSizes("convolution", channels * (sizes.width + sizes.conv_bias), 2 * channels),
            ModuleSizes(
                "recurrence",
                3 * sizes.heads,
                projected + channels + inner,
                sizes.heads,
                working=channels + inner,
                products=products,
            ),
            gate,
            linear("out", inner, hidden, bias=sizes.out_bias),
        ),
    )


def short_convolution(hidden: int, width: int, norms: tuple[ModuleSizes, ...], *, bias: bool) -> Block:
    """C * conv(B * x), with B, C and x from one projection (LFM2)."""
    return Block(
        "convolution",
        (
            *norms,
            linear("in", hidden, 3 * hidden, bias=bias),
            ModuleSizes("convolution", hidden * (width + bias), 5 * hidden, working=3 * hidden),
            linear("out", hidden, hidden, bias=bias),
        ),
    )
