"""One self-contained HTML file that explains a plan to a colleague: choices, reasons, pictures, numbers, how to repeat.

longspan report --seq 1M --docs longtail --ranks 64 --out report.html
"""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

import longspan
from longspan.cli.output import print_json, progress, to_write
from longspan.cli.workload import KINDS, STRIPE, Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.planning.machine import MACHINES
from longspan.viz.report import report_html

_OPTIONS = {  # option: default, which is left out of the command
    "seq": None, "ranks": 8, "docs": "causal", "window": None, "seed": 0, "q_heads": 32, "kv_heads": 8,
    "head_dim": 128, "v_head_dim": None, "batch": 1, "dtype": "bfloat16", "machine": None, "scheme": "auto",
    "layout": "balanced", "fetch_bytes": None, "title": None,
}  # fmt: skip
_LISTED = 24
"""Documents whose lengths are written out."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", type=to_write(".html", ".htm"), default=Path("report.html"), metavar="FILE", help="(report.html)"
    )
    parser.add_argument("--title", help="the title of the report")
    add_workload(parser)


def run(args: argparse.Namespace) -> int:
    workload = Workload.of(args)
    with progress(args, "planning and drawing"):
        plan = workload.plan(args.ranks)
        text = report_html(
            plan,
            title=args.title,
            command=command_of(args),
            python=python_of(workload, args, plan.fingerprint),
            extra_inputs=(("given as", workload.docs),) if workload.docs != "as given" else (),
            version=longspan.__version__,
        )
    args.out.write_text(text, encoding="utf-8")
    if args.json:
        answer = {"out": str(args.out), "num_bytes": len(text.encode()), "fingerprint": plan.fingerprint}
        print_json("report", {"workload": workload.as_json(), "scheme": plan.scheme.name, **answer})
    else:
        print(f"wrote {args.out}: {plan.scheme.name}, plan {plan.fingerprint[:12]}, {len(text.encode()):,} bytes")
    return 0


def command_of(args: argparse.Namespace) -> str:
    """Return the command that writes the same report, without options at their defaults."""
    words = ["longspan", "report"]
    for name, default in _OPTIONS.items():
        value = getattr(args, name)
        if value != default:
            words += ["--" + name.replace("_", "-"), str(value)]
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
        return [imports, "", f"lengths = drawn_lengths({args.docs!r}, {workload.seq_len}, seed={args.seed})"]
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
