"""Scans on a virtual network: delays and orders from a seed, with the promises of test_simulation.py.

Also whole recurrences, gradients and all, over a network that delays and reorders.
"""

import random
from functools import lru_cache

import pytest
import torch

import longspan as ls
from longspan.mixers.scan_run import ends_of, scan
from longspan.planning.scan_steps import ScanRole
from longspan.run.transports import Loopback
from tests.simulation.network import Network
from tests.simulation.test_simulation import checked, same
from tests.spread_cases import LIMIT, SCHEMES, distances, loopback, one_device, problem, random_documents, random_layout

torch.set_num_threads(1)
# name: (ranks, cases, seeds of each case, tokens)
GROUPS = {"small": ((2, 3, 4), 60, 10, 24), "medium": ((5, 6, 8), 20, 8, 24), "wide": ((16, 32, 64), 6, 6, 64)}
KINDS = ("contiguous", "zigzag", "striped", "scattered", "padded")


class ScanCase:
    """A plan with random maps, states and gradients, and what its ranks return when they take turns."""

    def __init__(self, plan, seed):
        self.plan, self.ranks = plan, range(plan.layout.world_size)
        self.draw = torch.Generator().manual_seed(seed)
        self.inputs = [self._drawn(rank) for rank in self.ranks]
        self.forward = Loopback().run(self.programs("forward"))
        self.gradients = [
            [self._randn(len(piece.batch), *self._state) for piece in ends_of(plan, rank).entered]
            for rank in self.ranks
        ]

    @property
    def _state(self):
        return self.plan.sizes.heads, self.plan.sizes.keys, self.plan.sizes.values

    def _randn(self, *shape):
        return torch.randn(*shape, generator=self.draw)

    def _drawn(self, rank):
        found, sizes = [], self.plan.sizes
        for piece in ends_of(self.plan, rank).left:
            if piece.role is ScanRole.MAP:
                found.append(self._randn(len(piece.batch), sizes.heads, sizes.map_rows, sizes.map_cols))
            found.append(self._randn(len(piece.batch), *self._state))
        return found

    @property
    def backward(self):
        if not hasattr(self, "_backward"):
            self._backward = Loopback().run(self.programs("backward"))
        return self._backward

    def program(self, rank, direction):
        inputs = self.inputs[rank]
        if direction == "backward":
            entered = ends_of(self.plan, rank).entered
            inputs = [*self.gradients[rank], *self.forward[rank][len(entered) :]]
        return scan(self.plan, rank, direction, [x.clone() for x in inputs], torch.empty(0))

    def programs(self, direction):
        return [self.program(rank, direction) for rank in self.ranks]

    def right(self, rank, direction, result):
        return same((self.forward if direction == "forward" else self.backward)[rank], result)


@lru_cache(maxsize=2)
def case_of(group, number):
    worlds, _, _, tokens = GROUPS[group]
    draw = random.Random(f"scan {group} {number}")
    world, batch = draw.choice(worlds), draw.choice((1, 1, 2))
    documents = random_documents(draw, tokens, batch)
    layout = random_layout(draw, draw.choice(KINDS), tokens, world, documents)
    sizes = {"heads": 2, "keys": 2, "values": draw.choice((1, 3)), "maps": draw.choice(("matrix", "scalar", "rows"))}
    plan = ls.scan_plan(documents, layout, batch=batch, scheme=draw.choice(SCHEMES), machine="h100", **sizes)
    return ScanCase(plan, number)


def simulated(seed, group):
    """Runs one seed: every rank's result is, bit for bit, that of ranks that take turns."""
    case = case_of(group, seed // GROUPS[group][2])
    draw = random.Random(f"{group} {seed}")
    direction = draw.choice(("forward", "backward"))
    checked(Network(seed, slow=draw.choice((0.01, 1.0, 20.0))), case, direction)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("group", "chunk"), [(group, chunk) for group, (_, cases, _, _) in GROUPS.items() for chunk in range(0, cases, 10)]
)
def test_seeds(group, chunk):
    _, cases, seeds, _ = GROUPS[group]
    for seed in range(chunk * seeds, min(chunk + 10, cases) * seeds):
        try:
            simulated(seed, group)
        except BaseException as error:
            error.add_note(f"run again with: simulated({seed}, {group!r})")
            raise


@pytest.mark.share(4)
@pytest.mark.parametrize("seed", range(60))
def test_whole_recurrences_whatever_arrives_when(seed):
    """Output and every gradient, exact, however late or early messages are."""
    p = problem(7000 + seed)
    plan = p.plan()
    network = Network(seed, slow=random.Random(seed).choice((0.01, 20.0)))
    found = distances(loopback(p, plan, transport=network), one_device(p))
    assert max(found.values()) <= LIMIT, p
    assert network.calls == 2
