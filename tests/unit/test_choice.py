"""The scheme that `auto` chooses: estimates against full schedules, lower bounds, and the cost of a choice."""

from dataclasses import replace

import numpy as np
import pytest

import longspan as ls
from benchmarks.auto_choice import BAR, COUNT, Workload, drawn_ranks, drawn_workload, on_nodes, simulated
from longspan.errors import ScheduleError
from longspan.planning import (
    MACHINES,
    Problem,
    Sizes,
    backward,
    choose,
    estimate,
    machine,
    planners,
    scheme,
    simulate,
    validate,
)
from longspan.planning.choose import GAIN, Floor, candidates
from longspan.planning.estimate import LAYERS
from longspan.planning.plan import _build_plan

FEW = [number for number in range(COUNT) if drawn_ranks(number)[0] <= 8]
"""Workloads whose schedules are written out in a second or two."""
NO_HOST = replace(MACHINES["h100"], launch_seconds=0.0, message_seconds=0.0, call_seconds=0.0)


def worst_difference(workload, name):
    """The largest difference between the estimate's work and messages, and those of every rank's steps."""
    found = []

    def caught(compute, ops, sent, machine):
        found.append((compute, ops, sent))
        return 1.0, 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "_simulate", caught)
        estimate.estimate(scheme(name, workload.problem()), workload.machine, keep=workload.keep)
    forward = scheme(name, workload.problem()).schedule()
    worst = 0.0
    for (compute, ops, sent), schedule in zip(found, (forward, backward(forward, keep=workload.keep)), strict=True):
        messages = {}
        for step, src, dst, num_bytes, added, due in sent[:, sent[3] > 0].T.tolist():
            total, is_added = messages.get((step, due, src, dst), (0, False))
            messages[step, due, src, dst] = total + num_bytes, is_added or bool(added)
        expected = {}
        for step, t in schedule.transfers():
            key = step, step + t.early, t.src, t.dst
            total, is_added = expected.get(key, (0, False))
            is_added = is_added or t.piece.role in ("out", "dq", "dkv")
            expected[key] = total + t.piece.num_bytes(workload.sizes), is_added
        assert messages == expected
        for rank, steps in enumerate(schedule.ranks):
            works = machine.steps_work(steps, rank, workload.sizes, workload.machine, schedule.direction)
            seconds = [work.parts(workload.machine, schedule.direction)[1] for work in works]
            queued = [work.ops - work.packs - work.unpacks for work in works]
            assert queued == pytest.approx(ops[rank].tolist())
            worst = max(worst, float(np.abs(compute[rank] - seconds).max()) / max(*seconds, 1e-6))
    return worst


@pytest.mark.share(12)
@pytest.mark.parametrize("number", FEW)
def test_an_estimate_has_the_work_and_messages_of_every_step(number):
    check_works(drawn_workload(number))


@pytest.mark.share(12)
@pytest.mark.parametrize("number", FEW)
def test_an_estimate_takes_as_long_as_the_simulation_and_no_less_than_its_bound(number):
    check_times(drawn_workload(number))


@pytest.mark.share(12)
@pytest.mark.parametrize("number", FEW)
def test_a_choice_is_as_fast_as_the_best_scheme_by_full_simulation(number):
    workload = drawn_workload(number)
    seconds = simulated(workload)
    assert seconds[workload.plan().scheme.name] <= BAR * min(seconds.values())


def packed_plan(seed, machine="h100"):
    rng = np.random.default_rng(seed)
    lengths = np.maximum(rng.lognormal(7.5, 1.3, size=40).astype(int), 16)
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=8)
    return ls.plan(mask, layout, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16", machine=machine)


def test_a_choice_does_not_depend_on_earlier_batches():
    """Ranks that have planned other batches must choose the same scheme."""
    _build_plan.cache_clear()
    names = [packed_plan(seed).scheme.name for seed in range(12)]
    _build_plan.cache_clear()
    assert [packed_plan(seed).scheme.name for seed in reversed(range(12))] == names[::-1]
    assert len(set(names)) > 1


def test_auto_writes_out_no_steps_and_estimates_few_schemes(monkeypatch):
    counted = []
    estimated = choose.estimate_scheme
    monkeypatch.setattr(planners.Scheme, "steps", lambda *_: pytest.fail("steps were built"))
    monkeypatch.setattr(
        choose, "estimate_scheme", lambda *args, **keep: counted.append(args[0].name) or estimated(*args, **keep)
    )
    _build_plan.cache_clear()
    for seed in range(12):
        packed_plan(seed)
    assert counted.count("exchange") == 12
    assert len(counted) <= 4 * 12


def test_reasons_name_every_candidate_and_the_chosen_scheme_first():
    plan = packed_plan(0)
    assert plan.reasons[0].scheme == plan.scheme.name
    assert plan.reasons[0].chosen
    names = list(candidates(plan.scheme.problem))
    assert sorted(reason.scheme for reason in plan.reasons) == sorted(names)
    times = {reason.scheme: reason.seconds for reason in plan.reasons}
    assert times[plan.scheme.name] <= BAR * min(times[reason.scheme] for reason in plan.reasons if not reason.at_least)


def test_a_registered_planner_takes_part_in_the_comparison(monkeypatch):
    def at_once(problem, rank):
        return planners.exchange(replace(problem, stages=1), rank)

    monkeypatch.setitem(planners.PLANNERS, "at_once", at_once)
    assert at_once not in LAYERS
    _build_plan.cache_clear()
    plan = packed_plan(0)
    reason = next(reason for reason in plan.reasons if reason.scheme == "at_once")
    named = next(reason for reason in plan.reasons if reason.scheme == "exchange")
    assert reason.at_least or reason.seconds == pytest.approx(named.seconds, rel=0.02)


# -- messages start after they are packed ------------------------------------------------------------------------------


def two_rank_pass():
    mask = ls.masks.causal(4096)
    problem = Problem.make(mask, ls.layouts.zigzag(4096, 2), Sizes(8, 8, 64, 64, 2))
    return scheme("all_to_all", problem).schedule()


def test_messages_start_after_packing_and_are_unpacked_after_they_arrive():
    """Step 0 of an all-to-all computes nothing: it takes packing, then moving, then unpacking."""
    schedule, h100 = two_rank_pass(), NO_HOST
    sent = sum(t.piece.num_bytes(schedule.sizes) for t in schedule.ranks[0][0].transfers if t.src == 0)
    packing = 2 * sent / h100.copy_bandwidth + 2 * h100.op_seconds  # one pack, one start
    moving = sent / h100.links[0].bandwidth + h100.links[0].latency
    seen = simulate(schedule, h100)
    first = [event for event in seen.events if event.kind == "message" and event.step == 0]
    assert [event.start for event in first] == pytest.approx([packing] * 2)
    assert [event.stop for event in first] == pytest.approx([packing + moving] * 2)
    compute = next(event for event in seen.events if event.kind == "compute")
    assert compute.start == pytest.approx(packing + moving + 2 * sent / h100.copy_bandwidth, rel=1e-9)


# -- mutants -----------------------------------------------------------------------------------------------------------


def lost_packing(patch):
    """Messages start with their step."""
    old = machine.Work.parts

    def parts(self, *args):
        pack, compute, unpack = old(self, *args)
        return 0.0, pack + compute + unpack, 0.0

    patch.setattr(machine.Work, "parts", parts)


def one_kind_of_slice(patch):
    """All slices of a hybrid count as equal."""
    patch.setattr(planners.Slices, "kinds", property(lambda self: (None,) * self.heads))


def no_waits(patch):
    """Messages pass ports without waiting for each other."""
    patch.setattr(estimate, "_port_ends", lambda port, start, seconds: start + seconds)


def high_bound(patch):
    """Lower bounds are too high, so that schemes that can win are left out."""
    old = Floor.seconds
    patch.setattr(Floor, "seconds", lambda self, candidate: 1e3 * old(self, candidate))


def rows_of_another_plane(patch):
    """Rows are remembered without their planes, so that all heads get those of the first."""

    def once(self, lane, make, *more):
        return self.known.setdefault((make.__name__, *more), make(lane))

    patch.setattr(Problem, "_once", once)


def made(ranks, heads, mask=None):
    """A workload of packed documents on nodes of four."""
    mask = ls.masks.documents([3000, 500, 2596]) & ls.masks.causal() if mask is None else mask
    layout = ls.layouts.zigzag(6096, ranks)
    q_heads, kv_heads = heads
    sizes = Sizes(q_heads, kv_heads, 64, 64, 2)
    return Workload("made", mask, layout, sizes, on_nodes(NO_HOST, 4), keep=False)


def check_works(workload):
    for name in candidates(workload.problem()):
        assert worst_difference(workload, name) < 1e-9, name


def check_times(workload):
    floor = Floor(workload.problem(), workload.machine, workload.keep)
    for name, seconds in simulated(workload).items():
        candidate = scheme(name, workload.problem())
        found = choose.estimate_scheme(candidate, workload.machine, keep=workload.keep).seconds
        assert found == pytest.approx(seconds, rel=0.005), name
        assert floor.seconds(candidate) <= seconds * (1 + GAIN), name


def check_schedules(workload):
    """Estimates and steps read the same rows, so only the validator sees that these are wrong."""
    for name in candidates(workload.problem()):
        forward = scheme(name, workload.problem()).schedule()
        validate(forward, workload.mask)
        validate(backward(forward, keep=workload.keep), workload.mask)


def per_head():
    """A mask whose first four heads need fewer rows than the others."""
    masks = ls.masks.sliding_window(100, seq_len=6096), ls.masks.causal(6096)
    return ls.masks.per_head(*(masks[head // 4] for head in range(8)))


MUTANTS = {
    lost_packing: test_messages_start_after_packing_and_are_unpacked_after_they_arrive,
    one_kind_of_slice: lambda: check_works(made(6, (8, 2))),
    no_waits: lambda: check_times(made(8, (8, 2))),
    high_bound: lambda: check_times(made(8, (8, 2))),
    rows_of_another_plane: lambda: check_schedules(made(6, (8, 2), per_head())),
}


@pytest.mark.parametrize("check", MUTANTS.values(), ids=[mutant.__name__ for mutant in MUTANTS])
def test_what_finds_mistakes_finds_none(check):
    check()


def test_heads_with_masks_of_their_own_are_estimated():
    check_works(made(6, (8, 2), per_head()))


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_is_noticed(mutant, monkeypatch):
    mutant(monkeypatch)
    with pytest.raises((AssertionError, ScheduleError)):
        MUTANTS[mutant]()
