"""Does a model of transformers compute over ranks what it computes on one device? Offline, without weights, in seconds.

  longspan prove llama                         # a model type, with its default configuration
  longspan prove checkpoints/my-model          # a folder with a config.json, or that file
  longspan prove bert --task masked --forms plain,padded
  longspan prove checkpoints/my-model --add    # and add its rules to those that are installed
  longspan prove --all                         # all families of transformers, against the installed rules

A tiny copy of the configuration runs whole and over simulated ranks; loss and all gradients are compared. Models whose
rules are installed (`longspan/huggingface/rules.json`) start training without a proof; for others the same proof runs
in the process.

Exit code 1: some form of batch is refused, or --all found other rules than those that are installed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.output import Row, describe_missing, did_you_mean, print_json, print_table, print_text, progress
from longspan.errors import LongspanError, PlanError

if TYPE_CHECKING:
    from longspan.huggingface.prove.check import Proof

FORMS = ("plain", "padded", "padded left", "packed", "unlabeled")
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", nargs="?", help="a model type, a folder, or a config.json")
    parser.add_argument("--all", action="store_true", help="prove all families (half an hour)")
    parser.add_argument("--task", choices=TASKS, help="the head (that of the configuration, else causal)")
    parser.add_argument(
        "--forms", default=",".join(FORMS), help=f"kinds of batches, with commas between: {', '.join(FORMS)} (all)"
    )
    parser.add_argument("--add", action="store_true", help="write what was proved into the installed rules")


def run(args: argparse.Namespace) -> int:
    if args.all == (args.model is not None):
        raise PlanError("prove needs MODEL_OR_CONFIG or --all, and not both.")
    if args.all:
        return _prove_all(args)
    names = [name.strip() for name in args.forms.split(",")]
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise PlanError(f"--forms must be of {', '.join(FORMS)}, but got {args.forms}.")
    config = _config(args.model)
    kind = _class(config, args.task)
    proofs: dict[str, Proof] = {}
    advance = progress(args, f"checking {kind.__name__}")
    for name in names:
        advance(name)
        proofs[name] = _prove(kind, config, name, args.model)
    if args.add:
        _add(kind, config, proofs)
    answers = {name: _describe(proof) for name, proof in proofs.items()}
    if args.json:
        print_json("prove", {"model": kind.__name__, "forms": answers})
    else:
        _show(kind.__name__, answers)
    return 0 if all(proof.ok for proof in proofs.values()) else 1


def _prove_all(args: argparse.Namespace) -> int:
    """Prove all families, and print what is different in the installed rules."""
    _import_transformers()
    from longspan.huggingface.prove.table import differences, prove_all
    from longspan.huggingface.rules import PATH, read_table

    table = prove_all(progress(args, "proving"))
    found = differences(table.as_dict(), read_table())
    if args.add:
        table.write(PATH)
    if args.json:
        print_json("prove", {"models": len(table.models), "different": found})
    else:
        print_text(f"{len(table.models)} models are exact over ranks; {len(found)} entries are different.")
        for line in found:
            print_text(line)
    return 1 if found else 0


def _add(kind: type, config: Any, proofs: dict[str, Proof]) -> None:
    from longspan.huggingface.prove import families
    from longspan.huggingface.prove.table import Table
    from longspan.huggingface.rules import PATH, Entry, read_table

    table = Table().read(read_table())
    for name, proof in proofs.items():
        if proof.ok:
            table.add(kind, config, families.FORMS[name], Entry(proof.rules, proof.classes))
    table.write(PATH)


def _describe(proof: Proof) -> dict[str, Any]:
    return {
        "ok": proof.ok, "model": proof.model, "form": proof.form, "reason": proof.reason, "error": f"{proof.error:.1e}",
        "seconds": round(proof.seconds, 2), "rules": proof.rules.as_json(), "classes": list(proof.classes),
    }  # fmt: skip


def _prove(kind: type, config: Any, name: str, source: str) -> Proof:
    from longspan.huggingface.prove import families
    from longspan.huggingface.prove.check import prove

    try:
        return prove(kind, config, families.FORMS[name])
    except LongspanError:
        raise
    except Exception as error:  # from its class, or from our tiny copy of it
        raise PlanError(
            f"{kind.__name__} with the configuration {source} cannot be tried: {_one_line(error)} Pass a configuration"
            f" that transformers builds a model from."
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return text if text.endswith(".") else f"{text}."


def _import_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise PlanError("prove needs transformers, which is not installed. Run: pip install transformers.") from error


def _config(source: str) -> Any:
    """Return the configuration in a directory or file, or of a model type."""
    _import_transformers()
    from transformers import CONFIG_MAPPING, AutoConfig

    place = Path(source)
    if place.exists():
        try:
            return AutoConfig.from_pretrained(place, local_files_only=True)  # nosec B615  # a place on this disk
        except Exception as error:  # from its class for this model type
            raise PlanError(
                f"transformers cannot read a configuration from {source}: {_one_line(error)} Pass a config.json of one"
                f" of its models."
            ) from error
    if source in CONFIG_MAPPING:
        return CONFIG_MAPPING[source]()
    raise PlanError(
        "MODEL_OR_CONFIG must be a directory with a config.json, that file, or a model type of the installed"
        f" transformers such as llama or qwen3_next, but got {source!r:.80}."
        f"{describe_missing(source) or did_you_mean(source, CONFIG_MAPPING)}"
    )


def _class(config: Any, task: str | None) -> type:
    """Return the model class with the head for a task."""
    import transformers
    from transformers.models.auto import modeling_auto

    architectures = getattr(config, "architectures", None) or []
    if task is None and architectures and hasattr(transformers, architectures[0]):
        return getattr(transformers, architectures[0])
    names = getattr(modeling_auto, TASKS[task or "causal"]).get(config.model_type)
    if names is None:
        raise PlanError(
            f"{config.model_type!r} has no head for --task {task or 'causal'}. Choose another: {', '.join(TASKS)}."
        )
    return getattr(transformers, names if isinstance(names, str) else names[0])


def _show(model: str, answers: dict[str, dict[str, Any]]) -> None:
    print_text(f"{model} over ranks, against one device")
    rows = [
        Row((name, "exact" if answer["ok"] else "refused", answer["error"] if answer["ok"] else "-"))
        for name, answer in answers.items()
    ]
    print_table(("batch", "result", "largest difference"), rows, left=(0, 1))
    for name, answer in answers.items():
        if not answer["ok"]:
            print_text(f"{name}: {answer['reason']}")
    for rules in [answer["rules"] for answer in answers.values() if answer["ok"]][:1]:
        head, reason = rules["head"], rules["head_reason"]
        print_text(f"Loss without logits: {f'yes, from {head}' if head else f'no, {reason}'}.")
    print_text(
        "A tiny copy with random weights, in float64, on simulated ranks: zigzag on 2, contiguous on 3, striped on 2."
        " Differences are shares of a tensor's largest entry, of outputs, loss and every gradient."
    )
