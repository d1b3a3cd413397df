"""Numbers as people write and read them: 1M tokens, 1.7 GiB, 13.6 ms."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

_COUNT = re.compile(r"(\d{1,15})(?:\.(\d{1,6}))?([kKmMgG]?)")
_FACTOR = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
LARGEST = 1 << 40


def count(text: str) -> int:
    """A whole number; k, M and G stand for 1,024, 1,024 x 1,024 and so on, as lengths of sequences are named.

    >>> count("1M"), count("1.5k"), count("1_000")
    (1048576, 1536, 1000)
    """
    found = _COUNT.fullmatch(text.replace("_", "").replace(",", ""))
    if not found:
        raise argparse.ArgumentTypeError(f"a number such as 65536, 64k or 1M is expected, but {text!r:.40} was given.")
    whole, part, letter = found[1], found[2] or "", _FACTOR[found[3].lower()]
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


def num_bytes(value: float) -> str:
    """Bytes in binary units, three digits.

    >>> num_bytes(16911433728), num_bytes(0), num_bytes(1536)
    ('15.8 GiB', '0 B', '1.50 KiB')
    """
    return bytes_alike([value])[0]


def bytes_alike(values: Sequence[float]) -> list[str]:
    """Bytes for one column: all in one unit, in which the least is not lost.

    >>> bytes_alike([710934528, 16911433728])
    ['0.66 GiB', '15.8 GiB']
    """
    return _alike(values, [("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40)])


def seconds(value: float) -> str:
    """A time in the unit that suits it, three digits.

    >>> seconds(0.0136), seconds(2.5e-5), seconds(75.2)
    ('13.6 ms', '25.0 us', '75.2 s')
    """
    return seconds_alike([value])[0]


def seconds_alike(values: Sequence[float]) -> list[str]:
    """Times for one column: all in one unit, in which the least is not lost.

    >>> seconds_alike([0.000699, 0.0171])
    ['0.70 ms', '17.1 ms']
    """
    return _alike(values, [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)])


def _alike(values: Sequence[float], units: list[tuple[str, float]]) -> list[str]:
    least = min((value for value in values if value > 0), default=0.0)
    # One value stays below 1,000 of its unit; of several the least is at least a tenth of it.
    share = 0.1 if len(values) > 1 else 0.9995
    name, unit = next((pair for pair in reversed(units) if least >= share * pair[1]), units[0])
    return [f"{'0' if value == 0 else _three(value / unit) if unit != 1.0 or name == 's' else f'{value:,.0f}'} {name}"
            for value in values]  # fmt: skip


def rate(value: float, unit: str) -> str:
    """Something per second in decimal units, as hardware is sold.

    >>> rate(3.93e11, "B/s"), rate(989e12, "FLOP/s")
    ('393 GB/s', '989 TFLOP/s')
    """
    step = 0
    while value >= 999.5 and step < 5:
        value, step = value / 1000, step + 1
    return f"{_three(value)} {('', 'k', 'M', 'G', 'T', 'P')[step]}{unit}"


def times(value: float) -> str:
    """A factor.

    >>> times(15.18), times(0.5), times(1234.0)
    ('15.2x', '0.50x', '1,234x')
    """
    return f"{value:,.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"


def bytes_against(mine: float, other: float, name: str) -> str:
    """How many bytes one moves, against another of that name.

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
    """How much memory one takes, against another; nothing if it is about the same.

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


def _more(mine: float, other: float, what: str) -> str:
    return f"{times(mine / other)} the {what}" if other else f"more {what}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
