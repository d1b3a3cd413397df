"""Which layout cut a tensor. One that came straight from `Layout.shard` is known, by identity, as long as it lives: a
plan over another layout of the same sequence may have as many slots for it, and other tokens in mind.

Nothing is written on the tensor, so that it is saved, pickled and compiled as any other; what is computed from it is
another tensor, of which nothing is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import ref


@dataclass(frozen=True, slots=True)
class Carried:
    """How a tensor was cut: by whose spans, along which dim."""

    layout: Any
    dim: int
    version: int
    """How often the tensor had been written to when it was entered; what was written since may be other tokens."""


_known: dict[int, tuple[ref[Any], Carried]] = {}


def remember(x: Any, layout: Any, dim: int, version: int = 0) -> None:
    """Enters a tensor that was just made; it leaves when it goes.

    >>> class Tensor: pass
    >>> x = Tensor()
    >>> remember(x, zigzag(8, 2), 0)
    >>> carried(x).layout
    <layout zigzag, 8 tokens on 2 ranks>
    >>> carried(Tensor()) is None
    True
    """
    key = id(x)
    _known[key] = ref(x, lambda _: _known.pop(key, None)), Carried(layout, dim, version)


def carried(x: Any) -> Carried | None:
    """How a tensor was cut, or None: of all others nothing is known."""
    found = _known.get(id(x))
    return found[1] if found is not None and found[0]() is x else None


def other_tokens(one: Any, other: Any) -> bool:
    """Whether two layouts of one sequence on as many ranks put some token in different slots. Layouts of other
    sequences, or for other numbers of ranks, are not compared: a shard may be a sequence of its own.

    >>> other_tokens(zigzag(8, 2), contiguous(8, 2)), other_tokens(zigzag(8, 2), zigzag(8, 2))
    (True, False)
    >>> other_tokens(zigzag(8, 2), contiguous(9, 3))
    False
    """
    if one is other or (one.seq_len, one.world_size) != (other.seq_len, other.world_size):
        return False
    return one.table.shape != other.table.shape or bool((one.table != other.table).any())
