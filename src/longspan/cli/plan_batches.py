"""Compare one group of all ranks with every static dp x cp, for the documents of a dataset.

A static split lasts as long as its slowest group.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longspan.api import plan
from longspan.cli.output import Row, print_facts, print_json, print_table, print_text, progress
from longspan.cli.workload import KINDS, machine_of, parse_docs
from longspan.errors import PlanError
from longspan.formatting import bytes_in_one_unit, seconds_in_one_unit
from longspan.layouts import Layout
from longspan.masks import causal, documents
from longspan.planning.batches import batches
from longspan.planning.splits import score, static_layouts
from longspan.sizing.recommend import divisors
from longspan.spans import Ints

ROOM = 1.02
"""Tokens that a static group may have, over its share."""
EPOCH = 32
"""Micro-batches of documents that are drawn for `--docs longtail` and the like."""


@dataclass(frozen=True, slots=True)
class Split:
    """The figures of one way to split a micro-batch over ranks: those of its worst group."""

    name: str
    pairs: float
    tokens: float
    partners: int
    bytes_received: int
    peak_bytes: int
    seconds: float
    scheme: str


def run(args: argparse.Namespace) -> int:
    if args.docs in KINDS and args.seq is None:
        args.seq = EPOCH * args.ranks * args.batches
    docs, lengths = parse_docs(args)
    if docs in ("causal", "full"):
        raise PlanError("--batches needs the documents of a dataset: add --docs FILE, or --docs longtail.")
    machine = machine_of(args.machine or "h100")
    sizes = {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype")}
    steps = batches(
        lengths, ranks=args.ranks, tokens_per_rank=args.batches, seed=args.seed or 0, ranks_per_node=machine.node
    )
    micro = steps[0].micro_batches[0]
    degrees = divisors(args.ranks)
    fits = [cp for cp in degrees if cp * args.batches * ROOM >= micro.lengths.max()]
    advance = progress(args, "simulating")
    splits = [_split("one group", [(micro.lengths, micro.layout)], sizes, machine)]
    for cp in fits:
        advance(f"{args.ranks // cp} x {cp}")
        most = int(ROOM * cp * args.batches)
        both = [list(static_layouts(micro.lengths, args.ranks // cp, cp, most, x)) for x in ("pairs", "tokens")]
        tried = (_split(f"{args.ranks // cp} x {cp}", groups, sizes, machine) for groups in both)
        splits.append(min(tried, key=lambda split: split.seconds))
    if args.json:
        shown = {"documents": micro.documents.tolist(), "lengths": micro.lengths.tolist()}
        epoch = {"num_documents": len(lengths), "num_tokens": int(lengths.sum()), "num_steps": len(steps)}
        print_json("plan", {**epoch, **shown, "splits": [asdict(split) for split in splits]})
        return 0
    print_text(f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens on {args.ranks:,} ranks")
    about = (
        f"{len(micro.lengths):,} documents, {int(micro.lengths.sum()):,} tokens, the longest {micro.lengths.max():,}"
    )
    print_facts(
        (
            ("epoch", f"{len(steps):,} micro-batches of about {int(lengths.sum()) // len(steps):,} tokens"),
            ("documents", f"{lengths.min():,} to {lengths.max():,} tokens, median {int(np.median(lengths)):,}"),
            ("shown", f"the first micro-batch: {about}"),
            ("layer", f"{args.q_heads} query and {args.kv_heads} key/value heads of {args.head_dim}, {args.dtype}"),
            ("machine", machine.name),
        )
    )
    print_text()
    best = min(splits, key=lambda split: split.seconds)
    columns = (
        bytes_in_one_unit([split.bytes_received for split in splits]),
        bytes_in_one_unit([split.peak_bytes for split in splits]),
        seconds_in_one_unit([split.seconds for split in splits]),
    )
    heads = ("dp x cp", "pairs", "tokens", "partners", "received", "remote", "time", "scheme")
    rows = [
        Row((x.name, f"{x.pairs:.2f}", f"{x.tokens:.2f}", str(x.partners), *cells, x.scheme), x is best)
        for x, *cells in zip(splits, *columns, strict=True)
    ]
    print_table(heads, rows, left=(0, 7))
    left_out = [f"{args.ranks // cp} x {cp}" for cp in degrees if cp not in fits]
    if left_out:
        print_text(f"No group of {', '.join(left_out)} has room for {int(micro.lengths.max()):,} tokens.")
    print_text(
        "Pairs and tokens are those of the busiest rank over the mean; partners, received and remote the most of any"
        " rank. Simulated, not measured: one attention layer, without the rest of the model. Static groups get"
        " documents from the longest to the shortest; the better of two rules is shown."
    )
    return 0


def _split(name: str, groups: list[tuple[Ints, Layout]], sizes: dict[str, Any], machine: Any) -> Split:
    """Return the figures of groups that run at the same time: those of the worst."""
    scores = [score(lengths, layout) for lengths, layout in groups]
    num_ranks = [layout.world_size for _, layout in groups]
    work = [float((lengths * (lengths + 1.0)).sum()) for lengths, _ in groups]
    tokens = [float(lengths.sum()) for lengths, _ in groups]
    plans = [plan(documents(n) & causal(), layout, machine=machine, **sizes).chosen for n, layout in groups]
    slowest = max(plans, key=lambda reason: reason.seconds)
    ranks = sum(num_ranks)
    return Split(
        name,
        max(x.pairs * w / n for x, w, n in zip(scores, work, num_ranks, strict=True)) * ranks / sum(work),
        max(x.tokens * t / n for x, t, n in zip(scores, tokens, num_ranks, strict=True)) * ranks / sum(tokens),
        max(score.partners for score in scores),
        max(reason.bytes_received for reason in plans),
        max(reason.peak_bytes for reason in plans),
        slowest.seconds,
        slowest.scheme,
    )
