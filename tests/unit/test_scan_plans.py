"""Scan plans: proofs that can fail, schemes told apart, bytes in closed form."""

from dataclasses import replace

import pytest

import longspan as ls
from longspan.errors import PlanError, ScheduleError
from longspan.layouts import Layout
from longspan.planning.scan_steps import ChainPiece, Fold, ScanRole, ScanStep, StateTransfer
from longspan.planning.validator import validate_scan
from longspan.spans import Span
from tests.spread_cases import SCHEMES, problem

DENSE = {"heads": 2, "keys": 3, "values": 5, "maps": "matrix"}


ZIGZAG = ls.layouts.zigzag(32, 4)
WITH_AN_EMPTY_RANK = Layout.from_spans(32, [ZIGZAG.spans(rank) for rank in range(4)] + [[]])


def made(scheme, documents=(19, 13), layout=ZIGZAG, **more):
    return ls.scan_plan(list(documents), layout, **(DENSE | {"scheme": scheme} | more))


# -- the proof can fail ------------------------------------------------------------------------------------------------


def changed(schedule, change):
    """The schedule with change(rank, number, step) in place of every step."""
    ranks = tuple(tuple(change(r, n, step) for n, step in enumerate(s)) for r, s in enumerate(schedule.ranks))
    return replace(schedule, ranks=ranks)


def moved(step, old, new):
    """The step with transfers `new` in place of `old`, for the ends that are concerned."""
    kept = [t for t in step.transfers if t != old]
    return replace(step, transfers=tuple(kept + list(new)))


def with_transfers(schedule, old, number, new, other=None):
    """One transfer is replaced by others, of the same or of another step, at all ends."""
    other = number if other is None else other

    def change(rank, at, step):
        if at == number:
            step = moved(step, old, [])
        if at == other:
            step = replace(step, transfers=(*step.transfers, *(t for t in new if rank in (t.src, t.dst))))
        return step

    return changed(schedule, change)


def with_folds(schedule, rank, number, folds):
    return changed(schedule, lambda r, n, step: replace(step, computes=folds) if (r, n) == (rank, number) else step)


def broken_transfers(schedule):
    """(what was done, schedule) for every transfer. The last rank holds nothing."""
    world, last = schedule.world_size, schedule.num_steps - 1
    for number, t in list(schedule.transfers()):
        piece = t.piece
        role = ScanRole.MAP if piece.role is ScanRole.STATE else ScanRole.STATE
        others = {
            "to another rank": replace(t, dst=world - 1),
            "from another rank": replace(t, src=world - 1),
            "to nobody": replace(t, dst=world),
            "to itself": replace(t, dst=t.src),
            "of another chain": replace(t, piece=replace(piece, chain=1 - piece.chain)),
            "of no chain": replace(t, piece=replace(piece, chain=9)),
            "of more segments": replace(t, piece=replace(piece, stop=piece.stop + 1)),
            "of another role": replace(t, piece=replace(piece, role=role)),
            "of other batch rows": replace(t, piece=replace(piece, batch=Span(0, 2))),
        }
        for kind, other in others.items():
            yield kind, with_transfers(schedule, t, number, [other])
        yield "dropped", with_transfers(schedule, t, number, [])
        yield "listed twice", with_transfers(schedule, t, number, [t, t])
        yield "sent again", with_transfers(with_transfers(schedule, t, number, [t]), None, number, [t], last)
        yield (
            "known to its sender only",
            changed(schedule, lambda r, n, s, t=t, k=number: moved(s, t, []) if (r, n) == (t.dst, k) else s),
        )
        if number < last:
            yield "too late", with_transfers(schedule, t, number, [t], last)


def broken_folds(schedule):
    for rank, steps in enumerate(schedule.ranks):
        for number, step in enumerate(steps):
            for at, fold in enumerate(step.computes):
                before, after = step.computes[:at], step.computes[at + 1 :]
                others = {
                    "fold dropped": (),
                    "fold doubled": (fold, fold),
                    "fold the wrong way": (Fold(rank, fold.right, fold.left),),
                    "fold of another rank": (replace(fold, rank=(rank + 1) % schedule.world_size),),
                    "fold that leaves one out": (replace(fold, right=replace(fold.right, start=fold.right.start + 1)),),
                }
                for kind, other in others.items():
                    yield kind, with_folds(schedule, rank, number, (*before, *other, *after))
                if any(f.whole in (fold.left, fold.right) for f in before):
                    yield "folds in another order", with_folds(schedule, rank, number, (fold, *before, *after))


@pytest.mark.parametrize("scheme", SCHEMES[:-1])
def test_the_proof_finds_what_was_broken(scheme):
    """Every transfer and every fold of both directions, broken in each of 20 ways."""
    plan = made(scheme, layout=WITH_AN_EMPTY_RANK)
    forward, backward = plan.schedule(), plan.schedule("backward")
    validate_scan(forward, backward, plan.chains)
    survivors, kinds = [], set()
    for direction, schedule in (("forward", forward), ("backward", backward)):
        for kind, broken in (*broken_transfers(schedule), *broken_folds(schedule)):
            kinds.add(kind)
            both = (broken, backward) if direction == "forward" else (forward, broken)
            try:
                validate_scan(*both, plan.chains)
            except ScheduleError:
                continue
            survivors.append((direction, kind))
    assert len(kinds) >= 19, kinds
    # What is sent in an early step for use in a late one may as well come later.
    assert {kind for _, kind in survivors} <= {"too late"}, survivors


def test_the_proof_wants_both_directions_of_one_layout():
    plan, other = made("doubling"), made("doubling", layout=ls.layouts.contiguous(32, 4))
    forward, backward = plan.schedule(), plan.schedule("backward")
    for pair in ((backward, forward), (forward, forward), (other.schedule(), backward)):
        with pytest.raises(ScheduleError, match="was expected, but got"):
            validate_scan(*pair, plan.chains)
    long = {"documents": [32], "layout": ls.layouts.contiguous(32, 8)}
    plan = made("chain", **long)
    with pytest.raises(ScheduleError, match=r"which it did not fold before|has no gradient"):
        validate_scan(plan.schedule(), made("doubling", **long).schedule("backward"), plan.chains)


def test_what_the_proof_says():
    plan = made("chain", documents=[32], layout=ls.layouts.contiguous(32, 4))
    forward, backward = plan.schedule(), plan.schedule("backward")
    number, t = next(forward.transfers())
    with pytest.raises(ScheduleError, match=r"rank 1 .*state\[0:1\]c0b0:1 .*step 1"):
        validate_scan(with_transfers(forward, t, number, []), backward, plan.chains)
    last = with_transfers(forward, *next((t, n) for n, t in forward.transfers() if t.dst == 3), [])
    with pytest.raises(ScheduleError, match=r"rank 3 .*segment 3 of chain 0.*\[0:3\)"):
        validate_scan(last, backward, plan.chains)
    number, t = next((n, t) for n, t in backward.transfers() if t.dst == 0)
    with pytest.raises(ScheduleError, match=r"segment 0 of chain 0.*\[\]"):
        validate_scan(forward, with_transfers(backward, *(t, number), []), plan.chains)


# -- plans -------------------------------------------------------------------------------------------------------------


def test_fingerprints_tell_plans_apart():
    """Of everything that changes what ranks send to each other; and the same plan has the same one."""
    one = {"layout": ls.layouts.zigzag(32, 8), "scheme": "chain", "machine": "h100"}
    other = (
        {}, {"scheme": "doubling"}, {"layout": ls.layouts.contiguous(32, 8)},
        {"documents": [20, 12]}, {"batch": 2}, {"dtype": "float64"}, {"keys": 5}, {"maps": "scalar"},
    )  # fmt: skip
    plans = [made(**(one | change)) for change in other]
    assert len({plan.fingerprint for plan in plans}) == len(plans)
    assert plans[0] == made(**one)
    assert plans[0].schedule().text() != plans[1].schedule().text()


@pytest.mark.parametrize("world", [2, 5, 8])
def test_bytes_in_closed_form(world):
    """One document, one segment a rank: what the last rank receives by each scheme, forward and backward."""
    layout = ls.layouts.contiguous(64, world)
    state = 2 * 3 * 5 * 4
    plan = made("chain", documents=[64], layout=layout)
    assert plan.bytes_received(world - 1) == plan.bytes_received(0, "backward") == state
    rounds = (world - 2).bit_length()
    plan = made("doubling", documents=[64], layout=layout)
    assert plan.draft.num_steps == rounds + 2
    assert plan.bytes_received(world - 1) == state


def test_the_cheapest_scheme_is_chosen_and_told():
    plan = made("auto", layout=ls.layouts.contiguous(32, 16))
    assert plan.reasons[0].chosen
    assert [r.seconds for r in plan.reasons] == sorted(r.seconds for r in plan.reasons)
    assert {r.scheme for r in plan.reasons} == {"chain", "doubling"}
    assert plan.scheme in plan.explain()
    for reason in plan.reasons:  # the figures are those of the plan that the name gives
        named = made(reason.scheme, layout=ls.layouts.contiguous(32, 16))
        most = max(named.bytes_received(r) + named.bytes_received(r, "backward") for r in range(16))
        assert reason.bytes_received == most


def test_documents_within_a_rank_send_nothing():
    plan = made("auto", documents=[8, 8, 8, 8], layout=ls.layouts.contiguous(32, 4))
    assert plan.draft.num_steps == 0
    assert all(plan.bytes_received(rank) == 0 for rank in range(4))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"scheme": "ring"}, "must be one of chain, doubling and auto"),
        ({"scheme": "exchange"}, "must be one of chain"),
        ({"scheme": 3}, "scheme"),
        ({"maps": "dense"}, "maps must be"),
        ({"dtype": "bfloat16"}, "dtype must be"),
        ({"heads": 0}, "heads"),
        ({"batch": 1.5}, "batch"),
        ({"documents": [3]}, "add up to 3"),
        ({"documents": [[16, 16], [32]]}, "2 batch rows, but the plan is for batch = 1"),
        ({"machine": 3}, "and machine a name"),
        ({"layout": [1, 2]}, "layout must be a Layout"),
    ],
)
def test_plans_that_are_refused(asked, words):
    given = {"documents": [32], "layout": ls.layouts.zigzag(32, 4), "scheme": "auto"} | DENSE | asked
    with pytest.raises(PlanError, match=words):
        ls.scan_plan(given.pop("documents"), given.pop("layout"), **given)


def test_no_tokens():
    plan = ls.scan_plan([], Layout.from_spans(0, [[], []]), **DENSE)
    plan.validate()
    assert plan.draft.num_steps == 0


def test_a_step_is_plain_data():
    plan = made("doubling")
    step = next(step for step in plan.steps(2) if step.computes and step.transfers)
    assert isinstance(step, ScanStep)
    assert all(isinstance(t, StateTransfer) and isinstance(t.piece, ChainPiece) for t in step.transfers)
    assert problem(0).plan() == problem(0).plan()
