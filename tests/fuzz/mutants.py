"""Mistakes that the fuzzer must find: code that breaks Longspan in a process for good."""

_WRAP = """
import longspan as ls
original = ls.attention
def attention(q, k, v, what, **options):
    {change}
    return original(q, k, v, what, **options)
ls.attention = attention
"""

MUTANTS = {
    "sinks are dropped": _WRAP.format(change='options.pop("sinks", None)'),
    "a scale is dropped": _WRAP.format(change='options.pop("scale", None)'),
    "a soft cap is twice as high": _WRAP.format(
        change='options["softcap"] = options.get("softcap") and 2 * options["softcap"]'
    ),
    "gradients of captured tensors stay shares": _WRAP.format(change='options["captured_grads"] = "share"'),
    "lse has no gradient": """
import longspan as ls
original = ls.attention
def attention(*args, **options):
    out, lse = original(*args, **options)
    if lse.requires_grad:
        lse.register_hook(lambda grad: grad * 0)
    return out, lse
ls.attention = attention
""",
    "a window is one too wide": """
import longspan.masks
original = longspan.masks.sliding_window
longspan.masks.sliding_window = lambda left, right=0, *rest: original(left + 1, right, *rest)
""",
    "a later partial output replaces an earlier one": """
from longspan.run import moves
def merged(acc, top, num, out, lse):
    acc.copy_(out)
    top.copy_(lse)
    num.copy_((~lse.isneginf()).to(num.dtype))
moves.merge = merged
""",
    "strides are forgotten": _WRAP.format(
        change="k = k.as_strided(k.shape, k.contiguous().stride()) if k.numel() else k"
    ),
    "documents end one token late": """
import longspan.masks
original = longspan.masks.documents
def documents(lengths):
    lengths = list(lengths)
    if len(lengths) > 1 and lengths[1] > 0:
        lengths[0], lengths[1] = lengths[0] + 1, lengths[1] - 1
    return original(lengths)
longspan.masks.documents = documents
""",
}
