"""Run the tests of this folder on all ranks of a job, in the same order: a test fails on all where it fails on one.

    torchrun --nproc-per-node 8 -m pytest tests/gpu
    torchrun --nproc-per-node 4 -m pytest tests/gpu --quick    # about a minute on CPUs
    torchrun --nproc-per-node 2 -m pytest tests/gpu --one-gpu  # both ranks on one card, over Gloo

A test takes the fixture `site`, and says what it found by `site.record(...)`, which the end of pytest's report shows,
followed by what became of each claim (`claims.py`). Rank 0 writes the report.
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
from tests.gpu.claims import name_of, verdicts
from tests.gpu.facts import facts
from tests.gpu.one_card import join_one_card
from tests.gpu.site import Site

FILES = ("operators", "exact", "long", "training", "memory", "time", "host")
"""In the order in which they run."""
SITE = pytest.StashKey[Site]()
LEFT_OUT = pytest.StashKey[dict[str, tuple[str, str]]]()


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="fewer and shorter cases: about a minute")
    text = "all ranks on the first GPU, over Gloo; cases for 15 GiB of memory. Without a GPU: on CPUs"
    parser.addoption("--one-gpu", action="store_true", help=text)
    text = "nccl, with tensors on GPUs, or gloo, on CPUs (nccl where every rank has a GPU)"
    parser.addoption("--backend", choices=("nccl", "gloo"), help=text)


@pytest.hookimpl(tryfirst=True)  # before the terminal's reporter takes stdout
def pytest_configure(config):
    if os.environ.get("RANK", "0") != "0":
        stdout, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115
        config.add_cleanup(lambda: setattr(sys, "stdout", stdout))


def pytest_sessionstart(session):
    stack, option = ExitStack(), session.config.option
    session.config.add_cleanup(stack.close)
    try:
        joined = join_one_card() if option.one_gpu else join_ranks(option.backend)
        ranks = stack.enter_context(joined)
    except LongspanError as error:
        raise pytest.UsageError(str(error)) from error
    torch.set_num_threads(1)
    session.config.stash[SITE] = Site(ranks, quick=option.quick, one_gpu=option.one_gpu)


def pytest_report_header(config):
    return [f"{label}: {text}" for label, text in facts(config.stash[SITE]).items() if text]


def pytest_collection_modifyitems(config, items):
    """Leave out tests of another device and, with --quick, slow ones; skip those that need more ranks or cards."""
    site = config.stash[SITE]
    reasons = {"cuda": "it needs a GPU"}
    if site.is_gpu:
        reasons = {"cpu": "it is for CPUs"} | ({} if site.on_one_card else {"gloo": "ranks have a card each"})
    reasons |= {"slow": "left out by --quick"} if site.quick else {}
    left_out: list[pytest.Item] = []
    config.stash[LEFT_OUT] = {}
    for item in items:
        if why := next((why for mark, why in reasons.items() if item.get_closest_marker(mark)), ""):
            left_out.append(item)
            config.stash[LEFT_OUT][name_of(item.nodeid)] = "left out", why
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    items.sort(key=lambda item: FILES.index(item.path.stem.removeprefix("test_")))
    for item in items:
        least = max((marker.args[0] for marker in item.iter_markers("ranks")), default=1)
        if site.ranks.size < least:
            item.add_marker(pytest.mark.skip(reason=f"it needs {least} ranks, and there are {site.ranks.size}"))
        if site.on_one_card and (cards := item.get_closest_marker("cards")):
            item.add_marker(pytest.mark.skip(reason=cards.args[0] if cards.args else "it needs a card for each rank"))


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


def pytest_terminal_summary(terminalreporter, config):
    for report in terminalreporter.getreports("passed"):
        if report.when == "call" and (found := dict(report.user_properties).get("found")):
            terminalreporter.write_line(f"{report.nodeid.partition('test_')[2]}: {found}")
    terminalreporter.section("claims")
    ended = dict(config.stash.get(LEFT_OUT, {}))
    for outcome in ("passed", "skipped", "failed"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" or outcome != "passed":
                why = report.longrepr[2] if outcome == "skipped" else ""
                ended[name_of(report.nodeid)] = outcome, why
    for verdict in verdicts(ended):
        terminalreporter.write_line(verdict.line())


@pytest.fixture(scope="session")
def site(request):
    return request.config.stash[SITE]
