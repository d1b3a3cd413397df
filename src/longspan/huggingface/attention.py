"""The function that transformers calls in every attention layer: what it is asked is honoured or refused.

Shapes: B batch rows, H heads, S tokens, D features.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from longspan.api import attention
from longspan.errors import KernelError, MaskError, PlanError
from longspan.huggingface.masks import LayerMask, has, per_row_alike, window_in
from longspan.masks import Mask, causal, full
from longspan.training.batch import numbers_of, restarts
from longspan.validate import as_autocast

NAME = "longspan"
IGNORED = frozenset({
    # said by the mask already, or of no interest to attention
    "position_ids", "position_embeddings", "use_cache", "cache_position", "past_key_values", "past_key_value",
    "max_length_q", "max_length_k", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    # for the loss
    "num_items_in_batch", "labels", "shift_labels", "return_loss",
})  # fmt: skip
"""Keyword arguments that change nothing here. Others must be known, or None or False."""
BLIND = frozenset({"gpt_oss"})
"""Model types that show transformers' masks no position_ids, so that packed documents would see each other."""
UNDONE = {
    "position_bias": "a bias on scores (T5)",
    "head_mask": "a factor per head",
    "layer_head_mask": "a factor per head",
    "alibi": "a bias by distance",
    "attn_bias": "a bias on scores",
    "relative_attention_bias": "a bias on scores",
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a layer asks for beside the mask."""

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
    """What `AttentionInterface` calls: (B, S, H, D), and no attention weights, which are never made."""
    documents = {name: others.pop(name, None) for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")}
    _check_others(others)
    asked = Asked(scaling, dropout or 0.0, softcap, s_aux, sliding_window, is_causal)
    query, key, value = (as_autocast(x) for x in (query, key, value))
    longspan = getattr(attention_mask, "sequence", None) if longspan is None else longspan
    if longspan is not None:
        out = longspan.attend(module, query, key, value, attention_mask, asked)
    else:
        out = _on_one_device(module, (query, key, value), attention_mask, asked, _unseen(module, others), documents)
    return out.transpose(1, 2).contiguous(), None


def _check_others(others: dict[str, Any]) -> None:
    if others.pop("output_attentions", False):
        raise KernelError(
            "output_attentions=True was asked for, but attention weights are never made here. Use"
            " attn_implementation='eager' to look at them."
        )
    for name, value in others.items():
        if value is None or value is False or name in IGNORED:
            continue
        meaning = UNDONE.get(name, "which Longspan does not know")
        raise KernelError(
            f"the model passed {name}= to attention ({meaning}), and it might change scores. Longspan computes soft"
            f" caps, sinks, windows, dropout and masks for transformers' models; use attn_implementation='eager' for"
            f" this one, or call longspan.attention, which takes any score function."
        )


def _unseen(module: Any, others: dict[str, Any]) -> Any:
    """The position_ids in which documents are to be found here, because the mask of such a model cannot have them.
    Not with a cache: transformers looks for no documents then, and later tokens would see all of them."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return others.get("position_ids") if kind in BLIND and not others.get("use_cache") else None


# -- one device --------------------------------------------------------------------------------------------------------


def _on_one_device(
    module: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    given: Any,
    asked: Asked,
    position_ids: Any,
    documents: dict[str, Any],
) -> Tensor:
    q, k, v = qkv
    if given is None:
        given = _without_mask(module, q, k, asked)
    if isinstance(given, Mask):
        numbers = numbers_of(documents, q.shape[0], q.shape[2])
        return run(q, k, v, given if numbers is None else given & per_row_alike(numbers), asked, _drawn_seed(asked))
    check_layer_mask(given, asked)
    if (q.shape[0], q.shape[2], k.shape[2]) != (given.batch, given.q_len, given.kv_len):
        raise PlanError(
            f"the mask is for (batch, queries, keys) = {(given.batch, given.q_len, given.kv_len)}, but the layer has"
            f" {(q.shape[0], q.shape[2], k.shape[2])}. The cache of this layer has another length than the mask's."
        )
    seed = _drawn_seed(asked)
    if given.is_square:
        numbers = document_numbers(given, position_ids, documents)
        return run(q, k, v, given.mask if numbers is None else given.separated(numbers), asked, seed)
    if any(value is not None for value in documents.values()):
        raise MaskError(
            f"{', '.join(name for name, value in documents.items() if value is not None)} came with {given.q_len}"
            f" queries and {given.kv_len} keys. Documents are told apart where queries and keys are the same tokens:"
            f" pass use_cache=False and no cache."
        )
    rows_q, rows_kv = given.rows
    length = given.frame.length
    wide = (_placed(q, rows_q, length), _placed(k, rows_kv, length), _placed(v, rows_kv, length))
    return run(*wide, given.mask, asked, seed)[:, :, rows_q : rows_q + given.q_len]


def _placed(x: Tensor, start: int, length: int) -> Tensor:
    """Rows of a longer tensor: queries and keys of one frame. Nothing attends to or from the rows around them."""
    return torch.nn.functional.pad(x, (0, 0, start, length - start - x.shape[2]))


def _without_mask(module: Any, q: Tensor, k: Tensor, asked: Asked) -> Mask:
    """The mask that a module without one means, if it can be told."""
    is_causal = asked.is_causal if asked.is_causal is not None else getattr(module, "is_causal", True)
    if asked.window is not None or q.shape[2] != k.shape[2] or (is_causal and asked.is_causal is None):
        raise MaskError(
            f"{type(module).__name__} passed no mask. Transformers does this where the attention function is registered"
            f" without its mask function, and padding, windows and packing are lost. Call"
            f" longspan.huggingface.register(), which registers both, and name it 'longspan'."
        )
    return causal() if is_causal else full()


def check_layer_mask(given: Any, asked: Asked) -> None:
    """Refuses masks that are not ours, and windows that the mask does not know of."""
    if not isinstance(given, LayerMask):
        kind = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"({type(given).__name__})"
        raise MaskError(
            f"a mask {kind} reached attention, which takes what Longspan's own mask function makes. Pass the 2-D mask"
            f" of padding as attention_mask=, and documents as position_ids= that restart; a 4-D mask can be given to"
            f" longspan.attention as masks.from_mask_mod(lambda b, h, q, kv: mask[b, h, q, kv], ...)."
        )
    window = window_in(given.term)
    # Windows to both sides count the own token in the layer (ModernBERT) or not; functions may hold any window.
    same = asked.window is not None and asked.window - has(given.term, "around") == window
    if asked.window not in (None, window) and not same and not has(given.term, "function"):
        raise MaskError(
            f"the layer asks for sliding_window = {asked.window}, but its mask has "
            f"{'no window' if window is None else f'a window of {window}'}. One of them would be dropped."
        )


def document_numbers(given: LayerMask, position_ids: Any, documents: dict[str, Any]) -> NDArray[Any] | None:
    """The document of each token, where the mask does not say it already: `position_ids` are those that it has not
    seen."""
    numbers = numbers_of(documents, given.batch, given.q_len)
    if numbers is None and given.padding is None and has(given.term, "causal") and not has(given.term, "packed"):
        if given.documents is None or given.documents[0] is not position_ids:
            given.documents = position_ids, restarts(position_ids, given.batch, given.q_len)
        numbers = given.documents[1]
    return numbers


def _drawn_seed(asked: Asked) -> int | None:
    """A seed from PyTorch's own generator, so that torch.manual_seed and checkpointing repeat it."""
    return None if not asked.dropout else int(torch.randint(0, 2**62, ()).item())


def run(
    q: Tensor, k: Tensor, v: Tensor, plan_or_mask: Any, asked: Asked, seed: int | None, group: Any = None
) -> Tensor:
    """`longspan.attention` with what the layer asks for. Trainers reduce gradients of sinks with all others."""
    return attention(
        q, k, v, plan_or_mask, group=group, scale=asked.scale, softcap=asked.softcap, sinks=asked.sinks,
        dropout=asked.dropout, seed=seed, captured_grads="share",
    )  # fmt: skip
