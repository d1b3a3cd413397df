"""The Trainer on documents of very different lengths (`batches=`) equals plain transformers, document by document."""

import functools

import numpy as np
import pytest

from tests.hosts import hf_documents_work as work
from tests.pool import pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytest.importorskip("datasets")
from tests.hosts import hf_versions

pytestmark = pytest.mark.timeout(400)

TIMEOUT = 240
CLOSE = 5e-6
"""Equal to five decimals."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("documents")


@functools.cache
def expected():
    return pool(1).run(work.reference, timeout=TIMEOUT)[0]


def difference(found, first=0):
    """The largest difference of a loss or gradient norm."""
    curve = np.array(expected()["curve"])
    assert len(found) == len(curve) - first
    return np.abs(np.array(found) - curve[first:]).max()


def over_ranks(world, *args, **kwargs):
    found = pool(world).run(functools.partial(work.train, **kwargs), *args, timeout=TIMEOUT)
    assert all(other["curve"] == found[0]["curve"] for other in found)
    return found[0]


@pytest.fixture(scope="module")
def trained(folder):
    return over_ranks(2, str(folder / "two"), save=True)


def test_losses_are_those_of_documents_by_themselves(trained):
    """Two epochs on two ranks, the second in another order of steps; a step has several micro-batches."""
    assert difference(trained["curve"]) <= CLOSE
    assert expected()["steps"] >= 4
    assert trained["tokens"] == work.EPOCHS * sum(len(x["input_ids"]) for x in work.documents())


def test_plans_are_made_ahead_in_a_thread(trained):
    """All but those of the first two micro-batches, and of the check of the model."""
    made = trained["planners"]
    assert made.count("MainThread") <= 4
    assert made.count("longspan-prefetch_0") >= 2 * expected()["steps"]


def test_one_process_does_the_same(folder):
    assert difference(over_ranks(1, str(folder / "one"))["curve"]) <= CLOSE


@pytest.mark.skipif(not hf_versions.RESUMES_ON_CPUS, reason="this transformers does not resume on CPUs")
def test_a_checkpoint_inside_of_an_epoch_goes_on_with_the_next_step(folder, trained):
    step = 3 * (expected()["steps"] // 3 + 1)  # in the second epoch
    assert step % expected()["steps"]
    found = over_ranks(2, str(folder / "again"), resume=folder / "two" / f"checkpoint-{step}")
    assert found["first"] == step
    assert found["curve"] == trained["curve"]  # the log of the first steps is part of the checkpoint


@pytest.mark.nightly
def test_groups_of_ranks_train_alike(folder):
    assert difference(over_ranks(4, str(folder / "groups"), cp_size=2)["curve"]) <= CLOSE


@pytest.mark.nightly
def test_trl_trains_alike(folder):
    pytest.importorskip("trl")
    found = pool(2).run(work.sft, str(folder / "sft"), timeout=TIMEOUT)[0]
    assert difference(found["curve"]) <= CLOSE


@pytest.mark.parametrize("mistake", ["lost", "doubled", "shortened", "averaged", "all tokens"])
def test_mistakes_change_losses(folder, mistake):
    found = over_ranks(1, str(folder / mistake), mistake=mistake)
    assert difference(found["curve"]) > 1e-3


def test_contradictions_are_refused(folder):
    (said,) = pool(1).run(work.refusals, str(folder / "refusals"), timeout=TIMEOUT)
    assert said["accepted"] == said["flattening"] == said["list"] == said["length"]
    for name, words in {
        "rows": "per_device_train_batch_size = 2 is not supported with batches=",
        "accumulation": "gradient_accumulation_steps = 2",
        "strategy": "train_sampling_strategy = 'group_by_length'",
        "drop": "dataloader_drop_last",
        "stream": "`train_dataset` must be a map-style dataset",
        "text": "`train_dataset` must have token ids as 'input_ids'",
        "lengths": "must be one row of its 9 tokens",
        "collator": "must be one row of its",
        "labels": "the collator must return",
        "packed": "but got input_ids, labels, position_ids, cu_seq_lens_q",
        "options": "`batches` must be a dict of arguments of longspan.batches",
        "limit": "documents are longer than the 40",
        "layout": "layout = 'zigzag'",
    }.items():
        assert isinstance(said[name], str), name
        assert words in said[name], said[name]
        assert said[name].startswith(("BatchError", "PlanError")), said[name]


def test_a_micro_batch_with_fewer_tokens_than_ranks_is_padded():
    import torch

    import longspan as ls
    from longspan.huggingface.documents import Steps, layout_of

    data = [[7, 8], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    plan = ls.batches([2, 9], ranks=4, tokens_per_rank=3, tokens_per_step=9, order=[0, 1])
    steps = Steps(data, lambda rows: {name: torch.tensor(rows) for name in ("input_ids", "labels")}, plan, 3)
    short, long = steps[0], steps[1]
    assert short["input_ids"].tolist() == [[7, 8, 0, 0]]
    assert short["labels"].tolist() == [[-100, 8, -100, -100]]
    assert short["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert layout_of(plan[0].micro_batches[0]).num_tokens.tolist() == [1, 1, 1, 1]
    assert long["input_ids"].tolist() == [data[1]]
    assert layout_of(plan[1].micro_batches[0]) == plan[1].micro_batches[0].layout
