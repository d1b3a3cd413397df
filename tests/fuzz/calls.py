"""A case in Longspan's words."""

import torch

import longspan as ls

from .cases import Call, Case
from .oracle import extra_shapes, labels_of, leaf_shapes, score_function


def make_mask(mask, call: Call):
    """The mask that the words of a case name."""
    (kind, *args), tokens, m = mask, call.tokens, ls.masks
    if kind in ("and", "or"):
        a, b = (make_mask(part, call) for part in args)
        return a & b if kind == "and" else a | b
    if kind == "not":
        return ~make_mask(args[0], call)
    if kind in ("per_head", "per_row"):
        return getattr(m, kind)(*(make_mask(part, call) for part in args[0]))
    if kind == "cu_seqlens":
        edges = [sum(args[0][:n]) for n in range(len(args[0]) + 1)]
        return m.from_cu_seqlens(torch.tensor(edges, dtype=torch.int32))
    if kind in ("remainder", "labels", "by_row_and_head"):
        return _of_function(kind, args[0], call)
    return {
        "causal": lambda: m.causal(),
        "full": lambda: m.full(),
        "none": lambda: ~m.full(tokens),
        "window": lambda: m.sliding_window(*args),
        "documents": lambda: m.documents(args[0]),
        "chunked": lambda: m.chunked(args[0], tokens),
        "prefix": lambda: m.prefix_lm(args[0]),
        "prefixes": lambda: m.prefix_lm(*args),
        "global_prefix": lambda: m.global_prefix(args[0]),
    }[kind]()


def _of_function(kind, number, call: Call):
    make, tokens = ls.masks.from_mask_mod, call.tokens
    if kind == "remainder":
        return make(lambda b, h, i, j: (i - j) % number != 1, tokens)
    if kind == "labels":
        label = labels_of(number, tokens)
        return make(lambda b, h, i, j: label[i] <= label[j], tokens, within=ls.masks.causal())
    by = {"rows": max(call.batch, 1), "heads": call.q_heads}
    return make(lambda b, h, i, j: (i - j + b + 2 * h) % number != 0, tokens, **by)


def make_layout(call: Call, mask, world):
    (name, *args), made, tokens = call.layout, ls.layouts, call.tokens
    kind, equal = name.removesuffix(" equal"), name.endswith(" equal")
    return {
        "contiguous": lambda: made.contiguous(tokens, world, equal_tokens=equal),
        "zigzag": lambda: made.zigzag(tokens, world, equal_tokens=equal),
        "striped": lambda: made.striped(tokens, world, stripe=args[0]),
        "per_document": lambda: made.per_document(args[0], world, equal_tokens=equal),
        "round_robin": lambda: made.round_robin_by_work(mask, world, seq_len=tokens, block=args[0]),
        "balanced": lambda: made.balanced(mask, world_size=world, seq_len=tokens, equal_tokens=equal),
        "scattered": lambda: _scattered(tokens, world, args[0]),
        "on one rank": lambda: _scattered(tokens, world, ((0, tokens, args[0]),) if tokens else ()),
    }[kind]()


def _scattered(tokens, world, rows):
    spans = [[(a, b) for a, b, owner in rows if owner == rank] for rank in range(world)]
    return ls.layouts.Layout.from_spans(tokens, spans, name="scattered")


def make_plan(call: Call, world):
    """(plan, positions of every rank's slots)."""
    mask = make_mask(call.mask, call)
    layout = make_layout(call, mask, world)
    plan = ls.plan(
        mask, layout, q_heads=call.q_heads, kv_heads=call.kv_heads, head_dim=call.head_dim,
        v_head_dim=call.v_head_dim, dtype=call.dtype, batch=call.batch, scheme=call.scheme, keep=call.keep,
    )  # fmt: skip
    return plan, [torch.as_tensor(layout.positions(rank)) for rank in range(world)]


def draw_tensors(call: Call):
    """(leaves, extras, gradients of out and lse): whole tensors, values that the case's dtype holds, as float64."""
    dtype, draw = getattr(torch, call.dtype), torch.Generator().manual_seed(call.seed)

    def random(shape, spread=1.0):
        drawn = torch.randn(shape, generator=draw, dtype=torch.float64) * spread
        return drawn.to(dtype).double()

    leaves = {name: random(shape, call.spread) for name, (shape, _) in leaf_shapes(call).items()}
    extras = {name: random(shape) for name, shape in extra_shapes(call).items()}
    if "alibi" in extras:
        extras["alibi"] = extras["alibi"].abs()
    shape = (call.batch, call.q_heads, call.tokens)
    upstream = {"out": random((*shape, call.v_head_dim)), "lse": random(shape)}
    return leaves, extras, upstream


def compute(case: Case, call: Call, what, group, q_k_v, extras):
    """(out, lse) by Longspan, as the case asks for it."""
    options = {"return_lse": True, "group": group}
    if call.scale is not None:
        options["scale"] = torch.tensor(call.scale[1]) if isinstance(call.scale, tuple) else call.scale
    score = score_function(call, extras) if call.score else None
    if call.door == "flex":
        words = {"block_mask": what} if case.one_device else {"plan": what}

        def run(q, k, v):
            return ls.flex_attention(q, k, v, score, enable_gqa=call.q_heads != call.kv_heads, **words, **options,
                                     captured_grads=call.captured_grads)  # fmt: skip
    else:
        options |= {"kernel": call.kernel, "softcap": call.softcap, "score_mod": score}
        options |= {name: extras[name] for name in ("sinks", "alibi", "bias") if name in extras}
        options["captured_grads"] = call.captured_grads

        def run(q, k, v):
            return ls.attention(q, k, v, what, **options)

    if call.compiled:
        backend, _, dynamic = call.compiled.partition(" ")
        torch._functorch.config.donated_buffer = False  # else PyTorch refuses retain_graph in compiled code
        run = torch.compile(run, backend=backend, dynamic=True if dynamic else None)
    with torch.autocast("cpu", torch.bfloat16, enabled=call.autocast):
        if call.checkpoint and any(x.requires_grad for x in q_k_v):
            from torch.utils.checkpoint import checkpoint

            return checkpoint(run, *q_k_v, use_reentrant=call.checkpoint == "reentrant")
        return run(*q_k_v)
