"""The workload that commands plan for: a mask, tensors, a machine and a layout, and the arguments that describe it.

A command calls `add_arguments(parser)` and then `Workload.of(args)`; `workload.plan(ranks)` calls `longspan.plan` with
these arguments.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.output import count, counts, describe_missing, did_you_mean
from longspan.errors import LayoutError, MaskError, PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.machine import MACHINES, Machine, assumed_machine, parse_machine
from longspan.planning.plan import Plan
from longspan.planning.planners import PLANNERS, can_limit, check_limit, scheme_name
from longspan.planning.steps import ITEMSIZE
from longspan.spans import Ints

KINDS = ("longtail", "short", "mixed")
LAYOUTS = ("balanced", "zigzag", "contiguous", "per_document", "round_robin_by_work", "striped")
STRIPE = 128
"""Tokens of a stripe: with the layout's default of one, a plan of 1M tokens would list every token."""
RANKS, MAX_RANKS = 8, 1 << 16
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
    """Read document lengths from a file: .npy, one whole number a line, or a JSON list of them."""
    try:
        if path.suffix == ".npy":
            lengths = np.lib.format.open_memmap(path, mode="r")  # which knows no pickles
        else:
            text = path.read_text()
            numbers = json.loads(text) if text.lstrip().startswith("[") else [int(line) for line in text.split()]
            lengths = np.array(numbers)
    except (ValueError, RecursionError) as error:
        raise MaskError(f"{path} must have one length a line, a JSON list, or be .npy: {error!s:.80}.") from error
    if lengths.ndim != 1 or lengths.dtype.kind not in "iu" or not len(lengths) or int(lengths.min()) < 1:
        raise MaskError(
            f"{path} must be whole numbers, 1 or more, but got {lengths.dtype} of shape {lengths.shape}"
            + (f", the least {lengths.min()}." if lengths.dtype.kind in "iu" and lengths.size else ".")
        )
    return lengths.astype(np.int64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a workload."""
    workload = parser.add_argument_group("workload")
    workload.add_argument("--seq", type=count, metavar="TOKENS", help="tokens of the sequence, such as 1M (1,048,576)")
    workload.add_argument("--ranks", type=count, default=RANKS, help=f"ranks that share the sequence ({RANKS})")
    workload.add_argument(
        "--docs",
        default="causal",
        metavar="DOCS",
        help="causal (one document), full, longtail, short or mixed documents, lengths such as 700,1200,148, or a FILE:"
        " .npy, one length a line, or a JSON list (causal)",
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
    text = f"{', '.join(MACHINES)}, or a file that `longspan doctor --out` wrote (h100)"
    how.add_argument("--machine", metavar="NAME|FILE", help=text)
    how.add_argument("--scheme", default="auto", help="auto, or a name such as exchange, ulysses or 'usp(8)'")
    how.add_argument("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    how.add_argument("--keep", action="store_true", help="keep remote K/V for backward instead of fetching them again")
    how.add_argument("--fetch-bytes", type=count, help="remote K/V that an exchange may hold at once")


def check_scheme(text: str) -> str:
    """Return the name of a scheme, and suggest one if there is none of this kind.

    >>> check_scheme("usp(8)")
    'hybrid(8,ring)'
    >>> check_scheme("ulyses")
    Traceback (most recent call last):
    longspan.errors.PlanError: --scheme must be auto, ring, all_gather, exchange, staged, all_to_all (or ulysses), or a hybrid such as hybrid(8,exchange) (usp(8) is hybrid(8,ring)), but got 'ulyses'. Did you mean ulysses?
    """  # noqa: E501
    name = scheme_name(text)
    known = ("auto", *PLANNERS, "all_to_all", "ulysses")
    if name not in known and not name.startswith("hybrid("):
        raise PlanError(
            f"--scheme must be {', '.join(known[:-1])} (or ulysses), or a hybrid such as hybrid(8,exchange) (usp(8) is"
            f" hybrid(8,ring)), but got {text!r:.40}.{did_you_mean(text, known)}"
        )
    return name


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
        docs, lengths, mask = mask_of(args)
        scheme = check_scheme(args.scheme)
        check_limit(scheme, args.fetch_bytes)
        tensors = {name: getattr(args, name) for name in ("q_heads", "kv_heads", "head_dim", "dtype", "batch")}
        if args.v_head_dim is not None:
            tensors["v_head_dim"] = args.v_head_dim
        machine = assumed_machine(functions=False) if args.machine is None else machine_of(args.machine)
        return Workload(
            mask, int(lengths.sum()), lengths, docs, args.window, tensors, machine, args.machine is not None, args.keep,
            args.fetch_bytes, scheme, args.layout,
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
            f"--machine must be one of {', '.join(MACHINES)}, or a file that `longspan doctor --out` wrote, but got"
            f" {text!r:.80}.{describe_missing(text) or did_you_mean(text, MACHINES)}"
        )
    try:
        return parse_machine(path.read_text())
    except (UnicodeDecodeError, PlanError) as error:
        raise PlanError(f"{path}: {error}") from error


def mask_of(args: argparse.Namespace) -> tuple[str, Ints, Mask]:
    """Return a description of the documents, their lengths, and their mask."""
    docs, lengths = parse_docs(args)
    seq_len = int(lengths.sum())
    if docs == "full":
        if args.window is not None:
            raise MaskError("--window needs causal documents, but got --docs full. Use --docs causal.")
        return docs, lengths, masks.full(seq_len)
    mask = masks.causal(seq_len) if len(lengths) == 1 else masks.documents(lengths) & masks.causal()
    return docs, lengths, mask if args.window is None else mask & masks.sliding_window(args.window)


def parse_docs(args: argparse.Namespace) -> tuple[str, Ints]:
    """Return a description of the documents, and their lengths."""
    docs, seq_len = args.docs, args.seq
    if args.seed is not None and docs not in KINDS:
        raise MaskError(f"--seed needs drawn documents ({', '.join(KINDS)}), but got --docs {docs:.60}. Leave it out.")
    if docs in ("causal", "full", *KINDS):
        if seq_len is None:
            raise MaskError(f"--docs {docs} needs a length: add --seq, such as --seq 1M.")
        if docs in KINDS:
            seed = args.seed or 0
            return f"{docs}, seed {seed}", drawn_lengths(docs, seq_len, seed)
        return docs, np.array([seq_len], dtype=np.int64)
    if os.path.isfile(docs):  # which is False, too, for a list that is too long for a name
        lengths, name = read_lengths(Path(docs)), Path(docs).name
    elif docs[:1].isdecimal():
        try:
            lengths, name = np.array(counts(docs), dtype=np.int64), "as given"
        except argparse.ArgumentTypeError as error:
            raise MaskError(f"--docs {docs!r:.60}: {error}") from error
    else:
        raise MaskError(
            f"--docs must be causal, full, {', '.join(KINDS)}, lengths such as 700,1200,148, or a file of lengths, but"
            f" got {docs!r:.80}.{describe_missing(docs) or did_you_mean(docs, ('causal', 'full', *KINDS))}"
        )
    if seq_len not in (None, int(lengths.sum())):
        raise MaskError(
            f"--seq must be the sum of --docs, which lists {len(lengths)} documents of {lengths.sum()} tokens together,"
            f" but got {seq_len}. Leave --seq out."
        )
    return name, lengths
