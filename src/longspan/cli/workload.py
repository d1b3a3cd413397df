"""The workload that commands plan for: a mask, tensors, a machine and a layout, and the arguments that describe it.

A command calls `add_arguments(parser)` and then `Workload.of(args)`; `workload.plan(ranks)` calls `longspan.plan` with
these arguments.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.output import count, counts, describe_missing
from longspan.errors import LayoutError, MaskError, PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.machine import MACHINES, MAX_TEXT, Machine, assumed_machine, parse_machine
from longspan.planning.plan import Plan
from longspan.planning.planners import can_limit, check_limit
from longspan.planning.steps import ITEMSIZE
from longspan.spans import Ints

KINDS = ("longtail", "short", "mixed")
MAX_FILE = 1 << 20
MAX_TOKENS = 1 << 40
LAYOUTS = ("balanced", "zigzag", "contiguous", "per_document", "round_robin_by_work", "striped")
STRIPE = 128
"""Tokens of a stripe: with the layout's default of one, a plan of 1M tokens would list every token."""
MAX_RANKS = 1 << 16
WINDOW_HELP = "a token sees itself and the WINDOW tokens before it, as with masks.sliding_window(WINDOW)"


def drawn_lengths(kind: str, seq_len: int, seed: int = 0) -> Ints:
    """Return random document lengths that add up to `seq_len`.

    "short" documents, a wide "mixed" range, or a "longtail": many short ones and few long ones.

    >>> int(drawn_lengths("longtail", 1000).sum())
    1000
    """
    if seed < 0:
        raise MaskError(f"--seed must be 0 or more, but got {seed}.")
    if kind not in KINDS:
        raise MaskError(f"documents must be one of {', '.join(KINDS)}, but got {kind!r}.")
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    left = seq_len
    while left:
        if kind == "short":
            length = rng.lognormal(7.0, 1.0)
        elif kind == "mixed":
            length = rng.lognormal(7.5, 1.8)
        else:
            which = rng.random()
            center, spread = (6.8, 1.0) if which < 0.80 else (9.0, 0.8) if which < 0.97 else (11.5, 0.6)
            length = rng.lognormal(center, spread)
        lengths.append(int(min(max(length, 16), left)))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def read_lengths(path: Path) -> Ints:
    """Read document lengths from a file: one whole number a line, or a JSON list of them."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise MaskError(f"{path} must have at most {MAX_FILE} bytes, as a list of document lengths, but has more.")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise MaskError(f"{path} is not text. It must have one length a line, or a JSON list of lengths.") from error
    lengths: list[int] = []
    if text.lstrip().startswith("["):
        try:
            lengths = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise MaskError(f"{path} begins like a JSON list, but is not one: {error!s:.80}.") from error
        for number, length in enumerate(lengths):
            if type(length) is not int or not 0 < length <= MAX_TOKENS:
                raise MaskError(f"{path}: entry {number} must be a whole number, 1 or more, but got {length!r:.40}.")
    else:
        for number, line in enumerate(text.splitlines(), start=1):
            word = line.strip()
            if not word:
                continue
            if not (word.isascii() and word.isdecimal()) or len(word) > 13 or not 0 < int(word) <= MAX_TOKENS:
                raise MaskError(f"{path}, line {number}: must be a whole number, 1 or more, but got {word!r:.40}.")
            lengths.append(int(word))
    if not lengths or sum(lengths) > MAX_TOKENS:
        raise MaskError(f"{path} lists {len(lengths)} lengths. They must add up to 1 to {MAX_TOKENS} tokens.")
    return np.array(lengths, dtype=np.int64)


def add_arguments(parser: argparse.ArgumentParser, *, ranks: str = "one", layout: bool = True) -> None:
    """Add the arguments of a workload. `ranks` is "one", "many" (a list) or "group" (those of torchrun)."""
    workload = parser.add_argument_group("workload")
    workload.add_argument("--seq", type=count, metavar="TOKENS", help="tokens of the sequence, such as 1M (1,048,576)")
    if ranks == "one":
        workload.add_argument("--ranks", type=count, default=8, help="ranks that share the sequence (8)")
    elif ranks == "many":
        workload.add_argument("--ranks", type=counts, default=(8, 16, 64), help="numbers of ranks (8,16,64)")
    workload.add_argument(
        "--docs",
        default="causal",
        metavar="DOCS",
        help="causal (one document), full, longtail, short or mixed documents, lengths such as 700,1200,148, or a FILE"
        " with one length a line or a JSON list (causal)",
    )
    workload.add_argument("--window", type=count, help=WINDOW_HELP)
    workload.add_argument("--seed", type=int, help="of drawn documents (0)")
    tensors = parser.add_argument_group("tensors")
    tensors.add_argument("--q-heads", type=count, default=32, help="query heads (32)")
    tensors.add_argument("--kv-heads", type=count, default=8, help="key/value heads (8)")
    tensors.add_argument("--head-dim", type=count, default=128, help="features of a head (128)")
    tensors.add_argument("--v-head-dim", type=count, help="features of a value head (as --head-dim)")
    tensors.add_argument("--batch", type=count, default=1, help="batch rows (1)")
    tensors.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bfloat16", help="(bfloat16)")
    how = parser.add_argument_group("how")
    names = ", ".join(MACHINES)
    how.add_argument("--machine", metavar="NAME|FILE", help=f"{names}, or a file of `longspan calibrate` (h100)")
    if layout:
        how.add_argument("--scheme", default="auto", help="auto, or a name such as exchange, ulysses or 'usp(8)'")
        how.add_argument("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    how.add_argument("--keep", action="store_true", help="keep remote K/V for backward instead of fetching them again")
    how.add_argument("--fetch-bytes", type=count, help="remote K/V that an exchange may hold at once")


@dataclass(frozen=True)
class Workload:
    """A mask, tensors and a machine, and their descriptions."""

    mask: Mask
    seq_len: int
    lengths: Ints
    docs: str
    window: int | None
    tensors: dict[str, Any]
    machine: Machine
    is_machine_named: bool
    keep: bool
    fetch_bytes: int | None
    scheme: str = "auto"
    layout_name: str = "balanced"
    _layouts: dict[tuple[str, int], Layout] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(args: argparse.Namespace) -> Workload:
        """Build the workload from the arguments of `add_arguments`."""
        docs, lengths = _parse_docs(args)
        seq_len, scheme = int(lengths.sum()), getattr(args, "scheme", "auto")
        check_limit(scheme.replace(" ", ""), args.fetch_bytes)
        if docs == "full":
            check_window(args)
            mask = masks.full(seq_len)
        else:
            mask = masks.causal(seq_len) if len(lengths) == 1 else masks.documents(lengths) & masks.causal()
            mask = mask if args.window is None else mask & masks.sliding_window(args.window)
        tensors = {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype", "batch")}
        if args.v_head_dim is not None:
            tensors["v_head_dim"] = args.v_head_dim
        machine = assumed_machine(functions=False) if args.machine is None else machine_of(args.machine)
        return Workload(
            mask, seq_len, lengths, docs, args.window, tensors, machine, args.machine is not None, args.keep,
            args.fetch_bytes, scheme, getattr(args, "layout", "balanced"),
        )  # fmt: skip

    def layout(self, ranks: int, name: str | None = None) -> Layout:
        """Return the layout of that name, or of --layout; built once for each name and number of ranks."""
        name = self.layout_name if name is None else name
        if (name, ranks) not in self._layouts:
            if ranks > MAX_RANKS:
                raise LayoutError(f"--ranks must be at most {MAX_RANKS}, but got {ranks}.")
            if name == "balanced":
                layout = layouts.balanced(self.mask, world_size=ranks, seq_len=self.seq_len)
            elif name == "per_document":
                layout = layouts.per_document(self.lengths, ranks)
            elif name == "round_robin_by_work":
                layout = layouts.round_robin_by_work(self.mask, ranks, seq_len=self.seq_len)
            elif name == "striped":
                layout = layouts.striped(self.seq_len, ranks, stripe=STRIPE)
            else:
                layout = {"zigzag": layouts.zigzag, "contiguous": layouts.contiguous}[name](self.seq_len, ranks)
            self._layouts[name, ranks] = layout
        return self._layouts[name, ranks]

    def plan(self, ranks: int, scheme: str | None = None, layout: str | None = None) -> Plan:
        """Plan for this number of ranks, with these names or those of the workload."""
        name = self.scheme if scheme is None else scheme
        return plan(
            self.mask, self.layout(ranks, layout), scheme=name, keep=self.keep, **self.tensors,
            machine=self.machine if self.is_machine_named else None,
            fetch_bytes=self.fetch_bytes if name == "auto" or can_limit(name) else None,
        )  # fmt: skip

    def about_docs(self) -> str:
        """Describe the documents in a line."""
        if len(self.lengths) == 1:
            text = "every token sees every token" if self.docs == "full" else "one causal document"
        else:
            least, most = int(self.lengths.min()), int(self.lengths.max())
            text = f"{len(self.lengths):,} causal documents of {least:,} to {most:,} tokens ({self.docs})"
        return text if self.window is None else f"{text}, window of {self.window:,} before each token"

    def about_tensors(self) -> str:
        t = self.tensors
        dims = f"{t['head_dim']}" + (f"/{t['v_head_dim']}" if "v_head_dim" in t else "")
        return f"{t['q_heads']} query and {t['kv_heads']} key/value heads of {dims}, {t['dtype']}, batch {t['batch']}"

    def about_machine(self) -> str:
        return self.machine.name + ("" if self.is_machine_named else " (assumed; say --machine)")

    def as_json(self) -> dict[str, Any]:
        return {
            "seq_len": self.seq_len, "docs": self.docs, "num_documents": len(self.lengths), "window": self.window,
            **self.tensors, "machine": self.machine.name, "kernel": self.machine.kernel, "keep": self.keep,
            "fetch_bytes": self.fetch_bytes,
        }  # fmt: skip


def machine_of(text: str) -> Machine:
    """Return the preset of that name, or the machine in that file."""
    if text in MACHINES:
        return MACHINES[text]
    path = Path(text)
    if not path.is_file():
        raise PlanError(
            f"--machine must be one of {', '.join(MACHINES)}, or a file that `longspan calibrate` wrote, but got"
            f" {text!r:.80}.{describe_missing(text)}"
        )
    with path.open("rb") as file:
        data = file.read(MAX_TEXT + 1)
    try:
        return parse_machine(data.decode())
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not text. A machine file is JSON as `longspan calibrate` writes it.") from error
    except PlanError as error:
        raise PlanError(f"{path}: {error}") from error


def check_window(args: argparse.Namespace) -> None:
    """Refuse --window with --docs full."""
    if args.window is not None:
        raise MaskError("--window needs causal documents, but got --docs full. Use --docs causal.")


def check_seq_len(args: argparse.Namespace, lengths: Sequence[int] | Ints) -> None:
    """Refuse a --seq that is not the sum of the document lengths."""
    total = int(sum(lengths))
    if args.seq not in (None, total):
        raise MaskError(
            f"--seq must be the sum of --docs, which lists {len(lengths)} documents of {total} tokens together, but got"
            f" {args.seq}. Leave --seq out."
        )


def _parse_docs(args: argparse.Namespace) -> tuple[str, Ints]:
    """Return a description of the documents, and their lengths."""
    docs, seq_len = str(args.docs), args.seq
    if args.seed is not None and docs not in KINDS:
        raise MaskError(f"--seed needs drawn documents ({', '.join(KINDS)}), but got --docs {docs:.60}. Leave it out.")
    if docs in ("causal", "full", *KINDS):
        if seq_len is None:
            raise MaskError(f"--docs {docs} needs a length: add --seq, such as --seq 1M.")
        if docs in KINDS:
            seed = args.seed or 0
            return f"{docs}, seed {seed}", drawn_lengths(docs, seq_len, seed)
        return docs, np.array([seq_len], dtype=np.int64)
    if Path(docs).is_file():
        lengths, name = read_lengths(Path(docs)), Path(docs).name
    elif docs[:1].isdecimal():
        try:
            lengths, name = np.array(counts(docs), dtype=np.int64), "as given"
        except argparse.ArgumentTypeError as error:
            raise MaskError(f"--docs {docs!r:.60}: {error}") from error
    else:
        raise MaskError(
            f"--docs must be causal, full, {', '.join(KINDS)}, lengths such as 700,1200,148, or a file of lengths, but"
            f" got {docs!r:.80}.{describe_missing(docs)}"
        )
    check_seq_len(args, lengths)
    return name, lengths
