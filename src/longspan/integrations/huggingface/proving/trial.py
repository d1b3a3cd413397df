"""A tiny copy of a model, run whole on one device and split over simulated ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from longspan import layouts
from longspan.execution.simulated import SimulatedRank, simulate
from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.batches import PACKED, read_batch, shifted_labels
from longspan.integrations.huggingface.hooks.head import LOGITS
from longspan.integrations.huggingface.hooks.mixers import is_hybrid
from longspan.integrations.huggingface.proving.wide import Wide
from longspan.integrations.huggingface.rules import Rules
from longspan.integrations.huggingface.sharding import Sharding, sharded
from longspan.layouts import Layout
from longspan.testing.modules import jittered, shared_copy

LAYOUTS: tuple[tuple[str, int], ...] = (("zigzag", 2), ("contiguous", 3), ("striped", 2))
"""Layouts that a model is tried with, by name and number of ranks."""


@dataclass(frozen=True, eq=False)
class Ran:
    """What a run gave: the loss, logits or hidden states of all tokens (unless the loss alone was wanted), and
    gradients by name."""

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
    """Whether what the model computes in float32 is computed in float64 too."""
    weights: dict[tuple[int, ...], Tensor] = field(default_factory=dict)
    hides_padding: bool = True
    """Whether outputs at padding are left out of comparisons."""

    def __post_init__(self) -> None:
        self.unused = shared_copy(self.model)
        """A copy that never runs: what modules remember from one run to the next is not copied."""

    def precision(self) -> AbstractContextManager[Any]:
        return Wide() if self.is_wide else nullcontext()

    def weights_of(self, shape: tuple[int, ...]) -> Tensor:
        """Random weights of outputs: they make one number of all."""
        if shape not in self.weights:
            made = torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            self.weights[shape] = made / made.norm()
        return self.weights[shape]

    def one_device_batch(self) -> dict[str, Any]:
        """Return the batch for a run on one device.

        Recurrences of transformers raise an error if they get `cu_seq_lens` or `seq_idx` without the packages that
        they are for. Over ranks they never get them, and `apart` runs documents one by one.
        """
        left_out = PACKED if is_hybrid(self.model) else ()
        return {name: value for name, value in self.batch.items() if name not in left_out}

    def whole(self, wants: str = LOGITS) -> Ran:
        """On one device, with gradients."""
        with self.precision():
            output = self.model(**self.one_device_batch())
        return self._ran(getattr(output, "loss", None), result(output) if wants == LOGITS else None)

    def apart(self, edges: list[int], wants: str = LOGITS) -> Ran:
        """On one device, documents one after another. For models with recurrences: transformers lets these go on from
        one document to the next, and Longspan does not."""
        batch = self.one_device_batch()
        kept = {name: v for name, v in batch.items() if isinstance(v, Tensor) and v.shape[1:2] == (self.length,)}
        kept.pop("labels", None)
        with self.precision():
            parts = [
                result(self.model(**{name: value[:, start:stop] for name, value in kept.items()}))
                for start, stop in itertools.pairwise(edges)
            ]
        out, labels = torch.cat(parts, dim=1), shifted_labels(self.batch)
        if labels is None:
            return self._ran(None, out)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
        return self._ran(loss, out if wants == LOGITS else None)

    def rounded(self) -> Ran:
        """On one device, with every parameter off by up to one rounding of float32: models compute parts in it."""
        with jittered(self.model, 2.0**-24, 3):
            return self.whole()

    def _ran(self, loss: Tensor | None, out: Tensor | None, calls: int = 0) -> Ran:
        if out is None:
            assert loss is not None
            return Ran(float(loss.detach()), None, gradients(self.model, loss), calls)
        real = self.batch.get("attention_mask")
        if self.hides_padding and real is not None and out.ndim == 3 and out.shape[1] == self.length:
            out = torch.where(real.bool()[:, :, None], out, 0)
        total = (out.double() * self.weights_of(tuple(out.shape))).sum() + (0 if loss is None else loss)
        return Ran(None if loss is None else float(loss.detach()), out.detach(), gradients(self.model, total), calls)

    @torch.no_grad()
    def forward(self, **changes: Any) -> Any:
        """The output on one device."""
        with self.precision():
            return self.model(**{**self.one_device_batch(), **changes})

    def split(
        self, rules: Rules, name: str, world_size: int, watch: Callable[..., Any] | None = None, wants: str = LOGITS
    ) -> Ran:
        """Over simulated ranks. Every rank has a copy of the model with the same parameters, as it has a process."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        copies = [shared_copy(self.unused) for _ in range(world_size)]

        def work(rank: SimulatedRank) -> tuple[Any, Any, int]:
            mine = copies[rank.rank()]
            if watch is not None:
                watch(mine, rank.rank())
            part = sharded(mine, read_batch(self.batch), rank, rules, Sharding(layout, wants=wants))
            with self.precision():
                output = mine(**part)
            out = result(output) if wants == LOGITS else None
            return getattr(output, "loss", None), out, part[NAME].calls

        found = simulate(world_size, work)
        losses, outs = [loss for loss, _, _ in found], [out for _, out, _ in found]
        loss: Any = None if losses[0] is None else sum(losses)
        if wants != LOGITS:
            return self._ran(loss, None, found[0][2])
        out: Any = (
            layout.unshard(outs, 1) if rules.joined is None else sum(outs) / world_size
        )  # joined: all have all of it
        return self._ran(loss, out, found[0][2])

    @property
    def length(self) -> int:
        tokens = self.batch.get("input_ids")
        return int((self.batch["inputs_embeds"] if tokens is None else tokens).shape[1])


def result(output: Any) -> Tensor:
    """What a model is for: its logits, or hidden states."""
    for name in ("logits", "last_hidden_state", "start_logits", "prediction_logits"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    raise ValueError(f"{type(output).__name__} has neither logits nor last_hidden_state")


def gradients(model: nn.Module, total: Tensor) -> dict[str, Tensor]:
    """Of all parameters, 0 where nothing reaches them."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(named.items(), found, strict=True)}


@contextmanager
def implementation(model: Any, name: str) -> Iterator[None]:
    """The model with another attention inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
