"""Digests of the plans of 300 workloads, all schemes, both directions: what a refactoring must not change.

    python -m tests.golden.plans            # compare all of them with plans.json; minutes
    python -m tests.golden.plans --write    # record them again; the changelog says which rows changed, and why

The workloads are those of `benchmarks.auto_choice`. A digest covers every rank's steps as text and the bytes that every
rank receives.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

import longspan as ls
from benchmarks.auto_choice import COUNT, Workload, drawn_workload
from longspan.planning.choose import candidates

PLANS = Path(__file__).with_name("plans.json")


def digest(workload: Workload, scheme: str) -> str:
    """Return the digest of one scheme's plan."""
    sizes = workload.sizes
    plan = ls.plan(
        workload.mask, workload.layout, q_heads=sizes.q_heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim,
        dtype="bfloat16", batch=sizes.batch, machine=workload.machine, keep=workload.keep, scheme=scheme,
    )  # fmt: skip
    whole = hashlib.sha256()
    for direction in ("forward", "backward"):
        received = [plan.bytes_received(rank, direction) for rank in range(workload.layout.world_size)]
        whole.update(f"{plan.schedule(direction).text()}\n{received}\n".encode())
    return whole.hexdigest()[:12]


def digests(number: int) -> dict[str, str]:
    """Return the digests of the plans of a workload by scheme."""
    workload = drawn_workload(number)
    return {name: digest(workload, name) for name in candidates(workload.problem())}


def recorded() -> list[dict[str, str]]:
    """Return the recorded digests of all workloads."""
    return json.loads(PLANS.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        rows = ",\n".join(json.dumps(digests(number)) for number in range(COUNT))
        PLANS.write_text(f"[\n{rows}\n]\n")
        return 0
    changed = 0
    for number, before in enumerate(recorded()):
        now = digests(number)
        for name in sorted(before.keys() | now.keys()):
            if before.get(name) != now.get(name):
                changed += 1
                print(f"{number}, {name}", flush=True)
    print(f"{COUNT} workloads, {changed} plans changed")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
