"""Pictures of a mask, a layout, a plan's timeline or its memory: as text here, or as a PNG or HTML file.

  longspan show mask --docs 700,1200,148 --ranks 4
  longspan show timeline --seq 1M --docs longtail --ranks 8 --out timeline.png

Timelines are simulated. An HTML page has the plan's figures below the picture.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from longspan.cli.output import Row, count, print_json, print_table, print_text, to_write
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.formatting import bytes_text, seconds_text
from longspan.layouts import Layout
from longspan.planning.steps import table
from longspan.viz import layout_picture, mask_picture, memory_picture, page_html, timeline_picture
from longspan.viz.pictures import even_edges, held_tokens, row_work, runs

WHAT = ("mask", "layout", "timeline", "memory")
WIDTH = 64
"""Characters of a picture in text."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=WHAT, help="what to show")
    text = "write the picture as .png or .html (needs matplotlib)"
    parser.add_argument("--out", type=to_write(".png", ".html"), metavar="FILE", help=text)
    parser.add_argument("--title", help="the title of the picture")
    text = "bytes that a device has left for attention, such as 20G: a line in the picture of memory"
    parser.add_argument("--limit-bytes", type=count, help=text)
    add_workload(parser)


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    of_plan = args.what in ("timeline", "memory")
    if args.limit_bytes is not None and (args.what != "memory" or args.out is None):
        raise PlanError("--limit-bytes needs a picture: `longspan show memory --out FILE`. Write one, or leave it out.")
    if not of_plan and (workload.scheme != "auto" or args.keep or args.fetch_bytes is not None):
        raise PlanError(
            f"--scheme, --keep and --fetch-bytes must not be set: a {args.what} is the same with every scheme. Leave"
            " them out, or show timeline or memory."
        )
    layout = workload.layout(args.ranks)
    plan = workload.plan(args.ranks) if of_plan else None
    if args.out is not None:
        if plan is None:
            draw = {"mask": lambda: mask_picture(workload.mask, layout, title=args.title)}
            draw["layout"] = lambda: layout_picture(layout, workload.mask, title=args.title)
        else:
            draw = {"timeline": lambda: timeline_picture(plan, title=args.title)}
            draw["memory"] = lambda: memory_picture(plan, title=args.title, limit_bytes=args.limit_bytes)
        figure = draw[args.what]()
        if args.out.suffix.lower() == ".html":
            text = str(plan) if plan else f"{workload.about_docs()}\n{layout!r}"
            args.out.write_text(page_html(args.title or f"longspan: {args.what}", [figure], text), encoding="utf-8")
        else:
            figure.savefig(args.out, dpi=150)
    if args.json:
        out = None if args.out is None else str(args.out)
        print_json("show", {"what": args.what, "workload": workload.as_json(), "out": out, **_figures(args, workload)})
    elif args.out is not None:
        print(f"wrote {args.out}")
    else:
        _print(args, workload)
    return 0


def _figures(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    layout = workload.layout(args.ranks)
    if args.what == "mask":
        pairs = row_work(workload.mask, layout, 0, 0).tolist()
        return {"allowed_pairs": workload.mask.area(layout.seq_len), "pairs_by_rank": pairs}
    if args.what == "layout":
        spans = len(layout.table)
        return {"layout": layout.name, "num_spans": spans, "tokens_by_rank": layout.num_tokens.tolist()}
    plan = workload.plan(args.ranks)
    answer: dict[str, Any] = {"scheme": plan.scheme.name, "fingerprint": plan.fingerprint}
    for one in runs(plan):
        times = {"seconds": one.timeline.seconds, "finished_by_rank": one.timeline.finished}
        alive = {"bytes_alive_by_rank_and_step": [steps.tolist() for steps in one.alive]}
        answer[one.direction] = alive if args.what == "memory" else times
    return answer


def _print(args: argparse.Namespace, workload: Workload) -> None:
    layout = workload.layout(args.ranks)
    if args.what == "mask":
        print_text(f"{workload.seq_len:,} tokens: {workload.about_docs()}")
        print(workload.mask.draw(layout.seq_len, width=WIDTH))
        print_text("Queries go down, keys go right. █ all pairs, ▒ some, · none.")
    elif args.what == "layout":
        print_text(f"{layout.name}: {layout.seq_len:,} tokens on {layout.world_size:,} ranks")
        print(strips(layout, WIDTH))
        print_text("The sequence goes right. █ the rank holds all tokens, ▒ some, · none.")
    else:
        plan = workload.plan(args.ranks)
        both = runs(plan)
        print_text(f"{plan.scheme.name}, {layout.seq_len:,} tokens on {layout.world_size:,} ranks")
        if args.what == "memory":
            peaks = [[int(one.alive[rank].max(initial=0)) for one in both] for rank in range(layout.world_size)]
            rows = [Row((str(rank), *map(bytes_text, (*two, max(two))))) for rank, two in enumerate(peaks)]
            print_table(("rank", "forward", "backward", "peak"), rows)
            print_text("The most a rank holds besides its own q, k, v, results and gradients, and kernels' workspace.")
            return
        for one in both:
            print(f"\n{one.direction}: {seconds_text(one.timeline.seconds)}\n{table(one.schedule)}")
        note = "> sends to, < receives from, (n) that many ranks, * computes. Times are simulated on"
        print_text()
        print_text(f"{note} {plan.machine.name}, with waits, not measured.")


def strips(layout: Layout, width: int) -> str:
    """Return one line per rank: where in the sequence its tokens are, and how many there are.

    >>> from longspan.layouts import zigzag
    >>> print(strips(zigzag(16, 2), 8))
    rank 0  ██····██  8 tokens
    rank 1  ··████··  8 tokens
    """
    edges = even_edges(layout.seq_len, width)
    held = held_tokens(layout, edges)
    marks = np.where(held == 0, "·", np.where(held == np.diff(edges), "█", "▒"))
    wide = len(str(layout.world_size - 1))
    return "\n".join(
        f"rank {rank:{wide}d}  {''.join(row)}  {int(layout.num_tokens[rank]):,} tokens"
        for rank, row in enumerate(marks.tolist())
    )
