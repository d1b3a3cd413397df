"""Agreement between ranks: a record of every new call, compared before data moves.

A record is a row of fixed-width strings that must be equal on every rank. It is compared once per new call. Every rank
sees all rows, so every rank raises the same error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from longspan import _torch
from longspan.errors import AgreementError

# -- Gathering rows ----------------------------------------------------------------------------------------------------


def gather_by_messages(row: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return every rank's row, over a group that sends from CPUs."""
    mine = torch.frombuffer(bytearray(row), dtype=torch.uint8)
    rows = torch.empty(group.size(), len(row), dtype=torch.uint8, device="cpu")
    dist.all_gather(list(rows), mine, group=group)
    return [each.tobytes() for each in rows.numpy()]


class RowStore:
    """Compares rows through PyTorch's store, for groups that cannot send from CPUs: no host waits for its accelerator.

    Three ranks, the last with another row:

        rank 0   claims the comparison: its row is the reference; it arrives first, and waits
        rank 1   reads the row of rank 0, which equals its own; it arrives second, and waits
        rank 2   reads a row that differs from its own, writes its own next to it, arrives last and ends the wait

    A rank that arrives at the next comparison has read all of this one, so the last rank to arrive there deletes it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.number = group.rank(), group.size(), 0
        ranks = ",".join(map(str, dist.get_process_group_ranks(group)))
        name = hashlib.sha256(f"{group.group_name} {ranks}".encode()).hexdigest()[:16]
        store: Any = dist.PrefixStore(f"longspan/{name}", _torch.default_store())  # type: ignore[attr-defined]
        times = store.add(f"created/{self.rank}", 1)  # a group may be destroyed and created again
        self.store: Any = dist.PrefixStore(str(times), store)  # type: ignore[attr-defined]

    def gather(self, row: bytes) -> list[bytes]:
        """Return every rank's row if they differ, else this rank's alone."""
        store, self.number = self.store, self.number + 1
        name, before = f"{self.number}", f"{self.number - 1}"
        first = store.compare_set(f"{name}/row", "", row.hex()).decode()  # a text: bytes cannot be compared
        if first != row.hex():
            store.set(f"{name}/row/{self.rank}", row.hex())
            store.add(f"{name}/others", 1)
        if store.add(f"{name}/arrived", 1) == self.size:
            store.set(f"{name}/end", str(store.add(f"{name}/others", 0)))
            for key in ("row", "others", "arrived", "end") if self.number > 1 else ():
                store.delete_key(f"{before}/{key}")
        if store.get(f"{name}/end") == b"0":  # waits
            return [row]
        keys = [f"{name}/row/{rank}" for rank in range(self.size)]
        return [bytes.fromhex(store.get(key).decode() if store.check([key]) else first) for key in keys]


# -- Records -----------------------------------------------------------------------------------------------------------


WIDTH = 48
"""Bytes of a field; a longer text ends with its digest."""


@dataclass(frozen=True)
class Record:
    """Properties of a call that must be equal on all ranks of a group."""

    longspan: str
    torch: str
    plan: str
    mask: str
    layout: str
    shapes: str
    dtype: str
    device: str
    kernel: str
    scheme: str
    scale: str
    scores: str
    sinks: str
    gradients: str
    name: str

    def row(self) -> bytes:
        return b"".join(_to_fixed_size(getattr(self, f.name)) for f in fields(self))

    @cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(self.row()).digest()


RECORD_SIZE = WIDTH * len(fields(Record))


def compare(rows: Sequence[bytes]) -> None:
    """Raise if the ranks' rows are not all equal, and name the fields that differ."""
    if len(set(rows)) == 1:
        return
    names = [field.name for field in fields(Record)]
    texts = {
        name: [_text(row[number * WIDTH : (number + 1) * WIDTH]) for row in rows] for number, name in enumerate(names)
    }
    words = _SCAN_WORDS if all(text.startswith(SCAN) for text in texts["scheme"]) else {}
    differ = [name for name in names if len(set(texts[name])) > 1 and name != "plan"]
    parts = [f"{words.get(name, name)}: {_by_rank(texts[name])}" for name in differ]
    if differ == ["kernel"]:
        raise AgreementError(
            f"The {len(rows)} ranks of the group chose different kernels, and no data was sent. {parts[0]}. Pass the"
            f" same `kernel` on every rank, one that all have, or install the same packages on the same kind of GPU."
        )
    if not parts:
        parts.append(f"plan: {_by_rank([text[:12] for text in texts['plan']])}")
    raise AgreementError(
        f"The {len(rows)} ranks of the group called different computations, and no data was sent."
        f" {'; '.join(parts)}. Every rank must pass the same {words.get('mask', 'mask')}, layout, shapes and options:"
        f" derive them from one batch (check with longspan.training.check_same), and run one version everywhere."
    )


SCAN = "scan by "
"""Prefix of the schemes of recurrences."""
_SCAN_WORDS = {"mask": "documents", "shapes": "states", "scores": "recurrence"}
"""Names of a record's fields for a recurrence."""


def _by_rank(texts: Sequence[str]) -> str:
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    groups = sorted(ranks.items(), key=lambda item: -len(item[1]))
    parts: list[str] = []
    for text, numbers in groups:
        shown = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
        parts.append(f"{text} on rank{'s' if len(numbers) > 1 else ''} {shown}")
    return ", ".join(parts)


def _to_fixed_size(text: str) -> bytes:
    raw = text.encode()
    if len(raw) > WIDTH:
        digest = hashlib.sha256(raw).hexdigest()[:10].encode()
        raw = raw[: WIDTH - 11] + b"~" + digest
    return raw.ljust(WIDTH, b"\0")


def _text(raw: bytes) -> str:
    """Decode a received field and make it printable."""
    text = raw.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "?" for c in text)
