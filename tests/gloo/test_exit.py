"""Processes end as they should: literal `torchrun` jobs, each rank's exit status, and no abort on the way out.

Tests that fork their ranks see none of this: their children end by `os._exit`, without the interpreter's own end.
"""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gloo.selected import selected

HERE = Path(__file__).parent
AT_ONCE, LIMIT = 3, 240
# how a rank ends, what becomes of the group, exit status of each rank that torchrun may see first
JOBS = {
    ("success", "destroy"): set(),
    ("success", "keep"): set(),
    ("lock", "destroy"): set(),
    ("exit 0", "keep"): set(),
    ("exit 3", "keep"): {3},
    ("raise", "keep"): {1},
    ("one raises outside", "keep"): {1},
    ("swallow", "keep"): set(),
    ("interrupt", "keep"): {-2, 1},
    ("kill", "keep"): {-9},
}


def job(how, group):
    """(status of torchrun, all that was said) of one job."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parent / "src"), str(HERE.parent), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, str(HERE / "exit_work.py"), how, group], env=env, capture_output=True, text=True, timeout=LIMIT
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def jobs(request):
    """All jobs that were selected, a few at a time."""
    chosen = selected(request, "key")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {key: pool.submit(job, *key) for key in JOBS if key in chosen}


@pytest.mark.share(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("key", JOBS, ids="-".join)
def test_jobs_end_with_the_status_that_is_theirs(key, jobs):
    status, said = jobs[key].result()
    wanted = JOBS[key]
    assert said.count("was right") == 2, said
    assert "terminate called" not in said, said
    assert "Signal 6" not in said, said
    assert status == int(bool(wanted)), said
    if wanted:
        first = re.search(r"Root Cause.*?exitcode  : (-?\d+)", said, re.DOTALL)
        assert first, said
        assert int(first[1]) in wanted, said
