"""Batches: which documents every step and micro-batch of an epoch has, as a function of lengths and step number.

All ranks are one group, or several of `ranks_per_group`. Documents are taken in order until a step has its tokens; the
step's documents are packed into micro-batches and groups of about equal cost, and `layouts.whole_documents` places
those of a group on its ranks. Nothing is sent and nothing remembered: every rank computes the same steps alone, and any
step without the ones before it.

The loss of a step is a sum over its labels, divided by their number. Any partition of the documents into micro-batches,
groups and ranks has the same sum, if each part counts by its share of the labels: its `weight`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longspan.errors import PlanError
from longspan.layouts import Layout, whole_documents
from longspan.masks import Mask, causal, documents
from longspan.masks.document_rows import document_edges
from longspan.spans import Ints, check_int, truncated_repr

if TYPE_CHECKING:
    from longspan.planning.plan import Plan

NO_LABEL = -100
PAIR_COST = 1 / (6 * 4096)
"""Cost of an attention pair, in units of a token's cost in all other layers: 1 / (6 * hidden size) in transformers."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents that one forward and backward pass computes, on all ranks or, after `BatchStep.of_rank`, on a group."""

    documents: Ints
    """The number of each document, in the order in which they are packed."""
    starts: Ints
    """The first token of each; not 0 for the later parts of a document that was cut."""
    lengths: Ints
    """The tokens of each."""
    labels: int
    """How many tokens have a label."""
    weight: float
    """Its share of the step's labels: multiply the mean loss by it before backward."""
    ranks: int
    ranks_per_node: int
    causal: bool
    groups: tuple[MicroBatch, ...] = ()
    """The part of each group of ranks, if there are several; some may have no documents."""

    @cached_property
    def layout(self) -> Layout:
        """Which rank holds which tokens of the packed documents."""
        if self.groups:
            raise PlanError(
                f"a layout must be that of one group of ranks, but this micro-batch has {len(self.groups)}. Take"
                f" step.of_rank(rank), whose micro-batches are those of the rank's group."
            )
        return whole_documents(
            self.lengths, world_size=self.ranks, ranks_per_node=self.ranks_per_node, causal=self.causal
        )

    @cached_property
    def mask(self) -> Mask:
        """Tokens attend to their own document, and if causal to earlier tokens only."""
        packed = documents(self.lengths)
        return packed & causal() if self.causal else packed

    if TYPE_CHECKING:

        def plan(self, **sizes: Any) -> Plan:
            """Return `longspan.plan` of mask and layout; `sizes` are its keyword arguments."""
            ...

    def __repr__(self) -> str:
        return f"<micro-batch of {len(self.documents)} documents, {int(self.lengths.sum())} tokens>"


@dataclass(frozen=True, eq=False)
class BatchStep:
    """The micro-batches between two updates of the optimizer."""

    number: int
    labels: int
    """How many tokens have a label, in all micro-batches."""
    micro_batches: tuple[MicroBatch, ...]

    def of_rank(self, rank: int) -> BatchStep:
        """Return the step with the micro-batches of this rank's group; `labels` still counts those of all groups."""
        if self.micro_batches:
            rank = check_int(rank, "rank", "of_rank()", PlanError, high=self.micro_batches[0].ranks - 1)
        return replace(
            self, micro_batches=tuple(m.groups[rank * len(m.groups) // m.ranks] if m.groups else m for m in self)
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __repr__(self) -> str:
        return f"<step {self.number}, {len(self)} micro-batches, {self.labels} labels>"


@dataclass(frozen=True, eq=False)
class Batches(Sequence[BatchStep]):
    """The steps of an epoch. `batches[k]` is step k, and `batches[k:]` the steps from k on, as after a restart."""

    parts: Ints
    """(document, start, length, labels) of each document or part, in the order of the epoch."""
    edges: Ints
    """The first part of each step, and the number of parts."""
    numbers: range
    lengths: Ints
    ranks: int
    tokens_per_rank: int
    ranks_per_node: int
    causal: bool
    pair_cost: float
    ranks_per_group: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        return f"<{len(self)} steps of {len(self.lengths)} documents over {self.ranks} ranks>"

    @overload
    def __getitem__(self, index: int) -> BatchStep: ...
    @overload
    def __getitem__(self, index: slice) -> Batches: ...
    def __getitem__(self, index: int | slice) -> BatchStep | Batches:
        if isinstance(index, slice):
            return replace(self, numbers=self.numbers[index])
        number = self.numbers[index]
        parts = self.parts[self.edges[number] : self.edges[number + 1]]
        labels, num_groups = int(parts[:, 3].sum()), self.ranks // self.ranks_per_group

        def make(part: Ints, ranks: int, groups: tuple[MicroBatch, ...] = ()) -> MicroBatch:
            count = int(part[:, 3].sum())
            sizes = part[:, 0], part[:, 1], part[:, 2], count, count / max(labels, 1)
            return MicroBatch(*sizes, ranks, self.ranks_per_node, self.causal, groups)

        packed = self._pack(parts, num_groups)
        if num_groups == 1:
            return BatchStep(number, labels, tuple(make(part, self.ranks) for part in packed))
        micro_batches = list[MicroBatch]()
        for first in range(0, len(packed), num_groups):
            own = packed[first : first + num_groups]
            groups = tuple(make(part, self.ranks_per_group) for part in own)
            micro_batches.append(make(np.concatenate(own), self.ranks, groups))
        return BatchStep(number, labels, tuple(micro_batches))

    def _pack(self, parts: Ints, num_groups: int) -> list[Ints]:
        """Return the parts of each group of each micro-batch: as few micro-batches as hold the tokens, of about equal
        cost. Groups wait for each other, so those of one micro-batch are next to each other by cost."""
        most = self.ranks_per_group * self.tokens_per_rank
        sizes = parts[:, 2].astype(np.float64)
        costs = sizes * (1 + self.pair_cost * sizes * (0.5 if self.causal else 1.0))
        order = np.argsort(-costs, kind="stable")
        for micro_batches in range(max(1, -(-int(sizes.sum()) // (most * num_groups))), len(parts) + 1):
            num = micro_batches * num_groups
            tokens, cost = np.zeros(num), np.zeros(num)
            which = np.empty(len(parts), dtype=np.int64)
            for i in order.tolist():
                chosen = int(np.where(tokens + sizes[i] <= most, cost, np.inf).argmin())
                tokens[chosen] += sizes[i]
                cost[chosen] += costs[i]
                which[i] = chosen
            if tokens.max() <= most:
                bins = range(num) if num_groups == 1 else np.argsort(-cost, kind="stable").tolist()
                return [parts[which == number] for number in bins]
        raise AssertionError("a micro-batch holds every single document")

    def check(self, steps: Iterable[BatchStep]) -> None:
        """Raise `PlanError` unless these steps have every token of every document of the epoch exactly once, cut no
        document more often than needed, and weigh micro-batches, or their groups, by their labels.
        """
        order = np.lexsort((self.parts[:, 1], self.parts[:, 0]))
        wanted, pieces = self.parts[order], [self.parts[:0, :3]]
        labels_of = {(number, start): count for number, start, _, count in wanted.tolist()}
        most = self.ranks_per_group * self.tokens_per_rank
        for step in steps:
            labels = 0
            for micro in (part for every in step for part in every.groups or (every,)):
                rows = np.stack((micro.documents, micro.starts, micro.lengths), axis=1)
                pieces.append(rows)
                if int(micro.lengths.sum()) > most:
                    raise PlanError(
                        f"step {step.number}: a micro-batch of a group must have at most {most} tokens, but has"
                        f" {int(micro.lengths.sum())}."
                    )
                count = sum(labels_of.get((number, start), 0) for number, start, _ in rows.tolist())
                if micro.labels != count or micro.weight != count / max(step.labels, 1):
                    raise PlanError(
                        f"step {step.number}: a micro-batch with {count} of {step.labels} labels must have the weight"
                        f" {count / max(step.labels, 1)}, but has {micro.labels} labels and the weight {micro.weight}."
                    )
                labels += count
            if step.labels != labels:
                raise PlanError(f"step {step.number} must have {labels} labels, but has {step.labels}.")
        covered = np.concatenate(pieces)
        covered = covered[np.lexsort((covered[:, 1], covered[:, 0]))]
        if not np.array_equal(covered, wanted[:, :3]):
            least, parts = (np.bincount(rows[:, 0], minlength=len(self.lengths)) for rows in (wanted, covered))
            tokens = np.bincount(covered[:, 0], weights=covered[:, 2], minlength=len(self.lengths))
            wrong = np.flatnonzero((tokens != self.lengths) | (parts != least))
            which = int(wrong[0]) if len(wrong) else int(covered[(covered != wanted[:, :3]).any(axis=1)][0, 0])
            raise PlanError(
                f"document {which} must have each of its {int(self.lengths[which])} tokens once, in {int(least[which])}"
                f" parts, but has {int(tokens[which])} tokens in {int(parts[which])} parts."
            )


def batches(
    lengths: ArrayLike,
    *,
    ranks: int,
    tokens_per_rank: int,
    tokens_per_step: int | None = None,
    ranks_per_group: int | None = None,
    seed: int = 0,
    order: ArrayLike | None = None,
    labels: ArrayLike | Sequence[ArrayLike] | None = None,
    too_long: str = "refuse",
    ranks_per_node: int = 8,
    causal: bool = True,
    pair_cost: float = PAIR_COST,
    start: int = 0,
) -> Batches:
    """Return the steps of an epoch over documents of these lengths: every document exactly once, on all ranks together.

    Short documents stay whole on one rank and long ones are cut over as many as they need, so that there is no degree
    of data or context parallelism to choose. Every rank makes this call with the same arguments.

    Args:
        lengths: the tokens of each document of the dataset.
        ranks: the ranks that run the model.
        tokens_per_rank: limit on the tokens of a micro-batch, as a mean over ranks; a rank may hold 2% more.
        tokens_per_step: limit on the tokens between two updates of the optimizer. Default: one micro-batch.
        ranks_per_group: how many neighbouring ranks may share a document; each such group gets documents of its own in
            every micro-batch (`BatchStep.of_rank`), as with a static dp x cp. Default: all ranks are one group.
        seed: selects an order of the documents, such as the number of the epoch.
        order: the numbers of all documents in the order of a sampler, instead of `seed`.
        labels: for each document the number of its labels, if it is not one less than its tokens, or the labels of its
            tokens (-100: none), which are cut with it.
        too_long: what to do with documents that are longer than a micro-batch or a step: "refuse", or "cut" them into
            parts that are documents of their own.
        ranks_per_node: how many ranks share fast links.
        causal: whether tokens attend to earlier tokens only.
        pair_cost: the cost of a query attending to a key, in units of a token's cost in all other layers. Micro-batches
            of a step get about equal cost.
        start: the number of the first step, to resume an epoch.

    >>> steps = batches([5, 9, 3, 4, 7], ranks=2, tokens_per_rank=8, tokens_per_step=32, order=[0, 1, 2, 3, 4])
    >>> steps[0], [micro.documents.tolist() for micro in steps[0]], [micro.weight for micro in steps[0]]
    (<step 0, 2 micro-batches, 23 labels>, [[1, 3], [0, 2, 4]], [0.4782608695652174, 0.5217391304347826])
    >>> plan = steps[0].micro_batches[0].plan(q_heads=2, kv_heads=1, head_dim=8, dtype="float32")
    """
    where = "batches()"
    sizes = np.diff(document_edges(lengths))
    ranks = check_int(ranks, "ranks", where, PlanError, low=1)
    tokens_per_rank = check_int(tokens_per_rank, "tokens_per_rank", where, PlanError, low=1)
    ranks_per_node = check_int(ranks_per_node, "ranks_per_node", where, PlanError, low=1)
    start = check_int(start, "start", where, PlanError)
    if ranks_per_group is None:
        ranks_per_group = ranks
    ranks_per_group = check_int(ranks_per_group, "ranks_per_group", where, PlanError, low=1)
    if ranks % ranks_per_group:
        raise PlanError(
            f"ranks_per_group must be a divisor of ranks, {ranks}, but got {ranks_per_group}. Groups have equal sizes."
        )
    most = ranks_per_group * tokens_per_rank
    if tokens_per_step is None:
        tokens_per_step = ranks * tokens_per_rank
    tokens_per_step = check_int(tokens_per_step, "tokens_per_step", where, PlanError, low=1)
    if too_long not in ("refuse", "cut"):
        raise PlanError(f"too_long must be 'refuse' or 'cut', but got {truncated_repr(too_long)}.")
    cost: object = pair_cost
    if not isinstance(cost, Real) or not 0 <= pair_cost < math.inf:
        raise PlanError(f"pair_cost must be a number >= 0, but got {truncated_repr(pair_cost)}.")
    numbers: Ints = np.zeros(0, dtype=np.int64)
    if order is None:
        numbers = shuffled_numbers(len(sizes), check_int(seed, "seed", where, PlanError))
    else:
        with suppress(ValueError, TypeError):  # no numbers, or lists of several lengths
            numbers = np.asarray(order)
    if numbers.shape != sizes.shape or not np.array_equal(np.sort(numbers), np.arange(len(sizes))):
        raise PlanError(
            f"order must have each of the numbers 0 to {len(sizes) - 1} once, but got {truncated_repr(order)}. To leave"
            f" documents out, leave their lengths out."
        )
    limit = min(most, tokens_per_step)
    parts = _parts(sizes, numbers.astype(np.int64), labels, limit, too_long == "cut")
    ends, edges = np.cumsum(parts[:, 2]), [0]
    while edges[-1] < len(parts):  # as many parts as the step has room for
        before = int(ends[edges[-1] - 1]) if edges[-1] else 0
        edges.append(max(int(np.searchsorted(ends, before + tokens_per_step, side="right")), edges[-1] + 1))
    steps = range(len(edges) - 1)
    if start > len(steps):
        raise PlanError(f"start must be at most {len(steps)}, the number of steps, but got {start}.")
    fixed = sizes, ranks, tokens_per_rank, ranks_per_node, causal, pair_cost, ranks_per_group
    return Batches(parts, np.array(edges, dtype=np.int64), steps[start:], *fixed)


def shuffled_numbers(num: int, seed: int) -> Ints:
    """Return the numbers below `num` in an order that depends on the seed alone, not on the version of numpy."""
    x = np.arange(num, dtype=np.uint64) + np.uint64((seed * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % 2**64)
    x *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.argsort(x ^ (x >> np.uint64(31)), kind="stable")


def _count_labels(sizes: Ints, labels: Any) -> tuple[Ints, list[NDArray[Any]]]:
    """Return the number of labels of each document, and the labels of its tokens if these were given."""
    if labels is None:
        return np.maximum(sizes - 1, 0), []
    counts: NDArray[Any] = np.zeros(0)
    of_tokens: list[NDArray[Any]] = []
    with suppress(ValueError, TypeError):  # lists of other lengths than the documents
        try:
            counts = np.asarray(labels)
        except ValueError:  # lists of several lengths
            of_tokens = [np.asarray(row) for row in labels]
        if counts.ndim == 2:
            of_tokens = list(counts)
        if of_tokens and all(row.shape == (size,) for row, size in zip(of_tokens, sizes.tolist(), strict=True)):
            counts = np.array([(row[1:] != NO_LABEL).sum() for row in of_tokens])  # the first token is not predicted
    if counts.shape != sizes.shape or counts.dtype.kind not in "iu" or ((counts < 0) | (counts > sizes)).any():
        raise PlanError(
            f"labels must be a number from 0 to its tokens, or the labels of its tokens, for each of {len(sizes)}"
            f" documents, but got {truncated_repr(labels)}."
        )
    return counts.astype(np.int64), of_tokens


def _parts(sizes: Ints, numbers: Ints, labels: Any, limit: int, is_cut: bool) -> Ints:
    """Return (document, start, length, labels) in order, with documents above the limit in equal parts."""
    counts, of_tokens = _count_labels(sizes, labels)
    long = np.flatnonzero(sizes > limit)
    if len(long) and not is_cut:
        raise PlanError(
            f"document {int(long[0])} has {int(sizes[long[0]])} tokens, and {len(long)} documents are longer than the"
            f" {limit} of a group's micro-batch or of a step. Use more ranks (of a group), a larger tokens_per_rank or"
            f" tokens_per_step, or too_long='cut'."
        )
    if len(long) and labels is not None and not of_tokens:
        raise PlanError(
            f"labels must be those of tokens if documents are cut, but got numbers, and document {int(long[0])} is cut."
            f" Pass a list of labels for each document, -100 for tokens without one."
        )
    size = sizes[numbers]
    pieces = np.maximum(-(-size // limit), 1)
    which = np.repeat(np.arange(len(size), dtype=np.int64), pieces)
    piece = np.arange(len(which), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begin, end = (size[which] * (piece + i) // pieces[which] for i in range(2))
    count = np.where(pieces[which] > 1, end - begin - 1, counts[numbers][which])
    parts = np.stack((numbers[which], begin, end - begin, count), axis=1).astype(np.int64)
    if of_tokens:
        for place in np.flatnonzero(pieces[which] > 1).tolist():  # the first token of a part is not predicted either
            row = np.asarray(of_tokens[parts[place, 0]], dtype=np.int64)[begin[place] + 1 : end[place]]
            parts[place, 3] = np.count_nonzero(row != NO_LABEL)
    return parts
