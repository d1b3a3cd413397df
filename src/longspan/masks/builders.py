"""Masks that differ by head or batch row, and masks from functions mask_mod(b, h, q_idx, kv_idx)."""

from __future__ import annotations

from longspan._compile import run_eagerly
from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.causal_and_window import full
from longspan.masks.functions import Function, MaskMod, Reader, check_signature
from longspan.masks.mask import Mask
from longspan.masks.plane import Plane
from longspan.spans import check_int

MAX_PLANES = 1 << 20


@run_eagerly
def per_head(*masks: Mask) -> Mask:
    """Head h uses `masks[h]`; their number must be the number of query heads.

    >>> mask = per_head(masks.causal(), masks.sliding_window(1))
    >>> mask.allows(5, 2, head=0).item(), mask.allows(5, 2, head=1).item()
    (True, False)
    """
    masks, length = _with_common_length("per_head", masks)
    if any(mask.num_heads > 1 for mask in masks):
        raise MaskError("per_head() got a mask that already differs from head to head. Nest per_row instead.")
    num_rows = max(mask.num_rows for mask in masks)
    if any(mask.num_rows not in (1, num_rows) for mask in masks):
        raise MaskError("per_head() got masks with different numbers of batch rows. Give all the same number.")
    return _share_equal_planes(
        "per_head", masks, length, [[mask.plane(row, 0) for mask in masks] for row in range(num_rows)]
    )


@run_eagerly
def per_row(*masks: Mask) -> Mask:
    """Batch row b uses `masks[b]`, all over one layout; their number must be the batch size.

    >>> mask = per_row(masks.documents([2, 4]), masks.documents([5, 1]))
    >>> mask.allows(4, 1, row=0).item(), mask.allows(4, 1, row=1).item()
    (False, True)
    """
    masks, length = _with_common_length("per_row", masks)
    if any(mask.num_rows > 1 for mask in masks):
        raise MaskError("per_row() got a mask that already differs from row to row. List every row once.")
    num_heads = max(mask.num_heads for mask in masks)
    if any(mask.num_heads not in (1, num_heads) for mask in masks):
        raise MaskError("per_row() got masks with different numbers of heads. Give all the same number.")
    return _share_equal_planes(
        "per_row", masks, length, [[mask.plane(0, head) for head in range(num_heads)] for mask in masks]
    )


def _with_common_length(name: str, masks: tuple[Mask, ...]) -> tuple[tuple[Mask, ...], int | None]:
    if not masks:
        raise MaskError(
            f"{name}() needs at least one mask. Pass one for every head or batch row, as in {name}(causal(), a)."
        )
    for number, mask in enumerate(masks):
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise MaskError(
                f"{name}() takes masks, one argument each, but argument {number} is {type(mask).__name__}. Unpack a"
                f" list with *, and wrap functions with masks.from_mask_mod."
            )
    lengths = {mask.seq_len for mask in masks if mask.seq_len is not None}
    if len(lengths) > 1:
        raise MaskError(
            f"{name}() joins masks of one sequence length, but got lengths {sorted(lengths)}. Pad the shorter ones with"
            f" a last document."
        )
    length = next(iter(lengths), None)
    return masks if length is None else tuple(mask.resized(length) for mask in masks), length


def _share_equal_planes(name: str, masks: tuple[Mask, ...], length: int | None, grid: list[list[Plane]]) -> Mask:
    """Return a mask in which equal planes are one object, so that later stages see which heads and rows agree."""
    unique: dict[Plane, Plane] = {}
    shared = tuple(tuple(unique.setdefault(plane, plane) for plane in row) for row in grid)
    names = ", ".join([mask.name for mask in masks[:3]] + [f"and {len(masks) - 3} more"] * (len(masks) > 3))
    return Mask(shared, length, f"{name}({names})")


@run_eagerly
def from_mask_mod(
    mask_mod: MaskMod,
    seq_len: int | None = None,
    *,
    within: Mask | None = None,
    rows: int | None = None,
    heads: int | None = None,
    name: str | None = None,
) -> Mask:
    """The mask that a function decides; it is not called for pairs outside `within`, which are hidden.

    A function that uses `b` needs `rows` (the batch size), one that uses `h` needs `heads`.

    >>> mask = from_mask_mod(lambda b, h, q, kv: (q - kv) % 2 == 0, within=masks.causal())
    >>> mask.allows([4, 4, 2], [2, 3, 4]).tolist()
    [True, False, False]
    """
    if not callable(mask_mod):
        raise MaskError(f"from_mask_mod() takes a function (b, h, q_idx, kv_idx), but got {type(mask_mod).__name__}.")
    check_signature(mask_mod, ("b", "h", "q_idx", "kv_idx"), "mask_mod", MaskError)
    if within is not None and not isinstance(within, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise MaskError(f"within is a mask, as in within=masks.causal(), but got {type(within).__name__}.")
    within = full(seq_len) if within is None else within
    if seq_len is not None:
        within = within.resized(seq_len)
    if not within.is_structured or within.num_heads * within.num_rows != 1:
        raise MaskError(f"within={within} must be one structured plane. Combine other masks with & afterwards.")
    region, reader = within.plane().sure, Reader(mask_mod)

    def indices(count: int | None, name: str) -> list[int | None]:
        if count is None:
            return [None]
        return list(range(check_int(count, name, "from_mask_mod()", MaskError, low=1, high=MAX_PLANES)))

    columns = indices(heads, "heads")
    grid = tuple(
        tuple(Plane(bd.empty(), region, Function(mask_mod, row, head, reader)) for head in columns)
        for row in indices(rows, "rows")
    )
    return Mask(grid, within.seq_len, name or getattr(mask_mod, "__name__", type(mask_mod).__name__))
