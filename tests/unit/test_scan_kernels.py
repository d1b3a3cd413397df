"""Kernels of recurrences against the recurrence token by token."""

import random

import numpy as np
import pytest
import torch

from longspan.errors import KernelError
from longspan.execution.scans.contract import Segments
from longspan.execution.scans.kernels import choose_scan_kernel, scan_kernel_named
from tests.scan_cases import KINDS, errors, random_states, random_work, with_leaves

REFERENCE = scan_kernel_named("reference")
LIMIT = 1e-12


def problem(kind, seed, **asked):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    work = random_work(kind, rng, **asked)
    return work, random_states(work)


@pytest.mark.parametrize("kind", KINDS)
def test_reference_does_what_the_recurrence_does(kind):
    """60 random problems of each kind: out, states, maps and every gradient."""
    for seed in range(60):
        found = errors(REFERENCE, *problem(kind, seed))
        assert max(found.values()) <= LIMIT, (seed, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_without_segments(kind):
    work, states = problem(kind, 0, segments=Segments(np.zeros((0, 3), dtype=np.int64)), slots=5, batch=2)
    work, states, leaves = with_leaves(work, states)
    out, after = REFERENCE.local(work, states)
    assert out.shape[:2] == (2, 5)
    assert not out.any()
    assert after.shape == states.shape
    gradients = torch.autograd.grad((out, after), leaves, (torch.randn_like(out), after), materialize_grads=True)
    assert not any(g.any() for g in gradients)
    heads, *_ = work.recurrence.state_shape(work.tokens)
    assert [len(x) for x in REFERENCE.summary(work)] == [0, 0]
    assert REFERENCE.summary(work)[1].shape[1] == heads


@pytest.mark.parametrize("name", ["referense", None, 3])
def test_kernels_that_do_not_exist(name):
    with pytest.raises(KernelError, match=r"none of that name for recurrences. Use one of auto, reference"):
        scan_kernel_named(name)


def test_cpus_get_the_reference():
    work, _ = problem("ssd", 0)
    assert choose_scan_kernel("auto", work) is REFERENCE
    assert choose_scan_kernel("reference", work) is REFERENCE
