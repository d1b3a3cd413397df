"""A smaller case that fails alike: calls are left out, options become plain, masks and sequences get shorter."""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace

from .cases import Call, Case

TRIES = 40


def shrunk(case: Case, fails: Callable[[Case], bool], most: int = TRIES) -> Case:
    """The smallest case that was met on the way; `fails` says whether a case still fails in the same way."""
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in simpler(case):
            tries += 1
            if tries > most:
                return case
            if fails(candidate):
                case, smaller = candidate, True
                break
    return case


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are one step simpler, the largest steps first."""
    if len(case.calls) > 1:
        for number in range(len(case.calls)):
            calls = tuple(call for n, call in enumerate(case.calls) if n != number)
            yield replace(case, calls=calls, order=tuple(range(len(calls))))
    if case.losses != "one":
        yield replace(case, losses="one")
    for number, call in enumerate(case.calls):
        for smaller in simpler_calls(call):
            yield replace(case, calls=tuple(smaller if n == number else c for n, c in enumerate(case.calls)))


def simpler_calls(call: Call) -> Iterator[Call]:
    if call.tokens > 4:
        yield resized(call, call.tokens // 2)
        yield resized(call, call.tokens - 1)
    for field in fields(Call):
        plain = field.default
        sizes = ("seed", "tokens", "q_heads", "kv_heads", "mask", "v_head_dim", "head_dim", "batch")
        if field.name not in sizes and getattr(call, field.name) != plain:
            yield replace(call, **{field.name: plain})
    for mask in smaller_masks(call.mask):
        yield replace(call, mask=mask)
    if call.mask[0] not in ("per_head", "per_row") and "per_head" not in repr(call.mask):
        if call.q_heads > 1:
            yield replace(call, q_heads=1, kv_heads=1)
        if call.batch > 1 and "per_row" not in repr(call.mask):
            yield replace(call, batch=1)
    if (call.head_dim, call.v_head_dim) != (2, 2) and 0 not in (call.head_dim, call.v_head_dim):
        yield replace(call, head_dim=2, v_head_dim=2)


def smaller_masks(mask: tuple) -> Iterator[tuple]:
    kind, *args = mask
    if kind in ("and", "or", "not"):
        yield from args
    if kind in ("per_head", "per_row"):
        yield from dict.fromkeys(args[0])
    if kind not in ("causal", "full"):
        yield from (("causal",), ("full",))


def resized(call: Call, tokens: int) -> Call:
    """The call over fewer tokens, its documents and layout cut where they end."""
    return replace(call, tokens=tokens, mask=_mask(call.mask, tokens), layout=_layout(call.layout, tokens))


def cut_lengths(lengths, tokens) -> tuple:
    """The documents of the first tokens.

    >>> cut_lengths((3, 4, 2), 5)
    (3, 2, 0)
    """
    found, left = [], tokens
    for length in lengths:
        found.append(min(length, left))
        left -= found[-1]
    return tuple(found)


def _mask(mask, tokens):
    kind, *args = mask
    if kind in ("and", "or", "not"):
        return (kind, *(_mask(part, tokens) for part in args))
    if kind in ("per_head", "per_row"):
        return (kind, tuple(_mask(part, tokens) for part in args[0]))
    if kind in ("documents", "cu_seqlens"):
        return (kind, cut_lengths(args[0], tokens))
    if kind == "prefixes":
        lengths = cut_lengths(args[1], tokens)
        return (kind, tuple(min(pair) for pair in zip(args[0], lengths, strict=True)), lengths)
    if kind in ("window", "prefix", "global_prefix"):
        return (kind, *(min(arg, tokens) for arg in args))
    return mask


def _layout(layout, tokens):
    kind, *args = layout
    if kind == "scattered":
        return (kind, tuple((a, min(b, tokens), rank) for a, b, rank in args[0] if a < tokens))
    if kind.startswith("per_document"):
        return (kind, cut_lengths(args[0], tokens))
    return layout
