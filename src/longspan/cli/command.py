"""The `longspan` command: find the subcommand, print errors as one line, return an exit code.

0: fine. 1: a check failed. 2: the arguments are refused, and a line on stderr says why. 130: interrupted (Ctrl-C).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

from longspan.cli.output import did_you_mean
from longspan.errors import LongspanError

FINE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {  # name: what it does
    "plan": "schemes of one layer, or memory, time and cost of a model, or a dataset over all ranks",
    "show": "pictures: a mask, a layout, a timeline, memory",
    "verify": "compare attention over ranks with one device",
    "prove": "check a model of transformers, without weights or GPUs",
    "doctor": "versions, kernels, speed and a self-check; measures a machine for plan",
}
DESCRIPTION = """\
Exact context parallelism for PyTorch: one sequence over many GPUs, with the results of one.

Does my run fit, and how long does a step take?
  longspan plan --model qwen3-8b --seq 256k --ranks 8 --memory 80
Which scheme is the fastest for my documents?
  longspan plan --seq 1M --ranks 64 --docs longtail
Is my model supported?
  longspan prove qwen3
Is this machine ready, and are its results right?
  longspan doctor
  torchrun --nproc-per-node 4 -m longspan verify
"""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print_error(f"{self.prog}: {message}" + (f" See {self.prog} --help." if message.endswith(".") else ""))
        self.exit(REFUSED)


def print_error(line: str) -> None:
    """Print an error on rank 0 only, since all ranks of torchrun have the same arguments."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr)


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the subcommand that `arguments` name adds its own options."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser(
        prog="longspan",
        description=DESCRIPTION,
        epilog="Exit codes: 0 fine, 1 a check failed, 2 bad arguments. Every command takes --help and --json.",
        formatter_class=formatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command = next((word for word in arguments if not word.startswith("-")), None)
    for name, help_line in COMMANDS.items():
        sub = commands.add_parser(name, help=help_line, formatter_class=formatter)
        if name == command:
            module = importlib.import_module(f"longspan.cli.{name}")
            sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
            sub.description = module.__doc__
            module.add_arguments(sub)
            sub.set_defaults(run=module.run, known=re.findall(r"--[a-z][a-z-]*", sub.format_usage()))
    return parser


def _describe_unknown(start: str, words: Sequence[str], known: Iterable[str]) -> str:
    """
    >>> _describe_unknown("plan has no", ["--schemes", "ring"], ["--scheme", "--seq"])
    'plan has no --schemes ring. Did you mean --scheme?'
    """
    near = [did_you_mean(word.partition("=")[0], known) for word in words]
    return f"{start} {' '.join(words):.80}.{next(filter(None, near), '')}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = f"longspan {words[0]}" if words else "longspan"
    try:
        code = _run(words)
        sys.stdout.flush()  # here, where an error can still be reported
        return code
    except BrokenPipeError:  # a reader such as `head` has left; Python would write the rest at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except UnicodeEncodeError as error:
        print_error(f"{name}: stdout has the encoding {error.encoding}. Set PYTHONIOENCODING=utf-8.")
    except (LongspanError, OSError) as error:
        print_error(f"{name}: {' '.join(str(error).split())}")
    except ModuleNotFoundError as missing:
        if (missing.name or "").partition(".")[0] != "torch":
            raise
        print_error(f"{name}: this command needs torch, which is not installed. Install PyTorch.")
    except KeyboardInterrupt:
        return INTERRUPTED
    return REFUSED


def _run(words: list[str]) -> int:
    try:
        parser = make_parser(words)
        command = next((word for word in words if not word.startswith("-")), None)
        if command is not None and command not in COMMANDS:
            parser.error(_describe_unknown("there is no command", [command], COMMANDS))
        args, unknown = parser.parse_known_args(words)
        if unknown:
            start = "there is no option" if command is None else f"{command} has no"
            parser.error(_describe_unknown(start, unknown, getattr(args, "known", ("--help", "--version"))))
    except SystemExit as stop:  # argparse has printed the error, or the help
        return stop.code if isinstance(stop.code, int) else REFUSED
    if args.version:
        import longspan

        print(f"longspan {longspan.__version__}")
        return FINE
    if args.command is None:
        parser.print_help()
        return REFUSED
    return int(args.run(args))
