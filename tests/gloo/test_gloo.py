"""Attention on real Gloo processes: exactness, compiled graphs, checkpointing, DTensors, refusals."""

import numpy as np
import pytest

from tests.gloo import gloo_work
from tests.pool import pool

NUM_CASES = {2: 220, 3: 120, 4: 120, 8: 48}
CHUNK = 20


@pytest.mark.share(6)
@pytest.mark.parametrize(
    ("world", "first"), [(world, first) for world, count in NUM_CASES.items() for first in range(0, count, CHUNK)]
)
def test_ranks_compute_what_one_device_would(world, first):
    seeds = list(range(first, min(first + CHUNK, NUM_CASES[world])))
    for rank, found in enumerate(pool(world).run(gloo_work.run_cases, [1000 * world + s for s in seeds], world)):
        for seed, dtype, case, errors in found:
            for name, (error, allowed) in zip(("out", "lse", "dq", "dk", "dv"), errors, strict=True):
                assert error <= allowed, f"{name} on rank {rank}, seed {seed}, {dtype}, {case}: {error} > {allowed}"
                assert dtype != "float64" or error <= 1e-12


@pytest.mark.nightly
@pytest.mark.parametrize("scheme", ["exchange", "ring", "all_to_all"])
def test_compiled_and_checkpointed_transformers_equal_eager(scheme):
    expected = pool(2).run(gloo_work.transformer, "eager", scheme)
    ways = ["checkpointed", "selective"] + (["compiled"] if scheme == "exchange" else [])
    for how in ways:
        for (loss, gradients), (other, others) in zip(
            expected, pool(2).run(gloo_work.transformer, how, scheme, timeout=400), strict=True
        ):
            assert loss == pytest.approx(other, rel=1e-6)
            for a, b in zip(gradients, others, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.abs(a).max())


def test_dtensors_sharded_along_tokens():
    for message in pool(2).run(gloo_work.dtensors):
        assert "Shard(2)" in message


def test_calls_that_do_not_fit_their_plan_are_refused():
    for messages in pool(2).run(gloo_work.refusals):
        assert "group must be" in messages["no group"]
        assert "layout.shard(x, rank, dim=2)" in messages["tokens"]
        assert "Cast the tensors" in messages["dtype"]
        assert "Plan for the group's size" in messages["size"]
