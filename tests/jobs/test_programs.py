"""The long-context programs of examples/ with `--smoke`: literal torchrun on two ranks, and one process."""

import ast
import re
from importlib.util import find_spec

import pytest

from tests.jobs import pages
from tests.jobs.runner import ROOT, torchrun
from tests.jobs.table import complaints, example

NAMES = sorted(pages.ARGUMENTS)
TOLERANCE = 32 * 2**-21
"""Log-probabilities of one of 64 words are about -4, and norms of gradients are up to 5. float32 has a spacing of 2^-21
there; sums over two ranks round differently from those of one, in each of four steps."""
STEP = re.compile(r"^step \d loss (-?\d+\.\d{7}) gradient norm (\d+\.\d{7})$", re.M)


def curve(ended):
    """Losses and norms of gradients, which are not those of a model that has stopped."""
    values = [tuple(map(float, step)) for step in STEP.findall(ended.out)]
    assert len(values) == 4, ended.report()
    assert len({round(loss, 3) for loss, _ in values}) == 4
    return values


def differences(ended):
    return [float(text) for text in re.findall(r" by (\d\.\de[+-]\d+)", ended.out.partition("losses differ")[2])]


@pytest.fixture(autouse=True)
def needed():
    for package in ("trl", "peft", "datasets"):
        if find_spec(package) is None:  # without importing them here, which takes seconds
            pytest.skip(f"{package} is not installed")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_on_two_ranks(name):
    """FSDP2 shards all parameters, and losses are those that rank 0 computes alone, without Longspan."""
    job = example(name)
    ended = job.run(280)
    assert complaints(job, ended) == [], ended.report()
    sharded, parameters = re.search(r"^(\d+) of (\d+) parameters are sharded", ended.out, re.M).groups()
    assert sharded == parameters
    curve(ended)
    errors = differences(ended)
    assert len(errors) == 2
    assert max(errors) <= TOLERANCE


@pytest.mark.share(3)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", NAMES)
def test_in_one_process(name, tmp_path):
    """The same losses as on two ranks, by the same program."""
    job = example(name)
    alone = torchrun([job.words[0], "1", *job.words[2:]], tmp_path, timeout=140)
    assert complaints(job, alone) == [], alone.report()
    for one, two in zip(curve(alone), curve(job.run(140)), strict=True):
        assert one == pytest.approx(two, abs=TOLERANCE)


@pytest.mark.parametrize("name", NAMES)
def test_page(name):
    """One page each, which says how it is started and what has not run."""
    text = (ROOT / "examples" / f"{name}.py").read_text()
    said = ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) <= 190
    for command in (f"--nproc-per-node 8 examples/{name}.py --", f"--nproc-per-node 2 examples/{name}.py --smoke"):
        assert command in said
    assert "nothing here has run on a GPU" in said
