"""Hooks of a model that runs over ranks: what layers must see, rotary embeddings, losses, and where sequences are cut.

Some models receive whole sequences and are sharded inside: heads that pool, and models with images. The inputs of the
backbone (the part with the layers) become this rank's rows; behind it, rows of all ranks are gathered for the head.

    ids of 8 tokens -> embeddings, images -> [rows of this rank] -> layers -> [rows of all ranks] -> head
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import LABELS, PACKED, check_arguments
from longspan.huggingface.head import ended, replaced
from longspan.huggingface.masks import LAST_FORWARD, LayerMask, current, enter, leave
from longspan.huggingface.mixers import text_part
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import IN_PLACE, MASK, OWN, POOLED, SHIFTED, has_hook
from longspan.run.simulated import SimulatedRank
from longspan.tile import wide
from longspan.training import BatchError
from longspan.training.groups import all_summed
from longspan.training.tokens import gather_outputs

# Rotary embeddings whose frequencies depend on the largest position ("dynamic", "longrope"): it is that of the
# sequence, not of a rank's part.
# Transformers looks for it among the positions that it is given. So one more is given, the sequence's largest, and what
# comes out for it is dropped again.


def moving(model: nn.Module) -> list[nn.Module]:
    """The model's rotary embeddings that depend on the largest position."""
    return [module for module in model.modules() if _is_moving(getattr(module, "rope_type", None))]


def _is_moving(kind: Any) -> bool:
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in kinds)


def watch_rotary(model: nn.Module) -> bool:
    """Whether there are any; from now on they are told the largest position of the sequence."""
    found = moving(model)
    for module in found:
        if not has_hook(module, _add_largest):
            module.register_forward_pre_hook(_add_largest, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_drop_largest)  # type: ignore[arg-type]
    return bool(found)


@torch.compiler.disable
def _add_largest(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = current()
    if sequence is None:
        return None
    ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(ids, Tensor) or sequence.largest is None:
        raise BatchError(
            f"{type(module).__name__} depends on the largest position, and it was called without position_ids. Use a"
            f" fixed rope_type (default, linear, yarn, llama3)."
        )
    column = torch.as_tensor(sequence.largest, device=ids.device, dtype=ids.dtype).expand(*ids.shape[:-1], 1)
    more = torch.cat((ids, column), dim=-1)
    if "position_ids" in kwargs:
        return args, {**kwargs, "position_ids": more}
    return (args[0], more, *args[2:]), kwargs


@torch.compiler.disable
def _drop_largest(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
    if current() is None:
        return None
    if isinstance(output, Tensor):
        return output[..., :-1, :]
    return tuple(part[..., :-1, :] for part in output)


# Losses that a model does not compute right on a rank's part: they are computed here, as shares that add up.
# - Most models divide by the labels of all ranks, which they are told. Those that take a mean of their own labels are
#   given none: cross-entropy of their logits is divided by all labels.
# - A loss of whole sequences (classes, answers) is the same on all ranks, and each keeps one part in as many of it.
# - A loss that balances experts is a product of means over all tokens, f_e * p_e for every expert. Counts f_e have no
#   gradient, so it is linear in what does: with f_e of all ranks, each rank's share is f_e times its own part of p_e.
#   Two ranks, two experts, f = (3/4, 1/4) of four tokens: rank 0 with probabilities (.9, .1), (.8, .2) has the share
#   2 * (3/4 * 1.7/4 + 1/4 * .3/4), and rank 1 that of its own two tokens.


BALANCING = "load_balancing_loss_func"


def with_loss(output: Any, sequence: Any) -> Any:
    """The model's output, with this rank's share of the loss; None where it has that already."""
    rule, work = sequence.rules.loss, sequence.at_head
    if work is not None:
        done = ended(output, work, rule == OWN)
        if done is not None:
            return done
    if rule == POOLED:
        loss = _item(output, "loss")
        return None if loss is None else replaced(output, loss=loss / sequence.group.size())
    if rule not in (SHIFTED, IN_PLACE) or sequence.labels is None:
        return None
    logits = _item(output, "logits")
    if not isinstance(logits, Tensor) or logits.shape[:2] != sequence.labels.shape:
        raise BatchError(
            f"labels of shape {tuple(sequence.labels.shape)} were given, but the model returned no logits for them"
            f" ({type(output).__name__}). Take labels out of the batch, or use a model with a head for tokens."
        )
    total = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype)),
        sequence.labels.reshape(-1).to(logits.device),
        reduction="sum",
    )
    return replaced(output, loss=total / sequence.num_items.to(total.device))


def _item(output: Any, name: str) -> Any:
    if isinstance(output, tuple):
        raise BatchError(
            f"the model returned a tuple, in which its {name} cannot be found. Leave out return_dict=False."
        )
    return getattr(output, name, None)


class BalancingLoss:
    """`load_balancing_loss_func` of a modeling file, over all tokens where a model is running on a part of them."""

    def __init__(self, original: Any) -> None:
        self.original = original
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence = current()
        return self.original(*args, **kwargs) if sequence is None else balancing_loss(sequence, *args, **kwargs)


def route_losses(model: nn.Module) -> None:
    """Replaces, once, the functions that balance experts where the model's classes call them by name."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        original = vars(module).get(BALANCING)
        if original is not None and not isinstance(original, BalancingLoss) and _is_known(original):
            setattr(module, BALANCING, BalancingLoss(original))


def route_balancing() -> None:
    """The same for Mixtral's function, which TRL calls for models of all kinds."""
    from transformers.models.mixtral import modeling_mixtral

    original = vars(modeling_mixtral)[BALANCING]
    if not isinstance(original, BalancingLoss) and _is_known(original):
        setattr(modeling_mixtral, BALANCING, BalancingLoss(original))


def _is_known(function: Any) -> bool:
    return list(inspect.signature(function).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]


def balancing_loss(
    sequence: Any, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Any:
    """This rank's share of `load_balancing_loss_func`: one all-reduce of counts."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    weights = _weights(sequence, attention_mask, gate_logits[0].shape[0], device)
    counts = torch.zeros(int(num_experts) + 1, dtype=torch.float64, device=device)
    shares = torch.zeros(int(num_experts), dtype=wide(gate_logits[0].dtype), device=device)
    for logits in gate_logits:
        routed = torch.nn.functional.softmax(logits.to(device), dim=-1)
        chosen = routed.detach().topk(top_k, dim=-1).indices
        counts.scatter_add_(0, chosen.reshape(-1), weights.repeat_interleave(top_k).double())
        counts[-1] += weights.sum()
        shares = shares + (routed.to(shares.dtype) * weights[:, None]).sum(dim=0)
    all_summed(counts, sequence.group)
    tokens = counts[-1]
    return ((counts[:-1] / tokens / tokens).to(shares.dtype) * shares).sum() * num_experts


def _weights(sequence: Any, attention_mask: Tensor | None, rows: int, device: Any) -> Tensor:
    """1 for real tokens of this rank, 0 for padding; what pads a rank's part has no token."""
    whole, layout, rank = sequence.whole, sequence.layout, sequence.rank
    real = torch.ones(whole.batch, whole.seq_len)
    if whole.padding is not None:
        real = torch.from_numpy(whole.padding).float()
    if attention_mask is not None and tuple(attention_mask.shape) != (whole.batch, whole.seq_len):
        raise BatchError(f"a router's loss was given a mask of shape {tuple(attention_mask.shape)} on a rank's part.")
    weights = layout.shard(real, rank, 1).reshape(-1).to(device)
    if weights.shape[0] != rows:
        raise BatchError(f"a router's loss was given {rows} tokens, but this rank holds {weights.shape[0]}.")
    return weights


# Hooks on models that were given `longspan=`: they know which sequence is running, and every layer must have seen it.
# A model that does not hand it down attends to each rank's own tokens, and nothing of ours is called. So the model is
# asked itself, after every forward pass, in whatever loop it runs.


@lru_cache(maxsize=1024)
def takes(kind: type, name: str) -> bool:
    """Whether forward of these modules takes an argument of this name, among keywords at least."""
    return _accepts(kind.forward, name)


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _accepts_sequence(module: nn.Module) -> bool:
    """Return whether the module's forward accepts `longspan=`.

    A module may have a forward of its own that is not its class's: `torch.compile(model)` is such a module, and the
    forward of its class, which is never called, takes no keywords.
    """
    own = vars(module).get("forward")
    return takes(type(module), NAME) if own is None else _accepts(own, NAME)


def listen_to_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Lets the sequence know which of these layers is running, so that what was not seen can be named."""
    for name in names:
        layer = model.get_submodule(name)
        if not has_hook(layer, _enter):
            layer.register_forward_pre_hook(partial(_enter, name), with_kwargs=True)  # type: ignore[arg-type]
            layer.register_forward_hook(_leave, with_kwargs=True, always_call=True)  # type: ignore[arg-type]


@torch.compiler.disable
def _enter(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME) or current()
    if isinstance(sequence, ShardedSequence):
        sequence.inside.append(name)


@torch.compiler.disable
def _leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG001
    sequence = kwargs.get(NAME) or current()
    if isinstance(sequence, ShardedSequence) and sequence.inside:
        sequence.inside.pop()


def listen(*modules: Any) -> None:
    """Checks these modules' forward passes from now on. Several of one model: wrappers call one or another of them."""
    for module in modules:
        if isinstance(module, nn.Module) and not has_hook(module, _begin):
            module.register_forward_pre_hook(_begin, prepend=True, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_check, with_kwargs=True)  # type: ignore[arg-type]
            module.register_forward_hook(_end, always_call=True)  # type: ignore[arg-type]


@torch.compiler.disable
def _begin(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = kwargs.get(NAME)
    running = sequence if sequence is not None else current()
    enter(running)
    LAST_FORWARD.checks_hooks = getattr(running, "checks_hooks", False)
    if getattr(running, "at_head", None) is not None and running.rules.loss == OWN and module is running.model():
        running.at_head.begin(kwargs)
    if not isinstance(sequence, ShardedSequence):
        return None
    if sequence.depth == 0:
        check_arguments(kwargs)
        _check_beside(kwargs, sequence)
        sequence.is_cut, sequence.is_joined = sequence.rules.body is None, False
        if sequence.at_head is not None:
            sequence.at_head.values = None  # of a forward pass that did not come to its end
    sequence.calls_before[id(module)] = sequence.calls
    sequence.depth += 1
    sequence.seen.clear()
    if sequence.rules.handed == MASK or not _accepts_sequence(module):
        return args, {name: value for name, value in kwargs.items() if name != NAME}
    return None


def _check_beside(given: Mapping[str, Any], sequence: ShardedSequence) -> None:
    """Refuses what `shard_inputs` reads out of whole sequences, if it was not given to it."""
    labels = LABELS if sequence.rules.joined is None else ()  # behind whole tokens they are of whole sequences, too
    for name in (*PACKED, *labels):
        if given.get(name) is not None and name not in sequence.arguments:
            raise BatchError(
                f"{name}= was given to the model beside the inputs that shard_inputs has made, and would be about this"
                f" rank's tokens alone. Put it, for whole sequences, into the batch that shard_inputs is given."
            )


@torch.compiler.disable
def _check(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if not isinstance(sequence, ShardedSequence) or id(module) not in sequence.calls_before:
        return None
    sequence.check_seen(type(module).__name__, sequence.calls_before[id(module)])
    return with_loss(output, sequence) if sequence.depth == 1 else None


@torch.compiler.disable
def _end(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    sequence = current()
    leave()
    if isinstance(sequence, ShardedSequence) and sequence.calls_before.pop(id(module), None) is not None:
        sequence.depth -= 1


# -- Backbones ---------------------------------------------------------------------------------------------------------


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
