"""The part of a model that one rank of tensor and expert parallelism has.

Both are as torchtitan does them. A rank of `tp` has 1/tp of the heads, of the inner sizes of MLPs, and of the
vocabulary. Rows between blocks are sharded over tp ("sequence parallel"), so norms run on 1/tp of the tokens; a block
gathers its input, which is kept whole, and reduce-scatters its output. Router, norm and low-rank weights are on every
rank of tp.

A rank of `ep` has 1/ep of the experts, and tokens are sent to their experts and back. The ranks of ep are also ranks of
data, context and tensor parallel, so experts are sharded by FSDP over gpus / ep ranks. With both, every rank of tp
routes its own rows, and experts are not split by tp.

>>> tiny = sizes_of({"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2,
...                  "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 100})
>>> list(split_model(tiny, tp=2).attentions)
[Heads(q_heads=4, kv_heads=1, head_dim=8, v_head_dim=8, window=None)]
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from longspan.errors import PlanError
from longspan.planning.machine import Machine
from longspan.sizing.families import sizes_of
from longspan.sizing.modules import Block, LayerSizes, ModelSizes, ModuleSizes

HEADS = ("num_attention_heads", "num_key_value_heads")
INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
"""Keys of a configuration that tensor parallelism divides."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
ROUTED = ("router", "router's input", "gate of the shared expert", "experts")
"""Modules of a block of experts that run on a rank's own rows where there is expert parallelism."""


def why_no_tp(sizes: ModelSizes) -> str | None:
    """Return why tensor parallelism of this model is not sized, or None."""
    kinds = sorted(sizes.num_blocks.keys() & {"recurrent", "convolution"})
    if kinds:
        return f"tensor parallelism of {' and '.join(kinds)} layers is not sized"
    if sizes.model_type == "phi3":
        return "projections that are one matrix are not split by heads"
    return "its norms are over all heads together" if sizes.model_type in ("olmo2", "olmo3") else None


def split_model(sizes: ModelSizes, tp: int = 1, ep: int = 1) -> ModelSizes:
    """Return the sizes of one rank's part of the model, before FSDP shards it.

    Raises:
        PlanError: the model cannot be divided, or not evenly. As in torchtitan, key/value heads are not replicated.
    """
    for name, number in (("tp", tp), ("ep", ep)):
        if number < 1:
            raise PlanError(f"`{name}` must be >= 1, but got {number}. Use 1 for none.")
    if tp == ep == 1:
        return sizes
    config = dict(sizes.config)
    if tp > 1:
        if (why := why_no_tp(sizes)) is not None:
            raise PlanError(f"`tp` must be 1 for this model, but got {tp}: {why}. Use more ranks of cp or dp.")
        config |= _divided_keys(config, sizes, tp)
    if ep > 1:
        total = next((config[key] for key in EXPERTS if config.get(key)), 0)
        if "experts" not in sizes.num_blocks:
            raise PlanError(f"`ep` must be 1 for a model without experts, but got {ep}. Leave it out.")
        if total % ep:
            raise PlanError(f"`ep` must divide the {total} experts, but got {ep}. Use a divisor.")
    part = sizes_of(config)
    layers = [
        LayerSizes(
            tuple(_block(*blocks, sizes.hidden, tp, ep) for blocks in zip(whole.blocks, layer.blocks, strict=True))
        )
        for whole, layer in zip(sizes.layers, part.layers, strict=True)
    ]
    return replace(part, layers=tuple(layers), last=_on_rows(sizes.last, tp), tp=tp, ep=ep, whole=sizes)


def _divided_keys(config: dict[str, Any], sizes: ModelSizes, tp: int) -> dict[str, int]:
    """Return the keys of a configuration that are smaller on a rank of tp."""
    heads = next(iter(sizes.attentions), None)
    assert heads is not None  # every family without attention has other kinds, which are refused
    numbers = {"query heads": heads.q_heads, "key/value heads": heads.kv_heads}
    numbers |= {key: config[key] for key in INNER if config.get(key)}
    for name, number in numbers.items():
        if number % tp:
            raise PlanError(f"`tp` must divide the {number} {name}, but got {tp}. Use a divisor.")
    keys = {key: config[key] // tp for key in (*HEADS, *INNER) if config.get(key)}
    return {**keys, "head_dim": heads.head_dim, "vocab_size": -(-sizes.vocab // tp)}


def _block(whole: Block, part: Block, hidden: int, tp: int, ep: int) -> Block:
    """Return a block of a rank; `part` has its heads and inner sizes."""
    modules: list[ModuleSizes] = []
    gathers = ep == 1 or whole.kind != "experts"
    for old, new in zip(whole.modules, part.modules, strict=True):
        if old.name == "norm":
            modules.append(_on_rows(old, tp))
        elif ep > 1 and whole.kind == "experts" and old.name in ROUTED:
            modules.append(_experts(old, tp, ep) if old.name == "experts" else _on_rows(old, tp))
        else:
            # The first module of a shared expert keeps its gathered input: the router has a part of it only.
            again = not gathers and tp > 1
            modules.append(replace(new, kept=hidden) if again else new)
            gathers = True
    return replace(part, modules=tuple(modules), gathers=gathers)


def _on_rows(module: ModuleSizes, tp: int) -> ModuleSizes:
    """Return a module that runs on 1/tp of the tokens, with all of its parameters."""
    numbers = ("kept", "kept_wide", "kept_copies", "kept_indices", "working", "tiled", "for_weight", "for_weight_wide")
    smaller = {name: -(-getattr(module, name) // tp) for name in numbers}
    return replace(module, **smaller, active=-(-module.active_params // tp))


def _experts(module: ModuleSizes, tp: int, ep: int) -> ModuleSizes:
    """Return a rank's experts: as many rows as without ep, if routing is balanced, and what is sent for them."""
    on_rows = _on_rows(module, tp)
    sent = -(-module.sent // tp)
    return replace(on_rows, params=module.params // ep, sent=sent, working=on_rows.working + sent)


def axis_machine(machine: Machine, stride: int) -> Machine:
    """Return the machine as ranks see it that are `stride` ranks apart: a node has as many fewer of them.

    >>> from longspan.planning.machine import H100
    >>> axis_machine(H100, 4).node, len(axis_machine(H100, 8).links)
    (2, 1)
    """
    inner, outer = machine.links[:-1], machine.links[-1]
    for link in inner:
        if link.ranks % stride and stride % link.ranks:
            raise PlanError(
                f"`tp` and `ep` must divide the {link.ranks} ranks of a node, or be a multiple, but got {stride}."
            )
    links = tuple(replace(link, ranks=link.ranks // stride) for link in inner if link.ranks > stride)
    return machine if stride == 1 else replace(machine, links=(*links, outer))
