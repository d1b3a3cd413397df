"""The sweep of families: what it calls exact, wrong and refused, its exit status, its page, and workers that end."""

import signal
import sys

import pytest

pytest.importorskip("transformers")

from benchmarks import families
from benchmarks.family_cases import KINDS, Case, cases
from benchmarks.family_page import page, summary

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore")]
LLAMA = Case("causal", "llama", "LlamaForCausalLM")


def found(accepted=True, two=1e-15, three=1e-15, narrow=1e-6, own=1e-6):
    """What a worker knows of a case before it judges."""
    ranks = {w: {"float64": e, "float32": narrow, "one device, float32": own} for w, e in ((2, two), (3, three))}
    proof = {"ok": accepted, "reason": "" if accepted else "tokens meet", "error": 1e-15, "seconds": 0.1}
    return {"outcome": "runs", "proofs": {"plain": proof}, "ranks": ranks}


@pytest.mark.parametrize(
    ("given", "outcome"),
    [
        (found(), "exact"),
        (found(accepted=False), "refused"),
        (found(three=1e-7), "wrong"),
        (found(three=float("nan")), "wrong"),
        (found(narrow=9e-6), "wrong"),
        (found(narrow=9e-6, own=4e-6), "exact"),  # one device itself is off as much
        ({**found(), "ranks": {2: {"failed": "it hangs"}}}, "wrong"),
    ],
)
def test_verdicts(given, outcome):
    assert families.verdict(given)["outcome"] == outcome


def result(family, outcome, kind="causal", reason=""):
    return {"kind": kind, "family": family, "model": "M", "reason": reason, **found(), "outcome": outcome}


def test_one_wrong_family_is_an_exit_status(capsys):
    right = [result(f"f{n}", "exact") for n in range(families.LEAST)]
    assert families.status(right, is_whole=True) == 0
    assert families.status([*right, result("bad", "wrong", reason="off by 1")], is_whole=True) == 1
    assert "wrong: causal bad: off by 1" in capsys.readouterr().out


def test_too_few_families_are_an_exit_status_of_a_whole_sweep_alone():
    """The same family with another head is no other family."""
    few = [result(f"f{n}", "exact") for n in range(families.LEAST - 1)] + [result("f0", "exact", kind="classify")]
    assert families.status(few, is_whole=True) == 1
    assert families.status(few, is_whole=False) == 0


def test_the_page_does_not_depend_on_the_order_of_results():
    results = [
        result("b", "refused", reason="tokens | meet"), result("a", "exact", kind="masked"), result("a", "exact"),
        result("c", "not built", reason="no library"),
    ]  # fmt: skip
    text = page(results, is_whole=True)
    assert text == page(results[::-1], is_whole=True)
    assert "1 of 3 families accepted" in summary(results)
    assert "python -m benchmarks.families" in text
    assert "| tokens \\| meet | b (causal) |" in text
    assert "| a (causal, masked) |" in text
    assert "< 1e-15 |" in text


def test_all_kinds_are_swept():
    known = cases(list(KINDS))
    assert {case.kind for case in known} == set(KINDS)
    assert len({case.family for case in known}) > 200
    assert cases(["causal"], ["llama", "bert"]) == [Case("causal", "bert", "BertLMHeadModel"), LLAMA]


def test_a_family_is_examined():
    found = families.examine(LLAMA, ["plain", "packed"], [])
    assert found["outcome"] == "exact"
    assert found["calls"] == 2
    assert found["proofs"]["packed"]["ok"]


def test_a_family_that_cannot_be_right_is_refused():
    found = families.examine(Case("masked", "mobilebert", "MobileBertForMaskedLM"), ["plain"], [])
    assert found["outcome"] == "refused"
    assert "MobileBertEmbeddings" in found["reason"]


class Worker:
    """Stands in for subprocess.Popen: prints a line, and then ends by a signal or sleeps."""

    def __init__(self, then):
        self.code = f"import os, time; print('{families.MARK}' + '{{\"family\": \"first\"}}', flush=True); {then}"

    def __call__(self, _command, **options):
        import subprocess

        return subprocess.Popen([sys.executable, "-c", self.code], **options)


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("os.kill(os.getpid(), 9)", f"ended with status {-signal.SIGKILL}"),
        ("time.sleep(60)", "took more than 2 s"),
    ],
)
def test_a_worker_that_ends_or_hangs_costs_one_family(monkeypatch, then, why):
    import types

    fake = types.SimpleNamespace(Popen=Worker(then), PIPE=-1, DEVNULL=-3)
    monkeypatch.setattr(families, "subprocess", fake)
    monkeypatch.setattr(families, "PATIENCE", 2.0)
    todo = [Case("causal", name, "M") for name in ("first", "second")]
    results = list(families.sweep(todo, ["plain"], False))
    assert [result["family"] for result in results] == ["first", "second"]
    assert why in results[1]["reason"]
    assert results[1]["outcome"] == "not built"
