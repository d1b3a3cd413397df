"""What a model is made of: versions of transformers, rules of a model, a snapshot of its modules, and hooks in place.

Hooks are looked up on the module itself: a deep copy of a model has its hooks as well.
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
from typing import Any

import torch
from torch import nn

from longspan._torch import hooks_of
from longspan.training import BatchError
from longspan.versions import minor

# -- What differs between versions of transformers, each piece with the version it is for ------------------------------
# Floor and tested versions are in `longspan.versions`. A piece goes when the floor reaches its version.


HYBRIDS_SINCE = (5, 15)
"""Before it, layers keep their convolutions and recurrences as attributes or call nn.Conv1d: nothing has a name that
could be routed over ranks, and keyword arguments do not reach them."""
LATER_MIXERS = {
    "FalconH1Mixer": (5, 17), "NemotronHMamba2Mixer": (5, 17), "Lfm2ShortConv": (5, 21), "Lfm2MoeShortConv": (5, 21),
}  # fmt: skip
"""Layers that are handed no keyword arguments, or hand none to their functions, before these."""
CHUNKED_MASKS_SINCE = (5, 20)
"""Before it, `create_masks_for_generate` fails for chunked layers (Llama 4), and for kinds that it has no mask for."""
PARTS_COUNTED_SINCE = (5, 19)
"""Before it, the Trainer divides the number of labels by the ranks of a sequence only if accelerate's
ParallelismConfig says how many there are."""


@cache
def installed() -> tuple[int, int]:
    """The version of transformers that is imported."""
    import transformers

    return minor(transformers.__version__)


def check_hybrid(model: Any) -> None:
    """Refuses models with convolutions over tokens where their layers do not let Longspan in."""
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, part in text.named_modules() if isinstance(text, nn.Module) else ():
        since = LATER_MIXERS.get(type(part).__name__, HYBRIDS_SINCE)
        if installed() < since and any(_is_wide(child) for child in part.children()):
            raise BatchError(
                f"{name} ({type(part).__name__}) has a convolution over tokens, and the installed transformers is"
                f" {_word(installed())}, whose layers do not let Longspan in there. Those hybrid models that go over"
                f" ranks need transformers {_word(since)} or newer: update it, or use this model on one device."
            )


def _is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv1d) and module.kernel_size != (1,)


def _word(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def method_code(method: Any) -> CodeType | None:
    """The code of a method of a modeling file, below its decorators; None of what is no method. In 5.15 one of them
    (`force_accelerate_hooks`) does not say what it wraps, and holds it as `forward_func`."""
    method = getattr(method, "__wrapped__", method)
    code = getattr(method, "__code__", None)
    if isinstance(code, CodeType) and "forward_func" in code.co_freevars:
        method = method.__closure__[code.co_freevars.index("forward_func")].cell_contents
    found = getattr(method, "__code__", None)
    return found if isinstance(found, CodeType) else None


def masks_by_kind(config: Any) -> list[Any]:
    """The masks of two tokens that transformers makes for each kind of attention layer of a model."""
    from transformers import masking_utils as hf

    asked = {"inputs_embeds": torch.empty(1, 2, 0), "attention_mask": None, "past_key_values": None}
    text = config.get_text_config()
    if installed() >= CHUNKED_MASKS_SINCE or not hasattr(text, "layer_types"):
        made = hf.create_masks_for_generate(config, **asked)
        masks = list(made.values()) if isinstance(made, dict) else [made]
    else:
        known = hf.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
        kinds = dict.fromkeys(text.layer_types)
        named = [known[kind] for kind in kinds] if known.keys() >= kinds.keys() else []
        makers = [maker for one in named for maker in (one.values() if isinstance(one, dict) else [one])]
        masks = [maker(config=text, **asked) for maker in dict.fromkeys(makers)]
    return [mask for mask in masks if mask is not None]


def labels_of_sequences(counted: Any, accelerator: Any, num_parts: int) -> Any:
    """How many labels all sequences of a step have, from what the Trainer counted over all ranks: those that hold
    parts of one sequence have each counted the whole of it."""
    by_trainer = installed() >= PARTS_COUNTED_SINCE or getattr(accelerator, "parallelism_config", None) is not None
    return counted if counted is None or by_trainer else counted // num_parts


# How a model wants to be treated over ranks, as its proof has found out: plain values, which are remembered.


COUNT, AFTER_PADDING, REAL, NO_POSITIONS = "count", "after padding", "real tokens", "none"
OWN, SHIFTED, IN_PLACE, POOLED, NO_LOSS = "own", "shifted", "in place", "pooled", "none"
KEYWORDS, MASK = "keywords", "mask"


@dataclass(frozen=True)
class Rules:
    """What differs from model to model."""

    positions: str = COUNT
    """Where a batch has no position_ids: tokens are counted from 0 ("count"), from padding_idx + 1 without padding
    ("after padding", RoBERTa), from 0 without padding, which is at -1 ("real tokens", OPT), or the model takes none
    ("none")."""
    loss: str = OWN
    """The model's own loss takes shift_labels ("own"); cross-entropy of labels one place earlier ("shifted") or in
    place ("in place"), divided by all labels; a loss of whole sequences, the same on all ranks ("pooled"); or none."""
    handed: str = KEYWORDS
    """Whether layers get to know of other ranks by the keyword `longspan`, or by their mask alone."""
    body: str | None = None
    """The module at whose door whole tensors are cut, by name; None where they are cut before the model."""
    joined: str | None = None
    """The module behind which tokens of all ranks are put together again, by name; None where they stay apart."""
    cuts: tuple[tuple[str, int, int], ...] = ()
    """(argument of the body, its number of dims, the dim of tokens)."""
    head: str | None = None
    """The head whose logits need not be computed, by name; None where they are, and `head_reason` says why."""
    head_reason: str = ""
    scale: str = ""
    soft_cap: str = ""
    """What logits are multiplied by ("logit_scale", or "1 / logits_scaling") and capped at, by names of the
    configuration's values; "" where they are not."""
    obeys_count: bool = True
    """Whether the model's loss on one device is divided by `num_items_in_batch` where the batch has it."""
    exact_at_padding: bool = True
    """Whether the model computes at padding what it computes there on one device, so that labels there are exact."""
    layers: str = "all"
    """Whether all layers of the configuration have attention, "some" of them, or "none"."""

    def as_json(self) -> dict[str, Any]:
        """What `Rules.of_json` takes."""
        return {**asdict(self), "cuts": [list(cut) for cut in self.cuts]}

    @staticmethod
    def of_json(found: dict[str, Any]) -> Rules:
        """
        >>> Rules.of_json(Rules(cuts=(("x", 3, 1),)).as_json()) == Rules(cuts=(("x", 3, 1),))
        True
        """
        return Rules(**{**found, "cuts": tuple((str(n), int(a), int(b)) for n, a, b in found["cuts"])})


# What classes, modules and source of a model of transformers tell without running it: its layers, and whether its
# masks look for documents; of which classes it is made, whose code they run, and what somebody has put into it.


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


def code_in(value: Any, known: Container[int] = ()) -> Iterator[tuple[str, Any]]:
    """Yield (name of its module, function, class or object) for the code that a value runs, inside of wrappers too.

    Functions whose address is known are not looked into.

    >>> from functools import partial
    >>> [name for name, _ in code_in(partial(nn.functional.pad, pad=(1, 0)))], list(code_in(3))
    (['torch.nn.functional'], [])
    """
    waiting, seen = [value], set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, FunctionType):  # its globals tell where it is from, functools.wraps changes __module__
            yield str(item.__globals__.get("__name__", "")), item
            waiting += [] if id(item) in known else filter(_is_code, _cells(item))
        elif isinstance(item, MethodType | staticmethod | classmethod):
            waiting.append(item.__func__)
        elif isinstance(item, property):
            waiting += [item.fget, item.fset]
        elif isinstance(item, partial | partialmethod):
            waiting += [item.func, *filter(_is_code, (*item.args, *item.keywords.values()))]
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


def _is_code(value: Any) -> bool:
    return isinstance(value, FunctionType | MethodType | partial)


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell that is still empty
            yield cell.cell_contents


def runs_other_code(values: Iterable[Any], known: Container[int] = ()) -> bool:
    """Whether something else runs than functions whose address is known, or those of packages that take every token by
    itself. PyTorch's own functions count as wrappers, so a known one must be inside."""
    reached, packages = False, set()
    for value in values:
        for name, item in code_in(value, known):
            if id(item) in known:
                reached = True
            else:
                packages.add(name.partition(".")[0])
    return not packages <= {*HARMLESS, *(["torch"] if reached else [])}


class Snapshot:
    """The functions of classes and of the modules that define them, by address, to notice what is replaced later.

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
        found = [id(value) for kind in self.classes for value in vars(kind).values()]
        return found + [id(v) for module in self.modules for v in vars(module).values() if isinstance(v, _FUNCTIONS)]

    def find_replaced(self) -> str | None:
        """Return the first function or class that was replaced since, by code that a check of the model did not run."""
        if self._addresses() == self.addresses:
            return None
        for owner, before in self.code.items():
            now = _code_of(owner) if isinstance(owner, type) else {}  # new names of a module replace nothing
            for name in before | now:
                value = vars(owner).get(name)
                if name not in before:
                    is_other = not _is_of_hosts(value)
                elif id(value) == before[name]:
                    continue
                else:
                    is_other = next(code_in(value), None) is None or runs_other_code([value], {before[name]})
                if is_other:
                    return f"{owner.__name__}.{name}"
        self._take()
        return None


_FUNCTIONS = (FunctionType, type)


def _code_of(owner: Any) -> dict[str, int]:
    kinds = (*_FUNCTIONS, MethodType, staticmethod, classmethod, property, partial, partialmethod, cached_property)
    return {name: id(value) for name, value in list(vars(owner).items()) if isinstance(value, kinds)}


def _is_of_hosts(value: Any) -> bool:
    return {name.partition(".")[0] for name, _ in code_in(value)} <= {*HARMLESS, "torch", "transformers"}


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
    own = vars(module)
    if own.get("forward") is None:
        return False
    hook = own.get("_hf_hook")  # accelerate's: its forward calls this hook and the old forward
    hooks = [type(part) for part in (hook, *getattr(hook, "hooks", ())) if part is not None]
    known = {id(value) for kind in type(module).__mro__ for value in vars(kind).values()}
    return runs_other_code([own["forward"], own.get("_old_forward"), *hooks], known)


def _is_harmless(kind: type) -> bool:
    package = kind.__module__.split(".")[0]
    if package == "torch":
        return not issubclass(kind, nn.Conv1d | nn.RNNBase | nn.BatchNorm1d | nn.MultiheadAttention)
    return package in HARMLESS or kind.__module__.startswith("transformers.integrations")


# -- Hooks in place ----------------------------------------------------------------------------------------------------


def has_hook(module: nn.Module, hook: Callable[..., Any]) -> bool:
    """Whether this function, or a partial of it, is called by the module already.

    >>> import copy
    >>> linear, hook = nn.Linear(2, 2), print
    >>> handle = linear.register_forward_hook(hook)
    >>> has_hook(linear, hook), has_hook(copy.deepcopy(linear), hook), has_hook(nn.Linear(2, 2), hook)
    (True, True, False)
    """
    return any(getattr(found, "func", found) is hook for kind in hooks_of(module) for found in kind.values())
