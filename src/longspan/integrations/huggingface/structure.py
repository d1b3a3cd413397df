"""What classes, modules and source of a model of transformers tell without running it: its layers, and whether its
masks look for documents; of which classes it is made, what their code is, and what somebody has put into it."""

from __future__ import annotations

import ast
import hashlib
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any

from torch import nn

from longspan.training import BatchError

_MAKER = re.compile(r"create_(?!bidirectional)\w*mask\w*")
HARMLESS = ("peft", "torchao", "bitsandbytes", "liger_kernel", "accelerate", "longspan")
"""Packages whose modules stand for others, token by token."""
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


def check_structure(model: Any, config: Any) -> None:
    """Refuses what a tiny copy would not show."""
    name = type(model).__name__
    if config.is_encoder_decoder:
        raise BatchError(
            f"{name} has an encoder and a decoder, and two sequences. Over ranks there is one: use one device."
        )
    for drop in DROPS:
        if model.training and getattr(config, drop, 0):
            raise BatchError(
                f"{drop} = {getattr(config, drop)} leaves layers out at random, and ranks might leave out different"
                f" ones. Set it to 0."
            )


def padding_id(model: Any) -> int | None:
    """The token id that embeddings of the model take for padding."""
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    found = next((table.padding_idx for table in tables if table.padding_idx is not None), None)
    return getattr(model.config.get_text_config(), "pad_token_id", None) if found is None else found


def check_packing(model: Any, is_causal: bool) -> None:
    """Refuses documents in position_ids where the model would not tell them apart on one device."""
    if is_causal and any(_shows_positions(type(module)) for module in model.modules()):
        return
    raise BatchError(
        f"position_ids start again with every document, but {type(model).__name__} does not show them to transformers'"
        f" masks: on one device its documents see each other, and over ranks they would not. Pack documents with"
        f" cu_seq_lens_q or seq_idx, which are obeyed everywhere, or give every document a row."
    )


def _is_common(kind: type) -> bool:
    """Whether a class is torch's, or one that all models of transformers share."""
    package, *rest = kind.__module__.split(".")
    return package in ("torch", "builtins") or (package == "transformers" and rest[:1] != ["models"])


@lru_cache(maxsize=1024)
def _source(kind: type) -> str:
    """The source of a class and of those it builds on, but for what all models share."""
    sources = []
    for part in kind.__mro__:
        if _is_common(part):
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


# -- what a model is made of -------------------------------------------------------------------------------------------


def own_class(module: nn.Module) -> type:
    """The class of a module, whatever torch.distributed has made of it."""
    return next(kind for kind in type(module).__mro__ if not kind.__module__.startswith("torch.distributed"))


def classes_of(model: nn.Module) -> dict[str, type]:
    """All classes of its modules, by their full names."""
    kinds = {own_class(module) for module in model.modules()}
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def code_of(model: nn.Module) -> str:
    """A digest of all code that its classes run, but for that of torch and what all models of transformers share."""
    digest = hashlib.sha256()
    for name, kind in sorted(classes_of(model).items()):
        digest.update(name.encode())
        for part in kind.__mro__:
            if _is_common(part):
                continue
            for called, value in sorted(vars(part).items()):
                code = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
                if isinstance(code, CodeType):
                    digest.update(called.encode() + _text_of(code))
    return digest.hexdigest()[:24]


def _text_of(code: CodeType) -> bytes:
    consts = [_text_of(const) if isinstance(const, CodeType) else repr(const).encode() for const in code.co_consts]
    return code.co_code + repr(code.co_names).encode() + b"".join(consts)


def put_in(model: nn.Module, known: Iterable[str], apart: Iterable[nn.Module] = ()) -> str | None:
    """The first module that is of no known class, or whose forward was replaced: a proof does not speak of it.

    Layers of torch that take every token by itself do no harm, nor do those of packages that wrap them (adapters,
    quantisation), nor what is inside of models that stand apart, each of which is run whole on every rank.
    """
    names, elsewhere = set(known), {id(part) for module in apart for part in module.modules()}
    for path, module in model.named_modules():
        if id(module) in elsewhere:
            continue
        kind = own_class(module)
        name = f"{kind.__module__}.{kind.__qualname__}"
        where = f"{path or 'the model'} ({kind.__name__})"
        if name not in names and not _is_harmless(kind):
            return where
        if path and _is_replaced(module):  # trainers wrap the forward of the model itself
            return f"{where}, whose forward was replaced"
    return None


def _is_replaced(module: nn.Module) -> bool:
    """Whether somebody has given this module another forward. Accelerate and the compiler keep the old one inside, and
    Liger's takes every token by itself, as the old one did."""
    forward = vars(module).get("forward")
    kept = hasattr(module, "_old_forward") or hasattr(forward, "_torchdynamo_orig_callable")
    package = (getattr(forward, "__module__", None) or "").split(".")[0]
    return forward is not None and not kept and package not in HARMLESS


def _is_harmless(kind: type) -> bool:
    package = kind.__module__.split(".")[0]
    if package == "torch":
        return not issubclass(kind, nn.Conv1d | nn.RNNBase | nn.BatchNorm1d | nn.MultiheadAttention)
    return package in HARMLESS or kind.__module__.startswith("transformers.integrations")
