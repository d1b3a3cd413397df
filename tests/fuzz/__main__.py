"""`python -m tests.fuzz --minutes N [--seed S] [--ranks 1,2,3,4]`: random cases; status 1 if one failed."""

import argparse
import itertools
import re
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path

from tests.pool import end_all

from .cases import Case
from .draw import case
from .mutants import MUTANTS
from .pools import Outcome, outcome
from .script import script
from .shrink import shrunk


class Tally:
    """What was tried, and what came of it."""

    def __init__(self):
        self.kinds, self.refusals, self.features = Counter(), Counter(), defaultdict(Counter)
        self.bad = 0

    def add(self, tried: Case, found: Outcome):
        self.kinds[found.kind] += 1
        self.bad += found.bad
        for feature in tried.features():
            self.features[feature][found.kind] += 1
        if found.kind == "refused":
            self.refusals[re.sub(r"\d+", "#", found.detail)[:140]] += 1

    def table(self) -> str:
        lines = [f"{'feature':32} {'cases':>6}  outcomes"]
        for feature, kinds in sorted(self.features.items()):
            lines.append(f"{feature:32} {sum(kinds.values()):6}  {_counted(kinds)}")
        lines += [f"refused {count} times: {words}" for words, count in self.refusals.most_common()]
        lines.append(f"{sum(self.kinds.values())} cases: {_counted(self.kinds)}; {self.bad} failed")
        return "\n".join(lines)


def _counted(kinds: Counter) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in kinds.most_common())


def report(seed: int, tried: Case, found: Outcome, planted: str, folder: Path | None) -> None:
    """Prints a failure, shrinks it, and prints the file that repeats it."""
    print(f"\nseed {seed}: {found.kind}\n{found.detail}\n{tried}", flush=True)
    if found.kind in ("wrong", "raised", "refused"):
        most = 10 if found.kind == "raised" else 40  # every try may cost a new pool
        tried = shrunk(tried, lambda smaller: outcome(smaller, planted).kind == found.kind, most)
        found = outcome(tried, planted)
        print(f"smaller: {found.kind}\n{found.detail}\n{tried}", flush=True)
    text = script(tried, f"seed {seed}: {found.kind}\n{found.detail}")
    if folder is None:
        print(f"---- repeat.py\n{text}\n---- end of repeat.py", flush=True)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"repeat_{seed}.py").write_text(text)
        print(f"{folder / f'repeat_{seed}.py'} repeats it", flush=True)


def main(words=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--cases", type=int, default=None, help="stop after so many cases")
    parser.add_argument("--seed", type=int, default=None, help="of the first case; the next ones follow")
    parser.add_argument("--ranks", default="1,2,3,4")
    parser.add_argument("--stop-after", type=int, default=10, help="failures")
    parser.add_argument("--scripts", type=Path, default=None, help="a folder for files that repeat failures")
    parser.add_argument("--skip", action="append", default=[], help="a feature, as the table names it, to leave out")
    parser.add_argument("--plant", choices=sorted(MUTANTS), default=None, help="a mistake to be found")
    given = parser.parse_args(words)
    first = time.time_ns() % 10**9 if given.seed is None else given.seed
    worlds = tuple(int(word) for word in given.ranks.split(","))
    planted = MUTANTS[given.plant] if given.plant else ""
    print(f"first seed {first}, ranks {given.ranks}", flush=True)
    tally, end = Tally(), time.monotonic() + 60 * given.minutes
    for seed in itertools.count(first):
        if time.monotonic() > end or tally.bad >= given.stop_after or seed - first == given.cases:
            break
        tried = case(seed, worlds)
        if tried.features() & set(given.skip):
            continue
        found = outcome(tried, planted)
        tally.add(tried, found)
        if found.bad:
            report(seed, tried, found, planted, given.scripts)
    print(tally.table(), flush=True)
    end_all()
    return int(tally.bad > 0)


if __name__ == "__main__":
    sys.exit(main())
