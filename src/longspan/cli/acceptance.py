"""Is this machine ready? Runs `pytest tests/gpu` of a checkout on all ranks: a verdict for every test.

  torchrun --nproc-per-node 8 -m longspan acceptance                    # a quarter of an hour on GPUs
  torchrun --nproc-per-node 8 -m longspan acceptance --only exact.ring  # one line again, by its name
  torchrun --nproc-per-node 4 -m longspan acceptance --quick            # about a minute on CPUs

It writes one page and a JSON file. They name no host, no person and no path: paste them into an issue. Exit code 1: a
line is red.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import longspan
from longspan.cli.launch import add_backend
from longspan.cli.output import to_write
from longspan.errors import LongspanError


def add_arguments(parser: Any) -> None:
    """Add the options to this command's parser, and to pytest's (tests/gpu/conftest.py)."""
    parser.add_argument("--quick", action="store_true", help="fewer cases, bare kernels, one fault: about a minute")
    parser.add_argument("--only", metavar="LINES", help="lines by name, or by the start of it: exact.ring,faults")
    parser.add_argument("--list", action="store_true", help="print the names of all lines, and run none")
    parser.add_argument(
        "--out",
        type=to_write(),
        default=Path("acceptance"),
        metavar="NAME",
        help="writes NAME.md and NAME.json (acceptance)",
    )
    add_backend(parser)


def find_tests() -> Path:
    """Return `tests/gpu` of the checkout that longspan was imported from, or of the working directory."""
    roots = Path(longspan.__file__).parents[2], Path.cwd()
    for root in roots:
        if (root / "tests" / "gpu" / "conftest.py").exists():
            return root / "tests" / "gpu"
    raise LongspanError(
        "acceptance runs the tests in tests/gpu, which an installed package does not contain. Run it in a checkout: git"
        " clone Longspan's repository, and in it pip install -e . --group test."
    )


def run(args: argparse.Namespace) -> int:
    tests = find_tests()
    try:
        import pytest
    except ModuleNotFoundError as error:
        raise LongspanError("acceptance needs pytest 9 or newer, which is not installed: pip install pytest") from error
    words = [str(tests), f"--out={args.out}"]
    words += [f"--{name}" for name in ("quick", "list", "json", "plain") if getattr(args, name)]
    words += [f"--{name}={value}" for name in ("only", "backend") if (value := getattr(args, name)) is not None]
    status = pytest.main(words)
    statuses = {pytest.ExitCode.OK: 0, pytest.ExitCode.USAGE_ERROR: 2, pytest.ExitCode.INTERRUPTED: 130}
    return statuses.get(pytest.ExitCode(status), 1)
