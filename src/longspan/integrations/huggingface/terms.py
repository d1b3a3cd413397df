"""Transformers' masks as Longspan masks: closures of `transformers.masking_utils` are read, not called.

A closure is known by its code object, so that a function of the same name elsewhere is not mistaken for it. What is
known becomes bands; what is not stays a function, exact and slower. No S x S tensor is made anywhere.

Shapes: B batch rows, S tokens. Positions count tokens from the first one that the layer knows of (its cache included).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.errors import MaskError
from longspan.masks import Mask, causal, documents, from_mask_mod, full, per_row, sliding_window
from longspan.masks.bands import LIMIT, rectangles
from longspan.masks.causal_masks import diagonal
from longspan.span import Ints, run_table, true_runs

Kind = tuple[Any, ...]


class Snapshot:
    """The numbers of a tensor as they are now: the caller may write into it before backward asks again.

    They are copied to the host when they are first used, which waits for the device. Over ranks they are not: there
    the mask of the whole sequence is known before.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().clone()

    @cached_property
    def array(self) -> NDArray[Any]:
        return self._tensor.cpu().numpy()


@dataclass(frozen=True, eq=False)
class Term:
    """One closure: what it is called here, the number in it (window, chunk), the table in it, or what it joins."""

    name: str
    size: int = 0
    table: NDArray[Any] | Snapshot | None = None
    parts: tuple[Term, ...] = ()
    function: Callable[..., Any] | None = field(default=None, repr=False)

    @property
    def array(self) -> NDArray[Any] | None:
        """The table on the host."""
        return self.table.array if isinstance(self.table, Snapshot) else self.table


@lru_cache(maxsize=1)
def _known() -> dict[CodeType, tuple[str, str]]:
    """By code object: our name, and the variable that the closure holds."""
    from transformers import masking_utils as hf

    row = torch.zeros(1, 1, dtype=torch.long)
    functions = {
        "causal": (hf.causal_mask_function, ""),
        "full": (hf.bidirectional_mask_function, ""),
        "window": (hf.sliding_window_overlay(1), "sliding_window"),
        "around": (hf.sliding_window_bidirectional_overlay(1), "sliding_window"),
        "chunk": (hf.chunked_overlay(1, row[0]), "left_padding"),
        "padding": (hf.padding_mask_function(row), "padding_mask"),
        "packed": (hf.packed_sequence_mask_function(row), "packed_sequence_mask"),
        "blocks": (hf.blockwise_overlay(row), "block_sequence_ids"),
        "and": (hf.and_masks(), "mask_functions"),
        "or": (hf.or_masks(), "mask_functions"),
    }
    return {function.__code__: (name, variable) for name, (function, variable) in functions.items()}


def term_of(function: Callable[..., Any]) -> Term:
    """The closure as a term; a function that is not transformers' own is the term "function"."""
    code = getattr(function, "__code__", None)
    name, variable = _known().get(code, ("function", "")) if code is not None else ("function", "")
    cells = getattr(function, "__closure__", None) or ()
    contents = dict(zip(code.co_freevars, (cell.cell_contents for cell in cells), strict=True)) if code else {}
    if name == "function" or (variable and variable not in contents):
        return Term("function", function=function)
    if name in ("and", "or"):
        return Term(name, parts=tuple(term_of(part) for part in contents[variable]))
    if name in ("window", "around"):
        return Term(name, size=int(contents[variable]))
    if name == "chunk":
        return Term(name, size=int(contents["chunk_size"]), table=Snapshot(contents[variable]))
    return Term(name, table=Snapshot(contents[variable]) if variable else None)


def kind_of(term: Term) -> Kind | None:
    """The term without what a batch brings (packing, padding, where chunks begin): which layers share a mask.

    None for what only this batch could tell: functions, and blocks of tokens.
    """
    if term.name in ("function", "blocks"):
        return None
    if term.name in ("and", "or"):
        kinds = [kind_of(part) for part in term.parts if part.name not in ("packed", "padding")]
        if None in kinds:
            return None
        kept = [part for part in kinds if part is not None]
        return kept[0] if len(kept) == 1 else (term.name, *sorted(kept, key=repr))
    return (term.name, term.size) if term.size else (term.name,)


def term_of_kind(kind: Kind, left_padding: NDArray[Any]) -> Term:
    """The term of a kind, with chunks that begin after each batch row's padding.

    >>> term_of_kind(("and", ("causal",), ("window", 7)), np.zeros(1, dtype=int)).parts[1].size
    7
    """
    name, *rest = kind
    if name in ("and", "or"):
        return Term(name, parts=tuple(term_of_kind(part, left_padding) for part in rest))
    return Term(name, size=rest[0] if rest else 0, table=left_padding if name == "chunk" else None)


def has(term: Term, name: str) -> bool:
    """Whether such a term is anywhere inside."""
    return term.name == name or any(has(part, name) for part in term.parts)


# -- terms as masks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """Positions from `base` on, `length` of them; tables of a term are looked up at base + position."""

    base: int
    length: int


def mask_of(term: Term, frame: Frame, batch: int) -> Mask:
    """The mask of a term, with a plane per batch row where its tables have rows."""
    if term.name in ("and", "or"):
        parts = [mask_of(part, frame, batch) for part in term.parts]
        whole = full(frame.length) if term.name == "and" else ~full(frame.length)
        for part in parts:
            whole = whole & part if term.name == "and" else whole | part
        return whole
    if term.name == "causal":
        return causal(frame.length)
    if term.name == "full":
        return full(frame.length)
    if term.name == "window":
        return diagonal(-LIMIT, term.size - 1, frame.length, f"window({term.size})")
    if term.name == "around":
        return sliding_window(term.size, term.size, frame.length)
    if term.name == "function" or (values := term.array) is None:
        return _of_function(term, frame, batch)
    if term.name == "chunk":
        return _per_row([chunks(term.size, int(left) - frame.base, frame.length) for left in values], batch)
    table = _window_of(values, frame, {"padding": False, "packed": -1, "blocks": -1}[term.name])
    make = {"padding": visible, "packed": alike, "blocks": blocks}[term.name]
    return _per_row([make(row) for row in table], batch)


def _of_function(term: Term, frame: Frame, batch: int) -> Mask:
    """A function that only its author understands, called on pairs; transformers shows every head as head 0."""
    function, base = term.function, frame.base
    if function is None:
        raise MaskError(f"a mask term {term.name!r} has neither a table nor a function.")

    def asked(b: Tensor, h: Any, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return function(b, torch.zeros_like(b), q + base, kv + base)

    name = getattr(function, "__qualname__", type(function).__name__)
    return from_mask_mod(asked, frame.length, rows=batch, name=name)


def _per_row(rows: list[Mask], batch: int) -> Mask:
    if len(rows) not in (1, batch):
        raise MaskError(f"a mask table has {len(rows)} rows, but the batch has {batch}. Give one row for each.")
    return rows[0] if all(row is rows[0] for row in rows) else per_row(*rows)


def _window_of(table: NDArray[Any], frame: Frame, fill: Any) -> NDArray[Any]:
    """The table's columns of the frame; what lies beyond its end is `fill`."""
    part = table[:, frame.base : frame.base + frame.length]
    missing = frame.length - part.shape[1]
    return np.pad(part, ((0, 0), (0, missing)), constant_values=fill) if missing else part


def runs(row: NDArray[Any]) -> tuple[Ints, NDArray[Any]]:
    """Edges of the stretches of equal values, and the value of each.

    >>> runs(np.array([7, 7, 3]))
    (array([0, 2, 3]), array([7, 3]))
    """
    first, after = run_table(row[1:] != row[:-1], len(row)).T
    return np.append(0, after), row[first]


def alike(row: NDArray[Any]) -> Mask:
    """Tokens with the same number see each other; documents where every number comes in one stretch.

    >>> alike(np.array([0, 0, 1])) == documents([2, 1])
    True
    """
    edges, values = runs(row)
    if len(np.unique(values)) == len(values):
        return documents(np.diff(edges))
    return _of_groups(edges, values, np.unique(values), len(row))


def per_row_alike(numbers: NDArray[Any]) -> Mask:
    """`alike` of every batch row; one row serves all."""
    return _per_row([alike(row) for row in numbers], len(numbers))


def blocks(row: NDArray[Any]) -> Mask:
    """Tokens with the same number see each other, unless it is negative."""
    edges, values = runs(row)
    return _of_groups(edges, values, np.unique(values[values >= 0]), len(row))


def _of_groups(edges: Ints, values: NDArray[Any], wanted: NDArray[Any], length: int) -> Mask:
    bands = [
        (edges[q], edges[q + 1], edges[kv], edges[kv + 1], -LIMIT, LIMIT)
        for value in wanted
        for q in np.flatnonzero(values == value)
        for kv in np.flatnonzero(values == value)
    ]
    return Mask.of_bands(np.array(bands, dtype=np.int64).reshape(-1, 6), length, f"groups({len(wanted)})")


def visible(row: NDArray[Any]) -> Mask:
    """Every token sees the keys that the row marks, padding or not."""
    if row.all():
        return full(len(row))
    _, start, stop = true_runs(row[None].astype(bool)).T
    return Mask.of_bands(rectangles(0, len(row), start, stop), len(row), "padding")


def chunks(size: int, first: int, length: int) -> Mask:
    """Every token sees its own chunk of `size`, one of which begins at position `first`.

    >>> chunks(4, 1, 6) == documents([1, 4, 1])
    True
    """
    edges = np.arange(first % size, length, size, dtype=np.int64)
    edges = np.unique(np.concatenate(([0], edges, [length])))
    return documents(np.diff(edges))


def rectangle(q: tuple[int, int], kv: tuple[int, int], length: int) -> Mask:
    """Queries of one span see keys of another."""
    return Mask.of_bands(rectangles(*q, *kv), length, "cached")


def window_in(term: Term) -> int | None:
    """The sliding window of a term, if it has one."""
    if term.name in ("window", "around"):
        return term.size
    return next((window for part in term.parts if (window := window_in(part)) is not None), None)
