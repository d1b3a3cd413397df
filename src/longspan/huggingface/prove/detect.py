"""Detect the rules by which to shard a model, by running its tiny copy on one device in several ways."""

from __future__ import annotations

import inspect
import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.huggingface.batches import IGNORE, IMAGE_INPUTS, count_without_padding, read_batch, shifted_labels
from longspan.huggingface.head import scale_of
from longspan.huggingface.hooks import accepts_kwarg
from longspan.huggingface.mixers import text_part
from longspan.huggingface.prove.batches import TOKENS
from longspan.huggingface.prove.trials import (
    LAYOUTS,
    RefusedError,
    Trial,
    difference,
    first_line,
    is_right,
    output_tensor,
    run_truth,
)
from longspan.huggingface.rules import Form, Rules
from longspan.huggingface.structure import padding_id


def detect_rules(trial: Trial) -> Rules:
    """Return the rules by which to shard a model; they are checked afterwards."""
    model, loss = trial.model, _detect_loss(trial)
    obeys_count = loss == "own"
    if loss in ("shifted", "in place") and accepts_kwarg(
        type(model), "num_items_in_batch"
    ):  # BERT takes and ignores it
        obeys_count = not is_close(trial.forward(num_items_in_batch=10**6).loss, trial.forward().loss)
    rules = Rules(positions=_detect_positions(trial), loss=loss, obeys_count=obeys_count)
    # Modules at which whole tensors are sharded and gathered again.
    has_images, is_pooled = (
        _has_images(trial),
        loss == "pooled" or getattr(model.base_model, "pooler", None) is not None,
    )
    if not (is_pooled or has_images):
        return rules
    part = text_part(model)
    text = part if has_images and part is not model else model.base_model
    body = joined = _name_of(model, text)
    pooler, encoder = getattr(text, "pooler", None), getattr(text, "encoder", None)
    if pooler is not None:
        joined = _name_of(model, encoder if isinstance(encoder, nn.Module) else pooler)
    return replace(rules, body=body, joined=joined if is_pooled else None, cuts=_find_cuts(trial, body))


CLOSE = 1e-6
"""Relative difference below which two outputs are the same when rules are detected."""


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))


def _has_images(trial: Trial) -> bool:
    return any(trial.batch.get(name) is not None for name in IMAGE_INPUTS)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _detect_positions(trial: Trial) -> Any:
    """Return how the model counts positions without position_ids."""
    names = [inspect.signature(part.forward).parameters for part in (trial.model, trial.model.base_model)]
    if not any("position_ids" in parameters for parameters in names) or not accepts_kwarg(
        type(trial.model), "position_ids"
    ):
        return "none"
    if trial.batch.get("position_ids") is not None or _has_images(trial):
        return "count"  # with images, positions are the model's own, and reach the backbone whole
    info = read_batch(trial.batch)
    truth = output_tensor(trial.forward())
    positions = {"count": torch.arange(info.seq_len).expand(info.rows, -1)}
    for rule in ("after padding", "real tokens"):
        positions[rule] = count_without_padding(info, rule, padding_id(trial.model))
    outputs: dict[str, Tensor] = {}
    for rule, position_ids in positions.items():
        try:
            outputs[rule] = output_tensor(trial.forward(position_ids=position_ids))
        except (IndexError, RuntimeError):  # positions beyond the model's table
            continue
        if is_close(outputs[rule], truth):
            return rule
    if info.padding is not None:  # no rule is right at padding, but one may be at all real tokens
        real = torch.from_numpy(info.padding)
        is_by_token = truth.ndim == 3 and truth.shape[:2] == real.shape
        for rule, out in outputs.items():
            if is_by_token and out.shape == truth.shape and is_close(out[real], truth[real]):
                return rule
    raise RefusedError(
        "positions: without position_ids the model counts positions in a way of its own. Put position_ids (batch,"
        " tokens) into the batch, as the model makes them of whole sequences."
    )


def _detect_loss(trial: Trial) -> Any:
    """Return how the model's loss comes from its logits and labels."""
    labels, output = trial.batch.get("labels"), trial.forward()
    out, loss = output_tensor(output), getattr(output, "loss", None)
    if out.ndim != 3 or out.shape[1] != TOKENS or hasattr(output, "start_logits"):
        return "pooled"
    if labels is None or loss is None:
        return "none" if loss is None else "own"
    shifted = shifted_labels(trial.batch)
    assert shifted is not None
    if _takes_shifted(trial, shifted, loss):
        return "own"
    for rule, wanted in (("shifted", shifted), ("in place", labels)):
        mean = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), wanted.reshape(-1))
        if is_close(mean.double(), loss.double()):
            return rule
    raise RefusedError(
        "loss: the model's loss is neither the cross-entropy of labels one place earlier nor of labels in place,"
        " divided by the number of labels. Take labels out of the batch, and compute your loss of this rank's logits"
        " with longspan.training.token_loss."
    )


def _takes_shifted(trial: Trial, shifted: Tensor, loss: Tensor) -> bool:
    """Whether the model's loss takes labels that are shifted already, and divides by num_items_in_batch."""
    if not (
        accepts_kwarg(type(trial.model), "shift_labels") and accepts_kwarg(type(trial.model), "num_items_in_batch")
    ):
        return False
    count, inputs = (shifted != IGNORE).sum(), {"labels": shifted[:, :0], "shift_labels": shifted}
    try:
        own, half = (trial.forward(**inputs, num_items_in_batch=number).loss for number in (count, 2 * count))
        plain = trial.forward(num_items_in_batch=2 * count).loss
    except (RuntimeError, ValueError, IndexError):  # a loss that shifts itself finds no labels
        return False
    return is_close(own, loss) and is_close(half, plain) and not is_close(half, own)


def _find_cuts(trial: Trial, body: str) -> tuple[tuple[str, int, int], ...]:
    """Return the token dimension of every input of the backbone."""
    cuts: dict[tuple[str, int], int] = {}
    module = trial.model.get_submodule(body)
    names = list(inspect.signature(module.forward).parameters)

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            dims = [d for d, size in enumerate(getattr(value, "shape", ())) if size == TOKENS]
            if isinstance(value, Tensor) and dims:
                cuts[name, value.ndim] = dims[0]

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trial.forward()
    finally:
        handle.remove()
    return tuple(sorted((name, ndim, dim) for (name, ndim), dim in cuts.items()))


def without_logits(trial: Trial, rules: Rules, form: Form) -> Rules:
    """Add the head whose logits need not be computed if loss and gradients are the same without, or the reason why not.

    The model may scale and cap logits after the head, by values of its configuration.
    """
    if rules.loss not in ("own", "shifted", "in place") or rules.joined is not None:
        return replace(rules, head_reason="its loss is not one of tokens")
    head, config = trial.model.get_output_embeddings(), trial.model.config.get_text_config()
    if type(head) is not nn.Linear:
        return replace(rules, head_reason="its head is no plain linear layer")
    outputs: list[Any] = []
    handle = head.register_forward_hook(lambda _module, _args, output: outputs.append(output))  # type: ignore[arg-type]
    try:
        logits = output_tensor(trial.forward())
    finally:
        handle.remove()
    # Values that have to do with logits. Others may depend on a model's size, and then a tiny copy has another.
    numbers = {n: v for n, v in vars(config).items() if isinstance(v, int | float) and not isinstance(v, bool) and v}
    named = [name for name in numbers if "logit" in name or "head_multiplier" in name]
    caps = ["", *(name for name in named if "cap" in name)]
    scales = ["", *(how + name for name in named if "cap" not in name for how in ("", "1 / "))]
    for scale, cap in itertools.product(scales, caps) if len(outputs) == 1 else ():
        scaled = outputs[0] * scale_of(config, scale)
        scaled = scaled if not cap else getattr(config, cap) * torch.tanh(scaled / getattr(config, cap))
        if is_close(scaled, logits):
            with_head = replace(rules, head=_name_of(trial.model, head), scale=scale, soft_cap=cap)
            break
    else:
        return replace(rules, head_reason="it does something else to logits than to scale and to cap them")
    try:
        result = trial.run_split(with_head, *LAYOUTS[0], output_kind="loss")
    except Exception as error:
        return replace(rules, head_reason=f"the model's code fails without them ({first_line(error)})")
    error, where = difference(result, run_truth(trial, form, "loss"))
    return with_head if is_right(trial, error) else replace(rules, head_reason=f"without them {where} is another one")
