"""The masks that Longspan passes to transformers: objects that describe the request, not tensors.

transformers requests a mask once per kind of layer and forward pass, and passes it to all layers of that kind. Its mask
functions are closures of `transformers.masking_utils`, which are parsed, not called: a closure is known by its code
object, so a function of the same name elsewhere is not mistaken for it. Known closures become bands; any other stays a
function, exact and slower. No S x S tensor is allocated.

Shapes: B batch rows, S tokens. Positions count from the first token that the layer knows of (its cache included).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import cached_property, lru_cache
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.errors import MaskError
from longspan.masks import Mask, causal, documents, from_mask_mod, full, per_row, sliding_window
from longspan.masks.bands import LIMIT, rectangles
from longspan.masks.causal_and_window import diagonal
from longspan.spans import Ints, run_table, true_runs
from longspan.versions import TRANSFORMERS, short

Kind = tuple[Any, ...]
"""A mask without what a batch adds to it (packing, padding, where chunks begin): layers of one kind share a mask."""
_contents, _names, _outlines = attrgetter("cell_contents"), attrgetter("names"), attrgetter("outline")


class Snapshot:
    """A copy of a tensor, since the caller may write into it before backward. It goes to the host on first use, which
    waits for the device; over ranks it is never used, because the mask of the whole sequence is known before."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().clone()

    @cached_property
    def array(self) -> NDArray[Any]:
        return self._tensor.cpu().numpy()


class Term:
    """One mask function of transformers, or several of them joined by "and" or "or".

    Args:
        name: our name of the function ("causal", "window", ...), or "function" for an unknown one.
        size: the window or chunk size.
        table: the table that the function looks up, as an array or a `Snapshot`; for chunks where they begin in each
            row, or if they are counted inside packed documents, the position of each token (rows, S).
        parts: the terms that "and" or "or" joins.
        function: the unknown function.

    Attributes:
        names: the names of this term and of all terms inside of it.
        window: the sliding window inside of it, or None.
        outline: all names and sizes, without tables.
        kind: the `Kind`, or None if it depends on the batch (unknown functions, blocks of tokens).
    """

    def __init__(
        self,
        name: str,
        size: int = 0,
        table: NDArray[Any] | Snapshot | None = None,
        parts: tuple[Term, ...] = (),
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.name, self.size, self.table, self.parts, self.function = name, size, table, parts, function
        self.names = frozenset((name,)).union(*map(_names, parts))
        self.outline: tuple[Any, ...] = name, size, tuple(map(_outlines, parts))
        self.window: int | None = size if name in ("window", "around") else None
        self.kind: Kind | None = (name, size) if size else (name,)
        if name in ("function", "blocks", "moved"):
            self.kind = None
        elif name in ("and", "or"):
            kinds: list[Any] = []
            for part in parts:
                if self.window is None:
                    self.window = part.window
                if part.name not in ("packed", "padding"):
                    kinds.append(part.kind)
            if None in kinds:
                self.kind = None
            else:
                self.kind = kinds[0] if len(kinds) == 1 else (name, *sorted(kinds, key=repr))

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
    if counts_inside_documents():
        functions["moved"] = (hf.remap_positions_for_packed_sequence(hf.causal_mask_function, row), "mask_function")
    return {function.__code__: (name, variable) for name, (function, variable) in functions.items()}


def counts_inside_documents() -> bool:
    """Return whether this version of transformers calls the mask functions of packed documents with position_ids
    instead of places in the row (5.23 on): chunks then start again with every document."""
    from transformers import masking_utils as hf

    return hasattr(hf, "remap_positions_for_packed_sequence")


def parse_mask_function(function: Callable[..., Any]) -> Term:
    """Return the term of a mask function; one that is not transformers' own becomes the term "function"."""
    code = getattr(function, "__code__", None)
    name, variable = _known().get(code, ("function", "")) if code is not None else ("function", "")
    cells = getattr(function, "__closure__", None) or ()
    contents = dict(zip(code.co_freevars, map(_contents, cells), strict=True)) if code and variable else {}
    if name == "function" or (variable and variable not in contents):
        return Term("function", function=function)
    if name in ("and", "or"):
        parts = tuple(map(parse_mask_function, contents[variable]))
        if [part.name for part in parts] == ["packed", "moved"]:
            # Inside a document positions increase by one, so differences of positions are those of places.
            inner = parts[1].parts[0]
            if inner.names - {"and", "or", "causal", "full", "window", "around", "chunk"}:
                return Term("function", function=function)
            parts = parts[0], _count_from(inner, parts[1].table)
        return Term(name, parts=parts)
    if name == "moved":
        inner = parse_mask_function(contents[variable])
        return Term(name, parts=(inner,), function=function, table=Snapshot(contents["position_ids"]))
    if name in ("window", "around"):
        return Term(name, size=int(contents[variable]))
    if name == "chunk":
        return Term(name, size=int(contents["chunk_size"]), table=Snapshot(contents[variable]))
    return Term(name, table=Snapshot(contents[variable]) if variable else None)


def _count_from(term: Term, positions: Any) -> Term:
    """Return the term with chunks that are counted by positions (rows, S)."""
    parts = tuple(_count_from(part, positions) for part in term.parts)
    return Term(term.name, term.size, positions if term.name == "chunk" else None, parts)


def term_of_kind(kind: Kind, chunks: NDArray[Any]) -> Term:
    """Return the term of a kind; `chunks` is its table of chunks: each row's padding on the left, after which they
    begin, or positions (rows, S) of packed documents.

    >>> term_of_kind(("and", ("causal",), ("window", 7)), np.zeros(1, dtype=int)).parts[1].size
    7
    """
    name, *rest = kind
    if name in ("and", "or"):
        return Term(name, parts=tuple(term_of_kind(part, chunks) for part in rest))
    return Term(name, size=rest[0] if rest else 0, table=chunks if name == "chunk" else None)


# -- From terms to masks -----------------------------------------------------------------------------------------------


class Frame(NamedTuple):
    """Positions from `base` on, `length` of them; tables of a term are looked up at base + position."""

    base: int
    length: int


def build_mask(term: Term, frame: Frame, batch: int) -> Mask:
    """Return the mask of a term, with a plane per batch row where its tables have rows."""
    if term.name in ("and", "or"):
        mask = full(frame.length) if term.name == "and" else ~full(frame.length)
        for part in term.parts:
            other = build_mask(part, frame, batch)
            mask = mask & other if term.name == "and" else mask | other
        return mask
    if term.name == "causal":
        return causal(frame.length)
    if term.name == "full":
        return full(frame.length)
    if term.name == "window":
        return diagonal(-LIMIT, term.size - 1, frame.length, f"window({term.size})")
    if term.name == "around":
        return sliding_window(term.size, term.size, frame.length)
    if term.function is not None or (table := term.array) is None:
        function, base = term.function, frame.base
        if function is None:
            raise MaskError(f"a mask term must have a table or a function, but {term.name!r} has neither.")

        def shifted(b: Tensor, h: Any, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
            return function(b, torch.zeros_like(b), q + base, kv + base)  # transformers passes head 0 for every head

        name = getattr(function, "__qualname__", type(function).__name__)
        return from_mask_mod(shifted, frame.length, rows=batch, name=name)
    if term.name == "chunk" and table.ndim == 2:
        return _join_rows([document_chunk_mask(term.size, row) for row in table], batch)
    if term.name == "chunk":
        return _join_rows([chunk_mask(term.size, int(left) - frame.base, frame.length) for left in table], batch)
    build, fill = {"padding": (padding_mask, False), "packed": (group_mask, -1), "blocks": (block_mask, -1)}[term.name]
    part = table[:, frame.base : frame.base + frame.length]
    missing = frame.length - part.shape[1]
    if missing:
        part = np.pad(part, ((0, 0), (0, missing)), constant_values=fill)
    return _join_rows([build(row) for row in part], batch)


def _join_rows(rows: list[Mask], batch: int) -> Mask:
    if len(rows) not in (1, batch):
        raise MaskError(f"a mask table must have 1 or {batch} rows, as the batch, but got {len(rows)}.")
    return rows[0] if all(row is rows[0] for row in rows) else per_row(*rows)


def runs(row: NDArray[Any]) -> tuple[Ints, NDArray[Any]]:
    """Return the edges of the runs of equal values, and the value of each run.

    >>> runs(np.array([7, 7, 3]))
    (array([0, 2, 3]), array([7, 3]))
    """
    first, after = run_table(row[1:] != row[:-1], len(row)).T
    return np.append(0, after), row[first]


def group_mask(row: NDArray[Any]) -> Mask:
    """Return the mask in which tokens with the same number see each other; documents if every number is one run.

    >>> group_mask(np.array([0, 0, 1])) == documents([2, 1])
    True
    """
    edges, values = runs(row)
    if len(np.unique(values)) == len(values):
        return documents(np.diff(edges))
    return _groups(edges, values, np.unique(values), len(row))


def document_mask(numbers: NDArray[Any]) -> Mask:
    """Return `group_mask` of every batch row of document numbers (rows, S)."""
    return _join_rows([group_mask(row) for row in numbers], len(numbers))


def block_mask(row: NDArray[Any]) -> Mask:
    """Return the mask in which tokens with the same number see each other, unless it is negative."""
    edges, values = runs(row)
    return _groups(edges, values, np.unique(values[values >= 0]), len(row))


def _groups(edges: Ints, values: NDArray[Any], numbers: NDArray[Any], length: int) -> Mask:
    bands = [
        (edges[q], edges[q + 1], edges[kv], edges[kv + 1], -LIMIT, LIMIT)
        for number in numbers
        for q in np.flatnonzero(values == number)
        for kv in np.flatnonzero(values == number)
    ]
    return Mask.of_bands(np.array(bands, dtype=np.int64).reshape(-1, 6), length, f"groups({len(numbers)})")


def padding_mask(row: NDArray[Any]) -> Mask:
    """Return the mask in which every token, padding or not, sees the keys that the row marks."""
    if row.all():
        return full(len(row))
    _, start, stop = true_runs(row[None].astype(bool)).T
    return Mask.of_bands(rectangles(0, len(row), start, stop), len(row), "padding")


def chunk_mask(size: int, first: int, length: int) -> Mask:
    """Return the mask in which every token sees its own chunk of `size`, one of which begins at position `first`.

    >>> chunk_mask(4, 1, 6) == documents([1, 4, 1])
    True
    """
    edges = np.arange(first % size, length, size, dtype=np.int64)
    return documents(np.diff(np.unique(np.concatenate(([0], edges, [length])))))


def document_chunk_mask(size: int, positions: NDArray[Any]) -> Mask:
    """Return the mask in which every token sees its own chunk of its own document; a document starts unless positions
    increase by one.

    >>> document_chunk_mask(2, np.array([0, 1, 2, 0, 1])) == documents([2, 1, 2])
    True
    """
    places, chunks = np.diff(positions), np.diff(positions // size)
    edges = np.flatnonzero((places != 1) | (chunks != 0)) + 1
    return documents(np.diff(np.concatenate(([0], edges, [len(positions)]))))


# -- The running sequence ----------------------------------------------------------------------------------------------
# The sequence that a model runs on in this thread, for code that models call without keywords: masks, rotary
# embeddings, losses of routers. Layers that are recomputed in backward, outside of any forward pass, must not use it;
# their masks carry the sequence instead.


_RUNNING: ContextVar[tuple[Any, ...]] = ContextVar("longspan_sequences", default=())


def current() -> Any:
    """Return the sequence of the innermost running model, or None."""
    running = _RUNNING.get()
    return running[-1] if running else None


def enter(sequence: Any) -> None:
    _RUNNING.set((*_RUNNING.get(), sequence))


def leave() -> None:
    _RUNNING.set(_RUNNING.get()[:-1])


# -- Mask objects ------------------------------------------------------------------------------------------------------


_SAMPLES = 64
_MOST_CHECKED = 256


_NO_TENSOR = (
    "the model computes with its mask as with a tensor (to choose keys, or to add biases to it), and Longspan's is"
    " not one: no tensor of all pairs is allocated. Use attn_implementation='eager' for this model."
)


class _NoTensorError(MaskError, AttributeError):
    """An AttributeError too, so that `hasattr` returns False."""


class LayerMask:
    """The mask of one kind of layer, as transformers requested it; all layers of that kind receive this object.

    Not a dataclass, because wrappers of modules take those apart to find tensors. `generate()` with a static cache
    makes masks ahead of time and treats them as tensors; `ndim`, `shape` and `contiguous` exist for it.
    """

    ndim = 4

    def __init__(
        self, batch: int, q: tuple[int, int], kv: tuple[int, int], term: Term, padding: NDArray[np.bool_] | None
    ) -> None:
        self.batch = batch
        self.q_offset, self.q_len = q
        self.kv_offset, self.kv_len = kv
        self.is_square = q == kv
        """Whether queries and keys are the same tokens: no cache, no cross attention."""
        self.term, self.kind, self.padding = term, term.kind, padding
        self.documents: tuple[Any, Any] | None = None
        """The position_ids that were last searched for documents, and the result: the same for all layers."""
        self.accepted: Any = None
        """The window and kind of the layer that was last checked over ranks: most layers repeat them."""
        self._separated: dict[bytes, Mask] = {}
        self.sequence: Any = current()
        """The sequence over ranks that a model was running on when it requested this mask, or None. It reaches layers
        that receive nothing else, also when they are recomputed in backward."""
        self.is_whole = self.sequence is not None and not self.sequence.is_cut
        """Whether this is the mask of the whole sequence although there are ranks."""

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

    @cached_property
    def frame(self) -> Frame:
        base = min(self.q_offset, self.kv_offset)
        return Frame(base, max(self.q_offset + self.q_len, self.kv_offset + self.kv_len) - base)

    @property
    def rows(self) -> tuple[int, int]:
        """The first query and the first key, counted from the start of the frame."""
        return self.q_offset - self.frame.base, self.kv_offset - self.frame.base

    @cached_property
    def rule(self) -> Mask:
        """The mask of the term alone, without padding and without limits to the queries and keys that exist."""
        return build_mask(self.term, self.frame, self.batch)

    @cached_property
    def mask(self) -> Mask:
        """The mask of the frame."""
        frame, (q, kv) = self.frame, self.rows
        mask = self.rule
        if self.padding is not None:
            mask = mask & build_mask(Term("padding", table=self.padding), frame, self.batch)
        if not self.is_square:
            cached = rectangles(q, q + self.q_len, kv, kv + self.kv_len)
            mask = mask & Mask.of_bands(cached, frame.length, "cached")
        return mask

    def separate(self, numbers: NDArray[Any]) -> Mask:
        """Return the mask with separate documents; `numbers` (rows, S) are the document of each token."""
        key = numbers.tobytes()
        if key not in self._separated:
            self._separated[key] = self.mask & document_mask(numbers)
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
    """Return a `LayerMask`; `AttentionMaskInterface` calls this. Other arguments describe the tensor to be made, which
    is not allocated."""
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function as mask_function
    term = parse_mask_function(mask_function)
    if isinstance(attention_mask, LayerMask):  # a mask that comes back
        shape = (batch_size, 1, q_length, kv_length)
        if attention_mask.shape != shape or attention_mask.kind != term.kind:
            raise MaskError(
                f"attention_mask must be a mask of shape {shape} and kind {term.kind} for this model, but got shape"
                f" {attention_mask.shape} and kind {attention_mask.kind}. Pass the 2-D mask of padding instead."
            )
        return attention_mask
    if attention_mask is not None and attention_mask.ndim != 2:
        raise MaskError(
            f"attention_mask must be the mask of padding, (batch, tokens), but got shape"
            f" {tuple(attention_mask.shape)}. Pass other masks as functions: or_mask_function=, and_mask_function=."
        )
    padding = None if attention_mask is None else Snapshot(attention_mask).array.astype(bool)
    q, kv = (int(q_offset), int(q_length)), (int(kv_offset), int(kv_length))
    mask = LayerMask(int(batch_size), q, kv, term, padding)
    _check_reading(mask, mask_function)
    return mask


def _check_reading(mask: LayerMask, mask_function: Callable[..., Any]) -> None:
    """Compare the parsed mask with transformers' function at a few pairs: in another version the same closures may
    have another meaning.

    This runs once for closures of one outline and shape, since calling functions that read tables on a device waits.
    """
    about = mask.term.outline, mask.batch, mask.q_len, mask.kv_len, mask.q_offset, mask.kv_offset
    if about in _checked:
        return
    if "function" in mask.term.names or not (mask.batch and mask.q_len and mask.kv_len):
        return
    step = np.arange(_SAMPLES, dtype=np.int64)
    b, q = step * 5 % mask.batch, step * 0x9E3779B1 % mask.q_len + mask.q_offset
    kv = mask.kv_offset + np.where(step % 2, step * 0x85EBCA6B, q - mask.kv_offset - step // 8) % mask.kv_len
    device = next(_tables(mask_function), torch.zeros(0)).device
    answers = mask_function(*(torch.as_tensor(x, device=device) for x in (b, np.zeros_like(b), q, kv))).cpu().numpy()
    reading, base = np.zeros(len(b), dtype=bool), mask.frame.base
    for row in range(mask.batch):
        here = b == row
        reading[here] = mask.rule.allows(q[here] - base, kv[here] - base, row=row)
    wrong = np.flatnonzero(np.broadcast_to(answers, b.shape) != reading)
    if len(wrong):
        at = int(wrong[0])
        raise MaskError(
            f"transformers' mask is {not reading[at]} at query {q[at]} and key {kv[at]} of row {b[at]}, but Longspan"
            f" parsed it as {reading[at]}: this version of transformers has masks that Longspan does not know. Use one"
            f" that was tested ({', '.join(map(short, TRANSFORMERS))}), or another attn_implementation."
        )
    while len(_checked) >= _MOST_CHECKED:
        del _checked[next(iter(_checked))]
    _checked[about] = None


_checked: dict[Any, None] = {}
"""Outlines and shapes whose reading was right; the oldest are dropped."""


def _tables(function: Callable[..., Any]) -> Any:
    """Yield the tensors that a closure holds."""
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        if isinstance(content, Tensor):
            yield content
        for part in content if isinstance(content, tuple) else ():
            yield from _tables(part)
