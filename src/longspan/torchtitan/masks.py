"""torchtitan's masks, balancers and layers as masks and layouts. Loads without torchtitan, whose mask functions are
recognized by their names and by their results.

Shapes: B batch rows, S tokens of the whole sequence.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask, and_masks

from longspan._compile import opaque
from longspan.errors import LongspanError
from longspan.layouts import Layout, balanced, contiguous, round_robin_by_work, zigzag
from longspan.masks import Mask, causal, chunked, documents, from_mask_mod, full, sliding_window
from longspan.masks.builders import per_row
from longspan.run.flex import check_lengths, mask_of_block_mask

MaskMod = Callable[[Any, Any, Any, Any], Any]

TESTED = "0.3.0"
BALANCERS = ("balanced", "headtail", "ptrr", None)
PTRR_BLOCK = 128


class TitanError(LongspanError, RuntimeError):
    """Raised for settings of torchtitan that Longspan cannot run exactly."""


def check_version(version: str | None) -> None:
    """Raise for versions of torchtitan that were not tested: its hooks may change.

    >>> check_version("0.3.0")
    """
    if version != TESTED:
        raise TitanError(
            f"torchtitan must be {TESTED}, the tested version, but got {version or '(not installed)'}. Install"
            f" torchtitan=={TESTED}."
        )


@opaque
@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """The mask of the whole sequence, its layout, and the mesh axis of its ranks (None if this rank holds all). Layers
    receive it instead of a BlockMask."""

    mask: Mask
    layout: Layout
    mesh: DeviceMesh | None


# -- Masks -------------------------------------------------------------------------------------------------------------

_HOME = "torchtitan.models.common.attention"
_CAUSAL = "get_causal_mask_mod.<locals>._causal_mask"
_WINDOW = "get_sliding_window_mask_mod.<locals>.sliding_window_mod"
_CHUNK = "get_fixed_block_mask_mod.<locals>.blocked_mask_mod"
_DOCUMENT = "get_document_mask_mod.<locals>.document_mask"
_PACKED = "get_efficient_causal_mask_mod_for_packed_document.<locals>.packed_document_mask"


def mask_of_mods(positions: Tensor, mask_mods: Sequence[MaskMod]) -> Mask:
    """Return the mask that all the functions allow, for tokens at these positions (B, S) within their documents.

    torchtitan's own functions become closed forms, after they were compared at the edges of documents. All others stay
    functions, which are called pair by pair.

    >>> mask_of_mods(torch.tensor([[0, 1, 2, 0, 1]]), [lambda b, h, q, kv: q - kv == 1]).allows([3, 4], [2, 2]).tolist()
    [True, False]
    """
    if positions.ndim != 2:
        raise TitanError(
            f"positions must have shape (batch, tokens), which separates documents, but got {tuple(positions.shape)}."
            f" Models with other positions are not supported."
        )
    rows, length = positions.shape
    names = [mod.__qualname__ if getattr(mod, "__module__", None) == _HOME else "" for mod in mask_mods]
    ordered = _CAUSAL in names or _WINDOW in names
    mask, others = full(length), list[MaskMod]()
    for mod, name in zip(mask_mods, names, strict=True):
        form = _closed_form(mod, name, positions, ordered)
        if form is None:
            others.append(mod)
        else:
            mask = mask & form
    return mask & from_mask_mod(and_masks(*others), length, rows=rows, name="mask_mod") if others else mask


def _closed_form(mod: MaskMod, name: str, positions: Tensor, ordered: bool) -> Mask | None:
    """Return the closed form of one function, or None; `ordered` if another one hides later keys."""
    length = positions.shape[1]
    if name == _CAUSAL:
        return causal(length)
    if name == _WINDOW:
        return sliding_window(_captured_int(mod, "window_size") - 1, seq_len=length)
    if name == _CHUNK:
        return chunked(_captured_int(mod, "fixed_block_size"), length)
    if name == _DOCUMENT or (name == _PACKED and ordered):
        starts = positions.detach().cpu().numpy() == 0
        starts[:, :1] = True
        edges = [np.append(np.flatnonzero(row), length) for row in starts]
        if _separates(mod, edges, length, both=name == _DOCUMENT):
            by_row = [documents(np.diff(row)) for row in edges]
            return by_row[0] if len(by_row) == 1 else per_row(*by_row)
    return None


def _captured_int(mod: MaskMod, name: str) -> int:
    return int(inspect.getclosurevars(mod).nonlocals[name])  # type: ignore[arg-type]


def _separates(mod: MaskMod, edges: list[np.ndarray], length: int, both: bool) -> bool:
    """Return whether the function agrees, for every token, with these documents: their first token is visible and the
    one before it is not, and likewise at the other end if `both`."""
    sizes = [np.diff(row) for row in edges]
    first = torch.as_tensor(np.stack([np.repeat(row[:-1], size) for row, size in zip(edges, sizes, strict=True)]))
    last = torch.as_tensor(np.stack([np.repeat(row[1:] - 1, size) for row, size in zip(edges, sizes, strict=True)]))
    b, q = torch.arange(len(edges))[:, None], torch.arange(length)[None, :].expand(len(edges), -1)

    def allows(kv: Tensor) -> Tensor:
        return torch.as_tensor(mod(b, torch.tensor(0), q, kv.clamp(0, length - 1))).cpu()

    inside, outside = allows(first), allows(first - 1) & (first > 0)
    if both:
        inside, outside = inside & allows(last), outside | (allows(last + 1) & (last + 1 < length))
    return bool(inside.all()) and not bool(outside.any())


def mask_of(mask: Any, batch: int, seq_len: int) -> Mask:
    """Return the mask of one kind of layer, from a model's `get_attention_masks`."""
    if isinstance(mask, Mask):
        return mask
    if not isinstance(mask, BlockMask):
        raise TitanError(
            f"get_attention_masks of the model must return a BlockMask, a mask of longspan.masks, or a dict of these,"
            f" of the whole sequence, but got {type(mask).__name__}."
        )
    check_lengths(mask, (seq_len, seq_len), "the BlockMask of the model's get_attention_masks", TitanError)
    return mask_of_block_mask(mask, batch=batch)


def masks_by_name(masks: Any, batch: int, seq_len: int) -> dict[str | None, Mask]:
    """Return the masks of a model's `get_attention_masks` by kind of layer; one mask for all layers is named None."""
    if isinstance(masks, Mapping):
        return {name: mask_of(mask, batch, seq_len) for name, mask in masks.items() if mask is not None}
    return {None: mask_of(masks, batch, seq_len)}


# -- Layouts -----------------------------------------------------------------------------------------------------------


def check_balancer(name: str | None) -> None:
    """Raise for unknown values of `parallelism.context_parallel_load_balancer`."""
    if name not in BALANCERS:
        known = ", ".join("None" if known is None else repr(known) for known in BALANCERS)
        raise TitanError(f"parallelism.context_parallel_load_balancer must be one of {known}, but got {name!r}.")


def layout_of(
    name: str | None, masks: Mapping[str | None, Mask], seq_len: int, world_size: int, key: str | None
) -> Layout:
    """Return the layout of `parallelism.context_parallel_load_balancer`; every rank holds equally many tokens if
    they can be divided.

    >>> layout_of("headtail", {}, 8, 2, None).positions(0).tolist()
    [0, 1, 6, 7]
    """
    check_balancer(name)
    if world_size == 1 or name is None:
        return contiguous(seq_len, world_size)
    if name == "headtail":
        return zigzag(seq_len, world_size)
    if name == "balanced":
        # No padding: routers of experts would count it.
        equal = seq_len % world_size == 0
        return balanced(*masks.values(), world_size=world_size, seq_len=seq_len, equal_tokens=equal)
    if len(masks) > 1 and key not in masks:
        raise TitanError(
            f"the load balancer 'ptrr' balances one mask, but the model has {sorted(map(str, masks))} and"
            f" parallelism.context_parallel_ptrr_mask_key is {key!r}. Name one, or use 'balanced', which balances all."
        )
    if seq_len % (PTRR_BLOCK * world_size):
        raise TitanError(
            f"the load balancer 'ptrr' needs a multiple of {PTRR_BLOCK * world_size} tokens, blocks of {PTRR_BLOCK} for"
            f" {world_size} ranks, but got training.seq_len = {seq_len}. Or use 'balanced', which takes any."
        )
    mask = masks[key] if len(masks) > 1 else next(iter(masks.values()))
    return round_robin_by_work(mask, world_size, seq_len=seq_len, block=PTRR_BLOCK)


# -- Layers that mix tokens without attention --------------------------------------------------------------------------
# They are refused by name: on a rank's tokens alone each would start from an empty state, which no loss curve shows.


_RECURRENT = re.compile("Delta|Mamba|SSM|Recurr|RWKV|KDA|LinearAttention|Lightning|LSTM|GRU")


def mixes_tokens(layer: Any) -> bool:
    """Return whether a module, or the config of one, is a recurrence or a convolution along tokens, by its name.

    >>> from torch import nn
    >>> [mixes_tokens(layer) for layer in (nn.GRU(1, 1), nn.Conv1d(1, 1, 4), nn.Conv1d(1, 1, 1), nn.Linear(1, 1))]
    [True, True, False, False]
    """
    names = {base.__qualname__.removesuffix(".Config").rpartition(".")[2] for base in type(layer).__mro__}
    if "Conv1d" in names:
        return getattr(layer, "kernel_size", 1) not in (1, (1,))
    return any(map(_RECURRENT.search, names))


def check_mixers(model: str, layers: Iterable[tuple[str, Any]]) -> None:
    """Raise for models with such layers, `any_model` or not."""
    for name, layer in layers:
        if mixes_tokens(layer):
            kind = type(layer).__qualname__.removesuffix(".Config")
            raise TitanError(
                f"model {model!r} is not supported: its {name} is a {kind}, which carries a state from token to token"
                f" and would start from an empty one on every rank. In torchtitan Longspan computes attention alone"
                f" over ranks; for hybrid models see its Hugging Face integration, or longspan.gated_delta_rule."
            )


def family_of(config: str, models: Iterable[str]) -> tuple[str, list[str]] | None:
    """Return the torchtitan model whose registry has a config of this name, and its classes that mix tokens. No model
    is imported, since some need further packages."""
    for folder in map(Path, models):
        for registry in sorted(folder.glob("*/config_registry.py")):
            if f"\ndef {config}()" in registry.read_text(encoding="utf-8"):
                model = registry.with_name("model.py")
                text = model.read_text(encoding="utf-8") if model.is_file() else ""
                return registry.parent.name, list(filter(_RECURRENT.search, re.findall(r"^class (\w+)", text, re.M)))
    return None
