"""Score functions, sinks, dropout and masks that are functions, on real Gloo processes."""

import numpy as np
import pytest

from tests.gloo import score_work
from tests.pool import pool
from tests.score_cases import LIMIT

CASES = {2: 24, 3: 20, 4: 16}
CHUNK = 8
TIMEOUT = 200.0

pytestmark = pytest.mark.timeout(240)


def seeds_of(world, first):
    return [1000 * world + seed for seed in range(first, min(first + CHUNK, CASES[world]))]


def close(found, right):
    return np.linalg.norm(found - right) <= LIMIT * max(np.linalg.norm(right), 1e-2 * right.size**0.5)


@pytest.mark.share(4)
@pytest.mark.parametrize(("world", "first"), [(w, f) for w, count in CASES.items() for f in range(0, count, CHUNK)])
def test_ranks_compute_what_one_device_would(world, first):
    """Gradients of what learns are whole on every rank ("sum"), or shares that add up to it ("share")."""
    seeds = seeds_of(world, first)
    answers = [score_work.random_problem(seed, world)[0].answer[5:] for seed in seeds]
    for way in ("sum", "share"):
        ranks = pool(world).run(score_work.run_cases, seeds, world, way, timeout=TIMEOUT)
        for rank, found in enumerate(ranks):
            for what, errors, _ in found:
                for name, error in errors.items():
                    assert error <= LIMIT, f"{name} on rank {rank} is off by {error:.3e}: {what}"
        for number, answer in enumerate(answers):
            what = ranks[0][number][0]
            parts = [found[number][2] for found in ranks]
            for index, right in enumerate(answer):
                if way == "sum":
                    assert close(parts[0][index], right.numpy()), f"learned {index}: {what}"
                    assert all(part[index].tobytes() == parts[0][index].tobytes() for part in parts), "the same bits"
                else:
                    assert close(sum(part[index] for part in parts), right.numpy()), f"learned {index}: {what}"


def test_flex_context_parallel_is_wrong_where_we_are_right():
    """PyTorch 2.13 hands local query positions to score_mod: rank 0 is right, rank 1 is far off, nobody is told."""
    (theirs_0, ours_0), (theirs_1, ours_1) = pool(2).run(score_work.flex_context_parallel, timeout=TIMEOUT)
    assert max(theirs_0, ours_0, ours_1) < 1e-5
    assert theirs_1 > 0.1
