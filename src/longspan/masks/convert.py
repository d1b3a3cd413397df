"""Masks from other forms: dense boolean tables, and arguments of PyTorch's and flash-attn's attention."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import LongspanError, MaskError, PlanError
from longspan.masks.bands import LIMIT, occupied
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


def from_dense(allowed: ArrayLike) -> Mask:
    """The mask that a table says, True where a query (row) may attend to a key (column), if few bands make it up.

    (tokens, tokens), or (batch or 1, heads or 1, tokens, tokens). The result is exact; tables without structure, such
    as random ones, are refused.

    >>> from longspan.masks import causal, documents
    >>> table = np.tril(np.ones((6, 6), dtype=bool))
    >>> from_dense(table) == causal(6)
    True
    >>> table[3:, :3] = False
    >>> from_dense(table) == documents([3, 3]) & causal()
    True
    """
    table = _table(allowed)
    for axis in (0, 1):  # expanded tables say the same for every row or head
        first = table[:1] if axis == 0 else table[:, :1]
        table = first if table.shape[axis] == 1 or bool((table == first).all()) else table
    seen: dict[bytes, Plane] = {}
    grid = tuple(tuple(_plane(one, seen) for one in row) for row in table)
    return Mask(grid, table.shape[-1], "from_dense()")


def _table(allowed: Any) -> NDArray[np.bool_]:
    """The table as (rows, heads, tokens, tokens), or a refusal."""
    device = str(getattr(allowed, "device", "cpu"))
    if device != "cpu":
        raise MaskError(
            f"a dense mask on {device} was given, and reading it would make the host wait for the device in every call."
            f" Convert it once: masks.from_dense(mask.cpu()), and pass the result. {ALTERNATIVES}."
        )
    table = np.asarray(allowed)
    sides = table.shape[-2:]
    if table.ndim not in (2, 4) or sides[0] != sides[1] or not table.size:
        raise MaskError(
            f"a dense mask of shape {table.shape} was given. It is (tokens, tokens) or (batch, heads, tokens, tokens),"
            f" queries by keys, with 1 where batch rows or heads do not differ. What a tokenizer calls attention_mask,"
            f" (batch, tokens), says where padding is: tokens and padding are documents, masks.documents([tokens,"
            f" padding])."
        )
    if table.dtype != np.bool_:
        raise MaskError(
            f"a dense mask of dtype {table.dtype} was given. It is True where a query may attend to a key, and False"
            f" elsewhere: use mask.bool() if 1 means that, mask == 0 if it is added to scores and hides by -inf; other"
            f" numbers that are added to scores go to attention(..., bias=)."
        )
    return table.reshape(1, 1, *sides) if table.ndim == 2 else table


def _plane(table: NDArray[np.bool_], seen: dict[bytes, Plane]) -> Plane:
    key = np.packbits(table).tobytes()
    if key not in seen:
        seen[key] = Plane(occupied(_bands(table)))
    return seen[key]


def _bands(table: NDArray[np.bool_]) -> Ints:
    """The bands of a table, which are proved to give the table's spans again."""
    tokens = len(table)
    spans = _spans(table)
    bands = _grouped(*spans, tokens)
    if len(bands) > tokens + 16:
        raise MaskError(
            f"a dense mask of {tokens} tokens was given that has no structure: it takes {len(bands)} bands."
            f" {ALTERNATIVES}, which may look things up in a tensor."
        )
    again = key_spans(bands, np.arange(tokens, dtype=np.int64))
    if not all(np.array_equal(one, two) for one, two in zip(spans, again, strict=True)):
        raise LongspanError("a dense mask was read wrongly, which is a bug in Longspan. Please report the mask.")
    return bands


def _spans(table: NDArray[np.bool_]) -> tuple[Ints, Ints, Ints]:
    """Row, first key and the key after the last one, of all that rows see."""
    wide = len(table) + 2  # a hidden key before and after each row, so that all spans begin and end in it
    around = np.zeros((len(table), wide), dtype=np.bool_)
    around[:, 1:-1] = table
    flat = around.reshape(-1)
    ends = np.flatnonzero(flat[1:] != flat[:-1])
    row, start = np.divmod(ends[::2], wide)
    return row, start, ends[1::2] % wide


def _grouped(row: Ints, start: Ints, stop: Ints, tokens: int) -> Ints:
    """Spans of one place among their row's spans, of neighbouring rows, whose ends move alike: one band each."""
    if not len(row):
        return np.empty((0, 6), dtype=np.int64)
    place = steps_within(np.bincount(row, minlength=tokens))
    order = np.lexsort((row, place))
    row, start, stop, place = row[order], start[order], stop[order], place[order]
    left, right = np.diff(start), np.diff(stop)
    goes_on = (np.diff(place) == 0) & (np.diff(row) == 1) & (left >= 0) & (left <= 1) & (right >= 0) & (right <= 1)
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
"""Tokens of a dense mask that `attention` and `plan` convert by themselves; that takes some 20 ms, in every call."""

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
    """Refuses arguments that a function does not have, in words that help.

    >>> check_words("attention", {"softmax_scale": 0.5}, ())
    Traceback (most recent call last):
    longspan.errors.PlanError: softmax_scale=0.5 was given to attention, which does not know it. It is scale= here.
    """
    for name, value in unknown.items():
        if name in _WORDS:
            text = repr(value) if isinstance(value, bool | int | float | str | None) else "..."
            raise PlanError(f"{name}={text} was given to {call}, which does not know it. {_WORDS[name]}")
        near = get_close_matches(name, known, 1)
        raise TypeError(
            f"{call}() got an unexpected keyword argument {name!r}."
            + (f" Did you mean {near[0]}?" if near else f" It takes {', '.join(known)}.")
        )


def mask_of(value: Any) -> Any:
    """A small dense mask as the mask that it is; everything else as it was given."""
    return from_dense(value) if _is_table(value) and value.shape[-1] <= SMALL else value


def _is_table(value: Any) -> bool:
    return hasattr(value, "dtype") and len(getattr(value, "shape", ())) >= 2


def advice(value: Any) -> str:
    """How something that is no mask is said as one.

    >>> advice(None)[:63]
    'Say what may attend to what, by longspan.masks: masks.causal(),'
    >>> advice(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    'A function (b, h, q_idx, kv_idx) is made a mask by longspan.masks.from_mask_mod(function).'
    """
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", "")
    if value is None:
        return f"Say what may attend to what, by longspan.masks: {MASKS}."
    if type(value).__name__ == "BlockMask":
        return "longspan.flex_attention takes a BlockMask; masks.from_mask_mod(block_mask.mask_mod) makes a mask of it."
    if type(value).__name__ == "Layout":
        return "A layout says who holds which tokens: make a plan, longspan.plan(mask, layout, ...), and pass that."
    if _is_table(value):
        return f"A table of True and False is read once, by masks.from_dense(table). {ALTERNATIVES}."
    if callable(value) and str(module).startswith("longspan.masks") and str(name).isidentifier():
        return f"masks.{name} makes masks when it is called, as in masks.{name}(...)."
    if callable(value):
        return "A function (b, h, q_idx, kv_idx) is made a mask by longspan.masks.from_mask_mod(function)."
    return f"Masks are made by longspan.masks: {MASKS}."
