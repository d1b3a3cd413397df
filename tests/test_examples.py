"""Every example runs as written, on two Gloo ranks, and agrees with one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["learned_bias", "windows", "migration", "hf_trainer"])
def test_example(name, tmp_path):
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 60
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", str(path)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    errors = [float(found) for found in re.findall(r"one process (\d\.\de[+-]\d+)", done.stdout)]
    assert len(errors) == 2, done.stdout
    assert max(errors) < 1e-5
