"""A rank of a job that faults happen to, with watching turned off: nobody is named by it."""

import os
import sys
from functools import partial

from longspan import training
from tests.gpu import fault_rank

if __name__ == "__main__":
    training.watch = partial(training.watch, enabled=False)
    if sys.argv[4] == fault_rank.LATE:  # and one that is late goes astray
        fault_rank.LATE = "never"
        fault_rank.RAISE = sys.argv[4]
    numbers = [int(word) for word in sys.argv[1:4]]
    fault_rank.run(*numbers, *sys.argv[4:])
    sys.stdin.read()
    os._exit(0)
