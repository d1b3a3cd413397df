"""Processes of an NCCL-like job end as they should: each rank's exit status, what it says, no hang on the way out."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gloo.selected import selected

HERE = Path(__file__).parent
LIMIT = 60
# what each of two ranks ends with
JOBS = {
    "in flight": (0, 0),
    "destroy": (0, 0),
    "exit 3": (3, 3),
    "raise": (1, 1),
    "kill": (1, -9),
}
NAMED = {"raise": "rank 0 raised after call", "kill": "rank 1 is dead: its process"}


def job(how, port):
    """(exit status, all that was said) of both ranks; None for one that hung."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    root = HERE.parents[1]
    env["PYTHONPATH"] = os.pathsep.join([str(root / "src"), str(root), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(HERE / "nccl_exit_work.py")]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", str(port), how],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    for process in ranks:
        try:
            said, _ = process.communicate(timeout=LIMIT)
            found.append((process.returncode, said))
        except subprocess.TimeoutExpired:
            process.kill()
            found.append((None, process.communicate()[0]))
    return found


@pytest.fixture(scope="module")
def jobs(request):
    """All jobs that were selected, two at a time, with a store of the tests' own."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    chosen = selected(request, "how")
    with ThreadPoolExecutor(2) as pool:
        yield {how: pool.submit(job, how, store.port) for how in chosen}


@pytest.mark.share(4)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", JOBS)
def test_ranks_end_with_the_status_that_is_theirs(how, jobs):
    found = jobs[how].result()
    assert tuple(status for status, _ in found) == JOBS[how], found
    for status, said in found:
        assert "was right" in said, said
        assert "terminate called" not in said, said
        assert "Exception ignored" not in said, said
        assert ("ended in good order" in said) == (status == 0), said
    if how in NAMED:
        survivor = found[how == "raise"][1]
        assert f"RankError: {NAMED[how]}" in survivor, survivor
    else:
        assert not any("rank " in line and "Meanwhile" in line for _, said in found for line in said.splitlines())
