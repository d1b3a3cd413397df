"""Masks from other forms: dense boolean tables, and arguments of PyTorch's and flash-attn's attention."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan._compile import run_eagerly
from longspan.errors import LongspanError, MaskError, PlanError
from longspan.masks.bands import LIMIT, drop_empty
from longspan.masks.mask import Mask
from longspan.masks.plane import Plane
from longspan.masks.tiles import key_spans
from longspan.spans import Ints, run_table, steps_within

# -- Dense tables ------------------------------------------------------------------------------------------------------
# A row of a table sees a few spans of keys. If no new span starts, a span's ends stay or move by one from row to row,
# and such rows are one band. Causal masks, windows, documents, prefixes and padding take a few bands:
#
#     1 0 0 0      row 0: 0:1
#     1 1 0 0      row 1: 0:2      the end moves:   rows 0 and 1 are one band, q >= kv over keys 0:2
#     0 0 1 0      row 2: 2:3      both ends jump:  a new band
#     0 0 1 1      row 3: 2:4


ALTERNATIVES = (
    "Say what it means, which needs no table: masks.causal(), masks.sliding_window(left), masks.documents(lengths) &"
    " masks.causal(), masks.prefix_lm(prefix), or a function of positions, masks.from_mask_mod(function)"
)


@run_eagerly
def from_dense(allowed: ArrayLike) -> Mask:
    """Convert a table, True where a query (row) may attend to a key (column), if it consists of few bands.

    (tokens, tokens), or (batch or 1, heads or 1, tokens, tokens). The result is exact; tables without structure, such
    as random ones, raise `MaskError`.

    >>> from longspan.masks import causal, documents
    >>> table = np.tril(np.ones((6, 6), dtype=bool))
    >>> from_dense(table) == causal(6)
    True
    >>> table[3:, :3] = False
    >>> from_dense(table) == documents([3, 3]) & causal()
    True
    """
    table = _as_table(allowed)
    for axis in (0, 1):  # expanded tables are equal for every row or head
        first = table[:1] if axis == 0 else table[:, :1]
        table = first if table.shape[axis] == 1 or bool((table == first).all()) else table
    planes: dict[bytes, Plane] = {}
    for one in table.reshape(-1, *table.shape[2:]):
        key = np.packbits(one).tobytes()
        if key not in planes:
            planes[key] = Plane(drop_empty(_bands(one)))
    grid = tuple(tuple(planes[np.packbits(one).tobytes()] for one in row) for row in table)
    return Mask(grid, table.shape[-1], "from_dense()")


def _as_table(allowed: Any) -> NDArray[np.bool_]:
    """Return the table as (rows, heads, tokens, tokens), or raise."""
    device = str(getattr(allowed, "device", "cpu"))
    if device != "cpu":
        raise MaskError(
            f"a dense mask must be on the CPU, but got one on {device}: reading it would make the host wait for the"
            f" device in every call. Convert it once, with masks.from_dense(mask.cpu()). {ALTERNATIVES}."
        )
    table = np.asarray(allowed)
    sides = table.shape[-2:]
    if table.ndim not in (2, 4) or sides[0] != sides[1] or not table.size:
        raise MaskError(
            f"a dense mask must be (tokens, tokens) or (batch, heads, tokens, tokens), queries by keys, with 1 where"
            f" batch rows or heads do not differ, but got shape {table.shape}. A tokenizer's attention_mask, (batch,"
            f" tokens), says where padding is: tokens and padding are documents, masks.documents([tokens, padding])."
        )
    if table.dtype != np.bool_:
        raise MaskError(
            f"a dense mask must be True where a query may attend to a key, and False elsewhere, but got dtype"
            f" {table.dtype}. Use mask.bool() if 1 means that, mask == 0 if it is added to scores and hides by -inf;"
            f" other numbers that are added to scores go to attention(..., bias=)."
        )
    return table.reshape(1, 1, *sides) if table.ndim == 2 else table


def _bands(table: NDArray[np.bool_]) -> Ints:
    """Return the bands of a table; checks that they give its spans again."""
    tokens = len(table)
    padded = np.zeros((tokens, tokens + 2), dtype=np.bool_)  # a hidden key at both ends, so that spans end in their row
    padded[:, 1:-1] = table
    flat = padded.reshape(-1)
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    row, start = np.divmod(ends[::2], tokens + 2)
    spans = row, start, ends[1::2] % (tokens + 2)
    bands = _join_neighbours(*spans, tokens)
    if len(bands) > tokens + 16:
        raise MaskError(
            f"a dense mask must have structure, but this one of {tokens} tokens takes {len(bands)} bands."
            f" {ALTERNATIVES}, which may look things up in a tensor."
        )
    again = key_spans(bands, np.arange(tokens, dtype=np.int64))
    if not all(np.array_equal(one, two) for one, two in zip(spans, again, strict=True)):
        raise LongspanError("a dense mask was read wrongly, which is a bug in Longspan. Please report the mask.")
    return bands


def _join_neighbours(row: Ints, start: Ints, stop: Ints, tokens: int) -> Ints:
    """Join the k-th spans of neighbouring rows into one band as long as each of their ends stays or moves by one."""
    if not len(row):
        return np.empty((0, 6), dtype=np.int64)
    number = steps_within(np.bincount(row, minlength=tokens))
    order = np.lexsort((row, number))
    row, start, stop, number = row[order], start[order], stop[order], number[order]
    left, right = np.diff(start), np.diff(stop)
    goes_on = (np.diff(number) == 0) & (np.diff(row) == 1) & (left >= 0) & (left <= 1) & (right >= 0) & (right <= 1)
    turns = np.append(False, goes_on[1:] & goes_on[:-1] & ((left[1:] != left[:-1]) | (right[1:] != right[:-1])))
    first, after = run_table(~goes_on | turns, len(row)).T
    moves = after - first > 1
    moves_left, moves_right = (moves & (np.append(step, 0)[first] == 1) for step in (left, right))
    low = np.where(moves_right, row[first] - stop[first] + 1, -LIMIT)
    high = np.where(moves_left, row[first] - start[first], LIMIT)
    return np.stack((row[first], row[after - 1] + 1, start[first], stop[after - 1], low, high), axis=1)


# -- Arguments of PyTorch and flash-attn -------------------------------------------------------------------------------

MASKS = (
    "masks.causal(), masks.full(), masks.sliding_window(left), masks.documents(lengths) & masks.causal() for packed"
    " documents, or masks.from_mask_mod(function)"
)
SMALL = 2048
"""Tokens of a dense mask up to which `attention` and `plan` convert it, which takes some 20 ms in every call."""

_CAUSAL = "Pass masks.causal() as the fourth argument, or masks.full() where every token sees every token."
_TABLE = f"Pass a mask as the fourth argument: {MASKS}; a table of True and False goes through masks.from_dense(table)."
_DOCUMENTS = "Pass masks.from_cu_seqlens(cu_seqlens) & masks.causal() as the fourth argument."
_LENGTHS = "Leave it out: lengths are the mask's."
_GROUP = "It is group= here: a process group, or a mesh of one axis such as mesh['cp']."
_WORDS = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _TABLE,
    "attention_mask": _TABLE,
    "key_padding_mask": _TABLE,
    "mask": _TABLE,
    "block_mask": "Use longspan.flex_attention, which takes it.",
    "plan": "Pass the plan as the fourth argument.",
    "dropout_p": "It is dropout= here, with a seed=.",
    "enable_gqa": "Leave it out: fewer key/value heads than query heads are taken as they are.",
    "softmax_scale": "It is scale= here.",
    "window_size": "Pass masks.sliding_window(left, right) as the fourth argument; neither counts the token itself.",
    "alibi_slopes": "It is alibi= here.",
    "cu_seqlens": _DOCUMENTS,
    "cu_seqlens_q": _DOCUMENTS,
    "cu_seqlens_k": _DOCUMENTS,
    "max_seqlen": _LENGTHS,
    "max_seqlen_q": _LENGTHS,
    "max_seqlen_k": _LENGTHS,
    "process_group": _GROUP,
    "device_mesh": _GROUP,
    "mesh": _GROUP,
}


def check_words(call: str, unknown: dict[str, Any], known: tuple[str, ...]) -> None:
    """Raise for keyword arguments that a function does not have, with the argument to use instead.

    >>> check_words("attention", {"softmax_scale": 0.5}, ())
    Traceback (most recent call last):
    longspan.errors.PlanError: attention() does not take softmax_scale=0.5. It is scale= here.
    """
    for name, value in unknown.items():
        if name in _WORDS:
            text = repr(value) if isinstance(value, bool | int | float | str | None) else "..."
            raise PlanError(f"{call}() does not take {name}={text}. {_WORDS[name]}")
        near = get_close_matches(name, known, 1)
        raise TypeError(
            f"{call}() got an unexpected keyword argument {name!r}."
            + (f" Did you mean {near[0]}?" if near else f" It takes {', '.join(known)}.")
        )


def mask_of(value: Any) -> Any:
    """Convert a small dense mask; return everything else unchanged."""
    return from_dense(value) if _is_table(value) and value.shape[-1] <= SMALL else value


def _is_table(value: Any) -> bool:
    return hasattr(value, "dtype") and len(getattr(value, "shape", ())) >= 2


def advice(value: Any) -> str:
    """Return how to express a value that is no mask as one.

    >>> advice(None)[:63]
    'Say what may attend to what, by longspan.masks: masks.causal(),'
    >>> advice(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    'Convert a function (b, h, q_idx, kv_idx) with longspan.masks.from_mask_mod(function).'
    """
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", "")
    if value is None:
        return f"Say what may attend to what, by longspan.masks: {MASKS}."
    if type(value).__name__ == "BlockMask":
        return "longspan.flex_attention takes a BlockMask; masks.from_mask_mod(block_mask.mask_mod) converts it."
    if type(value).__name__ == "Layout":
        return (
            "A layout says which rank holds which tokens: make a plan, longspan.plan(mask, layout, ...), and pass that."
        )
    if _is_table(value):
        return f"Convert a table of True and False once, with masks.from_dense(table). {ALTERNATIVES}."
    if callable(value) and str(module).startswith("longspan.masks") and str(name).isidentifier():
        return f"Call it to make a mask, as in masks.{name}(...)."
    if callable(value):
        return "Convert a function (b, h, q_idx, kv_idx) with longspan.masks.from_mask_mod(function)."
    return f"Use a mask of longspan.masks: {MASKS}."
