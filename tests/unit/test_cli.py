"""The `longspan` command in this process: what it prints, as text and as JSON, and what it refuses."""

import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import longspan as ls
from longspan.cli import command, doctor
from longspan.cli.launch import JobRanks, describe_device, join_ranks, place
from longspan.cli.output import Row, print_facts, print_table, progress
from longspan.cli.plan import MAX_SPANS
from longspan.cli.verify import check_row, show_shares
from longspan.cli.workload import drawn_lengths
from longspan.errors import LongspanError
from longspan.planning import MACHINES
from longspan.planning.machine import machine_text, parse_machine
from longspan.verification import Check, Finding, Report

SMALL = ("--q-heads", "8", "--kv-heads", "2", "--head-dim", "64")


@pytest.fixture
def answer(longspan):
    """The JSON that a command prints."""

    def run(*words):
        code, out, err = longspan(*words, "--json")
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


# -- starting ----------------------------------------------------------------------------------------------------------


def test_help_names_every_command(longspan):
    code, out, _ = longspan("--help")
    assert code == 0
    assert list(command.COMMANDS) == ["plan", "show", "verify", "prove", "doctor"]
    assert all(f"\n    {name} " in out for name in command.COMMANDS)
    assert "0 fine, 1 a check failed, 2 bad arguments" in out
    assert longspan("--version")[1] == f"longspan {ls.__version__}\n"
    assert longspan()[0] == 2
    for line in command.DESCRIPTION.splitlines():  # each line can be typed
        words = line.partition("longspan ")[2].split() if line.startswith("  ") else []
        assert not words or command.make_parser(words).parse_args(words).command in command.COMMANDS


@pytest.mark.parametrize("name", command.COMMANDS)
def test_every_command_explains_itself(longspan, name):
    code, out, _ = longspan(name, "--help")
    assert code == 0
    assert out.startswith(f"usage: longspan {name}")
    assert "--json" in out


def test_planning_starts_without_torch_and_matplotlib():
    code = (
        "import sys; from longspan.cli import main\n"
        "for words in (['--help'], ['plan', '--help'], ['plan', '--seq', '4k'], ['show', 'mask', '--seq', '4k'],"
        " ['show', 'memory', '--seq', '4k']):\n"
        "    assert main(words) == 0\n"
        "heavy = {'torch', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, stdout=subprocess.DEVNULL)


def test_a_reader_that_leaves_changes_no_status():
    line = f'"{sys.executable}" -m longspan plan --seq 4k | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_is_lines_on_stderr(capsys, monkeypatch):
    args = command.make_parser(["plan"]).parse_args(["plan"])
    advance = progress(args, "measuring")
    for name in ("links", "copies"):  # the second within the interval
        advance(name)
    assert capsys.readouterr() == ("", "measuring: links, 0 s\n")
    progress(args, "measuring", is_main=False)("links")
    args.json = True
    progress(args, "measuring")("links")
    assert capsys.readouterr() == ("", "")


# -- plan --------------------------------------------------------------------------------------------------------------


def made(mask, ranks, layout=None, scheme="auto", machine="h100", **options):
    layout = layout or ls.layouts.balanced(mask, world_size=ranks)
    sizes = {"q_heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bfloat16"} | options
    return ls.plan(mask, layout, scheme=scheme, machine=machine, **sizes)


def test_plan_says_what_the_api_says(answer):
    words = ("--seq", "256k", "--ranks", "16", "--docs", "longtail", "--window", "4095", "--machine", "h100")
    found = answer("plan", *words)
    mask = ls.masks.documents(drawn_lengths("longtail", 1 << 18)) & ls.masks.causal() & ls.masks.sliding_window(4095)
    plan = made(mask, 16)
    chosen = plan.chosen
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
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 100
    labels = ("mask", "tensors", "machine", "kernel", "layout", "received", "memory", "predicted", "host", "why")
    for label in (*labels, "PyTorch"):
        assert any(line.startswith(f"  {label} ") for line in lines), label
    assert "the quickest of 13 schemes" in out
    figures = r" +[\d.]+ ms" * 3 + r" +[\d.]+ GiB" * 3
    assert re.search(rf"^\* hybrid\(8,exchange\){figures}$", out, re.MULTILINE)
    assert re.search(rf"^  PyTorch flex, per_document{figures}$", out, re.MULTILINE)
    assert re.search(r"^  ring +at least \d+ ms in all, for its pairs and bytes alone$", out, re.MULTILINE)
    assert "simulated" in out
    found = re.search(
        r"receives [\d.]+ GiB \(([\d.]+)x as many\) and takes \d+ ms \(([\d.]+)x as long\)", " ".join(out.split())
    )
    assert found is not None
    assert float(found[1]) > 6
    assert 1.2 < float(found[2]) < 2


def test_pytorch_receives_what_its_flex_attention_sends(answer):
    """It gathers K and V once, and reduces their gradients in bfloat16, over the best of its balancers."""
    tokens, row = 1 << 16, 8 * (128 + 128) * 2
    for docs, layout in (("causal", "zigzag"), ("full", "contiguous"), ("48k,16k", "per_document")):
        found = answer("plan", "--docs", docs, "--seq", "64k", "--ranks", "8")["pytorch"]
        assert found["layout"] == layout
        assert found["bytes_received"] == tokens * 7 // 8 * row * (1 + 1)
        assert found["imbalance"] < 1.001


def test_the_per_document_balancer_is_priced_where_it_has_few_spans(answer):
    docs = ",".join(["32k", *["16"] * 2048])
    assert answer("plan", "--docs", docs, "--ranks", "2", *SMALL)["pytorch"]["layout"] == "per_document"
    assert MAX_SPANS / (2 * 64) < 2048
    assert answer("plan", "--docs", docs, "--ranks", "64", *SMALL)["pytorch"]["layout"] != "per_document"


def test_nothing_is_divided_by_no_bytes(longspan):
    code, out, _ = longspan("plan", "--docs", "2k,2k", "--ranks", "2", "--layout", "contiguous", *SMALL)
    assert code == 0
    assert "its best here, receives" in " ".join(out.split())
    assert "inf" not in out


def test_a_length_that_flex_attention_refuses_is_told(longspan):
    text = "flex attention refuses this length"
    assert text in " ".join(longspan("plan", "--seq", "4095", "--ranks", "4")[1].split())
    assert text not in " ".join(longspan("plan", "--seq", "4k", "--ranks", "4")[1].split())


def test_a_machine_that_was_not_named_is_said_to_be_assumed(longspan):
    assert "h100 (assumed; say --machine)" in longspan("plan", "--seq", "8k")[1]
    assert "assumed" not in longspan("plan", "--seq", "8k", "--machine", "a100")[1]


def test_the_kernel_that_was_assumed_is_told(longspan):
    words = ("plan", "--seq", "64k", "--ranks", "8", *SMALL, "--machine")
    for machine, kernel in (("h100", "FA2, PyTorch's own"), ("b200-fa4", "FA4, which has"), ("cpu", "on CPUs")):
        assert kernel in longspan(*words, machine)[1]
    assert "which is not known" in " ".join(longspan(*words, "h100-cudnn")[1].split())
    assert "does the work itself" in longspan(*words, "cpu")[1]


def test_named_schemes_and_layouts_are_obeyed(answer):
    found = answer("plan", "--seq", "64k", "--ranks", "8", "--scheme", "ring", "--layout", "zigzag", "--keep")
    assert (found["scheme"], found["layout"], len(found["reasons"])) == ("ring", "zigzag", 1)
    assert found["workload"]["keep"] is True
    plan = made(ls.masks.causal(), 8, ls.layouts.zigzag(1 << 16, 8), "ring", keep=True)
    assert found["bytes_received"] == plan.reasons[0].bytes_received
    assert answer("plan", "--seq", "4k", "--ranks", "4", "--scheme", "usp(2)")["scheme"] == "hybrid(2,ring)"


@pytest.mark.parametrize(
    "layout", ["balanced", "zigzag", "contiguous", "per_document", "round_robin_by_work", "striped"]
)
def test_every_layout_plans(answer, layout):
    docs = ("--docs", "3000,1000,4192", "--ranks", "4", "--scheme", "exchange", *SMALL)
    found = answer("plan", *docs, "--layout", layout)
    assert (found["layout"], found["workload"]["seq_len"]) == (layout, 8192)


@pytest.mark.parametrize("text", ["700\n1200\n\n148\n", "[700, 1200, 148]", " [700,\n1200, 148]\n"])
def test_document_lengths_come_from_files(answer, tmp_path, text):
    (tmp_path / "lengths").write_text(text)
    np.save(tmp_path / "lengths.npy", np.array([700, 1200, 148]))
    again = answer("plan", "--docs", "700,1200,148", "--seq", "2k", "--ranks", "4", *SMALL)
    for name in ("lengths", "lengths.npy"):
        found = answer("plan", "--docs", str(tmp_path / name), "--ranks", "4", *SMALL)
        assert found["fingerprint"] == again["fingerprint"]


def test_drawn_lengths_are_those_of_the_benchmarks():
    workloads = pytest.importorskip("benchmarks.workloads")
    for kind in ("longtail", "short", "mixed"):
        assert np.array_equal(drawn_lengths(kind, 100_000, 3), workloads.document_lengths(kind, 100_000, 3))


# -- plan --batches ----------------------------------------------------------------------------------------------------


def test_batches_compare_one_group_with_every_split_that_has_room(longspan, answer):
    words = ("plan", "--batches", "8k", "--docs", "short", "--ranks", "16")
    code, out, _ = longspan(*words)
    assert code == 0
    rows = [line.strip("* ").split("  ")[0] for line in out.splitlines()]
    assert all(name in rows for name in ("one group", "8 x 2", "4 x 4", "2 x 8", "1 x 16"))
    assert "Simulated, not measured" in out
    found = answer(*words)
    splits = {split["name"]: split for split in found["splits"]}
    one = splits["one group"]
    assert one["pairs"] <= 1.03
    assert one["tokens"] <= 1.02
    assert one["seconds"] <= min(split["seconds"] for split in splits.values()) * 1.02
    assert splits["4 x 4"]["pairs"] >= 1.0
    assert sum(found["lengths"]) <= 16 * 8192


def test_batches_of_a_file(answer, tmp_path):
    lengths = drawn_lengths("short", 1 << 18, 3)
    np.save(tmp_path / "lengths.npy", lengths)
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths.tolist())))
    words = ("plan", "--batches", "8k", "--ranks", "4", "--docs")
    binary, text = (answer(*words, str(tmp_path / f"lengths.{end}")) for end in ("npy", "txt"))
    assert binary == text
    assert binary["num_documents"] == len(lengths)
    assert [lengths[number] for number in binary["documents"]] == binary["lengths"]


# -- show --------------------------------------------------------------------------------------------------------------

DOCS = ("--docs", "700,1200,148", "--ranks", "4")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mask", ["2,048 tokens", "█", "▒", "Queries go down"]),
        ("layout", ["balanced: 2,048 tokens on 4 ranks", "rank 3", "512 tokens"]),
        ("timeline", ["forward:", "backward:", "step 0", "simulated on h100"]),
        ("memory", ["rank", "forward", "backward", "peak"]),
    ],
)
def test_show_prints_text_and_json(longspan, answer, what, said):
    code, out, _ = longspan("show", what, *DOCS)
    assert code == 0
    assert [word for word in said if word not in out] == []
    found = answer("show", what, *DOCS)
    assert (found["what"], found["out"]) == (what, None)
    if what == "mask":
        assert sum(found["pairs_by_rank"]) == found["allowed_pairs"]
    if what == "layout":
        assert found["tokens_by_rank"] == [512] * 4
    if what == "memory":
        plan = made(ls.masks.documents([700, 1200, 148]) & ls.masks.causal(), 4)
        alive = [found[way]["bytes_alive_by_rank_and_step"] for way in ("forward", "backward")]
        assert [max(map(max, ranks)) for ranks in zip(*alive, strict=True)] == [plan.peak_bytes(r) for r in range(4)]


@pytest.mark.parametrize("what", ["mask", "layout", "timeline", "memory"])
def test_show_writes_pictures(longspan, tmp_path, what):
    pytest.importorskip("matplotlib")
    starts = {"png": b"\x89PNG", "html": b"<!DOCTYPE html>"}
    for kind, start in starts.items():
        path = tmp_path / f"picture.{kind}"
        code, out, _ = longspan("show", what, *DOCS, "--out", str(path), "--title", "<b>")
        assert (code, out) == (0, f"wrote {path}\n")
        assert path.read_bytes().startswith(start)
    page = (tmp_path / "picture.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert ("<plan" in page or "all_to_all" in page) == (what in ("timeline", "memory"))


# -- refusals ----------------------------------------------------------------------------------------------------------

REFUSALS = [
    ("plan", "--docs causal needs a length: add --seq, such as --seq 1M."),
    ("plan --seq 1Q", "argument --seq: must be a number such as 65536, 64k or 1M, but got '1Q'."),
    ("plan --seq 0", "--seq: must be a whole number, 1 or more, but got '0'."),
    ("plan --seq 1.0001k", "but got '1.0001k'"),
    ("plan --seq 8k --docs nonsense", "--docs must be causal, full, longtail"),
    ("plan --seq 8k --docs longtial", "but got 'longtial'. Did you mean longtail?"),
    ("plan --seq 8k --docs 700,x", "a number such as 65536"),
    ("plan --seq 8k --docs 700,800", "2 documents of 1500 tokens together, but got 8192"),
    ("plan --seq 8k --docs full --window 4", "--window needs causal documents"),
    ("plan --seq 8k --machine tpu", "--machine must be one of h100, h100-fa3, h100-cudnn"),
    ("plan --seq 8k --machine h1000", "but got 'h1000'. Did you mean h100?"),
    ("plan --seq 8k --machine mine.json", "There is no file 'mine.json' here."),
    ("plan --seq 8k --scheme magic", "--scheme must be auto, ring"),
    ("plan --seq 8k --scheme ulyses", "but got 'ulyses'. Did you mean ulysses?"),
    ("plan --seq 8k --scheme usp", "scheme must be usp(HEADS)"),
    ("plan --seq 8k --scheme hybrid(2,magic)", "scheme must be one of"),
    ("plan --seq 8k --layout magic", "invalid choice: 'magic'"),
    ("plan --seq 8k --q-heads 7", "leaves 7 over"),
    ("plan --seq 8k --ranks 1M", "--ranks must be at most 65536, but got 1048576."),
    ("plan --seq 8k --fetch-bytes 1", "fetch_bytes must be at least 65536"),
    ("plan --seq 8k --docs short --seed -1", "--seed must be 0 or more, but got -1."),
    ("plan --seq 8k --seed 1", "--seed needs drawn documents (longtail, short, mixed), but got --docs"),
    ("plan --seq 8k --scheme ring --fetch-bytes 1M", "fetch_bytes must be None with scheme 'ring'"),
    ("plan --seq 3G", "layout must have at most 3,000,000,000 tokens, but got 3,221,225,472"),
    ("plan --model qwen3-8 --seq 8k", "but got 'qwen3-8'. Did you mean qwen3-8b?"),
    ("plan --model qwen3-8B --seq 8k", "but got 'qwen3-8B'. Did you mean qwen3-8b?"),
    ("plan --docs runs/lengths.txt", "There is no file 'runs/lengths.txt' here."),
    ("plan --seq 8k --config no/config.json", "--config must be a config.json"),
    ("plan --seq 8k --schemes ring", "plan has no --schemes ring. Did you mean --scheme?"),
    ("plan --batches 8k --seq 64k", "--batches needs the documents of a dataset"),
    ("plan --batches 8k --docs longtail --model qwen3-8b", "--batches is of one attention layer"),
    ("plan --batches 1k --docs 100,70000 --ranks 2", "too_long='cut'"),
    ("show", "the following arguments are required: what"),
    ("show everything", "invalid choice: 'everything'"),
    ("show mask", "--docs causal needs a length"),
    ("show mask --seq 8k --scheme ring", "a mask is the same with every scheme"),
    ("show layout --seq 8k --keep", "a layout is the same with every scheme"),
    ("show mask --seq 8k --out mask.pdf", "--out: the name must end in .png or .html, but got 'mask.pdf'."),
    ("show mask --seq 8k --out /nowhere/at/all.png", "there is no directory '/nowhere/at'. Create it first."),
    ("show memory --seq 8k --limit-bytes 20G", "--limit-bytes needs a picture"),
    ("show mask --seq 8k --out a.png --limit-bytes 1G", "--limit-bytes needs a picture"),
    ("show timeline --seq 64k --ranks 129 --scheme ring", "128 ranks or fewer"),
    ("show mask --bogus", "show has no --bogus."),
    ("verify --docs 3;4", "a number such as 65536"),
    ("verify --docs 20,0", "1 or more, but got '0'"),
    ("verify --docs 20,31,13 --seq 100", "3 documents of 64 tokens together, but got 100"),
    ("verify --docs full --window 4", "--window needs causal documents"),
    ("verify --schemes ring,uspx", "--scheme must be auto"),
    ("verify --backend nccl", "--backend nccl needs a GPU for every rank, but PyTorch sees 0"),
    ("doctor --out machine.txt", "--out: the name must end in .json"),
    ("dance", "there is no command dance. See longspan --help."),
    ("pla", "there is no command pla. Did you mean plan?"),
    ("--bogus", "there is no option --bogus. See longspan --help."),
    ("--verzion", "there is no option --verzion. Did you mean --version?"),
]


@pytest.mark.parametrize(("words", "message"), REFUSALS, ids=lambda value: value[:50])
def test_refusals_are_one_line_and_code_2(longspan, words, message):
    code, out, err = longspan(*words.split())
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("longspan")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\nx\n", "must have one length a line"),
        ("12\n-3\n", "the least -3"),
        ("12\n0\n", "the least 0"),
        ("", "but got float64 of shape (0,)"),
        ("[1, 2.5]", "but got float64"),
        ("[1, [2]]", "must have one length a line"),
        ("[1, 2", "must have one length a line"),
        ("9" * 30, "but got object"),
        (b"\xff\xfe\x00", "must have one length a line"),
    ],
)
def test_files_without_lengths_are_refused(longspan, tmp_path, text, message):
    path = tmp_path / "lengths"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    code, _, err = longspan("plan", "--docs", str(path))
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("values", [np.array([1.5, 2.0]), np.array([1, "x", None], dtype=object), None])
def test_arrays_without_lengths_are_refused(longspan, tmp_path, values):
    path = tmp_path / "lengths.npy"
    if values is None:
        path.write_bytes(b"no array")
    else:
        np.save(path, values)
    code, _, err = longspan("plan", "--docs", str(path))
    assert (code, err.count("\n")) == (2, 1)


@pytest.mark.parametrize("name", ["verify", "doctor"])
def test_commands_that_need_torch_name_it(longspan, monkeypatch, name):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, out, err = longspan(name)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        f"longspan {name}: this command needs torch, which is not installed. Install PyTorch."
    )


# -- machines as files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_reads_back(name):
    assert parse_machine(machine_text(MACHINES[name])) == MACHINES[name]


def test_plan_reads_a_machine_file(answer, longspan, tmp_path):
    slow = replace(MACHINES["h100"], name="slow", flops=MACHINES["h100"].flops / 10)
    path = tmp_path / "slow.json"
    path.write_text(machine_text(slow))
    words = ("plan", "--seq", "64k", "--scheme", "exchange", "--machine")
    found, usual = answer(*words, str(path)), answer(*words, "h100")
    assert found["workload"]["machine"] == "slow"
    assert found["forward_seconds"] > 3 * usual["forward_seconds"]
    path.write_text("{}")
    code, _, err = longspan(*words, str(path))
    assert code == 2
    assert err.startswith(f"longspan plan: {path}: a machine file is a JSON object")
    assert err.count("\n") == 1


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
    (_changed(one_launch=1), "machine.one_launch must be true or false"),
    (_changed(name="a\x1b[31m"), "machine.name must be a printable text"),
    (_changed(links=[]), "machine.links must be a list of 1 to 8 links"),
    (_changed(links=[{"ranks": 8, "bandwidth": 1e9}]), "'latency' is missing"),
    (_changed(forward_tiling=[1, 2]), "machine.forward_tiling must be an object"),
]


@pytest.mark.parametrize(("text", "message"), BAD_MACHINES, ids=range(len(BAD_MACHINES)))
def test_bad_machine_files_are_refused(text, message):
    with pytest.raises(LongspanError, match=re.escape(message)):
        parse_machine(text)


# -- ranks and devices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "num_gpus", "local_rank", "local_size", "visible", "found"),
    [
        (None, 0, 7, 8, "", ("gloo", "cpu")),
        (None, 8, 7, 8, "", ("nccl", "cuda:7")),
        (None, 1, 0, 1, "", ("nccl", "cuda:0")),
        (None, 2, 1, 4, "", ("gloo", "cpu")),  # two ranks would share a GPU
        ("nccl", 2, 1, 4, "", ("nccl", "cuda:1")),
        ("gloo", 2, 1, 2, "", ("gloo", "cpu")),
        (None, 1, 3, 4, "GPU-8d4e", ("nccl", "cuda:0")),  # each rank is shown its own GPU, which is number 0 to all
        ("nccl", 1, 1, 2, "1", ("nccl", "cuda:0")),
        (None, 2, 1, 2, "2,3", ("nccl", "cuda:1")),
    ],
)
def test_a_rank_gets_a_backend_and_a_device_of_its_own(asked, num_gpus, local_rank, local_size, visible, found):
    assert place(asked, num_gpus, local_rank, local_size, visible) == found


def test_ranks_that_would_share_a_gpu_are_refused():
    with pytest.raises(LongspanError, match=r"PyTorch sees 2 on this host, which has a rank 2"):
        place("nccl", 2, 2, 4)


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
    with join_ranks() as ranks:
        assert ranks == JobRanks(6, 8, 4, "nccl", "cuda:2")
    assert asked == ["cuda:2", "nccl"]
    with join_ranks("gloo") as ranks:
        assert ranks == JobRanks(6, 8, 4, "gloo", "cpu")
    assert asked[2:] == ["gloo"]


def test_ranks_that_do_not_meet_are_told_in_one_line(longspan, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    code, _, err = longspan("verify")
    assert (code, err.count("\n")) == (2, 1)
    assert "did not meet: " in err
    assert "MASTER_ADDR" in err


def test_a_gpu_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert describe_device(torch.device("cuda", 1)) == "cuda:1 (NVIDIA H100 80GB HBM3)"
    assert describe_device(torch.device("cpu")) == "cpu"


# -- verify and doctor -------------------------------------------------------------------------------------------------


def test_verify_prints_a_row_for_every_scheme_and_dtype(longspan):
    code, out, _ = longspan("verify", "--ranks", "2", "--seq", "48", "--dtype", "float32,bfloat16", "--sinks")
    assert code == 0
    assert out.startswith("8 of 8 right, on cpu by cpu_flash\nbalanced over 2 ranks, in one process\n")
    rows = [line.split() for line in out.splitlines() if line.endswith("right")]
    schemes = ("ring", "exchange", "all_gather", "all_to_all")
    assert [(row[0], row[1]) for row in rows] == [(s, dtype) for dtype in ("float32", "bfloat16") for s in schemes]
    assert "out   dq   dk   dv  dsinks" in out
    assert "WRONG" not in out


@pytest.mark.parametrize("asked", ["exchange; hybrid(2, ring)", "exchange,hybrid(2,ring)", "hybrid(2,ring);exchange"])
def test_several_schemes_are_asked_for_alike(answer, capsys, asked):
    code = command.main(["verify", "--seq", "48", "--schemes", asked, "--softcap", "9", "--json"])
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert code == 0
    assert {check["scheme"] for check in checks} == {"exchange", "hybrid(2,ring)"}
    assert {check["kernel"] for check in checks} == {"reference"}


def report(*checks, findings=()):
    return Report("attention", 2, tuple(Check(*check) for check in checks), tuple(findings))


def test_the_table_has_shares_of_the_budget(capsys):
    finding = Finding("dk", "differs", 3.0, 1.0, (1,), (), None, "not recognised", "")
    runs = [
        check_row(report(("out", 0.12, 1.0), ("dk", 0.0, 1.0), ("gradient of sinks", 0.5, 1.0)), "ring", "x"),
        check_row(report(("out", float("nan"), 1.0), ("dk", 3.0, 1.0), findings=[finding]), "hybrid(2)", "x"),
    ]
    show_shares(runs)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["scheme", "dtype", "out", "dk", "dsinks"]
    assert lines[2] == ["ring", "x", "12%", "0%", "50%", "right"]
    assert lines[3] == ["hybrid(2)", "x", "infinite", "300%", "-", "WRONG"]


def test_doctor_alone_answers_in_json_and_gives_advice(capsys):
    assert command.main(["doctor", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert all(check["ok"] for check in found["checks"])
    assert found["versions"]["longspan"] == ls.__version__
    assert found["kernels"]["cpu_flash"] == "yes"
    assert found["kernels"]["varlen"] != "yes"
    assert any("run this under torchrun" in line for line in found["advice"])


def installed(torch_found, transformers_found):
    """`doctor.versions`, with these."""
    kept = {**doctor.versions(), "torch": torch_found, "transformers": transformers_found}
    return lambda: dict(kept)


@pytest.mark.share(3)
@pytest.mark.parametrize(
    ("torch_found", "transformers_found", "said"),
    [
        ("2.13.0+cpu", None, None),
        ("2.13.0", "5.9.0", None),
        ("2.99.0", None, "torch 2.99 was NOT tested: newer than tested (2.11 to 2.15)"),
        ("2.10.0+cu130", None, "torch 2.10 was NOT tested: older than the floor (2.11 to 2.15)"),
        ("2.13.0", "5.10.2", "transformers 5.10 was NOT tested: between tested versions (5.9 to 5.23)"),
        ("2.13.0", "main", "transformers main was NOT tested: its version is not known (5.9 to 5.23)"),
        ("2.12.0", "5.9.0", "torch 2.12 and transformers 5.9 were each tested, but not together"),
    ],
)
def test_doctor_calls_only_tested_versions_fit(longspan, monkeypatch, torch_found, transformers_found, said):
    """Nothing is wrong, so the exit code is 0; but only the self-check speaks for it, and doctor says so."""
    monkeypatch.setattr(doctor, "versions", installed(torch_found, transformers_found))
    code, out, _ = longspan("doctor", "--quick")
    assert code == 0
    words = " ".join(out.split())
    if said is None:
        assert out.startswith(f"longspan {ls.__version__}: fit\n")
        assert "NOT" not in out
    else:
        assert out.startswith(f"longspan {ls.__version__}: right in the self-check, on versions that were NOT tested\n")
        assert said in words
        assert ("or newer: update" if "older" in said else "was tested on") in words


def test_doctor_that_finds_wrong_answers_ends_with_code_1(longspan, monkeypatch):
    wrong = [{"scheme": "ring", "dtype": "float32", "ranks": 4, "ok": False, "text": "dq is wrong on rank 2"}]
    wrong[0] |= {"kernel": "cpu_flash", "shares": {"out": 0.2, "dq": 31.0}}
    monkeypatch.setattr(doctor, "self_checks", lambda ranks, quick, advance: wrong)
    code, out, _ = longspan("doctor", "--quick")
    assert code == 1
    assert "NOT FIT" in out
    assert "FAILED: ring, float32: dq is wrong on rank 2" in out
    assert "do not train with this installation" in out


# -- tables ------------------------------------------------------------------------------------------------------------


def test_tables_are_aligned(capsys):
    print_facts((("label", "word " * 40), ("b", "short")))
    rows = [
        Row(("exchange", "1.00 ms", "7 B"), True),
        Row(("ring", "12.0 ms", "8 GiB")),
        Row(("all",), rest="at least"),
    ]
    print_table(("scheme", "time", "bytes"), rows)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith("  label  word")
    assert lines[1].startswith("         word")
    assert "* exchange  1.00 ms    7 B" in lines
    assert "  ring      12.0 ms  8 GiB" in lines
    assert "  all       at least" in lines
