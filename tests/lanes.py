"""Which cases of a test run every time, and which at night.

`@pytest.mark.share(n)` runs one case in n each time, `@pytest.mark.nightly` none of them. Which cases these are rotates
with the commit, so that a week of commits covers most cases; LONGSPAN_SEED=... (printed at the top of a run) selects
the same ones again. With LONGSPAN_NIGHTLY=1, or when a test is selected by name (`pytest tests/x.py::test_y`), all run.
Cases that are left out are counted as "deselected" by pytest.

For example, of 20 cases with share(7) and the seed 3, cases 3, 10 and 17 run.
"""

import os
import subprocess
import zlib
from collections import defaultdict
from pathlib import Path

NIGHTLY = bool(os.environ.get("LONGSPAN_NIGHTLY"))


def _seed() -> int:
    if named := os.environ.get("LONGSPAN_SEED"):
        return int(named)
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    try:
        commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10)
        return int(commit.stdout, 16) if commit.returncode == 0 else 0
    except (OSError, subprocess.TimeoutExpired):
        return 0  # an unpacked sdist without git


SEED = _seed()


def first_case(name: str, one_in: int) -> int:
    """Return the first case of a share; tests with equal shares start at different cases."""
    return (SEED + zlib.crc32(name.encode())) % one_in


def share(cases, one_in, name=""):
    """Return the cases that a loop inside a test runs this time."""
    cases = list(cases)
    return cases if NIGHTLY else cases[first_case(name, min(one_in, len(cases) or 1)) :: one_in]


def left_out(items, arguments, markexpr=""):
    """Return the items that do not run this time; `arguments` are pytest's positional arguments."""
    if NIGHTLY or any("::" in word for word in arguments):
        return []
    shares, out = defaultdict(list), []
    for item in items:
        if markexpr == "quick" and item.get_closest_marker("quick"):
            continue
        if item.get_closest_marker("nightly"):
            out.append(item)
        elif mark := item.get_closest_marker("share"):
            shares[item.nodeid.partition("[")[0], mark.args[0]].append(item)
    for (name, one_in), cases in shares.items():
        kept = set(range(first_case(name, min(one_in, len(cases))), len(cases), one_in))
        out += [item for number, item in enumerate(cases) if number not in kept]
    return out
