"""Count the cases that attack the contract "compute exactly or refuse", and print them by area at the end of a run.

`pytest tests/breaks` runs all areas; LONGSPAN_NIGHTLY=1 runs more random cases of each.
"""

from collections import defaultdict

import pytest


@pytest.fixture
def tries(request):
    """Record how many cases of an area a test has tried, and how they ended."""

    def record(area: str, tried: int, right: int, refused: int = 0) -> None:
        request.node.user_properties.append(("tries", (area, tried, right, refused)))
        assert right + refused == tried, f"{area}: {tried} cases, but {right} right and {refused} refused in words"

    return record


def pytest_terminal_summary(terminalreporter):
    totals = defaultdict(lambda: [0, 0, 0])
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            for name, value in report.user_properties:
                if name == "tries":
                    area, *counts = value
                    totals[area] = [a + b for a, b in zip(totals[area], counts, strict=True)]
    if totals:
        width = max(map(len, totals))
        terminalreporter.write_line(f"{'area':{width}}  tried  right  refused")
        for area, (tried, right, refused) in sorted(totals.items()):
            terminalreporter.write_line(f"{area:{width}}  {tried:5}  {right:5}  {refused:7}")
