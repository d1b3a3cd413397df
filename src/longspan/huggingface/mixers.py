"""Token mixers of transformers other than attention: convolutions and recurrences, which modeling files call by name.

A modeling file calls functions of its own module (`causal_conv1d_fn`, `mamba2_chunk_scan`, ...), by bare name and with
the keywords of `model(...)`. So the function of that name is replaced, once, by one that looks for the keyword
`longspan`: with it the call runs over ranks, without it the original function runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import lru_cache, update_wrapper
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longspan.api import causal_conv1d, conv_plan
from longspan.errors import KernelError
from longspan.huggingface.attention import NAME
from longspan.huggingface.masks import runs
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import check_hybrid, method_code, modules_of, named_modules
from longspan.recurrences import gated_delta_rule, scan_plan, ssd
from longspan.training import BatchError

ATTENTION, CONVOLUTION, RECURRENCE = "attention", "convolution", "recurrence"
STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states")


class Mixer(NamedTuple):
    """A function that modeling files call by name."""

    kind: str | None
    """The kind of mixer that must run in a layer that calls it; None if another function may be called instead."""
    run: Callable[..., Any] | None
    """The function over ranks, whose first argument is the sequence; None if there is none."""


# -- Functions over ranks ----------------------------------------------------------------------------------------------


def _convolution(
    sequence: ShardedSequence,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """Compute `causal_conv1d_fn` of (B, D, S): in the dtype of weights, any activation after it."""
    from transformers.activations import ACT2FN

    x = hidden_states.transpose(1, 2).to(weight.dtype)
    dtype, device = x.dtype, x.device.type
    if torch.is_autocast_enabled(device) and dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
    key = (CONVOLUTION, x.shape[2], weight.shape[1], dtype)
    plan = sequence.plan_of(
        key, lambda: conv_plan(document_lengths(sequence), sequence.layout, channels=x.shape[2], width=weight.shape[1],
                               dtype=dtype, batch=sequence.whole.batch),
    )  # fmt: skip
    out = causal_conv1d(x, weight, bias, plan=plan, group=sequence.group).transpose(1, 2)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def _delta_rule(
    sequence: ShardedSequence,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute `torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention` of (B, S, H, D)."""
    tokens = query, key, value, g, beta
    plan = _scan_plan(sequence, (value.shape[2], key.shape[3], value.shape[3]), "matrix", tokens)
    out = gated_delta_rule(*tokens, plan=plan, group=sequence.group, l2norm=use_qk_l2norm_in_kernel)
    return out.to(query.dtype), None


def _ssd(
    sequence: ShardedSequence,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    **options: Any,
) -> Tensor:
    """Compute `mamba2_chunk_scan` of (B, S, H, P)."""
    if options.get("z") is not None:
        raise KernelError("mamba2_chunk_scan over ranks does not support z=, a gate. Use this model on one device.")
    plan = _scan_plan(sequence, (hidden_states.shape[2], B.shape[3], hidden_states.shape[3]), "scalar",
                      (hidden_states, dt, B, C))  # fmt: skip
    out = ssd(
        hidden_states, dt, A, B, C, D=options.get("D"), dt_bias=options.get("dt_bias"),
        dt_softplus=bool(options.get("dt_softplus", False)), dt_limit=options.get("dt_limit", (0.0, float("inf"))),
        plan=plan, group=sequence.group,
    )  # fmt: skip
    return out.to(hidden_states.dtype)


def _not_fused(sequence: ShardedSequence, *_: Any, **__: Any) -> None:
    """Return None from `mamba2_split_conv1d_scan_combined`: layers then call convolution and recurrence separately."""


MIXERS: Mapping[str, Mixer] = {
    "causal_conv1d_fn": Mixer(CONVOLUTION, _convolution),
    "torch_chunk_gated_delta_rule": Mixer(RECURRENCE, _delta_rule),
    "chunk_kimi_delta_attention": Mixer(RECURRENCE, _delta_rule),
    "mamba2_chunk_scan": Mixer(RECURRENCE, _ssd),
    "mamba2_split_conv1d_scan_combined": Mixer(None, _not_fused),
    "mamba_selective_scan": Mixer(RECURRENCE, None),
    "mamba_inner_fn": Mixer(RECURRENCE, None),
    "ALL_ATTENTION_FUNCTIONS": Mixer(ATTENTION, None),
}


def document_lengths(sequence: ShardedSequence) -> list[NDArray[Any]]:
    """Return the lengths of the documents of every batch row, or of all rows if they are equal. Padding is a document
    of its own: nothing enters a row's first token, and nothing leaves its last one."""
    numbers, padding = sequence.whole.documents, sequence.whole.padding
    rows = np.zeros((1, sequence.whole.seq_len), dtype=np.int64) if numbers is None else np.asarray(numbers)
    if padding is not None:
        rows = rows * 2 + np.broadcast_to(padding, (len(padding), rows.shape[1]))
    return [np.diff(runs(row)[0]) for row in rows]


def _scan_plan(sequence: ShardedSequence, state: tuple[int, int, int], maps: str, tokens: tuple[Tensor, ...]) -> Any:
    dtype = "float64" if any(t.dtype == torch.float64 for t in tokens) else "float32"
    heads, keys, values = state
    token_bytes = sum(t[:1, :1].numel() * t.element_size() for t in tokens)
    token_bytes += heads * values * tokens[0].element_size()
    return sequence.plan_of(
        (RECURRENCE, state, maps, dtype, token_bytes),
        lambda: scan_plan(document_lengths(sequence), sequence.layout, heads=heads, keys=keys, values=values, maps=maps,
                          dtype=dtype, batch=sequence.whole.batch, token_bytes=token_bytes),
    )  # fmt: skip


# -- Replacing functions of modeling files -----------------------------------------------------------------------------


class MixerCall:
    """A function of a modeling file, which runs over ranks if it receives `longspan=`."""

    def __init__(self, name: str, original: Any, mixer: Mixer) -> None:
        self.name, self.original, self.mixer = name, original, mixer
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence = kwargs.pop(NAME, None)
        if sequence is None:
            return self.original(*args, **kwargs)
        return _run_over_ranks(self.name, self.mixer, sequence, args, kwargs)


@torch.compiler.disable(reason="convolutions and recurrences over ranks run between compiled graphs")
def _run_over_ranks(name: str, mixer: Mixer, sequence: ShardedSequence, args: Any, kwargs: dict[str, Any]) -> Any:
    states = [key for key in STATES if kwargs.pop(key, None) not in (None, False)]
    if states:
        raise KernelError(
            f"{name} does not support {', '.join(states)}= over ranks, where there is no cache. Pass use_cache=False,"
            f" and generate on one device."
        )
    if mixer.kind is not None:
        sequence.note(mixer.kind)
    assert mixer.run is not None
    return mixer.run(sequence, *args, **kwargs)


def route(model: nn.Module) -> None:
    """Replace, once, the functions that the model's classes call by name."""
    for module in {sys.modules[type(part).__module__] for part in modules_of(model)}:
        if not module.__name__.startswith("transformers.models."):
            continue
        for name, mixer in MIXERS.items():
            if mixer.run is not None and hasattr(module, name) and not isinstance(getattr(module, name), MixerCall):
                setattr(module, name, MixerCall(name, getattr(module, name), mixer))


# -- Mixers of a model -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def mixes(kind: type) -> frozenset[str]:
    """Return the names of `MIXERS` that the methods of a class of a modeling file mention."""

    def collect_names(code: CodeType) -> set[str]:
        inner = [collect_names(const) for const in code.co_consts if isinstance(const, CodeType)]
        return set(code.co_names).intersection(MIXERS).union(*inner)

    names: set[str] = set()
    for part in kind.__mro__:
        if part.__module__.startswith("transformers.models."):
            for method in vars(part).values():
                code = method_code(method)
                names |= set() if code is None else collect_names(code)
    return frozenset(names)


def is_hybrid(model: nn.Module) -> bool:
    """Return whether any layer calls other mixers than attention."""
    return any(mixes(kind) - {"ALL_ATTENTION_FUNCTIONS"} for kind in set(map(type, modules_of(model))))


def uses_attention(model: nn.Module) -> bool:
    """Return whether any layer calls attention by transformers' interface."""
    return any("ALL_ATTENTION_FUNCTIONS" in mixes(kind) for kind in set(map(type, modules_of(model))))


def check_mixers(model: nn.Module) -> None:
    """Raise for layers that call functions which Longspan does not compute over ranks."""
    check_hybrid(model)
    for name, part in named_modules(model):
        unknown = [n for n in sorted(mixes(type(part))) if MIXERS[n].run is None and MIXERS[n].kind != ATTENTION]
        if unknown:
            raise BatchError(
                f"{name} ({type(part).__name__}) calls {', '.join(unknown)}, a recurrence that Longspan does not"
                f" compute over ranks: each rank would start from an empty state. Use this model on one device."
            )


def text_part(model: Any) -> nn.Module:
    """Return the part of a model that holds its layers of text."""
    part = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(part, nn.Module) and any(mixes(type(module)) for module in modules_of(part)):
        return part
    return model  # heads for masked tokens call a matrix their decoder


def needs(model: nn.Module) -> dict[str, tuple[str, frozenset[str]]]:
    """Return, for every layer of text that mixes tokens, by name: its class, and the kinds of mixers that must run in a
    forward pass."""
    layers: dict[str, tuple[str, frozenset[str]]] = {}
    text = {id(part) for part in modules_of(text_part(model))}
    for name, part in named_modules(model):
        kinds = frozenset(kind for n in mixes(type(part)) if (kind := MIXERS[n].kind) is not None)
        if kinds and id(part) in text:
            layers[name] = type(part).__name__, kinds
    return layers
