"""Run a tiny copy of a model whole on one device and sharded over simulated ranks; forms of batches to try."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan import layouts
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import BY_TOKEN, IGNORE, PACKED, SEEN, Reading, is_between, read_batch, shifted_labels
from longspan.huggingface.head import LOGITS
from longspan.huggingface.mixers import is_hybrid
from longspan.huggingface.sharding import Sharding, sharded
from longspan.huggingface.structure import Rules
from longspan.huggingface.tiny import special_tokens
from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank, simulate
from longspan.testing.modules import jittered, shared_copy

# Models compute parts in float32 whatever their dtype: norms, softmax, rotary embeddings, losses, recurrences. A proof
# has them in float64, so that what is wrong stands clear of what is rounded.


OURS = "longspan."


class Wide(TorchFunctionMode):
    """Inside, whoever asks for float32 gets float64; Longspan's own code gets what it asks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith(OURS):
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


# What kind of batch a model is used with, and a small random one of the same kind for its tiny copy.


TOKENS = 43
"""A prime, longer than windows and chunks of a tiny copy, and no other size in it: a dim of this length is tokens."""
FIRST = 19
"""The first document of a packed row, or where padding begins or ends."""
FLAGS = ("output_router_logits",)
ENDS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class Form:
    """What matters about a batch, but for its numbers."""

    padding: str = ""
    """"", "right", "left" where any row has padding in front, or "between" where any has it between real tokens."""
    packed: str = ""
    """"", or what says where documents begin: "position_ids", "cu_seq_lens_q", "seq_idx"."""
    positions: bool = False
    """Whether there are position_ids."""
    labels: bool = True
    embeds: bool = False
    others: tuple[str, ...] = ()
    """Further arguments of tokens, and flags that are set."""

    def __str__(self) -> str:
        kinds = [f"padded ({self.padding})"] * bool(self.padding) + ["packed"] * bool(self.packed)
        return ", ".join([*(kinds or ["plain"]), *self.others, *(["without labels"] * (not self.labels))])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "others": list(self.others)}


def form_of(read: Reading, config: Any) -> Form:
    """The form of a user's batch."""
    batch = read.batch
    stated = next((name for name in PACKED if batch.get(name) is not None), "")
    packed = (stated or "position_ids") if read.documents is not None else ""
    flags = [n for n in FLAGS if (getattr(config, n, False) if batch.get(n) is None else batch.get(n))]
    others = sorted([name for name in (*BY_TOKEN, *ENDS, *SEEN) if batch.get(name) is not None] + flags)
    labels = any(batch.get(name) is not None for name in ("labels", "shift_labels"))
    return Form(
        _padding(read.padding),
        packed,
        batch.get("position_ids") is not None,
        labels,
        batch.get("input_ids") is None,
        tuple(others),
    )


def _padding(real: NDArray[np.bool_] | None) -> str:
    """Return where rows have padding.

    >>> [_padding(np.array([row], dtype=bool)) for row in ([1, 1], [1, 0], [0, 1, 0], [0, 0], [1, 0, 1])]
    ['', 'right', 'left', 'left', 'between']
    """
    if real is None or real.all():
        return ""
    return "between" if is_between(real) else "right" if bool(real[:, 0].all()) else "left"


def drawn(form: Form, model: Any, rows: int = 2) -> dict[str, Any]:
    """A random batch of this form."""
    draw = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    special = special_tokens(model.config)
    allowed = torch.tensor([n for n in range(_vocabulary(model, config)) if n not in special])
    ids = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    for number, place in zip(_ends(config, allowed), (7, FIRST + 4, 12, FIRST + 9), strict=False):
        ids[:, place] = number
    batch: dict[str, Any] = {"input_ids": ids}
    if form.embeds:
        width = model.get_input_embeddings().weight.shape[1]
        batch = {"inputs_embeds": torch.randn(rows, TOKENS, width, generator=draw, dtype=torch.float64)}
    if form.padding:
        _pad(batch, form.padding, getattr(config, "pad_token_id", None))
    _place(batch, form, rows)
    if "pixel_values" in form.others:
        _draw_images(batch, form, model, draw)
    for name in form.others:
        if name in batch or name in SEEN:
            continue
        if name in BY_TOKEN:
            kinds = max(1, int(getattr(config, "type_vocab_size", 2) or 2))
            batch[name] = torch.randint(0, min(2, kinds), (rows, TOKENS), generator=draw)
        elif name in ENDS:
            batch[name] = torch.randint(0, FIRST, (rows,), generator=draw)
        else:
            batch[name] = True
    return batch


def _draw_images(batch: dict[str, Any], form: Form, model: Any, draw: torch.Generator) -> None:
    """One image in the first row: 4 x 4 patches, or as many as the configuration says."""
    vision, place = model.config.vision_config, model.config.image_token_id
    patch = int(vision.patch_size)
    if "image_grid_thw" in form.others:
        depth = int(getattr(vision, "temporal_patch_size", 1)) * int(getattr(vision, "in_channels", 3)) * patch * patch
        batch["pixel_values"] = torch.randn(16, depth, generator=draw, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        count = 16 // int(getattr(vision, "spatial_merge_size", 1)) ** 2
    else:
        side = int(getattr(vision, "image_size", 4 * patch))
        batch["pixel_values"] = torch.randn(1, 3, side, side, generator=draw, dtype=torch.float64)
        count = int(getattr(model.config, "mm_tokens_per_image", (side // patch) ** 2))
    batch["input_ids"][0, FIRST : FIRST + count] = place
    for name in BY_TOKEN:
        if name in form.others:
            batch[name] = (batch["input_ids"] == place).long()


def _ends(config: Any, allowed: Tensor) -> list[int]:
    """Tokens at which texts end and begin, twice: a model may look for them."""
    found: list[int] = []
    for name in ("eos_token_id", "bos_token_id"):
        value = getattr(config, name, None)
        number = value[0] if isinstance(value, list) and value else value
        if (
            isinstance(number, int)
            and 0 <= number <= int(allowed.max())
            and number != getattr(config, "pad_token_id", None)
        ):
            found += [number, number]
    return found


def _vocabulary(model: Any, config: Any) -> int:
    table = model.get_input_embeddings()
    sizes = [int(getattr(config, "vocab_size", 0) or 0), int(getattr(table, "num_embeddings", 0) or 0)]
    return min(size for size in sizes if size) if any(sizes) else 2


def _pad(batch: dict[str, Any], where: str, padding_id: Any) -> None:
    rows = next(iter(batch.values())).shape[0]
    mask = torch.ones(rows, TOKENS, dtype=torch.long)
    mask[0, FIRST + 11 :] = 0  # one row has none
    if where != "right":
        mask = mask.flip(1)
        mask[0, -4:] = 0  # rows with padding in front may have it at the end, too
    if where == "between":
        mask[0, FIRST : FIRST + 5] = 0
    batch["attention_mask"] = mask
    if "input_ids" in batch and isinstance(padding_id, int) and padding_id >= 0:
        batch["input_ids"] = torch.where(mask.bool(), batch["input_ids"], padding_id)


def _place(batch: dict[str, Any], form: Form, rows: int) -> None:
    """Documents and positions."""
    inside = torch.cat((torch.arange(FIRST), torch.arange(TOKENS - FIRST)))
    counted = inside if form.packed else torch.arange(TOKENS)
    if form.packed.startswith("cu_seq_lens"):
        ends = torch.tensor([0, FIRST, TOKENS], dtype=torch.int32)
        batch.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=TOKENS - FIRST, max_length_k=TOKENS - FIRST)
    if form.packed == "seq_idx":
        batch["seq_idx"] = (torch.arange(TOKENS) >= FIRST).int().expand(rows, -1)
    if form.packed or form.positions:
        batch["position_ids"] = counted.expand(rows, -1).clone()


def with_labels(
    batch: dict[str, Any], logits: Tensor | None, seed: int = 1, at_padding: bool = False
) -> dict[str, Any]:
    """The batch with labels for logits of this shape: one a token (at padding, if wanted, too), or one a row."""
    if logits is None or not logits.is_floating_point():
        return batch
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=draw)
    if logits.ndim == 2 and logits.shape[-1] == 1:
        return {**batch, "labels": torch.randn(logits.shape[0], generator=draw, dtype=logits.dtype)}
    if logits.ndim == 3:
        labels[torch.rand(labels.shape, generator=draw) < 0.2] = IGNORE
        mask = batch.get("attention_mask")
        if mask is not None and not at_padding:
            before = torch.cat((mask[:, :1] * 0, mask[:, :-1]), dim=1)
            labels = labels.masked_fill((mask == 0) | (before == 0), IGNORE)
    return {**batch, "labels": labels}


# -- Trials ------------------------------------------------------------------------------------------------------------


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
