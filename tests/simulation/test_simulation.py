"""The real runner on a virtual network: thousands of seeds, each with its own delays, orders and faults.

Without a fault, and with a harmless one, every rank's result is bitwise that of ranks that take turns. With a fault, no
rank hangs, none returns a wrong result, and every error names a rank, a step and a cause. A failing seed prints itself:
`simulated(seed, "small")` runs it again.
"""

import random
import re
from functools import lru_cache

import numpy as np
import pytest
import torch

from longspan import layouts, masks
from longspan.errors import AgreementError, RankError
from longspan.kernels import kernel_named
from longspan.planning import Problem, Sizes, scheme
from longspan.planning.machine import CPU
from longspan.planning.plan import Plan
from longspan.run.ops import create_record
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Loopback
from longspan.run.walk import Job
from tests.cases import LAYOUTS, random_layout, random_mask
from tests.conv_cases import conv_case, run_conv_loopback
from tests.simulation.faults import MESSAGE_FAULTS, RANK_FAULTS, Fault, KilledError
from tests.simulation.network import PATIENCE, TIMEOUT, Network
from tests.simulation.waits import State, WaitError

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


def drawn_fault(draw, case, direction):
    """A fault at a rank and a step that the plan really has, or none."""
    kind = draw.choice([None, None, *RANK_FAULTS, *MESSAGE_FAULTS])
    rank = draw.choice(case.ranks)
    steps = case.plan.steps(rank, direction)
    if kind is None or not steps:
        return None
    seconds = draw.choice((0.1, 1.0, 10.0, 1e9))
    if kind in RANK_FAULTS:
        return Fault(kind, rank, draw.randrange(len(steps)), direction, seconds=seconds)
    sends = [(i, t.dst) for i, step in enumerate(steps) for t in step.transfers if t.src == rank]
    if not sends:
        return None
    step, dst = draw.choice(sends)
    return Fault(kind, rank, step, direction, dst, seconds)


def simulated(seed, group):
    """Runs one seed and checks all that is promised; returns what kind it was."""
    case = case_of(group, seed // GROUPS[group][2])
    draw = random.Random(f"{group} {seed}")
    direction = draw.choice(("forward", "backward"))
    fault = drawn_fault(draw, case, direction)
    network = Network(
        seed, [] if fault is None else [fault], plans=case.plan.fingerprint, slow=draw.choice((0.01, 1.0, 20.0))
    )
    network.calls = int(direction == "backward")
    case.right(0, direction, case.forward[0] if direction == "forward" else case.backward[0])
    try:
        network.run(case.programs(direction))
    except Exception as error:
        caught = error
    else:
        caught = None
    judged(network, case, direction, fault, caught)
    return "clean" if fault is None else f"{fault.kind}: {'harmless' if caught is None else 'named'}"


def judged(network, case, direction, fault, caught):
    for rank in network.ranks:
        assert rank.ended is not None
        if rank.error is None:
            assert case.right(rank.number, direction, rank.result), f"rank {rank.number} returned a wrong result"
    if fault is None or (fault.kind in ("stop", "late") and fault.seconds < PATIENCE / 2):
        assert caught is None, f"nothing is wrong, but {caught}"
    if fault is None or caught is None:
        assert fault is None or fault.kind not in ("kill", "raise", "lose", "double"), "the fault was not noticed"
        return
    blamed = {fault.rank} if fault.dst is None else {fault.rank, fault.dst}
    for rank in network.ranks:
        error = rank.error
        if error is None or isinstance(error, KilledError) or (fault.kind == "raise" and rank.number == fault.rank):
            continue
        assert isinstance(error, RankError), repr(error)
        text = str(error)
        assert re.search(r"rank \d+.* step -?\d+", text), text
        assert any(f"rank {number}" in text for number in blamed), f"{text} does not name rank {blamed}"
        if isinstance(error, WaitError) and error.culprit.state in (State.DEAD, State.STOPPED):
            assert error.culprit.rank == fault.rank
        if fault.kind == "skip":
            assert re.search(r"call, |call differ", text), text
        if fault.kind == "raise":
            assert "ValueError: mask_mod of rank" in text
        if rank.number != fault.rank:  # one that was stopped is late itself
            assert rank.ended <= 120 * network.slow + 2 * TIMEOUT


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


def test_there_are_enough_seeds():
    assert NUM_SEEDS >= 2000


def test_every_kind_of_fault_is_met_and_named():
    """Faults really happen, and most of them hurt: a network that ignores them would fail here."""
    found = {simulated(seed, "small") for seed in range(8 * GROUPS["small"][2])}
    assert {f"{kind}: named" for kind in (*RANK_FAULTS, *MESSAGE_FAULTS)} <= found
    assert {"clean", "late: harmless", "stop: harmless"} <= found


# -- a thousand ranks --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def thousand():
    mask = masks.documents([6] * 341 + [2]) & masks.causal()
    layout, sizes = layouts.contiguous(2048, 1024), Sizes(1, 1, 1, 1, 4)
    made = scheme("exchange", Problem.make(mask, layout, sizes))
    return Case(Plan(mask, layout, sizes, "float32", made, CPU, True, False), 0)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_1024_ranks(first):
    case = thousand()
    for seed in range(first, first + 5):
        draw = random.Random(f"thousand {seed}")
        direction = ("forward", "backward")[seed % 2]
        fault = None
        while fault is None and seed % 8 > 1:
            fault = drawn_fault(draw, case, direction)
        network = Network(seed, [] if fault is None else [fault], plans=case.plan.fingerprint)
        network.calls = int(direction == "backward")
        caught = None
        try:
            network.run(case.programs(direction))
        except Exception as error:
            caught = error
        judged(network, case, direction, fault, caught)
        assert len(network.ranks) == 1024


# -- what the seeds do not draw ----------------------------------------------------------------------------------------


def small_plan(mask=None, name="ring", world=4, layout=None):
    mask = masks.causal(32) if mask is None else mask
    layout = layouts.zigzag(32, world) if layout is None else layout
    sizes = Sizes(2, 1, 4, 4, 4)
    return Plan(mask, layout, sizes, "float32", scheme(name, Problem.make(mask, layout, sizes)), CPU, True, False)


def ended(network, programs):
    """All ranks' errors, by rank."""
    try:
        network.run(programs)
    except Exception:
        return {rank.number: rank.error for rank in network.ranks if rank.error is not None}
    return {}


@pytest.mark.share(3)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("other", ["mask", "scheme"])
def test_ranks_with_different_plans_are_named(seed, other):
    """Nobody who got a message of the odd one takes it for something else, whatever arrives when."""
    plans = [small_plan(), small_plan(masks.full(32)) if other == "mask" else small_plan(name="all_gather")]
    cases = [Case(plan, 1) for plan in plans]
    odd = seed % 4
    programs = [cases[rank == odd].program(rank, "forward") for rank in range(4)]
    network = Network(seed, plans=[plans[rank == odd].fingerprint for rank in range(4)])
    errors = ended(network, programs)
    assert errors
    for rank, error in errors.items():
        assert isinstance(error, RankError)
        assert re.search(r"rank \d+.* step -?\d+", str(error))
        assert f"rank {odd}" in str(error) or rank == odd or "plans differ" in str(error), error
    for rank in network.ranks:
        if rank.error is None and rank.number != odd:
            assert cases[0].right(rank.number, "forward", rank.result)


def test_different_plans_are_refused_before_data_moves():
    from longspan.run import agreement
    from longspan.run.group import Safety

    plans = [small_plan(), small_plan(masks.full(32))]
    rows = [
        create_record(Case(plan, 0).job(0), torch.device("cpu"), True, "", Safety()).row()
        for plan in (plans[0], plans[1], plans[0])
    ]
    with pytest.raises(AgreementError, match=r"no data was sent.*mask: .* on rank"):
        agreement.compare(rows)


def test_the_one_that_everybody_waits_for_is_named():
    """In a ring only its neighbour waits for the dead rank; the others wait for those who wait."""
    case = Case(small_plan(masks.full(32)), 0)
    errors = ended(Network(3, [Fault("kill", 2, 0)]), case.programs("forward"))
    assert set(errors) == {0, 1, 2, 3}
    for rank in (0, 1, 3):
        assert str(errors[rank]).startswith("rank 2 is dead or stopped: no sign of life for 2.0 s, last seen in")
        assert errors[rank].culprit.needed in (0, 1, 2)


def test_a_slow_rank_is_waited_for_and_a_stopped_one_is_not():
    case = Case(small_plan(masks.full(32)), 0)
    assert not ended(Network(1, [Fault("stop", 1, 1, seconds=1.9)]), case.programs("forward"))
    errors = ended(Network(1, [Fault("stop", 1, 1, seconds=30.0)]), case.programs("forward"))
    assert 2 in errors  # who needs nothing more of it may end well
    assert all("rank 1 is dead or stopped" in str(error) for rank, error in errors.items() if rank != 1)


def test_messages_that_come_too_late_are_given_up():
    case = Case(small_plan(masks.full(32)), 0)
    assert not ended(Network(1, [Fault("late", 1, 1, dst=2, seconds=TIMEOUT / 2)]), case.programs("forward"))
    errors = ended(Network(1, [Fault("late", 1, 1, dst=2, seconds=TIMEOUT * 3)]), case.programs("forward"))
    assert "rank 1 is alive but did not come" in str(errors[2])


@pytest.mark.parametrize("kind", ["damage", "double"])
def test_without_headers_faults_are_silent(kind):
    """The headers are what catches these: without them some rank returns a wrong result and says nothing."""
    case, wrong = Case(small_plan(masks.full(32)), 0), 0
    for seed in range(20):
        network = Network(seed, [Fault(kind, 0, 0, dst=1)], checked=False)
        ended(network, case.programs("forward"))
        wrong += any(r.result is not None and not case.right(r.number, "forward", r.result) for r in network.ranks)
        checked = Network(seed, [Fault(kind, 0, 0, dst=1)])
        assert ended(checked, case.programs("forward"))
        for rank in checked.ranks:
            assert rank.error is not None or case.right(rank.number, "forward", rank.result)
    assert wrong


def test_a_seed_repeats_itself():
    case = Case(small_plan(masks.full(32)), 0)

    def run(seed):
        network = Network(seed, [Fault("short", 1, 1, dst=2)])
        errors = ended(network, case.programs("forward"))
        return {rank: str(error) for rank, error in errors.items()}, network.now, network.num_events

    assert run(5) == run(5)
    assert run(5)[1] != run(6)[1]


@pytest.mark.share(2)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_convolutions_do_not_depend_on_who_is_late(first):
    for seed in range(first, first + 50):
        case = conv_case(seed)
        x, weight, bias, dout = case.tensors
        network = Network(seed, dtype="float64", plans=case.plan.fingerprint[:16])
        runs = [
            run_conv_loopback(case.plan, x, weight, bias, dout, activation=case.activation, transport=transport)
            for transport in (network, Loopback())
        ]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), f"seed {seed}: {case}"
