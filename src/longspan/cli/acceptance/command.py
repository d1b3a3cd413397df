"""Is this machine ready? Kernels, answers, memory, times, host and faults, one by one, with a verdict for each line.

  torchrun --nproc-per-node 8 -m longspan acceptance                    # ten minutes on GPUs, a page and a JSON file
  torchrun --nproc-per-node 8 -m longspan acceptance --only exact.ring  # one line again, by its name
  torchrun --nproc-per-node 4 -m longspan acceptance --quick            # under a minute on CPUs

The page names no host, no person and no path: paste it into an issue. Exit code 1: a line is red.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from longspan.cli.launch import add_backend, joined
from longspan.cli.output import print_json, progress, screen_of, to_write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="fewer cases, bare kernels, one fault: under a minute")
    parser.add_argument("--only", metavar="LINES", help="lines by name, or by its beginning: exact.ring,faults")
    parser.add_argument("--list", action="store_true", help="print the names of all lines, and run none")
    parser.add_argument(
        "--out",
        type=to_write(),
        default=Path("acceptance"),
        metavar="NAME",
        help="writes NAME.md and NAME.json (acceptance)",
    )
    add_backend(parser)


def run(args: argparse.Namespace) -> int:
    with joined("acceptance", args.backend, alone=args.list) as ranks:
        import torch

        from longspan.cli.acceptance.lines import Site
        from longspan.cli.acceptance.page import AcceptanceReport, show
        from longspan.cli.acceptance.session import Session, all_lines, chosen_lines

        lines = chosen_lines(all_lines(is_gpu=ranks.device != "cpu"), args.only, quick=args.quick)
        if args.list:
            if ranks.speaks:
                print("\n".join(line.name for line in lines))
            return 0
        screen = screen_of(args)

        shown = ExitStack()  # the bar goes before the page comes

        def finish(report: AcceptanceReport) -> None:
            shown.close()
            if args.json:
                print_json("acceptance", report.as_dict())
                return
            show(report, screen)
            screen.text()
            screen.text(
                f"Wrote {args.out.with_suffix('.md')} and {args.out.with_suffix('.json')}: paste them as they are."
            )

        torch.set_num_threads(1)
        with shown:
            advance = shown.enter_context(progress(args, "acceptance", len(lines), speaks=ranks.speaks))
            report = Session(Site(ranks, quick=args.quick), lines, args.out).run(advance, finish)
    return 0 if report.ok else 1
