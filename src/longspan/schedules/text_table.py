"""A schedule as a table, ranks down and steps across."""

from __future__ import annotations

from longspan.schedules.steps import Schedule, Step

_NEAR = 4


def table(schedule: Schedule, mark: tuple[int, int] | None = None) -> str:
    """One cell per rank and step: peers sent to (>), peers received from (<), computes (*); the mark stands in !! !!.

    Large schedules are cut to the neighbourhood of the mark.
    """
    rows, columns = range(schedule.world_size), range(schedule.num_steps)
    if mark is not None:
        rows = [r for r in rows if len(rows) <= 2 * _NEAR + 1 or abs(r - mark[0]) <= _NEAR]
        columns = [c for c in columns if len(columns) <= 2 * _NEAR + 1 or abs(c - mark[1]) <= _NEAR]
    lines = [["rank", *(f"step {c}" for c in columns)]]
    for rank in rows:
        line = [str(rank)]
        for c in columns:
            text = _cell(schedule.ranks[rank][c], rank) if c < len(schedule.ranks[rank]) else ""
            line.append(f"!! {text} !!" if (rank, c) == mark else text)
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = "\n".join("  ".join(word.ljust(w) for word, w in zip(line, widths, strict=True)).rstrip() for line in lines)
    left_out = schedule.world_size - len(rows), schedule.num_steps - len(columns)
    return text + (f"\n({left_out[0]} ranks and {left_out[1]} steps left out)" if any(left_out) else "")


def _cell(step: Step, rank: int) -> str:
    sent = sorted({t.dst for t in step.transfers if t.src == rank})
    received = sorted({t.src for t in step.transfers if t.dst == rank})
    words = [_peers(">", sent), _peers("<", received), f"*{len(step.computes)}" if step.computes else ""]
    return " ".join(word for word in words if word) or "."


def _peers(sign: str, peers: list[int]) -> str:
    return sign + ",".join(map(str, peers)) if 0 < len(peers) <= 4 else f"{sign}({len(peers)})" if peers else ""
