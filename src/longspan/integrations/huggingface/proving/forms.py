"""What kind of batch a model is used with, and a small random one of the same kind for its tiny copy."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.integrations.huggingface.batches import BY_TOKEN, IGNORE, PACKED, SEEN, Reading, is_between
from longspan.integrations.huggingface.proving.tiny import special_tokens

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
