"""Hugging Face trainings over ranks equal plain transformers in one process, step by step.

One process: eager attention and the stock Trainer, accelerate, TRL. Ranks: Longspan. 20 optimizer steps each, with
gradient accumulation over 2 batches and gradient checkpointing, in float32.
"""

import functools

import numpy as np
import pytest

from tests.hosts import hf_training_work as work
from tests.pool import pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from tests.hosts import hf_versions

pytestmark = pytest.mark.timeout(600)

TIMEOUT = 240
CLOSE = 5e-6
"""Equal to five decimals."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("trainings")


@functools.cache
def one_process(function, *args):
    return pool(1).run(function, *args, timeout=TIMEOUT)[0]


def over_ranks(world, function, *args):
    """The result of rank 0; all ranks log the same."""
    found = pool(world).run(function, *args, timeout=TIMEOUT)
    assert all(other["curve"] == found[0]["curve"] for other in found)
    return found[0]


def assert_same_curve(found, expected, steps=work.STEPS):
    assert len(found) == steps
    assert np.abs(np.array(found) - np.array(expected)[-steps:]).max() <= CLOSE


@pytest.fixture(scope="module")
def llama(folder):
    """Llama, packed: one process, 2 ranks, and the checkpoint that these wrote after 10 steps."""
    run = (str(folder / "llama"), "llama", "packed", None, 4, None)
    expected = one_process(work.train, *run, False, True)
    found = over_ranks(2, work.train, *run, True, True)
    return expected, found, folder / "llama" / f"checkpoint-{work.STEPS // 2}"


def test_trainer_with_packed_documents_evaluates_and_predicts(llama):
    """Llama, packed: the curve, evaluate(), predict() in global order with each sample once, and the counters."""
    expected, found, _ = llama
    assert_same_curve(found["curve"], expected["curve"])
    assert [found[name] for name in ("tokens", "flos", "batch")] == [
        expected[name] for name in ("tokens", "flos", "batch")
    ]
    for name in ("metrics", "predict", "logits", "bare", "one without labels"):
        assert np.shape(found[name]) == np.shape(expected[name])
        assert np.abs(np.array(found[name]) - np.array(expected[name])).max() <= CLOSE, name
    assert np.array_equal(found["labels"], expected["labels"])


@pytest.mark.nightly
def test_resume_on_another_number_of_ranks(folder, llama):
    """The checkpoint that 2 ranks wrote after 10 steps goes on alike on 1 (stock Trainer) and on 4 ranks."""
    expected, _, saved = llama
    for world in (1, 4) if hf_versions.RESUMES_ON_CPUS else (1,):
        found = over_ranks(world, work.train, str(folder / f"again{world}"), "llama", "packed", None, 4, saved)
        assert_same_curve(found["curve"], expected["curve"])  # the log of the first half is part of the checkpoint
        assert found["first"] == work.STEPS // 2


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_trainer_with_windows_caps_and_sinks(folder, family):
    """Gemma 2 (windows, soft caps) and GPT-OSS (windows, sinks, experts), padded batches."""
    run = (str(folder / family), family, "padded")
    expected = one_process(work.train, *run)
    assert_same_curve(over_ranks(2, work.train, *run)["curve"], expected["curve"])


@pytest.mark.nightly
def test_samples_and_sequences_split(folder):
    """4 ranks = 2 x 2: other samples, and parts of sequences. Gemma 2, padded."""
    run = (str(folder / "gemma2_dp"), "gemma2", "padded")
    expected = one_process(work.train, *run, None, 4, None, False, True)
    found = over_ranks(4, work.train, *run, 2, 4, None, False, True)
    assert_same_curve(found["curve"], expected["curve"])
    assert found["batch"] == expected["batch"]


@pytest.mark.share(2)
@pytest.mark.parametrize(("world", "cp_size"), [(2, None), (4, 2)])
def test_trainer_with_fsdp2(folder, world, cp_size):
    """Parameters sharded over all ranks by transformers' own FSDP2 (`DistributedConfig`), which runs on CPUs."""
    if not hf_versions.TRAINS_SHARDED:
        pytest.skip("the Trainer takes models that were sharded when they were loaded from transformers 5.19 on")
    run = ("gemma2", "padded")
    expected = one_process(work.train, str(folder / "gemma2"), *run)
    found = over_ranks(world, work.train, str(folder / f"fsdp{world}"), *run, cp_size, 4, None, False, False, "fsdp2")
    assert_same_curve(found["curve"], expected["curve"])


@pytest.mark.nightly  # and a program of examples/
def test_accelerate_loop():
    expected = one_process(work.accelerate_loop)
    assert_same_curve(over_ranks(2, work.accelerate_loop)["curve"], expected["curve"])


@pytest.mark.nightly  # TRL has a file of its own
def test_trl_packs(folder):
    """TRL's SFTTrainer with packing="bfd": losses, norms, and its own entropy, accuracy and token counts."""
    pytest.importorskip("trl")
    expected = one_process(work.sft, str(folder / "sft"))
    found = over_ranks(2, work.sft, str(folder / "sft"))
    assert expected["documents"] > 1
    curves = np.array(found["curve"]), np.array(expected["curve"])
    assert_same_curve(*(curve[:, [0, 1, 2, 4]] for curve in curves))
    accuracy = np.abs(curves[0][:, 3] - curves[1][:, 3])
    assert accuracy.max() <= 0.02, "one token of a batch may win or lose by rounding"
    assert (accuracy > 0).sum() <= 2
    assert abs(found["metrics"][0] - expected["metrics"][0]) <= CLOSE
    assert abs(found["metrics"][1] - expected["metrics"][1]) <= 0.02


@pytest.mark.nightly  # a program of examples/ has one
@pytest.mark.parametrize(("world", "dp_shard"), [(2, 1), (4, 2)])
def test_trainer_with_a_parallelism_config(folder, world, dp_shard):
    """Accelerate's mesh and its FSDP2. It refuses CPUs: here, in the test alone, it takes them for accelerators."""
    expected = one_process(work.train, str(folder / "gemma2"), "gemma2", "padded")
    found = over_ranks(world, work.train_planned, str(folder / "planned"), "gemma2", "padded", dp_shard)
    assert "cp" in found["names"]
    assert_same_curve(found["curve"], expected["curve"])


def test_dropout_does_not_depend_on_the_number_of_ranks(folder):
    two, four = (over_ranks(world, work.dropped, str(folder / f"dropped{world}"))["curve"] for world in (2, 4))
    assert_same_curve(four, two, steps=3)
    if not hf_versions.RESUMES_ON_CPUS:
        return
    again = over_ranks(2, work.dropped, str(folder / "again"), folder / "dropped2" / "checkpoint-1")
    assert again["first"] == 1
    assert_same_curve(again["curve"], two, steps=3)  # a resumed run drops the same, and evaluation changes nothing


@pytest.mark.parametrize(
    ("names", "has_loss"),
    [
        (["labels"], True),
        (["labels", "weights"], True),
        (["labels", "missing"], False),
        (["missing"], False),
        ([], False),
    ],
)
def test_predictions_have_a_loss_where_all_labels_are_there(names, has_loss):
    """As in the Trainer: without a loss it calls the model itself, which must get a part."""
    from types import SimpleNamespace

    from longspan.huggingface.trainer import ContextParallelTrainer

    class Recorder:
        def _prepare_inputs(self, inputs):
            return inputs

        def prediction_step(self, model, inputs, *_):
            self.given = inputs
            return None, None, None

    class Mine(ContextParallelTrainer, Recorder):
        def _part(self, model, inputs):
            return {"part": inputs}

    trainer = Mine.__new__(Mine)
    trainer._ranks, trainer._sequence, trainer.label_names = SimpleNamespace(), SimpleNamespace(calls=1), names
    trainer.prediction_step(None, {"labels": 1, "weights": 2, "missing": None}, False)
    assert ("part" not in trainer.given) == has_loss


REFUSALS = {
    "eager": ("attention must be 'longspan', but got 'eager'", "attn_implementation='longspan'"),
    "cp_size": ("cp_size must divide the number of ranks, 2, but got 3", "Choose a divisor"),
    "batches": ("must be fed the same batch", "'input_ids' on ranks [1]", "leave data loaders to it"),
    "stream": ("must be fed the same batch", "'dispatch_batches': False"),
    "own loss": (
        "compute_loss of OwnLoss is not supported with sequences split over 2 ranks",
        "own_loss_takes_shards = True",
    ),
    "tokens": ("average_tokens_across_devices = False", "Leave it at True"),
    "objects": ("eval_use_gather_object = True", "Leave it out"),
    "collator": ("packs without position_ids", "return_position_ids=True"),
    "no labels": ("counted no labels", "every batch must have 'labels'"),
}


def test_refusals(folder):
    for said in pool(2).run(work.refusals, str(folder / "refused"), timeout=TIMEOUT):
        assert said.keys() == REFUSALS.keys()
        wrong = {name: said[name] for name, parts in REFUSALS.items() if not all(part in said[name] for part in parts)}
        assert not wrong
