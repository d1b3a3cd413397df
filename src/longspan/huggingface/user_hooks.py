"""Check hooks of users while a model runs over ranks: a hook may observe values, but not change them.

A hook receives this rank's tokens alone. One that only observes (returns None or its argument, and writes to no tensor)
changes nothing over ranks. Any other might mix tokens, so it is refused when it runs: the check of a model at first use
runs a copy without hooks of users.

    hook of torch, accelerate, PEFT, ...                      -> left as it is
    hook that the model's own class registers in __init__     -> left as it is: the check ran it
    any other                                                 -> replaced by a `CheckedHook`
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from longspan._torch import global_hooks, hooks_of, tree_leaves, version
from longspan.huggingface.attention import NAME
from longspan.huggingface.masks import LAST_FORWARD, current
from longspan.huggingface.structure import HARMLESS, code_in, own_class
from longspan.training import BatchError

KINDS = ("forward hook", "forward pre-hook", "backward hook", "backward pre-hook")
"""In the order of `hooks_of`."""
_KNOWN = {*HARMLESS, "torch", "transformers", "trl", "deepspeed"}
"""Packages whose hooks may change values: they move or cast them, or gather shards."""
_BY_LENGTH = {"neftune_post_forward_hook"}
"""Hooks of known packages that depend on how many tokens there are."""


class CheckedHook:
    """A hook of a user, which raises if it changes something in a forward or backward pass over ranks."""

    def __init__(self, func: Any, kind: str, place: str) -> None:
        self.func, self.kind, self.place = func, kind, place
        self.is_new = True

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Any:
        is_checked = LAST_FORWARD.checks_hooks
        if self.kind == KINDS[1]:  # it may run before our own hook
            sequences = [arg[NAME] for arg in args if isinstance(arg, dict) and NAME in arg]
            is_checked = getattr(sequences[0] if sequences else current(), "checks_hooks", False)
        if not is_checked:
            return self.func(*args)
        leaves = tree_leaves(args[1:])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        versions = [version(tensor) for tensor in tensors]
        # Writes to .data are not counted: contents are compared at the first call, and for inference tensors.
        plain = [
            t for t in tensors
            if type(t) is Tensor and t.layout is torch.strided and not t.is_meta and not t.is_quantized
            and (self.is_new or t.is_inference())
        ]  # fmt: skip
        copies = [_bytes(tensor).clone() for tensor in plain]
        result = self.func(*args)
        if (
            versions != [version(tensor) for tensor in tensors]
            or not _is_same(leaves, tree_leaves(args[1:]))
            or not all(torch.equal(_bytes(tensor), copy) for tensor, copy in zip(plain, copies, strict=True))
        ):
            raise self._error("changed its arguments in place")
        replaceable = {KINDS[0]: args[-1], KINDS[1]: args[1:]}.get(self.kind, args[1])
        if result is not None and not _is_same(tree_leaves(result), tree_leaves(replaceable)):
            raise self._error(f"returned a new value ({type(result).__name__})")
        self.is_new = False
        return result

    def _error(self, problem: str) -> BatchError:
        return BatchError(
            f"the {self.kind} {name_of(self.func)} on {self.place} must only observe over ranks, but it {problem}. It"
            f" runs with this rank's tokens alone, and the check of the model did not run it. Remove it, let it return"
            f" None and change nothing, or compare the model with one device (longspan.verification.verify_model) and"
            f" pass trust_model=True if it is right."
        )


def _is_same(first: list[Any], second: list[Any]) -> bool:
    return len(first) == len(second) and all(x is y for x, y in zip(first, second, strict=True))


def _bytes(tensor: Tensor) -> Tensor:
    """Return the contents of a tensor as bytes, where NaN equals NaN."""
    return tensor.detach().resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)


def name_of(hook: Any) -> str:
    """Return the full name of a hook, or of the function of a user's inside of it.

    >>> name_of(nn.functional.relu)
    'torch.nn.functional.relu'
    """
    code = [(where, getattr(item, "__qualname__", type(item).__qualname__)) for where, item in code_in(hook)]
    of_users = [pair for pair in code if pair[0].partition(".")[0] not in _KNOWN]
    return ".".join((of_users or code or [("", type(hook).__qualname__)])[0])


def _describe(module: nn.Module, kind: str, hooks: Mapping[int, Any]) -> str:
    """Return a module's class and its hooks of users, of one kind, in one line; "" if there are none."""
    names = [name_of(hook) for hook in hooks.values() if _is_user(hook)]
    return f"{own_class(module).__qualname__}, {kind}: {', '.join(names)}" if names else ""


def hook_names(model: nn.Module) -> set[str]:
    """Return the hooks of users on the modules of a model, as `check_hooks` describes them."""
    return {
        _describe(module, kind, hooks)
        for module in model.modules()
        for kind, hooks in zip(KINDS, hooks_of(module), strict=True)
    } - {""}


def check_hooks(model: nn.Module, known: Container[str], apart: Iterable[nn.Module] = ()) -> None:
    """Replace every hook of a user by a `CheckedHook`, on modules of the model and for all modules.

    Hooks that are known (of `hook_names` of a copy that was checked) are left, and so are those of the models in
    `apart`, which run whole on every rank.
    """
    elsewhere = {id(part) for module in apart for part in module.modules()}
    tables = [(kind, hooks, "all modules") for kind, hooks in zip(KINDS, global_hooks(nn.modules.module), strict=True)]
    for path, module in model.named_modules():
        if id(module) not in elsewhere and any(hooks_of(module)):
            place = f"{path or 'the model'} ({own_class(module).__name__})"
            for kind, hooks in zip(KINDS, hooks_of(module), strict=True):
                if _describe(module, kind, hooks) not in known:
                    tables.append((kind, hooks, place))
    for kind, hooks, place in tables:
        for key, hook in list(hooks.items()):
            if _is_user(hook):
                hooks[key] = CheckedHook(hook, kind, place)


def _is_user(hook: Any) -> bool:
    if isinstance(hook, CheckedHook):
        return False
    code = list(code_in(hook))
    if any(getattr(item, "__name__", "") in _BY_LENGTH for _, item in code):
        return True
    return not {where.partition(".")[0] for where, _ in code} <= _KNOWN


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Run without hooks for all modules."""
    kinds = global_hooks(torch.nn.modules.module)
    before = [dict(hooks) for hooks in kinds]
    for hooks in kinds:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in zip(kinds, before, strict=True):
            hooks.update(kept)
