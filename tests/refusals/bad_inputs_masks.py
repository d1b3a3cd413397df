"""Bad masks: lengths, windows, documents, functions, combinations, questions."""

import numpy as np
import torch

from longspan import LongspanError, MaskError, Span, masks
from longspan.masks import Band
from tests.refusals.bad_inputs import NAN, NO_COUNTS, bad, counts

LENGTHS = {
    "causal()": lambda n: masks.causal(n),
    "full()": lambda n: masks.full(n),
    "sliding_window(3)": lambda n: masks.sliding_window(3, seq_len=n),
    "global_prefix()": lambda n: masks.global_prefix(1, seq_len=n),
    "prefix_lm()": lambda n: masks.prefix_lm(0, seq_len=n),
    "chunked()": lambda n: masks.chunked(4, n),
    "resized": lambda n: masks.causal().resized(n),
    "area": lambda n: masks.causal().area(n),
}
SIZES = {
    ("sliding_window()", "left"): lambda n: masks.sliding_window(n),
    ("sliding_window()", "right"): lambda n: masks.sliding_window(3, n),
    ("global_prefix()", "num"): lambda n: masks.global_prefix(n),
}
DOCUMENTS = {
    "floats": ([2.0, 3.0], "flat list of whole numbers", "float64"),
    "nan": ([NAN], "flat list of whole numbers", "float64"),
    "nested": ([[2, 3]], "flat list of whole numbers", "(1, 2)"),
    "ragged": ([[2], [3, 4]], "flat list of whole numbers", "[[2], [3, 4]]"),
    "negative": ([4, -1], "document 1 has length -1", "0 tokens or more"),
    "text": ("abc", "flat list of whole numbers", "<U3"),
    "words": (["a", "b"], "flat list of whole numbers", "<U1"),
    "none": (None, "flat list of whole numbers", "object"),
    "one number": (7, "flat list of whole numbers", "shape ()"),
    "booleans": ([True, True], "flat list of whole numbers", "bool"),
    "too long": ([1 << 40, 1], "1099511627777 tokens together", "the limit"),
    "overflowing int64": ([1 << 62, 1 << 62, 1 << 62], "13835058055282163712 tokens together", "the limit"),
    "overflowing uint64": (np.array([1 << 63, 1 << 63], dtype=np.uint64), "18446744073709551616 tokens", "the limit"),
    "beyond any integer": ([10**30], "flat list of whole numbers", "object"),
}
CUMULATIVE = {
    "not from 0": ([1, 4], "starts with 0", "[1, 4]"),
    "empty": ([], "starts with 0", "[]"),
    "falling": ([0, 4, 3], "document 1 has length -1", "0 tokens or more"),
    "floats": ([0.0, 4.0], "starts with 0", "in whole numbers"),
    "nested": ([[0, 4]], "starts with 0", "[[0, 4]]"),
    "ragged": ([[0], [1, 2]], "starts with 0", "[[0], [1, 2]]"),
    "text": ("0 4", "starts with 0", "'0 4'"),
    "too long": ([0, 1 << 41], "2199023255552 tokens together", "the limit"),
}
PREFIXES = {
    "negative": ((-1, None, 8), "0 <= prefix <= length", "[-1]"),
    "too long": ((9, None, 8), "0 <= prefix <= length", "[9]"),
    "float": ((2.5, None, 8), "prefix = 2.5", "whole numbers"),
    "text": (("2", None, 8), "prefix = '2'", "whole numbers"),
    "beyond its document": (([1, 9], [4, 4], None), "0 <= prefix <= length", "[1, 9]"),
    "too few": (([1, 2], [4, 4, 4], None), "shape (2,) for 3 documents", "one for each document"),
    "another length": ((1, [4, 4], 9), "8 tokens together and seq_len = 9", "leave seq_len out"),
    "ragged": (([[1], [2, 3]], [4, 4], None), "prefix is a whole number", "[[1], [2, 3]]"),
}
# what a mask's function returns, and how the answer is called
ANSWERS = {
    "None": (lambda b, h, q, kv: None, "NoneType"),
    "a number": (lambda b, h, q, kv: 1.0, "float"),
    "a bool": (lambda b, h, q, kv: True if q > kv else False, "bool"),  # noqa: SIM210
    "integers": (lambda b, h, q, kv: q - kv, "torch.int64 of shape ()"),
    "floats": (lambda b, h, q, kv: (q - kv).float(), "torch.float32"),
    "a tuple": (lambda b, h, q, kv: (q > kv,), "tuple"),
    "another shape": (lambda b, h, q, kv: torch.zeros(3, 7, dtype=torch.bool), "torch.bool of shape (3, 7)"),
}


def function(mod, **kwargs):
    return masks.from_mask_mod(mod, 8, **kwargs)


def asked(mod):
    return function(mod).allows(np.arange(4)[:, None], np.arange(4))


def _functions():
    for name, (mod, found) in ANSWERS.items():
        says = f"must return one boolean tensor for a pair (True: may attend), but it returned {found}"
        yield bad(f"a mask function returns {name}", lambda mod=mod: asked(mod), MaskError, says)
    uses_b, uses_h = (lambda b, h, q, kv: (q >= kv) & (b == 0)), (lambda b, h, q, kv: (q >= kv) & (h < 3))
    yield bad("uses b", lambda: asked(uses_b), MaskError, "mask_mod uses b", "Pass rows=")
    yield bad("uses h", lambda: asked(uses_h), MaskError, "mask_mod uses h", "Pass heads=")
    for name, mod in {"two": lambda b, h: True, "five": lambda a, b, c, d, e: True, "none": lambda: True}.items():
        says = "mask_mod is called as mask_mod(b, h, q_idx, kv_idx)", "Give it these 4 arguments"
        yield bad(f"takes {name} arguments", lambda mod=mod: function(mod), MaskError, *says)
    for value in ("causal", 3, None, torch.ones(8, 8), [1]):
        says = "takes a function (b, h, q_idx, kv_idx)", type(value).__name__
        yield bad(f"from_mask_mod({type(value).__name__})", lambda v=value: masks.from_mask_mod(v), MaskError, *says)
    plain = lambda b, h, q, kv: q >= kv  # noqa: E731
    for word in ("rows", "heads"):
        values = (0, *NO_COUNTS)
        yield from counts("from_mask_mod", lambda n, w=word: function(plain, **{w: n}), MaskError, word, values)
    yield bad("within a function", lambda: function(plain, within=plain), MaskError, "within is a mask", "function")
    yield bad(
        "within an opaque mask",
        lambda: function(plain, within=function(plain)),
        MaskError,
        "must be one structured plane",
        "Combine other masks with &",
    )


def _combinations():
    a, opaque = masks.documents([3]), function(lambda b, h, q, kv: q >= kv)
    two, three = masks.per_head(masks.causal(), masks.full()), masks.per_head(*[masks.causal()] * 3)
    for value in (None, 3, "causal", lambda b, h, q, kv: q > kv, torch.ones(3, 3)):
        kind = type(value).__name__
        says = f"& joins two masks, but got <mask documents(1), 3 tokens> & {kind}", "masks.from_mask_mod"
        yield bad(f"mask & {kind}", lambda v=value: a & v, MaskError, *says)
        yield bad(f"mask | {kind}", lambda v=value: a | v, MaskError, says[0].replace("&", "|"), says[1])
        for make, name in ((masks.per_head, "per_head"), (masks.per_row, "per_row")):
            says_ = f"{name}() takes masks, one argument each, but argument 1 is {kind}", "Unpack a list with *"
            yield bad(f"{name}(mask, {kind})", lambda v=value, m=make: m(a, v), MaskError, *says_)
    for make, name in ((masks.per_head, "per_head"), (masks.per_row, "per_row")):
        yield bad(f"{name}()", make, MaskError, f"{name}() needs at least one mask")
        lengths = f"{name}() joins masks of one sequence length, but got lengths [3, 4]"
        yield bad(f"{name} lengths", lambda m=make: m(a, masks.documents([4])), MaskError, lengths, "Pad the shorter")
    yield bad("lengths differ", lambda: a & masks.documents([4]), MaskError, "3 tokens", "4", "same length")
    yield bad("heads differ", lambda: two & three, MaskError, "2 heads", "over 3", "same number")
    yield bad("per_head twice", lambda: masks.per_head(two, a), MaskError, "already differs from head to head")
    rows = masks.per_row(a, masks.causal(3))
    yield bad("per_row twice", lambda: masks.per_row(rows, a), MaskError, "already differs from row to row")
    yield bad("truth", lambda: bool(a), MaskError, "has no truth value", "&, | and ~")
    yield bad("and", lambda: a and masks.causal(), MaskError, "has no truth value", "&, | and ~")
    yield bad("bands of a function", opaque.bands, MaskError, "not a list of bands", "classify()")
    yield bad("area of a function", opaque.area, MaskError, "has no closed form", "classify()")


def _questions():
    a, two = masks.documents([3]), masks.per_head(masks.causal(), masks.full())
    for name, value in {"floats": [0.5], "a text": "a", "nan": NAN, "a bool": True, "None": None}.items():
        says = "Positions are whole numbers"
        yield bad(f"allows q {name}", lambda v=value: a.allows(v, 0), MaskError, "allows() got q", says)
        yield bad(f"allows kv {name}", lambda v=value: a.allows(0, v), MaskError, "allows() got kv", says)
    for head in (2, -1):
        yield bad(f"head {head}", lambda h=head: two.allows(0, 0, head=h), MaskError, "head of", f"but got {head}")
    yield bad("head 0.5", lambda: two.plane(0, 0.5), MaskError, "head = 0.5", "whole number")
    yield bad("head 'a'", lambda: two.plane(0, "a"), MaskError, "head = 'a'", "whole number")
    yield bad("no length", lambda: masks.causal().area(), MaskError, "has no length of its own", "Pass seq_len=")
    yield bad("another length", lambda: a.area(4), MaskError, "is for 3 tokens, but seq_len = 4", "leave seq_len out")
    yield bad("resized", lambda: a.resized(4), MaskError, "is for 3 tokens, but seq_len = 4")
    yield from counts("draw", lambda n: a.draw(width=n), MaskError, "width", (0, *NO_COUNTS))
    opaque = masks.from_mask_mod(lambda b, h, q, kv: q >= kv)
    yield bad("draw a long function", lambda: opaque.draw(5000), MaskError, "5000 tokens are more than 4096")
    yield from counts("classify", lambda n: a.classify(Span(0, 3), Span(0, 3), tile=n), MaskError, "tile", (0, 2.5))


def _words():
    for start, stop in ((-1, 2), (3, 1), (0, (1 << 40) + 1)):
        says = "0 <= start <= stop", f"start = {start} and stop = {stop}"
        yield bad(f"Span({start}, {stop})", lambda a=start, b=stop: Span(a, b), LongspanError, *says)
    for value in (0.5, "0", None, True, NAN, [0]):
        yield bad(f"Span({value!r}, 4)", lambda v=value: Span(v, 4), LongspanError, f"start = {value!r}", "an integer")
    for text in ("", "3", "3:", ":3", "a:b", "-1:3", "1:2:3", "1.5:2", "٣:٩", "1:" + "9" * 14, "0x1:2", "1 :2", "²:3"):
        yield bad(f"Span.parse({text!r})", lambda t=text: Span.parse(t), LongspanError, "written start:stop", "but got")
    for text in ("0:4y1:2", "", "0:4", "0:4x", "x0:4"):
        yield bad(f"Band.parse({text!r})", lambda t=text: Band.parse(t), LongspanError, "written start:stop", "but got")
    for text in ("0:4x0:4/a..", "0:4x0:4/1.5..2", "0:4x0:4/--1..", "0:4x0:4/.." + "9" * 40, "0:4x0:4/٣.."):
        says = "a band is written Q x KV / LO..HI", "1 to 13 digits"
        yield bad(f"Band.parse({text!r:.30})", lambda t=text: Band.parse(t), LongspanError, *says)


def rows():
    for name, call in LENGTHS.items():
        yield from counts(name, call, MaskError, "seq_len")
    for (name, word), call in SIZES.items():
        yield from counts(name, call, MaskError, word)
    yield from counts("chunked()", lambda n: masks.chunked(n, 8), MaskError, "size", (0, *NO_COUNTS))
    yield bad("chunked(None)", lambda: masks.chunked(4, None), MaskError, "seq_len = None", "whole number")
    yield bad("many chunks", lambda: masks.chunked(1, 1 << 40), MaskError, "1099511627776 chunks", "larger chunks")
    for name, (value, *says) in DOCUMENTS.items():
        yield bad(f"documents {name}", lambda v=value: masks.documents(v), MaskError, *says)
    for name, (value, *says) in CUMULATIVE.items():
        yield bad(f"cu_seqlens {name}", lambda v=value: masks.from_cu_seqlens(v), MaskError, *says)
    for name, (value, *says) in PREFIXES.items():
        yield bad(f"prefix {name}", lambda v=value: masks.prefix_lm(*v), MaskError, *says)
    yield from _functions()
    yield from _combinations()
    yield from _questions()
    yield from _words()
