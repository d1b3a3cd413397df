"""Token mixers of transformers beside attention: convolutions and recurrences, which modeling files call by name.

A modeling file calls functions of its own module (`causal_conv1d_fn`, `mamba2_chunk_scan`, ...), by bare name and with
the keywords that `model(...)` was given. So the function of that name is replaced, once, by one that looks for the
keyword `longspan`: with it the call goes over ranks, without it to what was there before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, update_wrapper
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from longspan.api import causal_conv1d, conv_plan
from longspan.errors import KernelError
from longspan.huggingface.attention import NAME
from longspan.huggingface.masks import runs
from longspan.huggingface.sequence import ShardedSequence
from longspan.huggingface.structure import check_hybrid, method_code
from longspan.recurrences import gated_delta_rule, scan_plan, ssd
from longspan.training import BatchError

ATTENTION, CONVOLUTION, RECURRENCE = "attention", "convolution", "recurrence"
STATES = ("initial_state", "initial_states", "output_final_state", "return_final_states")


@dataclass(frozen=True, eq=False)
class Mixer:
    """A function that modeling files call by name."""

    kind: str | None
    """What must be seen of a layer that calls it; None where another function may take its place."""
    run: Callable[..., Any] | None
    """What it computes over ranks, given the sequence; None where that is not known."""


# -- what is computed over ranks ---------------------------------------------------------------------------------------


def _convolution(
    sequence: ShardedSequence,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> Tensor:
    """`causal_conv1d_fn` of (B, D, S): in the dtype of weights, any activation after it."""
    from transformers.activations import ACT2FN

    x = hidden_states.transpose(1, 2).to(weight.dtype)
    dtype = _autocast_dtype(x)
    key = (CONVOLUTION, x.shape[2], weight.shape[1], dtype)
    plan = sequence.plan_of(
        key, lambda: conv_plan(document_lengths(sequence), sequence.layout, channels=x.shape[2], width=weight.shape[1],
                               dtype=dtype, batch=sequence.whole.batch),
    )  # fmt: skip
    out = causal_conv1d(x, weight, bias, plan=plan, group=sequence.group).transpose(1, 2)
    return (out if activation is None else ACT2FN[activation](out)).to(hidden_states.dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) and x.dtype != torch.float64 else x.dtype


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
    """`torch_chunk_gated_delta_rule` and `chunk_kimi_delta_attention` of (B, S, H, D)."""
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
    """`mamba2_chunk_scan` of (B, S, H, P)."""
    if options.get("z") is not None:
        raise KernelError("mamba2_chunk_scan was called with z=, a gate that Longspan does not compute over ranks.")
    plan = _scan_plan(sequence, (hidden_states.shape[2], B.shape[3], hidden_states.shape[3]), "scalar",
                      (hidden_states, dt, B, C))  # fmt: skip
    out = ssd(
        hidden_states, dt, A, B, C, D=options.get("D"), dt_bias=options.get("dt_bias"),
        dt_softplus=bool(options.get("dt_softplus", False)), dt_limit=options.get("dt_limit", (0.0, float("inf"))),
        plan=plan, group=sequence.group,
    )  # fmt: skip
    return out.to(hidden_states.dtype)


def _not_fused(sequence: ShardedSequence, *_: Any, **__: Any) -> None:
    """`mamba2_split_conv1d_scan_combined`: None says that convolution and recurrence are to be called apart."""


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
    """Lengths of the documents of every batch row, or of all rows where they are alike. Padding is a document of its
    own: nothing enters a row's first token, and nothing leaves its last one."""
    numbers, padding = sequence.whole.documents, sequence.whole.padding
    rows = np.zeros((1, sequence.whole.seq_len), dtype=np.int64) if numbers is None else np.asarray(numbers)
    if padding is not None:
        rows = rows * 2 + np.broadcast_to(padding, (len(padding), rows.shape[1]))
    return [np.diff(runs(row)[0]) for row in rows]


def _scan_plan(sequence: ShardedSequence, state: tuple[int, int, int], maps: str, tokens: tuple[Tensor, ...]) -> Any:
    dtype = "float64" if any(t.dtype == torch.float64 for t in tokens) else "float32"
    heads, keys, values = state
    inside = sum(t[:1, :1].numel() * t.element_size() for t in tokens)
    weight = inside + heads * values * tokens[0].element_size()
    return sequence.plan_of(
        (RECURRENCE, state, maps, dtype),
        lambda: scan_plan(document_lengths(sequence), sequence.layout, heads=heads, keys=keys, values=values, maps=maps,
                          dtype=dtype, batch=sequence.whole.batch, token_bytes=weight),
    )  # fmt: skip


# -- where functions are replaced --------------------------------------------------------------------------------------


class Routed:
    """A function of a modeling file, which goes over ranks where `longspan=` comes along."""

    def __init__(self, name: str, original: Any, mixer: Mixer) -> None:
        self.name, self.original, self.mixer = name, original, mixer
        update_wrapper(self, original)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        sequence = kwargs.pop(NAME, None)
        if sequence is None:
            return self.original(*args, **kwargs)
        assert self.mixer.run is not None
        return _over_ranks(self.name, self.mixer, sequence, args, kwargs)


@torch.compiler.disable(reason="convolutions and recurrences over ranks run between compiled graphs")
def _over_ranks(name: str, mixer: Mixer, sequence: ShardedSequence, args: Any, kwargs: dict[str, Any]) -> Any:
    assert mixer.run is not None
    states = [key for key in STATES if kwargs.pop(key, None) not in (None, False)]
    if states:
        raise KernelError(
            f"{name} was called with {', '.join(states)}=, which belongs to a cache. Over ranks there is none: pass"
            f" use_cache=False, and generate on one device."
        )
    if mixer.kind is not None:
        sequence.note(mixer.kind)
    return mixer.run(sequence, *args, **kwargs)


def route(model: nn.Module) -> None:
    """Replaces, once, the functions that the model's classes call by name."""
    for module in {sys.modules[type(part).__module__] for part in model.modules()}:
        for name in _names_in(module):
            original, mixer = getattr(module, name), MIXERS[name]
            if mixer.run is not None and not isinstance(original, Routed):
                setattr(module, name, Routed(name, original, mixer))


def _names_in(module: ModuleType) -> list[str]:
    """Known functions among a modeling file's own."""
    is_modeling = module.__name__.startswith("transformers.models.")
    return [name for name in MIXERS if is_modeling and hasattr(module, name)]


@lru_cache(maxsize=1024)
def mixes(kind: type) -> frozenset[str]:
    """Names of `MIXERS` that the methods of a class of a modeling file mention."""
    found: set[str] = set()
    for part in kind.__mro__:
        if part.__module__.startswith("transformers.models."):
            for method in vars(part).values():
                code = method_code(method)
                found |= set() if code is None else _mentioned(code)
    return frozenset(found)


def _mentioned(code: CodeType) -> set[str]:
    inner = [_mentioned(const) for const in code.co_consts if isinstance(const, CodeType)]
    return set(code.co_names).intersection(MIXERS).union(*inner)


def is_hybrid(model: nn.Module) -> bool:
    """Whether any layer calls more than attention."""
    return _are_hybrid(frozenset(map(type, model.modules())))


@lru_cache(maxsize=64)
def _are_hybrid(kinds: frozenset[type[nn.Module]]) -> bool:
    return any(mixes(kind) - {"ALL_ATTENTION_FUNCTIONS"} for kind in kinds)


@lru_cache(maxsize=1024)
def _not_computed(kind: type) -> list[str]:
    return sorted(n for n in mixes(kind) if MIXERS[n].run is None and MIXERS[n].kind != ATTENTION)


def check_mixers(model: nn.Module) -> None:
    """Refuses layers that call functions which are not computed over ranks."""
    check_hybrid(model)
    for name, part in model.named_modules():
        if unknown := _not_computed(type(part)):
            raise BatchError(
                f"{name} ({type(part).__name__}) calls {', '.join(unknown)}, a recurrence that Longspan does not"
                f" compute over ranks: each would start from nothing on its own tokens. Use this model on one device."
            )


def text_part(model: Any) -> nn.Module:
    """The part of a model that holds its layers of text."""
    part = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(part, nn.Module) and any(mixes(type(module)) for module in part.modules()):
        return part
    return model  # heads for masked tokens call a matrix their decoder


def needs(model: nn.Module) -> dict[str, tuple[str, frozenset[str]]]:
    """For every layer that mixes tokens, by name: its class, and what of it must be seen in a forward pass. Towers for
    images mix none."""
    found: dict[str, tuple[str, frozenset[str]]] = {}
    text = {id(part) for part in text_part(model).modules()}
    for name, part in model.named_modules():
        if id(part) not in text:
            continue
        kinds = frozenset(kind for n in mixes(type(part)) if (kind := MIXERS[n].kind) is not None)
        if kinds:
            found[name] = type(part).__name__, kinds
    return found
