"""Attention over the ranks against one device: schemes, masks, scores, kinds of groups, the same bits twice."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.verification import Report, verify
from longspan.verification.compare import MAX_PAIRS
from tests.gpu.site import Site

SHORT, LONG = 96, 320
"""Tokens on CPUs and on GPUs: the oracle computes every pair in float64 on the CPU."""
BACKENDS = [
    pytest.param("nccl", id="nccl", marks=[pytest.mark.cuda, pytest.mark.cards]),
    pytest.param("cpu:gloo,cuda:nccl", id="mixed", marks=[pytest.mark.cuda, pytest.mark.cards]),
    pytest.param("gloo", id="gloo", marks=pytest.mark.gloo),
]
pytestmark = pytest.mark.ranks(2)


def num_tokens(site: Site) -> int:
    heads = 2 * site.ranks.size
    return min(LONG if site.is_gpu else SHORT, int(math.sqrt(MAX_PAIRS / heads)))


def masks_of(tokens: int) -> dict[str, Mask]:
    lengths = [tokens // 2, tokens // 16 + 1, tokens - tokens // 2 - tokens // 16 - 1]
    causal = masks.causal(tokens)
    return {
        "causal": causal,
        "documents": masks.documents(lengths) & causal,
        "window": causal & masks.sliding_window(tokens // 5),
        "full": masks.full(tokens),
    }


def dtypes(site: Site) -> tuple[str, ...]:
    """GPUs have one fused kernel for half precision and another for float32."""
    return (str(site.half).removeprefix("torch."), "float32") if site.is_gpu else ("float32",)


def build_plan(site: Site, mask: Mask, scheme: str, dtype: str, tokens: int | None = None) -> Plan:
    size = site.ranks.size
    layout = layouts.balanced(mask, world_size=size, seq_len=tokens or num_tokens(site))
    return plan(mask, layout, q_heads=2 * size, kv_heads=size, head_dim=32, dtype=dtype, scheme=scheme)


def quiet_plan(size: int, dtype: str) -> Plan:
    """Return a plan of a document on two ranks, and one on each of the others, which neither send nor receive.

    >>> [quiet_plan(4, "float32").bytes_received(rank) > 0 for rank in range(4)]
    [False, True, False, False]
    """
    mask = masks.documents([64, *[32] * (size - 2)]) & masks.causal()
    layout = layouts.contiguous(32 * size, size)
    return plan(mask, layout, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype, scheme="exchange")


def verify_plan(site: Site, plan: Plan, group: dist.ProcessGroup, **options: Any) -> Report:
    def call(q: Any, k: Any, v: Any) -> Any:
        return attention(q, k, v, plan, group=group, **options)

    return verify(call, None, plan, group=group, probes=1, device=site.ranks.device, **options)


def judge(site: Site, reports: dict[str, Report], prefix: str = "") -> None:
    """Record the share of the rounding budget that was used, or fail with the first difference."""
    for name, report in reports.items():
        if not report.ok:
            first = report.findings[0]
            pytest.fail(f"{name}: {first.where()}; likely cause: {first.cause}")
    used = max(check.ratio for report in reports.values() for check in report.checks)
    site.record(f"{prefix}{', '.join(reports)}: off by at most {used:.2f} of what rounding explains", used=used)


@pytest.mark.parametrize("backend", [pytest.param(*p.values, id=f"first_call.{p.id}", marks=p.marks) for p in BACKENDS])
def test_first_call(site: Site, backend: str) -> None:
    """Ranks without a message must take part in making a group's connections, or the others wait for ever."""
    group, size = site.group(backend), site.ranks.size
    plan = quiet_plan(size, dtypes(site)[0])
    quiet = [r for r in range(size) if not plan.bytes_received(r) and not plan.bytes_received(r, "backward")]
    report = verify_plan(site, plan, group)
    judge(site, {"one document": report}, f"{len(quiet)} ranks without a message; ")


@pytest.mark.parametrize(
    "scheme",
    [
        *("ring", "exchange"),
        *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("all_gather", "all_to_all")),
        *(
            pytest.param(f"hybrid(2, {inner})", id=f"hybrid.{inner}", marks=[pytest.mark.slow, pytest.mark.ranks(4)])
            for inner in ("ring", "exchange", "all_gather")
        ),
    ],
)
def test_scheme(site: Site, scheme: str) -> None:
    group, reports = site.group(), dict[str, Report]()
    cases = masks_of(num_tokens(site))
    for name in ("documents", "window") if site.quick else cases:
        for dtype in dtypes(site) if name == "documents" else dtypes(site)[:1]:
            reports[f"{name} {dtype}"] = verify_plan(site, build_plan(site, cases[name], scheme, dtype), group)
    judge(site, reports)


@pytest.mark.parametrize(
    "kind", ["sinks", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("softcap", "mask_function", "score"))]
)
def test_scores(site: Site, kind: str) -> None:
    """Sinks, a soft cap, a mask function, and a score function that captures a tensor with a gradient."""
    heads, tokens = 2 * site.ranks.size, num_tokens(site)
    learned = torch.randn(heads, generator=torch.Generator().manual_seed(7)).to(site.ranks.device).requires_grad_()
    mask = masks_of(tokens)["documents"]
    if kind == "mask_function":
        mask = masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 != 1, tokens, within=mask)

    def tilted(score: Any, b: Any, h: Any, q: Any, kv: Any) -> Any:
        return score + learned[h] * (q - kv) / tokens

    options = {"sinks": {"sinks": learned}, "softcap": {"softcap": 5.0}, "score": {"score_mod": tilted}}.get(kind, {})
    group = site.group()
    plans = {dtype: build_plan(site, mask, "exchange", dtype) for dtype in dtypes(site)}
    judge(site, {dtype: verify_plan(site, plan, group, **options) for dtype, plan in plans.items()})


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param(*p.values, id=f"group.{p.id}", marks=p.marks) for p in BACKENDS])
def test_group(site: Site, backend: str) -> None:
    group, dtype = site.group(backend), dtypes(site)[0]
    cases = masks_of(num_tokens(site))
    judge(site, {name: verify_plan(site, build_plan(site, cases[name], "auto", dtype), group) for name in cases})


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "inner", [pytest.param(True, id="cp_inside_tp"), pytest.param(False, id="tp_inside_cp", marks=pytest.mark.slow)]
)
def test_part(site: Site, inner: bool) -> None:
    """The sequence is split over half of the ranks, heads over the other axis, which has collectives in between."""
    half = site.ranks.size // 2
    one, other = [[*range(half)], [*range(half, 2 * half)]], [[rank, rank + half] for rank in range(half)]
    if not inner:  # the sequence over neighbours of neighbours, heads over neighbours
        one, other = [[*range(0, 2 * half, 2)], [*range(1, 2 * half, 2)]], [[2 * r, 2 * r + 1] for r in range(half)]
    if site.ranks.size % 2:
        pytest.skip(f"it needs an even number of ranks, and there are {site.ranks.size}")
    cp, tp = site.part_of(one), site.part_of(other)
    mask = masks_of(num_tokens(site))["documents"]
    layout = layouts.balanced(mask, world_size=half, seq_len=num_tokens(site))
    work = plan(mask, layout, q_heads=4, kv_heads=2, head_dim=32, dtype=dtypes(site)[0], scheme="auto")

    def call(q: Any, k: Any, v: Any) -> Any:
        count = torch.ones(1, device=site.ranks.device)
        dist.all_reduce(count, group=tp)
        assert int(count) == 2, f"{int(count)} ranks of 2 answered"
        return attention(q, k, v, work, group=cp)

    report = verify(call, None, work, group=cp, probes=1, draw=tp.rank(), device=site.ranks.device)
    judge(site, {f"groups of {half}": report})


def test_repeat(site: Site) -> None:
    """The same call twice gives the same bits."""
    group, rank, device = site.group(), site.ranks.rank, site.ranks.device
    # enough keys for three blocks of them: two float32 numbers are added to 0 in any order with the same result
    tokens = site.tokens("4k") if site.is_gpu else num_tokens(site)
    plan = build_plan(site, masks_of(tokens)["documents"], "exchange", str(site.half).removeprefix("torch."), tokens)
    generator, s = torch.Generator().manual_seed(3), plan.sizes
    slots = plan.layout.num_slots(rank)
    q, k, v, dout = (
        torch.randn(s.batch, heads, slots, s.head_dim, generator=generator).to(device, site.half)
        for heads in (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads)
    )
    inputs = [x.requires_grad_() for x in (q, k, v)]
    answers: list[list[torch.Tensor]] = []
    # The backward of flash attention on GPUs accumulates dq in any order, unless PyTorch is set to be deterministic;
    # `warn_only` leaves PyTorch's own as it is.
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(site.is_gpu or before[0], warn_only=not site.is_gpu)
    try:
        for _ in range(2):
            out, lse = attention(q, k, v, plan, group=group, return_lse=True)
            answers.append([out, lse, *torch.autograd.grad(out, inputs, dout)])
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
    names = ("out", "lse", "dq", "dk", "dv")
    different = [name for name, a, b in zip(names, *answers, strict=True) if not torch.equal(a, b)]
    if different:
        pytest.fail(f"{', '.join(different)} differ between two calls with the same inputs")
    setting = ", with torch.use_deterministic_algorithms" if site.is_gpu else ""
    site.record(f"two calls, the same bits of {', '.join(names)}{setting}")
