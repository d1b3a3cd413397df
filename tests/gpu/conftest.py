"""Run the tests of this folder on all ranks of a job, in the same order: a test fails on all where it fails on one.

    torchrun --nproc-per-node 8 -m pytest tests/gpu
    torchrun --nproc-per-node 4 -m pytest tests/gpu --quick    # about a minute on CPUs

A test takes the fixture `site`, and says what it found by `site.record(...)`, which the end of pytest's report shows.
Rank 0 writes the report.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack

import pytest
import torch

from longspan.cli.launch import join_ranks
from longspan.errors import LongspanError
from tests.gpu.facts import facts
from tests.gpu.site import Site

FILES = ("operators", "exact", "long", "training", "memory", "time", "host")
"""In the order in which they run."""
SITE = pytest.StashKey[Site]()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="fewer and shorter cases: about a minute")
    text = "nccl, with tensors on GPUs, or gloo, on CPUs (nccl where every rank has a GPU)"
    parser.addoption("--backend", choices=("nccl", "gloo"), help=text)


@pytest.hookimpl(tryfirst=True)  # before the terminal's reporter takes stdout
def pytest_configure(config):
    if os.environ.get("RANK", "0") != "0":
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        config.add_cleanup(lambda: setattr(sys, "stdout", stdout))


def pytest_sessionstart(session):
    stack = ExitStack()
    session.config.add_cleanup(stack.close)
    try:
        ranks = stack.enter_context(join_ranks(session.config.option.backend))
    except LongspanError as error:
        raise pytest.UsageError(str(error)) from error
    torch.set_num_threads(1)
    session.config.stash[SITE] = Site(ranks, quick=session.config.option.quick)


def pytest_report_header(config):
    return [f"{label}: {text}" for label, text in facts(config.stash[SITE]).items() if text]


def pytest_collection_modifyitems(config, items):
    """Leave out tests of another device and, with --quick, slow ones; skip those that need more ranks."""
    site = config.stash[SITE]
    others = {"cpu" if site.is_gpu else "cuda"} | ({"slow"} if site.quick else set())
    left_out = [item for item in items if others & {marker.name for marker in item.iter_markers()}]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: FILES.index(item.path.stem.removeprefix("test_")))
    for item in items:
        least = max((marker.args[0] for marker in item.iter_markers("ranks")), default=1)
        if site.ranks.size < least:
            item.add_marker(pytest.mark.skip(reason=f"it needs {least} ranks, and there are {site.ranks.size}"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the test; fail or skip it where any rank does, with the words of the rank that raised first.

    A rank that raises alone leaves the others in a collective until the timeout of the test's group.
    """
    site, session = pyfuncitem.config.stash[SITE], pyfuncitem.session
    site.found, mine, begin, result = {}, None, time.monotonic(), None
    try:
        result = yield
    except (Exception, pytest.fail.Exception, pytest.skip.Exception) as error:
        mine = error
    outcome = "passed" if mine is None else "skipped" if isinstance(mine, pytest.skip.Exception) else "failed"
    text = "" if mine is None else f"{type(mine).__name__}: {mine}"
    row = [outcome, time.monotonic() - begin, text, site.num_groups]
    try:
        rows = [json.loads(data) for data in site.gather_bytes(json.dumps(row).encode())]
        site.close_groups(max(num_groups for *_, num_groups in rows))
    except (RuntimeError, OSError, ValueError) as error:
        session.shouldfail = f"ranks were lost in {pyfuncitem.name}: {error}"
        pytest.fail(text or session.shouldfail, pytrace=False)
    pyfuncitem.user_properties += site.found.items()
    if site.is_gpu:
        torch.cuda.empty_cache()
    for kind in ("failed", "skipped"):
        seconds, rank = min(
            ((row[1], rank) for rank, row in enumerate(rows) if row[0] == kind), default=(0.0, None)
        )  # fmt: skip
        if rank is not None:
            if rank == site.ranks.rank and mine is not None:
                raise mine
            end = pytest.fail if kind == "failed" else pytest.skip
            end(f"rank {rank}, after {seconds:.0f} s: {rows[rank][2]}")
    return result


def pytest_terminal_summary(terminalreporter):
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and (found := dict(report.user_properties).get("found")):
            terminalreporter.write_line(f"{report.nodeid.partition('test_')[2]}: {found}")


@pytest.fixture(scope="session")
def site(request):
    return request.config.stash[SITE]
