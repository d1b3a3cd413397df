"""The six losses of examples/losses by literal torchrun on two Gloo ranks, each against one process; and that a mistake
in one of them ends it with status 1."""

import re
import shutil
from pathlib import Path

import pytest

from tests.jobs.runner import torchrun

LOSSES = Path(__file__).parents[2] / "examples" / "losses"
NAMES = ("sft", "dpo", "ppo", "grpo", "gspo", "distillation")
DIFFER = re.compile(r"losses differ from one process by (\S+), gradient norms by (\S+)")


def run(path, folder):
    return torchrun(["--nproc-per-node", "2", str(path)], folder, timeout=200)


def test_all_losses_are_here_and_each_fits_on_a_screen():
    assert {path.stem for path in LOSSES.glob("*.py")} == {*NAMES, "common"}
    for name in NAMES:
        assert len((LOSSES / f"{name}.py").read_text().splitlines()) <= 60


@pytest.mark.share(6)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", NAMES)
def test_loss_is_that_of_one_process(name, tmp_path):
    done = run(LOSSES / f"{name}.py", tmp_path)
    assert done.status == 0, done.report()
    (found,) = DIFFER.findall(done.out)
    assert max(map(float, found)) <= 1e-5
    assert not done.noise()
    assert "Warning" not in done.err


NO_SUM = "\nfrom longspan.training import tokens\ntokens.all_summed = lambda x, group: x\n"
MISTAKES = {
    "a sampler's log-probs beside their own tokens": ("grpo", "shard_like(data.old, mine, shift=1)", "=1", "=0"),
    "gradients that FSDP averages, taken for sums": ("dpo", 'gradients="average")', "average", "sum"),
    "labels shifted after sharding": (
        "common",
        "        value = loss(",
        "value",
        'mine["shift_labels"] = mine["input_ids"].roll(-1, 1).where(mine["shift_labels"] != -100, -100); value',
    ),
    "sums of each rank's own tokens": ("gspo", "from common import train\n", "\n", NO_SUM),
}


@pytest.mark.share(4)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_status_1(mistake, tmp_path):
    for path in LOSSES.glob("*.py"):
        shutil.copy(path, tmp_path)
    common = tmp_path / "common.py"
    common.write_text(common.read_text().replace("2, 2, 20, 4, 1e-5", "2, 2, 4, 4, 1e-5"))  # four steps will do
    name, line, right, wrong = MISTAKES[mistake]
    path = tmp_path / f"{name}.py"
    text = path.read_text()
    assert text.count(line) == 1
    path.write_text(text.replace(line, line.replace(right, wrong)))
    done = run(tmp_path / f"{'sft' if name == 'common' else name}.py", tmp_path)
    assert done.status == 1, done.report()
    (found,) = DIFFER.findall(done.out)
    assert max(map(float, found)) > 1e-3
