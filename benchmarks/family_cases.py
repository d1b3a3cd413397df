"""Model families of transformers, their test configurations, and a step of each on one device."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.huggingface.prove.families import KINDS, Case, cases, class_of, config_of

__all__ = ["KINDS", "Case", "cases", "class_of", "config_of"]

TOKENS = 52
"""Different from the values of the proof, so that both cannot be wrong in the same way by chance."""
LIMIT = 1e-5
"""Tolerance of Longspan's attention against transformers' own on one device: models compute parts in float32."""


def batch_of(case: Case, config: Any, rows: int = 2, seed: int = 5) -> dict[str, Any]:
    """Return a random batch without special tokens, with labels for the head."""
    from longspan.huggingface.prove.tiny import special_tokens

    draw = torch.Generator().manual_seed(seed)
    text = config.get_text_config()
    allowed = torch.tensor([n for n in range(getattr(text, "vocab_size", 99)) if n not in special_tokens(config)])
    ids = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    if case.kind == "classify":
        return {"input_ids": ids, "labels": torch.arange(rows) % 2}
    labels = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    labels[torch.rand(labels.shape, generator=draw) < 0.3] = -100
    return {"input_ids": ids, "labels": labels}


@dataclass(frozen=True)
class Step:
    """Results of a step."""

    loss: float
    logits: Tensor | None
    """None if they are sharded over ranks."""
    grads: dict[str, Tensor]


def step(model: Any, batch: dict[str, Any]) -> Step:
    """Run forward and backward on one device."""
    model.zero_grad()
    out = model(**batch)
    if out.loss is None:
        raise ValueError(f"{type(model).__name__} computes no loss from labels")
    out.loss.backward()
    return Step(out.loss.item(), out.logits.detach(), gradients(model))


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradient of every parameter that takes part."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(outcome: Step, expected: Step) -> float:
    """Return the largest difference of loss, logits and gradients, each relative to the largest of its kind."""
    if outcome.grads.keys() != expected.grads.keys():
        return float("inf")
    largest = max((float(g.abs().max()) for g in expected.grads.values()), default=1.0) or 1.0
    errors = [float((outcome.grads[name] - grad).abs().max()) / largest for name, grad in expected.grads.items()]
    errors.append(abs(outcome.loss - expected.loss) / max(abs(expected.loss), 1e-30))
    if outcome.logits is not None and expected.logits is not None:
        if outcome.logits.shape != expected.logits.shape:
            return float("inf")
        errors.append(float((outcome.logits - expected.logits).abs().max() / expected.logits.abs().max()))
    return float("inf") if any(math.isnan(error) for error in errors) else max(errors)


@contextlib.contextmanager
def counted() -> Any:
    """Count the calls of Longspan's attention inside, in a list of one number."""
    from transformers import AttentionInterface
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    calls = [0]
    attention = ALL_ATTENTION_FUNCTIONS["longspan"]

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return attention(*args, **kwargs)

    AttentionInterface.register("longspan", counting)
    try:
        yield calls
    finally:
        AttentionInterface.register("longspan", attention)


def on_one_device(case: Case) -> dict[str, Any]:
    """Check whether the family builds and runs, and whether Longspan's attention equals its own."""
    from longspan.huggingface.prove.tiny import CannotShrinkError, build, tiny_config

    try:
        config = config_of(case)
    except Exception as error:
        return {
            "outcome": "not built",
            "reason": f"its default configuration is refused by its own code: {one_line(error)}",
        }
    if config.is_encoder_decoder:
        return {"outcome": "refused", "reason": "encoder-decoder: queries and keys of two sequences"}
    try:
        tiny = tiny_config(config)
        tiny._attn_implementation = "eager"
        model: Any = build(class_of(case), tiny)
    except CannotShrinkError as error:
        return {"outcome": "not built", "reason": one_line(error)}
    model.config.use_cache = False
    try:
        batch = batch_of(case, model.config)
        expected = step(model, batch)
    except Exception as error:
        return {"outcome": "not built", "reason": f"its tiny copy does not run on text alone: {one_line(error)}"}
    try:
        model.set_attn_implementation("longspan")
        with counted() as calls:
            outcome = step(model, batch)
    except Exception as error:
        return {"outcome": "refused", "reason": one_line(error)}
    error = difference(outcome, expected)
    if not error <= LIMIT:
        return {"outcome": "differs", "reason": f"off by {error:.1e} on one device", "error": error}
    return {"outcome": "runs", "error": error, "calls": calls[0]}


def one_line(error: BaseException) -> str:
    """Return an exception's message in one line."""
    text = " ".join(str(error).split())
    name = type(error).__name__
    return text[:300] if "longspan" in type(error).__module__ else f"{name}: {text}"[:300]
