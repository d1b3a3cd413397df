"""Shares of cases: they rotate with the seed, and everything runs at night and when a test is selected by name."""

from types import SimpleNamespace

import pytest

from tests import lanes


@pytest.fixture(autouse=True)
def _by_day(monkeypatch):
    monkeypatch.setattr(lanes, "NIGHTLY", False)
    monkeypatch.setattr(lanes, "SEED", 3)


def items(count, name="tests/unit/test_exact.py::test_exact", **marks):
    marks = {key: SimpleNamespace(args=value) for key, value in marks.items()}
    return [SimpleNamespace(nodeid=f"{name}[{n}]", get_closest_marker=marks.get) for n in range(count)]


def kept(cases, arguments=("tests",), markexpr=""):
    out = lanes.left_out(cases, arguments, markexpr)
    return [n for n, item in enumerate(cases) if item not in out]


def test_a_share_of_cases_runs_and_rotates(monkeypatch):
    seen = set()
    for seed in range(7):
        monkeypatch.setattr(lanes, "SEED", seed)
        cases = kept(items(20, share=(7,)))
        assert 2 <= len(cases) <= 3
        assert kept(items(20, share=(7,))) == cases
        seen |= set(cases)
    assert seen == set(range(20))


def test_unmarked_cases_always_run_and_nightly_ones_never_by_day():
    assert kept(items(3)) == [0, 1, 2]
    assert kept(items(3, nightly=())) == []


@pytest.mark.parametrize("count", range(1, 9))
def test_at_least_one_case_runs(count):
    assert len(kept(items(count, share=(7,)))) >= 1
    assert len(lanes.share(range(count), 7)) >= 1


def test_everything_runs_at_night_and_when_selected_by_name(monkeypatch):
    name = "tests/unit/test_exact.py::test_exact"
    assert len(kept(items(20, share=(7,)), (name,))) == 20
    assert len(kept(items(20, share=(7,), quick=()), markexpr="quick")) == 20
    monkeypatch.setattr(lanes, "NIGHTLY", True)
    assert len(kept(items(20, share=(7,)))) == 20
    assert lanes.share(range(3), 2) == [0, 1, 2]
