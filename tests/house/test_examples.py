"""Every example runs as written, on two Gloo ranks, and agrees with one process."""

import re
from pathlib import Path

import pytest

from tests.jobs.runner import torchrun

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["learned_bias", "windows", "migration", "hf_trainer", "hybrid"])
def test_example(name, tmp_path):
    if name in ("hf_trainer", "hybrid"):
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    done = torchrun(["--nproc-per-node", "2", str(path)], tmp_path, timeout=200)
    assert done.status == 0, done.report()
    errors = [float(found) for found in re.findall(r"one process (\d\.\de[+-]\d+)", done.out)]
    assert len(errors) == 2, done.out
    assert max(errors) < 1e-5
