"""docs/rival.md has every cell of `benchmarks.rival`; the command runs without the rival, and ends as it should."""

import re
import warnings
from pathlib import Path

import pytest

from benchmarks import rival, rival_models
from longspan import huggingface
from tests.pool import pool

pytest.importorskip("transformers")
PAGE = Path(__file__).parents[2] / "docs" / "rival.md"


def test_the_page_has_every_cell_and_none_of_longspan_is_wrong():
    rows = re.findall(r"^\| ([^|:]+): [^|]+ \| (plain|packed) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)
    assert [(family, case) for family, case, _ in rows] == [
        (family, case) for family in rival_models.FAMILIES for case in rival_models.CASES
    ]
    counts = [len(counts) for _, counts in rival.LIBRARIES.values()]
    for *_, cells in rows:
        cells = [cell.strip() for cell in cells.split("|")]
        assert len(cells) == sum(counts)
        assert not any("*" in cell or "fails" in cell for cell in cells[-counts[-1] :])


@pytest.mark.timeout(120)
def test_a_cell_is_right_and_a_wrong_one_is_noticed():
    found = rival.worst(pool(2).run(rival.cell, "Longspan", "Gemma 2", "packed", timeout=100.0))
    assert found.right, found
    off = rival.worst(pool(2).run(_with_local_positions, timeout=100.0))
    assert not off.message
    assert not off.right
    assert rival.shown(off, []).startswith("**")


def _with_local_positions():
    rival.LIBRARIES["spoilt"] = (_spoilt, (2,))
    return rival.cell("spoilt", "Llama", "plain")


def _spoilt(model, case):
    """Longspan, with positions that start at zero on every rank."""
    shard = huggingface.shard_inputs

    def shard_with_local_positions(*args):
        inputs = shard(*args)
        inputs["position_ids"] -= inputs["position_ids"][:, :1].clone()
        return inputs

    huggingface.shard_inputs = shard_with_local_positions
    try:
        return rival.longspan(model, case)
    finally:
        huggingface.shard_inputs = shard


class _Ranks:
    """In place of processes: every cell of Longspan's has the same answer."""

    def __init__(self, answer):
        self.answer = answer

    def __call__(self, world_size):
        return self

    def run(self, library, family, case):
        return self.answer if library == "Longspan" else rival.CellResult(0.0, 0.0)

    def end(self):
        pass


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        (rival.CellResult(1e-7, 1e-6), 0),
        (rival.CellResult(message="BatchError: no", refused=True), 0),
        (rival.CellResult(1e-7, 1e-2), 1),
        (rival.CellResult(message="TypeError: oh"), 1),
        (rival.CellResult(float("nan"), 1e-7), 1),
    ],
)
def test_the_exit_status(answer, status, monkeypatch, capsys):
    monkeypatch.setattr(rival, "Pool", _Ranks(answer))
    monkeypatch.setattr(rival.importlib.util, "find_spec", lambda name: None)
    with warnings.catch_warnings():
        assert rival.main() == status
    out = capsys.readouterr().out
    assert "not installed" in out
    assert "ringmaster, ring" not in out
    assert out.count("\n| ") == 1 + 2 * len(rival_models.FAMILIES)
