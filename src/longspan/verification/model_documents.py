"""Find documents that leak into each other on one device, and the first module that mixes them.

In a packed batch, other documents are replaced, and a document's output must not change. If it does, every module's
output is examined, in the order in which modules end: the first whose output changes although its inputs did not is the
one that mixes documents. Tiny example: documents [a a b b] and a layer that adds the token before; with other tokens in
the first document the third output changes, so the layer is named, and none after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from longspan.errors import PlanError
from longspan.spans import Ints
from longspan.testing.modules import jittered
from longspan.training.batch import document_numbers, numbers_of, restarts
from longspan.verification.model_step import copy_in_float64
from longspan.verification.reference import ROW, unit
from longspan.verification.report import Check, Finding, Report, spans_of

CAUSE = "documents leak on one device"
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
Run = Callable[[nn.Module, dict[str, Any]], Any]
"""The user's call on one device: model and batch to the output."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A batch, the document number of each of its tokens (B, S), and which tokens are real."""

    batch: dict[str, Any]
    numbers: Ints
    real: Any

    def probes(self) -> Iterator[tuple[Any, Any]]:
        """(tokens to replace, tokens to watch): any two documents are on different sides of some probe, both ways.

        Documents differ in some bit of their numbers, so there are twice as many probes as these have bits.
        """
        for bit in range(int(self.numbers.max()).bit_length()):
            side = (self.numbers >> bit) & 1 == 0
            for replaced in (side & self.real, ~side & self.real):
                watched = self.real & ~replaced
                if replaced.any() and watched.any():
                    yield replaced, watched

    def with_others(self, replaced: Any) -> dict[str, Any]:
        """The batch with other tokens in these places."""
        name = "input_ids" if self.batch.get("input_ids") is not None else "inputs_embeds"
        tokens = self.batch[name]
        there = torch.as_tensor(replaced, device=tokens.device)
        if name == "inputs_embeds":
            return {**self.batch, name: torch.where(there[..., None], -tokens, tokens)}
        known = tokens.unique()
        others = known[(torch.searchsorted(known, tokens) + 1) % len(known)]
        return {**self.batch, name: torch.where(there, others, tokens)}


def packed(batch: Mapping[str, Any], numbers: Any = None) -> Packed | None:
    """The batch's documents as these numbers say, or the batch itself; None where every row is one document."""
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
    lowest = numbers - numbers.min()
    return Packed(dict(batch), np.broadcast_to(lowest, (rows, length)), real)


def verify_apart(model: Any, batch: Mapping[str, Any], run: Run | None, documents: Any, factor: float) -> Report:
    """See `longspan.verification.verify_documents`."""
    if not isinstance(model, nn.Module):
        raise PlanError(f"verify_documents takes a module and a batch, but {type(model).__name__} was given.")
    tokens = batch.get("input_ids") if batch.get("input_ids") is not None else batch.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2:
        raise PlanError(
            f"verify_documents takes a batch with input_ids (batch, tokens) or inputs_embeds (batch, tokens, features)."
            f" This one has {', '.join(batch) or 'nothing'}."
        )
    numbers = None if documents is None else document_numbers(documents, tokens.shape[1])
    given = packed(batch, numbers)
    if given is None:
        raise PlanError(
            "every row of the batch is one document, so none can leak into another. Give a packed batch: position_ids"
            " that start again with every document, seq_idx, cu_seq_lens_q, or documents= with their lengths."
        )
    copied, doubled, note = copy_in_float64(model, given.batch, run or _called)  # a leak stands clear of rounding there
    check, finding = leak_between(copied, replace(given, batch=doubled), run or _called, factor)
    count = sum(len(np.unique(row)) for row in given.numbers)
    subject = f"{count} documents of {type(model).__name__}"
    return Report(subject, 1, (check,), () if finding is None else (finding,), (note,) if note else ())


def _called(model: nn.Module, batch: dict[str, Any]) -> Any:
    """The model as training calls it: a cache would be of no use, and lets transformers forget about documents."""
    cached = "use_cache" in batch or not hasattr(getattr(model, "config", None), "use_cache")
    return model(**(batch if cached else {**batch, "use_cache": False}))


@torch.no_grad()
def leak_between(model: nn.Module, given: Packed, run: Run, factor: float = 1.0) -> tuple[Check, Finding | None]:
    """How far a document moves when others are replaced, and the finding if that is a leak.

    Rounding is that of float32 at least: layers may compute in it whatever the model's dtype.
    """
    small = max([unit(torch.float32), *(unit(p.dtype) for p in model.parameters() if p.is_floating_point())])
    truth = _output(given, run(model, given.batch))
    again = _output(given, run(model, given.batch))
    if not (again - truth).norm() <= 64 * small * truth.norm() + 1e-30:
        raise PlanError(
            "the model gives other numbers when it runs again, so nothing can be compared. Turn dropout off"
            " (model.eval(), or p = 0), or fix the seed."
        )
    limit = factor * _limit(truth, [_output(given, out) for out in _rounded(model, given, run, small)], small)
    farthest = 0.0
    for replaced, watched in given.probes():
        after = _output(given, run(model, given.with_others(replaced)))
        moved = _moved(after, truth, watched)
        farthest = max(farthest, float(moved.max()))
        if not farthest <= limit:
            layer = _first_to_leak(model, given, run, (replaced, watched), small, factor)
            return Check("documents", farthest, limit), _finding(model, layer, given, moved, limit)
    return Check("documents", farthest, limit), None


def _rounded(model: nn.Module, given: Packed, run: Run, small: float) -> Iterator[Any]:
    """Outputs with parameters off by one rounding, two of them."""
    for number in range(2):
        with jittered(model, small, number):
            yield run(model, given.batch)


def _limit(truth: Tensor, played: list[Tensor], small: float) -> float:
    """How far rounding may move a token. The smaller of the samples: in the other an expert may have changed hands."""
    far = min(float((sample - truth).norm(dim=2).max()) for sample in played)
    return ROW * far + 8 * small * float(truth.norm(dim=2).max())


def _moved(after: Tensor, truth: Tensor, watched: Any) -> Tensor:
    """By how much each token moved (B, S), 0 where nobody looks."""
    far = (after - truth).norm(dim=2).nan_to_num(torch.inf, posinf=torch.inf)
    return torch.where(torch.as_tensor(watched), far, torch.zeros_like(far))


# -- Which module ------------------------------------------------------------------------------------------------------


class Trace:
    """What modules were given and gave, token by token, in the order in which they ended."""

    def __init__(self, model: nn.Module, given: Packed) -> None:
        self.model, self.given = model, given
        self.calls: dict[tuple[str, int], tuple[list[Tensor], Tensor]] = {}
        self._times: Counter[str] = Counter()

    @torch.no_grad()
    def of(self, run: Run, batch: dict[str, Any]) -> Trace:
        """Itself, after this run."""
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                handle = module.register_forward_hook(partial(self._ended, name), with_kwargs=True)  # type: ignore[arg-type]
                hooks.callback(handle.remove)
            run(self.model, batch)
        return self

    def _ended(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        out = _by_token(self.given, _first(output))
        if out is not None:
            inputs = [x for value in (*args, *kwargs.values()) if (x := _by_token(self.given, value)) is not None]
            self.calls[name, self._times[name]] = inputs, out
        self._times[name] += 1


def _first_to_leak(
    model: nn.Module, given: Packed, run: Run, probe: tuple[Any, Any], small: float, factor: float
) -> str | None:
    """The name of the first module whose output moves, while what it was given does not; None if none can be named."""
    replaced, watched = probe
    truth, after = Trace(model, given).of(run, given.batch), Trace(model, given).of(run, given.with_others(replaced))
    with jittered(model, small, 0):
        played = Trace(model, given).of(run, given.batch)

    def moves(right: Tensor, found: Tensor, rounded: Tensor) -> bool:
        if not right.shape == found.shape == rounded.shape:
            return True
        limit = factor * _limit(right, [rounded], small)
        return not float(_moved(found, right, watched).max()) <= limit

    for key, (inputs, out) in truth.calls.items():
        if key in after.calls and key in played.calls:
            others = after.calls[key], played.calls[key]
            if moves(out, others[0][1], others[1][1]) and not any(map(moves, inputs, others[0][0], others[1][0])):
                return key[0]
    return None


def _first(output: Any) -> Any:
    """The output, or the first tensor in it."""
    if isinstance(output, Mapping):
        named = [output[name] for name in ("logits", "last_hidden_state") if output.get(name) is not None]
        return named[0] if named else next((x for x in output.values() if isinstance(x, Tensor) and x.ndim > 1), None)
    if isinstance(output, tuple | list):
        return next((x for x in output if isinstance(x, Tensor) and x.ndim > 1), None)
    return output


def _by_token(given: Packed, x: Any) -> Tensor | None:
    """Numbers as (B, S, features) in float64, or None for what is not about tokens."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return None
    rows, length = given.numbers.shape
    if x.ndim >= 2 and (tuple(x.shape[:2]) == (rows, length) or x.shape[0] == rows * length):
        tokens = x.reshape(rows, length, -1)
    elif x.ndim == 3 and (x.shape[0], x.shape[2]) == (rows, length):
        tokens = x.transpose(1, 2)
    else:
        return None
    return tokens.detach().double().cpu()


def _output(given: Packed, output: Any) -> Tensor:
    found = _first(output)
    tokens = _by_token(given, found)
    if tokens is None:
        kind = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)[:200]
        raise PlanError(
            f"documents are compared token by token, but the model returned {kind} for (batch, tokens) ="
            f" {given.numbers.shape}. Return logits, (batch, tokens, vocabulary)."
        )
    return tokens


# -- The report --------------------------------------------------------------------------------------------------------


def _finding(model: nn.Module, layer: str | None, given: Packed, moved: Tensor, limit: float) -> Finding:
    row, place = divmod(int(moved.argmax()), moved.shape[1])
    own = np.flatnonzero(given.numbers[row] == given.numbers[row, place])
    start, stop = spans_of(own)[0][0], spans_of(own)[-1][1]
    error = float(moved.max())
    evidence = (
        f"Other documents were replaced, on one device, and the one at tokens {start}:{stop} of row {row} moved by"
        f" {error:.1e} where rounding moves it by less than {limit:.1e}."
    )
    module = model if not layer else model.get_submodule(layer)
    name = f"{layer} ({type(module).__name__})" if layer else f"the model ({type(module).__name__})"
    if layer is not None:
        alike = sum(type(part) is type(module) for part in model.modules())
        evidence += f" Up to {name}{f', one of {alike} of its kind,' * (alike > 1)} they were apart."
    at = (moved > min(limit, error / 2)).any(0).nonzero().flatten().numpy()
    return Finding(
        "output", f"mixes documents, first in {name}", error, limit, (), spans_of(at), place, CAUSE, evidence,
        _advice(module),
    )  # fmt: skip


def _advice(module: nn.Module) -> str:
    if type(module).__module__.startswith("transformers."):
        return (
            "Call model(**shard_inputs(model, batch, group)) of longspan.huggingface: it keeps documents"
            " apart, also on a group of one rank. Without Longspan: leave attention_mask out of packed batches; layers"
            " with convolutions or recurrences must be given seq_idx and cu_seq_lens_q, which transformers takes where"
            " causal_conv1d, flash-linear-attention or mamba_ssm are installed."
        )
    return (
        "Tell this layer where documents begin: longspan's attention, causal_conv1d, gated_delta_rule and ssd take"
        " documents, or a plan made of them, on one device, too."
    )
