"""Models of transformers whose loss, or log-probabilities, are computed without logits: the same, and no logits."""

import pytest

from tests.hosts import hf_head_work as work
from tests.pool import pool

pytest.importorskip("transformers")

pytestmark = [pytest.mark.timeout(240), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
EXACT = 2e-6
"""Of float64 models in which transformers computes norms and its loss in float32; proofs go to 1e-9."""
CLOSE = 2e-5


def run(function):
    return pool(2).run(function, timeout=200.0)


def test_losses_are_the_same_without_logits():
    for found in run(work.losses):
        assert len(found) == 8
        assert not {name: off for name, (off, _) in found.items() if not off <= EXACT}
        assert {name: most > 0 for name, (_, most) in found.items()} == {name: "without" not in name for name in found}


def test_log_probabilities_and_entropies_with_gradients():
    for found in run(work.log_probabilities):
        assert len(found) == 4
        assert not {name: said for name, said in found.items() if not (said[0] <= EXACT and said[1] == 0)}


def test_loss_curves_under_wrappers():
    for found in run(work.wrapped):
        assert len(found) == 3
        assert not {name: off for name, off in found.items() if not off <= CLOSE}


def test_log_probabilities_where_fsdp_shards_the_head_by_itself():
    for found in run(work.scores_under_fsdp):
        assert found <= CLOSE


def test_logits_are_there_when_something_needs_them():
    for found in run(work.left_to_the_model):
        none = "<no logits: the loss was computed without them, shard_inputs(..., logits=True) has both>"
        words = 24
        for name in ("plain", "counted otherwise", "the same again", "a tuple", "compiled"):
            assert found[name][0] == none, name
        for name in ("labels taken out", "a hook", "another head", "another loss", "after an error"):
            assert found[name][0][2] == words, name
        wrong = {n: said for n, said in found.items() if isinstance(said, tuple) and said[1] and not said[1] <= CLOSE}
        assert not wrong
        for name in ("argmax", "rows", "softmax"):
            assert "logits=True" in found[name]
        assert found["hasattr"] is False


def test_what_has_no_log_probabilities_is_refused():
    for found in run(work.refused):
        assert "Logits are divided by it" in found["temperature"]
        assert "labels or input_ids" in found["nothing to predict"]
        assert "predicts no tokens" in found["classes"] or "cannot be used" in found["classes"]
