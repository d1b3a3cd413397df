"""Facts about a model that its classes, modules and source tell without running it, and versions of transformers.

`adapter.py` keeps the facts of one model, so that a step does not look for them again.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache, partial, partialmethod
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Literal

import torch
from torch import nn

from longspan._torch import hooks_of
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
    for name, part in text.named_modules() if isinstance(text, nn.Module) else ():
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


# -- Rules of a model --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """How one model runs over ranks, as determined by its check: plain values, which are stored on disk."""

    positions: Literal["count", "after padding", "real tokens", "none"] = "count"
    """If a batch has no position_ids: tokens are counted from 0 ("count"), from padding_idx + 1 without padding
    ("after padding", RoBERTa), from 0 without padding, which is at -1 ("real tokens", OPT), or the model takes none
    ("none")."""
    loss: Literal["own", "shifted", "in place", "pooled", "none"] = "own"
    """The model's own loss takes shift_labels ("own"); cross-entropy of labels one place earlier ("shifted") or in
    place ("in place"), divided by all labels; a loss of whole sequences, the same on all ranks ("pooled"); or none."""
    handed: Literal["keywords", "mask"] = "keywords"
    """Whether layers receive the sequence by the keyword `longspan`, or by their mask alone."""
    body: str | None = None
    """The name of the backbone whose inputs are sharded; None if they are sharded before the model."""
    joined: str | None = None
    """The name of the module after which tokens of all ranks are gathered; None if they stay sharded."""
    cuts: tuple[tuple[str, int, int], ...] = ()
    """(argument of the backbone, its number of dims, the dim of tokens)."""
    head: str | None = None
    """The name of the head whose logits need not be computed; None if they are, for `head_reason`."""
    head_reason: str = ""
    scale: str = ""
    soft_cap: str = ""
    """The factor ("logit_scale", or "1 / logits_scaling") and the cap of logits, as names of values of the
    configuration; "" for none."""
    obeys_count: bool = True
    """Whether the model's loss on one device is divided by `num_items_in_batch` if the batch has it."""
    exact_at_padding: bool = True
    """Whether the model computes at padding what it computes there on one device, so that labels there are exact."""
    layers: str = "all"
    """Whether "all" layers of the configuration have attention, "some" of them, or "none"."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cuts": [list(cut) for cut in self.cuts]}

    @staticmethod
    def of_json(values: dict[str, Any]) -> Rules:
        """
        >>> Rules.of_json(Rules(cuts=(("x", 3, 1),)).as_json()) == Rules(cuts=(("x", 3, 1),))
        True
        """
        return Rules(**{**values, "cuts": tuple((str(n), int(a), int(b)) for n, a, b in values["cuts"])})


# -- Modules and configuration -----------------------------------------------------------------------------------------


HARMLESS = ("peft", "torchao", "bitsandbytes", "liger_kernel", "accelerate", "longspan")
"""Packages whose modules replace others and compute token by token."""
DROPS = ("layerdrop", "decoder_layerdrop", "encoder_layerdrop")


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
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx
    return getattr(model.config.get_text_config(), "pad_token_id", None)


def shows_positions(model: nn.Module) -> bool:
    """Return whether any class of the model passes position_ids to transformers' mask functions."""
    return any(_shows_positions(kind) for kind in {type(module) for module in model.modules()})


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


# -- Code that a model runs --------------------------------------------------------------------------------------------


def own_class(module: nn.Module) -> type:
    """Return the class of a module before torch.distributed derived another from it."""
    for kind in type(module).__mro__:
        is_fsdp = kind.__bases__[:1] and kind.__bases__[0].__module__ == "torch.distributed.fsdp"
        if not is_fsdp and not kind.__module__.startswith("torch.distributed"):  # FSDP's may be of "abc"
            return kind
    raise AssertionError("the last class is object")


def classes_of(model: nn.Module) -> dict[str, type]:
    """Return all classes of its modules, by their full names."""
    kinds = {own_class(module) for module in model.modules()}
    return {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds}


def code_in(value: Any, known: Container[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name of its module, function, class or object) for the code that a value runs, inside of wrappers too.

    Functions whose address is known are not searched.

    >>> from functools import partial
    >>> [name for name, _ in code_in(partial(nn.functional.pad, pad=(1, 0)))], list(code_in(3))
    (['torch.nn.functional'], [])
    """

    def is_code(value: Any) -> bool:
        return isinstance(value, FunctionType | MethodType | partial)

    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):  # functools.wraps changes __module__, but not __globals__
            yield str(item.__globals__.get("__name__", "")), item
            for cell in () if id(item) in known else item.__closure__ or ():
                with suppress(ValueError):  # a cell that is still empty
                    waiting += filter(is_code, (cell.cell_contents,))
        elif isinstance(item, MethodType | staticmethod | classmethod):
            waiting.append(item.__func__)
        elif isinstance(item, property):
            waiting += [item.fget, item.fset]
        elif isinstance(item, partial | partialmethod):
            waiting += [item.func, *filter(is_code, (*item.args, *item.keywords.values()))]
        elif isinstance(item, type):
            yield item.__module__, item
        elif isinstance(item, ModuleType):
            yield item.__name__, item
        elif isinstance(item, dict):
            waiting += dict.values(item)
        elif isinstance(item, list | tuple):
            waiting += item
        elif isinstance(item, cached_property):
            waiting.append(item.func)
        elif callable(item):
            yield type(item).__module__, item
            waiting.append(getattr(item, "__wrapped__", None))


def runs_other_code(values: Iterable[Any], known: Container[int] = ()) -> bool:
    """Return whether values run other code than functions whose address is known, or those of `HARMLESS` packages.
    PyTorch's own functions count as wrappers, so a known one must be inside."""
    reached, packages = False, set()
    for value in values:
        for name, item in code_in(value, known):
            if id(item) in known:
                reached = True
            else:
                packages.add(name.partition(".")[0])
    return not packages <= {*HARMLESS, *(["torch"] if reached else [])}


_FUNCTIONS = (FunctionType, type)
_CODE = (*_FUNCTIONS, MethodType, staticmethod, classmethod, property, partial, partialmethod, cached_property)


class Snapshot:
    """The functions of classes and of the modules that define them, by address, to notice later replacements.

    Values that code reads (constants, attributes, settings) are not among them: they may change from step to step.
    """

    def __init__(self, kinds: Iterable[type]) -> None:
        self.classes = list({part for kind in kinds for part in kind.__mro__})
        homes = {part.__module__ for part in self.classes if not _is_common(part)}
        homes = {name for name in homes if name.partition(".")[0] not in sys.stdlib_module_names}
        self.modules = [sys.modules[name] for name in homes if name in sys.modules]
        self._take()

    def _take(self) -> None:
        self.addresses = self._addresses()
        self.code = {owner: _code_of(owner) for owner in (*self.classes, *self.modules)}

    def _addresses(self) -> list[int]:
        addresses: list[int] = []
        for kind in self.classes:
            addresses += map(id, vars(kind).values())
        for module in self.modules:
            addresses += [id(value) for value in vars(module).values() if isinstance(value, _FUNCTIONS)]
        return addresses

    def find_replaced(self) -> str | None:
        """Return the first function or class that was replaced since, by code that a check of the model did not run."""
        if self._addresses() == self.addresses:
            return None
        for owner, before in self.code.items():
            now = _code_of(owner) if isinstance(owner, type) else {}  # new names of a module replace nothing
            for name in before | now:
                value = vars(owner).get(name)
                if name not in before:
                    packages = {where.partition(".")[0] for where, _ in code_in(value)}
                    is_other = not packages <= {*HARMLESS, "torch", "transformers"}
                elif id(value) == before[name]:
                    continue
                else:
                    is_other = next(code_in(value), None) is None or runs_other_code([value], {before[name]})
                if is_other:
                    return f"{owner.__name__}.{name}"
        self._take()
        return None


def _code_of(owner: Any) -> dict[str, int]:
    return {name: id(value) for name, value in list(vars(owner).items()) if isinstance(value, _CODE)}


def find_unverified_module(model: nn.Module, known: Iterable[str], apart: Iterable[nn.Module] = ()) -> str | None:
    """Return the first module that has no known class, or whose forward was replaced: its check does not cover it.

    Layers of torch that compute token by token are accepted, those of packages that wrap them (adapters, quantisation),
    and everything inside of the models in `apart`, each of which runs whole on every rank.
    """
    names, elsewhere = set(known), {id(part) for module in apart for part in module.modules()}
    for path, module in model.named_modules():
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
    """Return whether this module has another forward than its class. Accelerate and the compiler keep the class's
    inside, and Liger's computes token by token, as the class's does."""
    own = vars(module)
    if own.get("forward") is None:
        return False
    hook = own.get("_hf_hook")  # accelerate's: its forward calls this hook and the old forward
    hooks = [type(part) for part in (hook, *getattr(hook, "hooks", ())) if part is not None]
    known = {id(value) for kind in type(module).__mro__ for value in vars(kind).values()}
    return runs_other_code([own["forward"], own.get("_old_forward"), *hooks], known)


def has_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Return whether this function, or a partial of it, is a hook of the module. A deep copy of a model has its hooks.

    >>> import copy
    >>> linear, hook = nn.Linear(2, 2), print
    >>> handle = linear.register_forward_hook(hook)
    >>> has_hook(linear, hook), has_hook(copy.deepcopy(linear), hook), has_hook(nn.Linear(2, 2), hook)
    (True, True, False)
    """
    return any(getattr(item, "func", item) is hook for kind in hooks_of(module) for item in kind.values())
