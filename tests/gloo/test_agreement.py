"""Ranks compare a record of every new call: a difference raises on all of them, and nothing is sent."""

from dataclasses import fields, replace

import pytest

from longspan.errors import AgreementError
from longspan.run import agreement
from tests.gloo import agreement_work as work
from tests.pool import pool

RECORD = agreement.Record(*[f"v{i}" for i in range(len(fields(agreement.Record)))])
LIMIT = 1e-5
"""float32: sums of at most 96 terms of size 1, about 20 times PyTorch's own error on one device."""


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


def test_a_row_that_was_received_is_safe_to_print():
    with pytest.raises(AgreementError) as caught:
        agreement.compare([RECORD.row(), bytes(range(256)) * 3])
    assert caught.value.args[0].isprintable()


def test_only_new_calls_are_compared():
    for found, error in pool(3).run(work.comparisons):
        assert found == [1, 0, 1, 0, 0]
        assert error < LIMIT


DIFFERENT = {
    "mask": "mask: ",
    "mask function": "mask: ",
    "layout": ". layout: ",
    "scheme": "scheme: ring on ranks 0, 1, exchange on rank 2",
    "dtype": "dtype: float32 on ranks 0, 1, bfloat16 on rank 2",
    "shapes": "head_dim=32",
    "keep": "scheme: ring on ranks 0, 1, ring, keep on rank 2",
    "kernel": "kernel: cpu_flash on ranks 0, 1, reference on rank 2",
    "scale": "scale: 0.125 on ranks 0, 1, 0.25 on rank 2",
    "sinks": "sinks: none on ranks 0, 1, (4,) on rank 2",
    "gradients": "gradients: sum on ranks 0, 1, share on rank 2",
    "function": "scores: ",
    "name": "name: 'image' on ranks 0, 1, 'text' on rank 2",
    "longspan": "longspan: ",
    "documents": "documents: ",
    "scan layout": ". layout: ",
    "scan scheme": "scheme: scan by doubling on ranks 0, 1, scan by chain on rank 2",
    "scan scale": "scale: 0.125 on ranks 0, 1, 0.5 on rank 2",
    "l2norm": "recurrence: gated_delta, l2norm=False, reference on ranks 0, 1, gated_delta, l2norm=True",
    "operator": "scheme: exchange on ranks 0, 1, scan by doubling on rank 2",
}


CASES = [(name, "messages") for name in DIFFERENT] + [(name, "store") for name in ("mask", "dtype", "documents")]


@pytest.mark.parametrize(("name", "by"), CASES)
def test_a_difference_raises_on_all_ranks_and_sends_nothing(name, by):
    results = pool(3).run(work.different, name, by == "store")
    assert len({text for text, _, _ in results}) == 1
    for text, num_messages, error in results:
        assert "no data was sent" in text
        assert DIFFERENT[name] in text
        assert num_messages == 0
        assert error < LIMIT, "the group stays usable"


@pytest.mark.parametrize("store", ["FileStore", "TCPStore"])
def test_rows_are_compared_through_the_store_and_deleted(store):
    results = pool(3).run(work.by_store, store, 4)
    assert results[0] == results[1] == results[2]
    for once in (results[0][:9], results[0][9:]):
        assert list(once[:8:2]) == [[b"same" * 10]] * 4
        assert once[3] == [b"1 of rank 0", b"1 of rank 1", b"1 of rank 2"]
        assert [once[number] for number in (1, 5, 7)] == [[b"0 of rank 0"], [b"2 of rank 0"], [b"3 of rank 0"]]
        assert once[8] == [], "keys of all comparisons but the last"


def test_a_destroyed_group_is_freed():
    for is_freed, error in pool(2).run(work.groups_are_freed):
        assert is_freed
        assert error < LIMIT
