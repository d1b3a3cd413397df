"""What must come out, in plain PyTorch, densely: nothing of Longspan is used here.

Shapes: B batch, H query heads, S tokens. Everything is computed in the dtype of its inputs, so that float64 gives the
truth, and the case's own dtype gives an idea of how far off that dtype is by nature.
"""

import math

import torch

from .cases import Call


def labels_of(seed, tokens, kinds=3):
    """A label for every token: what functions of masks read."""
    return torch.randint(0, kinds, (tokens,), generator=torch.Generator().manual_seed(seed))


def allowed(mask, tokens, row=0, head=0):
    """(S, S) whether a query sees a key, straight from the words of a mask."""
    kind, *args = mask
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    far = i - j
    if kind in ("and", "or"):
        a, b = (allowed(part, tokens, row, head) for part in args)
        return a & b if kind == "and" else a | b
    if kind == "not":
        return ~allowed(args[0], tokens, row, head)
    if kind in ("per_head", "per_row"):
        return allowed(args[0][head if kind == "per_head" else row], tokens, row, head)
    if kind in ("documents", "cu_seqlens"):
        return same_document(args[0], tokens)
    if kind == "chunked":
        return i // args[0] == j // args[0]
    if kind == "prefixes":
        return _prefixes(*args, tokens)
    if kind == "labels":
        label = labels_of(args[0], tokens)
        return (label[i] <= label[j]) & (far >= 0)
    return {
        "causal": lambda: far >= 0,
        "full": lambda: far == far,
        "none": lambda: far != far,
        "window": lambda: (far <= args[0]) & (-far <= args[1]),
        "prefix": lambda: (far >= 0) | ((i < args[0]) & (j < args[0])),
        "global_prefix": lambda: (j < args[0]).expand(tokens, tokens),
        "remainder": lambda: far % args[0] != 1,
        "by_row_and_head": lambda: (far + row + 2 * head) % args[0] != 0,
    }[kind]()


def same_document(lengths, tokens):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    assert len(ids) == tokens
    return ids[:, None] == ids[None]


def _prefixes(prefixes, lengths, tokens):
    """Every document has a prefix of its own, whose tokens see each other both ways."""
    place = torch.cat([torch.arange(n) for n in lengths]) if lengths else torch.zeros(0, dtype=torch.long)
    prefix = torch.repeat_interleave(torch.tensor(prefixes), torch.tensor(lengths))
    both = (place < prefix)[:, None] & (place < prefix)[None]
    causal = torch.arange(tokens)[:, None] >= torch.arange(tokens)[None]
    return same_document(lengths, tokens) & (causal | both)


def dense_mask(call: Call):
    """(B, H, S, S)."""
    rows = [
        torch.stack([allowed(call.mask, call.tokens, b, h) for h in range(call.q_heads)]) for b in range(call.batch)
    ]
    return torch.stack(rows) if rows else torch.zeros(0, call.q_heads, call.tokens, call.tokens, dtype=torch.bool)


def leaf_shapes(call: Call):
    """name: (shape, the dim of tokens) of the tensors that q, k and v are cut from."""
    b, s, d = call.batch, call.tokens, call.head_dim
    heads = {"q": call.q_heads, "k": call.kv_heads, "v": call.kv_heads}
    dims = {"q": d, "k": d, "v": call.v_head_dim}
    if call.form == "packed":
        return {"qkv": ((b, s, call.q_heads + 2 * call.kv_heads, d), 1)}
    if call.form == "k is v":
        heads.pop("v")
    if call.form == "all one":
        return {"q": ((b, call.q_heads, s, d), 2)}
    make = {
        "bshd": lambda h, e: ((b, s, h, e), 1),
        "sbhd": lambda h, e: ((s, b, h, e), 0),
        "wide": lambda h, e: ((b, h, s, e + 3), 2),
        "every other": lambda h, e: ((b, h, s, 2 * e), 2),
        "far tokens": lambda h, e: ((b, h, s, 2, e), 2),
        "one head": lambda h, e: ((b, 1, s, e), 2),
        "one row": lambda h, e: ((1, h, s, e), 2),
    }.get(call.form, lambda h, e: ((b, h, s, e), 2))
    return {name: make(heads[name], dims[name]) for name in heads}


def cut(call: Call, leaves):
    """q, k, v as views of the tensors that get gradients, the same for whole ones and for shards."""
    if call.form == "packed":
        (x,) = leaves.values()
        return x.transpose(1, 2).split((call.q_heads, call.kv_heads, call.kv_heads), dim=1)
    if call.form == "all one":
        return (leaves["q"],) * 3
    if call.form == "k is v":
        return leaves["q"], leaves["k"], leaves["k"]
    heads = {"q": call.q_heads, "k": call.kv_heads, "v": call.kv_heads}
    view = {
        "bshd": lambda x, n: x.transpose(1, 2),
        "sbhd": lambda x, n: x.permute(1, 2, 0, 3),
        "wide": lambda x, n: x[..., 1:-2],
        "every other": lambda x, n: x[..., ::2],
        "far tokens": lambda x, n: x[:, :, :, 0],
        "one head": lambda x, n: x.expand(-1, heads[n], -1, -1),
        "one row": lambda x, n: x.expand(call.batch, -1, -1, -1),
    }.get(call.form, lambda x, n: x)
    return tuple(view(leaves[name], name) for name in "qkv")


def extra_shapes(call: Call):
    """name: shape of the tensors beside q, k and v that get gradients."""
    heads, s = call.q_heads, call.tokens
    found = {}
    if call.sinks:
        found["sinks"] = (heads,)
    if call.alibi:
        found["alibi"] = (heads,)
    if call.bias is not None:
        full = (call.batch, heads, s, s)
        found["bias"] = tuple(n if keep else 1 for n, keep in zip(full, call.bias, strict=True))
    if call.score in ("table", "two tables"):
        found["table"] = (2 * s + 1, heads)
    if call.score in ("gain", "two tables"):
        found["gain"] = (heads,)
    if call.score == "rows":
        found |= {"ours": (call.batch, s), "theirs": (s,)}
    return found


def score_function(call: Call, extras):
    """The score function of a case: the same one is given to Longspan and used by the oracle."""
    s = call.tokens
    return {
        "table": lambda x, b, h, i, j: x + extras["table"][i - j + s, h],
        "gain": lambda x, b, h, i, j: x * extras["gain"][h],
        "two tables": lambda x, b, h, i, j: x * extras["gain"][h] + extras["table"][i - j + s, h],
        "rows": lambda x, b, h, i, j: x + extras["ours"][b, i] - extras["theirs"][j],
        "square": lambda x, b, h, i, j: x + 0.1 * x * x,
        "hide": lambda x, b, h, i, j: torch.where((i + 2 * j) % 5 == 0, -torch.inf, x),
    }[call.score]


def plain_scale(call: Call) -> float:
    if call.scale is None:
        return 1 / math.sqrt(call.head_dim) if call.head_dim else 1.0
    return call.scale[1] if isinstance(call.scale, tuple) else call.scale


def attend(call: Call, leaves, extras, mask):
    """(out, lse), differentiable, in the dtype of the leaves; mask is (B, H, S, S)."""
    q, k, v = cut(call, leaves)
    repeat = call.q_heads // call.kv_heads
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    x = (q @ k.transpose(-1, -2)) * plain_scale(call)
    i, j = torch.arange(call.tokens)[:, None], torch.arange(call.tokens)[None]
    b, h = torch.arange(call.batch)[:, None, None, None], torch.arange(call.q_heads)[None, :, None, None]
    if call.softcap is not None:
        x = call.softcap * torch.tanh(x / call.softcap)
    if call.alibi:
        x = x - extras["alibi"][h] * (i - j).abs()
    if call.bias is not None:
        x = x + extras["bias"]
    if call.score:
        x = score_function(call, extras)(x, b, h, i, j)
    x = x.masked_fill(~mask, -torch.inf)
    if call.sinks:
        sinks = extras["sinks"].to(x.dtype)[None, :, None, None].expand(*x.shape[:3], 1)
        x = torch.cat([x, sinks], -1)
    top = x.detach().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:3], 1)
    top = top.masked_fill(top.isneginf(), 0.0)
    weights = torch.exp(x - top)
    total = weights.sum(-1, keepdim=True)
    nothing = total == 0  # rows that see nothing: out 0, lse -inf, no gradient
    total = total.masked_fill(nothing, 1.0)
    lse = (total.log() + top).masked_fill(nothing, -torch.inf).squeeze(-1)
    return (weights / total)[..., : call.tokens] @ v, lse
