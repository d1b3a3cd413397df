"""A rank of the jobs that faults happen to, with the form "cuda", which has to be there before torch is imported."""

import os
import sys

from tests.device import forms

if __name__ == "__main__":
    forms.start("cuda")
    from tests.device import models  # noqa: F401  (registers kernels)
    from tests.gpu import fault_rank

    rank, size, port, *words = sys.argv[1:]
    fault_rank.run(int(rank), int(size), int(port), *words)
    sys.stdin.read()
    os._exit(0)
