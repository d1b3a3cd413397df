"""Commands on ranks: `doctor` and `verify` over Gloo, the machine that `doctor --out` writes, the group of a job."""

import json
import re

import pytest
import torch
import torch.distributed as dist

import longspan as ls
from longspan.cli import doctor, main
from longspan.planning.machine import parse_machine
from tests.gloo import cli_work
from tests.pool import pool

SMALL = ("--q-heads", "4", "--kv-heads", "2", "--head-dim", "16")


def on_ranks(size, *words, timeout=240):
    """Rank 0's stdout of a command that all ranks ran; the others print nothing."""
    found = pool(size).run(cli_work.command, *words, timeout=timeout)
    assert [code for code, _, _ in found] == [0] * size, found
    assert all(out == "" for _, out, _ in found[1:])
    return found[0][1]


def test_doctor_finds_ranks_fit():
    out = on_ranks(2, "doctor")
    assert out.startswith(f"longspan {ls.__version__}: fit\n")
    for label in ("versions", "tested", "host", "backends", "kernels", "clocks", "speed", "link", "self-check"):
        assert re.search(rf"^  {label} +\S", out, re.MULTILINE), label
    assert re.search(r"(\d+) of \1 attentions equal dense float64, gradients too, over Gloo", out)


@pytest.mark.parametrize("more", [(), ("--backend", "gloo")], ids=["default", "gloo"])
def test_doctor_writes_a_machine_that_plan_reads(tmp_path, capsys, more):
    path = tmp_path / "there.json"
    found = json.loads(on_ranks(2, "doctor", "--quick", *SMALL, "--json", "--out", str(path), *more))
    machine = parse_machine(path.read_text())
    assert (machine.name, len(machine.links), found["host"]["backend"]) == ("there", 1, "gloo")
    assert found["speed"]["flops"] == machine.flops
    assert ", gloo, torch " in machine.source
    assert "not measured: rows and widths of tiles, as in cpu" in machine.source
    assert 1e8 < machine.flops * machine.backward_share < 1e13
    assert 1e5 < machine.links[0].bandwidth < 1e12
    assert 0 <= machine.links[0].latency < 1
    assert abs(found["clocks"][1]["ahead_seconds"]) < max(0.01, found["clocks"][1]["round_trip_seconds"])
    assert main(["plan", "--seq", "8k", "--ranks", "2", "--machine", str(path), *SMALL, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["workload"]["machine"] == "there"


def test_verify_runs_over_the_group():
    out = on_ranks(2, "verify", "--schemes", "ring,exchange", "--docs", "200,31")
    assert out.startswith("2 of 2 right, on cpu by cpu_flash\nbalanced over 2 ranks, in as many processes, over Gloo\n")
    found = pool(2).run(cli_work.command, "verify", "--ranks", "3")
    assert [code for code, _, _ in found] == [2, 2]
    assert all("--ranks must be 2, as torchrun started, but got 3" in err for _, _, err in found)


def test_another_backend_than_that_of_the_job_is_refused():
    found = pool(2).run(cli_work.command, "doctor", "--backend", "nccl", timeout=240)
    assert [code for code, _, _ in found] == [2, 2]
    assert all("--backend nccl does not fit the process group" in err for _, _, err in found)


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
