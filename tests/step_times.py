"""What a step's messages cost, counted one by one: `rank_seconds` counts all steps at once and must agree."""

from collections import Counter


def move_seconds(step, rank, sizes, machine):
    """How long the step's transfers keep the rank's busiest link; both directions of a link run at once."""
    busy = Counter()
    for t in step.transfers:
        busy[machine.level(t.src, t.dst), t.dst == rank] += t.piece.num_bytes(sizes)
    links = {key: machine.links[key[0]] for key in busy}
    return max((links[key].latency + size / links[key].bandwidth for key, size in busy.items() if size), default=0.0)
