"""Small random batches of a form, for tiny copies of models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longspan.huggingface.batches import BY_TOKEN, IGNORE, IMAGE_INPUTS
from longspan.huggingface.prove.tiny import special_tokens
from longspan.huggingface.rules import SPAN_LABELS, Form

TOKENS = 43
"""A prime, longer than windows and chunks of a tiny copy, and no other size in it: a dim of this length is tokens."""
FIRST = 19
"""The first document of a packed row, or where padding begins or ends."""


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
        if name in batch or name in IMAGE_INPUTS:
            continue
        if name in BY_TOKEN:
            kinds = max(1, int(getattr(config, "type_vocab_size", 2) or 2))
            batch[name] = torch.randint(0, min(2, kinds), (rows, TOKENS), generator=draw)
        else:
            batch[name] = torch.randint(0, FIRST, (rows,), generator=draw) if name in SPAN_LABELS else True
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
