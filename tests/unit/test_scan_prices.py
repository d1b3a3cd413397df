"""What scans cost at the sizes of real models: bytes, seconds of planning, and prices beside simulations."""

import math
import time
from dataclasses import replace

import numpy as np
import pytest

import longspan as ls
from longspan.errors import ScheduleError
from longspan.planning import MACHINES, simulate
from tests.pace import quiet_seconds
from tests.spread_cases import SCHEMES, problem

TOKENS, RANKS = 1 << 20, 64
QWEN3_NEXT = {"heads": 32, "keys": 128, "values": 128, "maps": "matrix", "machine": "h100"}
NEMOTRON_H = {"heads": 128, "keys": 128, "values": 64, "maps": "scalar", "machine": "h100"}
MIB = 1 << 20


def long_tail():
    """226 documents and more: lognormal lengths with a median of 2k, up to 128k."""
    draw, lengths, left = np.random.default_rng(0), [], TOKENS
    while left:
        lengths.append(int(min(left, max(16, min(131072, draw.lognormal(math.log(2048), 1.3))))))
        left -= lengths[-1]
    return lengths


DOCUMENTS = {"one": [TOKENS], "8 x 128k": [TOKENS // 8] * 8, "long tail": long_tail()}


def balanced(lengths):
    return ls.layouts.balanced(ls.masks.documents(lengths) & ls.masks.causal(), world_size=RANKS)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_million_tokens_on_64_ranks(name):
    """At most 60 MiB a rank, layer and direction, planned in at most 50 ms of processor time on a quiet machine."""
    lengths = DOCUMENTS[name]
    layout, plans = balanced(lengths), []

    def planning():
        start = time.process_time()
        plans.append(ls.scan_plan(lengths, layout, **QWEN3_NEXT))
        return time.process_time() - start

    assert quiet_seconds(planning, repeats=5) <= 0.050
    plan = plans[-1]
    plan.validate()
    for direction in ("forward", "backward"):
        most = max(plan.bytes_received(rank, direction) for rank in range(RANKS))
        assert 0 < most <= 60 * MIB, (direction, most / MIB)
        seen = simulate(plan.schedule(direction), plan.machine)
        assert max(seen.bytes_received) == most
    gathered = RANKS * max(len(plan.chains.of_rank(rank)) for rank in range(RANKS)) * 4 * MIB
    assert gathered > 400 * MIB  # what a gather of all summaries would bring


def test_there_are_as_many_documents_as_the_tail_should_have():
    assert len(DOCUMENTS["long tail"]) == 226


@pytest.mark.share(2)
@pytest.mark.parametrize("sizes", [QWEN3_NEXT, NEMOTRON_H], ids=["dense", "scalar"])
@pytest.mark.parametrize("world", [8, 64, 1024])
def test_prices_are_near_simulations(world, sizes):
    """`auto` goes by prices, which take steps together; the simulation lets ranks run ahead of each other."""
    layout = ls.layouts.zigzag(TOKENS, world)
    schemes = ("chain", "doubling") if world < 1024 else ("doubling",)
    priced, simulated = {}, {}
    for scheme in schemes:
        plan = ls.scan_plan(None, layout, scheme=scheme, **sizes)
        reason = plan.reasons[0]
        for direction, price in (("forward", reason.forward_seconds), ("backward", reason.backward_seconds)):
            seen = simulate(plan.schedule(direction), plan.machine)
            assert 0.8 * seen.seconds <= price <= 1.4 * seen.seconds, (scheme, direction, price, seen.seconds)
            simulated[scheme] = simulated.get(scheme, 0.0) + seen.seconds
            received = [plan.bytes_received(rank, direction) for rank in range(world)]
            assert list(seen.bytes_received) == received
            if direction == "forward":
                assert max(seen.peak_bytes) == reason.peak_bytes
        priced[scheme] = reason.seconds
    chosen = ls.scan_plan(None, layout, **sizes).scheme
    assert simulated.get(chosen, math.inf) <= 1.3 * min(simulated.values()), (chosen, simulated)
    assert priced[chosen] == min(priced.values())


def test_no_delay_makes_a_scan_hang():
    rng = np.random.default_rng(0)
    for seed in range(60):
        plan = problem(seed).plan()
        for direction in ("forward", "backward"):
            schedule = plan.schedule(direction)
            quick = simulate(schedule, MACHINES["h100"])
            slow = simulate(schedule, MACHINES["h100"], delay=lambda *_: float(rng.exponential(1e-3)))
            assert slow.seconds >= quick.seconds
            assert slow.bytes_received == quick.bytes_received


@pytest.mark.parametrize("scheme", SCHEMES[:-1])
def test_the_simulator_names_the_message_nobody_offers(scheme):
    schedule = ls.scan_plan(None, ls.layouts.zigzag(32, 4), heads=1, keys=1, values=1, maps="scalar", scheme=scheme)
    schedule = schedule.schedule()
    number, lost = next(schedule.transfers())
    ranks = list(schedule.ranks)
    steps = list(ranks[lost.src])
    steps[number] = replace(steps[number], transfers=tuple(t for t in steps[number].transfers if t.dst != lost.dst))
    ranks[lost.src] = tuple(steps)
    with pytest.raises(ScheduleError, match=rf"step {number}.*from rank {lost.src} to rank {lost.dst}"):
        simulate(replace(schedule, ranks=tuple(ranks)), MACHINES["h100"])
