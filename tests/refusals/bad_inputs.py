"""Bad calls as rows of tables: the call, the error it must raise, and the names and values its message must hold."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAN, INF = float("nan"), float("inf")
NO_COUNTS = (-1, 2.5, "8", True, NAN, [4], 1 << 41, 10**30)
"""Values that are no count of tokens."""
_KEPT = {"str", "int", "float", "list", "bool", "tuple", "dict", "function", "nan", "inf", "None", "True", "False"}
_KEPT |= {"Tensor", "Layout", "Mask", "Linear", "q", "k", "v", "x"}


def names_and_values(fragment: str) -> list[str]:
    """Return the names and values in a fragment of a message, without the English words around them.

    A table may quote the whole phrase. Only arguments, types, numbers, shapes and quoted values are compared, so that
    a message can be reworded: "rank = 2.5 was given" needs "rank" and "2.5" in the message, in any sentence.
    """
    if len(fragment.split()) == 1:
        return [fragment]
    arguments = set(re.findall(r"(\w+)(?= = | must |=)", fragment))
    tokens = [token.strip(".") for token in re.findall(r"(?<!\w)'[^']*'|(?:(?<!\w)-)?[\w.]+", fragment)]
    return [t for t in tokens if t and (t in _KEPT or t in arguments or not re.fullmatch(r"[A-Za-z]?[a-z]*", t))]


@dataclass(frozen=True)
class Bad:
    """One bad call."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    says: tuple[str, ...]


def bad(name: str, call: Callable[[], Any], error: type[Exception], *says: str) -> Bad:
    return Bad(name, call, error, tuple(token for fragment in says for token in names_and_values(fragment)))


def counts(
    name: str, call: Callable[[Any], Any], error: type[Exception], word: str, values: Any = NO_COUNTS
) -> list[Bad]:
    """Return the call with every value that is no count; the message names the argument and the value."""
    return [
        bad(f"{name}-{word}={value!r:.20}", lambda value=value: call(value), error, f"{word} = {value!r}")
        for value in values
    ]


def one_rank():
    """Return the group of this process alone, created on first use; `test_bad_inputs` destroys it."""
    import os

    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def mesh(*names):
    """Return a mesh of this process alone with these axes."""
    from torch.distributed.device_mesh import init_device_mesh

    one_rank()
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
