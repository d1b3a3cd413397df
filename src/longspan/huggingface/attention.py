"""The function that transformers calls in every attention layer: every argument is either applied or refused.

Shapes: B batch rows, H heads, S tokens, D features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.api import attention
from longspan.errors import KernelError, MaskError, PlanError
from longspan.huggingface.masks import LayerMask, document_mask
from longspan.huggingface.structure import file_shows_positions
from longspan.masks import Mask, causal, full
from longspan.training.batch import numbers_of, restarts
from longspan.validate import as_autocast

NAME = "longspan"
IGNORED = frozenset({
    # in the mask already, or irrelevant to attention
    "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "past_key_value",
    "max_length_q", "max_length_k", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    # for the loss
    "num_items_in_batch", "labels", "shift_labels", "return_loss",
    # documents, applied with the mask
    "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx",
})  # fmt: skip
"""Keyword arguments that do not change scores. Others must be known, or None or False."""
BLIND = frozenset({"gpt_oss"})
"""Model types that pass no position_ids to transformers' masks, so that packed documents would see each other."""
UNSUPPORTED = {
    "position_bias": "a bias on scores (T5)",
    "head_mask": "a factor per head",
    "layer_head_mask": "a factor per head",
    "alibi": "a bias by distance",
    "attn_bias": "a bias on scores",
    "relative_attention_bias": "a bias on scores",
}


@dataclass(frozen=True)
class LayerOptions:
    """The options of an attention layer other than its mask."""

    scale: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    window: int | None
    is_causal: bool | None


def longspan_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    longspan: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the output (B, S, H, D), and None for attention weights, which are never computed.

    `AttentionInterface` calls this.
    """
    for name, extra in others.items():
        if extra is None or extra is False or name in IGNORED:
            continue
        if name == "output_attentions":
            raise KernelError(
                "output_attentions=True is not supported: attention weights are never computed here. Use"
                " attn_implementation='eager' to look at them."
            )
        meaning = UNSUPPORTED.get(name, "which Longspan does not know")
        raise KernelError(
            f"the model passed {name}= to attention ({meaning}), and it might change scores. Longspan computes soft"
            f" caps, sinks, windows, dropout and masks for transformers' models; use attn_implementation='eager' for"
            f" this one, or call longspan.attention, which takes any score function."
        )
    if torch.is_autocast_enabled(query.device.type):
        query, key, value = as_autocast(query), as_autocast(key), as_autocast(value)
    options = LayerOptions(scaling, dropout or 0.0, softcap, s_aux, sliding_window, is_causal)
    if longspan is None:
        longspan = getattr(attention_mask, "sequence", None)
    if longspan is not None:
        out = longspan.attend(module, query, key, value, attention_mask, options)
    else:
        out = _attend_on_one_device(module, query, key, value, attention_mask, options, others)
    return out.transpose(1, 2).contiguous(), None


def _attend_on_one_device(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: LayerOptions, others: dict[str, Any]
) -> Tensor:
    documents = {name: others.get(name) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}
    if mask is None:
        mask = _default_mask(module, q, k, options)
    # From PyTorch's own generator, so that torch.manual_seed and checkpointing repeat it.
    seed = None if not options.dropout else int(torch.randint(0, 2**62, ()).item())
    if isinstance(mask, Mask):
        numbers = numbers_of(documents, q.shape[0], q.shape[2])
        return run(q, k, v, mask if numbers is None else mask & document_mask(numbers), options, seed)
    check_layer_mask(mask, options)
    if (q.shape[0], q.shape[2], k.shape[2]) != (mask.batch, mask.q_len, mask.kv_len):
        raise PlanError(
            f"the mask is for (batch, queries, keys) = {(mask.batch, mask.q_len, mask.kv_len)}, but the layer has"
            f" {(q.shape[0], q.shape[2], k.shape[2])}: the cache of this layer has another length than the mask."
        )
    if mask.is_square:
        numbers = _document_numbers(module, mask, others, documents)
        return run(q, k, v, mask.mask if numbers is None else mask.separate(numbers), options, seed)
    if any(value is not None for value in documents.values()):
        raise MaskError(
            f"{', '.join(name for name, value in documents.items() if value is not None)} came with {mask.q_len}"
            f" queries and {mask.kv_len} keys, but documents need queries and keys of the same tokens. Pass"
            f" use_cache=False and no cache."
        )
    # Queries and keys become rows of one frame; nothing attends to or from the rows around them.
    (first_q, first_kv), length = mask.rows, mask.frame.length
    pad_q = (0, 0, first_q, length - first_q - q.shape[2])
    pad_kv = (0, 0, first_kv, length - first_kv - k.shape[2])
    q, k, v = (torch.nn.functional.pad(x, pad) for x, pad in ((q, pad_q), (k, pad_kv), (v, pad_kv)))
    return run(q, k, v, mask.mask, options, seed)[:, :, first_q : first_q + mask.q_len]


def _default_mask(module: Any, q: Tensor, k: Tensor, options: LayerOptions) -> Mask:
    """Return the mask of a module that passed none, if that is unambiguous."""
    is_causal = options.is_causal if options.is_causal is not None else getattr(module, "is_causal", True)
    if options.window is not None or q.shape[2] != k.shape[2] or (is_causal and options.is_causal is None):
        raise MaskError(
            f"{type(module).__name__} passed no mask. Transformers does this if the attention function is registered"
            f" without its mask function, and padding, windows and packing are lost. Name it"
            f" 'longspan', which has both."
        )
    return causal() if is_causal else full()


def check_layer_mask(mask: Any, options: LayerOptions) -> None:
    """Raise if the mask is not a `LayerMask`, or if the layer has a window that the mask does not have."""
    if not isinstance(mask, LayerMask):
        kind = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"({type(mask).__name__})"
        raise MaskError(
            f"a mask {kind} reached attention, which takes masks of Longspan's own mask function. Pass the 2-D mask of"
            f" padding as attention_mask=, and documents as position_ids= that restart; a 4-D mask can be passed to"
            f" longspan.attention as masks.from_mask_mod(lambda b, h, q, kv: mask[b, h, q, kv], ...)."
        )
    window, own = mask.term.window, options.window
    if own is None or own == window or "function" in mask.term.names:  # functions may hold any window
        return
    # Windows to both sides count the own token in the layer (ModernBERT) or not.
    if own - ("around" in mask.term.names) != window:
        raise MaskError(
            f"the layer has sliding_window = {own}, but its mask has"
            f" {'no window' if window is None else f'a window of {window}'}. One of them would be dropped."
        )


def _document_numbers(
    module: Any, mask: LayerMask, others: dict[str, Any], documents: dict[str, Any]
) -> NDArray[Any] | None:
    """Return the document of each token, unless the mask has them already.

    Transformers searches position_ids for them, but not for `BLIND` models and not if a cache is to be filled, which is
    the default. Documents are separate in these cases, too: over ranks there is no cache, and one rank computes the
    same.
    """
    numbers = numbers_of(documents, mask.batch, mask.q_len)
    names = mask.term.names
    if numbers is None and mask.padding is None and "causal" in names and "packed" not in names:
        is_blind = getattr(getattr(module, "config", None), "model_type", None) in BLIND
        position_ids = others.get("position_ids") if is_blind or others.get("use_cache") is not False else None
        if mask.documents is None or mask.documents[0] is not position_ids:
            found = restarts(position_ids, mask.batch, mask.q_len)
            is_known = found is None or is_blind or file_shows_positions(type(module))
            mask.documents = position_ids, found if is_known else None
        numbers = mask.documents[1]
    return numbers


def run(
    q: Tensor, k: Tensor, v: Tensor, plan_or_mask: Any, options: LayerOptions, seed: int | None, group: Any = None
) -> Tensor:
    """Call `longspan.attention` with the options of a layer. Trainers reduce gradients of sinks like all others."""
    return attention(
        q, k, v, plan_or_mask, group=group, scale=options.scale, softcap=options.softcap, sinks=options.sinks,
        dropout=options.dropout, seed=seed, captured_grads="share",
    )  # fmt: skip
