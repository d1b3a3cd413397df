"""Pictures of a mask, a layout, a schedule, its traffic or its memory, a scan: as text here, or as SVG, PNG or HTML.

  longspan show mask --docs 700,1200,148 --ranks 4
  longspan show schedule --seq 1M --docs longtail --ranks 8 --svg timeline.svg --png timeline.png --html timeline.html

A schedule is drawn as the simulated timeline of both passes. A scan is how the states of a delta rule, with --q-heads
heads of --head-dim x --v-head-dim numbers, get from rank to rank; its --scheme is chain, exchange, doubling or
two_level. HTML pages need no network and run no scripts.
"""

from __future__ import annotations

import argparse
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longspan.cli.output import Column, Row, Screen, count, print_json, progress, screen_of, to_write
from longspan.cli.trace import DIRECTIONS
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.formatting import bytes_text, seconds_text
from longspan.layouts import Layout
from longspan.planning.plan import Plan
from longspan.planning.scan_plan import ScanPlan
from longspan.planning.steps import table
from longspan.recurrences import scan_plan
from longspan.spans import join
from longspan.viz.mask_and_layout import even_edges, layout_picture, mask_picture, row_work
from longspan.viz.plan_pictures import memory_picture, runs, timeline_picture, traffic, traffic_picture
from longspan.viz.report import picture_page
from longspan.viz.scan import scan_picture
from longspan.viz.scene import Scene, write_png

WHAT = ("mask", "layout", "schedule", "traffic", "memory", "scan")
DRAWN_PLANS = {"schedule": timeline_picture, "traffic": traffic_picture, "memory": memory_picture}
_MATRIX = 12
"""Ranks up to which traffic is printed as a matrix."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="what to show")
    out = parser.add_argument_group("pictures")
    out.add_argument("--svg", type=to_write(".svg"), metavar="FILE", help="write the picture as SVG (needs matplotlib)")
    out.add_argument("--png", type=to_write(".png"), metavar="FILE", help="write the picture as PNG (needs matplotlib)")
    out.add_argument(
        "--html", type=to_write(".html", ".htm"), metavar="FILE", help="write a self-contained page with the picture"
    )
    out.add_argument("--title", help="the title of the picture")
    text = "bytes that a device has left for attention, such as 20G: a line in the picture of memory"
    out.add_argument("--limit-bytes", type=count, help=text)
    out.add_argument("--width", type=int, default=64, help="characters of a text picture (64)")
    add_workload(parser)


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    _check_options(args)
    with progress(args, "planning"):
        picture = _Picture(args.what, workload, args.ranks)
        if args.what in DRAWN_PLANS:
            _ = picture.plan  # cached: all that takes long
    files = {kind: path for kind in ("svg", "png", "html") if (path := getattr(args, kind)) is not None}
    if files:
        scene = picture.scene(args.title, args.limit_bytes)
        for path in files.values():
            write(scene, path)
    if args.json:
        names = {kind: str(path) for kind, path in files.items()}
        print_json("show", {"what": args.what, "workload": workload.as_json(), "files": names, **picture.figures()})
    elif files:
        for path in files.values():
            print(f"wrote {path}")
    else:
        picture.print(screen_of(args), min(max(args.width, 8), 200))
    return 0


def _check_options(args: argparse.Namespace) -> None:
    """Refuse options that do not change the picture."""
    if args.limit_bytes is not None and (args.what != "memory" or (args.svg or args.png or args.html) is None):
        raise PlanError(
            "--limit-bytes needs a picture of memory, as in `longspan show memory --svg FILE`. Write one, or leave it"
            " out."
        )
    used = {"--keep": args.keep, "--fetch-bytes": args.fetch_bytes is not None}
    if args.what in ("mask", "layout"):
        used = {"--scheme": args.scheme != "auto", **used}
        reason = f"a {args.what} is the same with every scheme. Leave it out, or show schedule, traffic or memory."
    elif args.what == "scan":
        used = {"--window": args.window is not None, "--docs full": args.docs == "full", **used}
        reason = (
            "a recurrence goes through every document from its first token to its last, and fetches no keys and"
            " values. Leave it out."
        )
    else:
        return
    if any(used.values()):
        raise PlanError(f"{' and '.join(name for name in used if used[name])} must not be set: {reason}")


def write(scene: Scene, path: Path) -> None:
    """Write a picture as .svg, .png or .html."""
    kind = path.suffix.lower()
    if kind == ".png":
        write_png(scene, path)
    else:
        path.write_text(scene.svg() if kind == ".svg" else picture_page(scene, scene.about), encoding="utf-8")


class _Picture:
    """A picture as a scene, as figures for JSON and as text."""

    def __init__(self, kind: str, workload: Workload, ranks: int) -> None:
        self.kind, self.workload, self.ranks = kind, workload, ranks
        self.mask, self.layout = workload.mask, workload.layout(ranks)

    @cached_property
    def plan(self) -> Plan:
        return self.workload.plan(self.ranks)

    def scan(self) -> ScanPlan:
        """Plan a delta rule, with states as wide as heads."""
        tensors = self.workload.tensors
        return scan_plan(
            self.workload.lengths, self.layout, heads=tensors["q_heads"], keys=tensors["head_dim"],
            values=tensors.get("v_head_dim", tensors["head_dim"]), maps="matrix", batch=tensors["batch"],
            dtype="float64" if tensors["dtype"] == "float64" else "float32", scheme=self.workload.scheme,
            machine=self.workload.machine,
        )  # fmt: skip

    def scene(self, title: str | None, limit_bytes: int | None) -> Scene:
        if self.kind == "mask":
            return mask_picture(self.mask, self.layout, title=title)
        if self.kind == "layout":
            return layout_picture(self.layout, self.mask, title=title)
        if self.kind == "scan":
            return scan_picture(self.scan(), title=title)
        if self.kind == "memory":
            return memory_picture(self.plan, title=title, limit_bytes=limit_bytes)
        return DRAWN_PLANS[self.kind](self.plan, title=title)

    def figures(self) -> dict[str, Any]:
        if self.kind == "mask":
            pairs = row_work(self.mask, self.layout, 0, 0).tolist()
            area = self.mask.area(self.layout.seq_len)
            return {"mask": self.mask.name, "allowed_pairs": area, "pairs_by_rank": pairs}
        if self.kind == "layout":
            spans, tokens = len(self.layout.table), self.layout.num_tokens.tolist()
            return {"layout": self.layout.name, "num_spans": spans, "tokens_by_rank": tokens}
        if self.kind == "scan":
            scan, ranks = self.scan(), range(self.layout.world_size)
            received = {
                direction: {"bytes_received_by_rank": [scan.bytes_received(rank, direction) for rank in ranks]}
                for direction in DIRECTIONS
            }
            sizes = {"num_chains": len(scan.chains.batches), "num_segments": len(scan.chains.table)}
            return {"scheme": scan.scheme, "fingerprint": scan.fingerprint, **sizes, **received}
        plan = self.plan
        answer: dict[str, Any] = {"scheme": plan.scheme.name, "fingerprint": plan.fingerprint}
        for one in runs(plan):
            if self.kind == "traffic":
                answer[one.direction] = {"bytes_from_to": traffic(plan, one.direction).tolist()}
            elif self.kind == "memory":
                answer[one.direction] = {"bytes_alive_by_rank_and_step": [steps.tolist() for steps in one.alive]}
            else:
                answer[one.direction] = {
                    "seconds": one.timeline.seconds,
                    "finished_by_rank": one.timeline.finished,
                    "bytes_received_by_rank": one.timeline.bytes_received,
                    "num_steps": one.schedule.num_steps,
                }
        return answer

    def print(self, screen: Screen, width: int) -> None:
        if self.kind == "mask":
            screen.title(f"{self.workload.seq_len:,} tokens: {self.workload.about_docs()}")
            print(self.mask.draw(self.layout.seq_len, width=min(width, 96)))
            screen.notes(["Queries go down, keys go right. █ all pairs, ▒ some, · none."])
        elif self.kind == "layout":
            screen.title(f"{self.layout.name}: {self.layout.seq_len:,} tokens on {self.layout.world_size:,} ranks")
            print("\n".join(strips(self.layout, width)))
            screen.notes(["The sequence goes right. █ the rank holds all tokens, ▒ some, · none."])
        elif self.kind == "scan":
            print(self.scan().explain())
        else:
            plan = self.plan
            screen.title(f"{plan.scheme.name}, {self.layout.seq_len:,} tokens on {self.layout.world_size:,} ranks")
            {"schedule": _print_schedule, "traffic": _print_traffic, "memory": _print_memory}[self.kind](plan, screen)


def strips(layout: Layout, width: int) -> list[str]:
    """Return one line per rank: where in the sequence its tokens are, and how many there are.

    >>> from longspan.layouts import zigzag
    >>> print("\\n".join(strips(zigzag(16, 2), 8)))
    rank 0  ██····██  8 tokens
    rank 1  ··████··  8 tokens
    """
    edges = even_edges(layout.seq_len, width)
    cells = np.stack((edges[:-1], edges[1:]), axis=1)
    wide = len(str(layout.world_size - 1))
    lines: list[str] = []
    for rank in range(layout.world_size):
        rows = layout.span_table(rank)
        i, j = join(rows, cells)
        size = np.minimum(rows[i, 1], edges[j + 1]) - np.maximum(rows[i, 0], edges[j])
        tokens = np.bincount(j, weights=size.astype(np.float64), minlength=len(cells))
        marks = np.where(tokens == 0, "·", np.where(tokens == np.diff(edges), "█", "▒"))
        lines.append(f"rank {rank:{wide}d}  {''.join(marks.tolist())}  {int(layout.num_tokens[rank]):,} tokens")
    return lines


def _print_schedule(plan: Plan, screen: Screen) -> None:
    for one in runs(plan):
        screen.text()
        screen.title(f"{one.direction}: {seconds_text(one.timeline.seconds)}")
        print(table(one.schedule))
    screen.text()
    note = "> sends to, < receives from, (n) that many ranks, * computes. Times are simulated on"
    screen.notes([f"{note} {plan.machine.name}, with waits, not measured."])


def _print_traffic(plan: Plan, screen: Screen) -> None:
    size = plan.layout.world_size
    for direction in DIRECTIONS:
        matrix = traffic(plan, direction)
        screen.text()
        screen.title(f"{direction}: {bytes_text(int(matrix.sum()))} in all")
        if size <= _MATRIX:
            columns = (Column("from", False), *(Column(f"to {rank}") for rank in range(size)), Column("sent"))
            rows = [
                Row((str(rank), *(bytes_text(value) if value else "." for value in line), bytes_text(sum(line))))
                for rank, line in enumerate(matrix.tolist())
            ]
            received = Row(("all", *(bytes_text(value) for value in matrix.sum(axis=0).tolist()), ""))
            screen.table(columns, [*rows, received])
        else:
            columns = (Column("rank", False), Column("sent"), Column("received"), Column("peers"))
            sent, received_by_rank = matrix.sum(axis=1).tolist(), matrix.sum(axis=0).tolist()
            peers = ((matrix > 0) | (matrix.T > 0)).sum(axis=1).tolist()
            rows = [
                Row((str(r), bytes_text(sent[r]), bytes_text(received_by_rank[r]), str(peers[r]))) for r in range(size)
            ]
            screen.table(columns, rows)


def _print_memory(plan: Plan, screen: Screen) -> None:
    columns = (Column("rank", False), Column("forward"), Column("backward"), Column("peak"))
    both = runs(plan)
    rows: list[Row] = []
    for rank in range(plan.layout.world_size):
        peaks = [int(one.alive[rank].max(initial=0)) for one in both]
        rows.append(Row((str(rank), *(bytes_text(peak) for peak in peaks), bytes_text(max(peaks)))))
    screen.text()
    screen.table(columns, rows)
    screen.text()
    screen.notes(["The most a rank holds besides its own q, k, v, results and gradients, and what kernels use inside."])
