"""Blocks that mix tokens: attention, and what hybrids have beside it.

A recurrence keeps what the kernels keep that train it on GPUs (fla for delta rules, mamba_ssm for Mamba-2): its inputs,
and per head and token a row of its chunk's triangle or its output. A kernel written in plain PyTorch keeps more.
"""

from __future__ import annotations

from dataclasses import dataclass

from longspan.sizing.modules import Block, Heads, ModuleSizes, core, linear, norm

DELTA_CHUNK = 64
"""Tokens of a chunk in fla: of each head and token a row of the chunk's inverted triangle is kept."""
SSD_CHUNK = 256
"""Tokens of a chunk in mamba_ssm."""


@dataclass(frozen=True, slots=True)
class AttentionTraits:
    """What attentions of different families differ in."""

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
    """Projections, norms of queries and keys, attention, and the way back."""
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


@dataclass(frozen=True, slots=True)
class LatentSizes:
    """Multi-head latent attention (DeepSeek)."""

    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    q_rank: int | None
    bias: bool = False


def latent_attention(hidden: int, sizes: LatentSizes, norms: tuple[ModuleSizes, ...]) -> Block:
    """Keys and values from a small row that all heads share; attention itself has whole heads."""
    head_dim = sizes.nope_dim + sizes.rope_dim
    heads = Heads(sizes.heads, sizes.heads, head_dim, sizes.v_dim)
    both = sizes.heads * (sizes.nope_dim + sizes.v_dim)
    if sizes.q_rank is None:
        query = (linear("q", hidden, sizes.heads * head_dim),)
    else:
        query = (
            linear("q down", hidden, sizes.q_rank, bias=sizes.bias),
            norm("q norm", sizes.q_rank),
            linear("q up", sizes.q_rank, sizes.heads * head_dim),
        )
    return Block(
        "full",
        (
            *norms,
            *query,
            linear("kv down", hidden, sizes.kv_rank + sizes.rope_dim, bias=sizes.bias, keeps=False),
            norm("kv norm", sizes.kv_rank),
            linear("kv up", sizes.kv_rank, both),
            core(heads, values=both),
            linear("out", sizes.heads * sizes.v_dim, hidden, bias=sizes.bias),
        ),
        heads,
    )


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """A gated delta rule: heads of keys and of values, and the convolution before it."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int


def gated_delta(hidden: int, sizes: DeltaSizes, norms: tuple[ModuleSizes, ...]) -> Block:
    """Projections, a convolution, the recurrence, a gated norm, and the way back."""
    values = sizes.value_heads * sizes.value_dim
    channels = 2 * sizes.key_heads * sizes.key_dim + values
    repeated = 2 * sizes.value_heads * sizes.key_dim
    # in a chunk: scores, the triangle and what it multiplies; with the state: read twice, written once
    inside = DELTA_CHUNK * (3 * sizes.key_dim + 2 * sizes.value_dim)
    products = sizes.value_heads * (inside + 3 * sizes.key_dim * sizes.value_dim)
    return Block(
        "recurrent",
        (
            *norms,
            linear("q, k, v, gate", hidden, channels + values),
            linear("beta, decay", hidden, 2 * sizes.value_heads, keeps=False),
            ModuleSizes("convolution", channels * sizes.width, 2 * channels),
            ModuleSizes(
                "recurrence",
                2 * sizes.value_heads,
                repeated + channels + (DELTA_CHUNK + 1) * sizes.value_heads,
                5 * sizes.value_heads,
                working=repeated + 2 * values,
                products=products,
            ),
            ModuleSizes("gated norm", sizes.value_dim, 2 * values, 3 * values + sizes.value_heads),
            linear("out", values, hidden),
        ),
    )


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
    """One projection, a convolution, the recurrence, a gated norm, and the way back."""
    inner = sizes.heads * sizes.head_dim
    channels = inner + 2 * sizes.groups * sizes.state
    projected = inner + channels + sizes.heads
    gate = (
        ModuleSizes("gated norm", inner, inner, 2 * inner + 1, 2 * inner)
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
