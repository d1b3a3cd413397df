"""What is asked about: a mask, tensors, a machine, and how to lay the tokens out. Arguments that commands share.

A command calls `add_arguments(parser)` and then `Workload.of(args)`; `workload.plan(ranks)` is `longspan.plan` with
these arguments and nothing else.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.output import count, counts, missing
from longspan.errors import LayoutError, MaskError, PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.machine import MACHINES, MAX_TEXT, Machine, assumed_machine, parse_machine
from longspan.planning.plan import Plan
from longspan.planning.steps import ITEMSIZE
from longspan.spans import Ints

# Document lengths: drawn by kind, or read from a file, which is bounded and strictly parsed.


KINDS = ("longtail", "short", "mixed")
MAX_FILE = 1 << 20
MAX_TOKENS = 1 << 40


def drawn_lengths(kind: str, seq_len: int, seed: int = 0) -> Ints:
    """Lengths that add up to `seq_len`: of short documents, of a wide mix, or of many short and few long ones.

    >>> int(drawn_lengths("longtail", 1000).sum())
    1000
    """
    if seed < 0:
        raise MaskError(f"--seed {seed} was asked for. Documents are drawn from a seed of 0 or more.")
    chance = np.random.default_rng(seed)
    left = seq_len
    lengths: list[int] = []
    while left:
        lengths.append(int(min(max(_draw(kind, chance), 16), left)))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def _draw(kind: str, chance: np.random.Generator) -> float:
    if kind == "short":
        return chance.lognormal(7.0, 1.0)
    if kind == "mixed":
        return chance.lognormal(7.5, 1.8)
    if kind != "longtail":
        raise MaskError(f"documents of kind {kind!r} were asked for. Choose one of {', '.join(KINDS)}.")
    which = chance.random()
    center, spread = (6.8, 1.0) if which < 0.80 else (9.0, 0.8) if which < 0.97 else (11.5, 0.6)
    return chance.lognormal(center, spread)


def read_lengths(path: Path) -> Ints:
    """The lengths in a file: one whole number a line, or a JSON list of them."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise MaskError(f"{path} has more than {MAX_FILE} bytes. A list of document lengths has at most that.")
    try:
        text = data.decode()
    except UnicodeDecodeError as wrong:
        raise MaskError(f"{path} is not text. Give one length a line, or a JSON list of lengths.") from wrong
    return _from_json(text, path) if text.lstrip().startswith("[") else _from_lines(text, path)


def _from_json(text: str, path: Path) -> Ints:
    try:
        lengths = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise MaskError(f"{path} begins like a JSON list, but is not one: {wrong!s:.80}.") from wrong
    for number, length in enumerate(lengths):
        if type(length) is not int or not 0 < length <= MAX_TOKENS:
            raise MaskError(f"{path}: entry {number} is {length!r:.40}. A length is a whole number, 1 or more.")
    return _as_array(lengths, str(path))


def _from_lines(text: str, path: Path) -> Ints:
    lengths: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not (word.isascii() and word.isdecimal()) or len(word) > 13 or not 0 < int(word) <= MAX_TOKENS:
            raise MaskError(f"{path}, line {number}: {word!r:.40} was found. A length is a whole number, 1 or more.")
        lengths.append(int(word))
    return _as_array(lengths, str(path))


def _as_array(lengths: list[int], where: str) -> Ints:
    if not lengths or sum(lengths) > MAX_TOKENS:
        raise MaskError(f"{where} lists {len(lengths)} lengths. They must add up to 1 to {MAX_TOKENS} tokens.")
    return np.array(lengths, dtype=np.int64)


# -- Workloads ---------------------------------------------------------------------------------------------------------


LAYOUTS = ("balanced", "zigzag", "contiguous", "per_document", "round_robin_by_work", "striped")
STRIPE = 128
"""Tokens of a stripe: with the layout's default of one, a plan of 1M tokens would list every token."""
MAX_RANKS = 1 << 16
WINDOW_HELP = "a token sees itself and the WINDOW tokens before it, as with masks.sliding_window(WINDOW)"


def add_arguments(parser: argparse.ArgumentParser, *, ranks: str = "one", layout: bool = True) -> None:
    """Adds the arguments that describe a workload. `ranks` is "one", "many" (a list) or "group" (as many as torchrun
    started)."""
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
    workload.add_argument("--seed", type=int, default=0, help="of drawn documents (0)")
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
        how.add_argument("--scheme", default="auto", help="auto, or a name such as exchange or 'hybrid(8,exchange)'")
        how.add_argument("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    how.add_argument("--keep", action="store_true", help="keep remote K/V for backward instead of fetching them again")
    how.add_argument("--fetch-bytes", type=count, help="remote K/V that an exchange may hold at once")


@dataclass(frozen=True)
class Workload:
    """A mask, tensors and a machine, and how they were described."""

    mask: Mask
    seq_len: int
    lengths: Ints
    docs: str
    window: int | None
    tensors: dict[str, Any]
    machine: Machine
    machine_given: bool
    keep: bool
    fetch_bytes: int | None
    scheme: str = "auto"
    layout_name: str = "balanced"
    _layouts: dict[tuple[str, int], Layout] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(args: argparse.Namespace) -> Workload:
        """The workload that `add_arguments` described."""
        docs, lengths = _lengths(args)
        seq_len = int(lengths.sum())
        mask = _mask(docs, lengths, args.window)
        tensors = {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype", "batch")}
        if args.v_head_dim is not None:
            tensors["v_head_dim"] = args.v_head_dim
        machine = assumed_machine(functions=False) if args.machine is None else machine_of(args.machine)
        scheme, layout = getattr(args, "scheme", "auto"), getattr(args, "layout", "balanced")
        given = args.machine is not None
        return Workload(
            mask, seq_len, lengths, docs, args.window, tensors, machine, given, args.keep, args.fetch_bytes, scheme,
            layout,
        )  # fmt: skip

    def layout(self, ranks: int, name: str | None = None) -> Layout:
        """Who holds which tokens; made once for each name and number of ranks."""
        key = (self.layout_name if name is None else name, ranks)
        if key not in self._layouts:
            self._layouts[key] = self._build_layout(*key)
        return self._layouts[key]

    def _build_layout(self, name: str, ranks: int) -> Layout:
        if ranks > MAX_RANKS:
            raise LayoutError(f"{ranks} ranks were asked for. This command plans for {MAX_RANKS} at most.")
        if name == "balanced":
            return layouts.balanced(self.mask, world_size=ranks, seq_len=self.seq_len)
        if name == "per_document":
            return layouts.per_document(self.lengths, ranks)
        if name == "round_robin_by_work":
            return layouts.round_robin_by_work(self.mask, ranks, seq_len=self.seq_len)
        if name == "striped":
            return layouts.striped(self.seq_len, ranks, stripe=STRIPE)
        return {"zigzag": layouts.zigzag, "contiguous": layouts.contiguous}[name](self.seq_len, ranks)

    def plan(self, ranks: int, scheme: str | None = None, layout: str | None = None) -> Plan:
        """The plan for this number of ranks, by these names or those of the workload."""
        machine = self.machine if self.machine_given else None
        return plan(
            self.mask,
            self.layout(ranks, layout),
            scheme=self.scheme if scheme is None else scheme,
            machine=machine,
            keep=self.keep,
            fetch_bytes=self.fetch_bytes,
            **self.tensors,
        )

    def about_docs(self) -> str:
        """What the tokens are, in a line."""
        if len(self.lengths) == 1:
            text = "every token sees every token" if self.docs == "full" else "one causal document"
        else:
            least, most = int(self.lengths.min()), int(self.lengths.max())
            text = f"{len(self.lengths):,} causal documents of {least:,} to {most:,} tokens ({self.docs})"
        return text if self.window is None else f"{text}, window of {self.window:,} before each token"

    def about_tensors(self) -> str:
        """The heads, in a line."""
        t = self.tensors
        dims = f"{t['head_dim']}" + (f"/{t['v_head_dim']}" if "v_head_dim" in t else "")
        return f"{t['q_heads']} query and {t['kv_heads']} key/value heads of {dims}, {t['dtype']}, batch {t['batch']}"

    def about_machine(self) -> str:
        """The machine, in a line."""
        return self.machine.name + ("" if self.machine_given else " (assumed; say --machine)")

    def as_json(self) -> dict[str, Any]:
        """What was asked, for JSON."""
        return {
            "seq_len": self.seq_len,
            "docs": self.docs,
            "num_documents": len(self.lengths),
            "window": self.window,
            **self.tensors,
            "machine": self.machine.name,
            "kernel": self.machine.kernel,
            "keep": self.keep,
            "fetch_bytes": self.fetch_bytes,
        }


def machine_of(text: str) -> Machine:
    """The preset of that name, or the machine in that file."""
    if text in MACHINES:
        return MACHINES[text]
    path = Path(text)
    if not path.is_file():
        raise PlanError(
            f"machine {text!r:.80} was asked for. Choose one of {', '.join(MACHINES)}, or give a file that `longspan"
            f" calibrate` wrote.{missing(text)}"
        )
    with path.open("rb") as file:
        data = file.read(MAX_TEXT + 1)
    try:
        return parse_machine(data.decode())
    except UnicodeDecodeError as wrong:
        raise PlanError(f"{path} is not text. A machine file is JSON as `longspan calibrate` writes it.") from wrong
    except PlanError as wrong:
        raise PlanError(f"{path}: {wrong}") from wrong


def _lengths(args: argparse.Namespace) -> tuple[str, Ints]:
    """How the documents were described, and their lengths."""
    docs, seq_len = str(args.docs), args.seq
    if docs in ("causal", "full", *KINDS):
        if seq_len is None:
            raise MaskError(f"--docs {docs} needs a length: say --seq, such as --seq 1M.")
        if docs in KINDS:
            return f"{docs}, seed {args.seed}", drawn_lengths(docs, seq_len, args.seed)
        return docs, np.array([seq_len], dtype=np.int64)
    if docs[:1].isdecimal() and not Path(docs).is_file():
        try:
            lengths = np.array(counts(docs), dtype=np.int64)
        except argparse.ArgumentTypeError as wrong:
            raise MaskError(f"--docs {docs!r:.60}: {wrong}") from wrong
        docs = "as given"
    elif Path(docs).is_file():
        lengths, docs = read_lengths(Path(docs)), Path(docs).name
    else:
        raise MaskError(
            f"--docs {docs!r:.80} was given. Say causal, full, {', '.join(KINDS)}, lengths such as 700,1200,148, or"
            f" name a file of lengths.{missing(docs)}"
        )
    if seq_len is not None and int(lengths.sum()) != seq_len:
        raise MaskError(
            f"--docs lists {len(lengths)} documents of {int(lengths.sum())} tokens together, but --seq is {seq_len}."
            f" Leave --seq out, or make them agree."
        )
    return docs, lengths


def _mask(docs: str, lengths: Ints, window: int | None) -> Mask:
    if docs == "full":
        if window is not None:
            raise MaskError("--window goes with causal documents, but --docs full was given. Say --docs causal.")
        return masks.full(int(lengths.sum()))
    seq_len = int(lengths.sum())
    mask = masks.causal(seq_len) if len(lengths) == 1 else masks.documents(lengths) & masks.causal()
    return mask if window is None else mask & masks.sliding_window(window)
