"""Plans of all attentions of a model, and which recipes there are between the plainest and the thriftiest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from longspan import masks
from longspan.api import plan
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.schedules.cost.machine import Machine
from longspan.schedules.plan import Plan
from longspan.sizing.memory import AttentionBytes, TrainingStep
from longspan.sizing.modules import Heads, ModelSizes
from longspan.sizing.recipe import Recipe
from longspan.sizing.seconds import AttentionSeconds

CHUNKS = 8


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Arguments of `longspan.plan` that all attentions of a model share."""

    scheme: str = "auto"
    machine: Machine | None = None
    keep: bool = False
    fetch_bytes: int | None = None
    batch: int = 1
    dtype: str = "bfloat16"


def mask_for(mask: Mask, heads: Heads) -> Mask:
    """What these heads see of what the documents allow."""
    return mask if heads.window is None else mask & masks.sliding_window(heads.window)


def widest(sizes: ModelSizes, mask: Mask) -> Mask:
    """The mask that the layout is balanced for: that of the attentions that see most."""
    heads = max(sizes.attentions, key=lambda one: 1 << 60 if one.window is None else one.window, default=None)
    return mask if heads is None else mask_for(mask, heads)


def attention_plans(sizes: ModelSizes, mask: Mask, layout: Layout, options: PlanOptions) -> dict[Heads, Plan]:
    """A plan for each size of attention that the model has, over one layout."""
    return {
        heads: plan(
            mask_for(mask, heads), layout, q_heads=heads.q_heads, kv_heads=heads.kv_heads, head_dim=heads.head_dim,
            v_head_dim=heads.v_head_dim, dtype=options.dtype, batch=options.batch, scheme=options.scheme,
            machine=options.machine, keep=options.keep, fetch_bytes=options.fetch_bytes,
        )
        for heads in sizes.attentions
    }  # fmt: skip


def attention_seconds(plans: Mapping[Heads, Plan]) -> dict[Heads, AttentionSeconds]:
    """How long each size of attention takes, by its plan."""
    found = {}
    for heads, one in plans.items():
        chosen = next(reason for reason in one.reasons if reason.chosen)
        flop = 2.0 * (heads.head_dim + heads.v_head_dim) * float(one.scheme.work.mean())
        found[heads] = AttentionSeconds(chosen.forward_seconds, chosen.backward_seconds, flop)
    return found


def training_step(
    sizes: ModelSizes, layout: Layout, plans: Mapping[Heads, Plan], batch: int, recipe: Recipe, data_parallel: int = 1
) -> TrainingStep:
    """What is needed to know what the step takes, on the rank with most tokens; FSDP is over the ranks of all
    sequences."""
    found = {}
    for heads, one in plans.items():
        chosen = next(reason for reason in one.reasons if reason.chosen)
        found[heads] = AttentionBytes(chosen.peak_bytes, chosen.workspace_bytes)
    slots = layout.local_len or int(layout.num_tokens.max())
    return TrainingStep(sizes, slots * batch, layout.world_size * data_parallel, found, recipe)


def recipes(given: Recipe) -> list[Recipe]:
    """From what takes most to what takes least, in the order in which one would switch things on; and what was given.

    >>> for recipe in recipes(Recipe()):
    ...     print(recipe.words)
    no checkpointing, whole logits
    no checkpointing
    checkpointing
    checkpointing, MLP in 8 chunks
    checkpointing, offload
    checkpointing, offload, MLP in 8 chunks
    """
    plain = replace(given, checkpointing=False, offload=False, mlp_chunks=1, logits=True)
    without = replace(plain, logits=False)
    again = replace(without, checkpointing=True)
    chunked = replace(again, mlp_chunks=given.mlp_chunks if given.mlp_chunks > 1 else CHUNKS)
    found = [plain, without, again, chunked, replace(again, offload=True), replace(chunked, offload=True)]
    return found if given in found else [*found, given]
