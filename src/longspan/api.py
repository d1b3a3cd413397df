"""Public functions: `plan`, `attention`, `flex_attention`, `block_mask`, `causal_conv1d`, `conv_plan`.

They check arguments, add the call's context to errors once, and leave the work to the layers below. Importing this file
does not load torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from longspan._compile import untraced
from longspan.errors import PlanError, ScheduleError, in_context, renamed
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.masks.convert import advice, check_words, mask_of
from longspan.masks.document_rows import Documents, document_rows
from longspan.planning.conv_plan import MAX_WIDTH, ConvPlan, planned_convolution
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan, PlanRequest, planned
from longspan.planning.presets import assumed_machine, machine_named
from longspan.planning.problem import MAX_CHUNKS
from longspan.planning.steps import ITEMSIZE, MAX_SIZE, Sizes, dtype_name
from longspan.spans import shortened, whole

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
    """Attention of `(batch, heads, tokens, features)` tensors, exact and differentiable.

    With a mask: on one device, over whole sequences. With a plan: on this rank's shards, over `group`.

    A scaled score goes through `softcap`, `alibi`, `relative_bias`, `bias` and `score_mod`, in this order; then the
    mask hides pairs. Positions are global. All tensors among these, and those that `score_mod` captured, get gradients.

    Args:
        q: queries. DTensors sharded along their tokens are taken too.
        k: keys, with as many heads as q or a divisor of that.
        v: values; their feature size may differ from that of q and k.
        plan_or_mask: a mask of `longspan.masks`, or a plan made by `longspan.plan`.
        group: with a plan, the ranks of the sequence: a process group or a mesh of one axis.
        scale: what scores are multiplied by; 1 / sqrt(features) by default.
        return_lse: also return each row's log-sum-exp (natural, float32), -inf for rows that see nothing.
        kernel: "auto", "sdpa", or a kernel by name, which is obeyed or refused.
        score_mod: a function (score, b, h, q_idx, kv_idx) of one pair. It is called on hidden pairs too.
        softcap: c in c * tanh(score / c).
        sinks: one score per head that joins the softmax and brings no value.
        alibi: slopes, one per head.
        relative_bias: a `RelativeBias` of `longspan.scores`.
        bias: a tensor that broadcasts to (batch, heads, queries, keys) of the whole sequence.
        dropout: the probability with which a pair is dropped after the softmax.
        seed: decides, with the global positions, which pairs are dropped: the same on any number of ranks.
        captured_grads: "sum" adds up gradients of captured tensors and sinks over the group; "share" leaves each rank
            its own share, for trainers that reduce gradients themselves (FSDP, DDP).
        name: tells apart calls of one plan: ranks that are in calls of different names are told so.

    Returns:
        The output, `(batch, heads, tokens, features of v)`, or output and lse.

    >>> import torch
    >>> q, k, v = torch.randn(3, 1, 2, 8, 16)
    >>> out = attention(q, k, v, masks.documents([5, 3]) & masks.causal())
    >>> torch.allclose(out[:, :, 5], v[:, :, 5])  # the first token of the second document sees itself only
    True
    """
    from longspan.run.call import Extras, Request, check_inputs, in_call
    from longspan.run.call import attention as run

    is_plain = score_mod is None and softcap is None and alibi is None and relative_bias is None and bias is None
    with in_call("attention", (q, k, v), plan_or_mask, group):
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
    """`torch.nn.attention.flex_attention.flex_attention`, with a backward on every device and gradients of tensors that
    `score_mod` captured, on one device or, with `plan` and `group`, on this rank's shards.

    Functions are called on tiles with global positions; tiles that the mask leaves empty are never touched. Nothing
    needs `torch.compile`.

    Args:
        query: (batch, heads, tokens, features).
        key: the same with key/value heads.
        value: the same with key/value heads; its feature size may differ.
        score_mod: a function (score, b, h, q_idx, kv_idx) of one pair.
        block_mask: a `BlockMask` of PyTorch, or a mask of `longspan.masks`.
        scale: what scores are multiplied by; 1 / sqrt(features) by default.
        enable_gqa: allows fewer key/value heads than query heads.
        return_lse: also return each row's log-sum-exp.
        kernel_options: PyTorch's; only what changes no result is taken.
        return_aux: PyTorch's `AuxRequest`: lse, highest scores.
        plan: runs on shards; its mask takes the place of `block_mask`.
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
    from longspan.run.call import in_call
    from longspan.run.flex import flex_attention as run

    with in_call("flex_attention", (query, key, value), block_mask if plan is None else plan, group):
        return run(
            query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
            return_aux=return_aux, plan=plan, group=group, captured_grads=captured_grads, name=name,
        )  # fmt: skip


@untraced  # how many rows a rank has with its halos is up to the plan: a graph would have to be made for each
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
    """Causal convolution of `(batch, tokens, channels)`, channel by channel, exact and differentiable.

    Every token is convolved with the `width - 1` before it in its own document. With `documents`, or nothing: on one
    device, over whole sequences. With a plan: on this rank's shards, over `group`; gradients of weight and bias are
    this rank's share then, as those of any module on its own tokens.

    Args:
        x: the rows. In padding slots of a layout the output is 0.
        weight: (channels, width); the last column is for the token itself.
        bias: (channels,), or None.
        documents: lengths, lengths per batch row, or a mask of documents (see `gated_delta_rule`); None is one.
        plan: made by `longspan.conv_plan`.
        group: with a plan, the ranks of the sequence: a process group or a mesh of one axis.
        activation: "silu" or "swish", which are the same, or None.
        name: tells apart calls of one plan: ranks that are in calls of different names are told so.

    >>> import torch
    >>> x, weight = torch.tensor([1.0, 2.0, 4.0, 8.0])[None, :, None], torch.tensor([[10.0, 1.0]])
    >>> causal_conv1d(x, weight, documents=[3, 1]).flatten().tolist()
    [1.0, 12.0, 24.0, 8.0]
    """
    from longspan.mixers.convolution import causal_conv1d as run
    from longspan.mixers.operators import OperatorCall

    return run(x, weight, bias, OperatorCall("causal_conv1d", documents, plan, group, name), activation)


@untraced
def conv_plan(
    documents: Documents, layout: Layout, *, channels: int, width: int, dtype: torch.dtype | str, batch: int = 1
) -> ConvPlan:
    """Who sends which rows to whom in causal convolutions of one width. Every rank makes the same plan.

    Args:
        documents: lengths, lengths per batch row, or a mask of documents (see `gated_delta_rule`); None is one.
        layout: who holds which tokens.
        channels: features of a row.
        width: how many tokens a convolution takes, its own included.
        dtype: a torch dtype or its name.
        batch: batch rows.

    >>> conv_plan(None, contiguous(8, 2), channels=4, width=3, dtype="float32").bytes_received(1)  # 2 rows
    32
    """
    if not isinstance(layout, Layout):
        raise PlanError(
            f"conv_plan(documents, layout, ...) takes a layout, but {type(layout).__name__} was given. See"
            f" longspan.layouts."
        )
    with in_context(lambda: f"The call: conv_plan over {shortened(layout, 120)}."):
        name = dtype_name(dtype)
        width = whole(width, "width", "conv_plan()", PlanError, low=1, high=MAX_WIDTH)
        channels = whole(channels, "channels", "conv_plan()", PlanError, low=1, high=MAX_SIZE)
        batch = whole(batch, "batch", "conv_plan()", PlanError, low=1, high=MAX_SIZE)
        numbers = document_rows(documents, layout.seq_len, PlanError)
        if len(numbers) not in (1, batch):
            raise PlanError(
                f"documents are given for {len(numbers)} batch rows, but the plan is for {batch}. Give one list of"
                f" lengths for all rows, or one per row."
            )
        return planned_convolution(numbers, layout, width, Sizes(1, 1, channels, 0, ITEMSIZE[name], batch), name)


def block_mask(
    mask: Mask,
    layout: Layout,
    rank: int,
    *,
    kv: str = "global",
    block_size: int = 128,
    device: torch.device | str = "cpu",
) -> BlockMask:
    """PyTorch's `BlockMask` of one rank's query rows, in the order of its shard, for flex attention by other means.

    Keys are all tokens in their order (`kv="global"`) or the rank's own (`kv="local"`). Equal arguments give the same
    object, and masks of other batches the same code with other tensors, so compiled code is not compiled again.

    >>> block_mask(masks.causal(), zigzag(1024, 2), rank=0).shape
    (1, 1, 512, 1024)
    """
    from longspan.run.flex import block_mask as build

    return build(mask, layout, rank, kv=kv, block_size=block_size, device=device)


@untraced
@renamed(schedule="scheme")
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
    keep: bool = False,
    fetch_bytes: int | None = None,
    chunks: int | None = None,
) -> Plan:
    """Who sends what when, and why. A pure function of its arguments: every rank makes the same plan.

    Args:
        mask: what may attend to what.
        layout: who holds which tokens.
        q_heads: query heads.
        kv_heads: key/value heads, a divisor of `q_heads`.
        head_dim: features of a query or key.
        dtype: a torch dtype or its name.
        v_head_dim: features of a value, if they differ from `head_dim`.
        batch: batch rows.
        scheme: a scheme by name, which is obeyed or refused; "auto" compares all, with reasons.
        machine: what "auto" prices schemes on: a `Machine`, or the name of one, such as "h100" (with PyTorch's own
            kernels) or "h100-fa3". Default: an H100 cluster is assumed, with the kernel that would run there.
        keep: keep remote K/V for backward instead of fetching them again.
        fetch_bytes: bounds the remote K/V that an exchange holds at once.
        chunks: with `chunks=n`, results are bit-for-bit identical on any number of ranks (including one), provided n
            and the thread count are the same and no layout boundary falls inside one of the n equal chunks.

    >>> mask = masks.documents([600, 424]) & masks.causal()
    >>> made = plan(mask, zigzag(1024, 4), q_heads=8, kv_heads=2, head_dim=64, dtype="bfloat16", scheme="exchange")
    >>> made.bytes_received(0) <= 3 * 256 * 2 * (64 + 64) * 2
    True
    """
    mask = mask_of(mask)
    if not isinstance(mask, Mask) or not isinstance(layout, Layout):
        raise PlanError(
            f"plan(mask, layout, ...) takes a mask and a layout, but {type(mask).__name__} and"
            f" {type(layout).__name__} were given. "
            + ("See longspan.layouts, as in layouts.zigzag(tokens, ranks)." if isinstance(mask, Mask) else advice(mask))
        )
    with in_context(lambda: f"The call: plan of {shortened(mask, 120)} over {shortened(layout, 120)}."):
        name = dtype_name(dtype)
        if not isinstance(scheme, str) or not isinstance(machine, str | Machine | None):
            raise PlanError(
                f"scheme = {shortened(scheme)} and machine = {shortened(machine)} were given. A scheme is a name,"
                f" as in 'auto' or 'exchange'; a machine is a name, a Machine of longspan.planning, or None."
            )
        if not isinstance(keep, bool):
            raise PlanError(f"keep = {shortened(keep)} was given. It is True (keep remote K/V for backward) or False.")
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        whole(v_head_dim, "v_head_dim", "a plan", ScheduleError, low=1, high=MAX_SIZE)
        sizes = Sizes(q_heads, kv_heads, head_dim, v_head_dim, ITEMSIZE[name], batch)
        max_rows = None if fetch_bytes is None else _rows_within(fetch_bytes, sizes)
        hardware = machine_named(machine) if isinstance(machine, str) else machine
        hardware = hardware or assumed_machine(functions=not mask.is_structured)
        named, cut = scheme.replace(" ", ""), _cut(chunks, fetch_bytes)
        return planned(mask, PlanRequest(layout, sizes, name, named, hardware, machine is None, keep, max_rows, cut))


def _cut(chunks: int | None, fetch_bytes: int | None) -> int | None:
    if chunks is None:
        return None
    chunks = whole(chunks, "chunks", "plan()", PlanError, low=1, high=MAX_CHUNKS)
    if fetch_bytes is not None:
        raise PlanError(
            f"chunks = {chunks} and fetch_bytes = {shortened(fetch_bytes)} were given. Rows that come in stages would"
            f" be computed in other calls than those that come at once. Leave one of the two out."
        )
    return chunks


def _rows_within(fetch_bytes: int, sizes: Sizes) -> int:
    fetch_bytes = whole(fetch_bytes, "fetch_bytes", "plan()", PlanError, high=1 << 62)
    row = sizes.kv_heads * sizes.batch * (sizes.head_dim + sizes.v_head_dim) * sizes.itemsize
    if fetch_bytes < 16 * row:
        raise PlanError(
            f"fetch_bytes = {fetch_bytes} leaves room for {fetch_bytes // row} rows of {row} bytes. Give at least"
            f" {16 * row} bytes, or leave it out."
        )
    return fetch_bytes // row
