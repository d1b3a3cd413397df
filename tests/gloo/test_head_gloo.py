"""Losses without logits over real ranks: tokens and words cut at the same time, and FSDP2."""

import pytest

from tests.gloo import head_work
from tests.head_cases import BAR
from tests.pool import pool

WAIT = 200.0


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("world", "words", "seeds"), [(2, 2, range(24)), (4, 2, range(100, 124))])
def test_words_and_tokens_over_ranks(world, words, seeds):
    for found in pool(world).run(head_work.cases, list(seeds), words, timeout=WAIT):
        for seed, (error, name) in zip(seeds, found, strict=True):
            assert error <= BAR, f"case {seed}: {name} is off by {error:.1e}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_fsdp_within_forward_and_a_refusal_outside(checkpointed):
    for error, said in pool(2).run(head_work.fsdp, checkpointed, timeout=WAIT):
        assert error <= 1e-6
        assert "is a DTensor" in said
        assert "in the forward" in said
