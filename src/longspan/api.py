"""What users call. Checks arguments, adds context to errors once, and leaves the work to the layers below."""

from __future__ import annotations

from typing import Any

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.schedules.machine import Machine
from longspan.schedules.machines import H100, machine_named
from longspan.schedules.plan import Plan, made_plan
from longspan.schedules.steps import Sizes

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def attention(
    q: Any,
    k: Any,
    v: Any,
    what: Mask | Plan,
    *,
    group: Any = None,
    scale: float | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
) -> Any:
    """Attention of `(batch, heads, tokens, features)` tensors, exact and differentiable.

    With a mask: on one device, over whole sequences. With a plan: on this rank's shards, local shards in and local
    shard out, over `group` (a process group, or a mesh of one axis). DTensors sharded along their tokens are taken too.
    `return_lse` adds the natural-log sum of exponentials, float32, -inf for rows that see nothing.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> out = attention(q, k, v, masks.documents([5, 3]) & masks.causal())
    >>> torch.allclose(out[:, :, 5], v[:, :, 5])  # the first token of the second document sees itself only
    True
    """
    from longspan.execution.call import attention as run  # torch is loaded here, not with the package

    return run(q, k, v, what, group=group, scale=scale, return_lse=return_lse, kernel=kernel)


def plan(
    mask: Mask,
    layout: Layout,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: Any,
    v_head_dim: int | None = None,
    batch: int = 1,
    schedule: str = "auto",
    machine: Machine | str | None = None,
    keep: bool = False,
    fetch_bytes: int | None = None,
) -> Plan:
    """Who sends what when, and why. A pure function of its arguments: every rank makes the same plan.

    `dtype` is a torch dtype or its name. `schedule` names a scheme, which is obeyed or refused; "auto" compares all.
    `keep` keeps remote K/V for backward instead of fetching them again. `fetch_bytes` bounds the remote K/V that an
    exchange holds at once.

    >>> mask = masks.documents([600, 424]) & masks.causal()
    >>> made = plan(mask, zigzag(1024, 4), q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", schedule="exchange")
    >>> made.bytes_received(0) <= 3 * 256 * 2 * (64 + 64) * 2
    True
    """
    if not isinstance(mask, Mask) or not isinstance(layout, Layout):
        raise PlanError(
            f"plan(mask, layout, ...) takes a mask and a layout, but {type(mask).__name__} and"
            f" {type(layout).__name__} were given. See longspan.masks and longspan.layouts."
        )
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise PlanError(f"dtype {dtype!r} was asked for. There are {', '.join(ITEMSIZE)}, as torch dtypes or names.")
    sizes = Sizes(q_heads, kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim, ITEMSIZE[name], batch)
    max_rows = None if fetch_bytes is None else _rows_within(fetch_bytes, sizes)
    hardware = H100 if machine is None else machine_named(machine) if isinstance(machine, str) else machine
    return made_plan(mask, layout, sizes, name, schedule.replace(" ", ""), hardware, machine is None, keep, max_rows)


def _rows_within(fetch_bytes: int, sizes: Sizes) -> int:
    row = sizes.kv_heads * sizes.batch * (sizes.head_dim + sizes.v_head_dim) * sizes.itemsize
    if fetch_bytes < 16 * row:
        raise PlanError(
            f"fetch_bytes = {fetch_bytes} leaves room for {fetch_bytes // row} rows of {row} bytes. Give at least"
            f" {16 * row} bytes, or leave it out."
        )
    return fetch_bytes // row
