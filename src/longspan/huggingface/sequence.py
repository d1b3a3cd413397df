"""A batch's sequences over ranks: what an attention layer must know and its local tensors do not contain.

One object per batch goes to the model as the keyword `longspan=`, and transformers passes it down to every attention
layer. So no state is kept outside of the call, and recomputation in backward sees what forward saw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from longspan.api import plan as make_plan
from longspan.errors import KernelError, MaskError
from longspan.huggingface.attention import LayerOptions, check_layer_mask, run
from longspan.huggingface.masks import Frame, Kind, LayerMask, Term, build_mask, document_mask, term_of_kind
from longspan.huggingface.rules import Rules
from longspan.layouts import Layout
from longspan.layouts.layout import to_device
from longspan.masks import Mask
from longspan.tile import accumulation_dtype
from longspan.training import BatchError

_STEP = 0x9E3779B97F4A7C15
_UNUSABLE = "The model did not pass it down, and each rank computed with its own tokens alone: use it on one device."


class Whole:
    """The whole batch: its size, which tokens are real, and the document of each."""

    def __init__(
        self,
        batch: int,
        seq_len: int,
        padding: NDArray[np.bool_] | None,
        documents: NDArray[Any] | None,
        positions: NDArray[Any] | None = None,
    ) -> None:
        self.batch, self.seq_len = batch, seq_len
        self.padding, self.documents = padding, documents
        self.positions = positions
        """Positions of all tokens, if chunks are counted by them."""
        self._masks: dict[Kind, Mask] = {}

    def mask(self, kind: Kind) -> Mask:
        """Return the mask of whole sequences for layers of this kind."""
        if kind not in self._masks:
            chunks = np.zeros(self.batch, dtype=np.int64) if self.positions is None else self.positions
            if self.padding is not None:  # transformers counts chunks from the first real token
                chunks = (np.cumsum(self.padding, axis=1) == 0).sum(axis=1)
            frame = Frame(0, self.seq_len)
            mask = build_mask(term_of_kind(kind, chunks), frame, self.batch)
            if self.documents is not None:
                mask = mask & document_mask(self.documents)
            if self.padding is not None:
                mask = mask & build_mask(Term("padding", table=self.padding), frame, self.batch)
            self._masks[kind] = mask
        return self._masks[kind]


class ShardedSequence:
    """This rank's part of a batch of sequences, which `shard_inputs` returns: pass it to the model as `longspan=`.

    Not a dataclass, because wrappers of modules take those apart to find tensors.
    """

    def __init__(
        self,
        whole: Whole,
        layout: Layout,
        group: dist.ProcessGroup,
        scheme: str,
        dropout_seed: int | None,
        rules: Rules = Rules(),  # noqa: B008  (frozen)
        plans: dict[Any, Any] | None = None,
    ) -> None:
        self.whole, self.layout, self.group, self.rules = whole, layout, group, rules
        self.rank = group.rank()
        self.is_cut = rules.body is None
        """Whether the model computes with this rank's part by now."""
        self.is_joined = False
        """Whether tokens of all ranks have been gathered again."""
        self.arguments: frozenset[str] = frozenset()
        """Names of the arguments that the model is to be called with."""
        self.depth = 0
        """The number of modules with our hooks that are running, one inside of another."""
        self.labels: Tensor | None = None
        self.num_items: Any = None
        """This rank's labels, and the number of labels on all ranks, if the model's own loss takes a mean."""
        self.at_head: Any = None
        """The `HeadTask` that is computed instead of logits, or None."""
        self.model: Callable[[], Any] = lambda: None
        """The model of transformers itself, inside of wrappers."""
        self.position_ids: Tensor | None = None
        """This rank's positions, if the model is cut inside and receives none."""
        self.largest: Any = None
        """The largest position of the whole batch, if rotary embeddings depend on it."""
        self.scheme, self.dropout_seed = scheme, dropout_seed
        self.calls = 0
        """The number of attention layers that have called `attend` so far."""
        self.num_layers = 0
        """The number that must call it in one forward pass; 0 if it is not known."""
        self.calls_before: dict[int, int] = {}
        """The value of `calls` when a module began its forward pass, by the module's id."""
        self.needed: dict[str, tuple[str, frozenset[str]]] = {}
        """For every layer of a hybrid model, by name: its class, and the mixers that must run; empty for others."""
        self.seen: dict[str, set[str]] = {}
        """The mixers of each layer that ran in this forward pass."""
        self.inside: list[str] = []
        """Names of the layers that are running, the innermost last."""
        self.plans: dict[Any, Any] = {} if plans is None else plans
        """Plans by kind of layer and shapes; shared by batches of the same size without documents and padding."""
        self._own_plans: dict[Any, Any] = {}
        """Plans of masks of this batch alone."""

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.layout}, {self.whole.batch} rows>"

    def plan_of(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return the plan under this key, and build it first if there is none."""
        if key not in self.plans:
            self.plans[key] = build()
        return self.plans[key]

    def note(self, kind: str) -> None:
        """Record that a layer runs attention, a convolution or a recurrence."""
        self.calls += kind == "attention"
        if self.inside:
            self.seen.setdefault(self.inside[-1], set()).add(kind)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: LayerOptions) -> Tensor:
        """Return attention of this rank's tokens to those of all ranks."""
        accepted = mask.accepted if isinstance(mask, LayerMask) else None
        if accepted is None or accepted[0] != options.window:
            if mask is None:
                raise MaskError(
                    f"{type(module).__name__} passed no mask, so it is unknown whether this layer is causal. Name"
                    f" the attention 'longspan'."
                )
            check_layer_mask(mask, options)
            accepted = mask.accepted = options.window, None if mask.is_whole else _local_kind(mask)
        self.note("attention")
        if getattr(module, "attn_temperature_tuning", False):
            q = with_temperature(module, q, self.layout, self.rank)
        kind: Any = mask if mask.is_whole else accepted[1]
        plans = self._own_plans if mask.is_whole else self.plans
        key = (kind, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)
        plan = plans.get(key)
        if plan is None:
            plan = plans[key] = make_plan(
                mask.mask if mask.is_whole else self.whole.mask(kind), self.layout,
                q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], v_head_dim=v.shape[3], dtype=q.dtype,
                batch=self.whole.batch, scheme=self.scheme, group=self.group,
            )  # fmt: skip
        seed = self._dropout_seed(module, options.dropout) if options.dropout else None
        return run(q, k, v, plan, options, seed, self.group)

    def check_seen(self, name: str, before: int = 0) -> None:
        """Raise if layers of the model computed without calling us; `calls` was `before` when the model began."""
        for layer, (kind, needed) in self.needed.items():  # of a hybrid model
            if missing := sorted(needed - self.seen.get(layer, set())):
                raise BatchError(
                    f"layer {layer} ({kind}) of {name} has not seen longspan= in its {' and its '.join(missing)}."
                    f" {_UNUSABLE}"
                )
        if self.needed or self.rules.layers == "none":
            return
        num_seen, expected = self.calls - before, max(self.num_layers if self.rules.layers == "all" else 1, 1)
        if not num_seen:
            raise BatchError(f"no attention layer of {name} has seen longspan=. {_UNUSABLE}")
        if num_seen < expected:
            raise BatchError(
                f"only {num_seen} of the {expected} layers of {name} have seen longspan=. {_UNUSABLE} Or the others are"
                f" not attention layers."
            )

    def _dropout_seed(self, module: Any, dropout: float) -> int:
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise KernelError(
                f"attention dropout of {dropout} over ranks needs layer_idx, but {type(module).__name__} has no"
                f" layer_idx: all layers would drop the same pairs. Give each attention module its number as layer_idx,"
                f" or set attention_dropout to 0."
            )
        if self.dropout_seed is None:
            raise KernelError(
                f"attention dropout of {dropout} over ranks needs a seed, so that every rank drops the same pairs: pass"
                f" shard_inputs(..., dropout_seed=), the same number on every rank and another one in every step, or"
                f" set attention_dropout to 0."
            )
        return (self.dropout_seed + (layer + 1) * _STEP) % 2**62


def _local_kind(mask: LayerMask) -> Kind:
    """Return the kind of layer of a mask of local tokens. Packing in it has no meaning: where a rank's tokens have a
    gap, transformers sees two documents."""
    if mask.padding is not None and not mask.padding.all():  # some models make a mask of ones, which has no effect
        raise MaskError(
            "a mask of padding reached the layer together with longspan=: attention_mask= was passed to the model, or"
            " the model made one from this rank's tokens. Padding is inside longspan= already: call"
            " model(**shard_inputs(...)) without attention_mask; a model that makes its own cannot run over ranks."
        )
    if not mask.is_square:
        raise MaskError(
            f"there are {mask.q_len} queries and {mask.kv_len} keys on this rank: the layer has a cache, or attends to"
            f" another sequence. Over ranks both are shards of one sequence: pass use_cache=False, and generate on one"
            f" device."
        )
    if mask.kind is None:
        raise MaskError(
            "the model made this mask with a function of its own, from the tokens of this rank, so the mask of whole"
            " sequences is unknown. Use it on one device, or call longspan.attention with masks.from_mask_mod in global"
            " positions."
        )
    return mask.kind


def with_temperature(module: Any, q: Tensor, layout: Layout, rank: int) -> Tensor:
    """Return the queries of Llama 4's layers without rotary embedding, which are scaled by their global positions. The
    model counts from 0 on every rank: its local scaling is undone."""
    if getattr(module, "use_rope", True):
        return q
    places = to_device(torch.from_numpy(layout.positions(rank)), q.device)

    def scales(place: Tensor) -> Tensor:
        steps = torch.floor((place.to(accumulation_dtype(q.dtype)) + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    ratio = scales(places) / scales(torch.arange(q.shape[2], device=q.device))
    return (q * ratio[None, None, :, None]).to(q.dtype)
