"""One self-contained HTML file that explains a plan to a colleague: choices, reasons, pictures, numbers, how to repeat.

longspan report --seq 1M --docs longtail --ranks 64 --out report.html
longspan report --model qwen3-8b --seq 256k --ranks 8 --memory 80
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import longspan
from longspan.cli import plan_model
from longspan.cli.command import FAILED, FINE
from longspan.cli.output import Column, Row, Screen, print_json, progress, to_write
from longspan.cli.workload import KINDS, STRIPE, Workload
from longspan.errors import PlanError
from longspan.planning.machine import MACHINES
from longspan.viz.report import facts_html, paragraph_html, report_html, table_html

_OPTIONS = {  # option: default, which is left out of the command
    "seq": None, "ranks": plan_model.DEFAULT_RANKS, "docs": "causal", "window": None, "seed": None, "q_heads": 32,
    "kv_heads": 8, "head_dim": 128, "v_head_dim": None, "batch": 1, "dtype": "bfloat16", "machine": None,
    "scheme": "auto", "layout": "balanced", "fetch_bytes": None, "title": None, "model": None, "config": None,
    **plan_model.SWITCHES,
}  # fmt: skip
_LISTED = 24
"""Documents whose lengths are written out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=to_write(".html", ".htm"), default=Path("report.html"), metavar="FILE", help="(report.html)"
    )
    parser.add_argument("--title", help="the title of the report")
    plan_model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if args.gpus is not None:
        raise PlanError("--gpus must not be set: a report is of one configuration. Search with `longspan plan` first.")
    has_model = plan_model.has_model(args)
    options: dict[str, Any] = {"title": args.title, "command": command_of(args), "version": longspan.__version__}
    fits = True
    if has_model:
        step, fit = plan_model.plan_step(args)
        if not step.plans:
            raise PlanError(f"{step.model.name} has no attention layer to report on. Use `longspan plan --model`.")
        fits, workload, sheet = fit is None or fit["fits"], step.model.workload, Sheet()
        plan_model.show(step, fit, args.price, sheet)
        # Of several kinds of attention, the one that takes most of the step.
        kinds = step.model.sizes.attentions
        plan = max(step.plans.items(), key=lambda item: kinds[item[0]] * item[1].chosen.seconds)[1]
        options |= {"title": args.title or sheet.heading, "section": "\n".join(sheet.parts)}
    else:
        workload = Workload.of(args)
        with progress(args, "planning"):
            plan = workload.plan(args.ranks)
        options["python"] = python_of(workload, args, plan.fingerprint)
    options["extra_inputs"] = (("given as", workload.docs),) if workload.docs != "as given" else ()
    with progress(args, "drawing"):
        text = report_html(plan, **options)
    args.out.write_text(text, encoding="utf-8")
    if args.json:
        answer = {"out": str(args.out), "num_bytes": len(text.encode()), "fingerprint": plan.fingerprint}
        print_json("report", {"workload": workload.as_json(), "scheme": plan.scheme.name, **answer})
    else:
        print(f"wrote {args.out}: {plan.scheme.name}, plan {plan.fingerprint[:12]}, {len(text.encode()):,} bytes")
    return FINE if fits else FAILED


class Sheet(Screen):
    """What `plan --model` prints, as HTML."""

    def __init__(self) -> None:
        self.heading, self.parts = "", ["<h2>Model</h2>"]

    def title(self, text: str) -> None:
        self.heading = text

    def facts(self, facts: Sequence[tuple[str, str]]) -> None:
        self.parts.append(facts_html(facts))

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        chosen = next((number for number, row in enumerate(rows) if row.chosen), None)
        self.parts.append(table_html([column.head for column in columns], [row.cells for row in rows], chosen))

    def text(self, text: str = "", style: str = "") -> None:  # noqa: ARG002
        self.parts.append(paragraph_html(text, "note" if text else ""))


def command_of(args: argparse.Namespace) -> str:
    """Return the command that writes the same report, without options at their defaults."""
    words = ["longspan", "report"]
    for name, default in _OPTIONS.items():
        value = getattr(args, name)
        if value != default:
            words += ["--" + name.replace("_", "-")]
            words += [] if value is True else [",".join(value) if isinstance(value, tuple) else str(value)]
    words += ["--keep"] if args.keep else []
    return shlex.join([*words, "--out", args.out.name])


def python_of(workload: Workload, args: argparse.Namespace, fingerprint: str) -> str:
    """Return Python code that makes the same plan."""
    lines = ["import longspan as ls", ""]
    causal = "ls.masks.full" if args.docs == "full" else "ls.masks.causal"
    mask = f"{causal}({workload.seq_len})"
    if len(workload.lengths) > 1:
        lines += _lengths_lines(workload, args)
        mask = "ls.masks.documents(lengths) & ls.masks.causal()"
    if workload.window is not None:
        mask += f" & ls.masks.sliding_window({workload.window})"
    lines += [f"mask = {mask}", f"layout = {_layout_line(workload, args)}"]
    machine = args.machine
    if machine is not None and machine not in MACHINES:
        lines.insert(1, "from pathlib import Path\nfrom longspan.cli.workload import machine_of\n")
        machine = f"machine_of({machine!r})"
    elif machine is not None:
        machine = repr(machine)
    words = {name: repr(value) for name, value in workload.tensors.items()}
    words["scheme"] = repr(args.scheme)
    words |= {"machine": machine} if machine is not None else {}
    words |= {"keep": "True"} if args.keep else {}
    words |= {"fetch_bytes": repr(args.fetch_bytes)} if args.fetch_bytes is not None else {}
    lines += ["plan = ls.plan(", "    mask,", "    layout,"]
    lines += [*(f"    {name}={value}," for name, value in words.items()), ")"]
    lines += [f'assert plan.fingerprint == "{fingerprint}"', "print(plan)"]
    return "\n".join(lines)


def _lengths_lines(workload: Workload, args: argparse.Namespace) -> list[str]:
    if args.docs in KINDS:
        imports = "from longspan.cli.workload import drawn_lengths"
        return [imports, "", f"lengths = drawn_lengths({args.docs!r}, {workload.seq_len}, seed={args.seed or 0})"]
    if len(workload.lengths) <= _LISTED or not Path(args.docs).is_file():
        return [f"lengths = {workload.lengths.tolist()}"]
    imports = "from pathlib import Path\n\nfrom longspan.cli.workload import read_lengths\n"
    return [imports, f"lengths = read_lengths(Path({str(args.docs)!r}))"]


def _layout_line(workload: Workload, args: argparse.Namespace) -> str:
    name, ranks, seq_len = args.layout, args.ranks, workload.seq_len
    if name == "balanced":
        return f"ls.layouts.balanced(mask, world_size={ranks})"
    if name == "per_document":
        lengths = "lengths" if len(workload.lengths) > 1 else f"[{seq_len}]"
        return f"ls.layouts.per_document({lengths}, {ranks})"
    if name == "round_robin_by_work":
        return f"ls.layouts.round_robin_by_work(mask, {ranks})"
    stripe = f", stripe={STRIPE}" if name == "striped" else ""
    return f"ls.layouts.{name}({seq_len}, {ranks}{stripe})"
