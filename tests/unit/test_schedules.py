"""Schedules: thousands of random plans proved, closed forms, passes, simulator."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from longspan import layouts, masks
from longspan.errors import PlanError, ScheduleError
from longspan.planning import MACHINES, Piece, Problem, Role, Sizes, Step, backward, scheme, simulate, table, validate
from longspan.planning.cost import live_bytes
from longspan.planning.machine import rank_seconds
from longspan.spans import Span
from tests.cases import random_case
from tests.pruning import prune

NUM_PLANS = 2000
NUM_CHUNKS = 20
SIZES = Sizes(8, 2, 64, 64, 2)
SCHEMES = ("ring", "all_gather", "exchange", "all_to_all", "hybrid(2)", "hybrid(2,exchange)", "hybrid(2,all_gather)")
SCHEMES += ("staged", "hybrid(2,staged)")


def made(name, mask, layout, sizes=SIZES, **options):
    return scheme(name, Problem.make(mask, layout, sizes, **options)).schedule()


@pytest.mark.share(20)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_random_plans_are_proved(chunk):
    for seed in range(chunk * NUM_PLANS // NUM_CHUNKS, (chunk + 1) * NUM_PLANS // NUM_CHUNKS):
        case = random_case(seed)
        try:
            forward = scheme(case.scheme, case.problem()).schedule()
            validate(forward, case.mask)
            validate(backward(forward, keep=bool(seed % 2)), case.mask)
            if seed % 10 == 0:
                pruned = prune(forward)
                validate(pruned, case.mask)
                validate(backward(pruned, keep=False), case.mask)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case}\n{error}") from error


# -- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_ring_and_all_gather_bytes_equal_their_closed_forms(world):
    total = 32 * world
    row = SIZES.kv_heads * SIZES.row_bytes(Role.KV)
    grad = SIZES.kv_heads * SIZES.row_bytes(Role.DKV)
    rows = total - total // world
    for mask in (masks.causal(), masks.full(), masks.documents([total // 2, total // 2])):
        for name in ("ring", "all_gather"):
            forward = made(name, mask, layouts.contiguous(total, world))
            kept = backward(forward, keep=True)
            again = backward(forward, keep=False)
            for rank in range(world):
                assert forward.bytes_received(rank) == rows * row
                assert kept.bytes_received(rank) == rows * grad
                # A ring keeps the block that ends its journey here, so one hop less comes back.
                back = rows - (total // world if name == "ring" and world > 1 else 0)
                assert again.bytes_received(rank) == rows * grad + back * row


def test_all_to_all_bytes_equal_their_closed_form():
    world, total = 4, 128
    sizes = Sizes(8, 4, 64, 32, 2)
    forward = made("all_to_all", masks.full(), layouts.zigzag(total, world), sizes)
    rows = total - total // world
    q = rows * sizes.q_heads // world * sizes.row_bytes(Role.Q)
    kv = rows * sizes.kv_heads // world * sizes.row_bytes(Role.KV)
    out = total // world * (sizes.q_heads - sizes.q_heads // world) * sizes.row_bytes(Role.OUT)
    assert all(forward.bytes_received(rank) == q + kv + out for rank in range(world))


def judge():
    path = Path(__file__).parents[3] / "shared" / "judges" / "layout.py"
    if not path.exists():
        pytest.skip("the independent judge ../shared/judges/layout.py is not here")
    spec = importlib.util.spec_from_file_location("layout_judge", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("node", [None, 8])
@pytest.mark.parametrize("kind", ["zigzag", "balanced"])
def test_exchange_bytes_equal_the_judges_rows(kind, node):
    independent = judge()
    total, world = 1 << 16, 16
    lengths = independent.document_lengths("mixed", total)
    for window in (None, 512):
        mask = masks.documents(lengths) & (masks.causal() if window is None else masks.sliding_window(window - 1))
        layout = layouts.zigzag(total, world) if kind == "zigzag" else layouts.balanced(mask, world_size=world)
        score = independent.score([[(s.start, s.stop) for s in layout.spans(r)] for r in range(world)], lengths, window)
        forward = made("exchange", mask, layout, node=node)
        row = SIZES.kv_heads * SIZES.row_bytes(Role.KV)
        used = [_rows_used(forward, rank) for rank in range(world)]
        assert sum(used) == round(score["rows_mean"] * total * world)
        assert max(used) == round(score["rows_max"] * total)
        if node is None:
            assert [forward.bytes_received(rank) for rank in range(world)] == [rows * row for rows in used]


def _rows_used(schedule, rank):
    held = {p for span in schedule.layout.spans(rank) for p in range(span.start, span.stop)}
    used = {
        p for s in schedule.ranks[rank] for c in s.computes for span in c.kv.spans for p in range(span.start, span.stop)
    }
    return len(used - held)


def test_rows_from_other_nodes_enter_a_node_once():
    total, world, node = 4096, 16, 4
    mask = masks.documents([3000, 1096]) & masks.causal()
    layout = layouts.zigzag(total, world)
    flat, levels = (made("exchange", mask, layout, node=n) for n in (None, node))

    def crossing(schedule):
        return [
            (p, t.dst // node)
            for _, t in schedule.transfers()
            if t.src // node != t.dst // node
            for span in t.piece.spans
            for p in range(span.start, span.stop)
        ]

    assert sorted(set(crossing(flat))) == sorted(crossing(levels))  # the same rows, each once per node
    assert len(crossing(levels)) < len(crossing(flat)) / 2


def test_pruning_an_all_gather_gives_the_exchange():
    mask = masks.documents([300, 212]) & masks.causal()
    layout = layouts.zigzag(512, 8)
    gathered, exchanged = made("all_gather", mask, layout), made("exchange", mask, layout)
    pruned = prune(gathered)
    assert [pruned.bytes_received(r) for r in range(8)] == [exchanged.bytes_received(r) for r in range(8)]
    ring = made("ring", mask, layout)
    assert sum(prune(ring).bytes_received(r) for r in range(8)) < sum(ring.bytes_received(r) for r in range(8))


def test_exchange_stays_within_its_memory_bound():
    mask, layout = masks.causal(4096), layouts.zigzag(4096, 8)
    for node in (None, 4):
        free = made("exchange", mask, layout, node=node)
        bound = made("exchange", mask, layout, node=node, max_rows=600)
        row = SIZES.kv_heads * SIZES.row_bytes(Role.KV)
        most = [max(_fetched_rows(s, r) for r in range(8)) for s in (free, bound)]
        assert most[1] <= 600 < most[0]
        assert bound.num_steps > free.num_steps
        assert sum(bound.bytes_received(r) for r in range(8)) <= sum(free.bytes_received(r) for r in range(8)) * 1.05
        assert row > 0


def _fetched_rows(schedule, rank):
    live = np.zeros(schedule.num_steps + 1, dtype=int)
    for number, step in enumerate(schedule.ranks[rank]):
        for t in step.transfers:
            if t.dst == rank:
                live[number : t.until + 1] += t.piece.num_tokens
    return live.max()


def test_stages_stay_within_the_memory_bound_of_an_exchange():
    mask, layout = masks.causal(4096), layouts.zigzag(4096, 8)
    for node in (None, 4):
        bound = made("staged", mask, layout, node=node, max_rows=600)
        assert max(_fetched_rows(bound, r) for r in range(8)) <= 600


# -- messages that start early --------------------------------------------------------------------------------------


def changed_transfers(schedule, change):
    """The schedule with other transfers; `change` takes a rank and a transfer."""
    ranks = [
        tuple(replace(step, transfers=tuple(change(rank, t) for t in step.transfers)) for step in steps)
        for rank, steps in enumerate(schedule.ranks)
    ]
    return replace(schedule, ranks=tuple(ranks))


def both_directions(name, mask):
    forward = made(name, mask, layouts.zigzag(512, 8), node=4)
    return forward, backward(forward, keep=False)


@pytest.mark.parametrize("name", ["staged", "hybrid(2,staged)", "hybrid(4,staged)"])
def test_early_messages_are_due_a_step_later(name):
    mask = masks.causal(512)
    for schedule in both_directions(name, mask):
        assert {t.early for _, t in schedule.transfers()} == {0, 1}
        validate(schedule, mask)


def test_a_wait_that_is_too_late_or_missing_is_refused():
    mask = masks.causal(512)
    far = 99
    for schedule in both_directions("staged", mask):
        for change, about in (
            (lambda _, t: replace(t, early=t.early + bool(t.early)), "not hold|not held|arrives|is due"),
            (lambda _, t: replace(t, early=far * bool(t.early)), "is due in step"),  # nobody waits for it
            (lambda rank, t: replace(t, early=t.early * (rank == t.src)), "does not expect it|does not send it"),
            (lambda _, t: replace(t, early=-t.early), "is due in step"),
        ):
            with pytest.raises(ScheduleError, match=about):
                validate(changed_transfers(schedule, change), mask)
        with pytest.raises(ScheduleError, match="are due in step"):
            simulate(changed_transfers(schedule, lambda _, t: replace(t, early=far)), MACHINES["h100"])


def test_early_messages_hide_behind_more_than_one_step():
    """Without `early` the same stages wait for each other."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(9.5, 1.2, size=12).astype(int), 16)
    mask = masks.documents(lengths) & masks.causal()
    layout = layouts.balanced(mask, world_size=32)
    forward = made("hybrid(8,staged)", mask, layout, Sizes(32, 8, 128, 128, 2), node=8)
    ranks = []  # the same messages, each in the step that waits for it
    for steps in forward.ranks:
        late = [[] for _ in steps]
        for number, step in enumerate(steps):
            for t in step.transfers:
                late[number + t.early].append(replace(t, early=0, back=0))
        ranks.append(tuple(replace(s, transfers=tuple(t)) for s, t in zip(steps, late, strict=True)))
    late = replace(forward, ranks=tuple(ranks))
    validate(late, mask)
    for keep in (False, True):
        pair = [simulate(backward(schedule, keep=keep), MACHINES["b200-fa4"]).seconds for schedule in (forward, late)]
        assert pair[0] < 0.97 * pair[1]


def test_any_number_of_heads_fits_any_number_of_ranks():
    """Uneven heads are cut by query rows, so that work stays even: 5 heads on 4 ranks, 2 on 7, 3 KV heads on 8."""
    mask = masks.documents([700, 324]) & masks.causal()
    for q_heads, kv_heads, world in ((5, 5, 4), (2, 1, 7), (6, 3, 8), (1, 1, 3)):
        problem = Problem.make(mask, layouts.zigzag(1024, world), Sizes(q_heads, kv_heads, 64, 64, 2))
        bound = scheme("all_to_all", problem)
        validate(bound.schedule(), mask)
        assert bound.work.sum() == mask.area() * q_heads
        assert bound.work.max() / bound.work.mean() < 1.01


# -- the simulator --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMES)
def test_no_delay_makes_a_schedule_hang(name):
    mask = masks.documents([200, 312]) & masks.causal()
    rng = np.random.default_rng(7)
    forward = made(name, mask, layouts.zigzag(512, 8), node=4)
    for schedule in (forward, backward(forward, keep=False)):
        quick = simulate(schedule, MACHINES["h100"])
        assert list(quick.bytes_received) == [schedule.bytes_received(r) for r in range(8)]
        for _ in range(5):
            slow = simulate(schedule, MACHINES["h100"], delay=lambda step, src, dst: float(rng.exponential(1e-3)))
            assert slow.seconds > quick.seconds
            assert slow.bytes_received == quick.bytes_received


def test_thousand_ranks_exchange_and_finish():
    rng = np.random.default_rng(0)
    lengths = np.maximum(rng.lognormal(8.0, 1.5, size=600).astype(int), 16)
    mask = masks.documents(lengths) & masks.causal()
    layout = layouts.balanced(mask, world_size=1024)
    schedule = made("exchange", mask, layout, Sizes(32, 8, 128, 128, 2), node=8)
    seen = simulate(schedule, MACHINES["h100"])
    assert len(seen.finished) == 1024
    assert min(seen.finished) > 0
    assert sum(seen.bytes_received) == sum(schedule.bytes_received(r) for r in range(1024))


def test_single_rank_estimates_agree_with_the_simulation():
    mask = masks.causal(1 << 15)
    for name in SCHEMES:
        forward = made(name, mask, layouts.zigzag(1 << 15, 16), Sizes(32, 8, 128, 128, 2), node=8)
        for schedule in (forward, backward(forward, keep=False)):
            args = schedule.sizes, MACHINES["h100"], schedule.direction
            alone = max(rank_seconds(steps, rank, *args) for rank, steps in enumerate(schedule.ranks))
            assert alone <= simulate(schedule, MACHINES["h100"]).seconds * 1.0001
            assert simulate(schedule, MACHINES["h100"]).seconds <= alone * 1.15


def test_peak_bytes_of_a_ring_do_not_grow_with_ranks_but_of_an_all_gather_do():
    def peak(name, world):
        schedule = made(name, masks.causal(), layouts.zigzag(512 * world, world))
        return max(live_bytes(s, r, schedule.layout, SIZES, "forward").max() for r, s in enumerate(schedule.ranks))

    assert peak("ring", 8) <= peak("ring", 4) * 1.01
    more = 4 * 512 * SIZES.kv_heads * SIZES.row_bytes(Role.KV)  # what four more ranks send to everybody
    assert peak("all_gather", 8) >= peak("all_gather", 4) + more


# -- the validator can fail -----------------------------------------------------------------------------------------


def tampered(schedule, rank, number, change):
    steps = [list(s) for s in schedule.ranks]
    steps[rank][number] = change(steps[rank][number])
    return replace(schedule, ranks=tuple(map(tuple, steps)))


def drop_transfer(step):
    return Step(step.transfers[1:], step.computes)


def drop_compute(step):
    return Step(step.transfers, step.computes[1:])


def double_compute(step):
    return Step(step.transfers, (*step.computes, *step.computes))


def widen(step):
    compute = step.computes[0]
    band = replace(compute.bands[0], lo=None, hi=None)
    return Step(step.transfers, (replace(compute, bands=(band, *compute.bands[1:])), *step.computes[1:]))


def lose_rows(step):
    compute = step.computes[0]
    return Step(step.transfers, (replace(compute, bands=compute.bands[1:]), *step.computes[1:]))


def other_heads(step):
    compute = step.computes[0]
    return Step(step.transfers, (replace(compute, kv=replace(compute.kv, heads=Span(1, 2))), *step.computes[1:]))


MUTANTS = [
    ("ring", 0, 0, drop_transfer, "does not"),
    ("ring", 1, 1, drop_compute, "never computed"),
    ("ring", 1, 0, double_compute, "computed twice"),
    ("ring", 0, 0, widen, "hidden"),
    ("exchange", 2, 1, lose_rows, "never computed|outside"),
    ("exchange", 2, 0, other_heads, "do not use"),
    ("all_gather", 3, 1, drop_compute, "never computed"),
    ("all_to_all", 0, 2, drop_transfer, "does not|stay here"),
]


@pytest.mark.quick
@pytest.mark.parametrize(("name", "rank", "number", "change", "words"), MUTANTS)
def test_the_validator_finds_what_was_broken(name, rank, number, change, words):
    mask = masks.documents([40, 88]) & masks.causal()
    good = made(name, mask, layouts.zigzag(128, 4))
    validate(good, mask)
    with pytest.raises(ScheduleError, match=words) as caught:
        validate(tampered(good, rank, number, change), mask)
    assert "rank  step 0" in str(caught.value)
    assert "!!" in str(caught.value)


def everywhere(schedule, match, change):
    """The schedule with every transfer that matches changed, at both ends."""
    ranks = tuple(
        tuple(
            Step(tuple(x for t in step.transfers for x in (change(t) if match(i, t) else (t,))), step.computes)
            for i, step in enumerate(steps)
        )
        for steps in schedule.ranks
    )
    return replace(schedule, ranks=ranks)


@pytest.mark.quick
def test_the_validator_follows_rows_and_gradients():
    mask = masks.causal(128)
    forward = made("ring", mask, layouts.zigzag(128, 4))
    back = backward(forward, keep=False)
    validate(back, mask)

    def gone(i, t):
        return (i, t.src) == (0, 0)

    with pytest.raises(ScheduleError, match=r"not hold|not held"):
        validate(everywhere(forward, gone, lambda t: ()), mask)
    with pytest.raises(ScheduleError, match=r"not hold|not held"):
        validate(
            everywhere(forward, gone, lambda t: (replace(t, piece=Piece(Role.KV, t.piece.spans[:1], t.piece.heads)),)),
            mask,
        )
    with pytest.raises(ScheduleError, match="before it arrives"):
        validate(everywhere(forward, gone, lambda t: (replace(t, until=0),)), mask)
    gradients = [i for i, t in back.transfers() if t.piece.role is Role.DKV]
    for number in set(gradients):
        with pytest.raises(ScheduleError, match=r"stay here|lost"):
            validate(
                everywhere(
                    back, lambda i, t, n=number: i == n and t.piece.role is Role.DKV and t.src == 1, lambda t: ()
                ),
                mask,
            )
    with pytest.raises(ScheduleError, match=r"not hold|not held"):
        validate(replace(back, kept=((),) * 4), mask)


def test_the_simulator_names_the_message_nobody_offers():
    good = made("ring", masks.causal(128), layouts.zigzag(128, 4))
    broken = tampered(good, 0, 1, lambda step: Step(tuple(t for t in step.transfers if t.src != 0), step.computes))
    with pytest.raises(ScheduleError, match=r"step 1.*from rank 0 to rank 1"):
        simulate(broken, MACHINES["h100"])


def test_large_batches_are_cut_alike_at_both_ends():
    good = made("all_gather", masks.causal(), layouts.contiguous(600, 300))
    lists = [step.batches(300) for step in (good.ranks[0][0], good.ranks[200][0])]
    assert all(len({(t.src, t.dst) for t in batch}) <= 256 for found in lists for batch in found)
    shared = [[n for n, batch in enumerate(found) for t in batch if (t.src, t.dst) == (0, 200)] for found in lists]
    assert shared[0] == shared[1]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Sizes(6, 4, 64, 64, 2), "leaves 2 over"),
        (lambda: Sizes(0, 4, 64, 64, 2), "at least 1"),
        (lambda: made("tree", masks.causal(), layouts.zigzag(64, 4)), "must be one of ring, all_gather"),
        (lambda: made("hybrid(3)", masks.causal(), layouts.zigzag(64, 4)), "divisor of 4"),
        (
            lambda: made("ring", masks.per_head(masks.causal(), masks.full()), layouts.zigzag(64, 4)),
            "differs over 2 heads",
        ),
        (
            lambda: backward(backward(made("ring", masks.causal(), layouts.zigzag(64, 4)), keep=True), keep=True),
            "already",
        ),
    ],
)
def test_messages(call, words):
    with pytest.raises((ScheduleError, PlanError), match=words):
        call()


def test_table_reads_like_a_timetable():
    forward = made("ring", masks.causal(64), layouts.zigzag(64, 4))
    assert table(forward).splitlines()[:2] == [
        "rank  step 0    step 1    step 2    step 3",
        "0     >1 <3 *1  >1 <3 *1  >1 <3 *1  *1",
    ]
