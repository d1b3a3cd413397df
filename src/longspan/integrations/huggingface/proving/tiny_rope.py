"""Rotary embeddings of a tiny copy: as many frequencies as its heads have, and lengths at which they change that a test
reaches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SWITCH = 24
"""Where rotary embeddings change that know short and long sequences: beyond a rank's tokens, within a test's."""
SECTIONS = ("mrope_section", "xdrope_section")
FACTORS = ("short_factor", "long_factor")


def axes_of(given: Mapping[str, Any]) -> int:
    """How many axes positions have: 1, or more where sections say so, or 3 where a model of images leaves them out."""
    found = [len(part[name]) for part in rope_parts(given) for name in SECTIONS if part.get(name)]
    known = set(given.get("ignore_keys_at_rope_validation") or ()) & set(SECTIONS)
    return max([*found, 3 if known else 1])


def rope_parts(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings, one set or one for each kind of layers."""
    rope = given.get("rope_parameters")
    if not isinstance(rope, dict):
        return []
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def tiny_rope(given: Any, rotated: int, axes: int = 1) -> Any:
    """The parameters of rotary embeddings that turn `rotated` features of each head.

    >>> tiny_rope({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}, 16)
    {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [2, 3, 3]}
    """
    if not isinstance(given, dict):
        return given
    if any(isinstance(part, dict) for part in given.values()):
        return {name: tiny_rope(part, rotated, axes) for name, part in given.items()}
    share = given.get("partial_rotary_factor") or 1.0
    count = max(int(rotated * share) // 2, 1)
    made = dict(given)
    for name in SECTIONS:
        if isinstance(given.get(name), (list, tuple)):
            made[name] = type(given[name])(split(count, given[name]))
    if axes > 1 and not any(given.get(name) for name in SECTIONS):
        made["mrope_section"] = split(count, [1] * axes)
    for name in FACTORS:
        if isinstance(given.get(name), (list, tuple)):
            made[name] = [given[name][i * len(given[name]) // count] for i in range(count)]
    if given.get("original_max_position_embeddings"):
        made["original_max_position_embeddings"] = SWITCH
    return made


def split(count: int, like: Any) -> list[int]:
    """`count` in parts of about the proportions of `like`, none of them empty.

    >>> split(8, [16, 24, 24]), split(4, [11, 11, 10])
    ([2, 3, 3], [2, 1, 1])
    """
    whole = sum(like)
    parts = [max(1, count * x // whole) for x in like]
    while sum(parts) != count:
        gaps = [count * x / whole - part for x, part in zip(like, parts, strict=True)]
        if sum(parts) < count:
            parts[gaps.index(max(gaps))] += 1
        else:
            largest = max(range(len(parts)), key=lambda i: (parts[i] > 1, -gaps[i]))
            parts[largest] -= 1
    return parts


def moves_by_table(given: Mapping[str, Any]) -> bool:
    """Whether frequencies change where the table of positions ends (`dynamic`)."""
    return any(part.get("rope_type") == "dynamic" for part in rope_parts(given))
