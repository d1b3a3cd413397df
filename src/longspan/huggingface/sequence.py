"""A batch's sequences over ranks: what an attention layer must know and its local tensors cannot tell.

One object per batch goes to the model as the keyword `longspan=`, and transformers hands it down to every attention
layer. So nothing is remembered outside of the call, and recomputation in backward sees what forward saw.
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
from longspan.huggingface.attention import Asked, check_layer_mask, run
from longspan.huggingface.masks import Frame, Kind, LayerMask, Term, mask_of, per_row_alike, term_of_kind
from longspan.huggingface.structure import Rules
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.tile import wide
from longspan.training import BatchError

_STEP = 0x9E3779B97F4A7C15


class Whole:
    """The whole batch: its size, which tokens are real, and the document of each."""

    def __init__(
        self, batch: int, seq_len: int, padding: NDArray[np.bool_] | None, documents: NDArray[Any] | None
    ) -> None:
        self.batch, self.seq_len = batch, seq_len
        self.padding, self.documents = padding, documents
        self._masks: dict[Kind, Mask] = {}

    @property
    def left_padding(self) -> NDArray[Any]:
        """Tokens before the first real one; transformers counts chunks from there."""
        if self.padding is None:
            return np.zeros(self.batch, dtype=np.int64)
        return (np.cumsum(self.padding, axis=1) == 0).sum(axis=1)

    def mask(self, kind: Kind) -> Mask:
        """The mask of whole sequences for layers of this kind."""
        if kind not in self._masks:
            term = term_of_kind(kind, self.left_padding)
            frame = Frame(0, self.seq_len)
            mask = mask_of(term, frame, self.batch)
            if self.documents is not None:
                mask = mask & per_row_alike(self.documents)
            if self.padding is not None:
                mask = mask & mask_of(Term("padding", table=self.padding), frame, self.batch)
            self._masks[kind] = mask
        return self._masks[kind]


class ShardedSequence:
    """This rank's part of a batch of sequences: pass it to the model as `longspan=`; `shard_inputs` makes it.

    No dataclass: wrappers of modules take those apart to look for tensors.
    """

    def __init__(
        self,
        whole: Whole,
        layout: Layout,
        group: dist.ProcessGroup,
        scheme: str,
        dropout_seed: int | None,
        rules: Rules = Rules(),  # noqa: B008  (frozen)
    ) -> None:
        self.whole, self.layout, self.group, self.rules = whole, layout, group, rules
        self.rank = group.rank()
        self.is_cut = rules.body is None
        """Whether what the model computes with is this rank's part by now."""
        self.is_joined = False
        """Whether tokens of all ranks have been put together again."""
        self.checks_hooks = True
        """Whether hooks of users may change nothing in the forward pass; not with trust_model=True."""
        self.arguments: frozenset[str] = frozenset()
        """Names of what the model is to be called with."""
        self.depth = 0
        """How many modules that listen are running, one inside of another."""
        self.labels: Tensor | None = None
        self.num_items: Any = None
        """This rank's labels, and how many there are on all ranks, where the model's own loss takes a mean."""
        self.at_head: Any = None
        """What is computed at the model's head instead of logits, or None."""
        self.model: Callable[[], Any] = lambda: None
        """The model of transformers itself, whatever wraps it."""
        self.position_ids: Tensor | None = None
        """This rank's positions, where the model is cut inside and is given none."""
        self.largest: Any = None
        """The largest position of the whole batch, where rotary embeddings depend on it."""
        self.scheme, self.dropout_seed = scheme, dropout_seed
        self.calls = 0
        """How many layers have asked so far."""
        self.num_layers = 0
        """How many must ask in one forward pass; 0 where nobody knows."""
        self.calls_before: dict[int, int] = {}
        """What `calls` was when a module began its forward pass, by the module's id."""
        self.needed: dict[str, tuple[str, frozenset[str]]] = {}
        """For every layer of a hybrid model, by name: its class, and what of it must be seen; empty for others."""
        self.seen: dict[str, set[str]] = {}
        """What was seen of each layer in this forward pass."""
        self.inside: list[str] = []
        """Names of the layers that are running, the innermost last."""
        self._plans: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.layout}, {self.whole.batch} rows>"

    def plan(self, kind: Kind | LayerMask, q: Tensor, k: Tensor, v: Tensor) -> Plan:
        """The plan of layers of this kind, or under this mask of whole sequences, with tensors of these shapes."""
        key = (kind, q.shape[1], k.shape[1], q.shape[3], v.shape[3], q.dtype)
        mask = kind.mask if isinstance(kind, LayerMask) else self.whole.mask(kind)
        return self.plan_of(
            key,
            lambda: make_plan(
                mask, self.layout, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
                v_head_dim=v.shape[3], dtype=q.dtype, batch=self.whole.batch, scheme=self.scheme,
            ),
        )  # fmt: skip

    def plan_of(self, key: Any, make: Callable[[], Any]) -> Any:
        """The plan that was made under this key, or that is made now."""
        if key not in self._plans:
            self._plans[key] = make()
        return self._plans[key]

    def note(self, kind: str) -> None:
        """A layer has asked for attention, a convolution or a recurrence."""
        self.calls += kind == "attention"
        if self.inside:
            self.seen.setdefault(self.inside[-1], set()).add(kind)

    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, given: Any, asked: Asked) -> Tensor:
        """Attention of this rank's tokens to those of all ranks."""
        if given is None:
            raise MaskError(
                f"{type(module).__name__} passed no mask, so it cannot be told whether this layer is causal. Call"
                f" longspan.huggingface.register() and name the attention 'longspan'."
            )
        check_layer_mask(given, asked)
        kind = given if given.is_whole else _local_kind(given)
        self.note("attention")
        q = with_temperature(module, q, self.layout, self.rank)
        plan = self.plan(kind, q, k, v)
        return run(q, k, v, plan, asked, self._seed(module, asked), self.group)

    def check_seen(self, name: str, before: int = 0) -> None:
        """Refuses what a model has computed without its layers having asked here; they asked `before` times before."""
        if self.needed:
            return self._check_layers(name)
        if self.rules.layers == "none":
            return None
        num_seen, wanted = self.calls - before, max(self.num_layers if self.rules.layers == "all" else 1, 1)
        if num_seen >= wanted:
            return None
        if not num_seen:
            raise BatchError(
                f"no attention layer of {name} has seen longspan=: the model did not hand it down, and each rank"
                f" attended to its own tokens alone. Such a model cannot be used on parts of sequences."
            )
        raise BatchError(
            f"only {num_seen} of the {wanted} layers of {name} have seen longspan=. In the others each rank saw its own"
            f" tokens alone: the model did not hand it down to them, or they are not attention layers. Such a model"
            f" cannot be used on parts of sequences."
        )

    def _check_layers(self, name: str) -> None:
        """Refuses what a hybrid model has computed where some layer did not ask for all that it mixes tokens by."""
        for layer, (kind, needed) in self.needed.items():
            if missing := sorted(needed - self.seen.get(layer, set())):
                raise BatchError(
                    f"layer {layer} ({kind}) of {name} has not seen longspan= in its {' and its '.join(missing)}: the"
                    f" model did not hand it down, and each rank computed with its own tokens alone. Such a model"
                    f" cannot be used on parts of sequences."
                )

    def _seed(self, module: Any, asked: Asked) -> int | None:
        if not asked.dropout:
            return None
        layer = getattr(module, "layer_idx", None)
        if layer is None:
            raise KernelError(
                f"attention dropout of {asked.dropout} was asked for over ranks by {type(module).__name__}, which has"
                f" no layer_idx: layers could not be told apart, and all would drop the same pairs. Give each attention"
                f" module its number as layer_idx, or set attention_dropout to 0."
            )
        if self.dropout_seed is None:
            raise KernelError(
                f"attention dropout of {asked.dropout} was asked for over ranks. Every rank must drop the same pairs:"
                f" pass shard_inputs(..., dropout_seed=), the same number on every rank and another one in every step,"
                f" or set attention_dropout to 0."
            )
        return (self.dropout_seed + (layer + 1) * _STEP) % 2**62


def _local_kind(given: LayerMask) -> Kind:
    """The kind of layer that a mask of local tokens stands for. Packing in it means nothing: where a rank's tokens have
    a gap, transformers takes them for two documents."""
    if given.padding is not None and not given.padding.all():  # some models make a mask of ones, which says nothing
        raise MaskError(
            "a mask of padding reached the layer beside longspan=: attention_mask= was given to the model, or the model"
            " made one from this rank's tokens. Padding is inside longspan= already: call model(**shard_inputs(...))"
            " without attention_mask; a model that makes its own cannot be used over ranks."
        )
    if not given.is_square:
        raise MaskError(
            f"there are {given.q_len} queries and {given.kv_len} keys on this rank: the layer has a cache, or looks at"
            f" another sequence. Over ranks both are shards of one sequence: pass use_cache=False, and generate on one"
            f" device."
        )
    if given.kind is None:
        raise MaskError(
            "the model made this mask with a function of its own, from the tokens of this rank. What it would say about"
            " whole sequences cannot be told. Use it on one device, or call longspan.attention with masks.from_mask_mod"
            " in global positions."
        )
    return given.kind


def with_temperature(module: Any, q: Tensor, layout: Layout, rank: int) -> Tensor:
    """Queries of Llama 4's layers without rotary embedding, which are scaled by their place in the sequence. The model
    counts places from 0 on every rank: its local scaling is undone and redone with global places."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return q
    places = torch.as_tensor(layout.positions(rank), device=q.device)

    def scales(place: Tensor) -> Tensor:
        steps = torch.floor((place.to(wide(q.dtype)) + 1.0) / module.floor_scale)
        return torch.log1p(steps) * module.attn_scale + 1.0

    ratio = scales(places) / scales(torch.arange(q.shape[2], device=q.device))
    return (q * ratio[None, None, :, None]).to(q.dtype)
