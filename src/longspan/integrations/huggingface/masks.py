"""What Longspan gives transformers as a mask: an object that knows what was asked for, not a tensor.

Transformers asks once per kind of layer and forward, and hands what it got to all layers of that kind.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.errors import MaskError
from longspan.integrations.huggingface.hooks.current import current
from longspan.integrations.huggingface.terms import (
    Frame,
    Kind,
    Snapshot,
    Term,
    has,
    kind_of,
    mask_of,
    per_row_alike,
    rectangle,
    term_of,
)
from longspan.masks import Mask
from longspan.versions import TRANSFORMERS, short

_SAMPLES = 64
_MOST_CHECKED = 256


_NO_TENSOR = (
    "the model computes with its mask as with a tensor (to choose keys, or to add biases to it), and Longspan's is"
    " not one: no tensor of all pairs is made. Use attn_implementation='eager' for this model."
)


class _NoTensorError(MaskError, AttributeError):
    """So that `hasattr` says no."""


class LayerMask:
    """What transformers asked for one kind of layer, as values; layers of that kind are all handed this object.

    No dataclass: wrappers of modules take those apart to look for tensors. `generate()` with a static cache makes masks
    ahead and handles them as it would a tensor; `ndim`, `shape` and `contiguous` are for it.
    """

    ndim = 4

    def __init__(
        self, batch: int, q: tuple[int, int], kv: tuple[int, int], term: Term, padding: NDArray[np.bool_] | None
    ) -> None:
        self.batch = batch
        self.q_offset, self.q_len = q
        self.kv_offset, self.kv_len = kv
        self.term = term
        self.padding = padding
        self.documents: tuple[Any, Any] | None = None
        """The position_ids that were last looked at for documents, and what was found: the same for all layers."""
        self._separated: dict[bytes, Mask] = {}
        self.sequence: Any = current()
        """The sequence over ranks that a model was running on when it asked for this mask, or None. So layers get to
        know of it that are given nothing else, also when they are computed again in backward."""
        self.is_whole = self.sequence is not None and not self.sequence.is_cut
        """Whether this is about the whole sequence although there are ranks."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, self.q_len, self.kv_len

    def contiguous(self) -> LayerMask:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise _NoTensorError(_NO_TENSOR)

    def __getitem__(self, index: Any) -> Any:
        raise MaskError(_NO_TENSOR)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskError(_NO_TENSOR)

    @property
    def is_square(self) -> bool:
        """Whether queries and keys are the same tokens: no cache, no cross attention."""
        return (self.q_offset, self.q_len) == (self.kv_offset, self.kv_len)

    @cached_property
    def kind(self) -> Kind | None:
        return kind_of(self.term)

    @cached_property
    def frame(self) -> Frame:
        base = min(self.q_offset, self.kv_offset)
        return Frame(base, max(self.q_offset + self.q_len, self.kv_offset + self.kv_len) - base)

    @property
    def rows(self) -> tuple[int, int]:
        """Where in the frame queries and keys begin."""
        return self.q_offset - self.frame.base, self.kv_offset - self.frame.base

    @cached_property
    def rule(self) -> Mask:
        """What the closures say, before padding and beyond the queries and keys that there are."""
        return mask_of(self.term, self.frame, self.batch)

    @cached_property
    def mask(self) -> Mask:
        """The mask of the frame."""
        frame, (q, kv) = self.frame, self.rows
        whole = self.rule
        if self.padding is not None:
            whole = whole & mask_of(Term("padding", table=self.padding), frame, self.batch)
        if not self.is_square:
            whole = whole & rectangle((q, q + self.q_len), (kv, kv + self.kv_len), frame.length)
        return whole

    def separated(self, numbers: NDArray[Any]) -> Mask:
        """The mask, with documents apart: `numbers` (rows, S) says which document each token belongs to."""
        key = numbers.tobytes()
        if key not in self._separated:
            self._separated[key] = self.mask & per_row_alike(numbers)
        return self._separated[key]


def layer_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | LayerMask | None = None,
    **_: Any,
) -> LayerMask:
    """What `AttentionMaskInterface` calls. Other arguments say how a tensor would be made: none is."""
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function as mask_function
    if isinstance(attention_mask, LayerMask):
        return _reuse(attention_mask, (batch_size, 1, q_length, kv_length), mask_function)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise MaskError(
            f"attention_mask of shape {tuple(attention_mask.shape)} was given. Longspan takes the mask of padding,"
            f" (batch, tokens); pass other masks as a function: or_mask_function=, and_mask_function=."
        )
    padding = None if attention_mask is None else Snapshot(attention_mask).array.astype(bool)
    q, kv = (int(q_offset), int(q_length)), (int(kv_offset), int(kv_length))
    mask = LayerMask(int(batch_size), q, kv, term_of(mask_function), padding)
    _check_reading(mask, mask_function)
    return mask


def _reuse(mask: LayerMask, shape: tuple[int, ...], mask_function: Callable[..., Any]) -> LayerMask:
    """A mask that comes back through attention_mask=, if it is the one that is asked for."""
    kind = kind_of(term_of(mask_function))
    if mask.shape != shape or mask.kind != kind:
        raise MaskError(
            f"a mask of shape {mask.shape} and kind {mask.kind} was passed as attention_mask=, but the model needs one"
            f" of shape {shape} and kind {kind}. Pass the 2-D mask of padding instead."
        )
    return mask


def _check_reading(mask: LayerMask, mask_function: Callable[..., Any]) -> None:
    """Asks transformers' function about a few pairs: another version may mean something else by the same closures.

    Once for closures of one kind and shape, since what they mean is a matter of the version: asking about tables on a
    device waits for it.
    """
    if has(mask.term, "function") or not (mask.batch and mask.q_len and mask.kv_len):
        return
    about = _outline(mask.term), mask.shape, mask.q_offset, mask.kv_offset
    if about in _checked:
        return
    step = np.arange(_SAMPLES, dtype=np.int64)
    b, q = step * 5 % mask.batch, step * 0x9E3779B1 % mask.q_len + mask.q_offset
    kv = mask.kv_offset + np.where(step % 2, step * 0x85EBCA6B, q - mask.kv_offset - step // 8) % mask.kv_len
    device = next(_tables(mask_function), torch.zeros(0)).device
    asked = [torch.as_tensor(x, device=device) for x in (b, np.zeros_like(b), q, kv)]
    answers = mask_function(*asked).cpu().numpy()
    reading, base = np.zeros(len(b), dtype=bool), mask.frame.base
    for row in range(mask.batch):
        here = b == row
        reading[here] = mask.rule.allows(q[here] - base, kv[here] - base, row=row)
    wrong = np.flatnonzero(np.broadcast_to(answers, b.shape) != reading)
    if len(wrong):
        at = int(wrong[0])
        raise MaskError(
            f"transformers' mask says {not reading[at]} about query {q[at]} and key {kv[at]} of row {b[at]}, and"
            f" Longspan read {reading[at]} out of it. This version of transformers has masks that Longspan does not"
            f" know: use one that was tested ({', '.join(map(short, TRANSFORMERS))}), or another attn_implementation."
        )
    while len(_checked) >= _MOST_CHECKED:
        del _checked[next(iter(_checked))]
    _checked[about] = None


_checked: dict[Any, None] = {}
"""Kinds of closures whose reading was right, by shape; the oldest of very many are forgotten."""


def _outline(term: Term) -> tuple[Any, ...]:
    """The closures that a term was read from, without the numbers in their tables."""
    return term.name, term.size, tuple(map(_outline, term.parts))


def _tables(function: Callable[..., Any]) -> Any:
    """Tensors that a closure holds."""
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, Tensor):
            yield content
        for part in content if isinstance(content, tuple) else ():
            yield from _tables(part)
