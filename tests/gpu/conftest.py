"""Run the tests of this folder on all ranks of a job, in the same order, and write one page about them.

    torchrun --nproc-per-node 8 -m longspan acceptance    # the same as torchrun ... -m pytest tests/gpu

A test has the name that the page shows: `test_exact.py::test_scheme[ring]` is `exact.ring`. It takes the fixture
`site`, calls `site.record(...)` or `site.compare(...)`, and fails or skips as any test does. Ranks compare the outcome
of every test (`session.py`), so all of them end with the same exit status.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from longspan.cli.acceptance import add_arguments
from longspan.cli.command import print_error
from longspan.cli.launch import join_ranks
from longspan.cli.output import print_json, progress, screen_of
from longspan.errors import LongspanError
from tests.gpu.page import show
from tests.gpu.session import LostRanksError, Session, select
from tests.gpu.site import Site

SECTIONS = ("operators", "exact", "long", "training", "memory", "time", "host")
SITE, SESSION = pytest.StashKey[Site](), pytest.StashKey[Session]()


def line_name(item: pytest.Item) -> str:
    """Return the name of a test on the page: its section, and its parameters or else its function."""
    params = getattr(item, "callspec", None)
    return f"{item.path.stem}.{params.id if params else item.name}".replace("test_", "")


def usage_error(error: object) -> pytest.UsageError:
    """Print the error as commands do, on rank 0 only, and return one for pytest."""
    print_error(f"longspan acceptance: {error}")
    return pytest.UsageError()


def pytest_addoption(parser):
    group = parser.getgroup("acceptance")
    add_arguments(SimpleNamespace(add_argument=group.addoption))
    group.addoption("--json", action="store_true", help="print one JSON object and nothing else")
    group.addoption("--plain", action="store_true", help="plain text, even if rich is installed")


def pytest_sessionstart(session):
    option, stack = session.config.option, ExitStack()
    session.config.add_cleanup(stack.close)
    try:
        ranks = stack.enter_context(join_ranks("acceptance", option.backend, alone=option.list))
    except LongspanError as error:
        raise usage_error(error) from error
    torch.set_num_threads(1)
    session.config.stash[SITE] = Site(ranks, quick=option.quick)


def pytest_collectreport(report):
    if report.failed:
        raise usage_error(report.longrepr)


def pytest_collection_modifyitems(config, items):
    option, other = config.option, "cpu" if config.stash[SITE].is_gpu else "cuda"
    items[:] = [item for item in items if item.get_closest_marker(other) is None]
    items.sort(key=lambda item: SECTIONS.index(item.path.stem.removeprefix("test_")))
    is_slow = {line_name(item): item.get_closest_marker("slow") is not None for item in items}
    try:
        names = select(is_slow, option.only, quick=option.quick)
    except LongspanError as error:
        raise usage_error(error) from error
    items[:] = [item for item in items if line_name(item) in names]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session):
    option, site, names = session.config.option, session.config.stash[SITE], list(map(line_name, session.items))
    if option.list:
        if site.ranks.is_main:
            print("\n".join(names))
        session.items.clear()
        return (yield)
    bar = ExitStack()  # closed before the page is printed

    def finish(report):
        bar.close()
        if option.json:
            print_json("acceptance", report.as_dict())
            return
        screen = screen_of(option)
        show(report, screen)
        screen.text()
        screen.text(
            f"Wrote {option.out.with_suffix('.md')} and {option.out.with_suffix('.json')}: paste them as they are."
        )

    with bar:
        advance = bar.enter_context(progress(option, "acceptance", len(names), is_main=site.ranks.is_main))
        running = session.config.stash[SESSION] = Session(site, names, option.out, advance, finish)
        with running.until_sigterm():
            result = yield
            running.end()
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run the test here and on the other ranks, and fail or skip where any of them did."""
    session = pyfuncitem.config.stash[SESSION]
    least_ranks = max((marker.args[0] for marker in pyfuncitem.iter_markers("ranks")), default=1)
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    try:
        outcome = session.run(line_name(pyfuncitem), least_ranks, pyfuncitem.obj, arguments)
    except LostRanksError as error:
        session.end()
        pyfuncitem.session.shouldfail = str(error)
        pytest.fail(str(error), pytrace=False)
    if outcome.is_red:
        pytest.fail(outcome.text, pytrace=False)
    if outcome.verdict == "not run":
        pytest.skip(outcome.text)
    return True


@pytest.fixture(scope="session")
def site(request):
    return request.config.stash[SITE]
