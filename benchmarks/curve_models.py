"""Two small language models in plain PyTorch, in the style of Llama and of Gemma.

They are independent of ranks: attention is passed in, as a function of q, k, v and the kind of layer. Both have RMS
norms, rotary embeddings and grouped query heads. Llama: gated SiLU, full attention. Gemma: gated GELU, norms before and
after, scaled embeddings, windows in every other layer, soft caps on scores and on logits.

Shapes: B rows, T tokens of this rank, D features, H heads, F features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Attend = Callable[[Tensor, Tensor, Tensor, str], Tensor]
"""attend(q, k, v, kind) of (B, H, T, F) tensors; kind is "full" or "window"."""


@dataclass(frozen=True)
class Style:
    """Sizes and options of a model."""

    name: str
    kinds: tuple[str, ...]
    """The kind of every layer."""
    gemma: bool = False
    window: int | None = None
    softcap: float | None = None
    logit_cap: float | None = None
    vocab: int = 128
    dim: int = 64
    hidden: int = 160
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16


LLAMA = Style("llama", ("full", "full"))
GEMMA = Style("gemma", ("window", "full", "window"), gemma=True, window=48, softcap=5.0, logit_cap=12.0)
"""Caps are low, so that they have an effect in a small model; window and full layers alternate."""


def rotated(x_BHTF: Tensor, positions_BT: Tensor) -> Tensor:
    """Apply rotary embeddings: rotate pairs of features by an angle that grows with the position."""
    half = x_BHTF.shape[-1] // 2
    speeds = 10_000.0 ** (-torch.arange(half, device=x_BHTF.device) / half)
    angles = (positions_BT[:, None, :, None] * speeds).to(x_BHTF.dtype)
    cos, sin = angles.cos(), angles.sin()
    a, b = x_BHTF[..., :half], x_BHTF[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    """Attention and a gated feed-forward network, each with a residual connection."""

    def __init__(self, style: Style, kind: str) -> None:
        super().__init__()
        self.style, self.kind = style, kind
        q_size, kv_size = style.q_heads * style.head_dim, style.kv_heads * style.head_dim
        self.sizes = (q_size, kv_size, kv_size)
        self.qkv = nn.Linear(style.dim, q_size + 2 * kv_size, bias=False)
        self.mixed = nn.Linear(q_size, style.dim, bias=False)
        self.gate_up = nn.Linear(style.dim, 2 * style.hidden, bias=False)
        self.down = nn.Linear(style.hidden, style.dim, bias=False)
        self.before = nn.ModuleList(nn.RMSNorm(style.dim, eps=1e-6) for _ in range(2))
        self.after = nn.ModuleList(nn.RMSNorm(style.dim, eps=1e-6) if style.gemma else nn.Identity() for _ in range(2))

    def forward(self, x_BTD: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        parts = self.qkv(self.before[0](x_BTD)).split(self.sizes, -1)
        q, k, v = (part.unflatten(-1, (-1, self.style.head_dim)).transpose(1, 2) for part in parts)
        out = attend(rotated(q, positions_BT), rotated(k, positions_BT), v, self.kind)
        x_BTD = x_BTD + self.after[0](self.mixed(out.transpose(1, 2).flatten(2)))
        gate, up = self.gate_up(self.before[1](x_BTD)).chunk(2, -1)
        gate = F.gelu(gate, approximate="tanh") if self.style.gemma else F.silu(gate)
        return x_BTD + self.after[1](self.down(gate * up))


class Decoder(nn.Module):
    """Return logits of the next token."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style = style
        self.tokens = nn.Embedding(style.vocab, style.dim)
        self.layers = nn.ModuleList(Layer(style, kind) for kind in style.kinds)
        self.norm = nn.RMSNorm(style.dim, eps=1e-6)
        self.head = nn.Linear(style.dim, style.vocab, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.05)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, attend: Attend) -> Tensor:
        x = self.tokens(ids_BT)
        if self.style.gemma:
            x = x * self.style.dim**0.5
        for layer in self.layers:
            x = layer(x, positions_BT, attend)
        logits = self.head(self.norm(x))
        cap = self.style.logit_cap
        return logits if cap is None else cap * torch.tanh(logits / cap)
