"""Format counts, bytes, seconds and rates for people: 1,048,576 tokens, 1.70 GiB, 13.6 ms, 25.0 us."""

from __future__ import annotations

from collections.abc import Sequence

Units = Sequence[tuple[str, float]]
BYTE_UNITS = (("B", 1.0), ("KiB", 2.0**10), ("MiB", 2.0**20), ("GiB", 2.0**30), ("TiB", 2.0**40))
SECOND_UNITS = (("us", 1e-6), ("ms", 1e-3), ("s", 1.0))


def count_text(value: int) -> str:
    """Format an integer with thousands separators.

    >>> count_text(1048576)
    '1,048,576'
    """
    return f"{value:,}"


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun, whose plural ends in s.

    >>> format_count(1, "rank"), format_count(1024, "rank"), format_count(0, "tile")
    ('1 rank', '1,024 ranks', '0 tiles')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def bytes_text(value: float) -> str:
    """Format bytes in binary units with three digits.

    >>> bytes_text(16911433728), bytes_text(0), bytes_text(1536)
    ('15.8 GiB', '0 B', '1.50 KiB')
    """
    return _format_in_one_unit([value], BYTE_UNITS)[0]


def bytes_in_one_unit(values: Sequence[float]) -> list[str]:
    """Format bytes for one column: all in one unit, small enough for the smallest value.

    >>> bytes_in_one_unit([710934528, 16911433728])
    ['0.66 GiB', '15.8 GiB']
    """
    return _format_in_one_unit(values, BYTE_UNITS)


def seconds_text(value: float) -> str:
    """Format a time in a fitting unit with three digits.

    >>> seconds_text(0.0136), seconds_text(2.5e-5), seconds_text(75.2)
    ('13.6 ms', '25.0 us', '75.2 s')
    """
    return _format_in_one_unit([value], SECOND_UNITS)[0]


def seconds_in_one_unit(values: Sequence[float]) -> list[str]:
    """Format times for one column: all in one unit, small enough for the smallest value.

    >>> seconds_in_one_unit([0.000699, 0.0171])
    ['0.70 ms', '17.1 ms']
    """
    return _format_in_one_unit(values, SECOND_UNITS)


def _format_in_one_unit(values: Sequence[float], units: Units) -> list[str]:
    least = min((value for value in values if value > 0), default=0.0)
    # A single value stays below 1,000 units; of several, the smallest is at least a tenth of the unit.
    share = 0.1 if len(values) > 1 else 0.9995
    name, unit = next((pair for pair in reversed(units) if least >= share * pair[1]), units[0])
    texts: list[str] = []
    for value in values:
        number = "0" if value == 0 else f"{value:,.0f}" if name == "B" else three_digits(value / unit)
        texts.append(f"{number} {name}")
    return texts


def rate_text(value: float, unit: str) -> str:
    """Format a rate in decimal units, as data sheets do.

    >>> rate_text(3.93e11, "B/s"), rate_text(989e12, "FLOP/s")
    ('393 GB/s', '989 TFLOP/s')
    """
    step = 0
    while value >= 999.5 and step < 5:
        value, step = value / 1000, step + 1
    return f"{three_digits(value)} {('', 'k', 'M', 'G', 'T', 'P')[step]}{unit}"


def unit_of(most: float, units: Units) -> tuple[str, float]:
    """Return the largest unit not above `most`, or else the smallest unit."""
    return next((unit for unit in reversed(units) if most >= unit[1]), units[0])


def three_digits(value: float) -> str:
    """Format a number with three significant digits, without an exponent.

    >>> three_digits(1234.5), three_digits(12.345), three_digits(0.5)
    ('1,234', '12.3', '0.50')
    """
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
