"""Compare planned and measured timelines: calibrate this machine, predict, run.

    python -m benchmarks.trace            # exits with 1 when a total is off by more than 25%

Four ranks on Gloo, one thread each, on any number of cores: `longspan calibrate` measures with all of them running, so
that shared cores are taken into account. Prediction and run alternate with calibration, because machines are shared,
and each workload is judged by the median of its rounds. Traces of the last round are kept with --out FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS = 4
BAR = 0.25
HEADS = ("--q-heads", "8", "--kv-heads", "2", "--head-dim", "64")
WORKLOADS = (  # name, arguments
    ("causal", ("--seq", "8k", "--docs", "causal")),
    ("documents", ("--docs", "3000,1000,4192")),
    ("window", ("--seq", "16k", "--docs", "causal", "--window", "2047")),
)


def command(*words: str, ranks: int = 1) -> dict[str, Any]:
    """Return the JSON of a longspan command, run under torchrun if there are several ranks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launch = [*launch, "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, *launch, "-m", "longspan", *words, "--json"],
        env=environment, capture_output=True, text=True, timeout=900,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"longspan {' '.join(words)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def compared(name: str, words: tuple[str, ...], machine: Path, folder: Path) -> tuple[float, float]:
    """Return predicted and measured seconds of one workload, forward and backward together, and write both traces."""
    words = (*words, *HEADS, "--machine", str(machine))
    planned, ran = folder / f"{name}-planned.json", folder / f"{name}-measured.json"
    predicted = command("trace", *words, "--ranks", str(RANKS), "--out", str(planned))
    measured = command("bench", *words, "--out", str(ran), ranks=RANKS)
    assert predicted["fingerprint"] == measured["fingerprint"], "the run was of another plan than the prediction"
    return predicted["seconds"], measured["seconds"]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="keep machine and traces here")
    options = parser.parse_args(arguments)
    errors: dict[str, list[float]] = {name: [] for name, _ in WORKLOADS}
    print(f"{RANKS} ranks on {os.cpu_count()} cores, Gloo, forward and backward together")
    print(f"{'workload':12s} {'predicted ms':>12s} {'measured ms':>12s} {'error':>7s}")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(exist_ok=True)
        machine = folder / "machine.json"
        for _ in range(options.rounds):
            command("calibrate", *HEADS, "--out", str(machine), ranks=RANKS)
            for name, words in WORKLOADS:
                predicted, measured = compared(name, words, machine, folder)
                errors[name].append(predicted / measured - 1)
                print(f"{name:12s} {predicted * 1e3:12.0f} {measured * 1e3:12.0f} {errors[name][-1]:+7.0%}", flush=True)
    missed = 0
    for name, values in errors.items():
        middle = statistics.median(values)
        missed += abs(middle) > BAR
        print(
            f"{name:12s} median error {middle:+.0%}, to be within {BAR:.0%}{'' if abs(middle) <= BAR else '  MISSED'}"
        )
    print("all bars met" if not missed else f"{missed} bars MISSED")
    return 1 if missed else 0


if __name__ == "__main__":
    begin = time.perf_counter()
    code = main(sys.argv[1:])
    print(f"({time.perf_counter() - begin:.0f} s)")
    sys.exit(code)
