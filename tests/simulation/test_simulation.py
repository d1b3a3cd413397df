"""The real runner on a virtual network: thousands of seeds, each with its own delays and orders of messages.

Every rank's result is bitwise that of ranks that take turns. A failing seed prints itself: `simulated(seed, "small")`
runs it again.
"""

import random
from functools import lru_cache

import numpy as np
import pytest
import torch

from longspan import layouts, masks
from longspan.kernels import kernel_named
from longspan.planning import Problem, Sizes, scheme
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from tests.cases import LAYOUTS, random_layout, random_mask
from tests.conv_cases import conv_case, run_conv_loopback
from tests.simulation.network import Network, Rank

torch.set_num_threads(1)
KINDS = ("causal", "full", "documents", "window", "prefix", "chunked", "sinks", "per_head", "per_row")
# name: (ranks, cases, seeds of each case, tokens)
GROUPS = {
    "small": ((2, 3, 4), 110, 16, 24),
    "medium": ((5, 6, 8), 12, 16, 24),
    "wide": ((9, 12, 16), 6, 16, 32),
    "widest": ((24, 32, 48, 64), 8, 12, 64),
}
NUM_SEEDS = sum(cases * seeds for _, cases, seeds, _ in GROUPS.values())


class Case:
    """A plan with inputs, and what its ranks return when they take turns."""

    def __init__(self, plan: Plan, seed: int) -> None:
        self.plan, self.ranks = plan, range(plan.layout.world_size)
        draw, s = torch.Generator().manual_seed(seed), plan.sizes
        heads, dims = (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads), (s.head_dim,) * 2 + (s.v_head_dim,) * 2
        whole = [
            torch.randn(s.batch, h, plan.layout.seq_len, d, generator=draw) for h, d in zip(heads, dims, strict=True)
        ]
        self.shards = [[plan.layout.shard(t, rank, 2) for t in whole] for rank in self.ranks]
        self.forward = Loopback().run(self.programs("forward"))

    @property
    def backward(self):
        if not hasattr(self, "_backward"):
            self._backward = Loopback().run(self.programs("backward"))
        return self._backward

    def job(self, rank):
        return Job(self.plan, rank, kernel_named("reference"), 0.5, torch.float32)

    def program(self, rank, direction):
        q, k, v, dout = self.shards[rank]
        if direction == "forward":
            return Forward(self.job(rank), q, k, v).program(saves=True)
        out, lse, kept = self.forward[rank]
        return Backward(self.job(rank), Saved(q, k, v, out, lse, list(kept)), dout).program()

    def programs(self, direction):
        return [self.program(rank, direction) for rank in self.ranks]

    def right(self, rank, direction, result):
        """Whether a rank's result is, bit for bit, what it is when ranks take turns."""
        return all(map(same, (self.forward if direction == "forward" else self.backward)[rank], result))


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b)


@lru_cache(maxsize=2)
def case_of(group, number):
    """The number-th case of a group; its ranks and its scheme are drawn like all else."""
    worlds, _, _, tokens = GROUPS[group]
    rng = np.random.default_rng([number, *map(ord, group)])
    world = int(rng.choice(worlds))
    q_heads = int(rng.choice((1, 2, 4)))
    kv_heads = int(rng.choice([n for n in (1, 2, 4) if q_heads % n == 0]))
    sizes = Sizes(q_heads, kv_heads, 2, int(rng.choice((1, 2))), 4, int(rng.choice((1, 1, 2))))
    mask = random_mask(rng, str(rng.choice(KINDS)), tokens, sizes)
    layout = random_layout(rng, str(rng.choice(LAYOUTS)), mask, tokens, world)
    hybrids = [f"hybrid({n},{p})" for n in range(2, world) if world % n == 0 for p in ("ring", "staged", "exchange")]
    names = ["ring", "exchange", "staged", "all_gather", "all_to_all", *hybrids]
    if group == "widest":
        names = ["exchange", "all_to_all", *hybrids[-2:]]  # 64 steps of 64 ranks are a minute's work
    name = str(rng.choice(names))
    problem = Problem.make(mask, layout, sizes)
    plan = Plan(mask, layout, sizes, "float32", scheme(name, problem), CPU, True, bool(rng.random() < 0.3))
    return Case(plan, number)


def simulated(seed, group):
    """Runs one seed: every rank's result is, bit for bit, that of ranks that take turns."""
    case = case_of(group, seed // GROUPS[group][2])
    draw = random.Random(f"{group} {seed}")
    direction = draw.choice(("forward", "backward"))
    network = Network(seed, slow=draw.choice((0.01, 1.0, 20.0)))
    checked(network, case, direction)


def checked(network, case, direction):
    case.right(0, direction, case.forward[0] if direction == "forward" else case.backward[0])
    for rank, result in enumerate(network.run(case.programs(direction))):
        assert case.right(rank, direction, result), f"rank {rank} returned a wrong result"


CHUNKS = [(group, chunk) for group, (_, cases, _, _) in GROUPS.items() for chunk in range(0, cases, 5)]


@pytest.mark.share(8)
@pytest.mark.parametrize(("group", "chunk"), CHUNKS)
def test_seeds(group, chunk):
    _, cases, seeds, _ = GROUPS[group]
    for seed in range(chunk * seeds, min(chunk + 5, cases) * seeds):
        try:
            simulated(seed, group)
        except BaseException as error:
            error.add_note(f"run again with: simulated({seed}, {group!r})")
            raise


# -- a thousand ranks --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def thousand():
    mask = masks.documents([6] * 341 + [2]) & masks.causal()
    layout, sizes = layouts.contiguous(2048, 1024), Sizes(1, 1, 1, 1, 4)
    made = scheme("exchange", Problem.make(mask, layout, sizes))
    return Case(Plan(mask, layout, sizes, "float32", made, CPU, True, False), 0)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(4))
def test_1024_ranks(seed):
    checked(Network(seed), thousand(), ("forward", "backward")[seed % 2])


# -- what the seeds do not draw ----------------------------------------------------------------------------------------


def ring():
    mask, layout, sizes = masks.full(32), layouts.zigzag(32, 4), Sizes(2, 1, 4, 4, 4)
    return Plan(mask, layout, sizes, "float32", scheme("ring", Problem.make(mask, layout, sizes)), CPU, True, False)


def test_a_seed_repeats_itself():
    case = Case(ring(), 0)

    def run(seed):
        network = Network(seed)
        network.run(case.programs("forward"))
        return network.now, network.num_events, [rank.order for rank in network.ranks]

    assert run(5) == run(5)
    assert run(5)[0] != run(6)[0]


def test_messages_with_other_contents_are_found(monkeypatch):
    """The bits depend on what the network delivers: with zeros in their place they are wrong."""
    case, taken = Case(ring(), 0), Rank.taken
    monkeypatch.setattr(Rank, "taken", lambda rank, exchange, src: taken(rank, exchange, src).zero_())
    with pytest.raises(AssertionError, match="wrong result"):
        checked(Network(0), case, "forward")


@pytest.mark.share(2)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_convolutions_do_not_depend_on_who_is_late(first):
    for seed in range(first, first + 50):
        case = conv_case(seed)
        x, weight, bias, dout = case.tensors
        network = Network(seed)
        runs = [
            run_conv_loopback(case.plan, x, weight, bias, dout, activation=case.activation, transport=transport)
            for transport in (network, Loopback())
        ]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), f"seed {seed}: {case}"
