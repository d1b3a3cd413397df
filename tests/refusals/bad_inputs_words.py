"""What users of PyTorch's attention say first, and masks that they bring along."""

from unittest.mock import patch

import torch
from torch.nn.attention.flex_attention import create_block_mask

import longspan as ls
from longspan import LayoutError, MaskError, PlanError, layouts, masks
from longspan.training import BatchError, check_same
from tests.refusals.bad_inputs import bad

TOKENS = 24
Q, K, V = torch.randn(3, 2, 4, TOKENS, 8)
SIZES = {"q_heads": 4, "kv_heads": 4, "head_dim": 8, "batch": 2, "dtype": "float32"}
TABLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
NAMED = "masks.causal()", "masks.full()", "masks.documents(lengths) & masks.causal()"


def attend(*mask, q=Q, k=K, v=V, **words):
    return ls.attention(q, k, v, *mask, **words)


def function(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _words():
    yield bad("no mask", lambda: attend(), PlanError, "called without a mask", *NAMED, "longspan.plan(mask, layout")
    for value in (True, False):
        says = f"attention() does not take is_causal={value}", "masks.causal()", "masks.full()"
        yield bad(f"is_causal {value}", lambda v=value: attend(is_causal=v), PlanError, *says)
        yield bad(f"mask and is_causal {value}", lambda v=value: attend(masks.full(), is_causal=v), PlanError, *says)
    for word in ("attn_mask", "attention_mask", "key_padding_mask", "mask"):
        says = f"does not take {word}=...", *NAMED, "masks.from_dense"
        yield bad(word, lambda w=word: attend(**{w: TABLE}), PlanError, *says)
    others = {
        "dropout_p": (0.1, "dropout= here"), "enable_gqa": (True, "Leave it out"),
        "softmax_scale": (0.5, "scale= here"),
        "causal": (True, "masks.causal()"), "window_size": ((4, 0), "masks.sliding_window(left, right)"),
        "alibi_slopes": (Q, "alibi= here"), "cu_seqlens_q": (Q, "masks.from_cu_seqlens"),
        "block_mask": (3, "flex_attention"),
        "max_seqlen_q": (24, "Leave it out"), "process_group": (None, "group= here"), "plan": (None, "fourth argument"),
    }  # fmt: skip
    for word, (value, say) in others.items():
        given = lambda w=word, v=value: attend(masks.causal(), **{w: v})  # noqa: E731
        yield bad(word, given, PlanError, f"attention() does not take {word}=", say)


def _instead_of_masks():
    fourth = "the fourth argument is"
    yield bad("str", lambda: attend("causal"), PlanError, f"{fourth} str", *NAMED)
    yield bad("True", lambda: attend(True), PlanError, f"{fourth} bool", *NAMED)
    yield bad("uncalled", lambda: attend(masks.causal), PlanError, f"{fourth} function", "as in masks.causal(...)")
    yield bad("function", lambda: attend(function), PlanError, "masks.from_mask_mod(function)")
    yield bad(
        "layout", lambda: attend(layouts.zigzag(24, 2)), PlanError, "which rank holds which tokens", "longspan.plan"
    )
    block = create_block_mask(function, None, None, 128, 128, device="cpu")
    yield bad("BlockMask", lambda: attend(block), PlanError, f"{fourth} BlockMask", "longspan.flex_attention")
    random = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) > 0.5
    for name, call in {"attention": attend, "plan": lambda m: ls.plan(m, layouts.zigzag(TOKENS, 2), **SIZES)}.items():
        says = "must have structure", "masks.from_mask_mod(function)", "masks.documents(lengths)"
        yield bad(f"{name} random table", lambda c=call: c(random), MaskError, *says)
        says = "got dtype float32", "mask == 0", "bias="
        yield bad(f"{name} added table", lambda c=call: c(torch.zeros(24, 24)), MaskError, *says)
        yield bad(f"{name} ints", lambda c=call: c(TABLE.long()), MaskError, "got dtype int64", "mask.bool()")
        for shape in ((2, 24), (24, 23), (4, 24, 24), (2, 1, 1, 24)):
            says = f"got shape {shape}", "(batch, heads, tokens, tokens)"
            yield bad(f"{name} {shape}", lambda c=call, s=shape: c(torch.ones(s).bool()), MaskError, *says)
        away = torch.ones(24, 24, dtype=torch.bool, device="meta")
        yield bad(f"{name} device", lambda c=call, a=away: c(a), MaskError, "on meta", "masks.from_dense(mask.cpu())")
        large = torch.ones(1, 1, dtype=torch.bool).expand(4096, 4096)
        yield bad(f"{name} large", lambda c=call, t=large: c(t), PlanError, "Tensor", "masks.from_dense", "documents")
    yield bad("balanced", lambda: layouts.balanced(TABLE, world_size=2), LayoutError, "Tensor", "masks.from_dense")
    yield bad("&", lambda: masks.causal() & TABLE, MaskError, "Tensor", "a table with masks.from_dense")
    yield bad(
        "block_mask of a table", lambda: ls.block_mask(TABLE, layouts.zigzag(24, 2), 0), MaskError, "masks.from_dense"
    )
    yield bad("flex", lambda: ls.flex_attention(Q, K, V, None, TABLE), PlanError, "a table with masks.from_dense")


def _order():
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    says = "look like (batch, tokens, heads, features)", "q.transpose(1, 2)"
    documents = masks.documents([20, 4]) & masks.causal()
    yield bad("order, length known", lambda: attend(documents, q=q, k=k, v=v), PlanError, *says)
    yield bad(
        "order, few kv heads", lambda: attend(masks.causal(), q=q, k=k[:, :, :2], v=v[:, :, :2]), PlanError, *says
    )
    one = ls.plan(masks.causal(), layouts.contiguous(TOKENS, 1), **SIZES)
    yield bad("order, plan", lambda: attend(one, q=q, k=k, v=v), PlanError, *says)
    says = "over one sequence", "longspan.flex_attention"
    yield bad("cross", lambda: attend(masks.full(), k=K[:, :, :12], v=V[:, :, :12]), PlanError, *says)
    says = "must have 4 dims", "unflatten(-1, (heads, -1))", "transpose(0, 1)[None]"
    yield bad("3 dims", lambda: attend(masks.full(), q=Q[0]), PlanError, *says)


def before_joining(call):
    """The call in a process that has not joined any others, whatever ran in it before."""

    def run():
        with patch.object(torch.distributed, "is_initialized", return_value=False):
            return call()

    return run


def _groups():
    two = ls.plan(masks.causal(), layouts.zigzag(2 * TOKENS, 2), **SIZES)
    says = "so it needs group=", "torch.distributed.init_process_group() first"
    for name, group in (("WORLD, which is None", None), ("nccl", "nccl")):
        call = before_joining(lambda g=group: attend(two, group=g))
        yield bad(f"before init, {name}", call, PlanError, f"{type(group).__name__} was given", *says)
    conv = ls.conv_plan(None, layouts.contiguous(8, 2), channels=4, width=3, dtype="float32")
    x, weight = torch.randn(1, 4, 4), torch.randn(4, 3)
    call = before_joining(lambda: ls.causal_conv1d(x, weight, plan=conv, group="nccl"))
    yield bad("convolution before init", call, PlanError, "init_process_group() first")
    batch = {"input_ids": torch.zeros(1, 8, dtype=torch.long)}
    call = before_joining(lambda: check_same(batch, None))
    yield bad("check_same before init", call, BatchError, "init_process_group() first", "torch.distributed.group.WORLD")


def rows():
    for make in (_words, _instead_of_masks, _order, _groups):
        yield from make()
