"""Public linear recurrences: delta rules, Mamba-2, linear attention, and user-defined ones. Tokens are at dim 1.

Each computes S_t = A_t S_{t-1} + B_t along every document, on one device or, with a plan and a group, over ranks: the
state that leaves a rank's part of a document enters the next part, on any rank, and gradients travel back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from longspan._compile import run_eagerly
from longspan.errors import PlanError, in_context
from longspan.layouts import Layout, contiguous
from longspan.masks.document_rows import Documents, document_rows
from longspan.planning.machine import Machine, assumed_machine, machine_named
from longspan.planning.scan_plan import RELAYOUT, Elsewhere, ScanPlan, planned_scan
from longspan.planning.scan_steps import MAX_FEATURES, StateSizes, chains_of
from longspan.planning.steps import dtype_name
from longspan.spans import check_int, truncated_repr

if TYPE_CHECKING:  # torch is loaded by the functions that touch tensors
    import torch
    from torch import Tensor

    from longspan.validate import Group

MAPS = ("matrix", "scalar", "rows", "elements")
_HEADS, _KEYS, _VALUES = "batch tokens heads", "batch tokens key_heads keys", "batch tokens heads values"


@run_eagerly
def scan_plan(
    documents: Documents,
    layout: Layout,
    *,
    heads: int,
    keys: int,
    values: int,
    maps: str,
    dtype: torch.dtype | str = "float32",
    batch: int = 1,
    scheme: str = "auto",
    machine: Machine | str | None = None,
    token_bytes: int | None = None,
) -> ScanPlan:
    """Plan which rank sends which states to which in a recurrence. Every rank makes the same plan.

    Args:
        documents: lengths, lengths per batch row, or a mask of documents (see `gated_delta_rule`); None is one.
        layout: which rank holds which tokens.
        heads: heads of a state.
        keys: rows of a head's state.
        values: columns of a head's state.
        maps: what a segment multiplies a state by that enters it: "matrix" (delta rules), "scalar" (one decay per head:
            Mamba-2, lightning attention), "rows" (one per key: GLA), "elements".
        dtype: of states: "float32", or "float64" for float64 tokens.
        batch: batch rows.
        scheme: "chain" or "doubling", which is used or refused; "relayout" moves tokens to a contiguous layout and
            back; "auto" compares all, with reasons.
        machine: what "auto" estimates costs for: a `Machine`, or the name of one, such as "h100".
        token_bytes: bytes of all inputs and outputs of the recurrence for one token: with it, "auto" also considers
            moving tokens.

    >>> plan = scan_plan([600, 424], zigzag(1024, 4), heads=2, keys=8, values=8, maps="scalar")
    >>> plan.bytes_received(0) > 0
    True
    """
    if not isinstance(layout, Layout):
        raise PlanError(f"layout must be a Layout (see longspan.layouts), but got {type(layout).__name__}.")
    with in_context(lambda: f"The call: scan_plan over {truncated_repr(layout, 120)}."):
        name = dtype_name(dtype)
        if name not in ("float32", "float64"):
            raise PlanError(
                f"dtype must be float32 or float64, since states are sums over many tokens, but got {name}."
            )
        if maps not in MAPS:
            raise PlanError(f"maps must be one of {', '.join(MAPS)}, but got {truncated_repr(maps)}.")
        if not isinstance(scheme, str) or not isinstance(machine, str | Machine | None):
            raise PlanError(
                f"scheme must be a name such as 'auto' or 'doubling', and machine a name, a Machine of"
                f" longspan.planning, or None, but got {truncated_repr(scheme)} and {truncated_repr(machine)}."
            )
        numbers = {"heads": heads, "keys": keys, "values": values, "batch": batch}
        h, k, v, b = (check_int(n, which, "scan_plan()", PlanError, 1, MAX_FEATURES) for which, n in numbers.items())
        map_rows, map_cols = {"matrix": (k, k), "scalar": (1, 1), "rows": (k, 1), "elements": (k, v)}[maps]
        sizes = StateSizes(h, k, v, map_rows, map_cols, int(maps == "matrix"), 8 if name == "float64" else 4, b)
        rows = document_rows(documents, layout.seq_len, PlanError)
        chains = chains_of(rows, layout, b)
        hardware = machine_named(machine) if isinstance(machine, str) else machine
        hardware = hardware or assumed_machine(functions=False)
        relayout = None
        if token_bytes is not None or scheme == RELAYOUT:
            weight = check_int(token_bytes or 0, "token_bytes", "scan_plan()", PlanError)
            relayout = Elsewhere(chains_of(rows, contiguous(layout.seq_len, layout.world_size), b), weight * b)
        return planned_scan(chains, sizes, name, scheme.replace(" ", ""), hardware, relayout)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    documents: Documents = None,
    plan: ScanPlan | None = None,
    group: Group = None,
    scale: float | None = None,
    l2norm: bool = False,
    kernel: str = "auto",
    name: str = "",
) -> Tensor:
    """The gated delta rule (Gated DeltaNet; with a vector gate, Kimi delta attention), exact and differentiable.

    A head's state S, (keys, values), decays, is corrected towards the token's value at its key, and is read:
    S = exp(g) S;  S = S + beta k (v - k^T S)^T;  out = scale * q^T S.

    Args:
        q: (batch, tokens, key heads, keys).
        k: as q.
        v: (batch, tokens, heads, values); heads are a multiple of key heads.
        g: logarithms of decays, (batch, tokens, heads), or (batch, tokens, heads, keys) with one per key.
        beta: (batch, tokens, heads).
        documents: on one device: lengths, lengths per batch row, or a mask of documents; None is one document. A mask
            such as `documents(lengths) & causal()` may also have a window, or a prefix that all later tokens of a
            document see. A document begins where a token does not see the token before it. Refused are masks with
            other documents in other heads, and masks in which documents see each other or a token not itself.
        plan: created by `longspan.scan_plan(..., maps="matrix")`, for this rank's shards.
        group: with a plan, the ranks of the sequence: a process group or a mesh of one axis.
        scale: factor of queries; 1 / sqrt(keys) by default.
        l2norm: normalize q and k first.
        kernel: "auto", "reference" or "fla"; a named one is used or refused.
        name: distinguishes calls of one plan: ranks that are in calls of different names raise an error.

    >>> import torch
    >>> q, k, v = torch.ones(3, 1, 2, 1, 1)
    >>> g, beta = torch.zeros(1, 2, 1), torch.full((1, 2, 1), 0.5)
    >>> gated_delta_rule(q, k, 4 * v, g, beta).flatten().tolist()
    [2.0, 3.0]
    """
    from longspan.mixers import scans
    from longspan.mixers.scan_reference import GatedDelta

    shapes = {
        "q": (_KEYS,), "k": (_KEYS,), "v": (_VALUES,), "g": (_HEADS, f"{_HEADS} keys"), "beta": (_HEADS,),
    }  # fmt: skip
    sizes = scans.check_tensors("gated_delta_rule", {"q": q, "k": k, "v": v, "g": g, "beta": beta}, shapes)
    recurrence = GatedDelta(_check_scale(scale, sizes["keys"]), _check_bool("l2norm", l2norm))
    call = scans.OperatorCall("gated_delta_rule", documents, plan, group, name)
    return scans.run(recurrence, (q, k, v, g, beta), (), call, kernel)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor | None = None,
    *,
    documents: Documents = None,
    plan: ScanPlan | None = None,
    group: Group = None,
    scale: float | None = None,
    kernel: str = "auto",
    name: str = "",
) -> Tensor:
    """Linear attention with a decay (lightning attention, RetNet, GLA): S = exp(decay) S + k v^T; out = scale * q^T S.

    Args:
        q: (batch, tokens, key heads, keys).
        k: as q.
        v: (batch, tokens, heads, values); heads are a multiple of key heads.
        decay: logarithms: (heads,) for all tokens, (batch, tokens, heads), or (batch, tokens, heads, keys) with one per
            key. None: no decay.
        documents: see `gated_delta_rule`.
        plan: created by `longspan.scan_plan(..., maps="scalar")`, or `maps="rows"` with a decay per key.
        group: see `gated_delta_rule`.
        scale: factor of queries; 1 / sqrt(keys) by default.
        kernel: see `gated_delta_rule`.
        name: see `gated_delta_rule`.
    """
    from longspan.mixers import scans
    from longspan.mixers.scan_reference import LinearAttention

    shapes = {"q": (_KEYS,), "k": (_KEYS,), "v": (_VALUES,), "decay": ("heads", _HEADS, f"{_HEADS} keys")}
    tensors = {"q": q, "k": k, "v": v} | ({} if decay is None else {"decay": decay})
    sizes = scans.check_tensors("linear_attention", tensors, shapes)
    if decay is None:
        decay = v.new_zeros(v.shape[:3])
    elif decay.ndim == 1:
        decay = decay.expand(v.shape[:3])
    recurrence = LinearAttention(_check_scale(scale, sizes["keys"]))
    call = scans.OperatorCall("linear_attention", documents, plan, group, name)
    return scans.run(recurrence, (q, k, v, decay), (), call, kernel)


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    documents: Documents = None,
    plan: ScanPlan | None = None,
    group: Group = None,
    kernel: str = "auto",
    name: str = "",
) -> Tensor:
    """Mamba-2's state-space recurrence: S = exp(A d) S + d B x^T; out = C^T S + D x, with d from dt as below.

    Args:
        x: (batch, tokens, heads, values).
        dt: (batch, tokens, heads). d is dt + dt_bias, through softplus if `dt_softplus`, then clamped to `dt_limit`.
        A: (heads,), negative.
        B: (batch, tokens, groups, states); heads are a multiple of groups.
        C: as B.
        D: (heads,) or (heads, values), or None.
        dt_bias: (heads,), or None.
        dt_softplus: whether to apply softplus to dt.
        dt_limit: the smallest and the largest d.
        documents: see `gated_delta_rule`.
        plan: created by `longspan.scan_plan(..., keys=states, maps="scalar")`.
        group: see `gated_delta_rule`.
        kernel: "auto", "reference" or "mamba_ssm"; a named one is used or refused.
        name: see `gated_delta_rule`.
    """
    from longspan.mixers import scans
    from longspan.mixers.scan_reference import Ssd

    states = "batch tokens key_heads states"
    shapes = {
        "x": (_VALUES,), "dt": (_HEADS,), "A": ("heads",), "B": (states,), "C": (states,),
        "D": ("heads", "heads values"), "dt_bias": ("heads",),
    }  # fmt: skip
    tensors = {"x": x, "dt": dt, "A": A, "B": B, "C": C}
    tensors |= {n: t for n, t in (("D", D), ("dt_bias", dt_bias)) if t is not None}
    scans.check_tensors("ssd", tensors, shapes)
    limits = dt_limit if isinstance(dt_limit, Sequence) and len(dt_limit) == 2 else (None, None)
    low, high = (float(limit) if isinstance(limit, int | float) else math.nan for limit in limits)
    if not low <= high:
        raise PlanError(
            f"dt_limit must be two numbers, the smallest and the largest d, but got {truncated_repr(dt_limit)}."
        )
    recurrence = Ssd(_check_bool("dt_softplus", dt_softplus), (low, high))
    call = scans.OperatorCall("ssd", documents, plan, group, name)
    return scans.run(recurrence, (x, dt, B, C), (A, D, dt_bias), call, kernel)


def linear_recurrence(
    a: Tensor,
    b: Tensor,
    *,
    documents: Documents = None,
    plan: ScanPlan | None = None,
    group: Group = None,
    kernel: str = "auto",
    name: str = "",
) -> Tensor:
    """Compute h = a h + b, channel by channel (RG-LRU, Mamba-1); return all h, in the shape of b.

    Args:
        a: (batch, tokens, ...): factors, any numbers including 0 and negative ones.
        b: as a.
        documents: see `gated_delta_rule`.
        plan: created by `longspan.scan_plan(..., heads=1, keys=channels, values=1, maps="elements")`.
        group: see `gated_delta_rule`.
        kernel: "auto" or "reference"; a named one is used or refused.
        name: see `gated_delta_rule`.

    >>> import torch
    >>> linear_recurrence(torch.full((1, 4, 1), 0.5), torch.ones(1, 4, 1), documents=[3, 1]).flatten().tolist()
    [1.0, 1.5, 1.75, 1.0]
    """
    from longspan.mixers import scans
    from longspan.mixers.scan_reference import LinearRecurrence

    num_dims = max(1, getattr(b, "ndim", 3) - 2)
    channels = " ".join(f"channels_{i}" for i in range(num_dims)) if num_dims > 1 else "channels"
    scans.check_tensors("linear_recurrence", {"a": a, "b": b}, dict.fromkeys("ab", (f"batch tokens {channels}",)))
    call = scans.OperatorCall("linear_recurrence", documents, plan, group, name)
    return scans.run(LinearRecurrence(), (a.flatten(2), b.flatten(2)), (), call, kernel).view(b.shape)


def scan(
    tokens: Sequence[Tensor],
    *,
    local: Callable[..., tuple[Tensor, Tensor]],
    summary: Callable[..., tuple[Tensor, Tensor]],
    state: tuple[int, int, int],
    maps: str,
    parameters: Iterable[Tensor] = (),
    documents: Documents = None,
    plan: ScanPlan | None = None,
    group: Group = None,
    name: str = "",
) -> Tensor:
    """Run a user-defined linear recurrence, S = A_t S + B_t, defined by two functions of one segment of tokens.

    Args:
        tokens: tensors (batch, tokens, ...). The functions get the rows of one segment of one batch row, (n, ...) each.
        local: a function `(*rows, state) -> (output with n rows, state)`, in plain PyTorch.
        summary: a function `(*rows) -> (M, U)`: the state that leaves is M times the one that enters plus U. M is
            (heads, keys, keys) and multiplies from the left (maps="matrix"), or it multiplies elementwise and is
            (heads, 1, 1) ("scalar"), (heads, keys, 1) ("rows") or (heads, keys, values) ("elements").
        state: (heads, keys, values).
        maps: see `summary` and `longspan.scan_plan`.
        parameters: tensors that the functions use and that require gradients; each rank gets its share.
        documents: see `gated_delta_rule`.
        plan: created by `longspan.scan_plan` with the same sizes.
        group: see `gated_delta_rule`.
        name: see `gated_delta_rule`.

    A running sum:

    >>> import torch
    >>> def local(x, state):
    ...     sums = state.flatten() + x.cumsum(0)
    ...     return sums, sums[-1].view(1, 1, 1)
    >>> def summary(x):
    ...     return torch.ones(1, 1, 1), x.sum(0).view(1, 1, 1)
    >>> sizes = {"state": (1, 1, 1), "maps": "scalar"}
    >>> scan([torch.ones(1, 4, 1)], local=local, summary=summary, documents=[3, 1], **sizes).flatten().tolist()
    [1.0, 2.0, 3.0, 1.0]
    """
    from torch import Tensor

    from longspan.mixers import scans
    from longspan.mixers.scan_kernels import OwnRecurrence

    if isinstance(tokens, Tensor) or not tokens or not callable(local) or not callable(summary) or maps not in MAPS:
        raise PlanError(
            f"scan takes a list of tensors, two functions and maps= one of {', '.join(MAPS)}, but got"
            f" {type(tokens).__name__}, local={truncated_repr(local)}, summary={truncated_repr(summary)} and"
            f" maps={truncated_repr(maps)}."
        )
    tensors = {f"tokens[{i}]": t for i, t in enumerate(tokens)}
    forms = {
        n: (" ".join(("batch", "tokens", *(f"{n}.{i}" for i in range(2, getattr(t, "ndim", 2))))),)
        for n, t in tensors.items()
    }
    scans.check_tensors("scan", tensors, forms)
    if not isinstance(state, Sequence) or len(state) != 3:
        raise PlanError(f"state must be three numbers (heads, keys, values), but got {truncated_repr(state)}.")
    h, k, v = (check_int(n, "state", "scan()", PlanError, 1, MAX_FEATURES) for n in state)
    is_list = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor)
    captured: tuple[Any, ...] = tuple(parameters) if is_list else (None,)
    if not all(isinstance(p, Tensor) for p in captured):
        raise PlanError(f"parameters must be a list of tensors, but got {truncated_repr(parameters)}.")
    shape = {"matrix": (h, k, k), "scalar": (h, 1, 1), "rows": (h, k, 1), "elements": (h, k, v)}[maps]
    recurrence = OwnRecurrence(local, summary, (h, k, v), shape, maps == "matrix", captured)
    call = scans.OperatorCall("scan", documents, plan, group, name)
    return scans.run(recurrence, tuple(tokens), (), call, "own")


def _check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{name} must be a bool, but got {truncated_repr(value)}.")
    return value


def _check_scale(scale: float | None, keys: int) -> float:
    from torch import Tensor

    from longspan.validate import is_number

    if scale is None:
        return keys**-0.5 if keys else 1.0
    if not is_number(scale):
        raise PlanError(f"scale must be one finite number or None, but got {truncated_repr(scale)}.")
    if isinstance(scale, Tensor) and scale.requires_grad:
        raise PlanError(
            "scale must not require a gradient, which it would not get. Multiply q by it and pass scale=1.0."
        )
    return float(scale)
