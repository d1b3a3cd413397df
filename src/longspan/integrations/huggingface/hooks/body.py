"""Models that are given whole sequences, and are cut inside: heads that pool, and models that see images.

The model's body, the part with the layers, is given this rank's rows of what reaches its door. A head that computes
with whole sequences finds them put together again behind the body, on every rank.

    ids of 8 tokens -> embeddings, images -> [door: rows of this rank] -> layers -> [rows of all ranks] -> head
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from longspan.execution.simulated import SimulatedRank
from longspan.integrations.huggingface.attention import NAME
from longspan.integrations.huggingface.hooks.current import current, enter, leave
from longspan.integrations.huggingface.hooks.mixers import text_part
from longspan.integrations.huggingface.hooks.placed import has_hook
from longspan.integrations.huggingface.masks import LayerMask
from longspan.training import BatchError
from longspan.training.groups import all_summed
from longspan.training.relayouts import gather_outputs

POOLER = "pooler"
"""A module of this name is given all tokens; any other gives all tokens on."""
PLACED = ("visual_pos_masks", "deepstack_visual_embeds")


def watch_body(model: nn.Module, body: str, joined: str | None) -> None:
    """From now on the body is given a rank's rows, and what leaves `joined` (or enters a pooler) is whole."""
    module = model.get_submodule(body)
    if not has_hook(module, _cut):
        module.register_forward_pre_hook(_cut, with_kwargs=True)  # type: ignore[arg-type]
    if joined is None:
        return
    module = model.get_submodule(joined)
    if joined.endswith(POOLER):
        if not has_hook(module, _join_before):
            module.register_forward_pre_hook(_join_before)  # type: ignore[arg-type]
    elif not has_hook(module, _join):
        module.register_forward_hook(_join)  # type: ignore[arg-type]


def towers(model: nn.Module) -> list[nn.Module]:
    """Models for images and sound inside of this one, and models inside of those."""
    from transformers import PreTrainedModel

    text = text_part(model)
    inside = {id(part) for part in text.modules()}
    models = [module for module in model.modules() if isinstance(module, PreTrainedModel) and id(module) not in inside]
    return [module for module in models if not any(part is text for part in module.modules())]


def shield(model: nn.Module) -> None:
    """From now on models for images and sound inside of this one do not hear of other ranks: each sees all it is given,
    on every rank."""
    for module in towers(model):
        if not has_hook(module, _hide):
            module.register_forward_pre_hook(_hide, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_show, always_call=True)  # type: ignore[arg-type]


@torch.compiler.disable
def _hide(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    enter(None)
    return args, {name: value for name, value in kwargs.items() if name != NAME}


@torch.compiler.disable
def _show(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    leave()


@torch.compiler.disable
def _cut(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = current()
    if sequence is None or sequence.is_cut:
        return None
    names = list(inspect.signature(module.forward).parameters)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    visual = given.get(PLACED[0])
    part = {name: _part_of(name, value, sequence) for name, value in given.items() if name not in PLACED}
    if isinstance(visual, Tensor):
        part.update(_visual(visual, given.get(PLACED[1]), sequence))
    if "position_ids" in names and part.get("position_ids") is None and sequence.position_ids is not None:
        part["position_ids"] = sequence.position_ids
    if isinstance(part.get("position_ids"), Tensor) and isinstance(given.get("position_ids"), Tensor):
        sequence.largest = given["position_ids"].max()
    sequence.is_cut = True
    return (), part


def _part_of(name: str, value: Any, sequence: Any) -> Any:
    """This rank's rows of an argument of the body."""
    if name == "attention_mask" and isinstance(value, Tensor):
        return None  # padding is known to the sequence
    if isinstance(value, LayerMask | dict) or name == NAME or not isinstance(value, Tensor):
        return value
    dims = {(known, ndim): dim for known, ndim, dim in sequence.rules.cuts}
    dim = dims.get((name, value.ndim))
    if dim is not None:
        return sequence.layout.shard(value, sequence.rank, dim)
    if sequence.whole.seq_len in value.shape and dims:
        raise BatchError(
            f"the body of the model was given {name} of shape {tuple(value.shape)}, which was not there when the model"
            f" was proved, and it may be about tokens. Leave it out, or use one device."
        )
    return value


def _visual(places: Tensor, embeds: Any, sequence: Any) -> dict[str, Any]:
    """Which of the rank's tokens are of images, and what the vision tower adds to them in early layers (Qwen3-VL)."""
    number = torch.cumsum(places.reshape(-1).long(), 0).reshape(places.shape) - 1
    mine = sequence.layout.shard(places, sequence.rank, 1)
    rows = sequence.layout.shard(number, sequence.rank, 1)[mine]
    return {PLACED[0]: mine, PLACED[1]: None if embeds is None else [e[rows.to(e.device)] for e in embeds]}


@torch.compiler.disable
def _join(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if sequence is None or not sequence.is_cut or sequence.is_joined or sequence.rules.joined is None:
        return None
    sequence.is_joined = True  # it stays cut: layers that are computed again in backward are
    if isinstance(output, Tensor):
        return joined(output, sequence)
    if isinstance(output, tuple):
        return (joined(output[0], sequence), *output[1:])
    hidden = joined(output.last_hidden_state, sequence)
    return type(output)(**{**output, "last_hidden_state": hidden})


@torch.compiler.disable
def _join_before(module: nn.Module, args: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if sequence is None or not sequence.is_cut:
        return None
    return (joined(args[0], sequence), *args[1:])


def joined(x: Tensor, sequence: Any) -> Tensor:
    """Rows of all ranks, (B, S, features), on every rank; gradients of all ranks come back."""
    layout, group = sequence.layout, sequence.group
    if isinstance(group, SimulatedRank):
        return group.meet("joining tokens", x, lambda parts: [layout.unshard(parts, 1)] * len(parts))
    return _Joined.apply(x, layout, group)  # type: ignore[return-value]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Any, group: Any) -> Tensor:
        ctx.layout, ctx.group = layout, group
        whole = gather_outputs(x.detach(), layout, group, 1)
        assert whole is not None
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        total = all_summed(grads[0].clone().contiguous(), ctx.group)
        return ctx.layout.shard(total, ctx.group.rank(), 1), None, None
