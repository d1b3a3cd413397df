"""Bad layouts: sizes, spans, ranks, positions, tensors."""

import numpy as np
import torch

from longspan import LayoutError, MaskError, layouts, masks
from longspan.layouts import Layout
from tests.refusals.bad_inputs import NAN, NO_COUNTS, bad, counts

NO_RANKS = (0, -1, 2.5, "2", True, NAN, [2], None, (1 << 20) + 1, 10**30)
PATTERNS = {
    "contiguous": layouts.contiguous,
    "zigzag": layouts.zigzag,
    "striped": layouts.striped,
    "like_dtensor": layouts.like_dtensor,
}
WORLDS = {
    **{name: lambda n, make=make: make(8, n) for name, make in PATTERNS.items()},
    "per_document": lambda n: layouts.per_document([4, 4], n),
    "round_robin_by_work": lambda n: layouts.round_robin_by_work(masks.causal(8), n),
    "balanced": lambda n: layouts.balanced(masks.causal(8), world_size=n),
}
SPANS = {
    "a gap": ([[(0, 3)], [(4, 8)]], "no rank holds position 3", "without gap or overlap"),
    "an overlap": ([[(0, 5)], [(4, 8)]], "two ranks hold position 4", "without gap or overlap"),
    "a missing end": ([[(0, 4)], [(4, 7)]], "no rank holds position 7", "without gap or overlap"),
    "beyond the end": ([[(0, 4)], [(4, 9)]], "two ranks hold position 8", "without gap or overlap"),
    "nothing": ([], "world_size = 0", "at least 1"),
    "no spans": ([[], []], "no rank holds position 0", "without gap or overlap"),
    "backwards": ([[(4, 0)], [(4, 8)]], "rank 0", "start <= stop, but got (4, 0)"),
    "negative": ([[(-2, 4)], [(4, 8)]], "rank 0", "an end of a span = -2", "at least 0"),
    "floats": ([[(0.5, 4)], [(4, 8)]], "rank 0", "an end of a span = 0.5"),
    "nan": ([[(0, NAN)], [(4, 8)]], "rank 0", "an end of a span = nan"),
    "text": ([["0:4"], ["4:8"]], "rank 0", "'0:4'", "[[(0, 4)], [(4, 8)]]"),
    "three numbers": ([[(0, 4, 1)], [(4, 8)]], "got (0, 4, 1)", "a span must be (start, stop)"),
    "one number": ([[4], [(4, 8)]], "rank 0", "spans must be a list, but got 4"),
    "no lists": ([4, 4], "rank 0", "spans must be a list, but got 4", "Pass a list of spans for every rank"),
    "a text for all": ("0:8", "spans must be a list, but got '0:8'", "Pass a list of spans for every rank"),
    "huge": ([[(0, 10**30)]], "rank 0", "an end of a span = 1000000", "at most"),
}


def _questions():
    layout = layouts.zigzag(8, 2)
    for name, ask in {
        "positions": layout.positions,
        "spans": layout.spans,
        "num_padding": layout.num_padding,
        "shard": lambda rank: layout.shard(np.zeros(8), rank),
        "num_slots": layout.num_slots,
    }.items():
        for rank in (2, -1):
            yield bad(
                f"{name}({rank})", lambda a=ask, r=rank: a(r), LayoutError, f"rank must be in [0, 2), but got {rank}"
            )
        for rank in (0.5, "0", None, True):
            says = f"rank = {rank!r}", "an integer"
            yield bad(f"{name}({rank!r})", lambda a=ask, r=rank: a(r), LayoutError, *says)
    for position in (8, -1, [0, 9], 1 << 60):
        says = "must be in [0, 8)", "but got"
        yield bad(f"owner({position})", lambda p=position: layout.owner(p), LayoutError, *says)
    for position in (0.5, "0", [NAN], True, None):
        yield bad(f"owner({position!r})", lambda p=position: layout.owner(p), LayoutError, "positions must be integers")


def _tensors():
    layout = layouts.zigzag(8, 2)
    for name, x, dim in (
        ("short", torch.zeros(7), 0),
        ("another dim", torch.zeros(1, 2, 8, 4), 3),
        ("no such dim", torch.zeros(8), 1),
        ("far negative dim", torch.zeros(8), -2),
        ("a number", torch.zeros(()), 0),
        ("numpy", np.zeros((8, 3)), 1),
    ):
        says = f"8 slots in {layout}", f"shape {tuple(x.shape)}", f"dim = {dim}", "Pass the dim of the tokens"
        yield bad(f"shard {name}", lambda x=x, d=dim: layout.shard(x, 0, d), LayoutError, *says)
    for value in ([0] * 8, None, "abc", 3):
        says = "must be an array or tensor", type(value).__name__, "Convert it first"
        yield bad(f"shard {type(value).__name__}", lambda v=value: layout.shard(v, 0), LayoutError, *says)
    for dim in (0.5, "0", None):
        says = f"dim = {dim!r}", "an integer"
        yield bad(f"shard dim {dim!r}", lambda d=dim: layout.shard(torch.zeros(8), 0, d), LayoutError, *says)
    three = [torch.zeros(4)] * 3
    yield bad("three shards", lambda: layout.unshard(three), LayoutError, "all 2 ranks", "but got 3")
    shards = [torch.zeros(4), torch.zeros(5)]
    yield bad(
        "a long shard", lambda: layout.unshard(shards), LayoutError, "the shard of rank 1 must have 4 slots", "(5,)"
    )
    yield bad("unshard lists", lambda: layout.unshard([[0], [1]]), LayoutError, "got list", "Convert it first")


def rows():
    for name, make in PATTERNS.items():
        yield from counts(name, lambda n, make=make: make(n, 2), LayoutError, "seq_len")
    for name, make in WORLDS.items():
        yield from counts(name, make, LayoutError, "world_size", NO_RANKS)
    for name, (spans, *says) in SPANS.items():
        yield bad(f"from_spans {name}", lambda s=spans: Layout.from_spans(8, s), LayoutError, *says)
    halves = [[(0, 4)], [(4, 8)]]
    for value in NO_COUNTS:
        says = f"local_len = {value!r}", "local_len must be an integer, at least 0"
        call = lambda v=value: Layout.from_spans(8, halves, local_len=v)  # noqa: E731
        yield bad(f"local_len {value!r:.20}", call, LayoutError, *says)
    few = lambda: Layout.from_spans(8, halves, local_len=3)  # noqa: E731
    yield bad("few slots", few, LayoutError, "3 slots, but rank 0 holds 4 tokens", "Ask for 4 slots or more")
    yield from counts("striped", lambda n: layouts.striped(8, 2, stripe=n), LayoutError, "stripe", (0, *NO_COUNTS))
    by_work = lambda n: layouts.round_robin_by_work(masks.causal(8), 2, block=n)  # noqa: E731
    yield from counts("round_robin_by_work", by_work, LayoutError, "block", (0, *NO_COUNTS))
    yield bad("balanced()", lambda: layouts.balanced(world_size=2), LayoutError, "was given no mask", "Pass every mask")
    for value in (None, 3, "causal", lambda: 0, [masks.causal(8)]):
        kind = type(value).__name__
        says = f"takes masks, but got {kind}", "longspan.masks"
        yield bad(f"balanced({kind})", lambda v=value: layouts.balanced(v, world_size=2), LayoutError, *says)
        by_work_ = lambda v=value: layouts.round_robin_by_work(v, 2)  # noqa: E731
        yield bad(f"round_robin_by_work({kind})", by_work_, LayoutError, *says)
    both = lambda: layouts.balanced(masks.causal(8), masks.causal(9), world_size=2)  # noqa: E731
    yield bad("balanced lengths", both, MaskError, "is for 9 tokens", "seq_len = 8")
    yield bad(
        "no length", lambda: layouts.balanced(masks.causal(), world_size=2), MaskError, "has no length of its own"
    )
    yield from counts(
        "balanced", lambda n: layouts.balanced(masks.causal(), world_size=2, seq_len=n), MaskError, "seq_len"
    )
    per_document = lambda: layouts.per_document([4.0], 2)  # noqa: E731
    yield bad("per_document floats", per_document, MaskError, "flat list of whole numbers")
    yield bad("per_document negative", lambda: layouts.per_document([4, -1], 2), MaskError, "document 1 has length -1")
    yield from _questions()
    yield from _tensors()
