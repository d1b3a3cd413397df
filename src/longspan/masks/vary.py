"""Masks that differ from head to head or from batch row to batch row."""

from __future__ import annotations

from longspan.errors import MaskError
from longspan.masks.mask import Grid, Mask
from longspan.masks.plane import Plane


def _common_length(name: str, masks: tuple[Mask, ...]) -> tuple[tuple[Mask, ...], int | None]:
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
            f"{name}() joins masks of one sequence length, but lengths {sorted(lengths)} were given. Pad the shorter"
            f" ones with a last document that nobody sees."
        )
    if not lengths:
        return masks, None
    length = lengths.pop()
    return tuple(mask.resized(length) for mask in masks), length


def _shared(grid: list[tuple[Plane, ...]]) -> Grid:
    """Equal planes become one object, so that later stages see at once which heads and rows agree."""
    seen: dict[Plane, Plane] = {}
    return tuple(tuple(seen.setdefault(plane, plane) for plane in row) for row in grid)


def per_head(*masks: Mask) -> Mask:
    """Head h uses `masks[h]`; their number must be the number of query heads.

    >>> mask = per_head(causal(), sliding_window(1))
    >>> mask.allows(5, 2, head=0).item(), mask.allows(5, 2, head=1).item()
    (True, False)
    """
    masks, length = _common_length("per_head", masks)
    if any(mask.num_heads > 1 for mask in masks):
        raise MaskError("per_head() was given a mask that already differs from head to head. Nest per_row instead.")
    num_rows = max(mask.num_rows for mask in masks)
    if any(mask.num_rows not in (1, num_rows) for mask in masks):
        raise MaskError("per_head() was given masks with different numbers of batch rows. Give all the same number.")
    grid = [tuple(mask.plane(row, 0) for mask in masks) for row in range(num_rows)]
    return Mask(_shared(grid), length, f"per_head({', '.join(mask.name for mask in masks[:3])}{_more(masks)})")


def per_row(*masks: Mask) -> Mask:
    """Batch row b uses `masks[b]`, all over one layout; their number must be the batch size.

    >>> from longspan.masks.document_masks import documents
    >>> mask = per_row(documents([2, 4]), documents([5, 1]))
    >>> mask.allows(4, 1, row=0).item(), mask.allows(4, 1, row=1).item()
    (False, True)
    """
    masks, length = _common_length("per_row", masks)
    if any(mask.num_rows > 1 for mask in masks):
        raise MaskError("per_row() was given a mask that already differs from row to row. List every row once.")
    num_heads = max(mask.num_heads for mask in masks)
    if any(mask.num_heads not in (1, num_heads) for mask in masks):
        raise MaskError("per_row() was given masks with different numbers of heads. Give all the same number.")
    grid = [tuple(mask.plane(0, head) for head in range(num_heads)) for mask in masks]
    return Mask(_shared(grid), length, f"per_row({', '.join(mask.name for mask in masks[:3])}{_more(masks)})")


def _more(masks: tuple[Mask, ...]) -> str:
    return f", and {len(masks) - 3} more" if len(masks) > 3 else ""
