"""Processor time on a machine that others use, as it would be where nothing else runs."""

import resource
import statistics
import subprocess
import sys

NUMPY = 0.15
"""Seconds of processor time in which numpy is imported where the bars of tests were set."""


def seconds_of_children(run):
    """Processor time of the processes that run() starts and waits for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    run()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def quiet_seconds(measure, repeats=3):
    """What measure() would return on a quiet machine: the median, each beside an import of numpy.

    Where numpy takes 0.3 s, twice what it takes on a quiet machine, 1.4 s count as 0.7 s.
    """
    command, found = [sys.executable, "-c", "import numpy"], []
    for _ in range(repeats):
        seconds = measure()
        numpy = seconds_of_children(lambda: subprocess.run(command, check=True, timeout=60))
        found.append(seconds / max(1.0, numpy / NUMPY))
    return statistics.median(found)
