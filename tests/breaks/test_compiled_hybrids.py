"""Compiled hybrid models over ranks: `torch.compile` breaks its graph at convolutions and recurrences, and loss and
gradients stay those of the same model without it, in every batch of other lengths and documents."""

import pytest

from tests.lanes import NIGHTLY
from tests.pool import pool

pytest.importorskip("transformers")
from tests.breaks import compiled_hybrids_work as work
from tests.hosts import hf_versions

TIMEOUT = 900.0
pytestmark = [
    pytest.mark.timeout(1000),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not hf_versions.HAS_HYBRIDS, reason="models are of transformers 5.15 and later"),
]
LIMITS = {"eager": 0.0, "aot_eager": 1e-6, "inductor": 1e-6}
"""The same operators run under "eager". Others write float32 parts of a model in another order."""
ALWAYS = [("lfm2", work.WRAPPER_SHARDED, "eager", False, 2)]
OTHERS = [
    *(
        (family, way, backend, is_used_before, len(work.BATCHES))
        for family in ("lfm2", "bamba", "falcon_h1", "qwen3_next", "llama")
        for backend in ("eager", "aot_eager")
        for way in work.WAYS
        for is_used_before in (False, True)
    ),
    *((family, work.WRAPPER_SHARDED, "inductor", False, 2) for family in ("lfm2", "falcon_h1", "llama")),
]


@pytest.mark.parametrize(("family", "way", "backend", "is_used_before", "num_batches"), OTHERS if NIGHTLY else ALWAYS)
def test_a_compiled_model_is_the_model(family, way, backend, is_used_before, num_batches, tries):
    ranks = pool(2).run(work.step_errors, family, way, backend, is_used_before, num_batches, timeout=TIMEOUT)
    right = sum(max(errors) <= LIMITS[backend] for found in ranks for errors in found) // len(ranks)
    tries("Hugging Face: compiled models", num_batches, right)


def test_a_wrapper_that_drops_the_keyword_is_refused(tries):
    """The sequence must reach convolutions: a wrapper that does not hand it on is named."""
    for words in pool(2).run(work.deaf_wrapper, timeout=TIMEOUT):
        assert "of Deaf has not seen longspan= in its convolution" in words
    tries("Hugging Face: wrappers that drop longspan=", 1, 0, 1)
