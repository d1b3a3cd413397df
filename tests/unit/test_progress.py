"""Progress is shown on terminals only; tables of errors show shares of the rounding budget."""

import argparse
import io
import os
import pty
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import longspan as ls
from longspan.cli import doctor, main
from longspan.cli import output as bars
from longspan.cli.launch import JobRanks, describe_device
from longspan.cli.output import Screen
from longspan.cli.verify import check_row, show_shares
from longspan.verification import Check, Finding, Report

SRC = Path(ls.__file__).parents[1]
COMPARE = ["compare", "--seq", "16k", "--ranks", "2,4", "--schemes", "ring"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def drawn(monkeypatch, *, out=True, err=True, is_main=True, seconds=0.2, total: int | None = 3, **words):
    """What two parts of a job leave on stderr."""
    streams = [Terminal() if there else io.StringIO() for there in (out, err)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(bars, "DELAY", 0.01)
    monkeypatch.setattr(bars, "INTERVAL", 0.02)
    args = argparse.Namespace(**{"json": False, "plain": False, **words})
    with bars.progress(args, "measuring", total, is_main=is_main) as advance:
        time.sleep(0.02)
        for name in ("links", "copies [x]"):
            advance(name)
            time.sleep(seconds / 2)
    assert streams[0].getvalue() == ""  # what is printed for programs is untouched
    return streams[1].getvalue()


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "rich"])
def test_a_person_who_waits_sees_what_is_under_way(monkeypatch, plain):
    if not plain:
        pytest.importorskip("rich")
    text = drawn(monkeypatch, plain=plain)
    assert "measuring" in text
    assert "copies [x]" in text
    if plain:
        assert text == "measuring: 1 of 3, links, 0 s\nmeasuring: 2 of 3, copies [x], 0 s\n"
    assert "measuring" in drawn(monkeypatch, plain=plain, total=None)


def test_without_rich_it_is_a_line_of_text(monkeypatch):
    monkeypatch.setattr(bars, "_has_rich", lambda: False)
    assert "measuring: 1 of 3, links, 0 s\n" in drawn(monkeypatch)


@pytest.mark.parametrize("words", [{"json": True}, {"out": False}, {"err": False}, {"is_main": False}])
def test_programs_files_and_other_ranks_see_no_bar(monkeypatch, words):
    assert drawn(monkeypatch, **words) == ""


def test_quick_answers_draw_nothing(monkeypatch):
    monkeypatch.setattr(bars, "DELAY", 60.0)
    begin = time.monotonic()
    streams = [Terminal(), Terminal()]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with bars.progress(argparse.Namespace(json=False), "quick"):
        pass
    assert streams[1].getvalue() == ""
    assert time.monotonic() - begin < 30


def test_the_bar_goes_when_the_job_fails(monkeypatch):
    pytest.importorskip("rich")
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        failing(monkeypatch)
    end = time.monotonic() + 30
    while threading.active_count() > before and time.monotonic() < end:  # rich stops its thread without joining it
        time.sleep(0.05)
    assert threading.active_count() == before


def failing(monkeypatch):
    monkeypatch.setattr(bars, "DELAY", 0.0)
    monkeypatch.setattr(bars, "is_watched", lambda args: True)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with bars.progress(argparse.Namespace(plain=False), "failing"):
        time.sleep(0.1)
        raise ZeroDivisionError


def on_terminal(*words):
    """A command on a terminal of its own: its exit code, and what the terminal was sent."""
    code = "import sys; from longspan.cli import main, output as p; p.DELAY = 0.0; sys.exit(main(sys.argv[1:]))"
    ours, theirs = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "PYTHONPATH": str(SRC), "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    text = b""
    try:
        while part := os.read(ours, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(ours)
    return job.wait(60), text.decode()


def test_a_command_on_a_real_terminal():
    code, text = on_terminal(*COMPARE, "--plain")
    assert code == 0
    assert "comparing: " in text
    assert text.index("comparing: ") < text.index("16,384 tokens")
    code, text = on_terminal(*COMPARE, "--json")
    assert code == 0
    assert text.startswith("{")


def test_doctor_has_as_many_parts_as_its_bar(monkeypatch):
    alone, names = JobRanks(0, 1, 1, "gloo", "cpu"), []
    for quick in (False, True):
        names.clear()
        with monkeypatch.context() as cheap:
            cheap.setattr("longspan.verification.verify", lambda *a, **k: report(("out", 0.0, 1.0)))
            cheap.setattr("longspan.cli.measure.median_seconds", lambda *a, **k: 1e-3)
            doctor.examine(alone, quick, names.append)
        assert len(names) == doctor.num_parts(alone, quick)


def report(*checks, findings=()):
    return Report("attention", 2, tuple(Check(*check) for check in checks), tuple(findings))


def test_the_table_has_shares_of_the_budget(capsys):
    finding = Finding("dk", "differs", 3.0, 1.0, (1,), (), None, "not recognised", "")
    runs = [
        check_row(report(("out", 0.12, 1.0), ("dk", 0.0, 1.0), ("gradient of sinks", 0.5, 1.0)), "ring", "x"),
        check_row(report(("out", float("nan"), 1.0), ("dk", 3.0, 1.0), findings=[finding]), "hybrid(2)", "x"),
    ]
    show_shares(runs, Screen(fancy=False))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["scheme", "dtype", "out", "dk", "dsinks"]
    assert lines[2] == ["ring", "x", "12%", "0%", "50%", "right"]
    assert lines[3] == ["hybrid(2)", "x", "infinite", "300%", "-", "WRONG"]


def test_verify_prints_a_row_for_every_scheme_and_dtype(capsys):
    assert main(["verify", "--ranks", "2", "--seq", "48", "--dtype", "float32,bfloat16", "--sinks"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("8 of 8 right, on cpu by cpu_flash\nbalanced over 2 ranks, in one process\n")
    rows = [line.split() for line in out.splitlines() if line.endswith("right")]
    assert [(row[0], row[1]) for row in rows] == [
        (scheme, dtype)
        for dtype in ("float32", "bfloat16")
        for scheme in ("ring", "exchange", "all_gather", "all_to_all")
    ]
    assert "out   dq   dk   dv  dsinks" in out
    assert "WRONG" not in out


def test_a_gpu_is_called_by_its_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert describe_device(torch.device("cuda", 1)) == "cuda:1 (NVIDIA H100 80GB HBM3)"
    assert describe_device(torch.device("cpu")) == "cpu"
