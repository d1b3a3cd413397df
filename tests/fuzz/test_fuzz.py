"""The fuzzer can fail: planted mistakes, crashes and needless refusals are found, and what it prints repeats them."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.fuzz import draw, oracle, shrink
from tests.fuzz.__main__ import Tally
from tests.fuzz.calls import draw_tensors, make_mask
from tests.fuzz.cases import Call, Case
from tests.fuzz.mutants import MUTANTS
from tests.fuzz.pools import outcome
from tests.fuzz.script import script
from tests.jobs.runner import ROOT, torchrun
from tests.pool import end_all

SMALL = Call(seed=5, batch=2, q_heads=4, kv_heads=2, tokens=40, mask=("and", ("window", 9, 0), ("documents", (13, 27))))
# A case for each mistake that CI plants; others: `python -m tests.fuzz --plant NAME`.
FOUND = {
    "sinks are dropped": Case(1, (replace(SMALL, sinks=True),), one_device=True),
    "a later partial output replaces an earlier one": Case(2, (replace(SMALL, layout=("zigzag",), scheme="ring"),)),
    "gradients of captured tensors stay shares": Case(2, (replace(SMALL, score="table"),)),
}


@pytest.fixture(autouse=True)
def _no_mistake_stays():
    yield
    end_all()


def test_a_case_is_a_value_made_from_a_seed():
    for seed in range(300):
        made = draw.case(seed)
        assert made == draw.case(seed)
        assert eval(repr(made), {"Case": Case, "Call": Call}) == made


def test_cases_are_of_all_kinds():
    found = set().union(*(draw.case(seed).features() for seed in range(2500)))
    wanted = {f"dtype {name}" for name in ("float64", "float32", "bfloat16", "float16")}
    wanted |= {f"form {form}" for form in (*draw.FORMS, "plain")} | {f"score {score}" for score in draw.SCORES}
    wanted |= {f"layout {kind}" for kind in (*draw.LAYOUTS, *draw.EQUAL, "scattered", "on one rank")}
    wanted |= {f"scheme {kind}" for kind in ("auto", "ring", "exchange", "all_gather", "all_to_all", "hybrid")}
    wanted |= {f"scale {kind}" for kind in ("positive", "tensor", "default")}
    wanted |= {"compiled eager", "compiled aot_eager", "compiled aot_eager dynamic", "autocast", "several calls"}
    wanted |= {"checkpoint reentrant", "checkpoint not reentrant", "needs differ", "tokens < ranks", "one device"}
    wanted |= {"tokens 0", "batch 0", "head_dim 0", "v_head_dim 0", "losses two", "losses sum", "captured share"}
    assert wanted <= found, wanted - found


def test_the_oracle_is_plain_attention():
    call = replace(SMALL, mask=("causal",), scale=0.3)
    leaves, extras, _ = draw_tensors(call)
    out, lse = oracle.attend(call, leaves, extras, oracle.dense_mask(call))
    q, k, v = leaves.values()
    assert torch.allclose(out, scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3, enable_gqa=True))
    scores = 0.3 * q @ k.repeat_interleave(2, 1).transpose(-1, -2)
    hidden = torch.ones(40, 40).triu(1).bool()
    assert torch.allclose(lse, scores.masked_fill(hidden, -torch.inf).logsumexp(-1))


def test_words_of_masks_mean_the_same_to_both_sides():
    """Brute force on both: `allows` of pairs, and the oracle's own reading."""
    i, j = torch.arange(17)[:, None].numpy(), torch.arange(17)[None].numpy()
    for seed in range(60):
        r = draw.random.Random(seed)
        call = Call(seed=0, batch=2, q_heads=3, tokens=17, mask=draw.grid(r, 17, 2, 3))
        mask = make_mask(call.mask, call).resized(17)
        for row in range(2):
            for head in range(3):
                seen = mask.allows(i, j, row=row % mask.num_rows, head=head % mask.num_heads)
                assert torch.equal(torch.as_tensor(seen), oracle.allowed(call.mask, 17, row, head)), call.mask


def test_every_mistake_can_be_planted():
    assert set(FOUND) <= set(MUTANTS)
    assert len(MUTANTS) >= 6
    for name, text in MUTANTS.items():
        compile(text, name, "exec")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FOUND)
def test_planted_mistakes_are_found(name):
    found = outcome(FOUND[name], MUTANTS[name])
    assert found.kind == "wrong"
    assert found.bad
    end_all()
    assert not outcome(FOUND[name]).bad


@pytest.mark.timeout(300)
def test_crashes_and_needless_refusals_are_found_and_the_next_case_is_right():
    case = Case(2, (SMALL,))
    crash = "import os, longspan as ls\nls.attention = lambda *args, **options: os._exit(3)"
    assert (outcome(case, crash).kind, outcome(case).kind) == ("crashed", "right")
    refuse = "import longspan as ls\ndef no(*args, **options):\n    raise ls.PlanError('no')\nls.attention = no"
    found = outcome(case, refuse)
    assert (found.kind, found.bad, found.detail) == ("refused", True, "PlanError: no")
    end_all()
    found = outcome(Case(2, (replace(SMALL, batch=0),)))
    assert (found.kind, found.bad) == ("refused", False)


def run_script(text, world, folder):
    (folder / "repeat.py").write_text(text)
    if world > 1:
        ended = torchrun(["--nproc-per-node", str(world), "repeat.py"], folder)
        return ended.status, ended.out
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "repeat.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)
    return done.returncode, done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["sinks are dropped", "gradients of captured tensors stay shares"])
def test_the_printed_script_repeats_a_failure(name, tmp_path):
    case, text = FOUND[name], script(FOUND[name], "said")
    assert "tests" not in text.replace("tests.fuzz", "")
    status, out = run_script(MUTANTS[name] + text, case.world, tmp_path)
    assert status == 1
    assert "rank 0: wrong call 0: " in out
    status, out = run_script(text, case.world, tmp_path)
    assert (status, out.count("right")) == (0, case.world)


def test_a_failing_case_becomes_smaller():
    def fails(case):
        return any(call.sinks and call.tokens > 6 for call in case.calls)

    big = Case(
        2, (SMALL, replace(SMALL, sinks=True, form="bshd", dtype="float16", layout=("striped", 3))), (1, 0), "sum"
    )
    small = shrink.shrunk(big, fails, 200)
    (call,) = small.calls
    assert call == Call(seed=5, tokens=7, head_dim=2, v_head_dim=2, sinks=True)
    assert small == Case(2, (call,))


def test_shorter_cases_are_still_whole():
    for seed in range(200):
        for call in draw.case(seed).calls:
            if call.tokens > 4:
                cut = shrink.resized(call, call.tokens // 2)
                assert oracle.dense_mask(cut).shape[2:] == (cut.tokens, cut.tokens)


def test_the_tally_counts():
    tally = Tally()
    tally.add(Case(1, (SMALL,)), outcome(Case(1, (SMALL,), one_device=True)))
    assert "1 cases: right 1; 0 failed" in tally.table()
