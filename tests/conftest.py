"""One torch thread in tests: two cores are shared, and sums must not depend on how many there are."""

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_torch_thread():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
