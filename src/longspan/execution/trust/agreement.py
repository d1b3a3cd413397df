"""Agreement before data: what must be the same on every rank is compared once per new call.

A record is a row of texts of fixed width; every rank sees all rows, so every rank refuses, and names the same fields.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from longspan.errors import AgreementError

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


def compare(rows: Sequence[bytes]) -> None:
    """Refuses when rows, by rank, are not all the same; every rank says the same."""
    if len(set(rows)) == 1:
        return
    names = [field.name for field in fields(Record)]
    texts = {
        name: [_text(row[number * WIDTH : (number + 1) * WIDTH]) for row in rows] for number, name in enumerate(names)
    }
    words = _SCAN_WORDS if all(text.startswith(SCAN) for text in texts["scheme"]) else {}
    differ = [name for name in names if len(set(texts[name])) > 1 and name != "plan"]
    parts = [f"{words.get(name, name)}: {_by_rank(texts[name])}" for name in differ]
    if not parts:
        parts.append(f"plan: {_by_rank([text[:12] for text in texts['plan']])}")
    raise AgreementError(
        f"the {len(rows)} ranks of the group were not asked for the same computation, and no data was sent."
        f" {'; '.join(parts)}. Every rank must pass the same {words.get('mask', 'mask')}, layout, shapes and options:"
        f" derive them from one batch (longspan.training.check_same tells whether it is one), and run one version"
        f" everywhere."
    )


SCAN = "scan by "
"""What the schemes of recurrences begin with."""
_SCAN_WORDS = {"mask": "documents", "shapes": "states", "scores": "recurrence"}
"""What the fields of a record are called in a recurrence."""


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
