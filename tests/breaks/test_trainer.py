"""`ContextParallelTrainer`: one process trains as two do, on batches that have differed, and FSDP is never dropped."""

import numpy as np
import pytest

from tests.breaks import trainer_work as work
from tests.lanes import share
from tests.pool import pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TIMEOUT = 400.0
CLOSE = 5e-6
"""Of losses and norms in float32, as in tests/hosts/test_hf_training.py."""
RUNS = [
    ("bamba", True, {}),
    ("llama", True, {}),
    ("bert", False, {}),
    ("llama", False, {"train_sampling_strategy": "group_by_length"}),
    ("modernbert", False, {}),
    ("lfm2", True, {"gradient_checkpointing": True}),
    ("lfm2", True, {"label_smoothing_factor": 0.1}),
]
FSDP = "the model must be sharded by FSDP, because of"


def over_ranks(world, function, *args):
    found = pool(world).run(function, *args, timeout=TIMEOUT)
    assert all(other == found[0] for other in found)
    return found[0]


def train(family, packed, changes):
    return work.train(family, packed, **changes)


@pytest.mark.parametrize(("family", "packed", "changes"), share(RUNS, 2))
def test_one_process_trains_as_two_do(family, packed, changes, tries):
    """Packed hybrids (which transformers alone does not keep apart), losses that ignore num_items_in_batch (BERT) and
    obey it (ModernBERT), rows without labels, and what the Trainer does on top."""
    (alone, bare), (two, spread) = (over_ranks(n, train, family, packed, changes) for n in (1, 2))
    assert np.shape(alone) == np.shape(two)
    assert np.abs(np.array(alone) - np.array(two)).max() <= CLOSE * np.abs(alone).max()
    if packed:
        assert np.abs(np.array(bare) - np.array(spread)).max() <= 1e-4 * np.abs(bare).max()
    tries("Trainer, one process against two", len(alone), len(alone))


SHORT = {"lengths": (1, 2, 3), "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1}


@pytest.mark.parametrize(("family", "packed", "world"), [("llama", False, 4), ("lfm2", True, 3)])
def test_batches_of_fewer_tokens_than_ranks(family, packed, world, tries):
    """Ranks without a token compute with a slot of padding, in training, evaluation and prediction."""
    alone, bare = over_ranks(1, train, family, packed, SHORT)
    many, spread = over_ranks(world, train, family, packed, SHORT)
    assert np.isfinite(alone).all()
    np.testing.assert_allclose(many, alone, rtol=0, atol=CLOSE * np.abs(alone).max())
    if packed:
        np.testing.assert_allclose(spread, bare, rtol=0, atol=1e-4 * np.abs(bare).max())
    tries("Trainer, one process against two", len(alone), len(alone))


def test_packed_documents_of_hybrids_are_apart_without_a_group(tries):
    """In this process, which has no group: the logits of each document alone, and the model's own loss."""
    for family in ("bamba", "lfm2"):
        found = work.separated(family, "longspan")
        assert found["far"] <= 1e-4
        assert found["loss"] <= 1e-5
        assert not found["said"]
    tries("Trainer, one process against two", 2, 2)


@pytest.mark.parametrize(("family", "attention", "reason"), [
    ("bamba", "sdpa", "attention must be 'longspan'"), ("jamba", "longspan", "calls mamba_selective_scan"),
])  # fmt: skip
def test_what_cannot_be_kept_apart_is_said_once(family, attention, reason):
    """The documents leak, as they do in transformers: the test above can fail."""
    found = work.separated(family, attention)
    assert found["is_same"]
    assert found["far"] > 1e-2
    (said,) = found["said"]
    assert reason in said


def test_batches_of_other_models_are_left_alone():
    found = work.separated("llama", "longspan")
    assert found["is_same"]
    assert found["far"] <= 1e-4
    assert not found["said"]


def test_fsdp_that_becomes_ddp_is_refused(tries):
    """And DDP that was not to be anything else is not, nor is one process. FSDP2 that is sharded is trained in
    tests/hosts/test_hf_training.py."""
    for how, request in (("arguments", "TrainingArguments(fsdp=...)"), ("variable", "ACCELERATE_USE_FSDP=true")):
        refused = over_ranks(2, work.wrapped, how)
        assert f"{FSDP} {request}, but got DistributedDataParallel" in refused
    assert over_ranks(2, work.wrapped, "plain") == "DistributedDataParallel"
    assert over_ranks(1, work.wrapped, "plain") == "LlamaForCausalLM"
    tries("Trainer, how models are wrapped", 4, 2, 2)
