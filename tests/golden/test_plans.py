"""Plans of 300 workloads, all schemes, are those of tests/golden/plans.json: steps and bytes, forward and backward."""

import pytest

from tests.golden.plans import COUNT, digests, recorded


@pytest.mark.share(12)
@pytest.mark.parametrize("number", range(COUNT))
def test_plans_are_the_recorded_ones(number):
    assert digests(number) == recorded()[number]
