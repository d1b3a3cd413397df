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

from longspan._compile import sealed
from longspan.errors import LongspanError
from longspan.layouts import Layout, balanced, contiguous, round_robin_by_work, zigzag
from longspan.masks import Mask, causal, chunked, documents, from_mask_mod, full, sliding_window
from longspan.masks.builders import per_row
from longspan.run.flex import check_lengths, mask_of_block_mask

# -- Versions and shards -----------------------------------------------------------------------------------------------
# Up to the section on attention the code works without torchtitan, whose mask functions are recognised by their names
# and results.
#
# Shapes: B batch rows, S tokens of the whole sequence.


MaskMod = Callable[[Any, Any, Any, Any], Any]

TESTED = "0.3.0"
BALANCERS = ("balanced", "headtail", "ptrr", None)
PTRR_BLOCK = 128


class TitanError(LongspanError, RuntimeError):
    """Something that torchtitan was asked to do and that cannot be done exactly with Longspan underneath."""


def check_version(version: str | None) -> None:
    """Refuses versions of torchtitan that this was not tested with: its hooks are not promised to stay.

    >>> check_version("0.3.0")
    """
    if version != TESTED:
        raise TitanError(
            f"torchtitan {version or '(not installed)'} was found, but longspan.torchtitan was tested with"
            f" {TESTED} only. Install torchtitan=={TESTED}."
        )


@sealed
@dataclass(frozen=True, slots=True, eq=False)
class Shards:
    """What attention of this rank's shards is about: the mask of the whole sequence, who holds what, and over which
    mesh axis (None: this rank holds all). Layers get it where torchtitan would pass a BlockMask."""

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
    """What all the functions allow, for tokens at these positions (B, S) within their documents.

    torchtitan's own functions become closed forms, after a look at what they answer at the edges of documents. All
    others stay functions, which are asked pair by pair where it matters.

    >>> mask_of_mods(torch.tensor([[0, 1, 2, 0, 1]]), [lambda b, h, q, kv: q - kv == 1]).allows([3, 4], [2, 2]).tolist()
    [True, False]
    """
    if positions.ndim != 2:
        raise TitanError(
            f"positions have shape {tuple(positions.shape)}, but documents are told apart by positions of shape"
            f" (batch, tokens). Models with other positions are not supported."
        )
    rows, length = positions.shape
    names = [_name(mod) for mod in mask_mods]
    ordered = _CAUSAL in names or _WINDOW in names
    mask, others = full(length), list[MaskMod]()
    for mod, name in zip(mask_mods, names, strict=True):
        form = _closed(mod, name, positions, ordered)
        if form is None:
            others.append(mod)
        else:
            mask = mask & form
    if others:
        asked = from_mask_mod(and_masks(*others), length, rows=rows, name="mask_mod")
        mask = mask & asked
    return mask


def _name(mod: MaskMod) -> str:
    return getattr(mod, "__qualname__", "") if getattr(mod, "__module__", None) == _HOME else ""


def _closed(mod: MaskMod, name: str, positions: Tensor, ordered: bool) -> Mask | None:
    """The closed form of one function, or None; `ordered` says that another one hides later keys."""
    length = positions.shape[1]
    if name == _CAUSAL:
        return causal(length)
    if name == _WINDOW:
        return sliding_window(_captured(mod, "window_size") - 1, seq_len=length)
    if name == _CHUNK:
        return chunked(_captured(mod, "fixed_block_size"), length)
    if name == _DOCUMENT or (name == _PACKED and ordered):
        edges = _edges(positions)
        if _separates(mod, edges, length, both=name == _DOCUMENT):
            by_row = [documents(np.diff(row)) for row in edges]
            return by_row[0] if len(by_row) == 1 else per_row(*by_row)
    return None


def _captured(mod: MaskMod, name: str) -> int:
    return int(inspect.getclosurevars(mod).nonlocals[name])  # type: ignore[arg-type]


def _edges(positions: Tensor) -> list[np.ndarray]:
    """For every batch row, where documents start and, last, where the sequence ends. Position 0 starts one."""
    starts = positions.detach().cpu().numpy() == 0
    starts[:, :1] = True
    return [np.append(np.flatnonzero(row), starts.shape[1]) for row in starts]


def _separates(mod: MaskMod, edges: list[np.ndarray], length: int, both: bool) -> bool:
    """Whether the function agrees, for every token, with these documents: their first token is seen and the one before
    it is not, and likewise at the other end if it is to tell `both` ends."""
    sizes = [np.diff(row) for row in edges]
    first = torch.as_tensor(np.stack([np.repeat(row[:-1], size) for row, size in zip(edges, sizes, strict=True)]))
    last = torch.as_tensor(np.stack([np.repeat(row[1:] - 1, size) for row, size in zip(edges, sizes, strict=True)]))
    b, q = torch.arange(len(edges))[:, None], torch.arange(length)[None, :].expand(len(edges), -1)

    def says(kv: Tensor) -> Tensor:
        return torch.as_tensor(mod(b, torch.tensor(0), q, kv.clamp(0, length - 1))).cpu()

    seen, hidden = says(first), says(first - 1) & (first > 0)
    if both:
        seen, hidden = seen & says(last), hidden | (says(last + 1) & (last + 1 < length))
    return bool(seen.all()) and not bool(hidden.any())


def mask_of(given: Any, batch: int, seq_len: int) -> Mask:
    """What a model's `get_attention_masks` gave for one kind of layer."""
    if isinstance(given, Mask):
        return given
    if not isinstance(given, BlockMask):
        raise TitanError(
            f"get_attention_masks of the model gave {type(given).__name__}, which cannot be read as a mask of the whole"
            f" sequence. Give a BlockMask, a mask of longspan.masks, or a dict of these."
        )
    check_lengths(given, (seq_len, seq_len), "the BlockMask that get_attention_masks of the model gave", TitanError)
    return mask_of_block_mask(given, batch=batch)


def masks_by_name(given: Any, batch: int, seq_len: int) -> dict[str | None, Mask]:
    """What a model's `get_attention_masks` gave, by kind of layer; the one mask for all layers is named None."""
    if isinstance(given, Mapping):
        return {name: mask_of(mask, batch, seq_len) for name, mask in given.items() if mask is not None}
    return {None: mask_of(given, batch, seq_len)}


# -- Layouts -----------------------------------------------------------------------------------------------------------


def check_balancer(name: str | None) -> None:
    """Refuses what `parallelism.context_parallel_load_balancer` cannot mean."""
    if name not in BALANCERS:
        known = ", ".join("None" if known is None else repr(known) for known in BALANCERS)
        raise TitanError(f"parallelism.context_parallel_load_balancer = {name!r} was asked for. Choose one of {known}.")


def layout_of(
    name: str | None, masks: Mapping[str | None, Mask], seq_len: int, world_size: int, key: str | None
) -> Layout:
    """The layout that `parallelism.context_parallel_load_balancer` names; every rank holds equally many tokens.

    >>> layout_of("headtail", {}, 8, 2, None).positions(0).tolist()
    [0, 1, 6, 7]
    """
    check_balancer(name)
    if world_size == 1 or name is None:
        return contiguous(seq_len, world_size)
    if name == "headtail":
        return zigzag(seq_len, world_size)
    if name == "balanced":
        return balanced(*masks.values(), world_size=world_size, seq_len=seq_len, equal_tokens=True)
    if len(masks) > 1 and key not in masks:
        raise TitanError(
            f"the load balancer 'ptrr' balances one mask, but the model has {sorted(map(str, masks))} and"
            f" parallelism.context_parallel_ptrr_mask_key is {key!r}. Name one, or use 'balanced', which balances all."
        )
    if seq_len % (PTRR_BLOCK * world_size):
        raise TitanError(
            f"the load balancer 'ptrr' deals blocks of {PTRR_BLOCK} tokens to {world_size} ranks, so"
            f" training.seq_len = {seq_len} would not be dealt evenly. Make it a multiple of"
            f" {PTRR_BLOCK * world_size}, or use 'balanced', which takes any."
        )
    mask = masks[key] if len(masks) > 1 else next(iter(masks.values()))
    return round_robin_by_work(mask, world_size, seq_len=seq_len, block=PTRR_BLOCK)


# -- Layers that mix tokens without attention --------------------------------------------------------------------------
# They are refused by name: on a rank's tokens alone each would start from an empty state, and no loss curve would show
# it.


_RECURRENT = re.compile("Delta|Mamba|SSM|Recurr|RWKV|KDA|LinearAttention|Lightning|LSTM|GRU")


def mixes_tokens(layer: Any) -> bool:
    """Whether a module, or the config of one, is known to be a recurrence or a convolution along tokens.

    >>> from torch import nn
    >>> [mixes_tokens(layer) for layer in (nn.GRU(1, 1), nn.Conv1d(1, 1, 4), nn.Conv1d(1, 1, 1), nn.Linear(1, 1))]
    [True, True, False, False]
    """
    names = {base.__qualname__.removesuffix(".Config").rpartition(".")[2] for base in type(layer).__mro__}
    if "Conv1d" in names:
        return getattr(layer, "kernel_size", 1) not in (1, (1,))
    return any(map(_RECURRENT.search, names))


def check_mixers(model: str, layers: Iterable[tuple[str, Any]]) -> None:
    """Refuses models with such layers, whatever was promised for them."""
    for name, layer in layers:
        if mixes_tokens(layer):
            kind = type(layer).__qualname__.removesuffix(".Config")
            raise TitanError(
                f"model {model!r} was given, whose {name} is a {kind}: it carries something from token to token, and"
                f" would start from nothing on every rank. In torchtitan Longspan computes attention alone over ranks;"
                f" for hybrid models see its Hugging Face integration, or longspan.gated_delta_rule and its companions."
            )


def family_of(config: str, models: Iterable[str]) -> tuple[str, list[str]] | None:
    """The one of torchtitan's models whose registry has a config of this name, and its classes that mix tokens. No
    model is imported for it: some want packages that others do not."""
    for folder in map(Path, models):
        for registry in sorted(folder.glob("*/config_registry.py")):
            if f"\ndef {config}()" in registry.read_text(encoding="utf-8"):
                model = registry.with_name("model.py")
                text = model.read_text(encoding="utf-8") if model.is_file() else ""
                return registry.parent.name, list(filter(_RECURRENT.search, re.findall(r"^class (\w+)", text, re.M)))
    return None
