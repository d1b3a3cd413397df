"""A user's program, for the type checker: `test_types.py` has pyright read it. It is never run.

`assert_type` is an error unless the type is exactly that; lines that end in `# wrong` must be errors.
"""

from typing import Any, assert_type

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

import longspan as ls
from longspan import huggingface, layouts, masks, training
from longspan.planning.conv_plan import ConvPlan
from longspan.planning.scan_plan import ScanPlan
from longspan.training import Batch, TokenLogprobs
from longspan.verification import Report


def attentions(q: Tensor, table: NDArray[np.bool_], lse: bool, rank: int) -> None:
    mask = masks.documents([5, 3]) & masks.causal()
    assert_type(mask, masks.Mask)
    assert_type(ls.attention(q, q, q, mask), Tensor)
    assert_type(ls.attention(q, q, q, table, scale=0.5, softcap=30.0), Tensor)
    assert_type(ls.attention(q, q, q, mask, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ls.attention(q, q, q, mask, return_lse=lse), Tensor | tuple[Tensor, Tensor])
    plan = ls.plan(mask, layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=8, dtype=torch.float32, scheme="ring")
    assert_type(plan, ls.Plan)
    assert_type(ls.attention(q, q, q, plan, group=dist.group.WORLD), Tensor)
    assert_type(plan.shard(q, rank, dim=2), Tensor)
    assert_type(plan.shard(table, rank), NDArray[np.bool_])
    plan.shard({"input_ids": q}, rank, documents=[5, 3]).to("cuda")
    assert_type(plan.layout.shard(q, rank, dim=2), Tensor)
    assert_type(plan.layout.unshard([q, q], dim=2), Tensor)
    assert_type(ls.flex_attention(q, q, q, lambda s, b, h, i, j: s * 2, mask), Tensor)
    assert_type(ls.flex_attention(q, q, q, return_lse=True), tuple[Tensor, Tensor])
    assert_type(ls.flex_attention(q, q, q, return_lse=lse), Tensor | tuple[Tensor, Tensor])
    assert_type(ls.flex_attention(q, q, q, return_aux=AuxRequest(lse=True)), tuple[Tensor, AuxOutput])
    assert_type(ls.block_mask(mask, plan.layout, rank), BlockMask)
    assert_type(ls.verify(lambda q, k, v: ls.attention(q, k, v, plan), None, plan), Report)
    ls.attention(q, q, q)  # wrong
    ls.attention(q, q, q, mask, is_causal=True)  # wrong
    ls.attention(q, q, q, "causal")  # wrong
    ls.attention(q, q, q, plan, group="nccl")  # wrong
    ls.plan(mask, plan.layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32", schedule="ring")  # wrong


def recurrences(x: Tensor, rank: int) -> None:
    layout = layouts.contiguous(8, 2)
    assert_type(ls.conv_plan([5, 3], layout, channels=4, width=3, dtype="float32"), ConvPlan)
    assert_type(ls.causal_conv1d(x, x, documents=[5, 3]), Tensor)
    assert_type(ls.scan_plan(None, layout, heads=2, keys=4, values=4, maps="matrix"), ScanPlan)
    assert_type(ls.gated_delta_rule(x, x, x, x, x), Tensor)
    assert_type(ls.linear_attention(x, x, x), Tensor)
    assert_type(ls.ssd(x, x, x, x, x, D=x), Tensor)
    assert_type(ls.linear_recurrence(x, x), Tensor)
    ls.ssd(x, x, x, x, "C")  # wrong


def trained(model: torch.nn.Linear, x: Tensor, plan: ls.Plan, rank: int) -> None:
    group = training.make_mesh(cp=2).cp
    part = training.shard_batch({"input_ids": x}, plan, rank, documents=[5, 3])
    assert_type(part, Batch)
    assert_type(training.token_loss(x, x, group=group, gradients="sum", head=model), Tensor)
    assert_type(training.token_logprobs(x, x), TokenLogprobs)
    assert_type(training.gather_tokens(x, part, group), Tensor)
    assert_type(training.per_sequence(x, part, group), Tensor)
    assert_type(training.shard_like(x, part, shift=1), Tensor)
    assert_type(huggingface.shard_inputs(model, {"input_ids": x}, group), dict[str, Any])
    training.token_loss(x, x, group="nccl", gradients="sum")  # wrong
    huggingface.shard_inputs(model, {"input_ids": x}, 3)  # wrong
