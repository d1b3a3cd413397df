"""Numbers and names as people write them on the command line, 64k or ring,exchange, and how one figure compares with
another."""

from __future__ import annotations

import argparse
import re

_COUNT = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LARGEST = 1 << 40


def count(text: str) -> int:
    """A whole number; k, M and G stand for 1,024, 1,024 x 1,024 and so on, as lengths of sequences are named.

    >>> count("1M"), count("1.5k"), count("1_000")
    (1048576, 1536, 1000)
    """
    match = _COUNT.fullmatch(text.replace("_", "").replace(",", ""))
    if not match:
        raise argparse.ArgumentTypeError(f"a number such as 65536, 64k or 1M is expected, but {text!r:.40} was given.")
    whole, part, letter = match[1], match[2] or "", _FACTOR[match[3].lower()]
    scaled, left = divmod(int(whole + part) * letter, 10 ** len(part))
    if left or not 0 < scaled <= LARGEST:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a whole number from 1 to {LARGEST}.")
    return scaled


def counts(text: str) -> tuple[int, ...]:
    """Several numbers, separated by commas.

    >>> counts("8,16,1k")
    (8, 16, 1024)
    """
    return tuple(count(part) for part in text.split(","))


def schemes(text: str) -> tuple[str, ...]:
    """Names of schemes, separated by commas or semicolons; those inside parentheses separate nothing.

    >>> schemes("ring, hybrid(4,exchange); exchange")
    ('ring', 'hybrid(4,exchange)', 'exchange')
    """
    names, depth = [""], 0
    for letter in text.replace(" ", ""):
        depth += (letter == "(") - (letter == ")")
        if letter in ",;" and not depth:
            names.append("")
        else:
            names[-1] += letter
    if "" in names or depth:
        raise argparse.ArgumentTypeError(
            f"names such as ring,hybrid(4,exchange) are expected, but {text!r:.60} was given."
        )
    return tuple(names)


def times(value: float) -> str:
    """A factor.

    >>> times(15.18), times(0.5), times(1234.0)
    ('15.2x', '0.50x', '1,234x')
    """
    return f"{value:,.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_against(mine: float, other: float, name: str) -> str:
    """The bytes that one moves, compared with another of that name.

    >>> bytes_against(10, 139, "ring"), bytes_against(18, 10, "ring"), bytes_against(0, 10, "ring")
    ('13.9x fewer bytes than ring', '1.80x the bytes of ring', 'no bytes at all')
    >>> bytes_against(1000, 1001, "ring")
    'as many bytes as ring'
    """
    if not mine:
        return "no bytes at all"
    if _about(mine, other):
        return f"as many bytes as {name}"
    return f"{times(other / mine)} fewer bytes than {name}" if other > mine else _more(mine, other, f"bytes of {name}")


def memory_against(mine: float, other: float) -> str:
    """The memory that one takes, compared with another; empty if it is about the same.

    >>> memory_against(10, 25), memory_against(25, 10), memory_against(0, 10), memory_against(100, 101)
    ('2.5x less memory', '2.5x the memory', 'no memory', '')
    """
    if _about(mine, other):
        return ""
    if not mine:
        return "no memory"
    return f"{times(other / mine)} less memory" if other > mine else _more(mine, other, "memory")


def _about(mine: float, other: float) -> bool:
    """Whether the factor between them would be printed as 1.00x or 1.01x."""
    return abs(mine - other) <= 0.015 * max(mine, other)


def _more(mine: float, other: float, noun: str) -> str:
    return f"{times(mine / other)} the {noun}" if other else f"more {noun}"


def many(number: int, noun: str) -> str:
    """A number and its noun, in the plural where it needs one.

    >>> many(1, "rank"), many(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
