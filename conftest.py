"""For all tests: shares of cases, names that docstring examples use without importing them, and one torch thread.

Two cores are shared, and sums must not depend on how many threads there are.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from longspan import layouts, masks
from tests.lanes import NIGHTLY, SEED, left_out

ROOT = Path(__file__).parent
# Importing it imports torchtitan, which replaces functions of torch: only in processes of their own (test_torchtitan).
collect_ignore = ["src/longspan/torchtitan"]
# `torchrun ... -m pytest tests/gpu` runs these (tests/gpu/pytest.ini); tests/unit/test_gpu_checks.py their examples.
collect_ignore += ["tests/gpu"]
if find_spec("transformers") is None:
    collect_ignore += ["src/longspan/huggingface/sharding.py", "tests/hosts/hf_versions.py"]
if find_spec("triton") is None:
    collect_ignore += ["src/longspan/run/triton_kernels.py", "tests/kernel_models/flex_cubins.py"]
# Helpers of tests have no examples in them, and some import frameworks that may be missing.
collect_ignore_glob = ["tests/*/*_work.py", "tests/*/titan_*.py", "tests/*/*_script.py", "tests/jobs/doors/*.py"]

MARKERS = (
    "quick: something of every layer, within a minute of processor time",
    "share(n): one case in n runs each time, all of them at night (tests/lanes.py)",
    "nightly: runs at night only, or when selected by name (tests/lanes.py)",
    *(f"{name}: in tests/gpu" for name in ("ranks(n)", "slow", "cpu", "cuda", "gloo", "cards")),
)
# Doctests that `pytest -m quick` runs: modules that do not import torch, so that the first dot comes soon.
QUICK_DOCTESTS = tuple(ROOT / "src" / "longspan" / name for name in ("spans.py", "masks", "layouts", "planning"))


def pytest_addoption(parser):
    if find_spec("pytest_timeout") is None:  # pyproject.toml sets it, and an unknown setting is an error
        parser.addini("timeout", "limit in seconds of a test; needs pytest-timeout")


def pytest_configure(config):
    for marker in MARKERS + (
        ("timeout(seconds): needs pytest-timeout",) if find_spec("pytest_timeout") is None else ()
    ):
        config.addinivalue_line("markers", marker)


def pytest_report_header():
    return "all cases (LONGSPAN_NIGHTLY)" if NIGHTLY else f"shares of cases by LONGSPAN_SEED={SEED}"


def pytest_terminal_summary(terminalreporter):
    if not NIGHTLY and terminalreporter.stats.get("failed"):
        terminalreporter.write_line(f"LONGSPAN_SEED={SEED} selects the same cases again")


def pytest_ignore_collect(collection_path, config):
    """Leave files without a quick test out of `pytest -m quick`: importing them takes longer than the tests."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py" or not collection_path.is_relative_to(ROOT):
        return None
    if collection_path.is_relative_to(ROOT / "src"):
        return None if any(collection_path.is_relative_to(part) for part in QUICK_DOCTESTS) else True
    return None if "mark.quick" in collection_path.read_text() else True


def pytest_collection_modifyitems(config, items):
    for item in items:
        if any(item.path.is_relative_to(part) for part in QUICK_DOCTESTS):
            item.add_marker("quick")
    if out := left_out(items, config.args, config.option.markexpr):
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


@pytest.fixture(scope="module", autouse=True)
def _end_pools():
    """End the rank pools of a file with it."""
    yield
    if (pools := sys.modules.get("tests.pool")) is not None:
        pools.end_all()


@pytest.fixture
def longspan(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    from longspan.cli import command

    def run(*words):
        code = command.main(words)
        found = capsys.readouterr()
        return code, found.out, found.err

    return run
