"""Terms: gradients of keys, apart by the chunk of queries they come from, and added along one tree of chunks.

The tree is that of the chunks' numbers: a branch holds 2**n chunks from a multiple of 2**n on, and its sum is that of
its two halves; chunks that add nothing are skipped. Addition does not ask which of two numbers comes first, so sums are
the same bit for bit whichever ranks hold the branches (`longspan.schedules.chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from longspan.execution.engine.merge import Key, Sum
from longspan.execution.engine.token_store import TokenStore
from longspan.span import Span

Branch = list[tuple[int, Sum]]
"""Sums of parts of a branch that is not complete, and the number of a chunk in each, ascending."""


class Terms:
    """What a rank found, or was sent, for keys of whole branches of queries."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._found: dict[tuple[Key, Span, int], tuple[TokenStore, Branch]] = {}

    def add(self, branch: Span, first_query: int, first_key: int, kv: TokenStore, sums: Sum) -> None:
        """Takes up what a chunk of queries gives a chunk of keys, chunks of one branch ascending, or what another rank
        has added up of a whole branch."""
        key = ((kv.heads, kv.batch), branch, first_key // self._length)
        _, parts = self._found.setdefault(key, (replace(kv, tensors=()), []))
        push(parts, first_query // self._length, sums)

    def take(self, branch: Span, wanted: TokenStore) -> Iterator[tuple[TokenStore, Sum]]:
        """What the rank found for these keys from queries of a branch, which it has no more use for."""
        runs = (wanted.runs[:, :2] + (0, self._length - 1)) // self._length
        numbers = {number for start, stop in runs.tolist() for number in range(start, stop)}
        for key in [key for key in self._found if key[:2] == ((wanted.heads, wanted.batch), branch)]:
            if key[2] in numbers:
                rows, parts = self._found.pop(key)
                yield rows, total(parts)

    def rest(self) -> Iterator[tuple[Key, list[tuple[int, list[tuple[TokenStore, Sum]]]]]]:
        """All that is left, by heads and batch rows: for each branch, ascending, what was found for it."""
        found: dict[Key, dict[int, list[tuple[TokenStore, Sum]]]] = {}
        for (key, branch, _), (rows, parts) in self._found.items():
            number = branch.start // self._length
            found.setdefault(key, {}).setdefault(number, []).append((rows, total(parts)))
        for key, branches in found.items():
            yield key, sorted(branches.items(), key=lambda item: item[0])


def push(parts: Branch, number: int, sums: Sum) -> None:
    """Adds what a chunk, or a branch, gives to sums of lower ones; branches that are complete by then become one.

    >>> import torch
    >>> from longspan.execution.engine.flat.recorder import Recorder
    >>> recorder, parts = Recorder(), []
    >>> terms = [recorder.new((1, 1, 1, 1), torch.float32) for _ in range(5)]
    >>> for number in (0, 1, 2, 4):
    ...     sums = Sum((terms[number],), torch.float32)
    ...     sums.add(0, 1, terms[number])
    ...     push(parts, number, sums)
    >>> [number for number, _ in parts]
    [0, 4]
    >>> for note in recorder.log:  # (0 + 1) + 2 in a new buffer
    ...     print(note)
    copy b5[0:1 0:1 0:1] b0[0:1 0:1 0:1]
    add b5[0:1 0:1 0:1] b1[0:1 0:1 0:1]
    add b5[0:1 0:1 0:1] b2[0:1 0:1 0:1]
    """
    if parts and parts[-1][0] == number:  # query heads of another mask
        return parts[-1][1].plus(sums)
    while len(parts) > 1 and height(parts[-2][0], parts[-1][0]) < height(parts[-1][0], number):
        _join(parts)
    return parts.append((number, sums))


def height(a: int, b: int) -> int:
    """The levels of the smallest branch that has both chunks."""
    return (a ^ b).bit_length()


def total(parts: Branch) -> Sum:
    """The sum of all parts, of which no more will come."""
    while len(parts) > 1:
        _join(parts)
    return parts[0][1]


def _join(parts: Branch) -> None:
    _, last = parts.pop()
    parts[-1][1].plus(last)
