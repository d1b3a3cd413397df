"""Run this folder in the ranks of another test: `pytest.main` on every rank, and what became of every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.claims import name_of

FOLDER = Path(__file__).parent


class Collector:
    """A plugin that keeps outcome and text of every test by its name, such as exact.scheme[ring]."""

    def __init__(self) -> None:
        self.found: dict[str, tuple[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        text = report.longreprtext
        if report.passed:
            text = dict(report.user_properties).get("found", "")
        elif report.skipped and isinstance(report.longrepr, tuple):
            text = report.longrepr[2]
        self.found[name_of(report.nodeid)] = report.outcome, str(text)


def run_suite(*words: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Return pytest's exit status, and the outcomes, on this rank.

    Words are options, files (exact) and tests (exact::test_repeat).
    """
    options = [word for word in words if word.startswith("-")]
    parts = [word.partition("::") for word in words if not word.startswith("-")]
    files = [f"{FOLDER}/test_{name}.py{sep}{test}" for name, sep, test in parts]
    quiet = ["-s", "-p", "no:terminal", "-p", "no:warnings", "-p", "no:faulthandler", "-p", "no:unraisableexception"]
    collector = Collector()
    status = pytest.main([*(files or [str(FOLDER)]), *options, *quiet, "-p", "no:threadexception"], plugins=[collector])
    return int(status), collector.found
