"""For all tests: names that docstring examples may use without importing them, and one torch thread.

Two cores are shared, and sums must not depend on how many threads there are.
"""

import sys

import pytest

from longspan import layouts, masks

# Importing it imports torchtitan, which replaces functions of torch: only in processes of their own (test_torchtitan).
collect_ignore = ["src/longspan/integrations/torchtitan/hooks.py", "tests/titan_checks.py"]
collect_ignore += ["tests/exit_work.py"]  # a program, which torchrun starts


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace):
    doctest_namespace.update({"masks": masks, "layouts": layouts})
    for package in (masks, layouts):
        doctest_namespace.update({name: getattr(package, name) for name in package.__all__})


@pytest.fixture(autouse=True)
def _one_torch_thread():
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)
