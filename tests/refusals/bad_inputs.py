"""Bad calls as rows of tables: what is called, which error it must raise, and what the message must say."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NAN, INF = float("nan"), float("inf")
NO_COUNTS = (-1, 2.5, "8", True, NAN, [4], 1 << 41, 10**30)
"""What is no count of tokens."""


@dataclass(frozen=True)
class Bad:
    """One bad call."""

    name: str
    call: Callable[[], Any]
    error: type[Exception]
    says: tuple[str, ...]


def bad(name: str, call: Callable[[], Any], error: type[Exception], *says: str) -> Bad:
    assert says, "a message must say something"
    return Bad(name, call, error, says)


def counts(
    name: str, call: Callable[[Any], Any], error: type[Exception], word: str, low: int = 0, values: Any = NO_COUNTS
) -> list[Bad]:
    """The call with every value that is no count; the message names the argument, the value and the bound."""
    return [
        bad(
            f"{name}-{word}={value!r:.20}",
            lambda value=value: call(value),
            error,
            f"{word} = {value!r}",
            f"{word} must be an integer, at least {low}",
        )
        for value in values
    ]


def one_rank():
    """The group of this process alone, made when it is first asked for; `test_bad_inputs` ends it."""
    import os

    import torch.distributed as dist

    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD


def mesh(*names):
    """A mesh of this process alone with these axes."""
    from torch.distributed.device_mesh import init_device_mesh

    one_rank()
    return init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
