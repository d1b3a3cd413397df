"""Does a model of transformers compute over ranks what it computes on one device? Offline, without weights, in seconds.

  longspan prove llama                         # a model type, with its default configuration
  longspan prove checkpoints/my-model          # a folder with a config.json, or that file
  longspan prove bert --task masked --forms plain,padded

A tiny copy of the configuration runs whole and over simulated ranks; loss and all gradients are compared. The result is
cached for training, which runs the same check when a model is first used.

Exit code 1: some form of batch is refused.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from longspan.cli.output import Row, describe_missing, did_you_mean, print_json, print_table, print_text, progress
from longspan.errors import LongspanError, PlanError

FORMS = ("plain", "padded", "packed")
TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "classes": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "images": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_OR_CONFIG", help="a model type, a folder, or a config.json")
    parser.add_argument("--task", choices=TASKS, help="the head (that of the configuration, else causal)")
    parser.add_argument(
        "--forms", default=",".join(FORMS), help=f"kinds of batches, with commas between: {', '.join(FORMS)} (all)"
    )
    parser.add_argument("--again", action="store_true", help="ignore a cached result")


def run(args: argparse.Namespace) -> int:
    names = [name.strip() for name in args.forms.split(",")]
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise PlanError(f"--forms must be of {', '.join(FORMS)}, but got {args.forms}.")
    config = _config(args.model)
    kind = _class(config, args.task)
    answers: dict[str, dict[str, Any]] = {}
    advance = progress(args, f"checking {kind.__name__}")
    for name in names:
        advance(name)
        answers[name] = _answer(kind, config, name, args.model, args.again)
    if args.json:
        print_json("prove", {"model": kind.__name__, "forms": answers})
    else:
        _show(kind.__name__, answers)
    return 0 if all(answer["ok"] for answer in answers.values()) else 1


def _answer(kind: type, config: Any, name: str, source: str, again: bool) -> dict[str, Any]:
    from longspan.huggingface.check import Form
    from longspan.huggingface.first_use import check_path, load_or_run_check

    form = {
        "plain": Form(),
        "padded": Form(padding="right"),
        "packed": Form(packed="position_ids", positions=True),
    }[name]
    try:
        if again:
            check_path(kind, config, form).unlink(missing_ok=True)
        return load_or_run_check(kind, config, form)
    except (LongspanError, OSError):
        raise
    except Exception as error:  # from its class, or from our tiny copy of it
        raise PlanError(
            f"{kind.__name__} with the configuration {source} cannot be tried: {_one_line(error)} Pass a configuration"
            f" that transformers builds a model from."
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return text if text.endswith(".") else f"{text}."


def _config(source: str) -> Any:
    """Return the configuration in a directory or file, or of a model type."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError as error:
        raise PlanError("prove needs transformers, which is not installed. Run: pip install transformers.") from error
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
