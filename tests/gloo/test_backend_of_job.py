"""--backend on ranks that have a group already: what the job has is taken, another one is refused."""

import json

from tests.gloo.cli_work import command
from tests.pool import pool

SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "16")


def test_the_backend_of_the_job_is_taken():
    for more in ((), ("--backend", "gloo")):
        found = pool(2).run(command, "calibrate", *SMALL, "--rounds", "1", "--json", *more, timeout=240)
        assert [code for code, _, _ in found] == [0, 0], found
        answer = json.loads(found[0][1])
        assert (answer["backend"], answer["ranks"]) == ("gloo", 2)
        assert ", gloo, torch " in answer["source"]


def test_another_backend_than_that_of_the_job_is_refused():
    found = pool(2).run(command, "bench", "--seq", "64", *SMALL, "--backend", "nccl", timeout=240)
    assert [code for code, _, _ in found] == [2, 2]
    assert all("--backend nccl was asked for, but the ranks talk over" in err for _, _, err in found)
