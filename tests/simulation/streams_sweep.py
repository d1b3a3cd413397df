"""More of test_streams.py, for a night: `python -m tests.simulation.streams_sweep --plans 3000 --runs 300`."""

import argparse
import sys
import time

import torch

from tests.simulation.streams_cases import check
from tests.simulation.streams_mistakes import MISTAKES, tried


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=3000, help="random plans, each compared bit for bit")
    parser.add_argument("--runs", type=int, default=0, help="runs with each kind of mistake")
    parser.add_argument("--first", type=int, default=1000, help="the first seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    begin, wrong = time.process_time(), 0
    for seed in range(asked.first, asked.first + asked.plans):
        try:
            check(seed)
        except Exception as error:
            wrong += 1
            print(f"seed {seed}: {type(error).__name__}: {error}", *getattr(error, "__notes__", []), flush=True)
    print(f"{asked.plans} plans, {wrong} wrong, {time.process_time() - begin:.0f} s", flush=True)
    for name, mistake in MISTAKES.items() if asked.runs else ():
        ends = [tried(mistake, seed) for seed in range(asked.first, asked.first + asked.runs)]
        print(f"{name}: noticed in {asked.runs - ends.count('right')} of {asked.runs} runs", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
