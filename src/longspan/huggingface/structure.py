"""Facts about a model that its classes, modules and source tell without running it, and versions of transformers.

`adapter.py` keeps the facts of one model, so that a step does not look for them again.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from types import CodeType
from typing import Any

import torch
from torch import nn

from longspan._torch import children_of, hooks_of
from longspan.training import BatchError
from longspan.versions import minor

# -- Versions of transformers ------------------------------------------------------------------------------------------
# Minimum and tested versions are in `longspan.versions`. A piece goes when the minimum reaches its version.


HYBRIDS_SINCE = (5, 15)
"""Before it, layers keep their convolutions and recurrences as attributes or call nn.Conv1d: there is no name to
replace, and keyword arguments do not reach them."""
LATER_MIXERS = {
    "FalconH1Mixer": (5, 17), "NemotronHMamba2Mixer": (5, 17), "Lfm2ShortConv": (5, 21), "Lfm2MoeShortConv": (5, 21),
}  # fmt: skip
"""Layers that receive no keyword arguments, or pass none to their functions, before these."""
CHUNKED_MASKS_SINCE = (5, 20)
"""Before it, `create_masks_for_generate` fails for chunked layers (Llama 4), and for kinds that it has no mask for."""
PARTS_COUNTED_SINCE = (5, 19)
"""Before it, the Trainer divides the number of labels by the ranks of a sequence only if accelerate has a
ParallelismConfig."""


@cache
def transformers_version() -> tuple[int, int]:
    """Return the version of transformers."""
    import transformers

    return minor(transformers.__version__)


def check_hybrid(model: Any) -> None:
    """Raise for convolutions over tokens that cannot be replaced in the installed transformers."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, part in named_modules(text) if isinstance(text, nn.Module) else ():
        since = LATER_MIXERS.get(type(part).__name__, HYBRIDS_SINCE)
        if transformers_version() < since and any(
            isinstance(child, nn.Conv1d) and child.kernel_size != (1,) for child in part.children()
        ):
            raise BatchError(
                f"{name} ({type(part).__name__}) has a convolution over tokens, which Longspan can replace in"
                f" transformers {'.'.join(map(str, since))} or newer, but {'.'.join(map(str, transformers_version()))}"
                f" is installed. Update it, or use this model on one device."
            )


def method_code(method: Any) -> CodeType | None:
    """Return the code of a method of a modeling file, inside of its decorators, or None. In 5.15 the decorator
    `force_accelerate_hooks` has no `__wrapped__`, and holds the method as `forward_func`."""
    method = getattr(method, "__wrapped__", method)
    code = getattr(method, "__code__", None)
    if isinstance(code, CodeType) and "forward_func" in code.co_freevars:
        method = method.__closure__[code.co_freevars.index("forward_func")].cell_contents
    code = getattr(method, "__code__", None)
    return code if isinstance(code, CodeType) else None


def masks_by_kind(config: Any) -> list[Any]:
    """Return masks of two tokens that transformers makes for each kind of attention layer of a model."""
    from transformers import masking_utils as hf

    arguments = {"inputs_embeds": torch.empty(1, 2, 0), "attention_mask": None, "past_key_values": None}
    text = config.get_text_config()
    if transformers_version() >= CHUNKED_MASKS_SINCE or not hasattr(text, "layer_types"):
        masks = hf.create_masks_for_generate(config, **arguments)
        masks = list(masks.values()) if isinstance(masks, dict) else [masks]
    else:
        known = hf.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        kinds = dict.fromkeys(text.layer_types)
        named = [known[kind] for kind in kinds] if known.keys() >= kinds.keys() else []
        builders = [builder for one in named for builder in (one.values() if isinstance(one, dict) else [one])]
        masks = [builder(config=text, **arguments) for builder in dict.fromkeys(builders)]
    return [mask for mask in masks if mask is not None]


def labels_of_sequences(counted: Any, accelerator: Any, num_parts: int) -> Any:
    """Return the number of labels of all sequences of a step, from the Trainer's sum over all ranks, in which each rank
    of a sequence counted all labels of it."""
    by_trainer = (
        transformers_version() >= PARTS_COUNTED_SINCE or getattr(accelerator, "parallelism_config", None) is not None
    )
    return counted if counted is None or by_trainer else counted // num_parts


# -- Modules and configuration -----------------------------------------------------------------------------------------


HARMLESS = ("peft", "torchao", "bitsandbytes", "liger_kernel", "accelerate", "longspan")
"""Packages whose modules replace others and compute token by token."""
DROPS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")


def named_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return what `model.named_modules()` does, without a generator for each level of modules."""
    found, seen, waiting = [], set(), [("", model)]
    while waiting:
        path, module = waiting.pop()
        if id(module) not in seen:
            seen.add(id(module))
            found.append((path, module))
            for name, child in reversed(children_of(module).items()):
                if child is not None:
                    waiting.append((f"{path}.{name}" if path else name, child))
    return found


def modules_of(model: nn.Module) -> list[nn.Module]:
    return [module for _, module in named_modules(model)]


def text_model(model: Any) -> Any:
    """Return the model of transformers inside of wrappers (DDP, FSDP, PEFT, `torch.compile`), or None."""
    from transformers import PreTrainedModel

    if isinstance(model, nn.Module):
        for module in model.modules():
            if isinstance(module, PreTrainedModel):
                return module
    return None


def num_layers(model: nn.Module, config: Any) -> int:
    """Return how many layers with attention a forward pass has at least: those of the configuration, or fewer if the
    model itself holds fewer, as a stage of a pipeline does."""

    def lengths(module: nn.Module) -> Iterator[int]:  # of lists of modules, but not of lists inside of them (experts)
        for child in module.children():
            if isinstance(child, nn.ModuleList):
                yield len(child)
            else:
                yield from lengths(child)

    named = int(getattr(config, "num_hidden_layers", 0) or 0)
    return min(named, max(lengths(model), default=named))


def check_structure(model: Any, config: Any) -> None:
    """Raise for properties that a tiny copy would not show."""
    if config.is_encoder_decoder:
        raise BatchError(
            f"{type(model).__name__} has an encoder and a decoder, and two sequences. Over ranks there is one: use one"
            f" device."
        )
    for name in DROPS:
        if model.training and getattr(config, name, 0):
            raise BatchError(
                f"{name} must be 0 over ranks, but got {getattr(config, name)}: ranks might skip different layers."
            )


def padding_id(model: Any) -> int | None:
    """Return the token id that embeddings of the model treat as padding."""
    for module in modules_of(model):
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def shows_positions(model: nn.Module) -> bool:
    """Return whether any class of the model passes position_ids to transformers' mask functions."""
    return any(_shows_positions(kind) for kind in {type(module) for module in modules_of(model)})


@lru_cache(maxsize=1024)
def file_shows_positions(layer: type) -> bool:
    """Return whether any class of the file of a layer passes position_ids to transformers' mask functions."""
    others = vars(sys.modules[layer.__module__]).values()
    return any(_shows_positions(kind) for kind in others if isinstance(kind, type) and issubclass(kind, nn.Module))


@lru_cache(maxsize=1024)
def _shows_positions(kind: type) -> bool:
    """Parse the source of a class, and of those it builds on, for calls of mask functions with position_ids: by name,
    or in a dict of arguments."""
    sources = []
    for part in kind.__mro__:
        if not _is_common(part):
            with suppress(OSError, TypeError, IndentationError):  # a class typed at a prompt has no source
                sources.append(textwrap.dedent(inspect.getsource(part)))
    source = "\n".join(sources)
    if "create_" not in source:
        return False
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except SyntaxError:
        return False

    def names_in(nodes: Iterable[ast.AST]) -> set[str]:
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    builders = {name for name in names_in(nodes) if re.fullmatch(r"create_(?!bidirectional)\w*mask\w*", name)}
    for node in nodes:  # make = create_causal_mask if ... else create_sliding_window_causal_mask
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Name | ast.IfExp):
            continue
        if names_in(ast.walk(node.value)) & builders:
            builders |= names_in(node.targets)
    calls = [node for node in nodes if isinstance(node, ast.Call) and getattr(node.func, "id", "") in builders]
    keys = {getattr(key, "value", "") for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
    arguments = {word.arg for call in calls for word in call.keywords}
    arguments |= {getattr(value, "id", "") for call in calls for value in call.args}
    return "position_ids" in arguments or (None in arguments and "position_ids" in keys)


def _is_common(kind: type) -> bool:
    """Return whether a class is torch's, or one that all models of transformers share."""
    package, *rest = kind.__module__.split(".")
    return package in ("torch", "builtins") or (package == "transformers" and rest[:1] != ["models"])


# -- Classes that a model runs -----------------------------------------------------------------------------------------


def own_class(module: nn.Module) -> type:
    """Return the class of a module before torch.distributed derived another from it."""
    for kind in type(module).__mro__:
        is_fsdp = kind.__bases__[:1] and kind.__bases__[0].__module__ == "torch.distributed.fsdp"
        if not is_fsdp and not kind.__module__.startswith("torch.distributed"):  # FSDP's may be of "abc"
            return kind
    raise AssertionError("the last class is object")


def classes_of(model: nn.Module) -> dict[str, type]:
    """Return all classes of its modules, by their full names."""
    kinds = {own_class(module) for module in modules_of(model)}
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def find_unverified_module(model: nn.Module, known: Iterable[str], apart: Iterable[nn.Module] = ()) -> str | None:
    """Return the first module that has no known class, or whose forward was replaced: its check does not cover it.

    Layers of torch that compute token by token are accepted, those of packages that wrap them (adapters, quantisation),
    and everything inside of the models in `apart`, each of which runs whole on every rank.
    """
    names, elsewhere = set(known), {id(part) for module in apart for part in modules_of(module)}
    for path, module in named_modules(model):
        if id(module) in elsewhere:
            continue
        kind = own_class(module)
        where = f"{path or 'the model'} ({kind.__name__})"
        package = kind.__module__.split(".")[0]
        is_harmless = package in HARMLESS or kind.__module__.startswith("transformers.integrations")
        if package == "torch":
            is_harmless = not issubclass(kind, nn.Conv1d | nn.RNNBase | nn.BatchNorm1d | nn.MultiheadAttention)
        if not is_harmless and f"{kind.__module__}.{kind.__qualname__}" not in names:
            return where
        if path and _has_other_forward(module):  # trainers wrap the forward of the model itself
            return f"{where}, whose forward was replaced"
    return None


def _has_other_forward(module: nn.Module) -> bool:
    """Return whether this module has another forward than its class. Accelerate, the compiler and Liger set forwards
    that compute what the class's does; a function inside of theirs may be a user's."""
    known = {id(value) for kind in type(module).__mro__ for value in vars(kind).values()}
    own = vars(module)
    for forward in (own.get("forward"), own.get("_old_forward")):
        while forward is not None and id(forward) not in known:
            inner = getattr(forward, "func", None) or getattr(forward, "__func__", None)
            if inner is None:
                home = getattr(forward, "__globals__", {}).get("__name__") or type(forward).__module__
                if home.partition(".")[0] not in (*HARMLESS, "torch"):
                    return True
                inner = getattr(forward, "__wrapped__", None)
            forward = inner
    return False


def has_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether this function, or a partial of it, is a hook of the module. A deep copy of a model has its hooks.

    >>> import copy
    >>> linear, hook = nn.Linear(2, 2), print
    >>> handle = linear.register_forward_hook(hook)
    >>> has_hook(linear, hook), has_hook(copy.deepcopy(linear), hook), has_hook(nn.Linear(2, 2), hook)
    (True, True, False)
    """
    return any(getattr(item, "func", item) is hook for kind in hooks_of(module) for item in kind.values())
