"""Public functions: `plan`, `attention`, `flex_attention`, `block_mask`, `causal_conv1d`, `conv_plan`.

They check arguments, add the call to error messages, and call the layers below. Importing this file does not load
torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from longspan._compile import run_eagerly
from longspan.errors import PlanError, ScheduleError, in_context
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.masks.convert import advice, check_words, mask_of
from longspan.masks.document_rows import Documents, document_rows
from longspan.planning.conv_plan import MAX_WIDTH, ConvPlan, build_conv_plan
from longspan.planning.machine import Machine, assumed_machine, machine_named
from longspan.planning.plan import Plan, PlanRequest, build_plan
from longspan.planning.planners import check_limit
from longspan.planning.steps import ITEMSIZE, MAX_SIZE, Sizes, dtype_name
from longspan.spans import check_int, truncated_repr

if TYPE_CHECKING:  # torch is loaded by the functions that touch tensors
    from collections.abc import Mapping

    import numpy as np
    import torch
    from numpy.typing import NDArray
    from torch import Tensor
    from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

    from longspan.scoring.biases import RelativeBias
    from longspan.scoring.pipeline import ScoreMod
    from longspan.validate import Group

    Options = Mapping[str, object] | None  # of PyTorch's kernels
    Table = NDArray[np.bool_] | Tensor  # a small dense mask, True where a query may attend to a key


# fmt: off
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan_or_mask: Mask | Plan | Table, *, return_lse: Literal[False] = False,
    group: Group = None, scale: float | Tensor | None = None, kernel: str = "auto",
    score_mod: ScoreMod | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    alibi: Tensor | None = None, relative_bias: RelativeBias | None = None, bias: Tensor | None = None,
    dropout: float = 0.0, seed: int | None = None, captured_grads: str = "sum", name: str = "",
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, plan_or_mask: Mask | Plan | Table, *, return_lse: Literal[True],
    group: Group = None, scale: float | Tensor | None = None, kernel: str = "auto",
    score_mod: ScoreMod | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    alibi: Tensor | None = None, relative_bias: RelativeBias | None = None, bias: Tensor | None = None,
    dropout: float = 0.0, seed: int | None = None, captured_grads: str = "sum", name: str = "",
) -> tuple[Tensor, Tensor]: ...
# fmt: on
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan_or_mask: Mask | Plan | Table | None = None,
    *,
    group: Group = None,
    scale: float | Tensor | None = None,
    return_lse: bool = False,
    kernel: str = "auto",
    score_mod: ScoreMod | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    captured_grads: str = "sum",
    name: str = "",
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute exact, differentiable attention of `(batch, heads, tokens, features)` tensors.

    With a mask: on one device, over whole sequences. With a plan: on this rank's shards, over `group`.

    Scaled scores pass through `softcap`, `alibi`, `relative_bias`, `bias` and `score_mod`, in this order; then the mask
    applies. Positions are global. All of these tensors, and those captured by `score_mod`, get gradients.

    Args:
        q: queries. DTensors sharded along their tokens are accepted.
        k: keys; the number of heads divides that of q.
        v: values; their feature size may differ from that of q and k.
        plan_or_mask: a mask of `longspan.masks`, or a plan created by `longspan.plan`.
        group: with a plan, the ranks of the sequence: a process group or a mesh of one axis.
        scale: factor of scores, above 0; 1 / sqrt(features) by default.
        return_lse: also return each row's log-sum-exp (natural, float32), -inf for rows without keys.
        kernel: "auto", "sdpa", or the name of a kernel, which is used or refused.
        score_mod: a function (score, b, h, q_idx, kv_idx) of one pair. It is called on masked pairs, too.
        softcap: c in c * tanh(score / c).
        sinks: one score per head that joins the softmax without a value.
        alibi: slopes, one per head.
        relative_bias: a `RelativeBias` of `longspan.scores`.
        bias: a tensor that broadcasts to (batch, heads, queries, keys) of the whole sequence.
        dropout: probability of dropping a pair after the softmax.
        seed: selects, with global positions, the dropped pairs: the same on any number of ranks.
        captured_grads: "sum" sums gradients of captured tensors and sinks over the group; "share" leaves each rank its
            own share, for trainers that reduce gradients themselves (FSDP, DDP).
        name: distinguishes calls of one plan: ranks in calls of different names raise an error.

    Returns:
        The output, `(batch, heads, tokens, features of v)`, or output and lse.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> out = attention(q, k, v, masks.documents([5, 3]) & masks.causal())
    >>> torch.allclose(out[:, :, 5], v[:, :, 5])  # the first token of the second document sees itself only
    True
    """
    from longspan.run.call import Extras, Request, call_context, check_inputs
    from longspan.run.call import attention as run

    is_plain = score_mod is None and softcap is None and alibi is None and relative_bias is None and bias is None
    with call_context("attention", (q, k, v), plan_or_mask, group):
        if unknown:
            check_words("attention", unknown, tuple(attention.__kwdefaults__ or ()))
        check_inputs(q, k, v, scale, kernel, sinks, name)
        more: Extras | None = None
        if not is_plain or dropout or seed is not None:
            more = Extras(score_mod, softcap, alibi, relative_bias, bias, dropout or 0.0, seed)
        return run(q, k, v, Request(plan_or_mask, group, scale, return_lse, kernel, sinks, more, captured_grads, name))


# fmt: off
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: Literal[False] = False, kernel_options: Options = None, *, return_aux: None = None,
    plan: Plan | None = None, group: Group = None, captured_grads: str = "sum", name: str = "",
) -> Tensor: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None, scale: float | None = None, enable_gqa: bool = False,
    *, return_lse: Literal[True], kernel_options: Options = None, return_aux: None = None,
    plan: Plan | None = None, group: Group = None, captured_grads: str = "sum", name: str = "",
) -> tuple[Tensor, Tensor]: ...
@overload
def flex_attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None, scale: float | None = None, enable_gqa: bool = False,
    return_lse: bool = False, kernel_options: Options = None, *, return_aux: AuxRequest,
    plan: Plan | None = None, group: Group = None, captured_grads: str = "sum", name: str = "",
) -> tuple[Tensor, AuxOutput]: ...
# fmt: on
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: BlockMask | Mask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Options = None,
    *,
    return_aux: AuxRequest | None = None,
    plan: Plan | None = None,
    group: Group = None,
    captured_grads: str = "sum",
    name: str = "",
) -> Tensor | tuple[Tensor, Tensor | AuxOutput]:
    """Compute `torch.nn.attention.flex_attention.flex_attention` on one device or, with `plan` and `group`, on this
    rank's shards, with a backward on every device and gradients of tensors that `score_mod` captured.

    Functions are called on tiles with global positions; empty tiles are skipped. `torch.compile` is not needed.

    Args:
        query: (batch, heads, tokens, features).
        key: the same with key/value heads.
        value: the same with key/value heads; its feature size may differ.
        score_mod: a function (score, b, h, q_idx, kv_idx) of one pair.
        block_mask: a `BlockMask` of PyTorch, or a mask of `longspan.masks`.
        scale: factor of scores, above 0; 1 / sqrt(features) by default.
        enable_gqa: allow fewer key/value heads than query heads.
        return_lse: also return each row's log-sum-exp.
        kernel_options: must be empty: they tune PyTorch's Triton kernels, which this call does not launch by itself.
        return_aux: PyTorch's `AuxRequest`: lse, maximum scores.
        plan: run on shards; its mask replaces `block_mask`.
        group: the ranks of the plan: a process group or a mesh of one axis.
        captured_grads: see `attention`.
        name: see `attention`.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> out = flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), masks.causal())
    >>> out.sum().backward()
    >>> slopes.grad.shape
    torch.Size([2])
    """
    from longspan.run.call import call_context
    from longspan.run.flex import flex_attention as run

    with call_context("flex_attention", (query, key, value), block_mask if plan is None else plan, group):
        return run(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux, plan=plan, group=group, captured_grads=captured_grads, name=name,
        )  # fmt: skip


@run_eagerly  # the number of rows with halos depends on the plan: each would need a graph of its own
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    documents: Documents = None,
    plan: ConvPlan | None = None,
    group: Group = None,
    activation: str | None = None,
    name: str = "",
) -> Tensor:
    """Compute an exact, differentiable depthwise causal convolution of `(batch, tokens, channels)`.

    Every token is convolved with the `width - 1` tokens before it in its document. Without a plan: on one device, over
    whole sequences. With a plan: on this rank's shards, over `group`; gradients of weight and bias are this rank's
    share then, like those of any module applied to its tokens.

    Args:
        x: the input. In padding slots of a layout the output is 0.
        weight: (channels, width); the last column is for the token itself.
        bias: (channels,), or None.
        documents: lengths, lengths per batch row, or a mask of documents (see `gated_delta_rule`); None is one.
        plan: created by `longspan.conv_plan`.
        group: with a plan, the ranks of the sequence: a process group or a mesh of one axis.
        activation: "silu" or "swish" (the same), or None.
        name: distinguishes calls of one plan: ranks in calls of different names raise an error.

    >>> import torch
    >>> x, weight = torch.tensor([1.0, 2.0, 4.0, 8.0])[None, :, None], torch.tensor([[10.0, 1.0]])
    >>> causal_conv1d(x, weight, documents=[3, 1]).flatten().tolist()
    [1.0, 12.0, 24.0, 8.0]
    """
    from longspan.mixers.convolution import causal_conv1d as run
    from longspan.mixers.operators import OperatorCall

    return run(x, weight, bias, OperatorCall("causal_conv1d", documents, plan, group, name), activation)


@run_eagerly
def conv_plan(
    documents: Documents, layout: Layout, *, channels: int, width: int, dtype: torch.dtype | str, batch: int = 1
) -> ConvPlan:
    """Plan the halo exchange of causal convolutions of one width. Every rank creates the same plan.

    Args:
        documents: lengths, lengths per batch row, or a mask of documents (see `gated_delta_rule`); None is one.
        layout: which rank holds which tokens.
        channels: number of channels.
        width: number of taps, the token itself included.
        dtype: a torch dtype or its name.
        batch: batch rows.

    >>> conv_plan(None, contiguous(8, 2), channels=4, width=3, dtype="float32").bytes_received(1)  # 2 rows
    32
    """
    if not isinstance(layout, Layout):
        raise PlanError(f"layout must be a layout of longspan.layouts, but got {type(layout).__name__}.")
    with in_context(lambda: f"The call: conv_plan over {truncated_repr(layout, 120)}."):
        name = dtype_name(dtype)
        width = check_int(width, "width", "conv_plan()", PlanError, low=1, high=MAX_WIDTH)
        channels = check_int(channels, "channels", "conv_plan()", PlanError, low=1, high=MAX_SIZE)
        batch = check_int(batch, "batch", "conv_plan()", PlanError, low=1, high=MAX_SIZE)
        numbers = document_rows(documents, layout.seq_len, PlanError)
        if len(numbers) not in (1, batch):
            raise PlanError(
                f"documents must be one list of lengths for all batch rows, or one for each of {batch}, but got"
                f" {len(numbers)}."
            )
        return build_conv_plan(numbers, layout, width, Sizes(1, 1, channels, 0, ITEMSIZE[name], batch), name)


def block_mask(
    mask: Mask,
    layout: Layout,
    rank: int,
    *,
    kv: str = "global",
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """Return PyTorch's `BlockMask` of one rank's query rows, in the order of its shard, for other flex attention calls.

    Keys are all tokens in global order (`kv="global"`) or the rank's own (`kv="local"`). Equal arguments return the
    same object, and masks of other batches the same code with other tensors, so nothing is recompiled.

    >>> block_mask(masks.causal(), zigzag(1024, 2), rank=0).shape
    (1, 1, 512, 1024)
    """
    from longspan.run.flex import block_mask as build

    return build(mask, layout, rank, kv=kv, block_size=block_size, device=device)


@run_eagerly
def plan(
    mask: Mask | Table,
    layout: Layout,
    *,
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype | str,
    v_head_dim: int | None = None,
    batch: int = 1,
    scheme: str = "auto",
    machine: Machine | str | None = None,
    group: Group = None,
    keep: bool = False,
    fetch_bytes: int | None = None,
) -> Plan:
    """Plan attention over ranks: which rank sends which rows when. Every rank creates the same plan.

    Args:
        mask: which queries may attend to which keys.
        layout: which rank holds which tokens.
        q_heads: query heads.
        kv_heads: key/value heads, a divisor of `q_heads`.
        head_dim: features of a query or key.
        dtype: a torch dtype or its name.
        v_head_dim: features of a value, if they differ from `head_dim`.
        batch: batch rows.
        scheme: the name of a scheme, which is used or refused; "auto" compares all, with reasons. "ulysses" is
            "all_to_all", and "usp(8)" is "hybrid(8, ring)".
        machine: the hardware for which "auto" prices schemes: a `Machine`, or the name of one, such as "h100" (with
            PyTorch's kernels) or "h100-fa3". Default: that of `group`, else an H100 cluster with the kernel that would
            run there.
        group: the ranks that will run the plan, to find their devices and how many share a host if they use NCCL. All
            of them must make this call, since they exchange this once.
        keep: keep remote K/V for backward instead of fetching them again.
        fetch_bytes: limit of the remote K/V that "exchange" or "staged", also within a hybrid, holds at once. Other
            schemes refuse it, but "auto" may choose one of them.

    >>> mask = masks.documents([600, 424]) & masks.causal()
    >>> p = plan(mask, zigzag(1024, 4), q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", scheme="exchange")
    >>> p.bytes_received(0) <= 3 * 256 * 2 * (64 + 64) * 2
    True
    """
    mask = mask_of(mask)
    if not isinstance(mask, Mask) or not isinstance(layout, Layout):
        raise PlanError(
            f"mask and layout must be a mask of longspan.masks and a layout of longspan.layouts, but got"
            f" {type(mask).__name__} and {type(layout).__name__}. "
            + ("Create one, as in layouts.zigzag(tokens, ranks)." if isinstance(mask, Mask) else advice(mask))
        )
    with in_context(lambda: f"The call: plan of {truncated_repr(mask, 120)} over {truncated_repr(layout, 120)}."):
        name = dtype_name(dtype)
        if not isinstance(scheme, str) or not isinstance(machine, str | Machine | None):
            raise PlanError(
                f"scheme must be a name, as in 'auto' or 'exchange', and machine a name, a Machine of"
                f" longspan.planning, or None, but got {truncated_repr(scheme)} and {truncated_repr(machine)}."
            )
        if not isinstance(keep, bool):
            raise PlanError(f"keep must be a bool, but got {truncated_repr(keep)}.")
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_int(v_head_dim, "v_head_dim", "a plan", ScheduleError, low=1, high=MAX_SIZE)
        sizes = Sizes(q_heads, kv_heads, head_dim, v_head_dim, ITEMSIZE[name], batch)
        max_rows: int | None = None
        if fetch_bytes is not None:
            fetch_bytes = check_int(fetch_bytes, "fetch_bytes", "plan()", PlanError, high=1 << 62)
            row = sizes.kv_heads * sizes.batch * (sizes.head_dim + sizes.v_head_dim) * sizes.itemsize
            max_rows = fetch_bytes // row
            if max_rows < 16:
                raise PlanError(
                    f"fetch_bytes must be at least {16 * row}, 16 rows of {row} bytes, but got {fetch_bytes}."
                )
        functions, is_assumed = not mask.is_structured, machine is None
        if group is not None and machine is None:
            from longspan.run.hardware import machine_of_group

            machine, is_assumed = machine_of_group(group, functions=functions)
        hardware = (
            machine_named(machine) if isinstance(machine, str) else machine or assumed_machine(functions=functions)
        )
        named = scheme.replace(" ", "")
        check_limit(named, fetch_bytes)
        return build_plan(mask, PlanRequest(layout, sizes, name, named, hardware, is_assumed, keep, max_rows))
