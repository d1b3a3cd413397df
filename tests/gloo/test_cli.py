"""The `longspan` command: what it prints, as text and as JSON, what it refuses, and how quickly it answers."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import longspan as ls
from longspan.cli import command, compare, doctor
from longspan.cli import trace as chrome
from longspan.cli.output import Column, Row, Screen
from longspan.cli.workload import drawn_lengths
from longspan.planning import MACHINES, simulate
from longspan.planning.choose import Reason
from longspan.planning.machine import machine_text, parse_machine
from tests.gloo import cli_work
from tests.pace import quiet_seconds, seconds_of_children
from tests.pool import pool

SMALL = ("--q-heads", "8", "--kv-heads", "2", "--head-dim", "64")
SRC = Path(ls.__file__).parents[1]


@pytest.fixture
def answer(longspan):
    """The JSON that a command prints."""

    def run(*words):
        code, out, err = longspan(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def process(*words, **options):
    """A command in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(SRC), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "longspan", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        **options,
    )


# -- starting -------------------------------------------------------------------------------------------------------


def test_help_names_every_command_and_the_exit_codes(longspan):
    code, out, _ = longspan("--help")
    assert code == 0
    assert all(f"\n    {name}" in out for name in command.COMMANDS)
    assert "0 fine, 1 a check failed, 2 bad arguments" in out
    assert longspan("--version")[1] == f"longspan {ls.__version__}\n"
    assert longspan()[0] == 2


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_explains_itself(longspan, name):
    if importlib.util.find_spec(command.COMMANDS[name][0]) is None:
        pytest.skip(f"{command.COMMANDS[name][0]} is not there yet")
    code, out, _ = longspan(name, "--help")
    assert code == 0
    assert out.startswith(f"usage: longspan {name}")
    assert "--json" in out


def test_planning_commands_start_without_torch_and_rich():
    code = (
        "import sys; from longspan.cli import main\n"
        "for words in (['--help'], ['plan', '--help'], ['plan', '--seq', '4k'],"
        " ['compare', '--seq', '4k', '--ranks', '2'], ['trace', '--seq', '4k', '--out', '/dev/null']):\n"
        "    assert main(words) == 0\n"
        "heavy = {'torch', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def command_seconds(*words):
    def run():
        done = process(*words)
        assert done.returncode == 0, done.stderr

    return quiet_seconds(lambda: seconds_of_children(run))


def test_it_starts_in_half_a_second():
    assert command_seconds("--help") < 0.5


@pytest.mark.share(3)  # 1M packed and 10M causal tokens always
@pytest.mark.parametrize(
    ("seq_len", "ranks", "bar", "docs"),
    [
        ("1M", "64", 1.0, "longtail"),
        ("1M", "64", 1.0, "causal"),
        ("10M", "1024", 5.0, "longtail"),
        ("10M", "1024", 5.0, "causal"),
    ],
)
def test_plan_answers_in_time(seq_len, ranks, bar, docs):
    assert command_seconds("plan", "--seq", seq_len, "--ranks", ranks, "--docs", docs) < bar


# -- plan -----------------------------------------------------------------------------------------------------------


def made(mask, ranks, layout=None, scheme="auto", machine="h100", **options):
    layout = layout or ls.layouts.balanced(mask, world_size=ranks)
    sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"} | options
    return ls.plan(mask, layout, scheme=scheme, machine=machine, **sizes)


def test_plan_says_what_the_api_says(answer):
    found = answer(
        "plan", "--seq", "256k", "--ranks", "16", "--docs", "longtail", "--window", "4095", "--machine", "h100"
    )
    mask = ls.masks.documents(drawn_lengths("longtail", 1 << 18)) & ls.masks.causal() & ls.masks.sliding_window(4095)
    plan = made(mask, 16)
    chosen = next(reason for reason in plan.reasons if reason.chosen)
    assert found["fingerprint"] == plan.fingerprint
    assert (found["scheme"], found["ranks"], found["imbalance"]) == (plan.scheme.name, 16, plan.imbalance)
    assert found["forward_seconds"] + found["backward_seconds"] == pytest.approx(plan.predicted_seconds)
    assert (found["bytes_received"], found["peak_bytes"]) == (chosen.bytes_received, chosen.peak_bytes)
    for direction in ("forward", "backward"):
        assert found[f"{direction}_bytes_received"] == max(plan.bytes_received(rank, direction) for rank in range(16))
    assert found["figures_of_ranks"] == list(chosen.ranks) != list(range(16))
    assert [reason["scheme"] for reason in found["reasons"]] == [reason.scheme for reason in plan.reasons]
    assert found["workload"]["num_documents"] == len(drawn_lengths("longtail", 1 << 18))
    assert (found["kernel"], found["workload"]["kernel"]) == ("FA2", "FA2")
    assert (found["workspace_bytes"], found["host_seconds"]) == (chosen.workspace_bytes, chosen.host_seconds)
    assert found["deterministic_workspace_bytes"] > found["workspace_bytes"] > 0
    assert found["kernel_assumed"] == plan.kernel_assumed


def test_plan_fits_one_screen_and_says_why(longspan):
    code, out, err = longspan("plan", "--seq", "1M", "--ranks", "64", "--docs", "longtail", "--machine", "h100")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0] == "1,048,576 tokens on 64 ranks: hybrid(8,exchange)"
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    for label in ("mask", "tensors", "machine", "kernel", "layout", "received", "memory", "predicted", "host", "why"):
        assert any(line.startswith(f"  {label} ") for line in lines), label
    assert "the quickest of 13 schemes" in out
    figures = r" +[\d.]+ ms" * 3 + r" +[\d.]+ GiB" * 3
    assert re.search(rf"^\* hybrid\(8,exchange\){figures}$", out, re.MULTILINE)
    assert re.search(r"^  ring +at least \d+ ms in all, for its pairs and bytes alone$", out, re.MULTILINE)
    assert "simulated" in out


def test_a_machine_that_was_not_named_is_said_to_be_assumed(longspan):
    assert "h100 (assumed; say --machine)" in longspan("plan", "--seq", "8k")[1]
    assert "assumed" not in longspan("plan", "--seq", "8k", "--machine", "a100")[1]


def test_commands_say_which_kernel_was_assumed(longspan, tmp_path):
    words = ("--seq", "64k", "--ranks", "8", *SMALL)
    for machine, kernel in (("h100", "FA2, PyTorch's own"), ("b200-fa4", "FA4, which has"), ("cpu", "on CPUs")):
        assert kernel in longspan("plan", *words, "--machine", machine)[1]
        assert kernel in longspan("compare", *words, "--machine", machine, "--layouts", "zigzag")[1]
        path = tmp_path / f"{machine}.html"
        assert longspan("report", *words, "--machine", machine, "--out", str(path))[0] == 0
        assert kernel.partition("'")[0] in path.read_text()
    out = longspan("plan", *words, "--machine", "h100-cudnn")[1]
    assert "which is not known" in " ".join(out.split())
    assert "does the work itself" in longspan("plan", *words, "--machine", "cpu")[1]


def test_named_schemes_and_layouts_are_obeyed(answer):
    found = answer("plan", "--seq", "64k", "--ranks", "8", "--scheme", "ring", "--layout", "zigzag", "--keep")
    assert (found["scheme"], found["layout"], len(found["reasons"])) == ("ring", "zigzag", 1)
    assert found["workload"]["keep"] is True
    plan = made(ls.masks.causal(), 8, ls.layouts.zigzag(1 << 16, 8), "ring", keep=True)
    assert found["bytes_received"] == plan.reasons[0].bytes_received


@pytest.mark.parametrize(
    "layout", ["balanced", "zigzag", "contiguous", "per_document", "round_robin_by_work", "striped"]
)
def test_every_layout_plans(answer, layout):
    found = answer(
        "plan", "--docs", "3000,1000,4192", "--ranks", "4", "--layout", layout, "--scheme", "exchange", *SMALL
    )
    assert (found["layout"], found["workload"]["seq_len"]) == (layout, 8192)


@pytest.mark.parametrize("text", ["700\n1200\n\n148\n", "[700, 1200, 148]", " [700,\n1200, 148]\n"])
def test_document_lengths_come_from_files(answer, tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    found = answer("plan", "--docs", str(tmp_path / "lengths"), "--ranks", "4", *SMALL)
    again = answer("plan", "--docs", "700,1200,148", "--seq", "2k", "--ranks", "4", *SMALL)
    assert found["fingerprint"] == again["fingerprint"]


# -- refusals -------------------------------------------------------------------------------------------------------

REFUSALS = [
    (("plan",), "--docs causal needs a length: add --seq, such as --seq 1M."),
    (("plan", "--seq", "1Q"), "argument --seq: must be a number such as 65536, 64k or 1M, but got '1Q'."),
    (("plan", "--seq", "0"), "--seq: must be a whole number from 1"),
    (("plan", "--seq", "1.0001k"), "but got '1.0001k'"),
    (("plan", "--seq", "8k", "--docs", "nonsense"), "--docs must be causal, full, longtail"),
    (("plan", "--seq", "8k", "--docs", "700,x"), "a number such as 65536"),
    (("plan", "--seq", "8k", "--docs", "700,800"), "2 documents of 1500 tokens together, but got 8192"),
    (("plan", "--seq", "8k", "--docs", "full", "--window", "4"), "--window needs causal documents"),
    (
        ("plan", "--seq", "8k", "--machine", "tpu"),
        "--machine must be one of h100, h100-fa3, h100-cudnn",
    ),
    (("plan", "--seq", "8k", "--scheme", "magic"), "scheme must be one of"),
    (("plan", "--seq", "8k", "--layout", "magic"), "invalid choice: 'magic'"),
    (("plan", "--seq", "8k", "--q-heads", "7"), "leaves 7 over"),
    (("plan", "--seq", "8k", "--ranks", "1M"), "--ranks must be at most 65536, but got 1048576."),
    (("plan", "--seq", "8k", "--fetch-bytes", "1"), "fetch_bytes must be at least 65536"),
    (("plan", "--seq", "8k", "--scheme", ""), "scheme must be one of"),
    (("plan", "--seq", "8k", "--docs", "short", "--seed", "-1"), "--seed must be 0 or more, but got -1."),
    (("plan", "--seq", "8k", "--seed", "1"), "--seed needs drawn documents (longtail, short, mixed), but got --docs"),
    (("plan", "--seq", "8k", "--scheme", "ring", "--fetch-bytes", "1M"), "fetch_bytes must be None with scheme 'ring'"),
    (("plan", "--seq", "3G"), "layout must have at most 3,000,000,000 tokens, but got 3,221,225,472"),
    (("plan", "--model", "qwen3-8", "--seq", "8k"), "but got 'qwen3-8'. Did you mean qwen3-8b?"),
    (("compare", "--seq", "8k", "--layouts", "zigzag,magic"), "--layouts must be of balanced"),
    (("compare", "--seq", "8k", "--layouts", ""), "--layouts must be of balanced"),
    (
        ("compare", "--seq", "8k", "--schemes", ""),
        "argument --schemes: must be names such as ring,hybrid(4,exchange), but got ''.",
    ),
    (("compare", "--seq", "8k", "--schemes", "ring;"), "but got 'ring;'."),
    (("compare", "--seq", "8k", "--schemes", "ring; auto"), "--schemes must be names such as"),
    (("show", "mask", "--seq", "8k", "--scheme", "nonsense"), "a mask is the same with every scheme"),
    (("show", "layout", "--seq", "8k", "--keep"), "--keep must not be set: a layout is the same"),
    (
        ("compare", "--seq", "8k", "--plot", "curves.doc"),
        "--plot: the name must end in .svg or .png, but got 'curves.doc'.",
    ),
    (("show", "mask", "--seq", "8k", "--svg", "mask.png"), "--svg: the name must end in .svg,"),
    (("show", "mask", "--seq", "8k", "--png", "mask"), "--png: the name must end in .png,"),
    (
        ("show", "mask", "--seq", "8k", "--html", "mask.md"),
        "--html: the name must end in .html or",
    ),
    (("report", "--seq", "8k", "--out", "report.pdf"), "--out: the name must end in .html or"),
    (
        ("report", "--seq", "8k", "--out", "/nowhere/at/all.html"),
        "there is no directory '/nowhere/at'. Create it first.",
    ),
    (("trace", "--seq", "8k", "--out", "/"), "--out: '/' is a directory. Name a file in it."),
    (("plan", "--docs", "runs/lengths.txt"), "There is no file 'runs/lengths.txt' here."),
    (("plan", "--seq", "8k", "--machine", "mine.json"), "There is no file 'mine.json' here."),
    (("plan", "--seq", "8k", "--config", "no/config.json"), "--config must be a config.json"),
    (("plan", "--seq", "8k", "--schemes", "ring"), "plan has no --schemes ring. Did you mean --scheme?"),
    (("show", "mask", "--bogus"), "show has no --bogus."),
    (("trace", "--seq", "8k", "--ranks", "1k", "--out", "x"), "--ranks of a trace must be at most 256"),
    (("trace", "--seq", "8k"), "the following arguments are required: --out"),
    (
        ("trace", "--seq", "8k", "--out", "/nowhere/at/all.json"),
        "there is no directory '/nowhere/at'. Create it first.",
    ),
    (("calibrate",), "torchrun --nproc-per-node 4 -m longspan calibrate"),
    (("dance",), "there is no command dance. See longspan --help."),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=lambda value: " ".join(value)[:50])
def test_refusals_are_one_line_and_code_2(longspan, words, message):
    code, out, err = longspan(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("longspan")
    assert err.count("\n") == 1


FILES = [
    ("12\nx\n", "line 2: must be a whole number"),
    ("12\n-3\n", "but got '-3'"),
    ("12\n0\n", "but got '0'"),
    ("١٢\n", "must be a whole number"),
    ("9" * 30, "must be a whole number"),
    ("", "lists 0 lengths"),
    ("[1, 2.5]", "entry 1 must be"),
    ("[1, true]", "but got True"),
    ("[1, [2]]", "but got [2]"),
    ("[1, 2", "is not one"),
    ("[" * 100000, "is not one"),
    ("1\n" * (1 << 19) + "1", "at most 1048576 bytes"),
    (b"\xff\xfe\x00", "is not text"),
]


@pytest.mark.parametrize(("text", "message"), FILES, ids=range(len(FILES)))
def test_hostile_length_files_are_refused(longspan, tmp_path, text, message):
    path = tmp_path / "lengths"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = longspan("plan", "--docs", str(path))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["verify", "doctor"])
def test_commands_that_need_torch_name_it(longspan, monkeypatch, command):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = longspan(command)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"longspan {command}: this command needs torch, which is not installed. Install PyTorch."
    )


def test_errors_of_a_process_carry_no_traceback():
    done = process("plan", "--seq", "8k", "--scheme", "magic")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


# -- machines as files ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_reads_back(name):
    assert parse_machine(machine_text(MACHINES[name])) == MACHINES[name]


def test_plan_reads_a_machine_file(answer, tmp_path):
    slow = replace(MACHINES["h100"], name="slow", flops=MACHINES["h100"].flops / 10)
    path = tmp_path / "slow.json"
    path.write_text(machine_text(slow))
    words = ("plan", "--seq", "64k", "--scheme", "exchange")
    found, usual = answer(*words, "--machine", str(path)), answer(*words, "--machine", "h100")
    assert found["workload"]["machine"] == "slow"
    assert found["forward_seconds"] > 3 * usual["forward_seconds"]


def _changed(**changes):
    found = json.loads(machine_text(MACHINES["cpu"]))
    for name, value in changes.items():
        if value is None:
            del found[name]
        else:
            found[name] = value
    return json.dumps(found)


BAD_MACHINES = [
    ("", "a machine file is JSON"),
    ("[]", "a machine file is a JSON object"),
    ("{}", "a machine file is a JSON object"),
    ("[" * 30000, "a machine file is JSON"),
    (" " * 70000, "at most 65536 characters"),
    (_changed(format="longspan machine 2"), "a machine file is a JSON object"),
    (_changed(flops=None), "'flops' is missing"),
    (_changed(extra=1), "'extra' is not known"),
    (_changed(flops="1e9"), "machine.flops must be a positive number"),
    (_changed(flops=-1.0), "machine.flops must be a positive number"),
    (_changed(flops=True), "machine.flops must be a positive number"),
    (_changed(flops=10**400), "machine.flops must be a positive number"),
    (_changed(backward_tiling={"rows": 1}), "machine.backward_tiling: 'cut_width' is missing"),
    (_changed().replace("219000000000.0", "NaN"), "NaN is not a measured number"),
    (_changed().replace("219000000000.0", "1e999"), "machine.flops must be a positive number"),
    (_changed(slots=1.5), "machine.slots must be an integer"),
    (_changed(slots=0), "machine.slots must be an integer"),
    (_changed(one_launch=1), "machine.one_launch must be true or false"),
    (_changed(name="a\x1b[31m"), "machine.name must be a printable text"),
    (_changed(source="x" * 2000), "machine.source must be a printable text"),
    (_changed(links=[]), "machine.links must be a list of 1 to 8 links"),
    (_changed(links=[{"ranks": 8, "bandwidth": 1e9}]), "'latency' is missing"),
    (
        _changed(links=[{"ranks": 8, "bandwidth": 0, "latency": 0}]),
        "machine.links[0].bandwidth must be a positive number",
    ),
    (_changed(forward_tiling=[1, 2]), "machine.forward_tiling must be an object"),
]


@pytest.mark.parametrize(("text", "message"), BAD_MACHINES, ids=range(len(BAD_MACHINES)))
def test_hostile_machine_files_are_refused(longspan, tmp_path, text, message):
    path = tmp_path / "machine.json"
    path.write_text(text)
    code, _, err = longspan("plan", "--seq", "8k", "--machine", str(path))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


# -- compare --------------------------------------------------------------------------------------------------------


def test_compare_says_what_the_api_says(answer):
    found = answer("compare", "--seq", "256k", "--ranks", "8,16", "--docs", "longtail", "--machine", "h100")["entries"]
    mask = ls.masks.documents(drawn_lengths("longtail", 1 << 18)) & ls.masks.causal()
    make = {
        "balanced": lambda ranks: ls.layouts.balanced(mask, world_size=ranks),
        "zigzag": lambda ranks: ls.layouts.zigzag(1 << 18, ranks),
        "contiguous": lambda ranks: ls.layouts.contiguous(1 << 18, ranks),
        "per_document": lambda ranks: ls.layouts.per_document(drawn_lengths("longtail", 1 << 18), ranks),
    }
    assert {entry["layout"] for entry in found} == set(make)
    assert {"exchange", "ring", "all_gather", "all_to_all"} < {entry["scheme"] for entry in found}
    for entry in found:
        if entry["note"]:
            continue
        plan = made(mask, entry["ranks"], make[entry["layout"]](entry["ranks"]), entry["scheme"])
        reason = plan.reasons[0]
        assert entry["imbalance"] == plan.imbalance
        for name in ("forward_seconds", "backward_seconds", "bytes_received", "peak_bytes"):
            assert entry[name] == getattr(reason, name)
    for ranks in (8, 16):
        mine = [entry for entry in found if entry["ranks"] == ranks]
        theirs = next(entry for entry in mine if entry["note"])
        for entry in mine:
            factor = theirs["bytes_received"] / entry["bytes_received"]
            assert entry["fewer_bytes_than_torch"] == pytest.approx(factor)


def notes_of(entries):
    return {(entry["note"], entry["layout"]) for entry in entries if entry["note"]}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ("--docs", "causal"),
            {
                ("PyTorch flex", "zigzag"),
                ("PyTorch flex", "contiguous"),
                ("PyTorch ring", "zigzag"),
                ("PyTorch all_gather", "zigzag"),
            },
        ),
        (
            ("--docs", "full"),
            {
                ("PyTorch flex", "zigzag"),
                ("PyTorch flex", "contiguous"),
                ("PyTorch ring", "contiguous"),
                ("PyTorch all_gather", "contiguous"),
            },
        ),
        (
            ("--docs", "short"),
            {("PyTorch flex", "zigzag"), ("PyTorch flex", "contiguous"), ("PyTorch flex", "per_document")},
        ),
        (("--docs", "causal", "--window", "512"), {("PyTorch flex", "zigzag"), ("PyTorch flex", "contiguous")}),
        (
            ("--docs", "causal", "--window", "512", "--layouts", "balanced,round_robin_by_work"),
            {
                ("PyTorch flex", "zigzag"),
                ("PyTorch flex", "contiguous"),
                ("PyTorch flex", "round_robin_by_work"),
            },
        ),
    ],
)
def test_pytorchs_rows_are_what_pytorch_can_do(answer, words, expected):
    assert (
        notes_of(answer("compare", "--seq", "16k", "--ranks", "4", "--schemes", "ring", *words)["entries"]) == expected
    )


def test_pytorchs_rows_receive_what_pytorch_sends(answer):
    """SDPA fetches K and V in both passes and returns float32; flex gathers once and reduces in bfloat16."""
    tokens, row = 1 << 16, 8 * (128 + 128) * 2
    found = answer("compare", "--seq", "64k", "--ranks", "8", "--docs", "causal", "--keep", "--schemes", "ring")[
        "entries"
    ]
    received = {entry["note"]: entry["bytes_received"] for entry in found if entry["note"]}
    assert received["PyTorch all_gather"] == tokens * 7 // 8 * row * (1 + 1 + 2)
    assert received["PyTorch flex"] == tokens * 7 // 8 * row * (1 + 1)


def test_what_pytorch_refuses_is_listed(longspan):
    def said(*words):
        code, out, _ = longspan("compare", "--ranks", "4", "--schemes", "ring", "--layouts", "zigzag", *words)
        assert code == 0
        return " ".join(out.split())

    fine = said("--docs", "1024,3072")
    assert "cannot express documents" in fine
    assert "refuses" not in fine
    assert "per-document balancer refuses" in said("--docs", "1028,3068")
    odd = said("--seq", "4095")
    assert "flex attention refuses 4,095 tokens on 4 ranks" in odd
    assert "per-document balancer" not in odd
    assert "cannot express windows" in said("--seq", "4k", "--window", "100")
    assert "balance causal masks only" in said("--seq", "4k", "--docs", "full")
    plain = said("--seq", "4k")
    assert "refuses" not in plain
    assert "cannot express" not in plain


def test_ties_are_broken_by_bytes_then_memory():
    def entry(name, seconds, received, peak):
        return compare.Entry(8, "balanced", name, "", 1.0, Reason(name, seconds / 2, seconds / 2, received, peak))

    entries = [
        entry("quickest", 1.000, 30, 1),
        entry("more memory", 1.009, 20, 9),
        entry("preferred", 1.008, 20, 5),
        entry("slower", 1.011, 10, 1),
        entry("slower, more bytes", 1.015, 11, 1),
    ]
    rng = np.random.default_rng()
    for _ in range(5):
        names = [one.scheme for one in compare.by_preference([entries[i] for i in rng.permutation(5)])]
        assert names == ["preferred", "more memory", "quickest", "slower", "slower, more bytes"]


def test_compare_shows_the_byte_reduction_on_longtail_documents(longspan):
    code, out, _ = longspan("compare", "--seq", "1M", "--ranks", "64", "--docs", "longtail", "--layouts", "balanced")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 100
    joined = " ".join(out.split())
    found = re.search(
        r"([\d.]+)x fewer bytes than PyTorch's best row \(flex over per_document\), predicted ([\d.]+)x as fast", joined
    )
    assert float(found[1]) > 6
    assert 1.2 < float(found[2]) < 2  # 3.4x as fast as the worst of PyTorch's
    assert re.search(r"^  PyTorch flex +per_document .* 1\.00x ", out, re.MULTILINE)
    assert re.search(r"^  PyTorch flex +zigzag .* 1\.00x ", out, re.MULTILINE)
    assert "PyTorch ring" not in out
    assert re.search(r"^\* hybrid\(8,exchange\) +balanced ", out, re.MULTILINE)


def test_factors_are_said_in_the_right_direction():
    def said(ours, best, worst=(1000, 1000), seconds=2.0):
        rows = (("exchange", "balanced", "", 1.0, ours), ("all_gather", "zigzag", "PyTorch flex", seconds, best))
        rows += (("ring", "zigzag", "PyTorch ring", 9.0, worst),)
        return compare.verdict(
            [
                compare.Entry(8, layout, name, note, 1.0, Reason(name, time / 2, time / 2, *figures))
                for name, layout, note, time, figures in rows
            ]
        )

    start, name = "exchange over balanced: ", "PyTorch's best row (flex over zigzag), predicted"
    assert said((10, 10), (100, 30)) == f"{start}10.0x fewer bytes than {name} 2.0x as fast, with 3.0x less memory."
    assert said((57, 40), (10, 10)) == f"{start}5.7x the bytes of {name} 2.0x as fast, with 4.0x the memory."
    assert said((100, 100), (100, 101)) == f"{start}as many bytes as {name} 2.0x as fast."
    assert said((0, 0), (10, 0)) == f"{start}no bytes at all, predicted 2.0x as fast."
    assert said((10, 10), (20, 10), seconds=1.005) == f"{start}2.0x fewer bytes than {name} as fast."


def test_no_factor_is_infinite(longspan):
    code, out, _ = longspan("compare", "--docs", "2k,2k", "--ranks", "2", "--layouts", "contiguous", *SMALL)
    assert code == 0
    assert "no bytes at all" in " ".join(out.split())
    assert "inf" not in out
    code, out, _ = longspan("plan", "--docs", "2k,2k", "--ranks", "2", "--layout", "contiguous", *SMALL)
    assert "no bytes at all" in " ".join(out.split())


@pytest.mark.parametrize("asked", ["exchange; hybrid(2, ring)", "exchange,hybrid(2,ring)", "hybrid(2,ring);exchange"])
def test_several_schemes_are_asked_for_alike(answer, capsys, asked):
    found = answer("compare", "--seq", "4k", "--ranks", "4", "--schemes", asked, "--layouts", "contiguous")["entries"]
    ours = {entry["scheme"] for entry in found if not entry["note"]}
    assert ours == {"exchange", "hybrid(2,ring)"}
    assert command.main(["verify", "--seq", "48", "--schemes", asked, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert len(checks) == 2


def test_compare_takes_schemes_and_layouts(answer):
    words = (
        "compare",
        "--seq",
        "16k",
        "--ranks",
        "4",
        "--schemes",
        "exchange; hybrid(2, ring)",
        "--layouts",
        "contiguous",
    )
    found = {(entry["scheme"], entry["layout"]) for entry in answer(*words)["entries"]}
    torch = {("all_gather", "contiguous"), ("all_gather", "zigzag"), ("ring", "zigzag")}
    assert found == {("exchange", "contiguous"), ("hybrid(2,ring)", "contiguous"), *torch}
    every = answer("compare", "--seq", "16k", "--ranks", "4", "--schemes", "all", "--layouts", "zigzag")["entries"]
    every = [entry for entry in every if not entry["note"]]
    assert len(every) == len({entry["scheme"] for entry in every}) > 6


@pytest.mark.parametrize("ranks", ["2,4,8", "4"], ids=["curves", "bars"])
def test_compare_draws_a_picture(longspan, tmp_path, ranks):
    path = tmp_path / "compared.svg"
    code, out, _ = longspan("compare", "--seq", "32k", "--ranks", ranks, "--docs", "short", "--plot", str(path))
    assert code == 0
    assert f"Picture: {path}" in " ".join(out.split())  # a long path goes on a line of its own
    svg = path.read_text()
    assert svg.startswith("<svg")
    assert all(name in svg for name in ("PyTorch flex", "exchange", "ring"))
    assert svg.count("<path") >= 8


# -- traces ---------------------------------------------------------------------------------------------------------


def slices_of(trace, category):
    return [event for event in trace["traceEvents"] if event["ph"] == "X" and event["cat"] == category]


def check_trace(trace, plan):
    """Every rank is a process, tracks have names and never overlap, and computes and messages are those of the plan."""
    ranks = plan.layout.world_size
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {rank: f"rank {rank}" for rank in range(ranks)}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    by_track = {}
    for event in (event for event in trace["traceEvents"] if event["ph"] == "X"):
        assert event["dur"] >= 0
        by_track.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(by_track) <= set(tracks)
    for times in by_track.values():
        times.sort()
        assert all(a[1] <= b[0] + 0.002 for a, b in itertools.pairwise(times))
    computes, messages = set(), {}
    for rank in range(ranks):
        for direction in ("forward", "backward"):
            for number, step in enumerate(plan.steps(rank, direction)):
                if step.computes:
                    computes.add((rank, f"{direction} {number}"))
                for t in step.transfers:
                    if t.dst == rank:
                        key = (rank, f"{direction} {number}", t.src)
                        messages[key] = messages.get(key, 0) + t.piece.num_bytes(plan.sizes)
    assert {(e["pid"], e["name"]) for e in slices_of(trace, "compute")} == computes
    found = {(e["pid"], e["name"], e["args"]["from"]): e["args"]["bytes"] for e in slices_of(trace, "message")}
    assert found == messages


def test_trace_is_the_simulated_timeline(longspan, answer, tmp_path):
    path = tmp_path / "plan.json"
    words = ("trace", "--seq", "32k", "--ranks", "4", "--docs", "short", "--machine", "h100", "--out", str(path))
    code, out, _ = longspan(*words)
    assert code == 0
    assert out.startswith("32,768 tokens on 4 ranks: ")
    assert f"Wrote {path}. Open it in ui.perfetto.dev" in " ".join(out.split())
    mask = ls.masks.documents(drawn_lengths("short", 1 << 15)) & ls.masks.causal()
    plan = made(mask, 4)
    trace = json.loads(path.read_text())
    check_trace(trace, plan)
    took = {way: simulate(plan.schedule(way), plan.machine).seconds for way in ("forward", "backward")}
    end = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert end == pytest.approx(1e6 * sum(took.values()), rel=1e-6)
    found = answer(*words)
    assert found["seconds"] == pytest.approx(sum(took.values()))
    assert (found["fingerprint"], found["how"]) == (plan.fingerprint, "simulated")
    assert trace["otherData"]["fingerprint"] == plan.fingerprint


# -- with ranks -----------------------------------------------------------------------------------------------------


def on_ranks(size, *words, timeout=240):
    """Rank 0's stdout of a command that all ranks ran; the others print nothing."""
    found = pool(size).run(cli_work.command, *words, timeout=timeout)
    assert [code for code, _, _ in found] == [0] * size, found
    assert all(out == "" for _, out, _ in found[1:])
    return found[0][1]


@pytest.mark.nightly  # in JSON always
def test_calibrate_writes_a_machine_that_plan_reads(answer, tmp_path):
    path = tmp_path / "machine.json"
    out = on_ranks(4, "calibrate", *SMALL, "--rounds", "2", "--out", str(path), "--name", "here")
    assert out.startswith("here: 4 ranks at once on cpu, 4 on a host of")
    for label in ("kernel", "forward", "backward", "operation", "copies", "link"):
        assert re.search(rf"^  {label} +\S", out, re.MULTILINE), label
    machine = parse_machine(path.read_text())
    assert (machine.name, len(machine.links)) == ("here", 1)
    assert 1e8 < machine.flops * machine.backward_share < 1e13
    assert 1e6 < machine.links[0].bandwidth < 1e12
    assert 0 <= machine.links[0].latency < 1
    found = answer("plan", "--seq", "8k", "--ranks", "4", "--machine", str(path), *SMALL)
    assert found["workload"]["machine"] == "here"


@pytest.mark.nightly
def test_calibrate_answers_in_json():
    found = json.loads(on_ranks(2, "calibrate", *SMALL, "--rounds", "1", "--json"))
    assert (found["command"], found["ranks"], found["kernel"], found["file"]) == ("calibrate", 2, "cpu_flash", None)
    assert found["forward_flops"] > 0


def test_bench_measures_the_planned_steps(tmp_path):
    path = tmp_path / "ran.json"
    words = ("bench", "--docs", "700,1200,148", *SMALL, "--machine", "cpu", "--repeats", "3", "--out", str(path))
    out = on_ranks(4, *words, "--scheme", "exchange")
    assert out.startswith("2,048 tokens on 4 ranks: exchange over balanced\n  measured  ")
    assert "Medians of 3 repetitions" in out
    assert "Predicted for cpu: " in out
    mask = ls.masks.documents([700, 1200, 148]) & ls.masks.causal()
    plan = made(mask, 4, None, "exchange", "cpu", q_heads=8, kv_heads=2, head_dim=64)
    trace = json.loads(path.read_text())
    check_trace(trace, plan)
    assert trace["otherData"]["how"] == "measured"
    assert trace["otherData"]["fingerprint"] == plan.fingerprint
    by_rank = {e["pid"] for e in slices_of(trace, "compute")}
    assert by_rank == {0, 1, 2, 3}


@pytest.mark.parametrize("scheme", ["ring", "all_to_all"])
def test_bench_answers_in_json(scheme):
    words = ("bench", "--seq", "1k", *SMALL, "--repeats", "2", "--scheme", scheme, "--dtype", "float32", "--json")
    found = json.loads(on_ranks(2, *words))
    assert (found["scheme"], found["how"], found["ranks"]) == (scheme, "measured", 2)
    assert found["seconds"] == found["forward_seconds"] + found["backward_seconds"]
    assert len(found["repeats"]["forward_seconds"]) == 2
    assert min(found["repeats"]["backward_seconds"]) > 0


def test_bench_under_torchrun(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", "2"]
    words = ["-m", "longspan", "bench", "--seq", "1k", *SMALL, "--repeats", "1", "--out", "ran.json", "--json"]
    done = subprocess.run(
        [sys.executable, *launch, *words],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        cwd=tmp_path, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ranks"] == 2
    assert slices_of(json.loads((tmp_path / "ran.json").read_text()), "compute")


def test_clocks_are_aligned_across_ranks():
    found = json.loads(on_ranks(2, "doctor", "--quick", "--json"))
    assert found["clocks"][0]["ahead_seconds"] == 0
    assert abs(found["clocks"][1]["ahead_seconds"]) < max(0.01, found["clocks"][1]["round_trip_seconds"])


# -- doctor ---------------------------------------------------------------------------------------------------------


def test_doctor_finds_ranks_fit():
    out = on_ranks(2, "doctor")
    assert out.startswith(f"longspan {ls.__version__}: fit\n")
    for label in ("versions", "tested", "host", "backends", "kernels", "clocks", "speed", "links", "self-check"):
        assert re.search(rf"^  {label} +\S", out, re.MULTILINE), label
    assert re.search(r"(\d+) of \1 attentions equal dense float64, gradients too, over Gloo", out)


def test_doctor_alone_answers_in_json_and_gives_advice(answer):
    found = answer("doctor", "--quick")
    assert found["ok"] is True
    assert all(check["ok"] for check in found["checks"])
    assert found["versions"]["longspan"] == ls.__version__
    assert found["kernels"]["cpu_flash"] == "yes"
    assert found["kernels"]["varlen"] != "yes"
    assert any("run this under torchrun" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("torch_found", "transformers_found"), [("2.13.0+cpu", None), ("2.13.0", "5.9.0"), ("2.15.0", None)]
)
def test_doctor_calls_tested_versions_fit(longspan, answer, monkeypatch, torch_found, transformers_found):
    monkeypatch.setattr(doctor, "versions", installed(torch_found, transformers_found))
    code, out, _ = longspan("doctor", "--quick")
    assert code == 0
    assert out.startswith(f"longspan {ls.__version__}: fit\n")
    assert "NOT" not in out
    found = answer("doctor", "--quick")
    assert found["tested"]["tested"] is True
    assert found["tested"]["advice"] is None
    assert not any("was tested on" in line or "or newer" in line for line in found["advice"])


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("torch_found", "transformers_found", "said"),
    [
        ("2.99.0", None, "torch 2.99 was NOT tested: newer than tested (2.11 to 2.15)"),
        ("3.0.0.dev2027", "5.22.2", "torch 3.0 was NOT tested: newer than tested (2.11 to 2.15)"),
        ("2.10.0+cu130", None, "torch 2.10 was NOT tested: older than the floor (2.11 to 2.15)"),
        ("2.13.0", "5.10.2", "transformers 5.10 was NOT tested: between tested versions (5.9 to 5.23)"),
        ("2.13.0", "4.57.6", "transformers 4.57 was NOT tested: older than the floor (5.9 to 5.23)"),
        ("2.13.0", "main", "transformers main was NOT tested: its version is not known (5.9 to 5.23)"),
        ("2.12.0", "5.9.0", "torch 2.12 and transformers 5.9 were each tested, but not together"),
    ],
)
def test_doctor_calls_untested_versions_untested(longspan, answer, monkeypatch, torch_found, transformers_found, said):
    """Nothing is wrong, so the exit code is 0; but only the self-check speaks for it, and doctor says so."""
    monkeypatch.setattr(doctor, "versions", installed(torch_found, transformers_found))
    code, out, _ = longspan("doctor", "--quick")
    assert code == 0
    assert out.startswith(f"longspan {ls.__version__}: right in the self-check, on versions that were NOT tested\n")
    assert not re.search(r"\bfit\b", out)
    found = answer("doctor", "--quick")
    assert (found["ok"], found["tested"]["tested"], found["tested"]["text"]) == (True, False, said)
    older = "older" in said
    assert any(("or newer: update" if older else "was tested on") in line for line in found["advice"])


def installed(torch_found, transformers_found):
    """`doctor.versions`, with these."""
    kept = {**doctor.versions(), "torch": torch_found, "transformers": transformers_found}
    return lambda: dict(kept)


def test_doctor_that_finds_wrong_answers_ends_with_code_1(longspan, monkeypatch):
    wrong = [{"scheme": "ring", "dtype": "float32", "ranks": 4, "ok": False, "text": "dq is wrong on rank 2"}]
    wrong[0] |= {"kernel": "cpu_flash", "shares": {"out": 0.2, "dq": 31.0}}
    monkeypatch.setattr(doctor, "self_checks", lambda ranks, quick, advance: wrong)
    code, out, _ = longspan("doctor", "--quick")
    assert code == 1
    assert "NOT FIT" in out
    assert "FAILED: ring, float32: dq is wrong on rank 2" in out
    assert "do not train with this installation" in out


# -- the screen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fancy", [False, True], ids=["plain", "rich"])
def test_tables_are_aligned_with_and_without_rich(capsys, fancy):
    if fancy:
        pytest.importorskip("rich")
    screen = Screen(fancy=fancy, width=100)
    columns = (Column("scheme", False), Column("time"), Column("bytes"))
    rows = [
        Row(("exchange [x]", "1.00 ms", "7 B"), True),
        Row(("ring", "12.0 ms", "8 GiB")),
        Row(("all",), rest="at least"),
    ]
    screen.title("[title]")
    screen.facts((("label", "word " * 40), ("b", "short")))
    screen.table(columns, rows)
    screen.notes(("note [1]",))
    text = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0] == "[title]"
    assert lines[1].startswith("  label  word")
    assert lines[2].startswith("         word")
    assert "* exchange [x]  1.00 ms    7 B" in lines
    assert "  ring          12.0 ms  8 GiB" in lines
    assert "  all           at least" in lines
    assert lines[-1] == "note [1]"


def test_without_rich_the_screen_is_plain(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    screen = Screen(fancy=True)
    screen.title("plain")
    assert not screen.fancy
    assert capsys.readouterr().out == "plain\n"


def test_slices_of_a_trace_keep_their_tracks():
    slices = [
        chrome.Slice(0, "forward", 0, chrome.COMPUTE, 0.0, 1.0),
        chrome.Slice(1, "forward", 0, chrome.MESSAGE, 0.0, 0.5, peer=0, num_bytes=7),
    ]
    events = [event for event in chrome.trace(slices, 2, {})["traceEvents"] if event["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["dur"]) for e in events] == [(0, 0, 1e6), (1, 1, 5e5)]
    assert chrome.busy(slices, 0, chrome.COMPUTE, "forward") == 1.0


def test_drawn_lengths_are_those_of_the_benchmarks():
    workloads = pytest.importorskip("benchmarks.workloads")
    for kind in ("longtail", "short", "mixed"):
        assert np.array_equal(drawn_lengths(kind, 100_000, 3), workloads.document_lengths(kind, 100_000, 3))
