"""Compare an attention call over ranks with one device: run, compare, probe, explain."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.planning.plan import Plan
from longspan.scoring.biases import Extras
from longspan.scoring.pipeline import Scoring
from longspan.testing import allowed
from longspan.tile import wide
from longspan.verification import diagnose as leaks
from longspan.verification.diagnose import (
    ADVICE,
    Cause,
    Evidence,
    Situation,
    diagnose,
    multiple,
    plain_cause,
    said_multiple,
)
from longspan.verification.ranks import SEQ_DIM, Found, RankView, elsewhere, run_call, same_data
from longspan.verification.reference import (
    TOTAL,
    Answer,
    Budget,
    Inputs,
    Jitter,
    Meaning,
    Places,
    answer,
    budgets,
    compared,
    play,
    unit,
    units,
)
from longspan.verification.report import UNKNOWN, Check, Finding, Report, spans_of

# -- Gradients that every rank has a copy of: sinks, biases, captured tensors ------------------------------------------


def shared_findings(
    evidence: Evidence, found: Found, base: Answer, forward: Cause | None, mode: str
) -> tuple[list[Check], list[Finding]]:
    """Checks and findings of shared gradients; `mode` says whether each rank has the sum or its share of it."""
    checks: list[Check] = []
    findings: list[Finding] = []
    for name, parts in found.shared.items():
        each = [part.cpu() for part in parts]
        judged = [torch.stack([part.double() for part in each]).sum(0)] if mode == "share" else each
        by_part = [compared(part, base[name], evidence.budgets[name], name)[0] for part in judged]
        worst = max(by_part, key=lambda check: check.ratio)
        checks.append(worst)
        if worst.ratio <= 1:
            continue
        ranks = tuple(range(len(each))) if mode == "share" else tuple(r for r, c in enumerate(by_part) if c.ratio > 1)
        cause = forward or _cause(evidence, name, each, judged[by_part.index(worst)], base[name], mode)
        what = "is not finite" if math.isinf(worst.error) else "differs"
        findings.append(
            Finding(name, what, worst.error, worst.budget, ranks, (), None, *cause, ADVICE.get(cause[0], ""))
        )
    return checks, findings


def _cause(evidence: Evidence, name: str, each: list[Tensor], judged: Tensor, right: Tensor, mode: str) -> Cause:
    size, budget = len(each), evidence.budgets[name].total
    here = replace(evidence, found={**evidence.found, name: judged})
    plain = plain_cause(here, name, right)
    if plain is not None and plain[0] == "no gradient":
        return "captured gradient missing", plain[1]
    total = torch.stack([part.double() for part in each]).sum(0)
    if mode == "sum" and size > 1 and float((total - right).norm()) <= 3 * budget:
        return "captured gradient not reduced", f"{name} differs from rank to rank, and the sum over ranks is right."
    ratio = multiple(judged, right, budget)
    if ratio is not None and size > 1 and abs(ratio / size - 1) < 1e-2:
        return "captured gradient reduced twice", said_multiple(ratio, size)
    if ratio is not None:
        return "gradients scaled", said_multiple(ratio, size)
    return UNKNOWN, "None of the known mistakes gives this gradient."


# -- The comparison ----------------------------------------------------------------------------------------------------


MAX_PAIRS = 1 << 25
SMALLEST = 8
"""Budgets are at least this many roundings of statistics, of the whole tensor's norm."""


@dataclass(frozen=True, eq=False)
class CallSpec:
    """What the call means beside the plan's mask, in the words of `longspan.attention`."""

    scale: float | None = None
    score_mod: Any = None
    softcap: float | None = None
    sinks: Tensor | None = None
    alibi: Tensor | None = None
    relative_bias: Any = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: int | None = None
    captured_grads: str = "sum"

    def __post_init__(self) -> None:
        if self.captured_grads not in ("sum", "share"):
            raise PlanError(
                f"captured_grads = {self.captured_grads!r} was asked for. Say what the call does: 'sum' or 'share'."
            )

    def given(self) -> list[str]:
        """What was asked for, by name."""
        names = ("sinks", "softcap", "alibi", "relative_bias", "bias", "score_mod")
        return [name for name in names if getattr(self, name) is not None] + ["dropout"] * bool(self.dropout)

    def scoring(self, like: Tensor, plan: Plan) -> Scoring | None:
        extras = Extras(
            self.score_mod, self.softcap, self.alibi, self.relative_bias, self.bias, self.dropout or 0.0, self.seed
        )
        return extras.scoring(like, plan) if extras.any() else None

    def without(self, name: str) -> CallSpec:
        return replace(self, **{name: 0.0 if name == "dropout" else None})

    def names(self, captured: tuple[Tensor, ...]) -> tuple[str, ...]:
        """Of the gradients of captured tensors, and that of sinks last."""
        table = getattr(self.relative_bias, "table", None)
        known = {id(self.alibi): "alibi", id(table): "relative_bias.table", id(self.bias): "bias"}
        names = [known.get(id(t), f"captured tensor {i} {tuple(t.shape)}") for i, t in enumerate(captured)] + [
            "sinks"
        ] * (self.sinks is not None)
        return tuple(f"gradient of {name}" for name in names)


@dataclass(frozen=True)
class Effort:
    """How hard to look: probes for leaks, tolerance, the seed of random inputs, and where they are made."""

    probes: int
    factor: float
    draw: int
    device: Any


def verify_attention(
    fn: Callable[..., Any],
    inputs: Any,
    plan: Plan,
    group: Any,
    asked: CallSpec,
    effort: Effort,
) -> Report:
    """See `longspan.verify`."""
    ranks = RankView.of(_checked(fn, plan).layout, group)
    tensors = _inputs(inputs, plan, effort.draw, effort.device)
    subject = f"attention of {plan!r}"
    given = {"plan": plan.fingerprint, "asked": [*asked.given(), repr(asked.scale), asked.seed, asked.captured_grads]}
    given |= dict(zip(("q", "k", "v"), tensors, strict=False)) if inputs is not None else {}
    different = same_data(given, ranks)
    if different is not None:
        return Report(subject, ranks.size, (), (different,))
    work = _Work(plan, ranks, asked, tensors, effort.factor)
    shared = dict(zip(work.right.names, work.captured(), strict=True))
    found = run_call(fn, ranks, tensors, shared, plan.sizes.v_head_dim)
    if isinstance(found, Finding):
        return Report(subject, ranks.size, (), (replace(found, advice=found.advice or ADVICE.get(found.cause, "")),))
    checks, findings = work.compare(found)
    notes: list[str] = []
    leaky, said = _probe(work, fn, shared, found, effort.probes, effort.draw, findings)
    notes += said
    findings += leaky
    others = ranks.any(bool(findings))
    if others and not findings:
        findings.append(elsewhere(others))
    return Report(subject, ranks.size, tuple(checks), tuple(findings), tuple(notes))


def _checked(fn: object, plan: object) -> Plan:
    if not isinstance(plan, Plan) or not callable(fn):
        raise PlanError(
            f"verify(fn, inputs, plan, group=...) takes a function of (q, k, v) and a plan, but {type(fn).__name__} and"
            f" {type(plan).__name__} were given."
        )
    sizes, tokens = plan.sizes, plan.layout.seq_len
    pairs = sizes.batch * sizes.q_heads * tokens**2
    if pairs > MAX_PAIRS:
        raise PlanError(
            f"verify writes out every pair: {sizes.batch} x {sizes.q_heads} heads x {tokens}^2 tokens is {pairs:.1e},"
            f" more than {MAX_PAIRS:.1e}. Make a plan of the same kind for fewer tokens: mistakes show there as well."
        )
    return plan


def _inputs(inputs: Any, plan: Plan, draw: int, device: Any) -> Inputs:
    """Whole q, k, v, and a random gradient of the output."""
    s, tokens, dtype = plan.sizes, plan.layout.seq_len, getattr(torch, plan.dtype)
    generator = torch.Generator().manual_seed(draw)
    heads, dims = (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads), (s.head_dim, s.head_dim, s.v_head_dim, s.v_head_dim)
    shapes = [(s.batch, h, tokens, d) for h, d in zip(heads, dims, strict=True)]
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    if inputs is None:
        q, k, v, dout = (t.to(device or "cpu") for t in drawn)
        return q, k, v, dout
    if not isinstance(inputs, tuple | list) or len(inputs) != 3 or not all(isinstance(t, Tensor) for t in inputs):
        raise PlanError("inputs are (q, k, v) of whole sequences, the same on all ranks, or None for random ones.")
    for name, tensor, shape in zip("qkv", inputs, shapes, strict=False):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise PlanError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but whole tensors of the plan are {dtype} of"
                f" shape {shape}. Give whole sequences, not shards, or None for random ones."
            )
    q, k, v = (t.detach() for t in inputs)
    return q, k, v, drawn[3].to(q.device)


class _Work:
    """The truth, its budgets, and how to compare with them. The reference runs on the CPU."""

    def __init__(self, plan: Plan, ranks: RankView, asked: CallSpec, tensors: Inputs, factor: float) -> None:
        self.plan, self.ranks, self.asked, self.tensors = plan, ranks, asked, tensors
        s = plan.sizes
        self.seen = allowed(plan.mask, s.batch, s.q_heads, plan.layout.seq_len)
        q, k, v, dout = (t.cpu() for t in tensors)
        self.inputs: Inputs = q, k, v, dout
        self.right = self.meaning(asked)
        self.truth = answer(self.right, *self.inputs)
        dtype = tensors[0].dtype
        narrow, broad = units(dtype)
        draws = [torch.Generator().manual_seed(1 + number) for number in range(8)]
        played = play(lambda number: answer(self.right, *self.inputs, Jitter(narrow, broad, draws[number])))
        self.budgets = budgets(self.truth, played, SEQ_DIM, SMALLEST * unit(wide(dtype)), factor)
        for name, tensor in zip(self.right.names, self.captured(), strict=True):
            # These have no rows of tokens, and a dtype of their own, to which their gradients are rounded.
            own = TOTAL * factor * unit(tensor.dtype) * float(self.truth[name].norm())
            self.budgets[name] = Budget(self.budgets[name].total + own, None)

    def meaning(self, asked: CallSpec) -> Meaning:
        scale = 1 / math.sqrt(self.plan.sizes.head_dim) if asked.scale is None else float(asked.scale)
        scoring = asked.scoring(self.tensors[0], self.plan)  # score functions run where their tensors are
        names = asked.names(() if scoring is None else scoring.captured)
        return Meaning(self.seen, scale, scoring, asked.sinks, names)

    def captured(self) -> list[Tensor]:
        scoring, sinks = self.right.scoring, self.right.sinks
        return [*(() if scoring is None else scoring.captured), *([] if sinks is None else [sinks])]

    def situation(self) -> Situation:
        sizes = self.plan.sizes
        asked = dict.fromkeys(self.asked.given())
        places = Places.of(self.plan.layout)
        without: Callable[[str], Meaning] = lambda name: self.meaning(self.asked.without(name))  # noqa: E731
        return Situation(self.right, places, asked, without, sizes.head_dim, sizes.v_head_dim)

    def compare(self, found: Found) -> tuple[list[Check], list[Finding]]:
        """Every check, and what is wrong with its likely cause."""
        here = {name: t.cpu() for name, t in found.tensors.items()}
        checks: dict[str, Check] = {}
        rows: dict[str, Tensor | None] = {}
        for name, tensor in here.items():
            checks[name], rows[name] = compared(tensor, self.truth[name], self.budgets[name], name)
        wrong = tuple(name for name, check in checks.items() if check.ratio > 1)
        bad = self._where(rows.get("out"))[0] if "out" in wrong else ()
        evidence = Evidence(self.situation(), self.inputs, self.truth, self.budgets, here, wrong, bad, found.missing)
        causes = diagnose(evidence) if wrong else {}
        findings = [self._finding(checks[name], rows[name], causes[name]) for name in wrong]
        more, said = shared_findings(evidence, found, self.truth, causes.get("out"), self.asked.captured_grads)
        return [*checks.values(), *more], [*findings, *said]

    def _where(self, ratio: Tensor | None) -> tuple[tuple[int, ...], Tensor]:
        """Ranks and positions whose rows are wrong; the worst ones if no single row is."""
        if ratio is None:
            return (), torch.empty(0, dtype=torch.int64)
        at = (ratio > 1).nonzero().flatten()
        if not len(at):
            at = (ratio > ratio.max() / 2).nonzero().flatten()
        return tuple(sorted(set(self.plan.layout.owner(at.numpy()).tolist()))), at

    def _finding(self, check: Check, ratio: Tensor | None, cause: tuple[str, str]) -> Finding:
        ranks, at = self._where(ratio)
        worst = None if ratio is None else int(ratio.argmax())
        what = "is not finite" if math.isinf(check.error) else "differs"
        return Finding(
            check.tensor, what, check.error, check.budget, ranks, spans_of(at.numpy()), worst, *cause,
            ADVICE.get(cause[0], ""),
        )  # fmt: skip


def _probe(
    work: _Work, fn: Any, shared: dict[str, Tensor], before: Found, count: int, draw: int, known: list[Finding]
) -> tuple[list[Finding], list[str]]:
    generator = torch.Generator().manual_seed(1000 + draw)
    probes = leaks.make_probes(work.seen, work.plan.sizes.kv_heads, count, generator)
    if not probes:
        return [], ["no leak probe: the mask hides nothing" if count else "no leak probe was asked for"]
    findings: dict[str, Finding] = {}
    for probe in probes:
        tensors = leaks.changed(work.tensors, probe.position, generator)
        after = run_call(fn, work.ranks, tensors, shared, work.plan.sizes.v_head_dim)
        for name in probe.still if isinstance(after, Found) else ():
            rows = work.budgets[name].rows
            assert rows is not None
            assert isinstance(after, Found)
            at, error, budget = leaks.moved(probe, name, before.tensors[name].cpu(), after.tensors[name].cpu(), rows)
            if len(at) and (name not in findings or len(at) > findings[name].num_positions):
                findings[name] = _leak(work, name, probe.position, at, error, budget, known)
    notes = [f"leak probe: tokens {', '.join(str(probe.position) for probe in probes)} changed"]
    return list(findings.values()), notes


def _leak(
    work: _Work, name: str, position: int, at: Tensor, error: float, budget: float, known: list[Finding]
) -> Finding:
    owner = work.plan.layout.owner(at.numpy())
    same = next((f for f in known if f.tensor == name), known[0] if known else None)
    cause = "hidden tokens leak" if same is None else same.cause
    evidence = (
        f"Leak probe: token {position} of rank {int(work.plan.layout.owner([position])[0])} was changed, and rows from"
        f" which the mask hides it moved."
    )
    advice = ADVICE.get(cause, "Find out how these rows see the token: the mask of the call is not the plan's.")
    return Finding(
        name, "leaks", error, budget, tuple(sorted(set(owner.tolist()))), spans_of(at.numpy()), int(at[0]), cause,
        evidence, advice,
    )  # fmt: skip
