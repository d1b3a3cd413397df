"""Bad calls of `longspan.torch_api`, in one process."""

import torch
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from longspan import LayoutError, MaskError, PlanError, layouts, masks
from longspan.torch_api import (
    Balanced,
    ContextParallel,
    HeadTail,
    PerDocument,
    RoundRobin,
    context_parallel,
    context_parallel_shard,
    context_parallel_unshard,
    flex_attention,
    set_rotate_method,
)
from tests.refusals.bad_inputs import bad, mesh

Q = torch.zeros(1, 2, 8, 4)


def inside(*call, **kwargs):
    """Runs a call inside a context over the mesh of this process."""
    with context_parallel(mesh("cp"), **{"seq_len": 8, **kwargs}):
        return call[0](*call[1:]) if call else None


def _contexts():
    x, y = torch.zeros(8), torch.zeros(9)
    leaf = torch.zeros(8, requires_grad=True)
    for name, kwargs, error, *says in (
        ("more dims", {"buffers": [x], "buffer_seq_dims": [0, 0]}, PlanError, "1 buffers, but 2 sequence dims"),
        ("no dims", {"buffers": [x]}, PlanError, "1 buffers, but 0 sequence dims", "one dim for each"),
        ("twice", {"buffers": [x, x], "buffer_seq_dims": [0, 0]}, PlanError, "listed twice", "List it once"),
        (
            "lengths",
            {"buffers": [x, y], "buffer_seq_dims": [0, 0]},
            PlanError,
            "[8, 9] tokens",
            "Cut all to one length",
        ),
        ("seq_len", {"buffers": [y], "buffer_seq_dims": [0]}, PlanError, "[8, 9] tokens", "Cut all to one length"),
        ("dim", {"buffers": [x], "buffer_seq_dims": [1]}, PlanError, "(8,) has no dim 1"),
        ("negative dim", {"buffers": [x], "buffer_seq_dims": [-2]}, PlanError, "(8,) has no dim -2"),
        ("text dim", {"buffers": [x], "buffer_seq_dims": ["0"]}, PlanError, "'0'", "whole number"),
        ("a list", {"buffers": [[0] * 8], "buffer_seq_dims": [0]}, PlanError, "plain tensor, but got list"),
        ("a leaf", {"buffers": [leaf], "buffer_seq_dims": [0]}, PlanError, "requires grad", "context_parallel_shard"),
        ("strangers", {"no_restore_buffers": {x}}, PlanError, "not among buffers", "List the same tensor objects"),
        ("mask", {"mask": torch.ones(8, 8)}, PlanError, "`mask` must be a mask of longspan.masks", "got Tensor"),
        ("mask text", {"mask": "causal"}, PlanError, "`mask` must be a mask of longspan.masks", "got str"),
        ("mask length", {"mask": masks.causal(9)}, LayoutError, "seq_len has 8, mask has 9"),
        (
            "balancer",
            {"load_balancer": "head_tail"},
            LayoutError,
            "`load_balancer` must be",
            "HeadTail()",
            "got 'head_tail'",
        ),
        (
            "balancer class",
            {"load_balancer": HeadTail},
            LayoutError,
            "`load_balancer` must be",
            "HeadTail()",
            "got <class",
        ),
        ("layout", {"load_balancer": layouts.zigzag(8, 2)}, LayoutError, "8 tokens on 1 ranks", "Make the layout for"),
        ("documents", {"load_balancer": PerDocument([4, 5])}, LayoutError, "seq_len has 8, load_balancer has 9"),
        ("no masks", {"load_balancer": Balanced()}, LayoutError, "was given no mask", "Pass every mask"),
        ("block", {"load_balancer": RoundRobin(masks.causal(8), 0)}, LayoutError, "block = 0", "1 or more"),
        ("a negative length", {"seq_len": -1}, PlanError, "seq_len", "at least 0", "got seq_len = -1"),
        ("a length of 2.5", {"seq_len": 2.5}, PlanError, "seq_len", "an integer", "got seq_len = 2.5"),
    ):
        yield bad(f"context {name}", lambda k=kwargs: inside(**k), error, *says)
    for value in (None, "cp", 3):
        says = "`mesh` must be a mesh of one axis", type(value).__name__, "mesh['cp']"
        yield bad(f"mesh {type(value).__name__}", lambda v=value: context_parallel(v).__enter__(), PlanError, *says)
    two = lambda: context_parallel(mesh("dp", "cp")).__enter__()  # noqa: E731
    yield bad("two axes", two, PlanError, "a mesh of axes ('dp', 'cp')", "mesh['cp']")
    for value in ("ring", None, "all_gather", 3):
        says = "rotate method must be 'allgather' or 'alltoall'", f"got {value!r}"
        yield bad(f"rotate {value!r}", lambda v=value: set_rotate_method(v), PlanError, *says)


def _shards():
    x = torch.zeros(8)
    for name, call in (("shard", context_parallel_shard), ("unshard", context_parallel_unshard)):
        says = "there are 2 buffers, but 1 sequence dims", "one dim for each"
        yield bad(f"{name} dims", lambda c=call: c(mesh("cp"), [x, x], [0]), PlanError, *says)
        yield bad(f"{name} mesh", lambda c=call: c(None, [x], [0]), PlanError, "a mesh of one axis", "NoneType")
        yield bad(f"{name} dim", lambda c=call: c(mesh("cp"), [x], [1]), PlanError, "(8,) has no dim 1")
        yield bad(f"{name} list", lambda c=call: c(mesh("cp"), [[0]], [0]), PlanError, "plain tensor, but got list")
        yield bad(f"{name} balancer", lambda c=call: c(mesh("cp"), [x], [0], 3), LayoutError, "got 3")


def _attention():
    sdpa = functional.scaled_dot_product_attention
    for name, call, *says in (
        ("mask", lambda: sdpa(Q, Q, Q, torch.ones(8, 8)), "attn_mask of shape (8, 8)", "context_parallel(..., mask=)"),
        ("nan mask", lambda: sdpa(Q, Q, Q, torch.full((8, 8), float("nan"))), "attn_mask of shape (8, 8)"),
        ("dropout", lambda: sdpa(Q, Q, Q, dropout_p=0.5), "dropout_p = 0.5", "seed="),
        ("heads", lambda: sdpa(Q, Q[:, :1], Q[:, :1]), "query has 2 heads and key 1", "enable_gqa=True"),
        (
            "dims",
            lambda: sdpa(Q[0], Q[0], Q[0]),
            "query must be",
            "of shape (2, 8, 4)",
            "(batch, heads, tokens, features)",
        ),
        ("cross", lambda: sdpa(Q, Q[:, :, :4], Q[:, :, :4]), "8 queries and 4 keys", "outside the context"),
        ("flex text", lambda: flex_attention(Q, Q, Q, None, "causal"), "a BlockMask of PyTorch", "str"),
        ("flex heads", lambda: flex_attention(Q, Q[:, :1], Q[:, :1]), "query has 2 heads and key 1", "enable_gqa"),
    ):
        yield bad(f"inside {name}", lambda c=call: inside(c), PlanError, *says)
    half = Q[:, :, :4]
    says = "the ranks hold [4] tokens", "gives them [8]"
    yield bad("inside tokens", lambda: inside(lambda: sdpa(half, half, half)), LayoutError, *says)
    masked = lambda: inside(lambda: flex_attention(Q, Q, Q, None, masks.causal(9)))  # noqa: E731
    yield bad("inside mask length", masked, MaskError, "is for 9 tokens")
    for value in ("eager", None, 3):
        says = "`attention_type` must be 'sdpa' or 'flex'", f"got {value!r}"
        yield bad(f"type {value!r}", lambda v=value: ContextParallel(attention_type=v), PlanError, *says)
    none = lambda: parallelize_module(torch.nn.Linear(4, 4), mesh("cp"), ContextParallel())(Q)  # noqa: E731
    yield bad("no attention", none, PlanError, "Linear has ContextParallel", "never called")


def rows():
    yield from _contexts()
    yield from _shards()
    yield from _attention()
