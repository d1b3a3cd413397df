"""docs/models.md, from what a sweep of families found."""

from __future__ import annotations

from collections import Counter, defaultdict
from importlib.metadata import version
from typing import Any

TITLES = {"causal": "causal", "masked": "masked", "classify": "classification", "image": "image-text"}


def summary(results: list[dict[str, Any]]) -> str:
    """One line of counts."""
    outcomes = Counter(result["outcome"] for result in results)
    families = {result["family"] for result in results}
    accepted = {result["family"] for result in results if result["outcome"] == "exact"}
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    return f"{len(accepted)} of {len(families)} families accepted; of {len(results)} models: {counts}"


def page(results: list[dict[str, Any]], is_whole: bool) -> str:
    """The whole page."""
    parts = [_head(results, is_whole), _counts(results), _exact(results), _refused(results), _not_built(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(results: list[dict[str, Any]], is_whole: bool) -> str:
    said = "" if is_whole else " (a part of them)"
    forms = list(dict.fromkeys(form for result in results for form in result.get("proofs", {})))
    chosen = "" if {"plain", "padded", "packed"} <= set(forms) else f" --forms {','.join(forms)}"
    return f"""# Families of models

Written by

    python -m benchmarks.families{chosen}

for transformers {version("transformers")} and torch {version("torch")}{said}. {summary(results)}.

Every causal, masked, sequence-classifying and image-text family is taken with its default configuration (and, where
that does not run or lacks a kind of layer, values in `benchmarks/family_cases.py` chosen by hand), shrunk to
a tiny copy, and proved as at its first use: `longspan prove` does the same for yours.
Text alone is fed, to image-text families too. *Exact* families were then run
on 2 and 3 Gloo processes: the last columns say how far the loss and all gradients of a whole step were off there at
most, of the largest gradient, from transformers' own attention on one device in float64; the very last, how far one
device is when it computes in float32."""


def _counts(results: list[dict[str, Any]]) -> str:
    by_kind: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        by_kind[result["kind"]][result["outcome"]] += 1
    shown = ("exact", "wrong", "refused", "not built")
    lines = ["| models | " + " | ".join(shown) + " |", "|---|" + "---|" * len(shown)]
    for kind in TITLES:
        if kind in by_kind:
            lines.append(f"| {TITLES[kind]} | " + " | ".join(str(by_kind[kind][name]) for name in shown) + " |")
    return "\n".join(lines)


def _exact(results: list[dict[str, Any]]) -> str:
    lines = [
        "## Exact",
        "",
        "| family | model | plain | padded | packed | 2 and 3 ranks, float64 | float32 | one device, float32 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in _of(results, "exact"):
        proofs = result["proofs"]
        forms = [_form(proofs.get(form)) for form in ("plain", "padded", "packed")]
        ranks = [_worst(result, dtype) for dtype in ("float64", "float32", "one device, float32")]
        lines.append(f"| {result['family']} | {TITLES[result['kind']]} | " + " | ".join(forms + ranks) + " |")
    return "\n".join(lines)


def _form(proof: dict[str, Any] | None) -> str:
    if proof is None:
        return "not tried"
    return "exact" if proof["ok"] else "refused"


def _worst(result: dict[str, Any], dtype: str) -> str:
    """A power of ten from above: figures of a run, told so that the next run prints the same."""
    errors = [ran[dtype] for ran in result.get("ranks", {}).values() if dtype in ran]
    if not errors:
        return "not run"
    power = -16
    while max(errors) > 10.0**power:
        power += 1
    return f"< 1e{power}"


def _refused(results: list[dict[str, Any]]) -> str:
    return _table("Refused", "What is asked for is refused with this message; nothing is computed.", results, "refused")


def _not_built(results: list[dict[str, Any]]) -> str:
    said = (
        "No tiny copy could be made or run here: they are refused over ranks, too, unless `trust_model=True` is passed."
    )
    return _table("Not built", said, results, "not built")


def _table(title: str, text: str, results: list[dict[str, Any]], outcome: str) -> str:
    lines = [f"## {title}", "", text, "", "| family | model | reason |", "|---|---|---|"]
    for result in _of(results, outcome):
        lines.append(f"| {result['family']} | {TITLES[result['kind']]} | {_cell(result['reason'])} |")
    return "\n".join(lines)


def _of(results: list[dict[str, Any]], outcome: str) -> list[dict[str, Any]]:
    order = list(TITLES)
    return sorted(
        (result for result in results if result["outcome"] == outcome),
        key=lambda result: (result["family"], order.index(result["kind"])),
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:260]
