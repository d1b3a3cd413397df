"""Colours that colour-blind readers can tell apart, and roles that change with a light or a dark page."""

from __future__ import annotations

ROLES = {
    "ink": ("#1f2328", "#e6e8eb"),
    "muted": ("#59636e", "#9aa4af"),
    "grid": ("#d5dae0", "#3a424b"),
    "lane": ("#eff1f3", "#232930"),
    "paper": ("#ffffff", "#15191e"),
}
"""Light and dark value of every colour that is not data."""

FORWARD, BACKWARD = "#0072b2", "#cc79a7"
NEAR, FAR = "#009e73", "#d55e00"
MIXED = "#8a9099"
HEAT = "#1b85c9"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8500", "#7b4fa3")
"""Okabe and Ito's colours, less black and yellow, which vanish on one of the two papers."""

_RAMP = ("#6b4fb3", "#4f6cc0", "#3786b9", "#2a9a9d", "#35ad7b", "#66bd55", "#a3c93c")
"""From dark to light without a turn, so that it can be read without colours, and between the two papers."""


def light(color: str) -> str:
    """The colour on a light page; data colours are the same on both."""
    return ROLES[color][0] if color in ROLES else color


def ramp(share: float) -> str:
    """A colour of the ordered scale, 0 to 1.

    >>> ramp(0.0), ramp(1.0)
    ('#6b4fb3', '#a3c93c')
    """
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    a, b = (_channels(color) for color in _RAMP[low : low + 2])
    mixed = (round(x + (y - x) * (at - low)) for x, y in zip(a, b, strict=True))
    return "#" + "".join(f"{value:02x}" for value in mixed)


def _channels(color: str) -> tuple[int, int, int]:
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


def rank_color(rank: int, world_size: int) -> str:
    """A colour of its own for each of a few ranks; a place on an ordered scale for each of many.

    >>> rank_color(0, 4) != rank_color(3, 4)
    True
    """
    return SERIES[rank] if world_size <= len(SERIES) else ramp(rank / (world_size - 1))
