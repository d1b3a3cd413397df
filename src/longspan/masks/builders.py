"""Functions that make masks: causal, sliding window, documents, prefix, per head, per row, mask functions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import MaskError
from longspan.masks import bands as bd
from longspan.masks.bands import LIMIT, LO, length_or_none, rectangles
from longspan.masks.functions import Function, MaskMod, check_signature
from longspan.masks.mask import Grid, Mask
from longspan.masks.plane import Plane
from longspan.spans import Ints, shortened, whole

# -- Full, causal and sliding window: masks of q - kv ------------------------------------------------------------------


def diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    """Every pair with `lo <= q - kv <= hi`."""
    return _diagonal(lo, hi, length_or_none(seq_len, name), name)


@lru_cache(maxsize=64)
def _diagonal(lo: int, hi: int, seq_len: int | None, name: str) -> Mask:
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(np.array([[0, side, 0, side, lo, hi]], dtype=np.int64), seq_len, name)


def full(seq_len: int | None = None) -> Mask:
    """Every token sees every token."""
    return diagonal(-LIMIT, LIMIT, seq_len, "full()")


def causal(seq_len: int | None = None) -> Mask:
    """Every token sees itself and what came before.

    >>> print(causal().draw(8, width=4))
    ▒···
    █▒··
    ██▒·
    ███▒
    """
    return diagonal(0, LIMIT, seq_len, "causal()")


def sliding_window(left: int, right: int = 0, seq_len: int | None = None) -> Mask:
    """Every token sees `left` tokens before it, itself and `right` tokens after it.

    >>> print(sliding_window(2).draw(6, width=6))
    █·····
    ██····
    ███···
    ·███··
    ··███·
    ···███
    """
    left, right = (whole(n, name, "sliding_window()", MaskError) for n, name in ((left, "left"), (right, "right")))
    name = f"sliding_window({left})" if right == 0 else f"sliding_window({left}, {right})"
    return diagonal(-right, left, seq_len, name)


# -- Documents and chunks of packed sequences --------------------------------------------------------------------------


MAX_CHUNKS = 1 << 24


def flat_numbers(values: ArrayLike, form: str) -> NDArray[Any]:
    """The values as an array of whatever type they have; refuses lists of different lengths."""
    try:
        return np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:  # numpy's own words for ragged lists help nobody
        raise MaskError(f"{form}, but {shortened(values)} was given.") from error


def document_edges(lengths: ArrayLike) -> Ints:
    """0, and where each document ends; refuses anything that is not a list of token counts."""
    counts = flat_numbers(lengths, "document lengths are a flat list of whole numbers")
    if counts.ndim != 1 or (counts.size and not np.issubdtype(counts.dtype, np.integer)):
        raise MaskError(
            f"document lengths are a flat list of whole numbers, but an array of shape {counts.shape} and type"
            f" {counts.dtype} was given."
        )
    if counts.size and int(counts.min()) < 0:
        where = int(np.argmax(counts < 0))
        raise MaskError(f"document {where} has length {int(counts[where])}. A document has 0 tokens or more.")
    if sum(counts.tolist()) > LIMIT:  # added up by Python, whose numbers do not overflow
        raise MaskError(f"documents of {sum(counts.tolist())} tokens together were given. {LIMIT} is the limit.")
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))


def _blocks(edges: Ints, name: str) -> Mask:
    return _known_blocks(edges.tobytes(), name)


@lru_cache(maxsize=64)
def _known_blocks(text: bytes, name: str) -> Mask:
    """The same lengths give the same object: every layer and every rank's data loader asks for them again."""
    edges = np.frombuffer(text, dtype=np.int64)
    starts, stops = edges[:-1], edges[1:]
    return Mask.of_bands(rectangles(starts, stops, starts, stops), int(edges[-1]), name)


def documents(lengths: ArrayLike) -> Mask:
    """Every token sees all of its own document; lengths add up to the sequence.

    >>> print((documents([3, 1, 2])).draw(width=6))
    ███···
    ███···
    ███···
    ···█··
    ····██
    ····██
    """
    edges = document_edges(lengths)
    return _blocks(edges, f"documents({len(edges) - 1})")


def from_cu_seqlens(cu_seqlens: ArrayLike) -> Mask:
    """`documents` from cumulative lengths 0, end of the first, end of the second, ... as varlen kernels take them.

    >>> from_cu_seqlens([0, 3, 4, 6]) == documents([3, 1, 2])
    True
    """
    form = "cu_seqlens starts with 0 and then lists where each document ends, in whole numbers"
    edges = flat_numbers(cu_seqlens, form)
    plain = edges.ndim == 1 and edges.size and np.issubdtype(edges.dtype, np.integer)
    if not plain or int(edges[0]) != 0:
        raise MaskError(f"{form}, but {shortened(edges.tolist())} was given.")
    return documents(np.diff(edges))


def chunked(size: int, seq_len: int) -> Mask:
    """Every token sees all of its own chunk of `size` tokens; the last chunk may be shorter.

    >>> chunked(2, 5) == documents([2, 2, 1])
    True
    """
    size = whole(size, "size", "chunked()", MaskError, low=1)
    seq_len = whole(seq_len, "seq_len", "chunked()", MaskError)
    if seq_len > size * MAX_CHUNKS:
        raise MaskError(
            f"chunked(size={size}, seq_len={seq_len}) makes {-(-seq_len // size)} chunks; {MAX_CHUNKS} is the limit."
            f" Give larger chunks."
        )
    edges = np.append(np.arange(0, seq_len, size, dtype=np.int64), seq_len)
    return _blocks(edges, f"chunked({size})")


# -- Prefix language models and global tokens --------------------------------------------------------------------------


def prefix_lm(prefix: ArrayLike, lengths: ArrayLike | None = None, seq_len: int | None = None) -> Mask:
    """A prefix whose tokens see each other both ways, then causal tokens that see the prefix and their past.

    With `lengths` there is one prefix per document, and documents do not see each other.

    >>> print(prefix_lm(3).draw(6, width=6))
    ███···
    ███···
    ███···
    ████··
    █████·
    ██████
    """
    seq_len = length_or_none(seq_len, "prefix_lm()")
    sizes = flat_numbers(prefix, "prefix is a whole number, or one for every document")
    if sizes.size and not np.issubdtype(sizes.dtype, np.integer):
        raise MaskError(f"prefix_lm() was given prefix = {shortened(prefix)}. It counts tokens, in whole numbers.")
    if lengths is None:
        edges = np.array([0, LIMIT if seq_len is None else seq_len], dtype=np.int64)
    else:
        edges = document_edges(lengths)
        if seq_len not in (None, int(edges[-1])):
            raise MaskError(
                f"prefix_lm() was given documents of {int(edges[-1])} tokens together and seq_len = {seq_len}. Lengths"
                f" cover the sequence: leave seq_len out."
            )
        seq_len = int(edges[-1])
    starts, stops = edges[:-1], edges[1:]
    if sizes.shape not in ((), starts.shape):
        raise MaskError(
            f"prefix_lm() was given prefixes of shape {sizes.shape} for {len(starts)} documents. Give one for all, or"
            f" one for each document."
        )
    sizes = np.broadcast_to(sizes.astype(np.int64), starts.shape)
    if sizes.size and (int(sizes.min()) < 0 or bool((sizes > stops - starts).any())):
        raise MaskError(
            f"prefix_lm needs 0 <= prefix <= length for every document, but prefixes {sizes.tolist()!r:.60} were given"
            f" for lengths {(stops - starts).tolist()!r:.60}."
        )
    mid = starts + sizes
    onward = rectangles(mid, stops, starts, stops)
    onward[:, LO] = 0
    return Mask.of_bands(np.concatenate((rectangles(starts, mid, starts, mid), onward)), seq_len, "prefix_lm()")


def global_prefix(num: int, seq_len: int | None = None) -> Mask:
    """Every token sees the first `num` tokens and nothing else; made to be combined.

    >>> print(((sliding_window(1) | global_prefix(2)) & causal()).draw(6, width=6))
    █·····
    ██····
    ███···
    ████··
    ██·██·
    ██··██
    """
    num = whole(num, "num", "global_prefix()", MaskError)
    seq_len = length_or_none(seq_len, "global_prefix()")
    side = LIMIT if seq_len is None else seq_len
    return Mask.of_bands(rectangles(0, side, 0, min(num, side)), seq_len, f"global_prefix({num})")


# -- Masks that differ by head or by batch row -------------------------------------------------------------------------


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

    >>> from longspan.masks.builders import documents
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


# -- Mask functions in FlexAttention's form mask_mod(b, h, q_idx, kv_idx) ----------------------------------------------


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
