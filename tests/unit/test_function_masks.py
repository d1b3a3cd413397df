"""Masks that are functions: ranks get equal work, and plans state what kernels do, counted or sampled with an error."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from benchmarks import function_masks
from benchmarks.function_masks import CASES, MOST, RANKS, least_imbalance, measure
from benchmarks.layouts import count
from benchmarks.workloads import document_lengths
from longspan.masks import Mask, causal, documents, from_mask_mod, sliding_window
from longspan.masks.bands import rectangles
from longspan.masks.functions import Function
from longspan.masks.work import BLOCK, SIDE, block_work, pairs_in
from longspan.planning import MACHINES, Problem, Sizes, scheme
from longspan.planning.choose import Floor, estimate_scheme
from longspan.planning.simulator import simulate
from longspan.run.flex import mask_of_block_mask
from longspan.testing import dense_attention, run_loopback

SIZES = {"q_heads": 4, "kv_heads": 4, "head_dim": 64, "dtype": "bfloat16"}
SHORT, LONG = function_masks.LENGTHS


def causal_function(_b, _h, i, j):
    return i >= j


def second_half(_b, _h, i, j):
    return (i >= 4 * SIDE) & (j < SIDE)


# -- The twelve masks --------------------------------------------------------------------------------------------------


@pytest.mark.share(8)
@pytest.mark.parametrize("seq_len", [SHORT, LONG])
@pytest.mark.parametrize("name", CASES)
def test_ranks_get_equal_work_and_the_plan_states_it(name, seq_len):
    case = CASES[name](seq_len)
    for ranks in RANKS:
        for found in measure(case, ranks):
            assert found.is_met(case.share), (ranks, found)
            if found.layout == "balanced":
                assert found.true <= max(MOST, least_imbalance(case, ranks)), (ranks, found)


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_short_sequences_are_counted(name):
    case = CASES[name](1 << 10)
    for plane, opened in zip(case.mask.distinct_planes(), case.opened, strict=True):
        work = block_work(plane)
        assert work.is_counted
        assert np.array_equal(work.opened, opened)
        assert not work.variance.any()


def test_the_plan_says_what_was_sampled():
    layout = ls.layouts.contiguous
    short, long = (from_mask_mod(causal_function, n) for n in (SIDE, 2 * SIDE))
    counted = ls.plan(short, layout(SIDE, 2), **SIZES)
    assert "(most work on a rank / mean; counted in blocks of 128)" in str(counted)
    assert counted.imbalance_error == 0
    sampled = ls.plan(long, layout(2 * SIDE, 2), **SIZES)
    assert f"(most work on a rank / mean; sampled, ± {sampled.imbalance_error:.3f})" in str(sampled)
    bands = ls.plan(causal(), layout(SIDE, 2), **SIZES)
    assert "(most pairs on a rank / mean)" in str(bands)
    assert bands.imbalance_error == 0


@pytest.mark.share(2)
@pytest.mark.parametrize("share", [1 / 50, 1 / 1000, 1 / 20000])
def test_the_error_is_that_of_a_sample(share):
    """Pairs at random, so that blocks of few are missed by the sample: the stated error is neither too small nor much
    larger than the differences between samples."""
    seq_len, ranks = 1 << 15, 4
    layout, off, stated = ls.layouts.zigzag(seq_len, ranks), [], []
    for seed in range(6):

        def scattered(_b, _h, i, j, seed=seed):
            mixed = (i * 7_368_787 + j * 5_915_587_277 + seed * 1_500_450_271) * 2_860_486_313
            return ((mixed ^ (mixed >> 17)) * 3_267_000_013 >> 20) % 1_000_000 < share * 1_000_000 * (1 + (i % 3 == 0))

        plan = ls.plan(from_mask_mod(scattered, seq_len), layout, **SIZES, scheme="ring")
        work = plan.scheme.work / plan.scheme.work.mean()
        off += (work - 1).tolist()  # all ranks have equal work
        stated.append(plan.imbalance_error / 3)
    deviation = np.std(off)
    assert deviation <= 1.5 * np.mean(stated) + 1e-6
    assert np.mean(stated) <= 4 * deviation + 1e-3


# -- Layouts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seq_len", [0, 1, 7, 130, 1000, 5003, 9999])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 48])
def test_any_length_and_number_of_ranks(seq_len, ranks):
    mask = from_mask_mod(causal_function, seq_len)
    for equal_tokens in (False, True):
        layout = ls.layouts.balanced(mask, world_size=ranks, equal_tokens=equal_tokens)
        assert layout.num_tokens.sum() == seq_len
        assert layout.num_tokens.max() - layout.num_tokens.min() <= 1
        assert layout.local_len == (-(-seq_len // ranks) if equal_tokens else None)
    if seq_len >= 1000 and ranks <= 8:
        assert ls.plan(mask, layout, **SIZES).imbalance <= 1.05


def test_cuts_are_those_of_blocks_where_whole_blocks_are_even():
    for name in ("block diffusion", "tree", "document table"):
        layout = ls.layouts.balanced(CASES[name](SHORT).mask, world_size=8)
        assert not (layout.table[:, :2] % BLOCK).any(), name


def test_spans_are_few():
    for ranks in (2, 8):
        folded = ls.layouts.balanced(from_mask_mod(causal_function, LONG), world_size=ranks)
        assert len(folded.table) <= 2 * ranks
        everything = ls.layouts.balanced(CASES["all"](LONG).mask, world_size=ranks)
        assert np.array_equal(everything.table, ls.layouts.contiguous(LONG, ranks).table)


@pytest.mark.parametrize("ranks", [2, 8])
def test_documents_stay_together(ranks):
    """A function within documents is dealt as documents are, with few remote keys, and by its own work."""
    lengths = document_lengths("mixed", 1 << 16)
    packed = documents(lengths) & causal()
    mask = from_mask_mod(lambda _b, _h, i, j: (i - j) % 3 == 0, within=packed)
    layout = ls.layouts.balanced(mask, world_size=ranks)
    assert ls.plan(mask, layout, **SIZES).imbalance <= 1.05
    assert (
        count(layout, packed).rows_mean <= 1.5 * count(ls.layouts.balanced(packed, world_size=ranks), packed).rows_mean
    )


def test_every_mask_of_a_model_is_balanced():
    one, other = from_mask_mod(second_half, 8 * SIDE), causal(8 * SIDE)
    layout = ls.layouts.balanced(one, other, world_size=4)
    for mask in (one, other):
        assert ls.plan(mask, layout, **SIZES, scheme="ring").imbalance <= 1.05


def test_round_robin_counts_the_same_work():
    mask = CASES["draft model"](SHORT).mask
    assert ls.plan(mask, ls.layouts.round_robin_by_work(mask, 2), **SIZES).imbalance <= 1.05


def test_every_process_finds_the_same_layout():
    program = (
        "import sys, torch\n"
        "torch.manual_seed(int(sys.argv[1]))\n"
        "from benchmarks.function_masks import CASES\n"
        "from longspan.layouts import balanced\n"
        "print(balanced(CASES['random blocks'](1 << 15).mask, world_size=8).fingerprint)"
    )
    here = ls.layouts.balanced(CASES["random blocks"](1 << 15).mask, world_size=8).fingerprint
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-c", program, "1"]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=200)
    assert found.stdout.strip() == here


def test_layouts_do_not_keep_masks_alive():
    table = torch.zeros(1000, dtype=torch.bool)
    held = sys.getrefcount(table)
    mask = from_mask_mod(lambda _b, _h, i, j: table[i] | table[j], 1000)
    ls.layouts.balanced(mask, world_size=2)
    del mask
    assert sys.getrefcount(table) <= held + 1  # the closure's cell, until the next collection


# -- What is called, and how often -------------------------------------------------------------------------------------


def test_functions_are_called_on_few_pairs_inside_their_bands(monkeypatch):
    calls, answered = [], Function.allows

    def noted(function, q, kv):
        if q.size and kv.size:
            calls.append((np.broadcast(q, kv).size, q.min(), q.max(), kv.min(), kv.max()))
        return answered(function, q, kv)

    monkeypatch.setattr(Function, "allows", noted)
    mask = from_mask_mod(causal_function, within=sliding_window(5000, seq_len=100_000) & causal())
    block_work(mask.plane())
    assert 0 < sum(call[0] for call in calls) <= SIDE**2 // 4  # a window of 5 % takes fewer
    assert min(min(call[1], call[3]) for call in calls) >= 0
    assert max(max(call[2], call[4]) for call in calls) < 100_000
    calls.clear()
    ls.plan(mask, ls.layouts.balanced(mask, world_size=4), **SIZES)
    assert sum(call[0] for call in calls) < 10_000  # the plane knows its work


@pytest.mark.parametrize("seq_len", [SIDE, SIDE + 1, 3 * SIDE, 1 << 20, 10_000_000])
def test_a_sample_holds_as_many_pairs_of_any_length(seq_len):
    work = block_work(from_mask_mod(causal_function, seq_len).plane())
    side = len(work.opened)
    assert side == -(-seq_len // work.block) <= 1024
    assert work.opened.sum() == pytest.approx(side * (side + 1) / 2, rel=0.002)


def test_combined_masks_call_the_function_only():
    function = from_mask_mod(lambda _b, _h, i, j: (i - j) % 5 == 0, 3000)
    packed = documents([1000, 1500, 500]) & causal()
    at = np.arange(0, 3000, 7)
    expected = function.allows(at[:, None], at) & packed.allows(at[:, None], at)
    for mask in (function & packed, packed & function):
        assert mask.plane().predicate is function.plane().predicate
        assert np.array_equal(mask.allows(at[:, None], at), expected)
    expected = function.allows(at[:, None], at) | packed.allows(at[:, None], at)
    for mask in (function | packed, packed | function):
        assert mask.plane().predicate is function.plane().predicate
        assert np.array_equal(mask.allows(at[:, None], at), expected)


def test_the_blocks_of_a_block_mask_are_its_own():
    block_mask = create_block_mask(lambda b, h, i, j: (i >= j) & (j < 300), None, None, 1024, 1024, device="cpu")
    mask = mask_of_block_mask(block_mask)
    assert block_work(mask.plane()) is None
    opened = (block_mask.kv_num_blocks + block_mask.full_kv_num_blocks)[0, 0]
    layout = ls.layouts.contiguous(1024, 4)
    plan = ls.plan(mask, layout, **SIZES, scheme="ring")
    per_rank = opened.view(4, 2).sum(1)
    assert plan.imbalance == pytest.approx(float(per_rank.max() / per_rank.double().mean()))


# -- Planning with that work -------------------------------------------------------------------------------------------


def problem_of(mask, layout, **sizes):
    sizes = {"q_heads": 4, "kv_heads": 4, "head_dim": 64, "v_head_dim": 64, "itemsize": 2, **sizes}
    return Problem.make(mask, layout, Sizes(**sizes))


@pytest.mark.parametrize("name", ["ring", "exchange", "all_gather", "all_to_all", "hybrid(2,exchange)"])
def test_a_function_costs_what_its_blocks_do(name):
    """The same mask as a function and as bands: the same price but for the diagonal's blocks, and the same bound."""
    seq_len, machine = 1 << 15, MACHINES["h100"]
    bands, function = causal(seq_len), from_mask_mod(causal_function, seq_len)
    layout = ls.layouts.zigzag(seq_len, 4)
    found = []
    for mask in (bands, function):
        one = scheme(name, problem_of(mask, layout))
        times = simulate(one.schedule(), machine, pairs_of=one.problem.pairs_of).seconds
        estimated = estimate_scheme(one, machine, keep=False)
        assert times == pytest.approx(estimated.forward, rel=0.05)
        assert Floor(one.problem, machine, keep=False).seconds(one) <= estimated.seconds
        found.append((estimated.seconds, one.work.sum()))
    assert found[1][0] == pytest.approx(found[0][0], rel=0.1)
    assert found[1][1] == pytest.approx(found[0][1], rel=0.02)


def test_a_busy_rank_makes_a_scheme_slow():
    """All rows with work are one rank's: its time, not the mean, is predicted."""
    mask = from_mask_mod(lambda _b, _h, i, j: (i < (1 << 13)) & (j >= 0), 1 << 15)
    bands = Mask.of_bands(rectangles(0, 1 << 13, 0, 1 << 15), 1 << 15, "rows")
    busy, even = ls.layouts.contiguous(1 << 15, 4), ls.layouts.balanced(mask, world_size=4)
    sizes = {**SIZES, "q_heads": 32, "kv_heads": 32, "scheme": "exchange", "machine": "h100"}
    slow, fast = (ls.plan(mask, layout, **sizes).predicted_seconds for layout in (busy, even))
    assert slow > 2 * fast
    assert slow == pytest.approx(ls.plan(bands, busy, **sizes).predicted_seconds, rel=0.05)


@pytest.mark.parametrize("q_heads", [3, 5])
def test_heads_are_cut_by_the_same_work(q_heads):
    """Where heads do not divide over ranks, a head is cut by query rows of equal work."""
    mask = CASES["draft model"](1 << 13).mask
    one = scheme("all_to_all", problem_of(mask, ls.layouts.contiguous(1 << 13, 2), q_heads=q_heads, kv_heads=q_heads))
    assert one.work.max() / one.work.mean() <= 1.02


def test_bands_of_a_plane_share_its_work():
    """Bands with overlapping rectangles: their work adds up to that of the plane."""
    within = causal(2000) & ~sliding_window(300, seq_len=2000)
    mask = from_mask_mod(lambda _b, _h, i, j: (j < 700) & (i >= 0), within=within)
    mask = mask | sliding_window(99, seq_len=2000)
    plane = mask.plane()
    work = block_work(plane)
    assert len(plane.region) > 1
    whole = work.opened.sum() * work.block**2
    assert pairs_in(plane, plane.region).sum() == pytest.approx(whole, rel=0.15)
    assert work.in_rows(np.array([[0, 2000]]))[0] == pytest.approx(whole, rel=0.1)
    assert pairs_in(plane, plane.region[:0]).tolist() == []


@pytest.mark.parametrize("name", ["exchange", "hybrid(2,ring)"])
@pytest.mark.parametrize("case", ["draft model", "tree", "almost nothing"])
def test_outputs_are_those_of_one_device(case, name):
    seq_len, heads = 1 << 10, 3
    mask = CASES[case](seq_len).mask
    layout = ls.layouts.balanced(mask, world_size=4)
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, heads, seq_len, 8, dtype=torch.float64)
    plan = ls.plan(mask, layout, q_heads=heads, kv_heads=heads, head_dim=8, dtype="float64", scheme=name)
    out = run_loopback(plan, q, k, v, dout)[0]
    assert (out - dense_attention(q, k, v, mask, 8**-0.5)[0]).abs().max() < 1e-12
