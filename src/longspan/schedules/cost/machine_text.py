"""Machines as text: JSON that `longspan calibrate` writes and `--machine FILE` reads; what is read is checked."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from typing import Any, TypeVar, cast

from longspan.errors import PlanError
from longspan.schedules.cost.machine import Link, Machine, Tiling

FORMAT = "longspan machine 1"
MAX_TEXT = 1 << 16
MAX_LINKS = 8
MAX_RANKS = 1 << 30
_MAY_BE_ZERO = (
    "slot_seconds", "op_seconds", "latency", "far_rows", "launch_seconds", "message_seconds", "call_seconds",
    "matmul_share", "host_bandwidth",
)  # fmt: skip

T = TypeVar("T", Link, Tiling, Machine)


def machine_text(machine: Machine) -> str:
    """The machine as JSON that `parse_machine` reads back.

    >>> from longspan.schedules.cost.presets import CPU
    >>> parse_machine(machine_text(CPU)) == CPU
    True
    """
    return json.dumps({"format": FORMAT, **asdict(machine)}, indent=2) + "\n"


def parse_machine(text: str) -> Machine:
    """The machine that `machine_text` wrote."""
    if len(text) > MAX_TEXT:
        raise PlanError(f"a machine file has at most {MAX_TEXT} characters, but this one has {len(text)}.")
    try:
        value: Any = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as wrong:
        raise PlanError(f"a machine file is JSON as `longspan calibrate` writes it: {wrong!s:.100}.") from wrong
    if not isinstance(value, dict) or cast(dict[str, Any], value).get("format") != FORMAT:
        raise PlanError(f'a machine file is a JSON object with "format": "{FORMAT}", which was not found.')
    entries = cast(dict[str, Any], value)
    del entries["format"]
    return _parsed(Machine, entries, "machine")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a measured number")


def _parsed(kind: type[T], given: Any, where: str) -> T:
    """An object of dataclass `kind` from JSON: exactly its fields, each of its type and in its range."""
    wanted = {field.name: str(field.type) for field in fields(kind)}
    if not isinstance(given, dict):
        raise PlanError(f"{where} is an object with {', '.join(wanted)}, but {given!r:.60} was found.")
    entries = cast(dict[str, Any], given)
    optional = {field.name for field in fields(kind) if field.default is not MISSING}  # came after the first files
    for name in sorted((entries.keys() ^ wanted.keys()) - (optional - entries.keys())):
        raise PlanError(f"{where}: {name!r:.40} {'is missing' if name in wanted else 'is not known'}.")
    return kind(**{name: _value(wanted[name], value, f"{where}.{name}") for name, value in entries.items()})


def _value(declared: str, value: Any, where: str) -> Any:
    if declared == "Tiling":
        return _parsed(Tiling, value, where)
    if declared.startswith("tuple"):
        if not isinstance(value, list) or not 0 < len(cast(list[Any], value)) <= MAX_LINKS:
            raise PlanError(f"{where} is a list of 1 to {MAX_LINKS} links, but {value!r:.60} was found.")
        return tuple(_parsed(Link, link, f"{where}[{i}]") for i, link in enumerate(cast(list[Any], value)))
    if declared == "bool" and isinstance(value, bool):
        return value
    if declared == "str" and isinstance(value, str) and len(value) <= 1000 and value.isprintable():
        return value
    may_be_zero = where.rpartition(".")[2] in _MAY_BE_ZERO
    if declared == "int" and type(value) is int and (0 if may_be_zero else 1) <= value <= MAX_RANKS:
        return value
    least = 0.0 if may_be_zero else 1e-12
    if declared == "float" and type(value) in (int, float) and least <= cast(float, value) <= 1e18:
        return float(value)
    what = {"bool": "true or false", "str": "a printable text", "int": "a whole number", "float": "a positive number"}
    raise PlanError(f"{where} is {what[declared]}, but {value!r:.60} was found.")
