"""Trainings of hybrid models over ranks against one process that gets every document alone.

Ranks: float32, packed batches, FSDP2, recurrences and convolutions over ranks. Judge: plain transformers in float64,
with recurrences token by token. Both round: ranks may be three times as far from the judge as plain transformers in
float32 is.
"""

import functools
import math

import numpy as np
import pytest
import torch

from tests.hosts import hf_hybrid_training_work as work
from tests.pool import pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

TIMEOUT = 300.0
RUNS = [("qwen3_next", 4), ("nemotron_h", 2), ("qwen3_next", 2), ("nemotron_h", 4)]
SLACK = 3.0


@functools.cache
def one_process(*args):
    return np.array(work.one_process(*args))


def over_ranks(world, function, *args):
    """The result of rank 0; all ranks say the same."""
    found = pool(world).run(function, *args, timeout=TIMEOUT)
    assert all(other == found[0] for other in found)
    return np.array(found[0])


def far(a, b):
    return float(np.abs(a - b).max())


@pytest.mark.nightly  # the Trainer with a hybrid model always
@pytest.mark.parametrize(("model_type", "cp"), RUNS)
def test_fifty_steps_with_fsdp2(model_type, cp):
    """4 ranks: sequences split over all, and over two, of which two pairs get other rows."""
    right, rounded = (one_process(model_type, dtype) for dtype in (torch.float64, torch.float32))
    found = over_ranks(4, work.sharded_training, model_type, cp)
    assert len(found) == work.STEPS
    assert right[-1] < 0.4 * right[0], "nothing was learnt"
    assert far(found, right) <= SLACK * far(rounded, right)


def test_leaking_documents_would_be_noticed():
    """Plain transformers, given the packed batches, is far from both."""
    right, rounded = (one_process("qwen3_next", dtype) for dtype in (torch.float64, torch.float32))
    mixed = np.array(work.packed_by_transformers("qwen3_next", 2))
    assert far(mixed, right[:2]) > 100 * SLACK * far(rounded, right)


def test_trainer_with_flattened_documents():
    """`ContextParallelTrainer`, gradient checkpointing, accumulation over 2 batches of 3 documents."""
    steps = 10
    expected = np.array(work.trained_alone("qwen3_next", steps))
    found = over_ranks(2, work.trainer_training, "qwen3_next", steps)
    assert found.shape == (steps, 2)
    assert far(found, expected) <= 5e-6 * max(1.0, float(expected.max()))  # as tests/hosts/test_hf_training.py


@pytest.mark.nightly
def test_autocast():
    """bfloat16 over ranks is as far from float32 as it is in one process."""
    steps = 8
    right = one_process("nemotron_h", torch.float32)[:steps]
    rounded = one_process("nemotron_h", torch.float32, steps, True)
    found = over_ranks(2, work.sharded_training, "nemotron_h", 2, steps, True)
    assert all(map(math.isfinite, found))
    assert 0 < far(found, right) <= SLACK * far(rounded, right)
