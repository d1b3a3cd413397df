"""Agreement, headers, records and settings: what is compared, what is refused, what it costs. Verdicts of processes are
in test_faults.py."""

from contextlib import suppress
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import AgreementError, PlanError, RankError
from longspan.run import agreement
from longspan.run.agreement import Header
from longspan.run.group import Safety, safety, use_safety
from longspan.watch.detector import Direction, Phase, Status, Verdict
from tests.gloo import trust_work
from tests.pool import pool

HEADER = Header(b"12345678", 3, -1, 1, 2, 0, 1, 77, 24, b"float32\0")
STATUS = Status(9, 3, Direction.BACKWARD, 1, 4, Phase.WAITING, True, 12, b"abcdefgh", pending=2)


def message():
    return torch.randint(0, 256, (24,), dtype=torch.uint8)


# -- headers --------------------------------------------------------------------------------------------------------


def test_a_message_comes_out_as_it_went_in():
    sent = message()
    assert torch.equal(agreement.remove_header(HEADER, agreement.add_header(HEADER, sent)), sent)


@pytest.mark.parametrize("name", [f.name for f in fields(Header) if f.name != "checksum"])
def test_every_field_of_a_header_counts(name):
    value = getattr(HEADER, name)
    other = b"87654321" if isinstance(value, bytes) else value + 1
    with pytest.raises(RankError, match=rf"differs .* in {name}:"):
        agreement.remove_header(HEADER, agreement.add_header(replace(HEADER, **{name: other}), message()))


@pytest.mark.parametrize("place", [0, 1, 23])
def test_a_changed_byte_is_found(place):
    whole = agreement.add_header(HEADER, message())
    whole[agreement.HEADER_SIZE + place] += 1
    with pytest.raises(RankError, match="checksum"):
        agreement.remove_header(HEADER, whole)


def test_a_short_message_is_found():
    whole, buffer = agreement.add_header(HEADER, message()), torch.zeros(agreement.HEADER_SIZE + 24, dtype=torch.uint8)
    buffer[: agreement.HEADER_SIZE + 12] = whole[: agreement.HEADER_SIZE + 12]  # what Gloo leaves of a short send
    if buffer.equal(whole):
        return
    with pytest.raises(RankError, match="checksum"):
        agreement.remove_header(HEADER, buffer)


def test_a_message_without_header_is_found():
    with pytest.raises(RankError, match="without a header"):
        agreement.remove_header(HEADER, torch.zeros(agreement.HEADER_SIZE + 24, dtype=torch.uint8))


# -- records --------------------------------------------------------------------------------------------------------


def test_records_come_back():
    assert Status.parse(STATUS.pack()) == STATUS
    for spoils in (False, True):
        fault = Verdict(2, "ValueError: no", spoils)
        assert Verdict.parse(fault.pack(), 4) == fault
    assert len(Verdict.parse(Verdict(2, "x" * 5000).pack(), 4).text) == 1000


@given(st.binary(max_size=200))
def test_whatever_a_stranger_writes_is_refused(raw):
    for parse in (Status.parse, lambda raw: Verdict.parse(raw, 4)):
        with pytest.raises(RankError, match=r"not a (status|fault) of Longspan"):
            parse(raw)


@given(st.integers(0, len(STATUS.pack()) - 1), st.integers(0, 255))
def test_a_changed_status_is_a_status_or_refused(place, value):
    raw = bytearray(STATUS.pack())
    raw[place] = value
    with suppress(RankError):
        assert isinstance(str(Status.parse(bytes(raw))), str)


def test_texts_of_faults_cannot_drive_a_terminal():
    assert "\x1b" not in Verdict.parse(Verdict(0, "\x1b[31mred").pack(), 2).text


def test_a_fault_that_names_no_rank_of_the_group_is_refused():
    with pytest.raises(RankError, match="not a fault"):
        Verdict.parse(Verdict(9, "x").pack(), 4)


# -- agreement ------------------------------------------------------------------------------------------------------

RECORD = agreement.Record(*[f"v{i}" for i in range(len(fields(agreement.Record)))])


def test_equal_records_agree():
    agreement.compare([RECORD.row()] * 5)


@pytest.mark.parametrize("name", [f.name for f in fields(agreement.Record)])
def test_every_field_is_compared_and_named(name):
    rows = [RECORD.row()] * 3 + [replace(RECORD, **{name: "other"}).row()]
    with pytest.raises(AgreementError, match=rf"no data was sent\. {name}: v\d+ on ranks 0, 1, 2, other on rank 3"):
        agreement.compare(rows)


def test_long_texts_differ_at_their_end():
    one, other = ("q" * 200 + end for end in "ab")
    with pytest.raises(AgreementError, match="scores"):
        agreement.compare([replace(RECORD, scores=text).row() for text in (one, other)])
    assert all(len(replace(RECORD, scores=text).row()) == agreement.RECORD_SIZE for text in (one, "", "é" * 40))


def test_what_came_over_the_wire_is_safe_to_print():
    with pytest.raises(AgreementError) as caught:
        agreement.compare([RECORD.row(), bytes(range(256)) * 3])
    assert caught.value.args[0].isprintable()


@pytest.mark.timeout(300)
def test_a_repeated_plan_costs_no_comparison():
    for found in pool(3).run(trust_work.agreements, timeout=200):
        assert found == [1, 0, 1, 0, 0]


@pytest.mark.timeout(300)
def test_ranks_that_disagree_are_all_refused_and_may_go_on():
    said = pool(3).run(trust_work.disagreed_then_agreed, timeout=200)
    assert len({text for text, _ in said}) == 1
    assert "scale: 0.1 on rank 0, 0.2 on rank 1" in said[0][0]
    assert all(right for _, right in said)


# -- watching -------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.parametrize("scheme", ["ring", "exchange", "all_gather", "all_to_all"])
def test_checked_mode_changes_no_bit(scheme):
    assert pool(2).run(trust_work.checked_and_not, scheme, timeout=200) == [(True, True)] * 2


@pytest.mark.timeout(300)
def test_a_late_rank_that_lives_is_waited_for():
    assert all(pool(3).run(trust_work.late, 5.0, timeout=200))


@pytest.mark.timeout(300)
def test_turned_off_it_leaves_nothing():
    assert pool(2).run(trust_work.unwatched, timeout=200) == [(0, True)] * 2


@pytest.mark.timeout(300)
def test_a_call_that_all_refuse_harms_nothing():
    assert all(pool(3).run(trust_work.refused_by_all, timeout=200))


@pytest.mark.timeout(300)
def test_a_refusal_that_one_rank_swallows_is_told():
    said = pool(2).run(trust_work.refused_by_one_then_swallowed, timeout=200)
    assert [name for name, _ in said[0]] == ["RankError", "RankError"]
    assert "rank 1 refused call 2: PlanError: scale must be" in said[0][0][1]
    assert [name for name, _ in said[1]] == ["PlanError", "RankError"]
    pool(2).end()  # with calls under way that nobody will finish


@pytest.mark.timeout(300)
def test_loops_that_end_early_on_purpose_harm_nothing():
    assert all(pool(2).run(trust_work.ended_on_purpose, timeout=200))


@pytest.mark.timeout(300)
def test_compiled_calls_have_the_settings_of_where_they_run():
    assert pool(2).run(trust_work.compiled_settings, timeout=200) == [(25.0, True)] * 2


@pytest.mark.timeout(300)
def test_a_destroyed_group_is_let_go():
    assert pool(2).run(trust_work.groups_are_let_go, timeout=200) == [(True, True)] * 2


def test_settings_are_scoped_and_checked():
    assert safety() == Safety()
    with use_safety(Safety(patience=1.0, checked=True)):
        assert safety().checked
    assert safety() == Safety()
    for bad in ({"patience": -1}, {"patience": 0.1}, {"timeout": "long"}, {"timeout": True}):
        with pytest.raises(PlanError, match=r"seconds|0\.25 s"):
            Safety(**bad)
