"""The planned timeline, message by message, as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

  longspan trace --seq 64k --ranks 8 --docs longtail --out plan.json

`torchrun -m longspan bench` writes the measured one in the same form.
"""

from __future__ import annotations

import argparse
from typing import Any

from longspan.cli.files import to_write
from longspan.cli.measuring import trace_file as chrome
from longspan.cli.progress import progress
from longspan.cli.quantities import many
from longspan.cli.screen import Column, Row, Screen, print_json, screen_of
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.errors import PlanError
from longspan.number_words import bytes_text, seconds_text
from longspan.schedules.plan import Plan

MAX_RANKS = 256
"""Every rank is simulated, and so is every message between them: 256 ranks take a minute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    parser.add_argument("--out", type=to_write(), required=True, metavar="FILE", help="where the trace goes")


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    if args.ranks > MAX_RANKS:
        raise PlanError(
            f"a trace of {args.ranks} ranks was asked for. Every rank and message is simulated, so this command takes"
            f" {MAX_RANKS} at most; `longspan plan` answers for more."
        )
    with progress(args, "simulating every rank"):
        plan = workload.plan(args.ranks)
        slices, took = chrome.planned(plan)
        about = described(workload, plan, took, "simulated")
        chrome.write(args.out, chrome.trace(slices, args.ranks, about))
    if args.json:
        print_json("trace", {**about, "num_slices": len(slices), "file": str(args.out)})
    else:
        show(about, plan, slices, screen_of(args))
        screen_of(args).notes((f"Wrote {args.out}. Open it in ui.perfetto.dev or chrome://tracing.",))
    return 0


def described(workload: Workload, plan: Plan, took: dict[str, float], how: str) -> dict[str, Any]:
    """What a trace shows, as the file, the JSON and the screen say it."""
    return {
        "how": how,
        "workload": workload.as_json(),
        "ranks": plan.layout.world_size,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "fingerprint": plan.fingerprint,
        "machine": plan.machine.name,
        "forward_seconds": took["forward"],
        "backward_seconds": took["backward"],
        "seconds": took["forward"] + took["backward"],
    }


def show(about: dict[str, Any], plan: Plan, slices: list[chrome.Slice], screen: Screen) -> None:
    """How long it takes, and what every rank does meanwhile."""
    workload, ranks = about["workload"], about["ranks"]
    screen.title(f"{workload['seq_len']:,} tokens on {many(ranks, 'rank')}: {about['scheme']} over {about['layout']}")
    total = f"{seconds_text(about['forward_seconds'])} forward, {seconds_text(about['backward_seconds'])} backward"
    where = f"on {about['machine']}" if about["how"] == "simulated" else "here"
    screen.facts(((about["how"], f"{total}, {seconds_text(about['seconds'])} together, {where}"),))
    screen.text()
    if not slices:  # measured on GPUs, where nothing is taken apart
        return
    rows = [_row(rank, plan, slices, about) for rank in shown(ranks)]
    heads = ("rank", "forward computes", "share", "backward computes", "share", "received")
    screen.table(tuple(map(Column, heads)), rows)
    if ranks > len(rows):
        screen.notes((f"(the first and last of {ranks} ranks)",))
    screen.text()


def shown(ranks: int) -> list[int]:
    """All ranks of a few, or the first and last of many."""
    return list(range(ranks)) if ranks <= 16 else [*range(8), *range(ranks - 8, ranks)]


def _row(rank: int, plan: Plan, slices: list[chrome.Slice], about: dict[str, Any]) -> Row:
    cells = [str(rank)]
    for direction in ("forward", "backward"):
        spent = chrome.busy(slices, rank, chrome.COMPUTE, direction)
        cells += [seconds_text(spent), f"{spent / max(about[f'{direction}_seconds'], 1e-12):.0%}"]
    received = sum(plan.bytes_received(rank, direction) for direction in ("forward", "backward"))
    return Row((*cells, bytes_text(received)))
