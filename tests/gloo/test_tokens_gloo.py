"""Tokens and sequences over Gloo ranks: gathers, sums by document and the way back, with gradients, against one
process; under FSDP2, which averages; and shards of another layout, refused on every rank."""

import pytest

from tests.gloo import token_work
from tests.pool import pool


@pytest.mark.timeout(240)
@pytest.mark.parametrize("world", [2, 3])
def test_losses_of_tokens_and_sequences_are_those_of_one_process(world):
    found = pool(world).run(token_work.losses, range(24), world)
    assert max(max(pair) for rank in found for pair in rank) <= 1e-12


@pytest.mark.timeout(240)
def test_numbers_of_sequences_are_the_same_bits_on_every_rank():
    for seed in range(4):
        found = pool(3).run(token_work.numbers_are_the_same_bits, seed, 3)
        assert found[0] == found[1] == found[2]


@pytest.mark.timeout(240)
def test_fsdp_averages_to_the_gradient_of_one_process():
    assert max(pool(2).run(token_work.fsdp, 2)) <= 1e-12


@pytest.mark.timeout(240)
def test_shards_of_another_layout_are_refused_on_every_rank():
    for error, refusal in pool(2).run(token_work.another_layout, 2):
        assert error < 1e-5
        assert refusal is not None
        assert "was sharded by <layout contiguous, 16 tokens on 2 ranks>" in refusal


@pytest.mark.timeout(240)
def test_data_parallel_ranks_are_one_mean_as_the_page_says():
    assert max(pool(4).run(token_work.data_parallel)) <= 1e-12


@pytest.mark.timeout(240)
def test_a_batch_goes_through_fsdp_as_a_dict_does():
    for seen in pool(2).run(token_work.batch_through_fsdp, 2):
        assert seen == {"features": "torch.bfloat16", "shift_labels": "torch.int64", "position_ids": "torch.int64"}
