"""What runs every time and what at night: names that exist, and everything when asked for."""

from types import SimpleNamespace

import pytest

from tests import lanes
from tests.jobs.runner import ROOT


@pytest.mark.parametrize(("name", "one_in"), lanes.SHARES.items())
def test_tests_with_a_share_exist(name, one_in):
    file, _, test = name.partition("::")
    text = (ROOT / "tests" / f"{file}.py").read_text()
    assert f"def {test}(" in text
    assert "@pytest.mark.parametrize" in text or one_in == lanes.NIGHT_ONLY


@pytest.fixture(autouse=True)
def _by_day(monkeypatch):
    monkeypatch.setattr(lanes, "NIGHTLY", False)
    monkeypatch.setattr(lanes, "SHARES", {"unit/test_exact::test_exact": 7, "house/test_x::test_x": lanes.NIGHT_ONLY})


def made(count, name="unit/test_exact.py::test_exact"):
    return [SimpleNamespace(nodeid=f"tests/{name}[{number}]") for number in range(count)]


def kept(items, asked=("tests",)):
    out = lanes.left_out(items, asked)
    return [item.nodeid.partition("[")[2][:-1] for item in items if item not in out]


def test_a_share_of_cases_runs():
    assert kept(made(20)) == ["0", "7", "14"]
    assert kept(made(3, "unit/test_plan.py::test_plan")) == ["0", "1", "2"]
    assert kept(made(1, "house/test_x.py::test_x")) == []
    assert lanes.share(range(7), 3) == [0, 3, 6]


def test_everything_runs_at_night_and_when_asked_for(monkeypatch):
    assert len(kept(made(20), ("tests/unit/test_exact.py::test_exact",))) == 20
    monkeypatch.setattr(lanes, "NIGHTLY", True)
    assert len(kept(made(20))) == 20
    assert lanes.share(range(3), 2) == [0, 1, 2]
