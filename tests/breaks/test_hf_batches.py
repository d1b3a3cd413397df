"""Families of transformers x kinds of batches, over two ranks against transformers' sdpa on one device.

Labels are those of collators, -100 at padding alone: with padding on the left, the last padding token predicts the
first real one, so that what a model computes at padding counts.
"""

import pytest
import torch

from tests.breaks import hf_batches_work as work
from tests.lanes import NIGHTLY
from tests.pool import pool

pytest.importorskip("transformers")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LIMIT = 1e-9
"""In float64 all through; the proof has the same."""
TIMEOUT = 400.0
IN_CI = ("opt", "bert", "roberta", "lfm2", "gpt2", "gemma3_text")
CAUSAL_PADDING = ("left", "both", "left, labels everywhere", "right, labels everywhere")
REFUSED = {
    "is padding, and it has a label": {(family, mode) for family in work.HYBRIDS for mode in CAUSAL_PADDING},
    "padding between real tokens": {(family, mode) for family in work.HYBRIDS for mode in ("hole", "left and hole")},
    "does not pass them to transformers' masks": {
        (family, mode) for family in ("opt", "biogpt", *work.ENCODERS) for mode in work.PACKED
    },
}
"""Cells that are refused, by words of the message; all others are exact."""


@pytest.mark.parametrize("family", work.FAMILIES if NIGHTLY else IN_CI)
def test_batches_of_every_kind_are_exact_or_refused(family, tries):
    found = pool(2).run(work.compare, family, work.MODES, timeout=TIMEOUT)
    assert all(other.keys() == found[0].keys() for other in found)
    wrong, right, refused = {}, 0, 0
    for mode, result in found[0].items():
        words = next((words for words, cells in REFUSED.items() if (family, mode) in cells), None)
        if words is not None and isinstance(result, str) and words in result:
            refused += 1
        elif words is None and not isinstance(result, str) and result <= LIMIT:
            right += 1
        else:
            wrong[mode] = result
    assert not wrong, wrong
    tries("Hugging Face families x batches", len(found[0]), right, refused)


def test_a_rule_that_is_wrong_at_padding_is_noticed(tries):
    """The proof compares padding, too: without OPT's own rule, labels at the first real token are refused,
    and other batches are exact. The same batch without the refusal is off: the comparison above can fail."""
    is_exact, refused, right, unchecked = pool(2).run(work.opt_with_wrong_rule, timeout=TIMEOUT)[0]
    assert not is_exact
    assert "token 12 of row 1 is padding, and it has a label" in refused
    assert right <= LIMIT
    assert unchecked > 1e-3
    tries("Hugging Face families x batches", 2, 1, 1)


def test_models_with_rules_of_their_own_are_exact_or_refused(tries):
    """Positions that no rule gives to padding; a forward that does not take `num_items_in_batch`."""
    padded, plain, number, other = pool(2).run(work.planted, timeout=TIMEOUT)[0]
    assert "is padding, and it has a label" in padded
    assert "TakesNoNumber.forward does not take it" in number
    assert plain <= LIMIT
    assert other <= LIMIT
    tries("Hugging Face families x batches", 4, 2, 2)


@pytest.mark.parametrize("family", ["opt", "biogpt"])
def test_models_that_show_masks_no_positions_compute_as_sdpa(family, tries):
    """Transformers does not separate their documents, with a cache or without, and ranks refuse them."""
    model, batch = work.model_of(family), work.batch_of("packed", family)
    asked, found = {name: batch[name] for name in ("input_ids", "position_ids")}, []
    for attention in ("sdpa", "longspan"):
        model.set_attn_implementation(attention)
        with torch.no_grad():
            found += [model(**asked, use_cache=use_cache).logits for use_cache in (True, False)]
    assert max((found[0] - other).abs().max() for other in found[1:]) <= LIMIT
    tries("Hugging Face families x batches", 4, 4)
