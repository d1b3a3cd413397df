"""What ranks compare is worked out once: masks and plans are immutable, so a repeated plan has its record at once."""

import copy
import pickle

import pytest
import torch

import longspan as ls
from longspan.kernels import kernel_named
from longspan.masks.plane import Plane
from longspan.run.ops import create_record
from longspan.run.walk import Job

MASKS = {
    "documents": lambda: ls.masks.documents([30, 50, 48]) & ls.masks.causal(),
    "heads": lambda: ls.masks.per_head(*[ls.masks.sliding_window(n).resized(128) for n in (3, 4, 5, 6)]),
    "rows": lambda: ls.masks.per_row(*[ls.masks.documents([n, 128 - n]) for n in (3, 64)]),
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_works_its_fingerprint_out_once(name, monkeypatch):
    asked, key = [], Plane.key
    monkeypatch.setattr(Plane, "key", lambda self: asked.append(1) or key(self))
    mask, other = MASKS[name](), MASKS[name]()
    first = mask.fingerprint
    once = len(asked)
    assert once == len(mask.distinct_planes())
    assert mask.fingerprint == mask.twin().fingerprint == first
    assert len(asked) == once
    assert other.fingerprint == first, "an equal mask has the same one"
    for made in (copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert made.fingerprint == first
    assert (mask & ls.masks.sliding_window(2)).fingerprint != first, "made of it, but another"


def test_a_repeated_plan_compares_what_it_has(monkeypatch):
    mask = MASKS["documents"]()
    plan = ls.plan(
        mask, ls.layouts.contiguous(128, 4), q_heads=4, kv_heads=2, head_dim=8, dtype="float32", scheme="exchange"
    )
    job = Job(plan, 0, kernel_named("reference"), 0.1, torch.float32, None, None)
    record = create_record(job, torch.device("cpu"), True, "")
    monkeypatch.setattr(Plane, "key", lambda self: pytest.fail("worked out anew"))
    assert create_record(job, torch.device("cpu"), True, "") is record
