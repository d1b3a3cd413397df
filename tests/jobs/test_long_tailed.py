"""examples/long_tailed.py by literal torchrun: the losses of one process, and the same bits after a stop."""

import re

import pytest

from tests.jobs.runner import ROOT, torchrun
from tests.jobs.table import complaints, example

PROGRAM = str(ROOT / "examples" / "long_tailed.py")
STEP = re.compile(r"^step (\d+): .* loss (\S+)$", re.M)
STOP = 11


@pytest.mark.timeout(300)
def test_losses_are_those_of_one_process_and_a_stop_changes_no_bit(tmp_path):
    job = example("long_tailed")
    whole = job.run(140)
    assert complaints(job, whole) == [], whole.report()
    steps = STEP.findall(whole.out)
    assert len(steps) >= 30
    # float32: losses of about 3.5 have a spacing of 2^-22, and 30 steps of Adam amplify rounding of gradients
    worst = float(re.search(r"differ from one process (\S+)", whole.out)[1])
    assert worst <= 64 * 2**-22
    assert float(steps[-1][1]) < float(steps[0][1]) - 0.3  # it learns: a frozen model would pass otherwise

    words = ["--nproc-per-node", "2", PROGRAM, "--checkpoint", str(tmp_path / "checkpoint")]
    stopped = torchrun([*words, "--stop-after", str(STOP)], tmp_path, timeout=120)
    resumed = torchrun(words, tmp_path, timeout=120)
    for ended in (stopped, resumed):
        assert ended.status == 0, ended.report()
    assert len(STEP.findall(stopped.out)) == STOP
    assert STEP.findall(stopped.out) + STEP.findall(resumed.out) == steps  # all digits


@pytest.mark.timeout(200)
def test_groups_of_ranks_have_the_losses_of_one_process(tmp_path):
    job = torchrun(["--nproc-per-node", "4", PROGRAM, "--ranks-per-group", "2"], tmp_path, timeout=170)
    assert job.status == 0, job.report()
    assert len(STEP.findall(job.out)) >= 30
    assert float(re.search(r"differ from one process (\S+)", job.out)[1]) <= 64 * 2**-22
