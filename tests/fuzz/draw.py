"""A case from a seed."""

import random
from itertools import pairwise

from .cases import Call, Case

TOKENS = (1, 2, 3, 5, 17, 40, 40, 64, 100, 127, 128, 129, 131, 200, 257)
FORMS = ("bshd", "sbhd", "wide", "every other", "far tokens", "one head", "one row", "packed", "k is v", "all one")
SCORES = ("table", "gain", "two tables", "rows", "square", "hide")
LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "round_robin", "balanced")
EQUAL = ("contiguous equal", "zigzag equal", "per_document equal", "balanced equal")


def case(seed: int, worlds=(1, 2, 3, 4)) -> Case:
    """The case of a seed."""
    r = random.Random(seed)
    world = r.choice(worlds)
    count = r.choice((2, 2, 3, 4)) if r.random() < 0.2 else 1
    one_device = world == 1 and r.random() < 0.7
    calls = tuple(call(r, world, small=count > 1) for _ in range(count))
    order = list(range(count))
    r.shuffle(order)
    losses = r.choice(("one", "one", "two", "sum") if count > 1 else ("one", "one", "one", "two"))
    return Case(world, calls, tuple(order), losses, one_device)


def call(r: random.Random, world: int, small: bool) -> Call:
    tokens = r.choice(TOKENS[:8] if small else TOKENS)
    kv_heads = r.choice((1, 1, 2, 3))
    q_heads = kv_heads * r.choice((1, 2, 7) if tokens < 150 else (1, 2))
    head_dim = r.choice((1, 3, 8, 8, 16, 33))
    v_head_dim = r.choice((head_dim, head_dim, 1, 5, 24))
    batch = r.choice((1, 1, 2, 3))
    if r.random() < 0.03:  # nothing at all of something
        which = r.randrange(4)
        tokens, batch = (0 if which == 0 else tokens), (0 if which == 1 else batch)
        head_dim, v_head_dim = (0 if which == 2 else head_dim), (0 if which == 3 else v_head_dim)
    form = r.choice(FORMS) if r.random() < 0.6 else "plain"
    if form in ("packed", "k is v", "all one"):
        v_head_dim = head_dim
    if form == "all one":
        kv_heads = q_heads
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "tokens": tokens}
    sizes |= {"head_dim": head_dim, "v_head_dim": v_head_dim}
    dtype = r.choice(("float64", "float64", "float32", "float32", "bfloat16", "float16"))
    return Call(
        seed=r.randrange(1 << 30),
        **sizes,
        dtype=dtype,
        mask=grid(r, tokens, batch, q_heads),
        layout=layout(r, tokens, world),
        scheme=scheme(r, world),
        keep=r.random() < 0.3,
        scale=r.choice((1e-30, 0.3, 2.0, 1, ("tensor", 0.25))) if r.random() < 0.35 else None,
        spread=r.choice((1.0, 1.0, 1.0, 6.0)) if dtype != "float16" else 1.0,  # which ends at 65,504
        form=form,
        needs=needs(r, world),
        **options(r),
    )


def needs(r, world):
    """Which of q, k, v need gradients: the same on all ranks, or not; none at all only everywhere."""
    one = tuple(r.random() < 0.8 for _ in range(3))
    if world == 1 or r.random() < 0.9:
        return (one,)
    each = [[r.random() < 0.7 for _ in range(3)] for _ in range(world)]
    for found in each:
        found[r.randrange(3)] = True
    return tuple(map(tuple, each))


def options(r):
    """What else may be asked of a call. Compiling takes seconds, so that it is asked for rarely."""
    compiled = r.choice(("eager", "aot_eager", "aot_eager", "aot_eager dynamic")) if r.random() < 0.03 else ""
    checkpoint = r.choice(("reentrant", "not reentrant")) if r.random() < 0.08 and not compiled else ""
    door = "flex" if r.random() < 0.1 else "attention"
    plain = door == "flex"  # its signature has a score function, a scale and lse, and nothing else
    return {
        "sinks": not plain and r.random() < 0.2,
        "softcap": 5.0 if not plain and r.random() < 0.15 else None,
        "alibi": not plain and r.random() < 0.12,
        "bias": tuple(r.random() < 0.6 for _ in range(4)) if not plain and r.random() < 0.12 else None,
        "score": r.choice(SCORES) if r.random() < 0.25 else "",
        "lse": r.random() < 0.4,
        "door": door,
        "kernel": "reference" if not plain and r.random() < 0.12 else "auto",
        "captured_grads": "share" if r.random() < 0.15 else "sum",
        "compiled": compiled,
        "autocast": r.random() < 0.08,
        "checkpoint": checkpoint,
    }


def lengths(r, tokens, most=8):
    """Lengths of documents, some of them 0."""
    cuts = sorted(r.randint(0, tokens) for _ in range(r.randint(0, most - 1)))
    return tuple(b - a for a, b in zip((0, *cuts), (*cuts, tokens), strict=True))


def grid(r, tokens, batch, heads):
    """A mask: one for all, or another for each head, row, or both."""
    how = r.choice(("one", "one", "one", "one", "per_head", "per_row", "both"))
    if how == "one" or batch == 0:
        return mask(r, tokens)
    if how == "per_head":
        return ("per_head", tuple(mask(r, tokens, 1) for _ in range(heads)))
    if how == "per_row":
        return ("per_row", tuple(mask(r, tokens, 1) for _ in range(batch)))
    each = tuple(("per_head", tuple(mask(r, tokens, 2) for _ in range(heads))) for _ in range(batch))
    return ("per_row", each)


def mask(r, tokens, depth=0):
    kinds = ["causal", "full", "window", "documents", "documents", "cu_seqlens", "chunked", "prefix", "prefixes"]
    kinds += ["global_prefix", "remainder", "labels", "none"]
    kinds += ["by_row_and_head"] * (depth == 0) + ["and", "and", "or", "not"] * (depth < 2)
    kind = r.choice(kinds)
    if kind in ("and", "or"):
        return (kind, mask(r, tokens, depth + 1), mask(r, tokens, depth + 1))
    if kind == "not":
        return (kind, mask(r, tokens, depth + 1))
    if kind in ("documents", "cu_seqlens"):
        return (kind, lengths(r, tokens))
    if kind == "prefixes":
        each = lengths(r, tokens, 4)
        return (kind, tuple(r.randint(0, n) for n in each), each)
    args = {
        "window": lambda: (r.randint(0, tokens), r.choice((0, 0, r.randint(0, tokens)))),
        "chunked": lambda: (r.randint(1, max(1, tokens)),),
        "prefix": lambda: (r.randint(0, tokens),),
        "global_prefix": lambda: (r.randint(0, tokens),),
        "remainder": lambda: (r.randint(2, 5),),
        "labels": lambda: (r.randrange(100),),
        "by_row_and_head": lambda: (r.randint(2, 5),),
    }.get(kind, lambda: ())
    return (kind, *args())


def layout(r, tokens, world):
    kind = r.choice((*LAYOUTS, *EQUAL, "scattered", "scattered", "on one rank"))
    if kind == "scattered":  # any cut, any owner; ranks may stay empty
        edges = sorted({0, tokens, *(r.randint(0, tokens) for _ in range(r.randint(0, 3 * world)))})
        return (kind, tuple((a, b, r.randrange(world)) for a, b in pairwise(edges)))
    args = {
        "striped": lambda: (r.randint(1, 9),),
        "per_document": lambda: (lengths(r, tokens),),
        "per_document equal": lambda: (lengths(r, tokens),),
        "round_robin": lambda: (r.randint(1, 33),),
        "on one rank": lambda: (r.randrange(world),),
    }.get(kind, lambda: ())
    return (kind, *args())


def scheme(r, world):
    kind = r.choice(("auto", "auto", "ring", "exchange", "all_gather", "all_to_all", "hybrid"))
    if kind == "hybrid":
        heads = r.choice([n for n in range(1, world + 1) if world % n == 0])
        return f"hybrid({heads}, {r.choice(('ring', 'exchange', 'all_gather'))})"
    return kind
