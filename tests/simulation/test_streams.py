"""Streams, proved without a GPU: the shipped runner and transport on simulated GPUs, where operations run late and in
any order that streams and events allow (see `streams`). Results are those of ranks that take turns on CPUs, bit for
bit, and every mistake that could be made with streams is noticed.

`python -m tests.simulation.streams_sweep --plans 3000` runs more of them.
"""

import pytest
import torch

import longspan as ls
from longspan.kernels.cuda_flash import Flash
from longspan.run.passes import Backward, Forward, Saved
from longspan.run.transports import Buffers
from longspan.run.walk import Job
from tests.cases import LAYOUTS
from tests.gpu.programs import drive, no_backward, no_forward
from tests.simulation.streams import Batch, DeadlockError, HostCopyError, HostWaitError, Memory, NoHostWaits, Simulation
from tests.simulation.streams_capture import UnjoinedError, capturing, other_inputs, replayed, run_pass
from tests.simulation.streams_cases import AHEAD, DTYPES, KINDS, case_of, check, on_gpus, same, schemes
from tests.simulation.streams_group import SimulatedNccl, simulated
from tests.simulation.streams_mistakes import LET_GO, MISTAKES, NOT_HELD, START, Mistake, in_run, in_start, tried

PLANS, EACH, RUNS = 300, 10, 30


@pytest.mark.share(5)
@pytest.mark.parametrize("first", range(0, PLANS, EACH))
def test_plans(first):
    for seed in range(first, first + EACH):
        check(seed)


def test_plans_have_everything():
    cases = [case_of(seed) for seed in range(PLANS)]
    plans = [case.plans[0] for case in cases]
    assert {name for world in (2, 3, 4, 6) for name in schemes(world)} <= {plan.scheme.name for plan in plans}
    assert {plan.dtype for plan in plans} == set(DTYPES)
    assert {(plan.sizes.q_heads > plan.sizes.kv_heads, plan.keep) for plan in plans} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }
    assert min(case.layers for case in cases) == 2
    assert {case.kinds[0] for case in cases} == set(KINDS)
    assert {case.kinds[1] for case in cases} == set(LAYOUTS)


@pytest.mark.share(11)
@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    mistake = MISTAKES[name]
    ends = [tried(mistake, seed) for seed in range(RUNS)]
    allowed = {mistake.found} | ({DeadlockError} if mistake.found == "wrong" else set())
    caught = sum(end in allowed for end in ends)
    assert caught >= RUNS - 1, f"{name}: found in {caught} of {RUNS} runs"


def test_enough_kinds_of_mistakes():
    assert len(MISTAKES) >= 12
    assert sum(bool(mistake.changes) for mistake in MISTAKES.values()) >= 12


# What differs from a mistake in one thing, and is right.
RIGHT = {
    "several batches in the same order": Mistake("", set={"MAX_BATCH": 2}),
    "messages that are not recorded, but held until they are over": Mistake("", (NOT_HELD,), records=False),
    "messages that are let go early, but recorded": Mistake("", (*in_run(START, LET_GO), NOT_HELD)),
    "messages that are let go early, but held by their buffers": Mistake("", in_run(START, LET_GO), records=False),
    "a second wait": Mistake("", in_run("wait_all(works)", "wait_all(works * 2)")),
    "receives before sends": Mistake(
        "", in_start("dist.batch_isend_irecv(lists[n])", "dist.batch_isend_irecv(lists[n][::-1])")
    ),
}  # fmt: skip


@pytest.mark.share(3)
@pytest.mark.parametrize("name", RIGHT)
def test_no_false_alarm(name):
    assert {tried(RIGHT[name], seed) for seed in range(8)} == {"right"}


# -- the simulation itself ---------------------------------------------------------------------------------------------


def test_nothing_runs_before_its_turn():
    simulation = Simulation(1, seed=0, ahead=1.0)
    with simulation.host(0) as gpu:
        x = gpu.upload(torch.arange(4.0))
        y = (x + 1).mul_(2)[1:]
    assert gpu.read(y).isnan().all()
    simulation.drain()
    assert gpu.read(y).tolist() == [4.0, 6.0, 8.0]


def test_memory_is_handed_out_again_at_once_unless_recorded():
    simulation = Simulation(1, seed=0, ahead=1.0)
    for records in (False, True):
        with simulation.host(0) as gpu:
            x = torch.empty(100, device="meta")
            block = gpu.memory.place(x).block
            if records:
                gpu.comm.add(Batch(gpu, [], []))
                gpu.memory.record(x, gpu.comm)
            del x
            y = torch.empty(100, device="meta")
            assert (gpu.memory.place(y).block is block) != records
            simulation.drain()
            z = torch.empty(100, device="meta")
            assert (gpu.memory.place(z).block is block) == records
            del y, z


def test_orders_differ_from_seed_to_seed():
    """And so does what a race gives: the simulation is not one fixed order."""
    seen = set()
    for seed in range(30):
        simulation = Simulation(1, seed)
        with simulation.host(0) as gpu:
            x = gpu.upload(torch.zeros(1))
            x.add_(1)
            with simulation.on(gpu.side):
                x.mul_(3)
        simulation.drain()
        seen.add(gpu.read(x).item())
    assert seen == {1.0, 3.0}


@pytest.mark.parametrize(
    ("error", "act"),
    [
        (HostWaitError, lambda x: x.sum().item()),
        (HostWaitError, lambda x: bool((x > 0).any())),
        (HostWaitError, lambda x: x.cpu()),
        (HostWaitError, lambda x: x.to("cpu", torch.float64)),
        (HostWaitError, lambda x: torch.empty(4).copy_(x)),
        (HostWaitError, lambda x: x.nonzero()),
        (HostWaitError, lambda x: x[x > 0]),
        (HostWaitError, lambda x: torch.equal(x, x)),
        (HostWaitError, lambda x: x.masked_select(x > 0)),
        (HostCopyError, lambda x: x.copy_(torch.zeros(4))),
        (HostCopyError, lambda x: torch.zeros(4).to(x.device)),
        (HostCopyError, lambda x: torch.tensor([1.0, 2.0]).to(x.device, torch.float16)),
        (None, lambda x: torch.zeros(4, device=x.device)),
        (None, lambda x: torch.where(x > 0, x, 1.0)),
        (None, lambda x: x * torch.tensor(2.0)),
        (None, lambda x: torch.zeros(4).tolist()),
    ],
)
def test_host_waits_and_copies(error, act):
    for mode in (NoHostWaits(), Simulation(1, 0).host(0)):
        x = torch.empty(4, device="meta")
        with mode as gpu:
            if not isinstance(mode, NoHostWaits):
                x = gpu.upload(torch.ones(4))
                gpu.memory.records = True
            if error is None or (error is HostCopyError and not isinstance(mode, NoHostWaits)):
                act(x)  # what is not a warm call may copy
            else:
                with pytest.raises(error):
                    act(x)


# -- warm calls --------------------------------------------------------------------------------------------------------


@pytest.mark.share(3)
@pytest.mark.parametrize("scheme", schemes(8))
def test_warm_calls_neither_wait_nor_copy(scheme):
    """At the size of a job; the first call copies tables of rows, which shows that copies are seen."""
    lengths = [700, 1, 90, 5000, 33, 2000, 368]
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=8, seq_len=sum(lengths))
    plan = ls.plan(mask, layout, q_heads=8, kv_heads=8, head_dim=64, dtype="bfloat16", scheme=scheme)
    copied = 0
    for rank in (0, 3, 7):
        tokens = int(layout.num_tokens[rank])
        q, k, v = (torch.zeros(1, 8, tokens, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
        job = Job(plan, rank, Flash(op=no_forward, backward_op=no_backward), 0.1, torch.bfloat16)
        try:
            with NoHostWaits():
                drive(Forward(job, q, k, v).program(saves=True))
        except HostCopyError:
            copied += 1
        out, lse, kept = drive(Forward(job, q, k, v).program(saves=True))
        drive(Backward(job, Saved(q, k, v, out, lse, kept), out).program())
        with NoHostWaits():
            drive(Forward(job, q, k, v).program(saves=True))
            drive(Backward(job, Saved(q, k, v, out, lse, kept), out).program())
    assert copied


# -- memory of messages ------------------------------------------------------------------------------------------------


def test_messages_take_memory_again(monkeypatch):
    """With the host far ahead, a ring needs memory for a few messages, and not for those of all its steps."""

    def reserved():
        case = case_of(6, worlds=(6,), layers=(1,), tokens=(96, 97), name="ring", dense=True)
        blocks = {}
        record = Memory.record

        def noted(memory, tensor, stream):
            block = memory.place(tensor).block
            blocks[block] = block.size
            record(memory, tensor, stream)

        with monkeypatch.context() as patch:
            patch.setattr(Memory, "record", noted)
            on_gpus(case, 6, ahead=1.0)
        return sum(blocks.values())

    again = reserved()
    monkeypatch.setattr(Buffers, "take", lambda _, size, device: torch.empty(size, dtype=torch.uint8, device=device))
    assert again < 0.65 * reserved()


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("first", range(0, 20, 5))
def test_a_captured_pass(first):
    """Forward and backward as one graph for each rank, launched twice with other data, and an eager pass after it."""
    for seed in range(first, first + 5):
        case = case_of(seed, layers=(1,), tokens=(8, 24), worlds=(2, 3, 4))
        others = [other_inputs(case, 1000 + 2 * seed + number) for number in range(2)]
        expected = [other.plainly() for other in others]
        launched, eager = replayed(case, others, seed, AHEAD[seed % 3])
        for number in range(2):
            assert same([found[number] for found in launched], expected[number]), f"{case}, launch {number}"
        assert same(eager, expected[1]), f"{case}, eager"


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("no wait before messages are unpacked", UnjoinedError),
        ("a wait on a stream that is not the current one", UnjoinedError),
        ("the host looks at a message", HostWaitError),
        ("sizes are copied from the host", HostCopyError),
    ],
)
def test_captures_that_fail(name, error):
    for seed in range(3):
        case = case_of(seed, worlds=(3,), layers=(1,), tokens=(9, 16), name=MISTAKES[name].schemes[0], dense=True)
        with pytest.raises(error), MISTAKES[name].made():
            replayed(case, [other_inputs(case, seed)], seed, AHEAD[0])


def test_a_first_call_cannot_be_captured():
    """It copies tables of rows, where there are any; the eager call before a capture is there for this."""
    refused = 0
    for seed in range(12):
        case = case_of(seed, layers=(1,), tokens=(16, 24))
        simulation = Simulation(len(case.plans), seed)
        case.operators.simulation = simulation
        inputs = [simulation.gpus[0].upload(t) for t in case.shards[0][0]]
        try:
            with simulated(SimulatedNccl(simulation)), capturing(simulation, 0):
                run_pass(case, simulation, 0, inputs)
        except HostCopyError:
            refused += 1
    assert refused >= 3


def test_results_compare_all_bits():
    case = case_of(5)
    expected = case.plainly()
    found, simulation = on_gpus(case, 5, ahead=AHEAD[0])
    assert same(found, expected)
    assert simulation.num_run > 100
    found[-1][-1].view(-1)[-1] += 1e-3
    assert not same(found, expected)
