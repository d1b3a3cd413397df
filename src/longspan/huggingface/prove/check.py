"""Check that a tiny copy of a model computes over simulated ranks what it computes on one device: loss and gradients.

For Llama and 43 tokens the copy has 2 layers and 32 features. It runs whole, then zigzag on 2 ranks, contiguous on 3
and striped on 2. The largest difference of any gradient is about 1e-16 of that gradient's largest entry.

`Rules` record how a model has to be treated. For example, RoBERTa counts positions from padding_idx + 1: with positions
from 0 its output differs, so positions are passed with that offset, and the result is compared again. A model that
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from longspan._torch import global_hooks
from longspan.errors import LongspanError
from longspan.huggingface.attention import NAME
from longspan.huggingface.hooks import vision_encoders
from longspan.huggingface.mixers import check_mixers, is_hybrid, uses_attention
from longspan.huggingface.prove.batches import random_batch, with_labels
from longspan.huggingface.prove.detect import detect_rules, without_logits
from longspan.huggingface.prove.tiny import CannotShrinkError, build, tiny_config
from longspan.huggingface.prove.trials import (
    LAYOUTS,
    LIMIT,
    MOST,
    FailedError,
    RefusedError,
    RunResult,
    Trial,
    attention_implementation,
    difference,
    first_line,
    is_right,
    logits_of,
    run_truth,
)
from longspan.huggingface.rules import PLAIN, Form, Rules
from longspan.huggingface.structure import check_structure, classes_of, find_unverified_module, num_layers
from longspan.verification.prover import isolate_torch_state

_ADVICE = (
    "Compare it with one device yourself (longspan.verification.verify_model), and pass trust_model=True if it is right"
)


@dataclass(frozen=True)
class Proof:
    """The result of a check."""

    model: str
    form: str
    ok: bool
    error: float
    """The largest difference, relative to a tensor's own largest entry."""
    reason: str = ""
    """Why it is not ok: what differs first, and what to do."""
    rules: Rules = field(default_factory=Rules)
    seconds: float = 0.0
    """Processor time of the check."""
    classes: tuple[str, ...] = ()
    """Full names of the classes of all modules that were checked."""
    was_compared: bool = True
    """Whether the result is that of a comparison or of a refusal by name; False where something failed."""

    def __str__(self) -> str:
        if self.ok:
            runs = ", ".join(f"{name} on {size}" for name, size in LAYOUTS)
            return f"{self.model}, {self.form}: exact, {self.error:.0e} ({runs} simulated ranks; {self.seconds:.1f} s)"
        return f"{self.model}, {self.form}: refused: {self.reason}"


def prove(kind: type, config: Any, form: Form = PLAIN) -> Proof:
    """Check models of this class and configuration on batches of this form. Takes seconds on the CPU, no weights."""
    began = time.process_time()
    error, reason, rules, classes, was_compared = float("inf"), "", Rules(), (), True
    try:
        with _default_state():
            trial = _start(kind, config, form)
            classes = tuple(sorted(classes_of(trial.model)))
            error, rules = _compare(trial, form)
            # Modules that only larger models have are not in the copy.
            full = without_weights(kind, config)
            other = None if full is None else find_unverified_module(full, classes, vision_encoders(full))
            if other is not None:
                raise RefusedError(f"as it is configured it has {other}, which its tiny copy has not. {_ADVICE}.")
    except RefusedError as refusal:
        reason, was_compared = str(refusal), not isinstance(refusal, FailedError)
    seconds = time.process_time() - began
    return Proof(kind.__name__, str(form), not reason, error, reason, rules, seconds, classes, was_compared)


def without_weights(kind: type, config: Any) -> Any:
    """Return the model as it is configured, on the meta device, or None if it cannot be built there."""
    try:
        with _default_state(), torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception:
        return None


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Run without hooks for all modules."""
    kinds = global_hooks(torch.nn.modules.module)
    before = [dict(hooks) for hooks in kinds]
    for hooks in kinds:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(kinds, before, strict=True):
            hooks.update(kept)


@contextmanager
def _default_state() -> Iterator[None]:
    """Ignore the caller's grad mode, autocast, default device, random state, warnings and global hooks."""
    with warnings.catch_warnings(), isolate_torch_state("cpu"), torch.device("cpu"), _without_global_hooks():
        warnings.simplefilter("ignore")
        yield


def _start(kind: type, config: Any, form: Form) -> Trial:
    """Return the tiny copy, with a batch on which it runs."""
    try:
        model: Any = build(kind, tiny_config(config))
        model.set_attn_implementation(NAME)
    except (CannotShrinkError, ValueError, KeyError) as error:
        raise FailedError(f"no tiny copy of it could be built ({first_line(error)}). {_ADVICE}.") from error
    mixes_tokens = is_hybrid(model) or uses_attention(model)
    if model.config.get_text_config()._attn_implementation != NAME or not mixes_tokens:
        raise RefusedError(
            "it computes attention in code of its own, where transformers lets no other attention in. Use one device."
        )
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # heads have some that no configuration names
            module.p = 0.0
    trial = Trial(model, {})
    try:
        check_mixers(model)
        check_structure(model, model.config.get_text_config())
        output = _first_run(trial, form)
        if form.labels:
            trial.batch = with_labels(trial.batch, logits_of(output))
            trial.forward()
    except LongspanError as error:
        raise RefusedError(first_line(error)) from error
    except Exception as error:
        raise FailedError(f"its tiny copy does not run on one device ({first_line(error)}). {_ADVICE}.") from error
    return trial


def _first_run(trial: Trial, form: Form) -> Any:
    """Return the output, in float64 throughout and of two rows where that is possible."""
    rows = (1,) if form.packed.startswith("cu_seq_lens") else (2,) if form.padding else (2, 1)
    attempts = list(itertools.product((True, False), rows))
    for attempt in attempts:
        trial.is_wide, num_rows = attempt
        trial.batch = random_batch(form, trial.model, num_rows)
        try:
            return trial.forward()
        except Exception as error:
            if isinstance(error, LongspanError) or attempt == attempts[-1]:
                raise
    return None


# -- The comparison ----------------------------------------------------------------------------------------------------


def _compare(trial: Trial, form: Form) -> tuple[float, Rules]:
    """Return the largest difference, and the rules by which the model was sharded."""
    try:
        rules = detect_rules(trial)
        if form.packed and rules.joined is not None and is_hybrid(trial.model):
            raise RefusedError(
                "its head takes one answer from a row, and this row has several documents, which its recurrences do not"
                " separate on one device. Give every document a row."
            )
        truth, again = run_truth(trial, form), run_truth(trial, form)
    except LongspanError as error:
        raise RefusedError(first_line(error)) from error
    if not form.packed and form.padding in ("", "right"):  # rows that see nothing make NaN of eager attention
        _check_eager(trial, truth)
    if not difference(again, truth)[0] <= LIMIT:
        raise FailedError(
            "on one device already, it gives other numbers when it runs again, so nothing can be compared: it keeps"
            " state from one run to the next, or draws random numbers."
        )
    worst = 0.0
    for name, world_size in LAYOUTS:
        error, calls, rules = _check_split(trial, truth, rules, name, world_size)
        worst = max(worst, error)
        wanted = num_layers(trial.model, trial.model.config.get_text_config())
        rules = replace(rules, layers="all" if calls >= wanted else "some" if calls else "none")
    exact_at_padding = _is_exact_at_padding(trial, rules)
    rules = replace(without_logits(trial, rules, form), exact_at_padding=exact_at_padding)
    for model in (trial.model, trial.template):  # layers may do something else in evaluation
        model.eval()
    _check_split(trial, run_truth(trial, form), rules, *LAYOUTS[0], prefix="in evaluation, ")
    return worst, rules


def _check_split(
    trial: Trial, truth: RunResult, rules: Rules, name: str, world_size: int, prefix: str = ""
) -> tuple[float, int, Rules]:
    """Run over ranks and return the difference, the number of attention calls, and the rules that worked."""
    rules = replace(rules, layers="some")
    try:
        result = trial.run_split(rules, name, world_size)
    except LongspanError as error:
        raise RefusedError(first_line(error)) from error
    except Exception as error:
        if isinstance(error, TypeError) and NAME in str(error) and rules.handed == "keywords":
            # The model cannot take the keyword, so its masks carry the sequence.
            return _check_split(trial, truth, replace(rules, handed="mask"), name, world_size, prefix)
        first = trial.first_different(rules, name, world_size)
        where = "" if first is None else f" The first module that computes something else is {first}."
        raise FailedError(
            f"its code fails on a part of a sequence ({first_line(error)}).{where} Use one device."
        ) from error
    error, where = difference(result, truth)
    if is_right(trial, error):
        return error, result.calls, rules
    text = f"over {world_size} ranks ({name}), {where} is off by {error:.1e} from one device."
    first = trial.first_different(rules, name, world_size)
    if first is None:
        raise RefusedError(
            f"{prefix}{text} All modules compute the same in forward: the difference comes from the loss, from code"
            f" around modules, or from a backward pass of the model's own."
        )
    raise RefusedError(
        f"{prefix}{text} The first that computes something else is {first}: it mixes or counts tokens in a way that"
        f" Longspan does not see. Use one device, or longspan.training.relayout around that layer."
    )


def _check_eager(trial: Trial, truth: RunResult) -> None:
    """Compare attention by Longspan on one device with that of transformers."""
    try:
        with attention_implementation(trial.model, "eager"):
            eager = trial.run_whole()
    except Exception:  # some have no eager attention
        return
    error, where = difference(truth, eager)
    if not error <= (LIMIT if trial.is_wide else MOST):
        raise RefusedError(
            f"on one device already, {where} with attn_implementation='longspan' is off by {error:.1e} from 'eager':"
            f" its attention layers use an option that does not reach Longspan. Use another attn_implementation."
        )


def _is_exact_at_padding(trial: Trial, rules: Rules) -> bool:
    """Whether outputs at padding, and a loss with labels there, are the same over ranks.

    Collators put -100 at padding alone, so that the last padding token before a text predicts its first token.
    """
    if (
        "attention_mask" not in trial.batch
        or rules.loss not in ("own", "shifted", "in place")
        or is_hybrid(trial.model)
    ):
        return True
    padded = copy.copy(trial)
    padded.batch, padded.hides_padding = with_labels(trial.batch, logits_of(trial.forward()), at_padding=True), False
    try:
        result = padded.run_split(rules, *LAYOUTS[0])
    except Exception:
        return False
    return is_right(padded, difference(result, padded.run_whole())[0])
