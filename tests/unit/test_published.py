"""The published benchmark: it passes, and its descriptions of other systems move and compute what our schedules do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks import published as pub
from benchmarks.published_points import DIRECTIONS, SIZES, Point, flop_per_rank, packs, points
from benchmarks.published_systems import Leg, Run, padded_problem, plain_problem, planned_run, ring_run, runs
from longspan.masks import bands as bd
from longspan.planning import Role, Step, reverse, scheme
from longspan.planning.machine import H100_FITTED, Work
from tests.step_times import move_seconds

WORLD = 16
"""Two nodes."""
DOCS = np.array([700, 33, 5, 260, 1, 96])


def step_pairs(steps: tuple[Step, ...]) -> int:
    return sum(int(bd.area(bd.as_array(c.bands)).sum()) * len(c.q.heads) for s in steps for c in s.computes)


def run_pairs(run: Run) -> int:
    return sum(call.pairs * call.q_heads for call in run.calls)


def all_pairs() -> int:
    return int((DOCS * (DOCS + 1) // 2).sum()) * SIZES.q_heads


def received(steps: tuple[Step, ...], rank: int) -> list[list[int]]:
    """For each step, bytes taken from the own node and from others."""
    sums = [[0, 0] for _ in steps]
    for at, step in zip(sums, steps, strict=True):
        for t in step.transfers:
            if t.dst == rank:
                lse = 4 * t.piece.num_tokens * len(t.piece.heads) if t.piece.role is Role.OUT else 0
                at[H100_FITTED.level(t.src, t.dst)] += (
                    t.piece.num_bytes(SIZES) - lse
                )  # the published systems keep theirs
    return sums


@pytest.mark.nightly  # .ci/run runs the whole benchmark
def test_quick_benchmark_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert pub.main(["--quick"]) == 0
    text = capsys.readouterr().out
    assert text.count("held out\n") == 24
    assert text.count("  fit\n") == 24
    assert "SIMULATED" in text
    assert "WRONG" not in text


def test_ring_description_equals_our_steps() -> None:
    problem = padded_problem(DOCS, WORLD)
    ours = scheme("ring", problem)
    total = 0
    for rank in range(WORLD):
        run, steps = ring_run(problem, rank), ours.steps(rank)
        total += run_pairs(run)
        for i, step in enumerate(steps):
            assert run.calls[i].pairs * SIZES.q_heads == step_pairs((step,))
        for moved, inward in zip(run.moved, received(steps, rank), strict=True):
            # A rank at the border of a node receives over one link and sends over the other.
            assert [m for m, b in zip(moved, inward, strict=True) if b] == [b for b in inward if b]
    assert total == all_pairs()


@pytest.mark.parametrize("name", ["all_gather", "all_to_all"])
def test_other_descriptions_equal_our_steps(name: str) -> None:
    docs = DOCS if name == "all_gather" else np.append(DOCS, -DOCS.sum() % WORLD)
    problem = (padded_problem if name == "all_gather" else plain_problem)(docs, WORLD)
    ours = scheme(name, problem)
    made = [planned_run(problem, rank, ours.steps(rank), in_two=name == "all_gather") for rank in range(WORLD)]
    for run in made:
        steps = ours.steps(run.rank)
        assert run_pairs(run) == step_pairs(steps)
        assert np.array_equal(np.sum(run.moved, axis=0), np.sum(received(steps, run.rank), axis=0))
    extra = int(docs[-1] * (docs[-1] + 1) // 2) * SIZES.q_heads if name == "all_to_all" else 0
    assert sum(map(run_pairs, made)) == all_pairs() + extra


def test_ring_gradients_hop_as_often_as_in_our_backward() -> None:
    problem = padded_problem(DOCS, WORLD)
    rank = WORLD // 2  # it receives from the other node, and sends inside its own
    backward, _ = reverse(scheme("ring", problem).steps(rank), rank, keep=False)
    sent = [t.piece.num_tokens for s in backward for t in s.transfers if t.src == rank and t.piece.role is Role.DKV]
    run = ring_run(problem, rank)
    row = SIZES.row_bytes(Role.KV) * SIZES.kv_heads
    assert sum(sent) == (WORLD - 1) * run.tokens == sum(far for _, far in run.moved) / row


def test_a_trace_costs_what_the_machine_says() -> None:
    problem = padded_problem(DOCS, WORLD)
    step = scheme("ring", problem).steps(0)[0]
    near, far = ring_run(problem, 0).moved[0]
    work = Work(flop=1e9, slots=50.0, copied=1e6, ops=2.0)
    for direction in DIRECTIONS:
        seconds = work.seconds(H100_FITTED, direction), move_seconds(step, 0, SIZES, H100_FITTED)
        for exposed, expected in ((False, max(seconds)), (True, sum(seconds))):
            legs = [Leg(work, near, far, exposed=exposed)] * 2
            trace = pub.Trace.of([[legs, legs[:1]]], [1.0], direction)
            assert trace.seconds(H100_FITTED) == pytest.approx([2 * expected])


def test_the_fit_finds_constants_that_made_the_points() -> None:
    docs = {size: [np.array([8192 * size]), np.tile([3000, 1000, 96], 2 * size)] for size in (8, 32)}
    traces = pub.trace("documents", {size: made[1:] for size, made in docs.items()})
    traces |= pub.trace("causal", {size: made[:1] for size, made in docs.items()})
    wanted = (0.65, 0.55, 1.2e-6, 0.6, 0.7, 2e-5)
    machine = pub.machine_with(wanted)
    made = [Point(*key, trace.tflops(machine)) for key, trace in traces.items()]
    assert pub.constants_of(pub.fit(traces, made)) == pytest.approx(wanted, rel=0.02)


def test_drifted_constants_and_wrong_orders_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    drifted = pub.print_constants(replace(H100_FITTED, op_seconds=2 * H100_FITTED.op_seconds))
    assert len(drifted) == 1
    assert "op_seconds" in drifted[0]
    assert "op_seconds" in capsys.readouterr().out
    held = [point for point in points() if not point.fitted]
    assert pub.ranked(held, lambda point: point.tflops) == (23, 23)
    assert pub.ranked(held, lambda point: -point.tflops) == (0, 23)


def test_packs_fill_the_sequence_and_hold_the_published_work() -> None:
    made = packs(8)
    assert [int(pack.sum()) for pack in made] == [65536] * 20
    assert max(int(pack.max()) for pack in made) <= 16384
    assert np.mean([flop_per_rank(pack, 8, "forward") for pack in made]) == pytest.approx(0.968e12, rel=1e-3)
    assert [len(runs(name, made[0], 8)) for name in pub.SCHEMES] == [1, 3, 3]
