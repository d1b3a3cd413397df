"""torchrun starts all ranks again after one was killed, over a store of this attempt, and the result is right."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent / "restart_script.py"


def launched(folder, victim):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "3", "--max-restarts", "2", "--monitor-interval", "0.2", str(SCRIPT)]
    found = subprocess.run([*command, str(folder), str(victim)], env=env, timeout=250, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-3000:]
    return np.load(folder / "weights.npy")


@pytest.mark.timeout(600)
def test_a_killed_rank_is_started_again_and_the_result_is_right(tmp_path):
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    whole, killed = launched(tmp_path / "whole", -1), launched(tmp_path / "killed", 1)
    np.testing.assert_allclose(killed, whole, rtol=1e-5)
    assert (tmp_path / "killed" / "resumed").read_text() == "3"
