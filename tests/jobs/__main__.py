"""`python -m tests.jobs --count 40`: jobs by torchrun, two at a time, and a table. Status 1 if one ended badly."""

import argparse
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor

from .runner import TIMEOUT
from .table import Job, chosen, complaints


def table(results: list) -> str:
    """kind, name, runs, passed, statuses: one line for each kind of job, then sums."""
    rows = defaultdict(list)
    for job, ended, wrong in results:
        rows[job.kind, job.name].append((ended, wrong))
    lines = [f"{'kind':9} {'job':52} {'runs':>4} {'passed':>6}  status of torchrun (root cause: exit code)"]
    for (kind, name), found in rows.items():
        said = Counter(f"{e.status} ({e.failures[0][1]})" if e.failures else str(e.status) for e, _ in found)
        statuses = ", ".join(f"{status} x {n}" for status, n in said.items())
        lines.append(f"{kind:9} {name[:52]:52} {len(found):4} {sum(not w for _, w in found):6}  {statuses}")
    for kind in dict.fromkeys(job.kind for job, _, _ in results):
        of = [wrong for job, _, wrong in results if job.kind == kind]
        lines.append(f"{kind:9} {'all':52} {len(of):4} {sum(not wrong for wrong in of):6}")
    return "\n".join(lines)


def run(job: Job, timeout: float, quiet: bool):
    ended = job.run(timeout)
    wrong = complaints(job, ended)
    print(f"{'ok  ' if not wrong else 'BAD '} {ended.seconds:5.1f} s  {job}  {'; '.join(wrong)}", flush=True)
    if wrong and not quiet:
        print("    " + ended.report().replace("\n", "\n    "), flush=True)
    return job, ended, wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.jobs", description=__doc__)
    parser.add_argument("--count", type=int, default=40, help="how many jobs; 15 in CI, 300 for a record")
    parser.add_argument("--only", default="", help="only jobs whose kind and name contain this")
    parser.add_argument("--repeat", type=int, default=1, help="each job so many times")
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds after which a job hangs")
    parser.add_argument("--quiet", action="store_true", help="no output of jobs that ended badly")
    given = parser.parse_args()
    jobs = [job for job in chosen(given.count) if given.only in str(job)] * given.repeat
    begin = time.monotonic()
    with ThreadPoolExecutor(given.at_once) as pool:
        results = list(pool.map(lambda job: run(job, given.timeout, given.quiet), jobs))
    bad = sum(bool(wrong) for _, _, wrong in results)
    print(table(results))
    print(f"{len(results)} jobs, {bad} ended badly, {time.monotonic() - begin:.0f} s")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
