"""Words that users of PyTorch's and flash-attn's attention bring along, and what they are called here."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from longspan.errors import PlanError
from longspan.masks.given.dense import ALTERNATIVES, from_dense

MASKS = (
    "masks.causal(), masks.full(), masks.sliding_window(left), masks.documents(lengths) & masks.causal() for packed"
    " documents, or masks.from_mask_mod(function)"
)
SMALL = 2048
"""Tokens of a dense mask that `attention` and `plan` convert by themselves; that takes some 20 ms, in every call."""

_CAUSAL = "Pass masks.causal() as the fourth argument, or masks.full() where every token sees every token."
_TABLE = f"Pass a mask as the fourth argument: {MASKS}; a table of True and False goes through masks.from_dense(table)."
_DOCUMENTS = "Pass masks.from_cu_seqlens(cu_seqlens) & masks.causal() as the fourth argument."
_LENGTHS = "Leave it out: lengths are the mask's."
_GROUP = "It is group= here: a process group, or a mesh of one axis such as mesh['cp']."
_WORDS = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _TABLE,
    "attention_mask": _TABLE,
    "key_padding_mask": _TABLE,
    "mask": _TABLE,
    "block_mask": "Use longspan.flex_attention, which takes it.",
    "plan": "Pass the plan as the fourth argument.",
    "dropout_p": "It is dropout= here, with a seed=.",
    "enable_gqa": "Leave it out: fewer key/value heads than query heads are taken as they are.",
    "softmax_scale": "It is scale= here.",
    "window_size": "Pass masks.sliding_window(left, right) as the fourth argument; neither counts the token itself.",
    "alibi_slopes": "It is alibi= here.",
    "cu_seqlens": _DOCUMENTS,
    "cu_seqlens_q": _DOCUMENTS,
    "cu_seqlens_k": _DOCUMENTS,
    "max_seqlen": _LENGTHS,
    "max_seqlen_q": _LENGTHS,
    "max_seqlen_k": _LENGTHS,
    "process_group": _GROUP,
    "device_mesh": _GROUP,
    "mesh": _GROUP,
}


def check_words(call: str, unknown: dict[str, Any], known: tuple[str, ...]) -> None:
    """Refuses arguments that a function does not have, in words that help.

    >>> check_words("attention", {"softmax_scale": 0.5}, ())
    Traceback (most recent call last):
    longspan.errors.PlanError: softmax_scale=0.5 was given to attention, which does not know it. It is scale= here.
    """
    for name, value in unknown.items():
        if name in _WORDS:
            text = repr(value) if isinstance(value, bool | int | float | str | None) else "..."
            raise PlanError(f"{name}={text} was given to {call}, which does not know it. {_WORDS[name]}")
        near = get_close_matches(name, known, 1)
        raise TypeError(
            f"{call}() got an unexpected keyword argument {name!r}."
            + (f" Did you mean {near[0]}?" if near else f" It takes {', '.join(known)}.")
        )


def mask_of(value: Any) -> Any:
    """A small dense mask as the mask that it is; everything else as it was given."""
    return from_dense(value) if _is_table(value) and value.shape[-1] <= SMALL else value


def _is_table(value: Any) -> bool:
    return hasattr(value, "dtype") and len(getattr(value, "shape", ())) >= 2


def advice(value: Any) -> str:
    """How something that is no mask is said as one.

    >>> advice(None)[:63]
    'Say what may attend to what, by longspan.masks: masks.causal(),'
    >>> advice(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    'A function (b, h, q_idx, kv_idx) is made a mask by longspan.masks.from_mask_mod(function).'
    """
    name, module = getattr(value, "__name__", ""), getattr(value, "__module__", "")
    if value is None:
        return f"Say what may attend to what, by longspan.masks: {MASKS}."
    if type(value).__name__ == "BlockMask":
        return "longspan.flex_attention takes a BlockMask; masks.from_mask_mod(block_mask.mask_mod) makes a mask of it."
    if type(value).__name__ == "Layout":
        return "A layout says who holds which tokens: make a plan, longspan.plan(mask, layout, ...), and pass that."
    if _is_table(value):
        return f"A table of True and False is read once, by masks.from_dense(table). {ALTERNATIVES}."
    if callable(value) and str(module).startswith("longspan.masks") and str(name).isidentifier():
        return f"masks.{name} makes masks when it is called, as in masks.{name}(...)."
    if callable(value):
        return "A function (b, h, q_idx, kv_idx) is made a mask by longspan.masks.from_mask_mod(function)."
    return f"Masks are made by longspan.masks: {MASKS}."
