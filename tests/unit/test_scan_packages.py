"""Scan kernels of other packages: their real Triton kernels by Triton's interpreter, and ours around models of them."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.jobs.runner import ROOT

NEEDS = {
    "fla": "fla-core is not installed (pip install --no-deps fla-core)",
    "mamba_ssm": "mamba_ssm is not installed (its sources on PYTHONPATH are enough)",
}


def interpreted(*args):
    paths = str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernel_models.scan_script", *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("package", NEEDS)
def test_published_kernels_do_what_the_reference_does(package):
    """States in and out, both forms of maps and every gradient, in float32. What the reference itself loses in float32
    is the measure; sums are in another order in their kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if find_spec(package) is None:
        pytest.skip(NEEDS[package])
    found = interpreted(package)
    assert len(found) == {"fla": 5, "mamba_ssm": 2}[package]
    for case in found:
        own = max(case["reference"].values())
        for form in ("local", "one pass", "summary"):
            for part, error in case.get(form, {}).items():
                assert error <= 8 * own + 2**-22, (case["case"], form, part, error)
