"""Decide whether a model runs released code only: its check may be saved on disk, since that code cannot change
without its version.

Code of one's own, remote code, an editable transformers or a file that was edited in place can change between two
processes in ways that no digest of the model's classes shows (a helper, a constant, a data file). Such models are
checked again in every process.

    LlamaForCausalLM of an installed transformers      files as in RECORD, nothing rebound    -> a digest
    the same, modeling_llama.apply_rotary_pos_emb = f  f is not from a released package       -> None
    class MyLlama(LlamaForCausalLM)                    not from transformers                  -> None
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import os
import re
import sys
from contextlib import suppress
from functools import lru_cache
from types import FunctionType
from typing import Any

from torch import nn

from longspan.huggingface.structure import HARMLESS, classes_of, code_in

CHECKED = ("torch", "transformers")
"""Packages whose files are compared with the hashes that they were installed with."""


def release_of(model: nn.Module | None, config: Any) -> str | None:
    """Return a digest of the released code that the model runs, or None if any of its code is not released."""
    if model is None:
        return None
    models = [kind for kind in classes_of(model).values() if _package(kind.__module__) not in HARMLESS]
    configs = [config, *(value for value in vars(config).values() if hasattr(value, "to_dict"))]
    kinds = {part for kind in (*models, *map(type, configs)) for part in kind.__mro__}
    modules = {name: module for name, module in list(sys.modules.items()) if _package(name) == "transformers"}
    homes = {name: modules.get(name) for name in {kind.__module__ for kind in kinds} if _package(name) in modules}
    own = {name: module for name, module in homes.items() if name.startswith("transformers.models.")}
    if None in homes.values():
        return None
    # Code that a model runs first must be released; code that it may call further on must not be a user's.
    values = [value for owner in (*kinds, *own.values(), nn.functional) for _, value in _members(owner)]
    if not all(map(_is_released, {*modules, *(kind.__module__ for kind in kinds), *_places(values)})):
        return None
    values = [value for module in homes.values() for _, value in _members(module)]
    values += [v for module in modules.values() for v in list(vars(module).values()) if isinstance(v, FunctionType)]
    if not all(map(_is_installed, _places(values))):
        return None
    # Classes that all models share are not described: transformers adds to them while models are built.
    owners = {f"{kind.__module__}.{kind.__qualname__}": kind for kind in kinds if kind.__module__ in own} | own
    described = [
        [owner, name, text]
        for owner in sorted(owners)
        for name, value in _members(owners[owner])
        if (text := _origins(value) or _constant(name, value))
    ]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:24]


def _package(name: str) -> str:
    return name.partition(".")[0]


def _members(owner: Any) -> list[tuple[str, Any]]:
    """Return the attributes of a class or module, by name."""
    return [(name, value) for name, value in sorted(vars(owner).items()) if name not in ("__builtins__", "__doc__")]


def _places(values: list[Any]) -> set[str]:
    """Return the names of the modules that functions and classes among the values come from."""
    different = {id(value): value for value in values}.values()
    return {where for value in different for where, _ in code_in(value)}


def _origins(value: Any) -> list[str]:
    named = {f"{where} {getattr(item, '__qualname__', '')}" for where, item in code_in(value)}
    return sorted(name for name in named if _package(name) != "longspan")


def _constant(name: str, value: Any) -> str:
    """Return the value of a constant as text, "" for names with an underscore: Python and transformers cache values
    under some of them in a class that was used."""
    if name.startswith("_"):
        return ""
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        return type(value).__qualname__


# -- files ------------------------------------------------------------------------------------------------------------


def _is_released(name: str) -> bool:
    """Whether a module, by name, is of Python, of a package that transformers or torch requires, or is theirs and its
    file is as it was installed. Longspan's own files are part of every key."""
    package = _package(name)
    if package not in CHECKED:
        return package in _required_packages()
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is None:
        return package == "torch"  # modules of its library
    try:
        state = os.stat(path)
        return _is_as_installed(package, path, state.st_mtime_ns, state.st_size)
    except OSError:
        return False


def _is_installed(name: str) -> bool:
    """Whether a module, by name, is released or lies where packages are installed."""
    if _is_released(name):
        return True
    path = getattr(sys.modules.get(name), "__file__", None)
    return path is not None and os.path.realpath(path).startswith(_record("transformers")[0] + os.sep)


@lru_cache(maxsize=4096)
def _is_as_installed(package: str, path: str, modified: int, size: int) -> bool:  # noqa: ARG001  (part of the key)
    folder, lines = _record(package)
    if not path.endswith(".py"):
        return package == "torch"
    with open(path, "rb") as file:
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.read()).digest()).rstrip(b"=").decode()
    relative = os.path.relpath(os.path.realpath(path), folder).replace(os.sep, "/")
    return f"{relative},sha256={digest},{size}" in lines


@lru_cache(maxsize=8)
def _record(package: str) -> tuple[str, frozenset[str]]:
    """Return the folder a package was installed into, and the lines of its RECORD; an editable one lists no source."""
    try:
        installed = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return "", frozenset()
    return os.path.realpath(str(installed.locate_file(""))), frozenset((installed.read_text("RECORD") or "").split())


@lru_cache(maxsize=1)
def _required_packages() -> frozenset[str]:
    """Return the names of packages whose functions transformers and torch themselves use."""
    packages = {"longspan"}
    for package in CHECKED:
        with suppress(importlib.metadata.PackageNotFoundError):
            names = [re.match(r"[\w.-]+", line) for line in importlib.metadata.requires(package) or ()]
            packages |= {name[0].lower().replace("-", "_") for name in names if name}
    return frozenset(sys.stdlib_module_names | packages)
