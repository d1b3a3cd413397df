"""--backend: which backend and device a rank of a measuring command gets, and what is refused before ranks meet."""

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from longspan.cli import main
from longspan.cli.bench import _check_trace
from longspan.cli.launch import JobRanks, join_ranks, place
from longspan.cli.verify import _default_device
from longspan.errors import LongspanError

SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "16", "--repeats", "1")


def said(*words):
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def no_group(monkeypatch):
    """Making a process group fails the test: refusals come before it."""
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, **__: pytest.fail("a group was made"))


@pytest.mark.parametrize(
    ("asked", "num_gpus", "local_rank", "found"),
    [
        (None, 0, 0, ("gloo", "cpu")),
        (None, 0, 7, ("gloo", "cpu")),
        (None, 8, 0, ("nccl", "cuda:0")),
        (None, 8, 7, ("nccl", "cuda:7")),
        ("nccl", 2, 1, ("nccl", "cuda:1")),
        ("gloo", 2, 1, ("gloo", "cpu")),
        ("gloo", 2, 5, ("gloo", "cpu")),
        ("gloo", 0, 0, ("gloo", "cpu")),
    ],
)
def test_a_rank_gets_the_backend_and_device_of_its_host(asked, num_gpus, local_rank, found):
    assert place(asked, num_gpus, local_rank) == found


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(LongspanError, match="--backend gloo"):
        place(None, 2, 2)


@pytest.mark.parametrize("command", ["calibrate", "bench --seq 64"])
def test_nccl_without_cuda_is_refused_before_a_group_is_made(monkeypatch, no_group, command):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)  # of the ranks of a job, rank 0 speaks
    code, out, err = said(*command.split(), "--backend", "nccl")
    assert (code, out) == (2, "")
    assert "--backend nccl" in err
    assert err.count("\n") == 1


def test_a_job_on_gpus_has_its_tensors_on_the_gpu_of_the_rank(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", asked.append)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 6)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 8)
    for name, value in {"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")
    with join_ranks("bench", None) as ranks:
        assert ranks == JobRanks(6, 8, 4, "nccl", "cuda:2")
    assert asked == ["cuda:2", "nccl"]
    with join_ranks("bench", "gloo") as ranks:
        assert ranks == JobRanks(6, 8, 4, "gloo", "cpu")
    assert asked[2:] == ["gloo"]


@pytest.mark.parametrize(
    ("num_gpus", "ranks", "found"),
    [(8, "8", "cuda"), (8, "2", "cuda"), (2, "4", "cpu"), (0, "1", "cpu"), (1, None, "cuda")],
)
def test_verify_takes_gpus_where_every_rank_has_one(monkeypatch, num_gpus, ranks, found):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert _default_device(num_gpus) == found
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for config, device in (("cpu:gloo", "cpu"), ("cpu:gloo,cuda:nccl", found), ("cuda:nccl", found)):
        monkeypatch.setattr(torch.distributed, "get_backend_config", lambda config=config: config)
        assert _default_device(num_gpus) == device


def test_commands_say_device_and_kernel():
    code, out, err = said("verify", "--ranks", "2", "--seq", "48", "--schemes", "ring", "--dtype", "float32,bfloat16")
    assert (code, err) == (0, "")
    assert "2 of 2 right, on cpu by cpu_flash" in out
    code, out, _ = said("verify", "--ranks", "2", "--seq", "48", "--schemes", "ring", "--softcap", "9", "--json")
    assert code == 0
    assert json.loads(out)["kernels"] == {"float32": "reference"}
    code, out, _ = said("bench", "--seq", "64", *SMALL)
    assert code == 0
    assert "on cpu by cpu_flash" in " ".join(out.split())


def test_a_trace_of_gpus_is_refused_and_one_of_cpus_is_not(tmp_path):
    with pytest.raises(LongspanError, match="CPU"):
        _check_trace(tmp_path / "ran.json", JobRanks(0, 2, 2, "nccl", "cuda:0"))
    _check_trace(None, JobRanks(0, 2, 2, "nccl", "cuda:0"))
    _check_trace(tmp_path / "ran.json", JobRanks(0, 2, 2, "gloo", "cpu"))


def test_naming_the_default_changes_nothing():
    code, named, err = said("bench", "--seq", "64", *SMALL, "--json", "--backend", "gloo")
    assert code == 0, err
    code, default, err = said("bench", "--seq", "64", *SMALL, "--json")
    assert code == 0, err
    named, default = json.loads(named), json.loads(default)
    assert named.keys() == default.keys()
    timed = {"forward_seconds", "backward_seconds", "seconds", "repeats"}
    assert {k: v for k, v in named.items() if k not in timed} == {k: v for k, v in default.items() if k not in timed}
    assert named["backend"] == "gloo"
