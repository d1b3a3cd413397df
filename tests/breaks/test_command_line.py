"""Attacks on the command line: streams that are closed or full, readers that leave, Ctrl-C, bad configurations."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import longspan
from longspan.cli import command
from tests.lanes import NIGHTLY
from tests.pace import seconds_of_children

SRC = Path(longspan.__file__).parents[1]
PLAN = "plan --seq 64k --ranks 4"
COMMANDS = (PLAN, f"{PLAN} --json", "--help", "plan --help", "--version", "compare --seq 4k --ranks 2", "nosuch", "")
STREAMS = ("", ">&-", ">/dev/full", "2>&-", "2>/dev/full", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full 2>/dev/full")


def environment(**more):
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def shell(words, redirected="", **more):
    """Run the command in a shell that redirects its streams."""
    line = f'"{sys.executable}" -m longspan {words} {redirected}'
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=240, env=environment(**more)
    )


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", COMMANDS if NIGHTLY else COMMANDS[1::3])
def test_streams_that_cannot_be_written_to_end_in_words_and_the_right_status(words, unbuffered, tries):
    """2 where the answer is lost, with a line on stderr if there is one; the command's own status otherwise."""
    own = 0 if words not in ("nosuch", "") else 2
    for redirected in STREAMS:
        done = shell(words, redirected, PYTHONUNBUFFERED=unbuffered)
        is_lost = ">&-" in redirected.replace("2>&-", "") or redirected.startswith(">/dev/full")
        assert done.returncode == (2 if is_lost else own), (redirected, done.returncode, done.stderr)
        assert "Traceback" not in done.stderr, (redirected, done.stderr)
        assert "Exception ignored" not in done.stderr, (redirected, done.stderr)
        if is_lost and own == 0 and "2>" not in redirected:
            reason = "No space left on device" if "full" in redirected else "Bad file descriptor"
            assert done.stderr == f"longspan {words.split()[0]}: stdout: {reason}.\n"
    tries("streams of commands", len(STREAMS), len(STREAMS))


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("reader", ["true", "head -c 1", "head -1"])
def test_a_reader_that_leaves_changes_no_status(reader, unbuffered):
    """Plans of a model that does not fit are answered with 1, whoever reads how much of it."""
    for words, code in ((f"{PLAN} --json", 0), (f"{PLAN} --model qwen3-8b --memory 1", 1)):
        done = shell(words, f"| {reader} >/dev/null; exit ${{PIPESTATUS[0]}}", PYTHONUNBUFFERED=unbuffered)
        assert (done.returncode, done.stderr) == (code, "")


def test_a_narrow_encoding_is_refused_in_words():
    done = shell("show mask --seq 64 --ranks 2 --plain", PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "stdout has the encoding ascii" in done.stderr
    assert shell("show mask --seq 64 --ranks 2 --plain", PYTHONIOENCODING="utf-8").returncode == 0


def test_ctrl_c_ends_with_130_and_no_traceback():
    process = subprocess.Popen(
        [sys.executable, "-m", "longspan", "doctor"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("examining: loading PyTorch")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    # A shell shows 130 for both. Python ends by the signal itself where C code that PyTorch imports ran into it.
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "Traceback" not in errors


def test_streams_are_put_back(capsys):
    before = sys.stdout, sys.stderr
    assert command.main(["--version"]) == 0
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr().out.startswith("longspan ")


def test_doctor_shows_progress_within_two_seconds_of_processor_time_and_takes_less_than_thirty():
    def run():
        process = subprocess.Popen(
            [sys.executable, "-m", "longspan", "doctor"],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert process.stderr.readline().startswith("examining: ")
        fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        first.append(sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK"))
        out, errors = process.communicate(timeout=300)
        assert process.returncode == 0
        assert out.startswith(f"longspan {longspan.__version__}: ")
        assert all(line.startswith("examining: ") for line in errors.splitlines())

    first: list[float] = []
    assert seconds_of_children(run) < 30.0
    assert first[0] < 2.0


def test_doctor_in_json_has_no_progress():
    done = shell("doctor --quick --json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"] is True


# -- prove -------------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
BAD = {
    "text for a size": LLAMA | {"hidden_size": "x"},
    "no heads": LLAMA | {"num_attention_heads": 0},
    "heads that do not divide": LLAMA | {"num_attention_heads": 7},
    "negative width": LLAMA | {"hidden_size": -4},
    "a list": [1, 2],
    "a number": 3,
    "null": None,
    "no type": {"hidden_size": 64},
    "an unknown type": {"model_type": "nosuch"},
    "a type that is no text": {"model_type": 3},
    "layers as a list": LLAMA | {"num_hidden_layers": [2]},
    "an unknown rope": LLAMA | {"rope_scaling": {"rope_type": "nosuch"}},
    "an unknown activation": LLAMA | {"hidden_act": "nosuch"},
    "no words": LLAMA | {"vocab_size": 0},
}
TEXTS = {"cut off": '{"model_type": "llama"', "binary": "\x00\xff", "empty": ""}

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


@needs_transformers
def test_bad_configurations_are_refused_in_words(tmp_path, capsys, tries):
    """2 and one line, or 1 and a table that says why no batch can be used; never a traceback."""
    texts = {name: json.dumps(value) for name, value in BAD.items()} | TEXTS
    for name, text in texts.items():
        file = tmp_path / "config.json"
        file.write_bytes(text.encode("latin-1"))
        for words in (["prove", str(file), "--forms", "plain"], ["prove", str(tmp_path), "--forms", "plain", "--json"]):
            code = command.main(words)
            out, errors = capsys.readouterr()
            assert code in (1, 2), (name, out, errors)
            if code == 2:
                assert out == "", name
                assert "longspan prove: " in errors, (name, errors)
                assert str(tmp_path) in errors, (name, errors)
            else:
                assert "could be built" in out, (name, out)
    tries("bad configurations", 2 * len(texts), 0, 2 * len(texts))


@needs_transformers
def test_damaged_answers_are_made_again(tmp_path, monkeypatch, capsys):
    from longspan.huggingface.first_use import _digest

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    words = ["prove", str(tmp_path), "--forms", "plain"]
    assert command.main(words) == 0
    (file,) = (tmp_path / "cache").rglob("*.json")
    right = json.loads(file.read_text())
    capsys.readouterr()
    for text in ('{"ok": true}', "[1]", "3", json.dumps({**right, "digest": "0"}), "no JSON"):
        file.write_text(text)
        assert command.main(words) == 0
        assert "exact" in capsys.readouterr().out
        assert json.loads(file.read_text()).keys() == right.keys()
    answer = right["answer"] | {"error": "7.7e-07"}
    file.write_text(json.dumps({"answer": answer, "digest": _digest(answer)}))
    assert command.main(words) == 0
    assert "7.7e-07" in capsys.readouterr().out  # read from the file
    assert command.main([*words, "--again"]) == 0
    assert "7.7e-07" not in capsys.readouterr().out
