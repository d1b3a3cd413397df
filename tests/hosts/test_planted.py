"""Planted faults are faults: over two real ranks they compute something else than one device, or fail; twins do not.

Faults are let in by trust_model=True, twins by the proof. One in eight of them; with LONGSPAN_NIGHTLY=1 all of them.
"""

import pytest

pytest.importorskip("transformers")

from tests.hosts import planted, planted_work
from tests.lanes import share
from tests.pool import pool

ROUNDING = 1e-5
"""Of eager attention in float64 models, whose softmax is in float32."""


def outcomes(which, trust):
    """By name: what every rank found."""
    found = {}
    for turn, (number, entry) in enumerate(share(enumerate(getattr(planted, which)), 8)):
        form = entry.forms[turn % len(entry.forms)]
        args = (which, number, form, trust)
        found[f"{entry.name}, {form}"] = pool(2).run(planted_work.by_number, *args, timeout=100.0)
    return found


@pytest.mark.timeout(600)
def test_faults_are_wrong_over_ranks():
    for name, ranks in outcomes("FAULTS", True).items():
        assert any(isinstance(error, str) or error > 1e-4 for error in ranks), f"{name}: {ranks}"


@pytest.mark.timeout(600)
def test_twins_are_right_over_ranks():
    for name, ranks in outcomes("TWINS", False).items():
        assert all(not isinstance(error, str) and error <= ROUNDING for error in ranks), f"{name}: {ranks}"


@pytest.mark.timeout(120)
def test_a_proof_that_breaks_on_rank_0_is_heard_of_by_all():
    said = pool(2).run(planted_work.broken_proof, "", timeout=30.0)
    assert all("broke" in text for text in said)
