"""Shard a whole batch: document numbers, shifted labels, positions, and one rank's part; prefetch the next batch.

Labels are shifted before the sequence is sharded: afterwards the token after a rank's last one is on another rank.

Shapes: B batch rows, S tokens of the whole sequence; tokens are the last dim of every known key.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan._compile import opaque
from longspan.errors import MaskError
from longspan.layouts import Layout
from longspan.layouts.layout import check_fill, to_device
from longspan.masks import Mask
from longspan.masks.document_rows import Documents, document_rows
from longspan.planning.plan import Plan
from longspan.spans import Ints, check_int
from longspan.training.groups import BatchError, check_batch, check_layout

# -- Document numbers per position -------------------------------------------------------------------------------------
# Labels and positions must not cross document borders.
#
# Shapes: R batch rows (1 if all rows are equal), S tokens.


def document_numbers(documents: Any, seq_len: int) -> Ints:
    """Return the document of each position, as `document_rows`, raising `BatchError`.

    >>> document_numbers([2, 3], 5).tolist()
    [[0, 0, 1, 1, 1]]
    """
    return document_rows(documents, seq_len, BatchError)


def document_counts(documents: Any, numbers: Ints) -> list[int]:
    """Return the number of documents in each row of `numbers`, including those of length 0 among lengths.

    >>> document_counts([2, 0, 3], document_numbers([2, 0, 3], 5)), document_counts(None, document_numbers(None, 5))
    ([3], [1])
    """
    if documents is None or isinstance(documents, Mask):
        return [int(row[-1]) + 1 if len(row) else 1 for row in numbers]
    nested = len(documents) and np.ndim(documents[0]) == 1
    return [len(lengths) for lengths in (documents if nested else [documents])]


def positions_within(numbers: Ints) -> Ints:
    """Return positions that restart at 0 with every document.

    >>> positions_within(np.array([[0, 0, 1, 1, 1]])).tolist()
    [[0, 1, 0, 1, 2]]
    """
    place = np.broadcast_to(np.arange(numbers.shape[1], dtype=np.int64), numbers.shape)
    starts = np.ones(numbers.shape, dtype=bool)
    starts[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return place - np.maximum.accumulate(np.where(starts, place, 0), axis=1)


def shift_tokens(x: Tensor, shift: int, *, documents: Documents = None, fill: float = 0) -> Tensor:
    """Shift a whole tensor, tokens last, so that each position has the token `shift` positions later; `fill` if that is
    past the end of the sequence or in another document.

    >>> shift_tokens(torch.arange(5), 1, documents=[2, 3], fill=-1).tolist()
    [1, -1, 3, 4, -1]
    """
    if not isinstance(x, Tensor) or not x.ndim:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise BatchError(f"x must be a tensor whose last dim is tokens, but got {got}.")
    return shift_within_documents(x, shift, document_numbers(documents, x.shape[-1]), fill)


def shift_within_documents(x: Tensor, shift: int, numbers: Ints, fill: float) -> Tensor:
    """Do as `shift_tokens`, with documents as `document_numbers`."""
    seq_len = x.shape[-1]
    shift = check_int(shift, "shift", "shift_tokens()", BatchError)
    check_rows(numbers, 1 if x.ndim < 2 else x.shape[-2])
    check_fill(x, fill, "fill", BatchError)
    moved = x.new_full(x.shape, fill)
    if shift >= seq_len:
        return moved
    same = to_device(torch.from_numpy(numbers[:, shift:] == numbers[:, : seq_len - shift]), x.device)
    if x.ndim == 1:
        same = same[0]
    moved[..., : seq_len - shift] = torch.where(same, x[..., shift:], moved[..., : seq_len - shift])
    return moved


def check_rows(numbers: Ints, rows: int) -> None:
    """Check that documents are for this number of batch rows, or the same for all."""
    if len(numbers) not in (1, rows):
        raise BatchError(
            f"documents must be lengths for all batch rows, or one list per row, but got {len(numbers)} lists for"
            f" {rows} batch rows."
        )


# -- Documents from a packed batch: restarting positions, cumulative lengths, or a number per token --------------------
# Shapes: B batch rows, S tokens; numbers have as many rows as their source, B or 1.


def restarts(position_ids: Any, batch: int, length: int) -> NDArray[Any] | None:
    """Return document numbers (rows, S) from positions: a document starts unless they increase by one; None for one.

    >>> import torch
    >>> restarts(torch.tensor([[0, 1, 0, 1, 2]]), 1, 5)
    array([[0, 0, 1, 1, 1]])
    """
    if not isinstance(position_ids, Tensor) or position_ids.ndim != 2 or position_ids.shape[1] != length:
        return None
    if position_ids.shape[0] not in (1, batch) or not length:
        return None
    places = position_ids.detach().cpu().numpy()
    numbers = np.zeros(places.shape, dtype=np.int64)
    numbers[:, 1:] = np.cumsum(places[:, 1:] - places[:, :-1] != 1, axis=1)
    return numbers if numbers[:, -1].any() else None


def numbers_of(documents: dict[str, Any], batch: int, length: int) -> NDArray[Any] | None:
    """Return document numbers (rows, S) from arguments of flash attention and recurrent layers: cumulative lengths, or
    numbers.

    >>> import torch
    >>> numbers_of({"cu_seq_lens_q": torch.tensor([0, 1, 3])}, 1, 3)
    array([[0, 1, 1]])
    """
    lengths = [documents.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k")]
    edges = {_edges(x) for x in lengths if x is not None}
    if len(edges) > 1:
        raise MaskError("cu_seq_lens_q and cu_seq_lens_k differ, but queries and keys are the same tokens.")
    if not edges:
        index: Any = documents.get("seq_idx")
        if index is None:
            return None
        if not isinstance(index, Tensor) or tuple(index.shape) not in ((length,), (1, length), (batch, length)):
            kind = f"a tensor of shape {tuple(index.shape)}" if isinstance(index, Tensor) else type(index).__name__
            raise MaskError(
                f"seq_idx is {kind}, but must be a tensor (batch, tokens) = {(batch, length)} or (1, {length}), with"
                f" the number of each token's document."
            )
        return index.detach().cpu().numpy().reshape(-1, length)
    borders = np.asarray(edges.pop())
    if borders[0] != 0 or borders[-1] != length:
        raise MaskError(
            f"cu_seq_lens run from {borders[0]} to {borders[-1]}, but the sequence has {length} tokens in one row."
            f" Packed batches have one row, and cumulative lengths from 0 to its end."
        )
    if batch != 1:
        raise MaskError(
            f"cu_seq_lens are for one batch row, but got {batch} rows of {length} tokens. Pack all documents into one"
            f" row, or pass seq_idx (batch, tokens), a number for each token's document."
        )
    return np.repeat(np.arange(len(borders) - 1), np.diff(borders))[None]


def _edges(lengths: Any) -> tuple[int, ...]:
    is_integer = isinstance(lengths, Tensor) and not lengths.is_floating_point() and lengths.ndim == 1
    edges = tuple(lengths.tolist()) if is_integer else ()
    if len(edges) < 2 or list(edges) != sorted(edges):
        got = (
            f"{lengths.dtype} of shape {tuple(lengths.shape)}"
            if isinstance(lengths, Tensor)
            else type(lengths).__name__
        )
        raise MaskError(
            f"cu_seq_lens must be a non-decreasing integer tensor that starts at 0, such as torch.tensor([0, 10, 25])"
            f" for documents of 10 and 15 tokens, but got {got}."
        )
    return edges


# -- Sharding a batch --------------------------------------------------------------------------------------------------


KNOWN = ("input_ids", "labels", "shift_labels", "loss_mask", "position_ids")


@opaque
@dataclass(frozen=True, eq=False)
class BatchCut:
    """How a batch was sharded: enough to shard other tensors the same way, or to count by document."""

    layout: Layout
    rank: int | None = None
    documents: Documents = None

    @cached_property
    def numbers(self) -> Ints:
        """The document of each position, (rows or 1, S)."""
        return document_numbers(self.documents, self.layout.seq_len)

    @cached_property
    def counts(self) -> list[int]:
        """The number of documents in each of these rows."""
        return document_counts(self.documents, self.numbers)


class Batch(dict[str, Any]):
    """One rank's part of a batch: a dict that records in `cut` how it was sharded.

    A copy into another dict has no such record, and is refused where it is needed; `to` keeps it.
    """

    cut: BatchCut | None

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (), cut: BatchCut | None = None) -> None:
        super().__init__(values)
        self.cut = cut

    @property
    def layout(self) -> Layout | None:
        """Which rank holds which tokens; None if unknown."""
        return None if self.cut is None else self.cut.layout

    def to(self, *args: Any, **options: Any) -> Batch:
        """Return the batch with `Tensor.to` applied to all its tensors."""
        moved = {name: x.to(*args, **options) if isinstance(x, Tensor) else x for name, x in self.items()}
        return Batch(moved, self.cut)


Like: TypeAlias = Batch | Layout | Plan
"""How tokens were sharded: a batch from `shard_batch`, a layout, or a plan with a layout."""


def cut_of(like: Any, caller: str) -> BatchCut:
    """Return how to shard, from a batch that was sharded, a layout, or a plan."""
    if isinstance(like, Batch) and like.cut is not None:
        return like.cut
    if isinstance(like, Mapping):
        raise BatchError(
            f"{caller} got a {type(like).__name__} that does not say how it was cut. Pass the batch that shard_batch"
            f" returned (copies into another dict lose it; batch.to(device) does not), or the layout."
        )
    layout = like if isinstance(like, Layout) else getattr(like, "layout", like)
    check_layout(layout, caller)
    return BatchCut(layout)


def shard_batch(
    batch: Mapping[str, Any],
    layout: Layout | Plan,
    rank: int,
    *,
    documents: Documents = None,
    mask: Mask | None = None,
    positions: str | None = None,
    num_shifts: int = 1,
    dims: Mapping[str, int | None] | None = None,
    fills: Mapping[str, float] | None = None,
    pad_id: int = 0,
    ignore_index: int = -100,
) -> Batch:
    """Return the rank's part of a batch that every rank of the sequence has whole. `layout` may be the step's plan, so
    that both use one layout: `shard_batch(batch, plan, rank)`, or `plan.shard(batch, rank)`.

    - `labels` are unshifted tokens, as tokenizers return them. The result has `shift_labels`: each position has the
      next token's label, `ignore_index` at the end of the sequence or document. `shift_labels` of the batch are used
      as they are: also the last token of a document may have a label, such as the end of text. With `num_shifts` = n
      (multi-token prediction) there are also `shift_labels_2` to `shift_labels_n`, the tokens 2 to n positions later.
    - `loss_mask` (0 or 1) is shifted with its labels; labels it excludes become `ignore_index`, and the result's
      `loss_mask` tells which `shift_labels` count.
    - `position_ids` are (B, S), or (3, B, S) as for images and video. Without them `positions` defines them: "sequence"
      counts through, "document" restarts with every document.
    - `documents`: lengths, or a list of lengths per batch row. Or `mask`: the mask of attention, from which documents
      are read (see `longspan.gated_delta_rule` for which masks; for chunked attention pass lengths).
    - Other tensors are sharded along their dim in `dims`, or stay whole if that is None. A tensor with a dim as long as
      the sequence that is not in `dims` is refused. All else is returned unchanged.

    Padding slots hold `pad_id`, `ignore_index`, position 0, and 0 or the value in `fills` for other tensors.

    >>> batch = {"input_ids": torch.arange(8), "labels": torch.arange(8)}
    >>> shard_batch(batch, zigzag(8, 2), 0, documents=[6, 2], positions="document")
    ... # doctest: +NORMALIZE_WHITESPACE
    {'input_ids': tensor([0, 1, 6, 7]), 'shift_labels': tensor([ 1, 2, 7, -100]),
     'position_ids': tensor([0, 1, 0, 1])}
    """
    dims, fills = dims or {}, fills or {}
    layout = _check(batch, layout, dims, fills)
    if mask is None:
        documents = documents.tolist() if hasattr(documents, "tolist") else documents  # type: ignore[union-attr]
    elif documents is not None:
        raise BatchError(
            "documents and mask cannot be combined: documents are read from a mask. Leave one of them out."
        )
    elif not isinstance(mask, Mask):
        raise BatchError(
            f"mask must be one of longspan.masks, the mask of attention, but got {type(mask).__name__}. Labels are"
            f" excluded by loss_mask in the batch."
        )
    cut = BatchCut(layout, rank, documents if mask is None else mask)
    numbers = cut.numbers
    part = Batch(cut=cut)
    if "input_ids" in batch:
        part["input_ids"] = layout.shard(batch["input_ids"], rank, -1, pad_id)
    for name, labels in _labels(batch, numbers, num_shifts, ignore_index).items():
        part[name] = layout.shard(labels, rank, -1, 0 if name == "loss_mask" else ignore_index)
    position_ids = _position_ids(batch, numbers, positions, cut.documents is not None)
    if position_ids is not None:
        part["position_ids"] = layout.shard(position_ids, rank, -1, 0)
    for name in (name for name in batch if name not in KNOWN):
        shape = tuple(getattr(batch[name], "shape", ()))
        if name not in dims and layout.seq_len in shape:
            at = shape.index(layout.seq_len)
            advice = f"Name its dim: dims={{{name!r}: {at}}}, or dims={{{name!r}: None}} to keep it whole."
            if name == "attention_mask":
                advice = "The plan has the mask of attention: take this out of the batch. Otherwise: " + advice
            raise BatchError(
                f"{name} of shape {shape} has a dim as long as the sequence, {layout.seq_len}, but is not in dims."
                f" {advice}"
            )
        dim = dims.get(name)
        part[name] = batch[name] if dim is None else layout.shard(batch[name], rank, dim, fills.get(name, 0))
    return part


def _check(batch: Mapping[str, Any], like: Any, dims: Mapping[str, Any], fills: Mapping[str, Any]) -> Layout:
    check_batch(batch, "shard_batch")
    layout = cut_of(like, "shard_batch").layout
    shapes: set[tuple[int, ...]] = set()
    for name in KNOWN:
        if name not in batch:
            continue
        value = batch[name]
        if not isinstance(value, Tensor):
            raise BatchError(f"{name} must be a tensor, but is {type(value).__name__}. Collate the batch first.")
        if value.ndim < 1 or value.ndim > 2 + (name == "position_ids") or value.shape[-1] != layout.seq_len:
            raise BatchError(
                f"{name} has shape {tuple(value.shape)}, but its last dim must be the {layout.seq_len} tokens of"
                f" {layout}. Pass whole tensors, not shards, and a layout for their length."
            )
        shapes.add(tuple(value.shape[-2:]) if name == "position_ids" and value.ndim == 3 else tuple(value.shape))
    batched = {shape for shape in shapes if len(shape) == 2 and shape[0] != 1}
    if len(batched) > 1 or (len({len(shape) for shape in shapes}) > 1 and batched):
        raise BatchError(
            f"ids, labels and positions of a batch must have one shape, (batch, tokens), but got {sorted(shapes)}."
            f" Only position_ids may have one more dim in front."
        )
    for name in dims:
        if name not in batch or name in KNOWN:
            problem = "is known by name: its tokens are its last dim" if name in KNOWN else "is not in the batch"
            raise BatchError(
                f"dims names {name!r}, which {problem}. dims is for other tensors of the batch; this one has"
                f" {', '.join(batch)}."
            )
        if dims[name] is not None and not hasattr(batch[name], "shape"):
            raise BatchError(
                f"dims names {name!r}, which is not a tensor but {type(batch[name]).__name__}. Convert it."
            )
    for name in fills:
        if dims.get(name) is None:
            raise BatchError(f"fills names {name!r}, but dims does not say along which dim it is cut. Add it to dims.")
    return layout


def _labels(batch: Mapping[str, Any], numbers: Any, num_shifts: int, ignore_index: int) -> dict[str, Tensor]:
    """Return labels for every shift, and which of the first count, all in whole sequences."""
    num_shifts = check_int(num_shifts, "num_shifts", "shard_batch()", BatchError, low=1)
    names = [name for name in ("labels", "shift_labels") if name in batch]
    if len(names) > 1:
        raise BatchError("the batch must have labels (unshifted) or shift_labels (shifted by one), but not both.")
    if not names:
        if "loss_mask" in batch or num_shifts > 1:
            raise BatchError(
                "loss_mask and num_shifts cannot be used without labels. Add labels (or shift_labels) to the batch, or"
                " rename the mask and name it in dims if it does not belong to labels."
            )
        return {}
    labels, done = batch[names[0]], int(names[0] == "shift_labels")
    check_fill(labels, ignore_index, "ignore_index", BatchError)
    if "loss_mask" in batch:
        hint = (
            "If these are weights of tokens, shift them with longspan.training.shift_tokens, name them in dims, and"
            " multiply the losses of tokens by them."
        )
        labels = labels.masked_fill(~as_bool(batch["loss_mask"], "loss_mask", hint), ignore_index)
    shifts = {
        "shift_labels" + (f"_{shift}" if shift > 1 else ""): shift_within_documents(
            labels, shift - done, numbers, ignore_index
        )
        for shift in range(1, num_shifts + 1)
    }
    if "loss_mask" in batch:
        shifts["loss_mask"] = (shifts["shift_labels"] != ignore_index).to(batch["loss_mask"].dtype)
    return shifts


def as_bool(mask: Tensor, name: str, hint: str) -> Tensor:
    """Return a mask of 0 and 1 as booleans."""
    kept = mask != 0
    if not torch.equal(kept.to(mask.dtype), mask):
        raise BatchError(f"{name} must hold 0 and 1 only, but holds other values. {hint}")
    return kept


def _position_ids(batch: Mapping[str, Any], numbers: Any, positions: str | None, packed: bool) -> Tensor | None:
    if "position_ids" in batch:
        if positions is not None:
            raise BatchError("positions and position_ids of the batch cannot be combined. Take one of them out.")
        return batch["position_ids"]
    like = next((batch[name] for name in ("input_ids", "labels", "shift_labels") if name in batch), None)
    if positions is None and packed:
        raise BatchError(
            "the batch has documents but no position_ids. Pass positions='document' if they restart with every"
            " document, or positions='sequence' if they count through."
        )
    if positions not in (None, "sequence", "document"):
        raise BatchError(f"positions must be 'sequence' or 'document', but got {positions!r}.")
    places = positions_within(numbers if positions == "document" else np.zeros_like(numbers[:1]))
    if like is None:
        return None if positions is None else torch.as_tensor(places)
    position_ids = to_device(torch.from_numpy(places), like.device)
    check_rows(numbers, 1 if like.ndim < 2 else like.shape[-2])
    return position_ids[0] if like.ndim == 1 else position_ids.expand(like.shape).contiguous()


# -- The next batch, in a thread ---------------------------------------------------------------------------------------


T = TypeVar("T")
R = TypeVar("R")


def prefetch(batches: Iterable[T], prepare: Callable[[T], R]) -> Generator[R]:
    """Yield `prepare(batch)` for every batch. A thread reads and prepares the next batch while the loop uses this one.

    `prepare` plans, shards and prepares: everything that a new batch needs on the host. It sends no messages, since
    their order with those of the training step could differ between ranks.

        def prepare(batch):
            plan = ls.plan(mask_of(batch), layout_of(batch), ...)
            plan.prepare(rank, device)
            return plan, plan.shard(batch, rank).to(device)

        for plan, batch in ls.training.prefetch(loader, prepare):
            ...

    Batches come in order. An exception is raised where its batch would come. The thread uses the device and stream
    that are current when the loop starts, and has ended when the loop has.
    """
    stream = torch.accelerator.current_stream() if torch.accelerator.is_available() else None
    source = iter(batches)

    def start() -> None:
        if stream is not None:
            torch.accelerator.set_stream(stream)  # also makes its device current

    def step() -> tuple[R] | None:
        for batch in source:
            return (prepare(batch),)
        return None

    with ThreadPoolExecutor(1, "longspan-prefetch", start) as worker:
        future = worker.submit(step)
        while (item := future.result()) is not None:
            future = worker.submit(step)
            yield item[0]
