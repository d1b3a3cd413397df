"""Recurrences on real Gloo processes: exactness in every way that autograd is used, checkpoints."""

import numpy as np
import pytest
import torch

from tests.gloo import scan_work
from tests.pool import pool
from tests.spread_cases import LIMIT

NUM_CASES = {2: 120, 3: 96, 4: 96}
CHUNK = 24


@pytest.mark.share(4)
@pytest.mark.parametrize(
    ("world", "first"), [(world, first) for world, count in NUM_CASES.items() for first in range(0, count, CHUNK)]
)
def test_ranks_compute_what_one_device_would(world, first):
    """Plain, checkpointed in both ways, two calls in flight, none, backward twice."""
    seeds = [10_000 * world + seed for seed in range(first, first + CHUNK)]
    for rank, found in enumerate(pool(world).run(scan_work.run_cases, seeds, world)):
        for p, way, errors in found:
            assert max(errors.values()) <= LIMIT, f"rank {rank} of {world}, {way}, {p}: {errors}"


@pytest.mark.parametrize("form", ["delta", "kda", "gla", "ssd with all"])
def test_autocast(form):
    """Twice what one device is off in bf16, and some roundings of numbers of size one."""
    for ranks, alone in pool(2).run(scan_work.autocast, form):
        for name, error in ranks.items():
            assert error <= 2 * alone[name] + 8 * torch.finfo(torch.bfloat16).eps, (name, error, alone[name])


def test_layers_with_and_without_checkpoints():
    """One computation, however it is remembered; and one rank's is that of three."""
    (loss, gradient), *_ = pool(3).run(scan_work.layers, "eager")
    for world, how in ((1, "eager"), (3, "checkpoint"), (3, "reentrant"), (2, "eager")):
        for other_loss, other in pool(world).run(scan_work.layers, how):
            assert loss == pytest.approx(other_loss, rel=1e-12)
            np.testing.assert_allclose(gradient, other, rtol=0, atol=1e-12 * max(1.0, np.abs(gradient).max()))
