"""For all tests: what is quick, names that docstring examples may use without importing them, and one torch thread.

Two cores are shared, and sums must not depend on how many threads there are.
"""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from longspan import layouts, masks
from tests.lanes import left_out

ROOT = Path(__file__).parent
# Importing it imports torchtitan, which replaces functions of torch: only in processes of their own (test_torchtitan).
collect_ignore = ["src/longspan/integrations/torchtitan"]
if find_spec("transformers") is None:
    collect_ignore += ["src/longspan/integrations/huggingface/sharding.py", "tests/hosts/hf_versions.py"]
if find_spec("triton") is None:
    collect_ignore += ["src/longspan/execution/fused/triton_kernels.py"]
# Helpers of tests have no examples in them, and some import frameworks that may be missing.
collect_ignore_glob = ["tests/*/*_work.py", "tests/*/titan_*.py", "tests/*/*_script.py"]

# `pytest -m quick`: something of every layer, within a minute of processor time. A whole file, or tests by their name.
QUICK = {
    "tests/house/test_house.py": "",
    "tests/house/test_layers.py": "",
    "tests/unit/test_layouts.py": "",
    "tests/unit/test_plan.py": "",
    "tests/unit/test_masks.py": "no_tokens",
    "tests/unit/test_schedules.py": "validator",
    "tests/unit/test_kernels.py": "strided_views",
    "tests/gloo/test_gloo.py": "would[2-0]",
    "tests/simulation/test_detection.py": "seeds[0]",
}


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # workers share what the process that starts them has made
        # Tests plant mistakes: what a proof says of them must not be remembered for the person at this machine.
        os.environ["XDG_CACHE_HOME"] = folder = tempfile.mkdtemp(prefix="longspan-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.addinivalue_line("markers", "quick: something of every layer, within a minute of processor time")


def pytest_collection_modifyitems(config, items):
    for item in items:
        path = str(item.path.relative_to(ROOT)) if item.path.is_relative_to(ROOT) else ""
        if path.startswith("src/") or (path in QUICK and QUICK[path] in item.name):
            item.add_marker("quick")
    if out := left_out(items, config.args):
        config.hook.pytest_deselected(items=out)
        gone = set(out)
        items[:] = [item for item in items if item not in gone]


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
