"""Compare an attention call over ranks with one device: run, compare, probe for leaks, explain."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.errors import PlanError
from longspan.planning.plan import Plan
from longspan.scoring.biases import Extras
from longspan.scoring.pipeline import Scoring
from longspan.testing import allowed
from longspan.tile import accumulation_dtype
from longspan.verification import diagnose
from longspan.verification.ranks import SEQ_DIM, RankView, find_different_data, with_failures_elsewhere
from longspan.verification.reference import (
    SAMPLES,
    TOTAL,
    Budget,
    Inputs,
    Jitter,
    Meaning,
    Places,
    budgets,
    compare_tensor,
    reference_result,
    unit,
    units,
)
from longspan.verification.report import UNKNOWN, Check, Finding, Report, spans_of

MAX_PAIRS = 1 << 25
SMALLEST = 8
"""Budgets are at least this many roundings of statistics, relative to the whole tensor's norm."""


@dataclass(frozen=True, eq=False)
class CallSpec:
    """Options of the call beyond the plan's mask, as in `longspan.attention`."""

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
                f"captured_grads must be 'sum' or 'share', as in the call, but got {self.captured_grads!r}."
            )

    def used_options(self) -> list[str]:
        """Return the names of the options that change the result."""
        names = ("sinks", "softcap", "alibi", "relative_bias", "bias", "score_mod")
        return [name for name in names if getattr(self, name) is not None] + ["dropout"] * bool(self.dropout)

    def scoring(self, like: Tensor, plan: Plan) -> Scoring | None:
        extras = Extras(
            self.score_mod, self.softcap, self.alibi, self.relative_bias, self.bias, self.dropout or 0.0, self.seed
        )
        return extras.scoring(like, plan) if extras.any() else None

    def gradient_names(self, captured: tuple[Tensor, ...]) -> tuple[str, ...]:
        """Return names for the gradients of captured tensors, and of sinks last."""
        table = getattr(self.relative_bias, "table", None)
        known = {id(self.alibi): "alibi", id(table): "relative_bias.table", id(self.bias): "bias"}
        names = [known.get(id(t), f"captured tensor {i} {tuple(t.shape)}") for i, t in enumerate(captured)]
        names += ["sinks"] * (self.sinks is not None)
        return tuple(f"gradient of {name}" for name in names)


# -- The call on this rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observed:
    """Results of the call: whole tensors, and shared gradients rank by rank."""

    tensors: dict[str, Tensor]
    shared: dict[str, list[Tensor]]
    missing: dict[str, tuple[int, ...]]
    """Tensors that got no gradient at all, and on which ranks."""


def run_call(
    fn: Callable[..., Any], ranks: RankView, tensors: Sequence[Tensor], shared: dict[str, Tensor], width: int
) -> Observed | Finding:
    """Return the call's output and gradients for whole q, k, v and dout; the output has `width` features."""
    q, k, v = (ranks.shard(t).detach().requires_grad_() for t in tensors[:3])
    dout = ranks.shard(tensors[3])
    result: Any = fn(q, k, v)
    pair: tuple[Any, Any] = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    out, lse = pair
    problem = _shape_problem(ranks, out, (*q.shape[:3], width)) or _lse_problem(ranks, lse, q.shape[:3])
    if problem is not None:
        return problem
    leaves = {"dq": q, "dk": k, "dv": v, **shared}
    grads: dict[str, Tensor | None] = dict.fromkeys(leaves)
    if out.requires_grad:
        wanted = {name: t for name, t in leaves.items() if t.requires_grad}
        computed = torch.autograd.grad(out, list(wanted.values()), dout.to(out.dtype), allow_unused=True)
        grads.update(zip(wanted, computed, strict=True))
    missing = ranks.missing(grads)
    filled = {name: torch.zeros_like(leaves[name]) if grad is None else grad for name, grad in grads.items()}
    whole = {"out": ranks.unshard(out)}
    if isinstance(lse, Tensor):
        whole["lse"] = ranks.unshard(lse)
    whole.update({name: ranks.unshard(filled[name]) for name in ("dq", "dk", "dv")})
    return Observed(whole, {name: ranks.all_gather(filled[name]) for name in shared}, missing)


def _shape_problem(ranks: RankView, out: Any, wanted: tuple[int, ...]) -> Finding | None:
    shape = tuple(out.shape) if isinstance(out, Tensor) else ()
    rows = ranks.gather_integers([int(shape != wanted), *[*shape, -1, -1, -1, -1][:4]])
    wrong = [rank for rank, row in enumerate(rows) if row[0]]
    if not wrong:
        return None
    got = tuple(n for n in rows[wrong[0]][1:] if n >= 0)
    cause, advice = "output of another shape", "Return the output (batch, heads, local tokens, features)."
    if len(got) == 4 and (got[0], got[2], got[1], got[3]) == wanted:
        cause, advice = "heads and tokens swapped", "The output has tokens before heads: transpose dims 1 and 2."
    elif len(got) == 4 and got[2] == ranks.layout.seq_len and ranks.size > 1:
        cause, advice = "whole output returned", "Every rank returns its own rows: shard the output with the layout."
    return Finding(
        "out", f"has shape {got} on rank {wrong[0]}, which holds {ranks.num_slots(wrong[0])} tokens",
        torch.inf, 0.0, tuple(wrong), (), None, cause, "No number was compared.", advice,
    )  # fmt: skip


def _lse_problem(ranks: RankView, lse: Any, wanted: tuple[int, ...]) -> Finding | None:
    """Return a finding unless every rank returned lse, or none did."""
    shape = tuple(lse.shape) if isinstance(lse, Tensor) else None
    wrong = ranks.where(shape != wanted)
    if not wrong or (len(ranks.where(lse is not None)) == 0):
        return None
    return Finding(
        "lse", "has another shape, or is no tensor", torch.inf, 0.0, tuple(wrong), (), None, "lse of another shape",
        "No number was compared.", "Return lse as (batch, heads, local tokens), on every rank, or the output alone.",
    )  # fmt: skip


# -- The comparison ----------------------------------------------------------------------------------------------------


def verify_attention(
    fn: Callable[..., Any],
    inputs: Any,
    plan: Plan,
    group: Any,
    spec: CallSpec,
    *,
    probes: int,
    factor: float,
    draw: int,
    device: Any,
) -> Report:
    """See `longspan.verify`."""
    if not isinstance(plan, Plan) or not callable(fn):
        raise PlanError(
            f"verify(fn, inputs, plan, group=...) takes a function of (q, k, v) and a plan, but got {type(fn).__name__}"
            f" and {type(plan).__name__}."
        )
    sizes, tokens = plan.sizes, plan.layout.seq_len
    pairs = sizes.batch * sizes.q_heads * tokens**2
    if pairs > MAX_PAIRS:
        raise PlanError(
            f"verify computes every pair: {sizes.batch} x {sizes.q_heads} heads x {tokens}^2 tokens is {pairs:.1e},"
            f" more than {MAX_PAIRS:.1e}. Make a plan of the same kind for fewer tokens: mistakes show there as well."
        )
    ranks = RankView.of(plan.layout, group)
    tensors = _inputs(inputs, plan, draw, device)
    subject = f"attention of {plan!r}"
    data = {
        "plan": plan.fingerprint,
        "options": [*spec.used_options(), repr(spec.scale), spec.seed, spec.captured_grads],
    }
    data |= dict(zip(("q", "k", "v"), tensors, strict=False)) if inputs is not None else {}
    different = find_different_data(data, ranks)
    if different is not None:
        return Report(subject, ranks.size, (), (different,))
    work = _Work(plan, ranks, spec, tensors, factor)
    captured = zip(work.right.names, work.captured(), strict=True)
    shared = {name: tensor for name, tensor in captured if tensor.requires_grad}
    observed = run_call(fn, ranks, tensors, shared, sizes.v_head_dim)
    if isinstance(observed, Finding):
        finding = replace(observed, advice=observed.advice or diagnose.ADVICE.get(observed.cause, ""))
        return Report(subject, ranks.size, (), (finding,))
    checks, findings = work.compare(observed)
    leaking, notes = _probe(work, fn, shared, observed, probes, draw, findings)
    findings = with_failures_elsewhere([*findings, *leaking], ranks)
    return Report(subject, ranks.size, tuple(checks), findings, tuple(notes))


def _inputs(inputs: Any, plan: Plan, draw: int, device: Any) -> Inputs:
    """Return whole q, k, v, and a random gradient of the output."""
    s, tokens, dtype = plan.sizes, plan.layout.seq_len, getattr(torch, plan.dtype)
    generator = torch.Generator().manual_seed(draw)
    heads, dims = (s.q_heads, s.kv_heads, s.kv_heads, s.q_heads), (s.head_dim, s.head_dim, s.v_head_dim, s.v_head_dim)
    shapes = [(s.batch, h, tokens, d) for h, d in zip(heads, dims, strict=True)]
    random = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    if inputs is None:
        q, k, v, dout = (t.to(device or "cpu") for t in random)
        return q, k, v, dout
    if not isinstance(inputs, tuple | list) or len(inputs) != 3 or not all(isinstance(t, Tensor) for t in inputs):
        raise PlanError("inputs must be (q, k, v) of whole sequences, the same on all ranks, or None for random ones.")
    for name, tensor, shape in zip("qkv", inputs, shapes, strict=False):
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise PlanError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}, but whole tensors of the plan are {dtype} of"
                f" shape {shape}. Pass whole sequences, not shards, or None for random ones."
            )
    q, k, v = (t.detach() for t in inputs)
    return q, k, v, random[3].to(q.device)


class _Work:
    """The reference result, its budgets, and how to compare with them. The reference runs on the CPU."""

    def __init__(self, plan: Plan, ranks: RankView, spec: CallSpec, tensors: Inputs, factor: float) -> None:
        self.plan, self.ranks, self.spec, self.tensors = plan, ranks, spec, tensors
        s = plan.sizes
        self.seen = allowed(plan.mask, s.batch, s.q_heads, plan.layout.seq_len)
        q, k, v, dout = (t.cpu() for t in tensors)
        self.inputs: Inputs = q, k, v, dout
        self.right = self.meaning(spec)
        self.truth = reference_result(self.right, *self.inputs)
        dtype = tensors[0].dtype
        narrow, broad = units(dtype)
        jitters = [Jitter(narrow, broad, torch.Generator().manual_seed(1 + number)) for number in range(SAMPLES)]
        samples = [reference_result(self.right, *self.inputs, jitter) for jitter in jitters]
        self.budgets = budgets(self.truth, samples, SEQ_DIM, SMALLEST * unit(accumulation_dtype(dtype)), factor)
        for name, tensor in zip(self.right.names, self.captured(), strict=True):
            # These have no rows of tokens, and a dtype of their own, to which their gradients are rounded.
            own = TOTAL * factor * unit(tensor.dtype) * float(self.truth[name].norm())
            self.budgets[name] = Budget(self.budgets[name].total + own, None)

    def meaning(self, spec: CallSpec) -> Meaning:
        scale = 1 / math.sqrt(self.plan.sizes.head_dim) if spec.scale is None else float(spec.scale)
        scoring = spec.scoring(self.tensors[0], self.plan)  # score functions run where their tensors are
        names = spec.gradient_names(() if scoring is None else scoring.captured)
        return Meaning(self.seen, scale, scoring, spec.sinks, names)

    def without(self, name: str) -> Meaning:
        return self.meaning(replace(self.spec, **{name: 0.0 if name == "dropout" else None}))

    def captured(self) -> list[Tensor]:
        scoring, sinks = self.right.scoring, self.right.sinks
        return [*(() if scoring is None else scoring.captured), *([] if sinks is None else [sinks])]

    def compare(self, observed: Observed) -> tuple[list[Check], list[Finding]]:
        """Return every check, and findings with their likely causes."""
        here = {name: t.cpu() for name, t in observed.tensors.items()}
        checks: dict[str, Check] = {}
        rows: dict[str, Tensor | None] = {}
        for name, tensor in here.items():
            checks[name], rows[name] = compare_tensor(tensor, self.truth[name], self.budgets[name], name)
        wrong = tuple(name for name, check in checks.items() if check.ratio > 1)
        bad = self._locate(rows.get("out"))[0] if "out" in wrong else ()
        evidence = diagnose.Evidence(
            self.right, self.spec.used_options(), self.without, Places.of(self.plan.layout), self.inputs, self.truth,
            self.budgets, here, wrong, bad, observed.missing,
        )  # fmt: skip
        causes = diagnose.diagnose(evidence) if wrong else {}
        findings: list[Finding] = []
        for name in wrong:
            check, ratio = checks[name], rows[name]
            on_ranks, at = self._locate(ratio)
            findings.append(
                Finding(
                    name, check.verdict, check.error, check.budget, on_ranks, spans_of(at.numpy()),
                    None if ratio is None else int(ratio.argmax()), *causes[name],
                    diagnose.ADVICE.get(causes[name][0], ""),
                )
            )  # fmt: skip
        for name, parts in observed.shared.items():
            check, finding = self._compare_shared(evidence, name, [part.cpu() for part in parts], causes.get("out"))
            checks[name] = check
            findings += [] if finding is None else [finding]
        return list(checks.values()), findings

    def _locate(self, ratio: Tensor | None) -> tuple[tuple[int, ...], Tensor]:
        """Return ranks and positions of wrong rows; of the worst ones if no single row is beyond its budget."""
        if ratio is None:
            return (), torch.empty(0, dtype=torch.int64)
        at = (ratio > 1).nonzero().flatten()
        if not len(at):
            at = (ratio > ratio.max() / 2).nonzero().flatten()
        return tuple(sorted(set(self.plan.layout.owner(at.numpy()).tolist()))), at

    def _compare_shared(
        self, evidence: diagnose.Evidence, name: str, each: list[Tensor], forward: diagnose.Cause | None
    ) -> tuple[Check, Finding | None]:
        """Compare a gradient that every rank has a copy of (sinks, biases, captured tensors): the sum, or its share."""
        right, is_share = self.truth[name], self.spec.captured_grads == "share"
        total = torch.stack([part.double() for part in each]).sum(0)
        judged = [total] if is_share else each
        by_part = [compare_tensor(part, right, self.budgets[name], name)[0] for part in judged]
        worst = max(by_part, key=lambda check: check.ratio)
        if worst.ratio <= 1:
            return worst, None
        ranks = tuple(r for r in range(len(each)) if is_share or by_part[r].ratio > 1)
        cause = forward
        if cause is None:
            part, size, budget = judged[by_part.index(worst)], len(each), self.budgets[name].total
            plain = diagnose.plain_cause(replace(evidence, observed={**evidence.observed, name: part}), name, right)
            ratio = diagnose.find_multiple(part, right, budget)
            if plain is not None and plain[0] == "no gradient":
                cause = "captured gradient missing", plain[1]
            elif not is_share and size > 1 and float((total - right).norm()) <= 3 * budget:
                text = f"{name} differs from rank to rank, and the sum over ranks is right."
                cause = "captured gradient not reduced", text
            elif ratio is not None:
                is_twice = size > 1 and abs(ratio / size - 1) < 1e-2
                cause = "captured gradient reduced twice" if is_twice else "gradients scaled"
                cause = cause, diagnose.describe_multiple(ratio, size)
            else:
                cause = UNKNOWN, "None of the known mistakes gives this gradient."
        advice = diagnose.ADVICE.get(cause[0], "")
        return worst, Finding(name, worst.verdict, worst.error, worst.budget, ranks, (), None, *cause, advice)


def _probe(
    work: _Work, fn: Any, shared: dict[str, Tensor], before: Observed, count: int, draw: int, known: list[Finding]
) -> tuple[list[Finding], list[str]]:
    """Change tokens that the mask hides, and return a finding for every tensor that moves, and notes."""
    generator, layout = torch.Generator().manual_seed(1000 + draw), work.plan.layout
    probes = diagnose.make_probes(work.seen, work.plan.sizes.kv_heads, count, generator)
    if not probes:
        return [], ["no leak probe: the mask hides nothing" if count else "no leak probe: probes = 0"]
    findings: dict[str, Finding] = {}
    for position, still in probes.items():
        tensors = diagnose.change_token(work.tensors, position, generator)
        after = run_call(fn, work.ranks, tensors, shared, work.plan.sizes.v_head_dim)
        if isinstance(after, Finding):
            continue
        for name, hidden in still.items():
            rows = work.budgets[name].rows
            assert rows is not None
            moved = before.tensors[name].cpu(), after.tensors[name].cpu()
            at, error, budget = diagnose.find_moved(hidden, *moved, rows)
            if not len(at) or (name in findings and len(at) <= findings[name].num_positions):
                continue
            same = next((f for f in known if f.tensor == name), known[0] if known else None)
            cause = "hidden tokens leak" if same is None else same.cause
            evidence = (
                f"Leak probe: token {position} of rank {int(layout.owner([position])[0])} was changed, and rows from"
                f" which the mask hides it moved."
            )
            advice = diagnose.ADVICE.get(
                cause, "Find out how these rows see the token: the mask of the call is not the plan's."
            )
            findings[name] = Finding(
                name, "leaks", error, budget, tuple(sorted(set(layout.owner(at.numpy()).tolist()))),
                spans_of(at.numpy()), int(at[0]), cause, evidence, advice,
            )  # fmt: skip
    notes = [f"leak probe: tokens {', '.join(map(str, probes))} changed"]
    return list(findings.values()), notes
