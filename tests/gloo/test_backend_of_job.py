"""--backend on ranks that have a group already: what the job has is taken, another one is refused. And which device
each rank gets."""

import json

import pytest
import torch
import torch.distributed as dist

from longspan.cli import doctor, launch, main
from longspan.errors import LongspanError
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
    assert all("--backend nccl does not fit the process group" in err for _, _, err in found)


@pytest.mark.parametrize(
    ("asked", "gpus", "local_rank", "shown", "found"),
    [
        (None, 8, 3, None, ("nccl", "cuda:3")),
        (None, 1, 0, None, ("nccl", "cuda:0")),
        (None, 1, 3, "5", ("nccl", "cuda:0")),  # each rank is shown its own GPU, which is number 0 to all of them
        (None, 1, 3, "GPU-8d4e", ("nccl", "cuda:0")),
        ("nccl", 1, 1, "1", ("nccl", "cuda:0")),
        (None, 2, 1, "2,3", ("nccl", "cuda:1")),
        ("gloo", 1, 3, "5", ("gloo", "cpu")),
        (None, 0, 3, "", ("gloo", "cpu")),
    ],
)
def test_every_rank_has_a_gpu_of_its_own(asked, gpus, local_rank, shown, found):
    env = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert launch.place(asked, gpus, local_rank, sees_one_gpu=launch.sees_one_gpu(env)) == found


@pytest.mark.parametrize(("gpus", "local_rank", "shown"), [(1, 1, None), (2, 2, "0,1"), (2, 3, None)])
def test_ranks_that_would_share_a_gpu_are_refused(gpus, local_rank, shown):
    env = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    with pytest.raises(LongspanError, match=rf"PyTorch sees {gpus} on this host, which has a rank {local_rank}"):
        launch.place(None, gpus, local_rank, sees_one_gpu=launch.sees_one_gpu(env))


@pytest.mark.parametrize(
    ("config", "asked", "found"),
    [
        ("cpu:gloo,cuda:nccl", None, ("nccl", "cuda:5")),
        ("cuda:nccl", None, ("nccl", "cuda:5")),
        ("cpu:gloo,cuda:nccl", "gloo", ("gloo", "cpu")),
        ("cpu:gloo,cuda:gloo", None, ("gloo", "cpu")),
    ],
)
def test_doctor_takes_the_backend_of_the_job_it_is_in(config, asked, found, monkeypatch):
    class Examined(Exception):  # noqa: N818
        """What doctor would have examined."""

    def examine(ranks, *_):
        raise Examined((ranks.backend, ranks.device))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(doctor, "examine", examine)
    with pytest.raises(Examined) as caught:
        main(["doctor", *(["--backend", asked] if asked else [])])
    assert caught.value.args[0] == found
