"""Hooks of a model that runs over ranks: the running sequence, rotary embeddings, losses, and sharding inside of it.

Some models receive whole sequences and are sharded inside: heads that pool, and models with images. The inputs of the
backbone (the part with the layers) become this rank's rows; behind it, rows of all ranks are gathered for the head.

    ids of 8 tokens -> embeddings, images -> [rows of this rank] -> layers -> [rows of all ranks] -> head
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache, partial, update_wrapper
from typing import Any

import torch
from torch import Tensor, nn

from longspan.derivatives import FirstDerivative
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import LABELS, PACKED, check_arguments
from longspan.huggingface.head import replace_values
from longspan.huggingface.masks import current, enter, leave
from longspan.huggingface.mixers import text_part
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import has_hook, modules_of
from longspan.run.simulated import SimulatedRank
from longspan.tile import accumulation_dtype
from longspan.training import BatchError
from longspan.training.groups import all_summed
from longspan.training.tokens import gather_outputs


def _register(
    module: nn.Module, pre: Callable[..., Any] | None, post: Callable[..., Any] | None, **options: Any
) -> None:
    """Register a forward pre-hook with keywords and a forward hook, unless the module has them already."""
    name = pre or post
    if name is None or has_hook(module, getattr(name, "func", name)):
        return
    if pre is not None:
        module.register_forward_pre_hook(pre, with_kwargs=True)
    if post is not None:
        module.register_forward_hook(post, **options)


# -- Rotary embeddings -------------------------------------------------------------------------------------------------
# Some depend on the largest position ("dynamic", "longrope"): it is that of the sequence, not of a rank's part.
# Transformers takes the largest of the positions in the call. So one more is added, the sequence's largest, and its
# output is dropped again.


def watch_rotary(model: nn.Module) -> bool:
    """Return whether rotary embeddings of the model depend on the largest position, and register hooks on those."""
    depends = False
    for module in modules_of(model):
        kind = getattr(module, "rope_type", None)
        kinds = kind.values() if isinstance(kind, dict) else [kind]
        if any(isinstance(name, str) and ("dynamic" in name or name == "longrope") for name in kinds):
            depends = True
            _register(module, _add_largest, _drop_largest)
    return depends


@torch.compiler.disable
def _add_largest(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = current()
    if sequence is None:
        return None
    ids = kwargs.get("position_ids", args[1] if len(args) > 1 else None)
    if not isinstance(ids, Tensor) or sequence.largest is None:
        raise BatchError(
            f"{type(module).__name__} depends on the largest position, but got no position_ids. Use a fixed rope_type"
            f" (default, linear, yarn, llama3)."
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


# -- Losses ------------------------------------------------------------------------------------------------------------
# Losses that a model does not compute right on a rank's part are computed here, as shares that add up.
# - Most models divide by the labels of all ranks, which are an argument. Those that take a mean of their own labels
#   receive none: cross-entropy of their logits is divided by all labels.
# - A loss of whole sequences (classes, answers) is the same on all ranks, and each keeps one part in as many of it.
# - A loss that balances experts is a product of means over all tokens, f_e * p_e for every expert. Counts f_e have no
#   gradient, so it is linear in p_e: with f_e of all ranks, each rank's share is f_e times its own part of p_e.
#   Two ranks, two experts, f = (3/4, 1/4) of four tokens: rank 0 with probabilities (.9, .1), (.8, .2) has the share
#   2 * (3/4 * 1.7/4 + 1/4 * .3/4), and rank 1 that of its own two tokens.


BALANCING = "load_balancing_loss_func"


def with_loss(output: Any, sequence: Any) -> Any:
    """Return the model's output with this rank's share of the loss, or None if it has that already."""
    rule, task, labels = sequence.rules.loss, sequence.at_head, sequence.labels
    if task is not None:
        done = task.finish(output, rule == "own")
        if done is not None:
            return done
    if rule != "pooled" and (rule not in ("shifted", "in place") or labels is None):
        return None
    if isinstance(output, tuple):
        raise BatchError("the model's output must have names, but got a tuple. Leave out return_dict=False.")
    if rule == "pooled":
        loss = getattr(output, "loss", None)
        return None if loss is None else replace_values(output, loss=loss / sequence.group.size())
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor) or logits.shape[:2] != labels.shape:
        raise BatchError(
            f"the model must return logits for labels of shape {tuple(labels.shape)}, but got none in"
            f" {type(output).__name__}. Take labels out of the batch, or use a model with a head for tokens."
        )
    total = torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).to(accumulation_dtype(logits.dtype)),
        labels.reshape(-1).to(logits.device),
        reduction="sum",
    )
    return replace_values(output, loss=total / sequence.num_items.to(total.device))


class BalancingLoss:
    """`load_balancing_loss_func` of a modeling file, over all tokens if a model is running on a part of them."""

    def __init__(self, original: Any) -> None:
        self.original = original
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence = current()
        return self.original(*args, **kwargs) if sequence is None else balancing_loss(sequence, *args, **kwargs)


def route_losses(modules: Iterable[Any]) -> None:
    """Replace, once, the function that balances experts in modeling files."""
    for module in modules:
        original = vars(module).get(BALANCING)
        if original is None or isinstance(original, BalancingLoss):
            continue
        if list(inspect.signature(original).parameters) == ["gate_logits", "num_experts", "top_k", "attention_mask"]:
            setattr(module, BALANCING, BalancingLoss(original))


def balancing_loss(
    sequence: Any, gate_logits: Any, num_experts: Any = None, top_k: int = 2, attention_mask: Tensor | None = None
) -> Any:
    """Return this rank's share of `load_balancing_loss_func`: one all-reduce of counts."""
    if gate_logits is None or not isinstance(gate_logits, tuple):
        return 0
    device, num_rows = gate_logits[0].device, gate_logits[0].shape[0]
    # 1 for real tokens of this rank, 0 for padding and for slots without a token
    sequences = sequence.whole
    if attention_mask is not None and tuple(attention_mask.shape) != (sequences.batch, sequences.seq_len):
        raise BatchError(
            f"the mask of a router's loss must have shape {(sequences.batch, sequences.seq_len)}, but got"
            f" {tuple(attention_mask.shape)}."
        )
    real = torch.ones(sequences.batch, sequences.seq_len)
    if sequences.padding is not None:
        real = torch.from_numpy(sequences.padding).float()
    weights = sequence.layout.shard(real, sequence.rank, 1).reshape(-1).to(device)
    if weights.shape[0] != num_rows:
        raise BatchError(f"a router's loss must have {weights.shape[0]} tokens on this rank, but got {num_rows}.")
    counts = torch.zeros(int(num_experts) + 1, dtype=torch.float64, device=device)
    shares = torch.zeros(int(num_experts), dtype=accumulation_dtype(gate_logits[0].dtype), device=device)
    for logits in gate_logits:
        routed = torch.nn.functional.softmax(logits.to(device), dim=-1)
        chosen = routed.detach().topk(top_k, dim=-1).indices
        counts.scatter_add_(0, chosen.reshape(-1), weights.repeat_interleave(top_k).double())
        counts[-1] += weights.sum()
        shares = shares + (routed.to(shares.dtype) * weights[:, None]).sum(dim=0)
    all_summed(counts, sequence.group)
    tokens = counts[-1]
    return ((counts[:-1] / tokens / tokens).to(shares.dtype) * shares).sum() * num_experts


# -- The running sequence ----------------------------------------------------------------------------------------------
# Hooks on models that receive `longspan=`: they set the running sequence, and every layer must have seen it. A model
# that does not pass it down attends to each rank's own tokens, and calls none of our code. So the model itself is
# checked after every forward pass, in whatever loop it runs.


@lru_cache(maxsize=1024)
def accepts_kwarg(kind: type, name: str) -> bool:
    """Return whether forward of this class accepts an argument of this name, or any keyword."""
    return _accepts(kind.forward, name)


def _accepts(function: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def listen_to_layers(model: nn.Module, names: Iterable[str]) -> None:
    """Register hooks that record which of these layers is running, so that an error can name it."""
    for name in names:
        _register(model.get_submodule(name), partial(_enter, name), _leave, with_kwargs=True, always_call=True)


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
    """Register the hooks that check forward passes. Several modules of one model: wrappers call one or another."""
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
    if getattr(running, "at_head", None) is not None and running.rules.loss == "own" and module is running.model():
        running.at_head.begin(kwargs)
    if not isinstance(sequence, ShardedSequence):
        return None
    if sequence.depth == 0:
        check_arguments(kwargs)
        labels = LABELS if sequence.rules.joined is None else ()  # labels of a model that joins are of whole sequences
        for name in (*PACKED, *labels):
            if kwargs.get(name) is not None and name not in sequence.arguments:
                raise BatchError(
                    f"{name}= must be in the batch of shard_inputs, for whole sequences, but it was passed to the model"
                    f" next to the inputs of shard_inputs, and would apply to this rank's tokens alone."
                )
        sequence.is_cut, sequence.is_joined = sequence.rules.body is None, False
        if sequence.at_head is not None:
            sequence.at_head.values = None  # of a forward pass that raised
    sequence.calls_before[id(module)] = sequence.calls
    sequence.depth += 1
    sequence.seen.clear()
    # A module may have a forward of its own: `torch.compile(model)` does, and the forward of its class, which is never
    # called, takes no keywords.
    forward = vars(module).get("forward")
    accepts = accepts_kwarg(type(module), NAME) if forward is None else _accepts(forward, NAME)
    if sequence.rules.handed == "mask" or not accepts:
        return args, {name: value for name, value in kwargs.items() if name != NAME}
    return None


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


# -- Vision encoders and backbones -------------------------------------------------------------------------------------


def vision_encoders(model: nn.Module) -> list[nn.Module]:
    """Return the models for images and sound inside of this one, and models inside of those."""
    from transformers import PreTrainedModel

    text = text_part(model)
    inside = {id(part) for part in modules_of(text)}
    models = [
        module for module in modules_of(model) if isinstance(module, PreTrainedModel) and id(module) not in inside
    ]
    return [module for module in models if not any(part is text for part in modules_of(module))]


def hide_sequence(encoders: Iterable[nn.Module]) -> None:
    """Register hooks that hide the sequence from encoders of images and sound: each rank runs them whole."""
    for module in encoders:
        _register(module, _hide, _show, always_call=True)


@torch.compiler.disable
def _hide(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    enter(None)
    return args, {name: value for name, value in kwargs.items() if name != NAME}


@torch.compiler.disable
def _show(module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG001
    leave()


POOLER = "pooler"
"""Tokens are gathered before a module of this name, and after any other."""
PLACED = ("visual_pos_masks", "deepstack_visual_embeds")


def watch_body(model: nn.Module, body: str, joined: str | None) -> None:
    """Register the hooks that shard the inputs of the backbone, and gather the outputs of `joined` (or the inputs of a
    pooler)."""
    _register(model.get_submodule(body), _shard_before, None)
    if joined is None:
        return
    if joined.endswith(POOLER):
        _register(model.get_submodule(joined), _gather_before, None)
    else:
        _register(model.get_submodule(joined), None, _gather_after)


@torch.compiler.disable
def _shard_before(module: nn.Module, args: Any, kwargs: Any) -> Any:
    sequence = current()
    if sequence is None or sequence.is_cut:
        return None
    names = list(inspect.signature(module.forward).parameters)
    inputs = {**dict(zip(names, args, strict=False)), **kwargs}
    part = {name: _shard_input(name, value, sequence) for name, value in inputs.items() if name not in PLACED}
    places, embeds = (inputs.get(name) for name in PLACED)
    if isinstance(places, Tensor):  # which tokens are of images, and what early layers add to them (Qwen3-VL)
        number = torch.cumsum(places.reshape(-1).long(), 0).reshape(places.shape) - 1
        mine = sequence.layout.shard(places, sequence.rank, 1)
        rows = sequence.layout.shard(number, sequence.rank, 1)[mine]
        part[PLACED[0]] = mine
        part[PLACED[1]] = None if embeds is None else [e[rows.to(e.device)] for e in embeds]
    if "position_ids" in names and part.get("position_ids") is None and sequence.position_ids is not None:
        part["position_ids"] = sequence.position_ids
    if isinstance(part.get("position_ids"), Tensor) and isinstance(inputs.get("position_ids"), Tensor):
        sequence.largest = inputs["position_ids"].max()
    sequence.is_cut = True
    return (), part


def _shard_input(name: str, value: Any, sequence: Any) -> Any:
    """Return this rank's rows of an argument of the backbone."""
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask":
        return None  # the sequence has the padding
    dims = {(known, ndim): dim for known, ndim, dim in sequence.rules.cuts}
    dim = dims.get((name, value.ndim))
    if dim is not None:
        return sequence.layout.shard(value, sequence.rank, dim)
    if sequence.whole.seq_len in value.shape and dims:
        raise BatchError(
            f"{name} of shape {tuple(value.shape)} reached the model's backbone, may have a dim of tokens, and was not"
            f" there when the model was checked. Leave it out, or use one device."
        )
    return value


@torch.compiler.disable
def _gather_after(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if sequence is None or not sequence.is_cut or sequence.is_joined or sequence.rules.joined is None:
        return None
    sequence.is_joined = True  # is_cut stays: layers that are recomputed in backward are sharded
    if isinstance(output, Tensor):
        return gather_all_tokens(output, sequence)
    if isinstance(output, tuple):
        return (gather_all_tokens(output[0], sequence), *output[1:])
    return replace_values(output, last_hidden_state=gather_all_tokens(output.last_hidden_state, sequence))


@torch.compiler.disable
def _gather_before(module: nn.Module, args: Any, kwargs: Any) -> Any:  # noqa: ARG001
    sequence = current()
    if sequence is None or not sequence.is_cut:
        return None
    return (gather_all_tokens(args[0], sequence), *args[1:]), kwargs


def gather_all_tokens(x: Tensor, sequence: Any) -> Tensor:
    """Return rows of all ranks, (B, S, features), on every rank; backward sums the gradients of all ranks."""
    layout, group = sequence.layout, sequence.group
    if isinstance(group, SimulatedRank):
        return group.meet("a gather of tokens", x, lambda parts: [layout.unshard(parts, 1)] * len(parts))
    return _GatherAllTokens.apply(x, layout, group)  # type: ignore[return-value]


class _GatherAllTokens(FirstDerivative):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Any, group: Any) -> Tensor:
        ctx.layout, ctx.group = layout, group
        whole = gather_outputs(x.detach(), layout, group, 1)
        assert whole is not None
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = all_summed(grads[0].clone().contiguous(), ctx.group)
        return ctx.layout.shard(total, ctx.group.rank(), 1), None, None
