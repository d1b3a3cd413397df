"""The validator's weights: sums of a few of them say which computes they are of, and how often."""

from collections import Counter
from itertools import combinations_with_replacement

import pytest

from longspan.planning.validator import weight_of


def multiples(number):
    """Weights as they once were."""
    return 0x9E3779B97F4A7C15 * number % (1 << 40)


def same_sums(weight, numbers, size):
    """How many sums of `size` weights, the same one twice included, are those of other computes as well."""
    sums = Counter(sum(map(weight, which)) for which in combinations_with_replacement(numbers, size))
    return sum(count - 1 for count in sums.values())


@pytest.mark.parametrize("size", [2, 3])
def test_other_computes_have_other_sums(size):
    assert same_sums(weight_of, range(1, 60), size) == 0


def test_multiples_would_not_do():
    assert multiples(1) + multiples(3) == 2 * multiples(2)
    assert same_sums(multiples, range(1, 60), 2) > 1000


def test_weights_are_positive_and_sums_fit():
    assert all(0 < weight_of(number) < 1 << 40 for number in (*range(1, 1000), 10**6, 10**9))
