"""The Trainer with smoothed labels, a user's loss, or noise, over ranks: what stock transformers computes alone."""

import numpy as np
import pytest
import torch

from tests.hosts import hf_losses_work as work
from tests.pool import pool

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
from longspan import layouts
from longspan.huggingface import trainer
from longspan.huggingface.trainer import IN_PLACE, SHIFTS, WHOLE_LOSS

pytestmark = pytest.mark.timeout(600)

TIMEOUT = 240
CLOSE = 5e-6
WAYS = {"shifts": SHIFTS, "in_place": IN_PLACE, "worst_token": WHOLE_LOSS, "reads_more": WHOLE_LOSS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("losses"))


@pytest.mark.share(3)
@pytest.mark.parametrize("what", ["smoothing", "noise", *WAYS])
def test_same_as_alone(what, folder):
    """Losses, norms, and the evaluation; documents packed and padded in turn."""
    kind = "packed" if what in ("noise", "shifts") else "padded"
    expected = pool(1).run(work.train, folder, what, kind, timeout=TIMEOUT)[0]
    for found in pool(2).run(work.train, folder, what, kind, timeout=TIMEOUT):
        assert np.abs(np.array(found["curve"]) - np.array(expected["curve"])).max() <= CLOSE
        assert abs(found["eval"] - expected["eval"]) <= CLOSE
        assert found["way"] == WAYS.get(what)
        assert found["hooks"] == expected["hooks"] == 0, "noise must end with training"


def test_it_matters(folder):
    """What was compared above is not what a plain training gives."""
    plain, smooth, noisy = (
        np.array(pool(1).run(work.train, folder, what, "packed", timeout=TIMEOUT)[0]["curve"])
        for what in ("nothing", "smoothing", "noise")
    )
    assert np.abs(plain - smooth).max() > 1e-3
    assert np.abs(plain - noisy).max() > 1e-3


@pytest.mark.parametrize("at_once", [2**26, 5 * 8])
def test_noise_is_drawn_for_whole_sequences(at_once, monkeypatch):
    """Rows of all ranks together are what one process draws, in one go or piece by piece."""
    monkeypatch.setattr(trainer, "DRAWN_AT_ONCE", at_once)
    layout = layouts.zigzag(24, 3)
    torch.manual_seed(5)
    bound = float(2.5 / torch.sqrt(torch.tensor(24 * 8)))
    whole = torch.zeros(2, 24, 8).uniform_(-bound, bound)
    for rank in range(3):
        torch.manual_seed(5)
        mine = trainer.own_noise(torch.zeros(2, 8, 8), 2.5, layout, rank)
        assert torch.equal(mine, layout.shard(whole, rank, 1))


def test_logits_are_gathered_where_they_are_asked_for(folder):
    """evaluate() without metrics computes none; with metrics, and in predict(), they are whole."""
    for found in pool(2).run(work.gathers, folder, timeout=TIMEOUT):
        assert found == {"evaluate": 0, "metrics": 2, "predict": 2}


def test_the_mixin_comes_first():
    from transformers import Trainer

    from longspan.errors import LongspanError
    from longspan.huggingface.trainer import ContextParallelTrainer

    with pytest.raises(
        LongspanError, match=r"names ContextParallelTrainer behind Trainer.*class Mine\(Context"
    ) as told:
        type("Mine", (Trainer, ContextParallelTrainer), {})
    assert "nothing would be split" in str(told.value)
    type("Mine", (ContextParallelTrainer, Trainer), {})
    above = type("Above", (ContextParallelTrainer,), {})
    type("Mine", (above, Trainer), {})


def test_liger_takes_shifted_labels_or_is_refused(folder):
    """A loss as Liger's, put into the model when training begins; and an older one, which shifts labels itself."""
    expected = pool(1).run(work.liger, folder, timeout=TIMEOUT)[0]["curve"]
    for found in pool(2).run(work.liger, folder, timeout=TIMEOUT):
        assert np.abs(np.array(found["curve"]) - np.array(expected)).max() <= CLOSE
    for found in pool(2).run(work.liger, folder, True, timeout=TIMEOUT):
        assert "shift_labels" in found["said"]
        assert "'fused_linear_cross_entropy': False" in found["said"]
