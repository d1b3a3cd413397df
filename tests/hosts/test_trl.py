"""TRL's trainers over ranks equal plain TRL in one process, step by step: losses, norms, and every metric of the log.

One process: eager attention and TRL's own classes. Ranks: Longspan, with the mixin in front. Completions are sampled,
from generators that begin alike.
"""

import functools
from types import SimpleNamespace

import pytest
import torch

from tests.hosts import trl_work as work
from tests.pool import pool

pytest.importorskip("trl")
from longspan.huggingface.accelerate import drop_cp_duplicates
from longspan.huggingface.trl import _broadcast_completions
from longspan.training import BatchError

pytestmark = pytest.mark.timeout(600)

TIMEOUT = 280
CLOSE = 5e-6
"""Equal to five decimals; of numbers above 1, to as many digits."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("trl"))


@functools.cache
def alone(job, folder):
    return pool(1).run(job, folder, timeout=TIMEOUT)[0]


def assert_same(found, expected):
    """The same numbers by the same names, in every step and in the evaluation."""
    pairs = [*zip(found["curve"], expected["curve"], strict=True), (found["evaluated"], expected["evaluated"])]
    for step, (here, there) in enumerate(pairs):
        assert here.keys() == there.keys(), step
        off = {name: (here[name], there[name]) for name in there if not _is_close(here[name], there[name])}
        assert not off, f"step {step + 1} of {len(pairs)}: {off}"


def _is_close(here, there):
    return here == there or abs(here - there) <= CLOSE * max(1.0, abs(there))


def over_ranks(job, folder):
    found = pool(2).run(job, folder, timeout=TIMEOUT)
    assert found[1]["curve"] == found[0]["curve"]
    return found[0]


def largest(found, name):
    return max(abs(step.get(name) or 0.0) for step in found["curve"])


@pytest.mark.share(5)
@pytest.mark.parametrize(
    ("job", "moving"),
    [
        (work.grpo, ("kl", "entropy", "clip_ratio/region_mean", "reward_std")),
        (work.rloo, ("kl", "entropy", "clip_ratio/region_mean", "reward_std")),
        (work.dpo, ("entropy", "rewards/margins", "logits/chosen")),
        (work.distillation, ("entropy",)),
        (work.sft, ("entropy", "mean_token_accuracy")),
    ],
    ids=["grpo", "rloo", "dpo", "distillation", "sft"],
)
def test_twenty_steps(job, moving, folder):
    """Every number that is logged in 20 steps, and in the evaluation behind them."""
    expected = alone(job, folder)
    assert len(expected["curve"]) == work.STEPS
    for name in (*moving, "loss", "grad_norm"):
        assert largest(expected, name) > 0, f"{name} never moved, so nothing was compared"
    assert_same(over_ranks(job, folder), expected)


@pytest.mark.share(3)
@pytest.mark.parametrize(("job", "args"), [(work.sft_smooth, ()), (work.experts, ("SFT",)), (work.experts, ("GRPO",))])
def test_smoothed_labels_and_routers(job, args, folder):
    """Rows that are padded, with labels that TRL smooths; losses of routers, which TRL computes behind the model."""
    expected = pool(1).run(job, folder, *args, timeout=TIMEOUT)[0]
    if args:
        assert largest(expected, "aux_loss") > 0
    assert_same(pool(2).run(job, folder, *args, timeout=TIMEOUT)[0], expected)


def test_on_one_process_it_is_the_plain_trainer(folder):
    plain, mixed = pool(1).run(work.with_mixin_alone, folder, timeout=TIMEOUT)[0]
    assert mixed == plain


def test_refusals(folder):
    for rank, found in enumerate(pool(2).run(work.refused, folder, timeout=TIMEOUT)):
        assert "but got KTOTrainer" in found["kto"]
        assert "GRPOTrainer" in found["kto"]
        assert "generation_batch_size is 3: ranks of one sequence" in found["groups"]
        assert "2 ranks count as 1" in found["groups"]
        assert found["fits"] == (6, 1, 0), rank


def test_each_sequence_is_gathered_once():
    ranks = SimpleNamespace(cp=SimpleNamespace(size=lambda: 2), dp=SimpleNamespace(size=lambda: 3))
    rows = torch.arange(24).reshape(12, 2)
    assert torch.equal(drop_cp_duplicates(rows, ranks), rows[[0, 1, 4, 5, 8, 9]])
    assert drop_cp_duplicates(list("aabbcc"), ranks) == list("abc")
    assert drop_cp_duplicates(([1, 1, 2, 2, 3, 3], torch.zeros(0, 4)), ranks)[0] == [1, 2, 3]
    alone = SimpleNamespace(cp=ranks.cp, dp=None)
    assert drop_cp_duplicates(list("xyxy"), alone) == ["x", "y"]


def test_completions_that_cannot_be_sent_are_refused():
    with pytest.raises(BatchError, match="completions must be lists"):
        _broadcast_completions(([[1, 2]], [object()]), None)


@pytest.mark.nightly
def test_samples_and_sequences_split(folder):
    """4 ranks = 2 x 2 against plain TRL on 2 processes: groups of completions lie on two of them."""
    expected = pool(2).run(work.grpo_groups, folder, 1, timeout=TIMEOUT)[0]
    found = pool(4).run(work.grpo_groups, folder, 2, timeout=TIMEOUT)[0]
    assert_same(found, expected)
    assert found["completions"] == expected["completions"]
