"""How a model wants to be treated over ranks, found by running its tiny copy on one device in several ways."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan.integrations.huggingface.batches import IGNORE, SEEN, counted_without_padding, read_batch, shifted_labels
from longspan.integrations.huggingface.hooks.head import scale_of
from longspan.integrations.huggingface.hooks.mixers import text_part
from longspan.integrations.huggingface.hooks.seen import takes
from longspan.integrations.huggingface.proving.forms import TOKENS
from longspan.integrations.huggingface.proving.trial import Trial, result
from longspan.integrations.huggingface.rules import (
    AFTER_PADDING,
    COUNT,
    IN_PLACE,
    NO_LOSS,
    NO_POSITIONS,
    OWN,
    POOLED,
    REAL,
    SHIFTED,
    Rules,
)
from longspan.integrations.huggingface.structure import padding_id

CLOSE = 1e-6


class UnknownRuleError(ValueError):
    """The model does something in a way of its own; `what` is one word for it."""

    def __init__(self, what: str, message: str) -> None:
        self.what = what
        super().__init__(message)


def rules_found(trial: Trial) -> Rules:
    """The rules under which a model is to be split; they are tried afterwards."""
    loss = _loss(trial)
    rules = Rules(positions=_positions(trial), loss=loss, obeys_count=_obeys_count(trial, loss))
    body, joined = _body(trial, rules.loss)
    if body is None:
        return rules
    return replace(rules, body=body, joined=joined, cuts=_cuts(trial, body))


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))


# -- positions ---------------------------------------------------------------------------------------------------------


def _positions(trial: Trial) -> str:
    """How the model counts where nobody tells it."""
    names = [inspect.signature(part.forward).parameters for part in (trial.model, trial.model.base_model)]
    if not any("position_ids" in parameters for parameters in names) or not takes(type(trial.model), "position_ids"):
        return NO_POSITIONS
    if trial.batch.get("position_ids") is not None or _has_images(trial):
        return COUNT  # with images, positions are the model's own, and reach the layers' door whole
    read = read_batch(trial.batch)
    truth = result(trial.forward())
    ways = {COUNT: torch.arange(read.seq_len).expand(read.rows, -1)}
    for rule in (AFTER_PADDING, REAL):
        ways[rule] = counted_without_padding(read, rule, padding_id(trial.model))
    outputs: dict[str, Tensor] = {}
    for rule, position_ids in ways.items():
        try:
            outputs[rule] = result(trial.forward(position_ids=position_ids))
        except (IndexError, RuntimeError):  # positions beyond the model's table
            continue
        if is_close(outputs[rule], truth):
            return rule
    real = None if read.padding is None else torch.from_numpy(read.padding)
    for rule, out in outputs.items():  # no rule is right at padding, but one may be at all real tokens
        if real is not None and is_close(_by_token(out, real), _by_token(truth, real)):
            return rule
    raise UnknownRuleError(
        "positions",
        "without position_ids the model counts positions in a way of its own. Put position_ids (batch, tokens) into the"
        " batch, as the model makes them of whole sequences",
    )


def _by_token(out: Tensor, real: Tensor) -> Tensor:
    return out[real] if out.ndim == 3 and out.shape[:2] == real.shape else out


# -- losses ------------------------------------------------------------------------------------------------------------


def _loss(trial: Trial) -> str:
    """How the model's loss comes from its logits and labels."""
    labels = trial.batch.get("labels")
    output = trial.forward()
    out = result(output)
    if out.ndim != 3 or out.shape[1] != TOKENS or hasattr(output, "start_logits"):
        return POOLED
    loss = getattr(output, "loss", None)
    if labels is None or loss is None:
        return NO_LOSS if loss is None else OWN
    shifted = shifted_labels(trial.batch)
    assert shifted is not None
    if _takes_shifted(trial, shifted, loss):
        return OWN
    for rule, wanted in ((SHIFTED, shifted), (IN_PLACE, labels)):
        mean = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), wanted.reshape(-1))
        if is_close(mean.double(), loss.double()):
            return rule
    raise UnknownRuleError(
        "loss",
        "the model's loss is neither the cross-entropy of labels one place earlier nor of labels in place, divided by"
        " the number of labels. Take labels out of the batch, and compute your loss of this rank's logits with"
        " longspan.training.token_loss",
    )


def _takes_shifted(trial: Trial, shifted: Tensor, loss: Tensor) -> bool:
    """Whether the model's own loss takes labels that are shifted already, and is divided by the number it is given."""
    if not (takes(type(trial.model), "shift_labels") and takes(type(trial.model), "num_items_in_batch")):
        return False
    count, given = (shifted != IGNORE).sum(), {"labels": shifted[:, :0], "shift_labels": shifted}
    try:
        own, half = (trial.forward(**given, num_items_in_batch=number).loss for number in (count, 2 * count))
        plain = trial.forward(num_items_in_batch=2 * count).loss
    except (RuntimeError, ValueError, IndexError):  # a loss that shifts itself finds no labels
        return False
    return is_close(own, loss) and is_close(half, plain) and not is_close(half, own)


def _obeys_count(trial: Trial, loss: str) -> bool:
    """Whether the loss is divided by num_items_in_batch where that is passed. Many models take and ignore it (BERT)."""
    if loss not in (SHIFTED, IN_PLACE) or not takes(type(trial.model), "num_items_in_batch"):
        return loss == OWN
    return not is_close(trial.forward(num_items_in_batch=10**6).loss, trial.forward().loss)


# -- the head ----------------------------------------------------------------------------------------------------------


def with_head(trial: Trial, rules: Rules) -> Rules:
    """The rules, with the head whose logits need not be computed and what the model does to these, or with the reason
    why they are needed."""
    if rules.loss not in (OWN, SHIFTED, IN_PLACE) or rules.joined is not None:
        return replace(rules, head_reason="its loss is not one of tokens")
    head = trial.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return replace(rules, head_reason="its head is no plain linear layer")
    seen: list[Any] = []
    handle = head.register_forward_hook(lambda _module, _args, output: seen.append(output))  # type: ignore[arg-type]
    try:
        logits = result(trial.forward())
    finally:
        handle.remove()
    if len(seen) == 1:
        for scale, cap in _known_ends(trial.model.config.get_text_config()):
            if is_close(_end_of(seen[0], trial.model.config.get_text_config(), scale, cap), logits):
                return replace(rules, head=_name_of(trial.model, head), scale=scale, soft_cap=cap)
    return replace(rules, head_reason="it does something else to logits than to scale and to cap them")


def _known_ends(config: Any) -> Iterator[tuple[str, str]]:
    """(scale, cap) by values of the configuration that have to do with logits. Others may depend on a model's size,
    and then a tiny copy has another."""
    numbers = {n: v for n, v in vars(config).items() if isinstance(v, int | float) and not isinstance(v, bool) and v}
    named = [name for name in numbers if "logit" in name or "head_multiplier" in name]
    caps = ["", *(name for name in named if "cap" in name)]
    scales = ["", *(how + name for name in named if "cap" not in name for how in ("", "1 / "))]
    yield from itertools.product(scales, caps)


def _end_of(logits: Tensor, config: Any, scale: str, cap: str) -> Tensor:
    logits = logits * scale_of(config, scale)
    return logits if not cap else getattr(config, cap) * torch.tanh(logits / getattr(config, cap))


# -- where the model is cut --------------------------------------------------------------------------------------------


def _body(trial: Trial, loss: str) -> tuple[str | None, str | None]:
    """The names of the modules at which whole tensors are cut and put together again."""
    model = trial.model
    images = _has_images(trial)
    pooled = loss == POOLED or getattr(model.base_model, "pooler", None) is not None
    if not (pooled or images):
        return None, None
    part = text_part(model)
    text = part if images and part is not model else model.base_model
    body = _name_of(model, text)
    if not pooled:
        return body, None
    pooler = getattr(text, "pooler", None)
    if pooler is None:
        return body, body
    encoder = getattr(text, "encoder", None)
    return body, _name_of(model, encoder if isinstance(encoder, nn.Module) else pooler)


def _has_images(trial: Trial) -> bool:
    return any(trial.batch.get(name) is not None for name in SEEN)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _cuts(trial: Trial, body: str) -> tuple[tuple[str, int, int], ...]:
    """Where the tokens are in what reaches the body's door."""
    found: dict[tuple[str, int], int] = {}
    module = trial.model.get_submodule(body)
    names = list(inspect.signature(module.forward).parameters)

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            dims = [d for d, size in enumerate(getattr(value, "shape", ())) if size == TOKENS]
            if isinstance(value, Tensor) and dims:
                found[name, value.ndim] = dims[0]

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trial.forward()
    finally:
        handle.remove()
    return tuple(sorted((name, ndim, dim) for (name, ndim), dim in found.items()))
