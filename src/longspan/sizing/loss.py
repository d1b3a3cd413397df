"""What the loss takes: whole logits, or slabs of them."""

from __future__ import annotations

from longspan.sizing.modules import WIDE, ModelSizes
from longspan.sizing.recipe import MemoryLine, Recipe

WHOLE = 12
"""Bytes of a logit of all tokens at once, in transformers' own loss: bfloat16, float32, its log-softmax and gradient;
measured."""
SLAB_PARTS, SLAB_LEAST, SLAB_MOST = 24, 1 << 24, 1 << 30
"""As in `longspan.training.slabs`, which needs torch; a test holds them together."""


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
