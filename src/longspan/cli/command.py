"""The `longspan` command: find the subcommand, print errors as one line, return an exit code.

0: fine. 1: a check failed. 2: the arguments are refused, or the output cannot be written; a line on stderr says why.
130: interrupted (Ctrl-C).
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import Any, NoReturn, TextIO, cast

from longspan.errors import LongspanError

FINE, FAILED, REFUSED, INTERRUPTED = 0, 1, 2, 130

COMMANDS = {  # name: (module, what it does)
    "plan": ("longspan.cli.plan", "memory, time and traffic of a model or of one attention layer"),
    "compare": ("longspan.cli.compare", "every scheme and layout side by side, PyTorch's among them"),
    "batches": ("longspan.cli.batches", "packed documents over all ranks, compared with every dp x cp"),
    "prove": ("longspan.cli.prove", "check a model of transformers, without weights or GPUs"),
    "verify": ("longspan.cli.verify", "compare attention over ranks with one device"),
    "doctor": ("longspan.cli.doctor", "versions, kernels, clocks, bandwidth and a self-check"),
    "acceptance": ("longspan.cli.acceptance", "test every guarantee on this machine, with a verdict for each"),
    "show": ("longspan.cli.show", "pictures of a mask, a layout or a schedule"),
    "report": ("longspan.cli.report", "one HTML file that explains a plan"),
    "trace": ("longspan.cli.trace", "the planned timeline as a trace for Perfetto or Chrome"),
    "bench": ("longspan.cli.bench", "run attention under torchrun and write the measured trace"),
    "calibrate": ("longspan.cli.calibrate", "measure this machine under torchrun and write a Machine file"),
}
DESCRIPTION = """\
Exact context parallelism for PyTorch: one sequence over many GPUs, with the results of one.

Does my run fit, and how long does a step take?
  longspan plan --model qwen3-8b --seq 256k --ranks 8 --memory 80
Which scheme is the fastest for my documents?
  longspan compare --seq 1M --ranks 8,64 --docs longtail
Is my model supported?
  longspan prove qwen3
Is this machine ready, and are its results right?
  longspan doctor
  torchrun --nproc-per-node 4 -m longspan verify
  torchrun --nproc-per-node 8 -m longspan acceptance
"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """A formatter with the help of every command on one line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog)
        self._action_max_length = max(map(len, COMMANDS)) + 4  # argparse does not count the indent of commands


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print_error(
            f"{self.prog}: {message} See {self.prog} --help." if message.endswith(".") else f"{self.prog}: {message}"
        )
        self.exit(REFUSED)

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)  # argparse's own swallows errors


def print_error(line: str) -> None:
    """Print an error on rank 0 only, since all ranks of torchrun have the same arguments."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):  # a full disk: the exit status must suffice
            print(line, file=sys.stderr)


def make_parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """Build the parser; only the subcommand that `arguments` name adds its own options."""
    parser = Parser(
        prog="longspan",
        description=DESCRIPTION,
        epilog="Exit codes: 0 fine, 1 a check failed, 2 bad arguments. Every command takes --help and --json.",
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    command = next((word for word in arguments if not word.startswith("-")), None)
    for name, (module, help_line) in COMMANDS.items():
        formatter = argparse.RawDescriptionHelpFormatter
        sub = commands.add_parser(name, help=help_line, conflict_handler="resolve", formatter_class=formatter)
        if name == command:
            sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
            sub.add_argument("--plain", action="store_true", help="plain text, even if rich is installed")
            try:
                loaded = importlib.import_module(module)
            except ModuleNotFoundError as missing:
                sub.error(f"this command needs {missing.name}, which is not installed.")
            sub.description = loaded.__doc__
            loaded.add_arguments(sub)
            sub.set_defaults(run=loaded.run, known=re.findall(r"--[a-z][a-z-]*", sub.format_usage()))
    return parser


def _describe_unknown(start: str, words: Sequence[str], known: Iterable[str]) -> str:
    """
    >>> _describe_unknown("plan has no", ["--schemes", "ring"], ["--scheme", "--seq"])
    'plan has no --schemes ring. Did you mean --scheme?'
    """
    near = [match for word in words for match in get_close_matches(word.partition("=")[0], list(known), 1, 0.7)]
    return f"{start} {' '.join(words):.80}." + (f" Did you mean {near[0]}?" if near else "")


class Output:
    """Stdout whose errors name it; output after a pipe was closed (as by `head`) is dropped."""

    def __init__(self, stream: TextIO, is_closed: bool) -> None:
        self.stream, self.is_closed = stream, is_closed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        self._try(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self.stream.flush)

    def _try(self, write: Callable[[], object]) -> None:
        try:
            if self.is_closed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            write()
        except OSError as error:
            drop(self.stream)
            if not isinstance(error, BrokenPipeError):
                raise OSError(error.errno, error.strerror, "stdout") from error


def drop(stream: TextIO) -> None:
    """Drop what could not be written, since Python would try again at exit, and print an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def usable_streams() -> Iterator[Output]:
    """Make stdout and stderr writable, though the shell may have closed them (`>&-`)."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the next file would take this number, and get the output
            os.open(os.devnull, os.O_RDWR)
    before = sys.stdout, sys.stderr  # None where one is closed
    with open(os.devnull, "w") as nowhere:
        output = Output(before[0] or nowhere, before[0] is None)
        sys.stdout, sys.stderr = cast(TextIO, output), before[1] or nowhere
        try:
            yield output
        finally:
            try:
                sys.stderr.flush()
            except OSError:
                drop(sys.stderr)
            sys.stdout, sys.stderr = before


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    with usable_streams() as output:
        try:
            code = _run(words)
            if not output.is_closed:
                output.flush()  # here, where an error can still be reported
            return code
        except (LongspanError, OSError, UnicodeEncodeError) as error:
            print_error(f"longspan {words[0] if words else ''}: {_describe_error(error)}")
            return REFUSED
        except ModuleNotFoundError as missing:
            if (missing.name or "").partition(".")[0] != "torch":
                raise
            print_error(f"longspan {words[0]}: this command needs torch, which is not installed. Install PyTorch.")
            return REFUSED
        except KeyboardInterrupt:
            return INTERRUPTED


def _complete() -> None:
    """Print the completions of a command line and exit, if argcomplete is installed: the shell called, not a user."""
    with suppress(ModuleNotFoundError):
        import argcomplete  # pyright: ignore[reportMissingImports]  # optional

        argcomplete.autocomplete(make_parser(os.environ.get("COMP_LINE", "").split()[1:]))


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
        if args.version:
            import longspan

            print(f"longspan {longspan.__version__}")
            return FINE
        if args.command is None:
            parser.print_help()
            return REFUSED
        return int(args.run(args))
    except SystemExit as stop:  # argparse has printed the error
        return stop.code if isinstance(stop.code, int) else REFUSED


def _describe_error(error: Exception) -> str:
    if isinstance(error, UnicodeEncodeError):
        return (
            f"stdout has the encoding {error.encoding}, which lacks characters of the answer. Set"
            f" PYTHONIOENCODING=utf-8."
        )
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}."
    return " ".join(str(error).split("\n"))
