"""Training curves, short: two ranks with FSDP2 against one process of plain PyTorch, and mistakes that must show."""

import re
from pathlib import Path

import pytest
import torch

from benchmarks import curves
from benchmarks.curve_picture import draw
from benchmarks.curve_text import packed_row
from benchmarks.curves import Curve, Family
from tests.jobs.runner import torchrun
from tests.pool import pool

ROOT = Path(__file__).parents[2]
STEPS, SEQ_LEN = 20, 128
WAIT = 200.0
LIMIT = 1e-5
"""Ten times below what 200 steps are allowed; float32 leaves 1e-6 here."""


def on_two_ranks(name, steps, dp, cp, mistake=None):
    found = pool(2).run(curves.on_ranks, name, steps, SEQ_LEN, dp, cp, mistake, timeout=WAIT)
    assert found[0] == found[1], "ranks report different losses"
    return found[0]


def difference(found, expected):
    return max(abs(a - b) for a, b in zip(found, expected, strict=True))


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("name", "mistake"), [("llama", "documents see each other"), ("gemma", "windows become full")])
def test_two_ranks_learn_as_one_process_does(name, mistake):
    expected = curves.one_process(name, STEPS, SEQ_LEN)
    assert expected[-1] < 0.8 * expected[0]
    assert difference(on_two_ranks(name, STEPS, 1, 2), expected) <= LIMIT
    few = 8
    wrong = on_two_ranks(name, few, 1, 2, mistake)
    assert difference(wrong, expected[:few]) > 100 * LIMIT


@pytest.mark.timeout(240)
def test_labels_shifted_late_depart():
    expected = curves.one_process("llama", 4, SEQ_LEN)
    assert difference(on_two_ranks("llama", 4, 2, 1), expected) <= LIMIT  # two samples, whole sequences
    assert difference(on_two_ranks("llama", 4, 1, 2, curves.LATE_LABELS), expected) > 100 * LIMIT


def test_rows_are_full_of_documents_and_differ():
    rows = [packed_row(seed, 512) for seed in range(40)]
    assert all(sum(row.lengths) == len(row.ids) == 512 and min(row.lengths) > 0 for row in rows)
    assert all(int(row.ids.max()) < 128 for row in rows)
    assert len({tuple(row.lengths) for row in rows}) > 35
    assert len({len(row.lengths) for row in rows}) > 4
    assert torch.equal(packed_row(7, 512).ids, rows[7].ids)


@pytest.mark.parametrize(
    ("changed", "missed"),
    [({}, 0), ({"ranks": 2e-4}, 1), ({"mistake": 5e-4}, 1), ({"last": 4.9}, 1), ({"ranks": 1.0, "mistake": 0.0}, 2)],
)
def test_bars_can_be_missed(changed, missed):
    given = {"ranks": 1e-6, "mistake": 1e-2, "last": 1.0} | changed
    one = [5.0, *[given["last"]] * 10]
    made = [Curve("one process", one)]
    made.append(Curve("ranks", [loss + given["ranks"] for loss in one]))
    made.append(Curve("mistake", [5.0 + given["mistake"]], mistake=True))
    lines = []
    assert curves.judged(Family("llama", made), lines.append) == missed
    assert sum("MISSED" in line for line in lines) == missed


def test_the_picture_shows_every_run(tmp_path):
    right = [5.0 - 0.1 * step for step in range(30)]
    runs = [("one", 0.0, False), ("2 x 2", 1e-7, False), ("1 x 4", 2e-7, False), ("wrong", 0.1, True)]
    made = [Curve(label, [loss + added for loss in right], wrong) for label, added, wrong in runs]
    drawn = []
    for shown in (made, made[:3]):
        path = tmp_path / f"{len(shown)}.png"
        draw([Family("llama", shown), Family("gemma", made)], str(path))
        drawn.append(path.read_bytes())
    assert all(data.startswith(b"\x89PNG") and len(data) > 20_000 for data in drawn)
    assert drawn[0] != drawn[1]


@pytest.mark.nightly
@pytest.mark.timeout(240)
def test_the_program_in_the_page_runs_as_printed(tmp_path):
    text = (ROOT / "docs" / "training.md").read_text()
    (code,) = re.findall(r"```python torchrun\n(.*?)```", text, re.DOTALL)
    (tmp_path / "train.py").write_text(code)
    done = torchrun(["--nproc-per-node", "2", "train.py"], tmp_path, timeout=220)
    assert done.status == 0, done.report()
    (error,) = re.findall(r"differ from one process by (\d\.\de[+-]\d+)", done.out)
    assert float(error) < 1e-5
