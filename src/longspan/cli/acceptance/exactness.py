"""Attention over the ranks against one device: schemes, masks, what happens to scores, kinds of groups, the bits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, right, wrong
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.verification import Report, verify
from longspan.verification.compare import MAX_PAIRS

SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "hybrid(2)")
SHORT, LONG = 96, 320
"""Tokens, on CPUs and on GPUs: the oracle writes out every pair in float64, on the processor."""


def exactness_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    """The very first call comes first: its group has not been used by anybody."""
    kinds = {"nccl": "nccl", "mixed": "cpu:gloo,cuda:nccl"} if is_gpu else {"gloo": "gloo"}
    lines = [(f"exact.first_call.{word}", partial(_first_call, backend)) for word, backend in kinds.items()]
    lines += [(f"exact.{name.replace('(2)', '')}", partial(_scheme, name)) for name in SCHEMES]
    lines += [(f"exact.{name}", partial(_scored, name)) for name in ("sinks", "softcap", "mask_function", "score")]
    lines += [(f"exact.group.{word}", partial(_over_group, backend)) for word, backend in kinds.items()]
    lines += [("exact.repeat", _repeated)]
    quick = ("first_call", "ring", "exchange", "sinks", "repeat")
    return [
        AcceptanceLine(name, run, 4 if "hybrid" in name else 2, is_quick=name.split(".")[1] in quick)
        for name, run in lines
    ]


def _tokens(site: Site) -> int:
    heads = 2 * site.ranks.size
    return min(LONG if site.is_gpu else SHORT, int(math.sqrt(MAX_PAIRS / heads)))


def _masks(tokens: int) -> dict[str, Mask]:
    lengths = [tokens // 2, tokens // 16 + 1, tokens - tokens // 2 - tokens // 16 - 1]
    causal = masks.causal(tokens)
    return {
        "causal": causal,
        "documents": masks.documents(lengths) & causal,
        "window": causal & masks.sliding_window(tokens // 5),
        "full": masks.full(tokens),
    }


def _plan(site: Site, mask: Mask, scheme: str, dtype: str) -> Plan:
    size = site.ranks.size
    layout = layouts.balanced(mask, world_size=size, seq_len=_tokens(site))
    return plan(mask, layout, q_heads=2 * size, kv_heads=size, head_dim=32, dtype=dtype, scheme=scheme)


def _verified(site: Site, made: Plan, group: dist.ProcessGroup, **options: Any) -> Report:
    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, made, group=group, **options)

    return verify(call, None, made, group=group, probes=1, device=site.ranks.device, **options)


def _judged(reports: dict[str, Report]) -> Outcome:
    """Right if all are, with how much of the budgets was used; else what is wrong with the first that is not."""
    for name, report in reports.items():
        if not report.ok:
            first = report.findings[0]
            return wrong(f"{name}: {first.where()}; likely cause: {first.cause}")
    used = max(check.ratio for report in reports.values() for check in report.checks)
    return right(f"{', '.join(reports)}: off by at most {used:.2f} of what rounding explains", used=used)


def _dtypes(site: Site) -> tuple[str, ...]:
    """A GPU has one fused kernel for halves and another for float32."""
    return ("bfloat16", "float32") if site.is_gpu else ("float32",)


def _scheme(name: str, site: Site) -> Outcome:
    group, reports = site.group(), dict[str, Report]()
    wanted = _masks(_tokens(site))
    for word in ("documents",) if site.quick else wanted:
        for dtype in _dtypes(site) if word == "documents" else _dtypes(site)[:1]:
            reports[f"{word} {dtype}"] = _verified(site, _plan(site, wanted[word], name, dtype), group)
    return _judged(reports)


def _scored(name: str, site: Site) -> Outcome:
    """Sinks, a soft cap, a mask that is a function, and a score function with a tensor that learns."""
    heads, tokens = 2 * site.ranks.size, _tokens(site)
    chance = torch.Generator().manual_seed(7)
    learned = torch.randn(heads, generator=chance).to(site.ranks.device).requires_grad_()
    mask, options = _masks(tokens)["documents"], dict[str, Any]()
    if name == "sinks":
        options = {"sinks": learned}
    elif name == "softcap":
        options = {"softcap": 5.0}
    elif name == "mask_function":
        mask = masks.from_mask_mod(_not_every_third, tokens, within=mask)
    else:

        def tilted(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001
            return score + learned[h] * (q - kv) / tokens

        options = {"score_mod": tilted}
    group = site.group()
    return _judged({dtype: _verified(site, _plan(site, mask, "exchange", dtype), group, **options)
                    for dtype in _dtypes(site)})  # fmt: skip


def _not_every_third(b: Any, h: Any, q: Any, kv: Any) -> Any:  # noqa: ARG001
    return (q - kv) % 3 != 1


def quiet_plan(size: int, dtype: str) -> Plan:
    """One document on the first two ranks, one on each of the others, which neither send nor receive.

    >>> [quiet_plan(4, "float32").bytes_received(rank) > 0 for rank in range(4)]
    [False, True, False, False]
    """
    mask = masks.documents([64, *[32] * (size - 2)]) & masks.causal()
    layout = layouts.contiguous(32 * size, size)
    return plan(mask, layout, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype, scheme="exchange")


def _first_call(backend: str, site: Site) -> Outcome:
    """Ranks without a message take part in what makes a group's connections, or the others wait for them forever."""
    group = site.group(backend)
    made = quiet_plan(site.ranks.size, "bfloat16" if site.is_gpu else "float32")
    quiet = [r for r in range(site.ranks.size) if not made.bytes_received(r) and not made.bytes_received(r, "backward")]
    found = _judged({"one document": _verified(site, made, group)})
    return (
        right(f"{len(quiet)} ranks without a message; {found.text}", **found.figures)
        if not found.judgement.is_red
        else found
    )


def _over_group(backend: str, site: Site) -> Outcome:
    group, reports = site.group(backend), dict[str, Report]()
    for word, mask in _masks(_tokens(site)).items():
        reports[word] = _verified(site, _plan(site, mask, "auto", _dtypes(site)[0]), group)
    return _judged(reports)


def _repeated(site: Site) -> Outcome:
    """The same call twice gives the same bits."""
    group, rank, device = site.group(), site.ranks.rank, site.ranks.device
    made = _plan(site, _masks(_tokens(site))["documents"], "exchange", "bfloat16")
    chance, s = torch.Generator().manual_seed(3), made.sizes
    slots = made.layout.num_slots(rank)
    q, k, v, dout = (
        torch.randn(s.batch, heads, slots, s.head_dim, generator=chance).to(device, torch.bfloat16)
        for heads in (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    answers: list[list[torch.Tensor]] = []
    with _deterministic(site.is_gpu):
        for _ in range(2):
            out, lse = attention(inputs[0], inputs[1], inputs[2], made, group=group, return_lse=True)
            answers.append([out, lse, *torch.autograd.grad(out, inputs, dout)])
    names = ("out", "lse", "dq", "dk", "dv")
    different = [name for name, a, b in zip(names, *answers, strict=True) if not torch.equal(a, b)]
    if different:
        return wrong(f"{', '.join(different)} differ between two calls with the same inputs")
    how = ", with torch.use_deterministic_algorithms" if site.is_gpu else ""
    return right(f"two calls, the same bits of {', '.join(names)}{how}")


@contextmanager
def _deterministic(is_gpu: bool) -> Iterator[None]:
    """Flash attention's backward adds up dq in any order on GPUs, unless it is told not to."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(is_gpu or before[0], warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
