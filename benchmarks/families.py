"""Check every causal, masked, classification and image-text family of the installed transformers, as a tiny copy, on
one device and over ranks: which are exact, which are not supported and why, which could not be built.

    python -m benchmarks.families                                  # writes docs/models.md; about half an hour
    python -m benchmarks.families --only llama,mistral --kinds causal --out -

A family is *accepted* if its proof (`longspan.huggingface.prove`) passes. Accepted families run again on 2
and 3 Gloo processes, with another batch and layout, against transformers' own attention on one device. Exits with 1 if
an accepted family is wrong there, or if fewer than 120 families are accepted in a whole sweep.

Families run in worker processes, a batch of them each: a case that hangs or dies does not affect the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import multiprocessing
import os
import select
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

from benchmarks.family_cases import KINDS, Case, cases, class_of, config_of, on_one_device, one_line
from benchmarks.family_page import page, summary
from benchmarks.family_ranks import WORLDS, step_on_ranks
from benchmarks.ranks import Ranks

LEAST = 120
BATCH = 48
"""Cases that share a process: transformers takes seconds to load."""
PATIENCE = 300.0
"""Seconds for one case, and for a worker to start on a busy machine."""
FORMS = {
    "plain": {},
    "padded": {"padding": "right"},
    "packed": {"packed": "position_ids", "positions": True},
}
EXACT, ROUNDED, TIMES = 1e-10, 1e-6, 4
"""Tolerance of a step on Gloo ranks, relative to the largest gradient: in float64; in float32; and in float32 as a
multiple of the error of one device, if that is larger."""


# -- one case, in a worker ---------------------------------------------------------------------------------------------


def examine(case: Case, forms: list[str], pool: list[Any]) -> dict[str, Any]:
    """Return all results of a case."""
    began = time.process_time()
    examined = on_one_device(case)
    if examined["outcome"] in ("runs", "differs"):
        examined["proofs"] = {form: proof_of(case, form) for form in forms}
        if examined["proofs"]["plain"]["ok"] and pool:
            examined["ranks"] = on_ranks(case, pool)
        examined.update(verdict(examined))
    return {**asdict(case), **examined, "seconds": round(time.process_time() - began, 2)}


def proof_of(case: Case, form: str) -> dict[str, Any]:
    from longspan.huggingface.prove.check import prove
    from longspan.huggingface.rules import Form

    try:
        proof = prove(class_of(case), config_of(case), Form(**FORMS[form]))
    except Exception as error:  # a check must not raise; if it does, report that as a defect
        return {"ok": False, "reason": f"the check itself failed: {one_line(error)}", "error": None, "seconds": 0.0}
    return {
        "ok": proof.ok, "reason": proof.reason, "error": proof.error if proof.ok else None,
        "seconds": round(proof.seconds, 2),
    }  # fmt: skip


def on_ranks(case: Case, pool: list[Any]) -> dict[int, dict[str, Any]]:
    """Return the result of rank 0; replace the pool after an error."""
    try:
        return pool[0].run(step_on_ranks, case)[0]
    except Exception as error:
        pool[0].end()
        pool[0] = started()
        return {max(WORLDS): {"failed": one_line(error)}}


def started() -> Ranks:
    """Return ranks with transformers loaded: the server that they are forked from loads it once."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.family_ranks", "transformers.modeling_utils"])
    forkserver.ensure_running()
    return Ranks(max(WORLDS), timeout=PATIENCE / 3)


def verdict(examined: dict[str, Any]) -> dict[str, Any]:
    """Return exact, wrong (accepted, but off on ranks) or refused, with the reason."""
    proof = examined["proofs"]["plain"]
    if not proof["ok"]:
        return {"outcome": "refused", "reason": proof["reason"]}
    for world, ran in examined.get("ranks", {}).items():
        if "failed" in ran:
            return {"outcome": "wrong", "reason": f"accepted, but on {world} Gloo ranks: {ran['failed']}"}
        bounds = {"float64": EXACT, "float32": max(ROUNDED, TIMES * ran["one device, float32"])}
        for dtype, bound in bounds.items():
            if not ran[dtype] <= bound:
                why = f"accepted, but off by {ran[dtype]:.1e} in {dtype} on {world} Gloo ranks"
                return {"outcome": "wrong", "reason": why}
    return {"outcome": "exact", "reason": ""}


def work(names: list[str], forms: list[str], with_ranks: bool) -> None:
    """Run cases in a worker and print a line of JSON for each, after a marker."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    known = {str(case): case for case in cases(list(KINDS))}
    with contextlib.ExitStack() as stack:
        pool = [started()] if with_ranks else []
        stack.callback(lambda: [ranks.end() for ranks in pool])
        for name in names:
            print(MARK + json.dumps(examine(known[name], forms, pool)), flush=True)


# -- all cases, from outside -------------------------------------------------------------------------------------------

MARK = "@@"


def sweep(todo: list[Case], forms: list[str], with_ranks: bool) -> Iterator[dict[str, Any]]:
    """Return results in order, from workers that are restarted when one ends or takes too long."""
    left = list(todo)
    while left:
        batch, got = left[:BATCH], 0
        for line, why in _lines(batch, forms, with_ranks):
            yield json.loads(line) if line else {**asdict(batch[got]), "outcome": "not built", "reason": why}
            got += 1
        left = left[got:]


def _lines(batch: list[Case], forms: list[str], with_ranks: bool) -> Iterator[tuple[str, str]]:
    """Yield a line for each case; (\"\", reason) for the one that ended the worker, which is then the last."""
    command = [sys.executable, "-m", "benchmarks.families", "--worker", *map(str, batch), "--forms", ",".join(forms)]
    command += [] if with_ranks else ["--no-ranks"]
    quiet = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet)
    assert process.stdout is not None
    pending, got = b"", 0
    try:
        while got < len(batch):
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
            if not ready:
                yield "", f"it took more than {PATIENCE:.0f} s"
                return
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            if not chunk:
                yield "", f"its process ended with status {process.wait(30)}"
                return
            *whole, pending = (pending + chunk).split(b"\n")
            for line in (text.decode() for text in whole):
                if line.startswith(MARK):
                    got += 1
                    yield line[len(MARK) :], ""
    finally:
        process.kill()
        process.wait(30)


def status(results: list[dict[str, Any]], is_whole: bool) -> int:
    """Return 1 if an accepted family is wrong, or too few are accepted."""
    wrong = [r for r in results if r["outcome"] == "wrong"]
    accepted = {r["family"] for r in results if r["outcome"] == "exact"}
    for result in wrong:
        print(f"wrong: {result['kind']} {result['family']}: {result['reason']}")
    if is_whole and len(accepted) < LEAST:
        print(f"{len(accepted)} families are accepted, fewer than {LEAST}")
        return 1
    return 1 if wrong else 0


def known_before(path: str | None) -> list[dict[str, Any]]:
    """Return the results of an interrupted sweep."""
    if path is None or not Path(path).exists():
        return []
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="families, with commas between")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"of {', '.join(FORMS)}; plain always")
    parser.add_argument("--out", default="docs/models.md", help="the page to write, or - for none")
    parser.add_argument("--json", help="a file for all results, a line each")
    parser.add_argument("--resume", action="store_true", help="go on from the file of --json")
    parser.add_argument("--no-ranks", action="store_true", help="checks of tiny copies alone, no Gloo processes")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    forms = list(dict.fromkeys(["plain", *given.forms.split(",")]))
    if given.worker:
        work(given.worker, forms, not given.no_ranks)
        return 0
    kinds = given.kinds.split(",")
    if strange := [kind for kind in kinds if kind not in KINDS]:
        parser.error(f"--kinds {', '.join(strange)}: there are {', '.join(KINDS)}")
    todo = cases(kinds, given.only.split(",") if given.only else None)
    results = known_before(given.json) if given.resume else []
    done = {(result["kind"], result["family"]) for result in results}
    todo = [case for case in todo if (case.kind, case.family) not in done]
    with contextlib.ExitStack() as stack:
        record = stack.enter_context(Path(given.json).open("a" if given.resume else "w")) if given.json else None
        for result in sweep(todo, forms, not given.no_ranks):
            results.append(result)
            print(
                f"{result['kind']:9s} {result['family']:26s} {result['outcome']:10s} {result.get('reason', '')[:140]}"
            )
            if record is not None:
                print(json.dumps(result), file=record, flush=True)
    is_whole = not given.only and set(kinds) == set(KINDS)
    print(summary(results))
    if given.out != "-":
        Path(given.out).write_text(page(results, is_whole))
    return status(results, is_whole)


if __name__ == "__main__":
    sys.exit(main())
