"""A loader that reads only the documents of this rank, for the micro-batches of `longspan.batches`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from longspan.planning.batches import Batches, BatchStep, MicroBatch
from longspan.spans import Ints, check_int, truncated_repr
from longspan.training.batch import Batch, BatchCut, prefetch
from longspan.training.groups import BatchError


class TokenFile:
    """Documents that lie one after another in a file of token ids. Only what is read is loaded.

    `path` is a file of ids of `dtype`, without a header; `lengths` are the tokens of each document, in its order.
    """

    def __init__(self, path: Any, lengths: ArrayLike, dtype: Any = np.uint16) -> None:
        try:
            self.lengths = np.array(lengths, dtype=np.int64)
            is_count = self.lengths.ndim == 1 and np.array_equal(self.lengths, np.asarray(lengths))
        except (ValueError, TypeError, OverflowError):
            is_count = False
        if not is_count or (self.lengths < 0).any():
            raise BatchError(
                f"`lengths` must be a list of integers, each at least 0, but got {truncated_repr(lengths)}. Pass the"
                f" number of tokens of each document."
            )
        self._edges = np.concatenate(([0], np.cumsum(self.lengths)))
        dtype, size = np.dtype(dtype), os.stat(path).st_size
        if dtype.kind not in "iu":
            raise BatchError(
                f"`dtype` must be that of integers, but got {dtype}. Pass the dtype of the ids in the file."
            )
        if size != self._edges[-1] * dtype.itemsize:
            raise BatchError(
                f"`lengths` must sum up to the tokens of the file, which has {size / dtype.itemsize:g} of {dtype}, but"
                f" got {self._edges[-1]}. Check dtype and lengths."
            )
        self._ids: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r") if size else np.empty(0, dtype=dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.read(index, 0, int(self.lengths[index]))

    def read(self, index: int, start: int, stop: int) -> NDArray[Any]:
        """Return tokens start to stop of a document."""
        if not 0 <= start <= stop <= self.lengths[index]:
            raise BatchError(
                f"`start` and `stop` must be in order and in [0, {self.lengths[index]}], the tokens of document"
                f" {index}, but got {start} and {stop}."
            )
        first = int(self._edges[:-1][index])
        return np.asarray(self._ids[first + start : first + stop])


class DocumentLoader:
    """Iterate over the steps of `longspan.batches`: triples of a step, one of its micro-batches, and this rank's part.

    The part is a `Batch` of one row with `input_ids`, `position_ids` that restart with every document, and
    `shift_labels`, which are shifted before sharding and not across documents. Only documents that touch this rank are
    read. A thread reads one micro-batch ahead::

        sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"}
        loader = DocumentLoader(dataset, batches, rank, prepare=lambda micro: micro.plan(**sizes).prepare(rank, device))
        for step, micro, batch in loader:
            logits = model(batch["input_ids"], batch["position_ids"], micro.plan(**sizes))
            loss = token_loss(logits, batch["shift_labels"], num_tokens=step.labels, group=group, gradients="average")
            loss.backward()
            if micro is step.micro_batches[-1]:
                optimizer.step()

    `state_dict` has the number of the first step of which the loop has not received all micro-batches: gradients of a
    step that was stopped in between are lost, so it is computed again. After the last step it starts again.

    `documents` is a map-style dataset (Hugging Face's among them), a `TokenFile` or a list. An item is a document: a
    sequence of token ids, or a dict with `input_ids` and, if not all tokens are predicted, `labels`. `batches` is what
    `longspan.batches` returned for the lengths of these documents, and `rank` is this rank among all ranks. With
    `ranks_per_group`, steps and micro-batches are those of the rank's group (`BatchStep.of_rank`).
    `prepare` is called in the thread with each micro-batch ahead of time; it must not send messages.
    """

    def __init__(
        self, documents: Any, batches: Batches, rank: int, *, prepare: Callable[[MicroBatch], Any] | None = None
    ) -> None:
        num = len(documents) if hasattr(documents, "__len__") else f"a {type(documents).__name__} without a length"
        if num != len(batches.lengths):
            raise BatchError(
                f"`documents` must be the {len(batches.lengths)} documents of `batches`, but got {num}. Give"
                f" longspan.batches the lengths of all of them, and read streams into a list."
            )
        if isinstance(documents, TokenFile) and not np.array_equal(documents.lengths, batches.lengths):
            first = int(np.flatnonzero(documents.lengths != batches.lengths)[0])
            raise BatchError(
                f"`documents` must have the lengths of `batches`, but document {first} has {documents.lengths[first]}"
                f" tokens instead of {batches.lengths[first]}. Give longspan.batches the lengths of the file."
            )
        self.documents, self.batches, self.prepare = documents, batches, prepare
        self.rank = check_int(rank, "rank", "DocumentLoader()", BatchError)
        if self.rank >= batches.ranks:
            raise BatchError(f"`rank` must be less than {batches.ranks}, the ranks of `batches`, but got {rank}.")
        self.num_steps = 0
        """Steps of which the loop has received all micro-batches."""

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[tuple[BatchStep, MicroBatch, Batch]]:
        steps = (self.batches[number].of_rank(self.rank) for number in range(self.num_steps, len(self.batches)))

        def read(pair: tuple[BatchStep, MicroBatch]) -> tuple[BatchStep, MicroBatch, Batch]:
            step, micro = pair
            if self.prepare is not None:
                self.prepare(micro)
            first, last = self.batches.edges[step.number : step.number + 2]
            counts = {(number, start): count for number, start, _, count in self.batches.parts[first:last].tolist()}
            return step, micro, read_part(self.documents, micro, self.rank % micro.ranks, self.batches.lengths, counts)

        for item in prefetch(((step, micro) for step in steps for micro in step), read):
            step, micro, _ = item
            self.num_steps += micro is step.micro_batches[-1]
            yield item
        self.num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        """Return how many steps the loop has received, and a fingerprint of the batches."""
        return {"num_steps": self.num_steps, "batches": self._fingerprint}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the first step that was not complete when `state_dict` was called."""
        if state.get("batches") != self._fingerprint:
            raise BatchError(
                "`state` must come from a loader over the same batches, but its fingerprint differs. Call"
                " longspan.batches with the same lengths, ranks, limits, order and seed as before."
            )
        self.num_steps = int(state["num_steps"])

    @cached_property
    def _fingerprint(self) -> str:
        batches = self.batches
        settings = (
            batches.numbers, batches.ranks, batches.ranks_per_group, batches.tokens_per_rank, batches.causal,
            batches.pair_cost,
        )  # fmt: skip
        digest = hashlib.sha256(repr(settings).encode())
        digest.update(batches.parts.tobytes())
        digest.update(batches.edges.tobytes())
        return digest.hexdigest()


def read_part(
    documents: Any, micro: MicroBatch, rank: int, sizes: Ints, counts: Mapping[tuple[int, int], int]
) -> Batch:
    """Return this rank's part of a micro-batch, reading only documents that touch the rank.

    `sizes` are the lengths of all documents, and `counts` the labels of each document and start: they decide the
    loss's mean, so the documents must have as many.
    """

    def integers(index: int, values: Any) -> NDArray[np.int64]:
        array = np.asarray(values)
        if array.size and array.dtype.kind not in "iu":
            raise BatchError(f"document {index} must be integers, but got {array.dtype}. Pass token ids and labels.")
        return array.astype(np.int64, copy=False)

    def read(place: int, begin: int, end: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ids and labels of a document's tokens `begin` to `end`."""
        index, offset, length = (int(x[place]) for x in (micro.documents, micro.starts, micro.lengths))
        num_labels = max(length - 1, 0)
        if hasattr(documents, "read"):
            ids = labels = integers(index, documents.read(index, offset + begin, offset + end))
        else:
            item = documents[index]
            whole: Sequence[Any] = item["input_ids"] if isinstance(item, Mapping) else item
            raw: Any = item.get("labels") if isinstance(item, Mapping) else None
            if isinstance(whole, str | bytes):
                raise BatchError(f"document {index} must be token ids, but got a {type(whole).__name__}. Tokenize it.")
            if len(whole) != sizes[index] or (raw is not None and len(raw) != len(whole)):
                raise BatchError(
                    f"document {index} must have {sizes[index]} tokens, as in the lengths of longspan.batches,"
                    f" and as many labels, but got {len(whole)} tokens"
                    f"{'' if raw is None else f' and {len(raw)} labels'}. Give longspan.batches the lengths of"
                    f" these documents."
                )
            if raw is not None:
                num_labels = int((np.asarray(raw[offset + 1 : offset + length]) != -100).sum())
            ids = integers(index, whole[offset + begin : offset + end])
            labels = ids if raw is None else integers(index, raw[offset + begin : offset + end])
        if num_labels != counts[index, offset]:
            raise BatchError(
                f"document {index} must have {counts[index, offset]} labels, as longspan.batches counted, but got"
                f" {num_labels}, without its first token and -100. Pass labels= with these numbers to longspan.batches."
            )
        return ids, labels

    edges = np.concatenate(([0], np.cumsum(micro.lengths)))
    ids: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    positions: list[NDArray[np.int64]] = []
    for start, stop in micro.layout.span_table(rank)[:, :2].tolist():
        first = int(np.searchsorted(edges, start, side="right")) - 1
        last = int(np.searchsorted(edges, stop, side="left"))
        for place in range(first, last):
            begin = max(start, int(edges[place])) - int(edges[place])
            end = min(stop, int(edges[place + 1])) - int(edges[place])
            if begin == end:
                continue
            more = min(end + 1, int(micro.lengths[place]))  # the label of the last token is the token after it
            tokens, targets = read(place, begin, more)
            ids.append(tokens[: end - begin])
            shifted = np.full(end - begin, -100, dtype=np.int64)
            shifted[: more - begin - 1] = targets[1:]
            labels.append(shifted)
            positions.append(np.arange(begin, end, dtype=np.int64))
    batch = {"input_ids": ids, "shift_labels": labels, "position_ids": positions}
    cut = BatchCut(micro.layout, rank, micro.lengths.tolist())
    empty = np.empty(0, dtype=np.int64)
    return Batch({name: torch.from_numpy(np.concatenate([empty, *parts]))[None] for name, parts in batch.items()}, cut)
