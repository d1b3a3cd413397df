"""What classes, modules and source of a model of transformers tell without running it: its layers, and whether its
masks look for documents; of which classes it is made, whose code they run, and what somebody has put into it."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from functools import cached_property, lru_cache, partial, partialmethod
from types import FunctionType, MethodType, ModuleType
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
