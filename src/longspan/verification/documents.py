"""Find documents that leak into each other on one device, and the first module that mixes them.

In a packed batch, other documents are replaced, and a document's output must not change. If it does, every module's
output is examined, in the order in which modules end: the first whose output changes although its inputs did not is the
one that mixes documents. Tiny example: documents [a a b b] and a layer that adds the token before; with other tokens in
the first document the third output changes, so the layer is named, and none after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.errors import PlanError
from longspan.spans import Ints
from longspan.training.batch import document_numbers, numbers_of, restarts
from longspan.verification.prover import copy_in_float64, describe_module, perturb_parameters
from longspan.verification.reference import ROW, comparable, squared_differences, unit
from longspan.verification.report import Check, Finding, Report, spans_of

DOCUMENTS_LEAK = "documents leak on one device"
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
Run = Callable[[nn.Module, dict[str, Any]], Any]
"""The user's call on one device: model and batch to the output."""


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """A batch, the document number of each of its tokens (B, S), and which tokens are real."""

    batch: dict[str, Any]
    numbers: Ints
    real: Any

    def probes(self) -> Iterator[tuple[Any, Any]]:
        """Yield (tokens to replace, tokens to watch) so that some probe separates any two documents, both ways.

        Documents differ in some bit of their numbers, so there are two probes for every bit.
        """
        for bit in range(int(self.numbers.max()).bit_length()):
            side = (self.numbers >> bit) & 1 == 0
            for replaced in (side & self.real, ~side & self.real):
                watched = self.real & ~replaced
                if replaced.any() and watched.any():
                    yield replaced, watched

    def replace_tokens(self, replaced: Any) -> dict[str, Any]:
        """Return the batch with other tokens in these places."""
        name = "input_ids" if self.batch.get("input_ids") is not None else "inputs_embeds"
        tokens = self.batch[name]
        at = torch.as_tensor(replaced, device=tokens.device)
        if name == "inputs_embeds":
            others = torch.where(tokens == 0, torch.ones_like(tokens), -tokens)
            return {**self.batch, name: torch.where(at[..., None], others, tokens)}
        return {**self.batch, name: torch.where(at, other_ids(tokens), tokens)}

    def by_token(self, x: Any) -> Tensor | None:
        """Return values as (B, S, features) in float64, or None if they have no token dimension."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return None
        rows, length = self.numbers.shape
        if x.ndim >= 2 and (tuple(x.shape[:2]) == (rows, length) or x.shape[0] == rows * length):
            return comparable(x.reshape(rows, length, -1))
        if x.ndim == 3 and (x.shape[0], x.shape[2]) == (rows, length):
            return comparable(x.transpose(1, 2))
        return None

    def output(self, output: Any) -> Tensor:
        """Return a model's output as (B, S, features)."""
        first = _first_tensor(output)
        tokens = self.by_token(first)
        if tokens is None:
            kind = f"a tensor of shape {tuple(first.shape)}" if isinstance(first, Tensor) else repr(first)[:200]
            raise PlanError(
                f"documents are compared token by token, but the model returned {kind} for (batch, tokens) ="
                f" {self.numbers.shape}. Return logits, (batch, tokens, vocabulary)."
            )
        return tokens


def other_ids(ids: Tensor) -> Tensor:
    """Return another id of the batch for each token; 0 or 1 if all ids are equal.

    >>> other_ids(torch.tensor([5, 2, 5, 9])).tolist(), other_ids(torch.tensor([0, 0])).tolist()
    ([9, 5, 9, 2], [1, 1])
    """
    known = ids.unique()
    if len(known) == 1:
        return (ids == 0).to(ids.dtype)
    return known[(torch.searchsorted(known, ids) + 1) % len(known)]


def read_documents(batch: Mapping[str, Any], numbers: Any = None) -> PackedBatch | None:
    """Return the batch with its documents, from `numbers` or the batch; None where every row is one document."""
    tokens = next((batch[name] for name in ("input_ids", "inputs_embeds") if isinstance(batch.get(name), Tensor)), None)
    if tokens is None or tokens.ndim < 2 or not tokens.shape[1]:
        return None
    rows, length = tokens.shape[:2]
    if numbers is None:
        numbers = numbers_of({name: batch.get(name) for name in PACKED}, rows, length)
    if numbers is None:
        numbers = restarts(batch.get("position_ids"), rows, length)
    if numbers is None or (numbers == numbers[:, :1]).all():
        return None
    padding = batch.get("attention_mask")
    real = np.ones((rows, length), dtype=bool)
    if isinstance(padding, Tensor) and tuple(padding.shape) == (rows, length):
        real = padding.detach().cpu().numpy().astype(bool)
    return PackedBatch(dict(batch), np.broadcast_to(numbers - numbers.min(), (rows, length)), real)


def verify_packed(model: Any, batch: Mapping[str, Any], run: Run | None, documents: Any, factor: float) -> Report:
    """See `longspan.verification.verify_documents`."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"verify_documents takes a module and a batch, but got {type(model).__name__}.")
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise PlanError(
            f"verify_documents takes a batch with input_ids (batch, tokens) or inputs_embeds (batch, tokens, features)."
            f" This one has {', '.join(batch) or 'nothing'}."
        )
    packed = read_documents(batch, None if documents is None else document_numbers(documents, tokens.shape[1]))
    if packed is None:
        raise PlanError(
            "every row of the batch is one document, so none can leak into another. Pass a packed batch: position_ids"
            " that start again with every document, seq_idx, cu_seq_lens_q, or documents= with their lengths."
        )
    run = run or _call
    copied, doubled, note = copy_in_float64(model, packed.batch, run)  # leaks are far above rounding there
    check, finding = find_leak(copied, replace(packed, batch=doubled), run, factor)
    count = sum(len(np.unique(row)) for row in packed.numbers)
    subject = f"{count} documents of {type(model).__name__}"
    return Report(subject, 1, (check,), () if finding is None else (finding,), (note,) if note else ())


def _call(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Call the model as in training: with a cache, transformers ignores documents."""
    cached = "use_cache" in batch or not hasattr(getattr(model, "config", None), "use_cache")
    return model(**(batch if cached else {**batch, "use_cache": False}))


@torch.no_grad()
def find_leak(model: nn.Module, packed: PackedBatch, run: Run, factor: float = 1.0) -> tuple[Check, Finding | None]:
    """Return how far a document moves when others are replaced, and a finding if that is a leak.

    Rounding is that of float32 at least: layers may compute in it whatever the model's dtype.
    """
    rounding = max([unit(torch.float32), *(unit(p.dtype) for p in model.parameters() if p.is_floating_point())])
    truth, again = (packed.output(run(model, packed.batch)) for _ in range(2))
    if not _distance(again, truth).norm() <= 64 * rounding * _size(truth).norm() + 1e-30:
        raise PlanError(
            "the model gives other numbers when it runs again, so nothing can be compared. Turn dropout off"
            " (model.eval(), or p = 0), or fix the seed."
        )
    samples: list[Tensor] = []
    for seed in range(2):
        with perturb_parameters(model, rounding, seed):
            samples.append(packed.output(run(model, packed.batch)))
    limit = factor * _limit(truth, samples, rounding)
    if not math.isfinite(limit):
        raise PlanError(
            "rounding alone turns numbers of the model's output into infinite ones, or into nan, so nothing can be"
            " compared. Use weights of a usual size."
        )
    farthest = 0.0
    for replaced, watched in packed.probes():
        far = _distance(packed.output(run(model, packed.replace_tokens(replaced))), truth)
        moved = far.masked_fill(~torch.as_tensor(watched), 0.0)
        farthest = max(farthest, float(moved.max()))
        if not farthest <= limit:
            layer = _first_to_leak(model, packed, run, replaced, watched, rounding, factor)
            return Check("documents", farthest, limit), _finding(model, layer, packed, moved, limit)
    return Check("documents", farthest, limit), None


def _limit(truth: Tensor, samples: list[Tensor], rounding: float) -> float:
    """Return how far rounding may move a token: the smaller sample, since in the other a router may have changed."""
    far = min(float(_distance(sample, truth).max()) for sample in samples)
    return ROW * far + 8 * rounding * float(_size(truth).max())


def _distance(after: Tensor, truth: Tensor) -> Tensor:
    """Return how far each token moved (B, S)."""
    return squared_differences(after, truth).sum(2).sqrt()


def _size(x: Tensor) -> Tensor:
    """Return the norm of each token's finite numbers (B, S)."""
    return x.masked_fill(~x.isfinite(), 0.0).norm(dim=2)


def _first_to_leak(
    model: nn.Module, packed: PackedBatch, run: Run, replaced: Any, watched: Any, rounding: float, factor: float
) -> str | None:
    """Return the name of the first module whose output moves while its inputs do not; None if none can be named."""
    truth, after = (_trace(model, packed, run, b) for b in (packed.batch, packed.replace_tokens(replaced)))
    with perturb_parameters(model, rounding, 0):
        rounded = _trace(model, packed, run, packed.batch)

    def moves(right: Tensor, changed: Tensor, sample: Tensor) -> bool:
        if not right.shape == changed.shape == sample.shape:
            return True
        return not float(_distance(changed, right)[torch.as_tensor(watched)].max()) <= factor * _limit(
            right, [sample], rounding
        )

    for call, (inputs, out) in truth.items():
        if call in after and call in rounded:
            (inputs_after, out_after), (inputs_rounded, out_rounded) = after[call], rounded[call]
            if moves(out, out_after, out_rounded) and not any(map(moves, inputs, inputs_after, inputs_rounded)):
                return call[0]
    return None


def _trace(
    model: nn.Module, packed: PackedBatch, run: Run, batch: dict[str, Any]
) -> dict[tuple[str, int], tuple[list[Tensor], Tensor]]:
    """Return inputs and output of every module call by token, in the order in which calls ended."""
    calls: dict[tuple[str, int], tuple[list[Tensor], Tensor]] = {}
    counts: Counter[str] = Counter()
    with ExitStack() as hooks:
        for name, module in model.named_modules():

            def ended(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                out = packed.by_token(_first_tensor(output))
                if out is not None:
                    inputs = [packed.by_token(value) for value in (*args, *kwargs.values())]
                    calls[name, counts[name]] = [x for x in inputs if x is not None], out
                counts[name] += 1

            hooks.callback(module.register_forward_hook(ended, with_kwargs=True).remove)
        run(model, batch)
    return calls


def _first_tensor(output: Any) -> Any:
    """Return the output, or the first tensor in it."""
    if isinstance(output, Mapping):
        named = [output[name] for name in ("logits", "last_hidden_state") if output.get(name) is not None]
        if named:
            return named[0]
        output = list(output.values())
    if isinstance(output, tuple | list):
        return next((x for x in output if isinstance(x, Tensor) and x.ndim > 1), None)
    return output


def _finding(model: nn.Module, layer: str | None, packed: PackedBatch, moved: Tensor, limit: float) -> Finding:
    row, place = divmod(int(moved.argmax()), moved.shape[1])
    own = spans_of(np.flatnonzero(packed.numbers[row] == packed.numbers[row, place]))
    error = float(moved.max())
    evidence = (
        f"Other documents were replaced, on one device, and the one at tokens {own[0][0]}:{own[-1][1]} of row {row}"
        f" moved by {error:.1e} where rounding moves it by less than {limit:.1e}."
    )
    module, name = model.get_submodule(layer or ""), describe_module(model, layer or "")
    if layer is not None:
        same = sum(type(part) is type(module) for part in model.modules())
        evidence += f" Up to {name}{f', one of {same} of its kind,' * (same > 1)} they were apart."
    at = (moved > min(limit, error / 2)).any(0).nonzero().flatten().numpy()
    advice = (
        "Pass documents to this layer: longspan's attention, causal_conv1d, gated_delta_rule and ssd take documents, or"
        " a plan of them, on one device, too."
    )
    if type(module).__module__.startswith("transformers."):
        advice = (
            "Call model(**shard_inputs(model, batch, group)) of longspan.huggingface: it keeps documents"
            " apart, also on a group of one rank. Without Longspan: leave attention_mask out of packed batches; layers"
            " with convolutions or recurrences need seq_idx and cu_seq_lens_q, which transformers takes where"
            " causal_conv1d, flash-linear-attention or mamba_ssm are installed."
        )
    return Finding(
        "output",
        f"mixes documents, first in {name}",
        error,
        limit,
        (),
        spans_of(at),
        place,
        DOCUMENTS_LEAK,
        evidence,
        advice,
    )
