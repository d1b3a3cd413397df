"""What a model of transformers does beside attention, as far as its classes, modules and source tell: its head, where
its positions come from, layers that mix tokens, and whether its masks look for documents.

Only what is known to go wrong on parts of sequences is refused. Nothing here is run.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from longspan.training import BatchError

PER_TOKEN = ("CAUSAL_LM", "MASKED_LM", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING")
POOLED = ("SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "PRETRAINING")
_MAKER = re.compile(r"create_(?!bidirectional)\w*mask\w*")
DROPS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")


def text_model(model: Any) -> Any:
    """The model of transformers inside of wrappers (DDP, FSDP, PEFT, `torch.compile`), or None."""
    from transformers import PreTrainedModel

    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, PreTrainedModel)), None)


def num_layers(model: nn.Module, config: Any) -> int:
    """How many layers with attention a forward pass has at least: those of the config, or fewer where the model itself
    holds fewer, as a part of a pipeline does."""
    named = int(getattr(config, "num_hidden_layers", 0) or 0)
    return min(named, max(_lists(model), default=named))


def _lists(module: nn.Module) -> Iterator[int]:
    """Lengths of the lists of modules, but not of those inside of them (experts)."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield len(child)
        else:
            yield from _lists(child)


def check_structure(model: Any, config: Any, batch: Mapping[str, Any], tried: bool, any_model: bool) -> None:
    """Refuses a model that would compute something else on parts of sequences."""
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise BatchError(
            f"{name} has an encoder and a decoder, and two sequences. Over ranks there is one: use one device."
        )
    _check_head(model, name, batch, any_model)
    _check_mixing(model, config, name)
    _check_positions(model, name, batch, tried)


# -- heads -------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _heads() -> dict[str, str]:
    """What the head of a class of transformers is for, by the name of the class; the first purpose of those with
    several."""
    from transformers.models.auto import modeling_auto as auto

    heads: dict[str, str] = {}
    for head in ("CAUSAL_LM", "BASE", *PER_TOKEN[1:], *POOLED):
        table = "MODEL_MAPPING_NAMES" if head == "BASE" else f"MODEL_FOR_{head}_MAPPING_NAMES"
        for names in getattr(auto, table, {}).values():
            for name in (names,) if isinstance(names, str) else names:
                heads.setdefault(name, head)
    return heads


def _check_head(model: Any, name: str, batch: Mapping[str, Any], any_model: bool) -> None:
    head = next((entry for kind in type(model).__mro__ if (entry := _heads().get(kind.__name__))), None)
    if model.base_model is model and getattr(model, "pooler", None) is not None:
        raise BatchError(
            f"{name} has a pooling layer, which takes the first token of each sequence, and over ranks each would take"
            f" one of its own part. Build it with add_pooling_layer=False, and pool what"
            f" longspan.training.gather_outputs puts together."
        )
    if head in POOLED:
        raise BatchError(
            f"{name} pools: it computes with one token of each sequence, the first or the last, and over ranks each"
            f" would take one of its own part. Call the model below it ({type(model.base_model).__name__}), put its"
            f" hidden states together with longspan.training.gather_outputs (relayout in training), and apply the head"
            f" to those."
        )
    if head is None and not any_model:
        raise BatchError(
            f"{name} is not among the classes whose results are known to be one per token. If its results and its loss"
            f" are, pass any_model=True, and compare them with one device's."
        )
    if head in ("MASKED_LM", "TOKEN_CLASSIFICATION") and _given(batch, "labels", "shift_labels"):
        raise BatchError(
            f"{name} divides its loss by the labels of one rank, and ranks hold different numbers. Take labels out of"
            f" the batch, cut them with layout.shard(labels, rank, 1) of inputs['longspan'].layout, and compute"
            f" longspan.training.token_loss(logits, labels, group=..., gradients=...)."
        )
    if head == "QUESTION_ANSWERING" and _given(batch, "start_positions", "end_positions", "labels"):
        raise BatchError(
            f"the loss of {name} compares all tokens of a sequence with each other, and a rank has a part of them. Take"
            f" start_positions and end_positions out of the batch, put logits together with"
            f" longspan.training.gather_outputs (relayout in training), and compute the loss of those."
        )


def _given(batch: Mapping[str, Any], *names: str) -> bool:
    return any(batch.get(name) is not None for name in names)


# -- tokens that meet elsewhere ----------------------------------------------------------------------------------------


def _check_mixing(model: Any, config: Any, name: str) -> None:
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    text = text if isinstance(text, nn.Module) else model
    callers = [module for module in text.modules() if "causal_conv1d_fn" in _source(type(module))]
    handled = {id(part) for module in callers for part in module.children()}
    mixing = {type(module).__name__ for module in text.modules() if _mixes(module) and id(module) not in handled}
    if getattr(config, "trigram_input", False):
        mixing.add("embeddings of three neighbouring tokens")
    if mixing:
        raise BatchError(
            f"{name} has {', '.join(sorted(mixing))}, in which tokens meet by other means than attention. Over ranks"
            f" they would see this rank's tokens alone."
        )
    for drop in DROPS:
        if model.training and getattr(config, drop, 0):
            raise BatchError(
                f"{drop} = {getattr(config, drop)} leaves layers out at random, and ranks might leave out different"
                f" ones. Set it to 0."
            )


def _mixes(module: nn.Module) -> bool:
    wide = isinstance(module, nn.Conv1d) and module.kernel_size != (1,)
    return wide or isinstance(module, nn.RNNBase | nn.BatchNorm1d)


# -- positions and documents -------------------------------------------------------------------------------------------


def _check_positions(model: Any, name: str, batch: Mapping[str, Any], tried: bool) -> None:
    takes = (inspect.signature(part.forward).parameters for part in (model, model.base_model))
    if not any("position_ids" in parameters for parameters in takes):
        raise BatchError(
            f"{name} takes no position_ids: it would count positions from 0 on every rank. Use it on one device."
        )
    if batch.get("position_ids") is not None:
        return
    if any("create_position_ids_from_input" in _source(type(module)) for module in model.modules()):
        raise BatchError(
            f"{name} makes positions from token ids in its own way (they begin after that of padding). Put position_ids"
            f" (batch, tokens) into the batch, as the model makes them of whole sequences."
        )
    mask = batch.get("attention_mask")
    if not tried and isinstance(mask, torch.Tensor) and mask.ndim == 2 and bool((mask.diff(dim=1) > 0).any()):
        raise BatchError(
            f"there is padding in front of tokens, and some models count positions from the first real token. Put"
            f" position_ids (batch, tokens) into the batch, as {name} makes them of whole sequences."
        )


def check_packing(model: Any, is_causal: bool) -> None:
    """Refuses documents in position_ids where the model would not tell them apart on one device."""
    if is_causal and any(_shows_positions(type(module)) for module in model.modules()):
        return
    raise BatchError(
        f"position_ids start again with every document, but {type(model).__name__} does not show them to transformers'"
        f" masks: on one device its documents see each other, and over ranks they would not. Pack documents with"
        f" cu_seq_lens_q or seq_idx, which are obeyed everywhere, or give every document a row."
    )


@lru_cache(maxsize=1024)
def _source(kind: type) -> str:
    """The source of a class and of those it builds on, but for what all models share."""
    sources = []
    for part in kind.__mro__:
        package, *rest = part.__module__.split(".")
        if package in ("torch", "builtins") or (package == "transformers" and rest[:1] != ["models"]):
            continue
        try:
            sources.append(textwrap.dedent(inspect.getsource(part)))
        except (OSError, TypeError, IndentationError):
            continue  # a class typed at a prompt has no source
    return "\n".join(sources)


@lru_cache(maxsize=1024)
def _shows_positions(kind: type) -> bool:
    """Whether a class calls a mask function of transformers with position_ids: by name, or in a dict of arguments."""
    source = _source(kind)
    if "create_" not in source:
        return False
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return False
    nodes = list(ast.walk(tree))
    makers = {name for name in _names(tree) if _MAKER.fullmatch(name)}
    for node in nodes:  # make = create_causal_mask if ... else create_sliding_window_causal_mask
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Name | ast.IfExp)
            and _names(node.value) & makers
        ):
            makers |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in makers]
    keys = {getattr(key, "value", "") for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    given = {word.arg for call in calls for word in call.keywords}
    given |= {getattr(value, "id", "") for call in calls for value in call.args}
    return "position_ids" in given or (None in given and "position_ids" in keys)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
