"""What ranks do in the tests of routed calls; importable by name, as worker processes need it."""

import contextlib
import threading

import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torch_flex
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.testing import dense_gradients
from longspan.torch_api import api, routes
from longspan.torch_api.balancers import Cut
from tests.hosts.torch_api_work import mesh_of_all, quiet, refused, whole

TOKENS = 64


def causal(b, h, i, j):
    return i >= j


def far(score, b, h, i, j):
    return score - 0.1 * (i - j).abs()


def blocks(queries=TOKENS, keys=TOKENS):
    return create_block_mask(causal, None, None, queries, keys, device="cpu", BLOCK_SIZE=16)


def compiled(function, **options):
    return torch.compile(function, backend="eager", **options)


def largest(results, right):
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(results, right, strict=True))


def sharded_blocks(mask, layout, rank):
    """A block mask of one rank's rows that carries its mask and cut, as shards of block masks do."""
    shard = ls.block_mask(mask, layout, rank)
    shard.longspan_shard = mask, Cut(layout)
    return shard


def flex_calls():
    """PyTorch's flex attention in contexts: output, lse and gradients with each kind of block mask: (case, error)."""
    mesh, tensors, results = mesh_of_all(), whole(TOKENS, heads=4, kv_heads=2), []
    layout = ls.layouts.zigzag(TOKENS, mesh.size())
    calls = {"eager": torch_flex, "compiled": compiled(torch_flex), "longspan": api.flex_attention}
    calls["checkpoint"] = lambda *args, **options: checkpoint(torch_flex, *args, use_reentrant=False, **options)
    masks = {
        "whole": (blocks(), ls.masks.causal()),
        "none": (None, ls.masks.full()),
        "shard": (
            sharded_blocks(ls.masks.sliding_window(5), layout, mesh.get_local_rank()), ls.masks.sliding_window(5)
        ),
    }  # fmt: skip
    for way, call in calls.items():
        for kind, (block_mask, mask) in masks.items():
            own = [t.clone() for t in tensors]
            with api.context_parallel(mesh, buffers=own, buffer_seq_dims=[2] * 4):
                leaves = [t.clone().requires_grad_() for t in own[:3]]
                out, more = call(*leaves, None, block_mask, 0.3, True, return_aux=AuxRequest(lse=True))
                torch.autograd.backward([out, more.lse], [own[3], torch.zeros_like(more.lse)])
            shards = [out.detach(), more.lse.detach(), *(t.grad for t in leaves)]
            actual = api.context_parallel_unshard(mesh, shards, [2] * 5, layout)
            right = dense_gradients(*tensors[:3], mask.resized(TOKENS), 0.3, tensors[3])
            results.append((f"{way}, {kind}", largest(actual, right), 1e-12))
    own = [t.clone() for t in tensors[:3]]
    with api.context_parallel(mesh, buffers=own, buffer_seq_dims=[2] * 3, mask=ls.masks.documents([40, 24])):
        out, lse = quiet(torch_flex, *own, far, blocks(), None, True, True)
        (out, lse) = api.context_parallel_unshard(mesh, [out, lse], [2, 2])
    mask = ls.masks.causal() & ls.masks.documents([40, 24])
    right = ls.flex_attention(*tensors[:3], far, mask, enable_gqa=True, return_lse=True)
    return [*results, ("mask of the context and score_mod", largest((out, lse), right), 1e-12)]


def gathered():
    """Keys and values that were gathered: attention of this rank's queries, by PyTorch itself."""
    mesh, (q, k, v, _), results = mesh_of_all(), whole(256, dtype=torch.float32), {}
    layout, rank = ls.layouts.zigzag(256, mesh.size()), mesh.get_local_rank()
    own, block_mask = layout.shard(q, rank, 2), ls.block_mask(ls.masks.causal(), layout, rank)
    right = layout.shard(F.scaled_dot_product_attention(q, k, v, is_causal=True), rank, 2)
    calls = {"eager": torch_flex, "compiled": compiled(torch_flex), "longspan": api.flex_attention}
    with api.context_parallel(mesh, seq_len=256):
        for way, call in calls.items():
            results[way] = largest([quiet(call, own, k, v, None, block_mask)], [right])
        assert routes.current().calls["flex"] == 3
        results["score_mod"] = refused(lambda: torch_flex(own, k, v, far, block_mask))
        results["cross"] = refused(lambda: torch_flex(own, k, v))
        with api.context_parallel(mesh, mask=ls.masks.sliding_window(9)):
            results["mask"] = refused(lambda: torch_flex(own, k, v, None, block_mask))
    return results


def flex_refusals():
    mesh, (q, k, v, _) = mesh_of_all(), whole(TOKENS, dtype=torch.float32)
    other = ls.layouts.contiguous(TOKENS, mesh.size())
    longer = ls.layouts.zigzag(2 * TOKENS, mesh.size())
    with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
        local = q.shape[2]
        return {
            "local": refused(lambda: torch_flex(q, k, v, None, blocks(local, local))),
            "rows of this rank": refused(lambda: torch_flex(q, k, v, None, blocks(local, TOKENS))),
            "another layout": refused(lambda: torch_flex(q, k, v, None, sharded_blocks(ls.masks.causal(), other, 0))),
            "another length": refused(lambda: torch_flex(q, k, v, None, sharded_blocks(ls.masks.causal(), longer, 0))),
            "a table": refused(lambda: torch_flex(q, k, v, None, torch.ones(2, 2))),
            "heads": refused(lambda: torch_flex(q, k[:, :1], v[:, :1])),
            "options": refused(lambda: torch_flex(q, k, v, kernel_options={"BLOCK_M": 64})),
            "maxima": refused(lambda: torch_flex(q, k, v, return_aux=AuxRequest(max_scores=True))),
        }


def flex_outside():
    """PyTorch's flex attention is itself before and after contexts, and in threads without one: errors."""
    mesh, tensors = mesh_of_all(), whole(256, dtype=torch.float32)[:3]
    code, block_mask, errors = torch_flex.__code__, blocks(256, 256), []
    torch.compiler.reset()
    strict = compiled(torch_flex, fullgraph=True)
    inlined = compiled(lambda *args: 1.0 * torch_flex(*args), fullgraph=True)
    right = F.scaled_dot_product_attention(*tensors, is_causal=True)
    calls = strict, inlined, torch_flex

    def others():
        errors.extend(largest([quiet(call, *tensors, None, block_mask)], [right]) for call in calls)

    others()  # what is compiled here must not be run in the context
    q, k, v = (t.clone() for t in tensors)
    for _ in range(2):
        with api.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            thread = threading.Thread(target=others)
            thread.start()
            thread.join(60)
            with api.context_parallel(mesh):
                pass
            assert torch_flex.__code__ is not code
            out = torch_flex(q, k, v, None, block_mask)
            warm = compiled(torch_flex)(q, k, v, None, block_mask)
            errors.append(largest(api.context_parallel_unshard(mesh, [out, warm], [2, 2]), [right, right]))
        assert torch_flex.__code__ is code
    try:
        with api.context_parallel(mesh):
            raise KeyError("from inside")
    except KeyError:
        assert torch_flex.__code__ is code
    with torch.compiler.set_stance("fail_on_recompile"):
        others()
    assert len(errors) == 14
    return errors


def dtensors(tokens):
    """The flow of PyTorch's example: DTensors, a causal BlockMask, forward and backward in the context."""
    mesh, (*tensors, dout), results = mesh_of_all(), whole(tokens), []
    right, _, *gradients = dense_gradients(*tensors, ls.masks.causal(tokens), 8**-0.5, dout)
    for way, call in {"eager": torch_flex, "compiled": compiled(torch_flex), "longspan": api.flex_attention}.items():
        leaves = [distribute_tensor(t, mesh, [Shard(2)]).requires_grad_() for t in tensors]
        weight = distribute_tensor(dout, mesh, [Shard(2)])
        with api.context_parallel(mesh, load_balancer=api.Contiguous(), seq_len=tokens):
            out = quiet(call, *leaves, None, blocks(tokens, tokens))
            (out * weight).sum().backward()
        actual = [out, *(t.grad for t in leaves)]
        assert all(isinstance(t, DTensor) and tuple(t.placements) == (Shard(2),) for t in actual)
        results.append((way, largest([t.full_tensor() for t in actual], [right, *gradients]), 1e-12))
    return results


def doubled(q, k, v, **options):
    return 2 * F.scaled_dot_product_attention(q.sin(), k, v, **options)


def in_one_graph():
    """SDPA compiled as one graph, which serves contexts of other layouts, masks and schemes: (case, error, limit)."""
    mesh, (*tensors, dout), results = mesh_of_all(), whole(TOKENS, heads=4, kv_heads=2), []
    torch.compiler.reset()
    call = torch.compile(doubled, backend="aot_eager", fullgraph=True)
    contexts = [
        ({"load_balancer": api.HeadTail()}, "allgather"),
        ({"load_balancer": api.Contiguous()}, "alltoall"),
        ({"load_balancer": api.Contiguous(), "mask": ls.masks.documents([40, 24])}, "allgather"),
    ]
    for number, (options, method) in enumerate(contexts):
        mask = options.get("mask", ls.masks.full()) & ls.masks.causal()
        leaves = [t.clone().requires_grad_() for t in tensors]
        right = 2 * ls.attention(leaves[0].sin(), *leaves[1:], mask)
        wanted = [right.detach(), *torch.autograd.grad(right, leaves, dout)]
        own = [t.clone() for t in (*tensors, dout)]
        stance = torch.compiler.set_stance("fail_on_recompile") if number else contextlib.nullcontext()
        with stance, api.set_rotate_method(method), api.context_parallel(
            mesh, buffers=own, buffer_seq_dims=[2] * 4, **options
        ):  # fmt: skip
            leaves = [t.clone().requires_grad_() for t in own[:3]]
            out = call(*leaves, is_causal=True, enable_gqa=True)
            out.backward(own[3])
            assert routes.current().calls["sdpa"] == 1
        shards = [out.detach(), *(t.grad for t in leaves)]
        actual = api.context_parallel_unshard(mesh, shards, [2] * 4, options["load_balancer"])
        results.append((f"{options} {method}", largest(actual, wanted), 1e-12))
    outside = call(*tensors, is_causal=True, enable_gqa=True)
    right = doubled(*tensors, is_causal=True, enable_gqa=True)
    results.append(("outside", largest([outside], [right]), 1e-12))
    with api.context_parallel(mesh, seq_len=TOKENS):
        q, k, v = (t[:, :, : TOKENS // mesh.size()] for t in tensors)
        message = refused(lambda: call(q, k, v, attn_mask=torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)))
        assert "inside a context of Longspan" in message, message
    return results
