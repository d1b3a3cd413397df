"""`longspan acceptance` on four ranks: whole and green by literal torchrun, and red in exactly the line where something
was planted."""

import getpass
import json
import platform
import re
import sys
from pathlib import Path

import pytest

from tests.gloo.acceptance_work import planted
from tests.jobs.runner import ROOT, torchrun
from tests.pool import pool

RANKS = 4
SECTIONS = "operators,exact,memory,time,host"
"""All quick lines."""


def accept(tmp_path, plant, *words, timeout=280):
    """Exit code and the JSON of a run over a pool of ranks."""
    out = str(tmp_path / "found")
    found = pool(RANKS).run(planted, plant, "--out", out, "--plain", *words, timeout=timeout)
    assert len({code for code, _, _ in found}) == 1, found
    assert not any(text for _, text, _ in found[1:]), "one rank speaks"
    return found[0][0], json.loads(Path(f"{out}.json").read_text())


def reds(answer):
    return [line["line"] for line in answer["lines"] if line["red"]]


def private(text):
    """What a page must not have."""
    words = {platform.node(), getpass.getuser(), str(Path.home())}
    found = [word for word in words if len(word) > 1 and re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)]
    return found + re.findall(r"(?<![\w.])/(?:\w+/)+\w+|127\.0\.0\.1", text)


def test_the_whole_page_by_torchrun(tmp_path):
    done = torchrun(["--nproc-per-node", "4", "-m", "longspan", "acceptance", "--quick"], tmp_path, timeout=280)
    assert done.status == 0, done.report()
    assert not done.noise(), done.report()
    assert not done.left
    answer = json.loads((tmp_path / "acceptance.json").read_text())
    assert answer["ok"]
    assert answer["complete"]
    assert {line["line"].split(".")[0] for line in answer["lines"]} == {
        "operators", "exact", "long", "training", "memory", "time", "host",
    }  # fmt: skip
    assert all(line["verdict"] in ("right", "slower") for line in answer["lines"]), reds(answer)
    page = (tmp_path / "acceptance.md").read_text()
    assert len(page.partition("<details>")[0].splitlines()) < 60, "one page"
    assert not private(page)
    assert not private(json.dumps(answer))
    for line in answer["lines"]:
        assert f"| {line['line']} |" in page
        assert re.search(rf"^  {re.escape(line['line'])} +\S", done.out, re.M)


def test_a_line_is_repeated_by_the_command_that_the_page_prints(tmp_path):
    code, answer = accept(tmp_path, "nothing", "--quick", "--only", "exact.ring")
    assert code == 0
    (line,) = answer["lines"]
    words = line["repeat"].split()
    assert words[:5] == ["torchrun", "--nproc-per-node", "4", "-m", "longspan"]
    code, again = accept(tmp_path, "nothing", *words[6:])
    assert (code, [line["line"] for line in again["lines"]]) == (0, ["exact.ring"])


@pytest.mark.nightly  # the whole page always
def test_nothing_planted_and_nothing_red(tmp_path):
    code, answer = accept(tmp_path, "nothing", "--quick", "--only", SECTIONS)
    assert (code, reds(answer), answer["ok"]) == (0, [], True), answer["lines"]


PLANTED = {
    "wrong_kernel": (["operators.cpu_flash.float16"], "dq is off by"),
    "kernel_reads_beside": (["operators.cpu_flash.float16"], "is off by"),
    "slow_link": (["time.links"], "from rank 1 to rank 2"),
    "sync": (["host.waits"], "(_local_scalar_dense"),
    "copy": (["host.waits"], "copies"),
    "hoard": (["memory.exchange.causal", "memory.exchange.window", "memory.ring.causal"], "the plan says"),
    "raises": (["exact.exchange"], "rank 2: OSError: cannot read PATH"),
}


@pytest.mark.share(4)
@pytest.mark.parametrize("plant", PLANTED)
def test_what_is_planted_turns_its_own_line_red_and_no_other(tmp_path, plant):
    code, answer = accept(tmp_path, plant, "--quick", "--only", SECTIONS)
    expected, text = PLANTED[plant]
    assert (code, reds(answer)) == (1, expected), [line for line in answer["lines"] if line["red"]]
    assert all(text in line["text"] for line in answer["lines"] if line["red"]), answer["lines"]
    assert answer["complete"]
    assert not answer["ok"]


PLANTED_IN_ONE = {
    "far_rows": ("exact.exchange,long.exchange", ["long.exchange"], "dk of sampled rows is off by"),
    "kept_messages": (
        "memory.exchange.causal,memory.batches.all_to_all", ["memory.batches.all_to_all"], "2 batches of 512 tokens",
    ),
    "part_of_group": ("exact.cp_inside_tp,exact.ring", ["exact.cp_inside_tp"], "out"),
    "recurrence": ("training.recurrence,training.convolution", ["training.recurrence"], "out is off by"),
    "convolution": ("training.recurrence,training.convolution", ["training.convolution"], "out is off by"),
    "recomputed": ("training.checkpointing,exact.ring", ["training.checkpointing"], "gradient of"),
}  # fmt: skip
PLANTED_AT_NIGHT = {
    "far_rows": (
        "long", [f"long.{name}" for name in ("exchange", "ring", "all_gather", "all_to_all", "hybrid")], "dk of",
    ),
    "part_of_group": ("exact.cp_inside_tp,exact.tp_inside_cp", ["exact.cp_inside_tp", "exact.tp_inside_cp"], "out"),
    "compiled": ("training.compile,training.checkpointing", ["training.compile"], "logits"),
    "averaged": ("training.fsdp2,training.checkpointing", ["training.fsdp2"], "gradient of"),
    "huggingface_loss": ("training.huggingface,training.checkpointing", ["training.huggingface"], "loss"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "only", "expected", "text"),
    [
        *(pytest.param(plant, *row, id=plant, marks=pytest.mark.share(3)) for plant, row in PLANTED_IN_ONE.items()),
        *(
            pytest.param(plant, *row, id=f"{plant}.slow", marks=pytest.mark.nightly)
            for plant, row in PLANTED_AT_NIGHT.items()
        ),
    ],
)
def test_what_is_planted_turns_one_line_red(tmp_path, plant, only, expected, text):
    quick = ["--quick"] if (plant, only) in [(name, row[0]) for name, row in PLANTED_IN_ONE.items()] else []
    code, answer = accept(tmp_path, plant, *quick, "--only", only)
    assert (code, reds(answer)) == (1, expected), answer["lines"]
    assert all(text in line["text"] for line in answer["lines"] if line["red"]), answer["lines"]


@pytest.mark.nightly
def test_lines_that_are_not_quick_pass(tmp_path):
    """And what FA3 and FA4 need is said."""
    only = "long,training,memory.batches,exact.tp_inside_cp"
    code, answer = accept(tmp_path, "nothing", "--only", only, timeout=600)
    assert (code, reds(answer)) == (0, []), answer["lines"]
    skipped = {line["line"] for line in answer["lines"] if line["verdict"] == "not run"}
    assert skipped <= {"long.FA3", "long.FA4"}, answer["lines"]


@pytest.mark.nightly
def test_a_call_that_is_slower_than_predicted_is_red(tmp_path):
    only = "time.documents.4k,host.waits"
    code, answer = accept(tmp_path, "slow_call", "--quick", "--only", only)
    assert (code, reds(answer)) == (1, ["time.documents.4k"]), answer["lines"]
    assert answer["lines"][0]["verdict"] == "too slow"
    assert answer["lines"][0]["times"] > 2


def test_a_rank_that_dies_leaves_a_page_with_its_line_red(tmp_path):
    words = ["--quick", "--only", "exact.ring,exact.exchange,exact.sinks,host.waits"]
    module = ["-m", "tests.gloo.acceptance_work", "death"]
    done = torchrun(["--nproc-per-node", "4", *module, *words], tmp_path, PYTHONPATH=f"{ROOT}/src:{ROOT}")
    assert done.status == 1, done.report()
    assert done.failures[0] == (2, -9), done.report()
    answer = json.loads((tmp_path / "acceptance.json").read_text())
    assert reds(answer) == ["exact.exchange"], answer
    verdicts = {line["line"]: line["verdict"] for line in answer["lines"]}
    assert verdicts == {
        "exact.ring": "right", "exact.exchange": "wrong", "exact.sinks": "not run", "host.waits": "not run",
    }  # fmt: skip
    assert not answer["complete"]
    assert "NOT ACCEPTED" in done.out
    assert not private((tmp_path / "acceptance.md").read_text())


def test_json_is_one_object_on_stdout(tmp_path):
    found = pool(RANKS).run(
        planted, "nothing", "--json", "--quick", "--only", "exact.ring", "--out", str(tmp_path / "x"), timeout=240
    )
    answer = json.loads(found[0][1])
    assert answer["command"] == "acceptance"
    assert answer["ok"]


def test_a_line_that_does_not_exist_is_refused_on_all_ranks(tmp_path):
    found = pool(RANKS).run(planted, "nothing", "--only", "exact.rong", "--out", str(tmp_path / "x"), timeout=240)
    assert [code for code, _, _ in found] == [2] * RANKS
    assert "--only must name lines of this machine" in found[0][2]
    assert not list(tmp_path.iterdir())


def test_python_for_torchrun_is_the_one_under_test():
    assert Path(sys.executable).parent.joinpath("torchrun").exists()
