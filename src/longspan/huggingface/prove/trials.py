"""Runs of a tiny copy on one device and over simulated ranks, and how far their results are apart."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan import layouts
from longspan.errors import LongspanError
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import PACKED, read_batch, shifted_labels
from longspan.huggingface.head import OutputKind
from longspan.huggingface.mixers import is_hybrid
from longspan.huggingface.prove.batches import FIRST, TOKENS
from longspan.huggingface.rules import Form, Rules
from longspan.huggingface.sharding import Sharding, build_arguments
from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank
from longspan.verification.prover import (
    find_first_different,
    gradients,
    perturb_parameters,
    run_on_ranks,
    shared_copy,
)


class Float64Mode(TorchFunctionMode):
    """Use float64 wherever code asks for float32, except in Longspan's own code.

    Models compute norms, softmax, rotary embeddings, losses and recurrences in float32 whatever their dtype. In float64
    errors are far above rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith("longspan."):
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


# -- Trials ------------------------------------------------------------------------------------------------------------


LAYOUTS: tuple[tuple[str, int], ...] = (("zigzag", 2), ("contiguous", 3), ("striped", 2))
"""Layouts that a model is checked with, by name and number of ranks."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """The loss, logits or hidden states of all tokens (unless only the loss was computed), and gradients by name."""

    loss: float | None
    out: Tensor | None
    grads: dict[str, Tensor]
    calls: int = 0
    """How often attention was called over ranks, on rank 0."""


@dataclass(eq=False)
class Trial:
    """A model in float64, and a batch for it."""

    model: Any
    batch: dict[str, Any]
    is_wide: bool = True
    """Whether parts that the model computes in float32 are computed in float64 too."""
    hides_padding: bool = True
    """Whether outputs at padding are left out of comparisons."""

    def __post_init__(self) -> None:
        self.template = shared_copy(self.model)
        """A copy that never runs; see `run_on_ranks`."""

    @property
    def length(self) -> int:
        tokens = self.batch.get("input_ids")
        return int((self.batch["inputs_embeds"] if tokens is None else tokens).shape[1])

    def precision(self) -> AbstractContextManager[Any]:
        return Float64Mode() if self.is_wide else nullcontext()

    def one_device_batch(self) -> dict[str, Any]:
        """Return the batch for a run on one device.

        Recurrences of transformers raise an error if they get `cu_seq_lens` or `seq_idx` without the packages that
        they are for. Over ranks they never get them, and `run_documents` runs documents one by one.
        """
        left_out = PACKED if is_hybrid(self.model) else ()
        return {name: value for name, value in self.batch.items() if name not in left_out}

    @torch.no_grad()
    def forward(self, **changes: Any) -> Any:
        """Return the output on one device."""
        with self.precision():
            return self.model(**{**self.one_device_batch(), **changes})

    def run_whole(self, output_kind: OutputKind = "logits") -> RunResult:
        """Run on one device, with gradients."""
        with self.precision():
            output = self.model(**self.one_device_batch())
        return self._result(getattr(output, "loss", None), output_tensor(output) if output_kind == "logits" else None)

    def run_documents(self, edges: list[int], output_kind: OutputKind = "logits") -> RunResult:
        """Run on one device, one document after another.

        For models with recurrences: transformers lets these continue from one document to the next, Longspan does not.
        """
        by_token = {
            name: value
            for name, value in self.one_device_batch().items()
            if isinstance(value, Tensor) and value.shape[1:2] == (self.length,) and name != "labels"
        }
        with self.precision():
            parts = [
                output_tensor(self.model(**{name: value[:, start:stop] for name, value in by_token.items()}))
                for start, stop in itertools.pairwise(edges)
            ]
        out, labels = torch.cat(parts, dim=1), shifted_labels(self.batch)
        if labels is None:
            return self._result(None, out)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
        return self._result(loss, out if output_kind == "logits" else None)

    def on_rank(
        self, rules: Rules, layout: Layout, output_kind: OutputKind = "logits"
    ) -> Callable[[Any, SimulatedRank], Any]:
        """Return the step of one rank: loss, output, and the number of attention calls."""

        def run(model: Any, rank: SimulatedRank) -> tuple[Any, Any, int]:
            part = build_arguments(
                model, read_batch(self.batch), rank, rules, Sharding(layout, output_kind=output_kind)
            )
            with self.precision():
                output = model(**part)
            out = output_tensor(output) if output_kind == "logits" else None
            return getattr(output, "loss", None), out, part[NAME].calls

        return run

    def run_split(self, rules: Rules, name: str, world_size: int, output_kind: OutputKind = "logits") -> RunResult:
        """Run over simulated ranks."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        results = run_on_ranks(self.template, layout, self.on_rank(rules, layout, output_kind))
        losses, outs, calls = zip(*results, strict=True)
        loss: Any = None if losses[0] is None else sum(losses)
        out: Any = None
        if output_kind == "logits":  # after a gather every rank has the whole output
            out = layout.unshard(outs, 1) if rules.joined is None else sum(outs) / world_size
        return self._result(loss, out, calls[0])

    def first_different(self, rules: Rules, name: str, world_size: int) -> str | None:
        """Return name and class of the first module that computes something else over ranks, if one can be named."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        return find_first_different(self.model, self.template, layout, self.forward, self.on_rank(rules, layout))

    def _result(self, loss: Tensor | None, out: Tensor | None, calls: int = 0) -> RunResult:
        """Return the result with gradients of the loss and of a random projection of the output."""
        total = loss
        if out is not None:
            real = self.batch.get("attention_mask")
            if self.hides_padding and real is not None and out.ndim == 3 and out.shape[1] == self.length:
                out = torch.where(real.bool()[:, :, None], out, 0)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            total = (out.double() * weights / weights.norm()).sum() + (0 if loss is None else loss)
            out = out.detach()
        assert total is not None
        return RunResult(None if loss is None else float(loss.detach()), out, gradients(self.model, total)[0], calls)


def output_tensor(output: Any) -> Tensor:
    """Return a model's logits, or hidden states."""
    for name in ("logits", "last_hidden_state", "start_logits", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise ValueError(f"{type(output).__name__} has neither logits nor last_hidden_state")


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Use another attention inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


class RefusedError(Exception):
    """The model is not exact, or not supported; the message is the reason."""


class FailedError(RefusedError):
    """Nothing could be compared; it may work at another time or on another machine."""


def logits_of(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def first_line(error: BaseException) -> str:
    if isinstance(error, LongspanError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


# -- Differences -------------------------------------------------------------------------------------------------------


LIMIT = 1e-9
"""How far loss, outputs and gradients may be off, relative to their largest entry."""
ROUNDINGS, MOST = 16, 1e-4
"""For models that do not run in float64 throughout: this many times the effect of one rounding of the parameters to
float32 is allowed, but never more than `MOST`."""


def run_truth(trial: Trial, form: Form, output_kind: OutputKind = "logits") -> RunResult:
    """Run on one device, documents separately."""
    if form.packed and is_hybrid(trial.model):
        return trial.run_documents([0, FIRST, TOKENS], output_kind)
    return trial.run_whole(output_kind)


def is_right(trial: Trial, error: float) -> bool:
    if error <= LIMIT or trial.is_wide:
        return error <= LIMIT
    with perturb_parameters(trial.model, 2.0**-24, 3):  # models compute parts in float32
        rounded = trial.run_whole()
    return error <= min(MOST, ROUNDINGS * difference(rounded, trial.run_whole())[0])


def difference(result: RunResult, truth: RunResult) -> tuple[float, str]:
    """Return the largest difference, relative to a tensor's own largest entry, and where it is."""
    pairs = {}
    if result.out is not None and truth.out is not None:
        pairs["its output"] = result.out, truth.out
    if truth.loss is not None:
        if result.loss is None:
            return float("inf"), "its loss, which is missing,"
        pairs["its loss"] = torch.tensor(result.loss), torch.tensor(truth.loss)
    pairs |= {f"the gradient of {name}": (result.grads[name], grad) for name, grad in truth.grads.items()}
    largest = max(float(grad.abs().max()) for grad in truth.grads.values())
    worst, where = 0.0, ""
    for name, (mine, right) in pairs.items():
        if mine.shape != right.shape:
            return float("inf"), f"{name}, of shape {tuple(mine.shape)} instead of {tuple(right.shape)},"
        scale = max(float(right.abs().max()), 1e-6 * largest if "gradient" in name else 0.0, 1e-30)
        error = float((mine.double() - right.double()).abs().max()) / scale
        if not error <= worst:
            worst, where = error, name
    return worst, where
