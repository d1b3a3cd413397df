"""Masks given as a function, in FlexAttention's form mask_mod(b, h, q_idx, kv_idx)."""

from __future__ import annotations

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.causal_masks import full
from longspan.masks.functions.elementwise import check_signature
from longspan.masks.functions.predicate import Function, MaskMod
from longspan.masks.mask import Mask
from longspan.masks.plane import Plane
from longspan.span import whole

MAX_PLANES = 1 << 20


def from_mask_mod(
    mask_mod: MaskMod,
    seq_len: int | None = None,
    *,
    within: Mask | None = None,
    rows: int | None = None,
    heads: int | None = None,
    name: str | None = None,
) -> Mask:
    """The mask that a function decides; pairs outside `within` are hidden without asking it.

    A function that uses `b` needs `rows` (the batch size), one that uses `h` needs `heads`.

    >>> from longspan.masks import causal
    >>> mask = from_mask_mod(lambda b, h, q, kv: (q - kv) % 2 == 0, within=causal())
    >>> mask.allows([4, 4, 2], [2, 3, 4]).tolist()
    [True, False, False]
    """
    if not callable(mask_mod):
        raise MaskError(
            f"from_mask_mod takes a function (b, h, q_idx, kv_idx), but {type(mask_mod).__name__} was given."
        )
    check_signature(mask_mod, ("b", "h", "q_idx", "kv_idx"), "mask_mod", MaskError)
    if within is not None and not isinstance(within, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MaskError(f"within is a mask, as in within=masks.causal(), but {type(within).__name__} was given.")
    within = full(seq_len) if within is None else within
    if seq_len is not None:
        within = within.resized(seq_len)
    if not within.is_structured or within.num_heads * within.num_rows != 1:
        raise MaskError(f"within={within} must be one structured plane. Combine other masks with & afterwards.")
    region = within.plane().sure
    grid = tuple(
        tuple(Plane(bd.empty(), region, Function(mask_mod, row, head)) for head in _indices(heads, "heads"))
        for row in _indices(rows, "rows")
    )
    return Mask(grid, within.seq_len, name or getattr(mask_mod, "__name__", type(mask_mod).__name__))


def _indices(count: int | None, name: str) -> list[int | None]:
    if count is None:
        return [None]
    return list(range(whole(count, name, "from_mask_mod()", MaskError, low=1, high=MAX_PLANES)))
