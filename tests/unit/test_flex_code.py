"""What PyTorch's compiler makes of the flex kernel for GPUs: interpreted against `reference`, and as machine code."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.jobs.runner import ROOT
from tests.kernel_models.flex_cases import MORE, QUICK

pytest.importorskip("triton", reason="Triton is not installed")
if shutil.which("g++") is None:
    pytest.skip("the library that pretends a GPU is compiled by g++, which is missing", allow_module_level=True)
NAMES = [*QUICK, *MORE]
LIMIT = {"float32": 1e-6, "float16": 2e-3}
"""Relative. float32: the roundings of 170 products of 16 terms, 6e-8 each, add up as squares to less than ten of them;
float16: results are rounded to it (5e-4), and so are probabilities and their gradients before they are multiplied."""
CANCELLED = 10
"""Gradients of scores add up to 0 in every row, so sums over all pairs are a tenth of their terms, or less."""
CAUGHT = {
    "wrong_blocks": ("bands", "out"),
    "wrong_base": ("bands", "lse"),
    "no_delta": ("bands", "dq"),
    "no_captured_gradient": ("scores", "captured 1"),
}


def python(module, *args, **env):
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    command = [sys.executable, "-W", "ignore", "-m", f"tests.kernel_models.{module}", *map(str, args)]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=800, env=os.environ | {"PYTHONPATH": paths} | env
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A folder with the code of all cases."""
    folder = tmp_path_factory.mktemp("code")
    for name in NAMES:
        python("flex_code", folder, name, TORCHINDUCTOR_CACHE_DIR=str(folder))
    return folder


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_generated_code_does_what_reference_does(name, code):
    (line,) = python("flex_script", code, name, TRITON_INTERPRET="1").splitlines()
    errors = json.loads(line)
    limit = LIMIT[str((QUICK | MORE)[name].dtype)[6:]]
    for result, error in errors.items():
        assert error <= limit * (CANCELLED if result.startswith("captured") else 1), errors
    assert ("captured 1" in errors) == ("score" in name)


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", CAUGHT)
def test_mistakes_show(mutant, code):
    name, result = CAUGHT[mutant]
    (line,) = python("flex_script", code, f"{name}:{mutant}", TRITON_INTERPRET="1").splitlines()
    assert json.loads(line)[result] > 1e-3


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_generated_code_becomes_machine_code(capability, code, record_property):
    """For A100, H100 and B200: PyTorch tuned it for an H100, and it must fit all three."""
    found = json.loads(python("flex_cubins", capability, *[code / f"{name}.json" for name in NAMES]))
    assert len(found) >= 2 * len(NAMES)
    for name, told in found.items():
        record_property(f"{name} sm_{capability}", f"{told['registers']} registers, {told['shared']} B")
        assert told["registers"] <= 255
        assert told["shared"] <= {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}[capability]
