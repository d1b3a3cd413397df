"""Compare one group of all ranks with every static dp x cp, for the documents of a dataset.

Plans an epoch with `longspan.batches`, takes one micro-batch of it, and prints for one attention layer: pairs and
tokens of the busiest rank over the mean, the ranks that a rank exchanges rows with, what the busiest rank receives, the
peak of remote rows, and the simulated time of forward and backward. A static split lasts as long as its slowest group.

  longspan batches --lengths lengths.npy --ranks 64 --tokens-per-rank 64k --plot step.svg
  longspan batches --docs longtail --ranks 16
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from longspan.api import plan
from longspan.cli.output import Column, Row, count, describe_missing, print_json, progress, screen_of, to_write
from longspan.cli.workload import KINDS, drawn_lengths, machine_of, read_lengths
from longspan.errors import PlanError
from longspan.formatting import bytes_in_one_unit, seconds_in_one_unit
from longspan.layouts import Layout
from longspan.masks import causal, documents
from longspan.planning.batches import MicroBatch, batches
from longspan.planning.splits import score, static_layouts
from longspan.planning.steps import ITEMSIZE
from longspan.sizing.recommend import divisors
from longspan.spans import Ints

ROOM = 1.02
"""Tokens that a static group may have, over its share."""
EPOCH = 32
"""Micro-batches of documents that are drawn for `--docs`."""


@dataclass(frozen=True, slots=True)
class Split:
    """The figures of one way to split a micro-batch over ranks."""

    name: str
    pairs: float
    tokens: float
    partners: int
    bytes_received: int
    peak_bytes: int
    seconds: float
    scheme: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("documents")
    data.add_argument(
        "--lengths", type=Path, metavar="FILE", help="tokens of each document: .npy, one length a line, or a JSON list"
    )
    data.add_argument("--docs", choices=KINDS, help="drawn documents instead of a file")
    data.add_argument("--ranks", type=count, default=16, help="all ranks (16)")
    data.add_argument("--tokens-per-rank", type=count, default=1 << 16, help="of a micro-batch, as a mean (64k)")
    data.add_argument("--tokens-per-step", type=count, help="between two updates of the optimizer (one micro-batch)")
    data.add_argument("--too-long", choices=("refuse", "cut"), default="refuse", help="longer documents (refuse)")
    data.add_argument("--step", type=int, default=0, help="the step whose first micro-batch is shown (0)")
    data.add_argument("--seed", type=int, default=0, help="of the order of documents, and of --docs (0)")
    tensors = parser.add_argument_group("tensors and machine")
    tensors.add_argument("--q-heads", type=count, default=32, help="query heads (32)")
    tensors.add_argument("--kv-heads", type=count, default=8, help="key/value heads (8)")
    tensors.add_argument("--head-dim", type=count, default=128, help="features of a head (128)")
    tensors.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bfloat16", help="(bfloat16)")
    tensors.add_argument("--machine", default="h100", metavar="NAME|FILE", help="as in longspan plan (h100)")
    parser.add_argument(
        "--plot", type=to_write(".svg", ".png"), metavar="FILE", help="draw who holds what (.svg, .png)"
    )


def run(args: argparse.Namespace) -> int:
    lengths, screen = _lengths(args), screen_of(args)
    machine = machine_of(args.machine)
    sizes = {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype")}
    steps = batches(
        lengths, ranks=args.ranks, tokens_per_rank=args.tokens_per_rank, tokens_per_step=args.tokens_per_step,
        seed=args.seed, too_long=args.too_long, ranks_per_node=machine.node,
    )  # fmt: skip
    if not 0 <= args.step < len(steps):
        raise PlanError(f"--step must be 0 to {len(steps) - 1}, as the epoch has steps, but got {args.step}.")
    micro = steps[args.step].micro_batches[0]
    degrees = divisors(args.ranks)
    fits = [cp for cp in degrees if cp * args.tokens_per_rank * ROOM >= micro.lengths.max()]
    with progress(args, "simulating", 1 + len(fits)) as advance:
        advance("one group")
        splits = [_split("one group", [(micro.lengths, micro.layout)], sizes, machine)]
        for cp in fits:
            advance(f"{args.ranks // cp} x {cp}")
            most = int(ROOM * cp * args.tokens_per_rank)
            both = [list(static_layouts(micro.lengths, args.ranks // cp, cp, most, x)) for x in ("pairs", "tokens")]
            tried = (_split(f"{args.ranks // cp} x {cp}", groups, sizes, machine) for groups in both)
            splits.append(min(tried, key=lambda split: split.seconds))
    if args.plot is not None:
        from longspan.cli.show import write as write_scene
        from longspan.viz import layout_picture

        write_scene(layout_picture(micro.layout, micro.mask, title=f"Step {args.step}: {_about(micro)}"), args.plot)
    if args.json:
        epoch = {"num_documents": len(lengths), "num_tokens": int(lengths.sum()), "num_steps": len(steps)}
        shown = {"step": args.step, "documents": micro.documents.tolist(), "lengths": micro.lengths.tolist()}
        print_json("batches", {**epoch, **shown, "splits": [asdict(split) for split in splits]})
        return 0
    screen.title(f"{len(lengths):,} documents, {int(lengths.sum()):,} tokens on {args.ranks:,} ranks")
    step = steps[args.step]
    screen.facts(
        (
            ("epoch", f"{len(steps):,} steps of about {int(lengths.sum()) // len(steps):,} tokens"),
            (
                "documents",
                f"{int(lengths.min()):,} to {int(lengths.max()):,} tokens, median {int(np.median(lengths)):,}",
            ),
            ("shown", f"step {args.step}, micro-batch 1 of {len(step)}: {_about(micro)}"),
            ("layer", f"{args.q_heads} query and {args.kv_heads} key/value heads of {args.head_dim}, {args.dtype}"),
            ("machine", machine.name),
        )
    )
    screen.text()
    best = min(splits, key=lambda split: split.seconds)
    received, peaks = (
        bytes_in_one_unit([x.bytes_received for x in splits]),
        bytes_in_one_unit([x.peak_bytes for x in splits]),
    )
    seconds = seconds_in_one_unit([x.seconds for x in splits])
    heads = (Column("dp x cp", False), *map(Column, ("pairs", "tokens", "partners", "received", "remote", "time")))
    rows = [
        Row((x.name, f"{x.pairs:.2f}", f"{x.tokens:.2f}", str(x.partners), r, p, s, x.scheme), x is best)
        for x, r, p, s in zip(splits, received, peaks, seconds, strict=True)
    ]
    screen.table((*heads, Column("scheme", False)), rows)
    screen.text()
    left_out = [f"{args.ranks // cp} x {cp}" for cp in degrees if cp not in fits]
    notes = [f"No group of {', '.join(left_out)} has room for {int(micro.lengths.max()):,} tokens."] if left_out else []
    notes.append(
        "Simulated, not measured: attention only, without the rest of the model. Static groups get documents from the"
        " longest to the shortest; the better of two rules is shown."
    )
    screen.notes(notes)
    if args.plot is not None:
        screen.text(f"wrote {args.plot}")
    return 0


def _lengths(args: argparse.Namespace) -> Ints:
    if (args.lengths is None) == (args.docs is None):
        raise PlanError("one of --lengths FILE and --docs KIND must be given, such as --docs longtail.")
    if args.docs is not None:
        return drawn_lengths(args.docs, EPOCH * args.ranks * args.tokens_per_rank, args.seed)
    if missing := describe_missing(str(args.lengths)):
        raise PlanError(f"--lengths must be a file.{missing}")
    if args.lengths.suffix != ".npy":
        return read_lengths(args.lengths)
    try:
        lengths = np.lib.format.open_memmap(args.lengths, mode="r")  # which knows no pickles
    except ValueError as error:
        raise PlanError(
            f"{args.lengths} must be an array of whole numbers in numpy's format: {error!s:.80}."
        ) from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or int(lengths.min()) < 1:
        raise PlanError(
            f"{args.lengths} must be one row of whole numbers, 1 or more, but got {lengths.dtype} of shape"
            f" {lengths.shape}."
        )
    return lengths.astype(np.int64)


def _split(name: str, groups: list[tuple[Ints, Layout]], sizes: dict[str, Any], machine: Any) -> Split:
    """Return the figures of groups that run at the same time: those of the worst."""
    scores = [score(lengths, layout) for lengths, layout in groups]
    num_ranks = [layout.world_size for _, layout in groups]
    work = [float((lengths * (lengths + 1.0)).sum()) for lengths, _ in groups]
    tokens = [float(lengths.sum()) for lengths, _ in groups]
    plans = [plan(documents(n) & causal(), layout, machine=machine, **sizes).reasons[0] for n, layout in groups]
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


def _about(micro: MicroBatch) -> str:
    return (
        f"{len(micro.documents):,} documents, {int(micro.lengths.sum()):,} tokens, the longest {micro.lengths.max():,}"
    )
