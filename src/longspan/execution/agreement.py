"""Agreement before data: what every rank must have been asked for alike is compared once per new call.

A record is a row of texts of fixed width; every rank sees all rows, so every rank refuses, and names the same fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from longspan.errors import AgreementError
from longspan.execution.safety import Safety
from longspan.execution.scores import Scoring
from longspan.schedules.plan import Plan
from longspan.version import VERSION

if TYPE_CHECKING:
    from longspan.execution.runner import Job

WIDTH = 48
"""Bytes of a field; a longer text ends in its digest."""


@dataclass(frozen=True)
class Record:
    """What must be the same on all ranks of a group."""

    longspan: str
    torch: str
    plan: str
    mask: str
    layout: str
    shapes: str
    dtype: str
    device: str
    scheme: str
    scale: str
    scores: str
    sinks: str
    gradients: str
    checked: str
    name: str

    def row(self) -> bytes:
        return b"".join(_fixed(getattr(self, f.name)) for f in fields(self))

    @cached_property
    def digest(self) -> bytes:
        """What to remember of it."""
        return hashlib.sha256(self.row()).digest()


SIZE = WIDTH * len(fields(Record))


MAX_OF_ONE = 64
_records: WeakKeyDictionary[Plan, dict[tuple[str, ...], Record]] = WeakKeyDictionary()
"""Those of a plan, by what may differ between its calls: a plan is called many times, and its parts are long."""


def record_of(job: Job, device: torch.device, sums: bool | None, name: str, safety: Safety) -> Record:
    """What this rank was asked for; `sums` is None where no gradients are wanted."""
    rest = (
        job.plan.fingerprint[: WIDTH - 1],
        device.type,
        _scheme(job.plan),
        repr(job.scale),
        _scores(job.scoring),
        "none" if job.sinks is None else f"{tuple(job.sinks.shape)}",
        "not wanted" if sums is None else "sum" if sums else "share",
        str(safety.checked),
        repr(name) if name else "none",
    )
    known = _records.setdefault(job.plan, {})
    if rest not in known:
        while len(known) >= MAX_OF_ONE:
            del known[next(iter(known))]
        known[rest] = _made(job.plan, *rest)
    return known[rest]


def _made(plan: Plan, fingerprint: str, *rest: str) -> Record:
    parts = plan.mask.fingerprint[:16], plan.layout.fingerprint[:16], plan.sizes.text(), plan.dtype
    return Record(VERSION, str(torch.__version__), fingerprint, *parts, *rest)


def _scheme(plan: Plan) -> str:
    name = plan.scheme.name + (", keep" if plan.keep else "")
    return name if plan.chunks is None else f"{name}, chunks = {plan.chunks}, threads = {torch.get_num_threads()}"


def _scores(scoring: Scoring | None) -> str:
    if scoring is None:
        return "none"
    captured = [tuple(t.shape) for t in scoring.captured]
    return f"{len(scoring.functions)} of them, captured {captured}, {scoring.dropout}"


def compare(rows: Sequence[bytes]) -> None:
    """Refuses when rows, by rank, are not all the same; every rank says the same."""
    if len(set(rows)) == 1:
        return
    parts: list[str] = []
    for number, field in enumerate(fields(Record)):
        texts = [_text(row[number * WIDTH : (number + 1) * WIDTH]) for row in rows]
        if len(set(texts)) > 1 and field.name != "plan":
            parts.append(f"{field.name}: {_by_rank(texts)}")
    if not parts:
        parts.append(f"plan: {_by_rank([_text(row[2 * WIDTH : 3 * WIDTH])[:12] for row in rows])}")
    raise AgreementError(
        f"the {len(rows)} ranks of the group were not asked for the same attention, and no data was sent."
        f" {'; '.join(parts)}. Every rank must pass the same mask, layout, shapes and options: derive them from one"
        f" batch (longspan.training.check_same tells whether it is one), and run one version everywhere."
    )


def _by_rank(texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    groups = sorted(ranks.items(), key=lambda item: -len(item[1]))
    return ", ".join(f"{text} on rank{'s' if len(who) > 1 else ''} {_few(who)}" for text, who in groups)


def _few(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return shown if len(ranks) <= 8 else f"{shown} and {len(ranks) - 8} more"


def _fixed(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > WIDTH:
        digest = hashlib.sha256(raw).hexdigest()[:10].encode()
        raw = raw[: WIDTH - 11] + b"~" + digest
    return raw.ljust(WIDTH, b"\0")


def _text(raw: bytes) -> str:
    """What came over the wire, made safe to print."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)
