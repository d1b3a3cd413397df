"""Run a tiny copy of a model on one device and over simulated ranks, on random batches of the user's form."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
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
from longspan.run.simulated import SimulatedRank
from longspan.verification.prover import find_first_different, gradients, jittered, run_on_ranks, shared_copy


class Wide(TorchFunctionMode):
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


# -- Forms of batches, and a small random batch of a form --------------------------------------------------------------


TOKENS = 43
"""A prime, longer than windows and chunks of a tiny copy, and no other size in it: a dim of this length is tokens."""
FIRST = 19
"""The first document of a packed row, or where padding begins or ends."""
FLAGS = ("output_router_logits",)
ENDS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class Form:
    """The properties of a batch that matter, without its values."""

    padding: str = ""
    """"", "right", "left" where any row has padding in front, or "between" where any has it between real tokens."""
    packed: str = ""
    """"", or the argument that tells where documents begin: "position_ids", "cu_seq_lens_q", "seq_idx"."""
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


def detect_form(read: Reading, config: Any) -> Form:
    """Return the form of a user's batch."""
    batch = read.batch
    stated = next((name for name in PACKED if batch.get(name) is not None), "")
    flags = [n for n in FLAGS if (getattr(config, n, False) if batch.get(n) is None else batch.get(n))]
    others = sorted([name for name in (*BY_TOKEN, *ENDS, *SEEN) if batch.get(name) is not None] + flags)
    return Form(
        padding=_padding(read.padding),
        packed=(stated or "position_ids") if read.documents is not None else "",
        positions=batch.get("position_ids") is not None,
        labels=any(batch.get(name) is not None for name in ("labels", "shift_labels")),
        embeds=batch.get("input_ids") is None,
        others=tuple(others),
    )


def _padding(real: NDArray[np.bool_] | None) -> str:
    """Return where rows have padding.

    >>> [_padding(np.array([row], dtype=bool)) for row in ([1, 1], [1, 0], [0, 1, 0], [0, 0], [1, 0, 1])]
    ['', 'right', 'left', 'left', 'between']
    """
    if real is None or real.all():
        return ""
    return "between" if is_between(real) else "right" if bool(real[:, 0].all()) else "left"


def random_batch(form: Form, model: Any, rows: int = 2) -> dict[str, Any]:
    """Return a random batch of this form."""
    draw = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    table = model.get_input_embeddings()
    sizes = [int(getattr(config, "vocab_size", 0) or 0), int(getattr(table, "num_embeddings", 0) or 0)]
    vocabulary = min((size for size in sizes if size), default=2)
    special = special_tokens(model.config)
    allowed = torch.tensor([n for n in range(vocabulary) if n not in special])
    ids = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    padding_id = getattr(config, "pad_token_id", None)
    places = iter((7, FIRST + 4, 12, FIRST + 9))
    for name in ("eos_token_id", "bos_token_id"):  # twice each: a model may look for them
        value = getattr(config, name, None)
        number = value[0] if isinstance(value, list) and value else value
        if isinstance(number, int) and 0 <= number <= int(allowed.max()) and number != padding_id:
            ids[:, next(places)] = ids[:, next(places)] = number
    batch: dict[str, Any] = {"input_ids": ids}
    if form.embeds:
        batch = {"inputs_embeds": torch.randn(rows, TOKENS, table.weight.shape[1], generator=draw, dtype=torch.float64)}
    if form.padding:
        _pad(batch, form.padding, padding_id)
    # Documents and positions.
    if form.packed.startswith("cu_seq_lens"):
        ends = torch.tensor([0, FIRST, TOKENS], dtype=torch.int32)
        batch.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=TOKENS - FIRST, max_length_k=TOKENS - FIRST)
    if form.packed == "seq_idx":
        batch["seq_idx"] = (torch.arange(TOKENS) >= FIRST).int().expand(rows, -1)
    if form.packed or form.positions:
        inside = torch.cat((torch.arange(FIRST), torch.arange(TOKENS - FIRST)))
        batch["position_ids"] = (inside if form.packed else torch.arange(TOKENS)).expand(rows, -1).clone()
    if "pixel_values" in form.others:
        _draw_images(batch, form, model, draw)
    for name in form.others:
        if name in batch or name in SEEN:
            continue
        if name in BY_TOKEN:
            kinds = max(1, int(getattr(config, "type_vocab_size", 2) or 2))
            batch[name] = torch.randint(0, min(2, kinds), (rows, TOKENS), generator=draw)
        else:
            batch[name] = torch.randint(0, FIRST, (rows,), generator=draw) if name in ENDS else True
    return batch


def _draw_images(batch: dict[str, Any], form: Form, model: Any, draw: torch.Generator) -> None:
    """Put one image into the first row: 4 x 4 patches, or as many as the configuration has."""
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


def with_labels(
    batch: dict[str, Any], logits: Tensor | None, seed: int = 1, at_padding: bool = False
) -> dict[str, Any]:
    """Return the batch with labels for logits of this shape: one per token (also at padding, if set), or per row."""
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
        return Wide() if self.is_wide else nullcontext()

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

    def run_whole(self, wants: str = LOGITS) -> RunResult:
        """Run on one device, with gradients."""
        with self.precision():
            output = self.model(**self.one_device_batch())
        return self._result(getattr(output, "loss", None), output_tensor(output) if wants == LOGITS else None)

    def run_documents(self, edges: list[int], wants: str = LOGITS) -> RunResult:
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
        return self._result(loss, out if wants == LOGITS else None)

    def run_rounded(self) -> RunResult:
        """Run on one device, with every parameter off by up to one rounding of float32: models compute parts in it."""
        with jittered(self.model, 2.0**-24, 3):
            return self.run_whole()

    def on_rank(self, rules: Rules, layout: Layout, wants: str = LOGITS) -> Callable[[Any, SimulatedRank], Any]:
        """Return the step of one rank: loss, output, and the number of attention calls."""

        def run(model: Any, rank: SimulatedRank) -> tuple[Any, Any, int]:
            part = sharded(model, read_batch(self.batch), rank, rules, Sharding(layout, wants=wants))
            with self.precision():
                output = model(**part)
            out = output_tensor(output) if wants == LOGITS else None
            return getattr(output, "loss", None), out, part[NAME].calls

        return run

    def run_split(self, rules: Rules, name: str, world_size: int, wants: str = LOGITS) -> RunResult:
        """Run over simulated ranks."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        results = run_on_ranks(self.template, layout, self.on_rank(rules, layout, wants))
        losses, outs, calls = zip(*results, strict=True)
        loss: Any = None if losses[0] is None else sum(losses)
        out: Any = None
        if wants == LOGITS:  # joined: every rank has the whole output
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
