"""Find the likely cause of a wrong tensor: known mistakes, a leak probe, and the match between them and the result.

A cause is named if its result matches within `SLACK` budgets. If no mistake matches, the form of the difference is
reported (rows in another order, a constant factor, no gradient at all, an error as small as rounding), or that it was
not recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from longspan.verification.reference import Answer, Budget, Inputs, Meaning, Places, answer, mask_mistakes
from longspan.verification.report import UNKNOWN

# -- Known mistakes: what a broken integration would compute -----------------------------------------------------------
# A cause is named only if its own result equals the observed one, within the budget of rounding.


ADVICE = {
    "mask replaced by plain causal": "Pass the plan (or the mask) to the attention call; is_causal=True is not it.",
    "mask dropped": "Pass the plan to the attention call: the call made takes no mask, or ignores it.",
    "window dropped": "Put the window into the mask: masks.documents(lengths) & masks.sliding_window(left).",
    "documents leak": "Put the documents into the mask: masks.documents(lengths) & ...",
    "the future is seen": "Add & masks.causal() to the mask of the call.",
    "mask made causal": "Leave is_causal out, and pass the whole mask.",
    "no exchange between ranks": "Call longspan.attention with plan and group: this call works on the shard alone.",
    "K/V in wrong order": "After gathering shards, restore the order of positions: layout.unshard(shards, dim).",
    "mask sees local positions": "Ask the mask about layout.positions(rank), not about places in the shard.",
    "score function sees local positions": "Call it with layout.positions(rank), or pass it to longspan.attention.",
    "one head's mask used for all": "Ask the mask for every head: masks.per_head means what it says.",
    "one row's mask used for all": "Ask the mask for every batch row.",
    "keys of some ranks missing": "Every rank must see every other: count the hops of the ring.",
    "scale wrong": "Pass scale= (default: one over the square root of head_dim), once.",
    "sinks dropped": "Pass sinks= to the call that runs on the ranks, too.",
    "softcap dropped": "Pass softcap= to the call that runs on the ranks, too.",
    "dropout seed differs between ranks": "Give every rank the same seed: positions make the pattern differ.",
    "query heads grouped wrongly": "Repeat keys with repeat_interleave(heads per key head, dim=1), not repeat.",
    "K and V swapped": "Pass keys second and values third.",
    "V of another rank than K": "Send K and V in one message, or tag them alike.",
    "blocks merged without weights": "Weigh every block by exp(lse - lse of all blocks).",
    "rows that see nothing average everything": "Rows that see nothing are 0: mask with -inf and guard the division.",
    "remote pairs give no gradient": "Send gradients of K/V back to their owners, and add up dq over all blocks.",
    "stale K/V in backward": "Receive every block again in backward, or keep it: the one at hand is another rank's.",
    "output not in layout order": "Return rows in the order of layout.positions(rank).",
    "gradients scaled": "Reduce gradients over the group once: 'sum' adds shares, 'average' is for DDP and FSDP.",
    "captured gradient not reduced": "Add it up over the group, or say captured_grads='share' if the trainer does.",
    "captured gradient reduced twice": "Say captured_grads='share' in the call if the trainer reduces gradients.",
    "no gradient": "Something cuts the graph: detach(), no_grad(), .data, or an output copied into a buffer.",
    "rounding": "Keep lse and sums in float32, on the wire too; if the call is as intended, pass factor=.",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Alternative:
    """One mistake, and what a call that makes it means."""

    cause: str
    evidence: str
    meaning: Meaning


@dataclass(frozen=True, eq=False)
class Situation:
    """The right meaning, where tokens lie, and how to leave out one of the things that were asked for."""

    right: Meaning
    places: Places
    asked: dict[str, Any]
    without: Callable[[str], Meaning]
    head_dim: int
    v_head_dim: int


def call_mistakes(situation: Situation) -> Iterator[Alternative]:
    """Meanings that a broken call may have had, the likeliest first."""
    right = situation.right
    for name in situation.asked:
        yield Alternative(f"{name} dropped", f"The result is that of a call without {name}.", situation.without(name))
    yield from _positions(situation)
    for cause, evidence, seen in mask_mistakes(right.seen, situation.places):
        if not torch.equal(seen, right.seen):
            yield Alternative(cause, evidence, replace(right, seen=seen))
    yield from _scales(situation)
    yield from _seeds(situation)
    yield from _tensors(situation)


def _positions(situation: Situation) -> Iterator[Alternative]:
    """Score functions that were given places in a shard."""
    right, places = situation.right, situation.places
    if right.scoring is None or not right.scoring.functions or places.size < 2:
        return
    everywhere = torch.arange(len(places.slot))
    for q_at, kv_at, text in (
        (places.slot, places.joined, "query's place in its shard and the key's in rank order"),
        (places.slot, everywhere, "query's place in its shard and the key's global position"),
        (places.slot, places.slot, "query's and key's places in their shards"),
        (everywhere, places.joined, "query's global position and the key's place in rank order"),
    ):
        if not (torch.equal(q_at, everywhere) and torch.equal(kv_at, everywhere)):
            evidence = f"The result is that of score functions which see the {text}."
            yield Alternative("score function sees local positions", evidence, replace(right, q_at=q_at, kv_at=kv_at))


def _scales(situation: Situation) -> Iterator[Alternative]:
    right, d, e = situation.right, situation.head_dim, situation.v_head_dim
    options = (1.0, 1 / d, d**-0.5, e**-0.5, d**0.5, right.scale**2, right.scale / 2)
    ln2 = 0.6931471805599453
    for scale in dict.fromkeys((*options, right.scale * 2, right.scale * ln2, right.scale / ln2)):
        if abs(scale / right.scale - 1) > 1e-3:
            yield Alternative(
                "scale wrong",
                f"The result is that of scale = {scale:.5g}, not {right.scale:.5g}.",
                replace(right, scale=scale),
            )


def _seeds(situation: Situation) -> Iterator[Alternative]:
    right, places = situation.right, situation.places
    dropout = None if right.scoring is None else right.scoring.dropout
    if dropout is None or places.size < 2:
        return
    for text, seeds in (
        ("seed + rank", dropout.seed + places.owner),
        ("seed * ranks + rank", dropout.seed * places.size + places.owner),
        ("the rank", places.owner),
    ):
        evidence = f"The result is that of {text} as the seed on every rank."
        yield Alternative("dropout seed differs between ranks", evidence, replace(right, seeds=seeds))


def _tensors(situation: Situation) -> Iterator[Alternative]:
    right, places = situation.right, situation.places
    yield Alternative(
        "query heads grouped wrongly", "The result is that of query head h using key head h % kv_heads.",
        replace(right, is_tiled=True),
    )  # fmt: skip
    if situation.head_dim == situation.v_head_dim:
        yield Alternative(
            "K and V swapped",
            "The result is that of values as keys and keys as values.",
            replace(right, is_swapped=True),
        )
    if places.size > 1:
        yield Alternative(
            "blocks merged without weights", "The result is the plain mean of each rank's block.",
            replace(right, blocks=places.owner),
        )  # fmt: skip
    if not bool(right.seen.any(-1).all()):
        yield Alternative(
            "rows that see nothing average everything", "Rows that see nothing hold the mean of all values.",
            replace(right, empty_mean=True),
        )  # fmt: skip
    if places.size > 1 and places.are_equal:
        for shift in sorted({1, places.size - 1}):
            yield Alternative(
                "V of another rank than K", f"Remote keys come with values of the rank {shift} after theirs.",
                replace(right, remote=places.remote, v_from=places.neighbour(shift)),
            )  # fmt: skip


def gradient_mistakes(right: Meaning, places: Places) -> Iterator[Alternative]:
    """Meanings whose output is that of `right` but whose gradients are not."""
    if places.size < 2:
        return
    cause = "remote pairs give no gradient"
    for cut, text in (
        ("qkv", "q, k and v only through pairs of one rank's own tokens"),
        ("kv", "k and v only from the rank's own queries"),
        ("q", "q only from the rank's own keys"),
        ("k", "k only from the rank's own queries"),
        ("v", "v only from the rank's own queries"),
    ):
        evidence = f"The gradients are those that reach {text}."
        yield Alternative(cause, evidence, replace(right, remote=places.remote, cut=cut))


def stale_gradients(
    right: Meaning, places: Places, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> dict[str, Tensor] | None:
    """Gradients of a backward in which every rank uses its own K/V in place of each block; None where shards or score
    functions do not allow it."""
    if places.size < 2 or not places.are_equal or right.scoring is not None or right.sinks is not None:
        return None
    q, k, v, dout = (t.double() for t in (q, k, v, dout))
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scores = (right.scale * q @ k.mT).masked_fill(~right.seen, -torch.inf)
    lse = torch.logsumexp(scores, -1, keepdim=True)
    lse = lse.masked_fill(lse.isneginf(), 0.0)
    delta = (dout * (torch.exp(scores - lse) @ v)).sum(-1, keepdim=True)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    own = torch.stack(
        [torch.argsort(places.slot + (places.owner != rank) * len(places.slot)) for rank in range(places.size)]
    )
    for rank in range(places.size):
        mine = places.owner == rank
        taken = own[rank][places.slot]  # for every key, the token in the same slot of this rank
        k_own, v_own = k[:, :, taken], v[:, :, taken]
        p = torch.exp(
            (right.scale * q[:, :, mine] @ k_own.mT).masked_fill(~right.seen[:, :, mine], -torch.inf) - lse[:, :, mine]
        )
        ds = right.scale * p * (dout[:, :, mine] @ v_own.mT - delta[:, :, mine])
        dq[:, :, mine] = ds @ k_own
        dk += ds.mT @ q[:, :, mine]
        dv += p.mT @ dout[:, :, mine]
    return {"dq": dq, **{n: t.unflatten(1, (-1, group)).sum(2) for n, t in (("dk", dk), ("dv", dv))}}


# -- The leak probe: change tokens that some rows cannot see, and check that these rows do not change ------------------
# It needs no reference, so it also finds mistakes of the reference, and pairs too light to show in a norm.


LOUD = 16.0
"""By how much changed tokens are larger than the others: even a faint look at them shows."""


@dataclass(frozen=True, eq=False)
class Probe:
    """Which token changes, and which rows (B, H or kv heads, S) it must leave alone."""

    position: int
    still: dict[str, Tensor]


def make_probes(seen: Tensor, kv_heads: int, count: int, draw: torch.Generator) -> list[Probe]:
    """Probes of tokens that most rows after them, before them, and anywhere must not see."""
    size = seen.shape[2]
    if not size or not count:
        return []
    at = torch.arange(size)
    hidden = (~seen).sum((0, 1))  # (S, S): how many planes hide the pair
    after = torch.where(at[:, None] > at, hidden, 0).sum(0)
    before = torch.where(at[:, None] < at, hidden, 0).sum(0)
    chosen = [int(counts.argmax()) for counts in (after, before) if counts.any()]
    weights = (after + before).double()
    while len(chosen) < count and weights.any():
        chosen.append(int(torch.multinomial(weights, 1, generator=draw)))
        weights[chosen[-1]] = 0
    return [_probe(seen, kv_heads, position) for position in dict.fromkeys(chosen[:count])]


def _probe(seen: Tensor, kv_heads: int, position: int) -> Probe:
    """A row moves if it is the token or sees it; a key's gradient moves if any row that sees the key does."""
    moves = seen[..., position].clone()
    moves[..., position] = True
    keys = (seen & moves[..., None]).any(2)
    keys = keys.unflatten(1, (kv_heads, -1)).any(2)
    keys[..., position] = True
    return Probe(position, {"out": ~moves, "dq": ~moves, "dk": ~keys, "dv": ~keys})


def changed(tensors: Inputs, position: int, draw: torch.Generator) -> Inputs:
    """Whole q, k, v and dout with one token made loud: its q and k only a little, so that nothing overflows."""
    loud: list[Tensor] = []
    for tensor, size in zip(tensors, (2.0, 2.0, LOUD, LOUD), strict=True):
        tensor = tensor.clone()
        row = tensor[:, :, position]
        noise = torch.randn(row.shape, generator=draw, dtype=torch.float64).to(row.device)
        tensor[:, :, position] = (size * noise).to(row.dtype)
        loud.append(tensor)
    q, k, v, dout = loud
    return q, k, v, dout


def moved(probe: Probe, name: str, before: Tensor, after: Tensor, rows: Tensor) -> tuple[Tensor, float, float]:
    """Positions that moved though the token is hidden from them, the largest change, and the budget there.

    Right code does not change a bit; other tile orders may round differently, so half a row's budget is left.
    """
    still = probe.still[name].to(before.device)
    difference = torch.where(before == after, torch.zeros_like(before), before - after).double()
    norms = (difference.square().sum(-1) * still).nan_to_num(torch.inf, posinf=torch.inf).sum((0, 1)).sqrt()
    budget = rows.to(norms.device) / 2
    wrong = (norms > budget).nonzero().flatten()
    if not len(wrong):
        return wrong, 0.0, 0.0
    worst = int((norms / budget).argmax())
    order = torch.cat((torch.tensor([worst], device=wrong.device), wrong[wrong != worst]))
    return order.cpu(), float(norms[worst]), float(budget[worst])


# -- Diagnosis ---------------------------------------------------------------------------------------------------------


SLACK = 3.0
"""A mistake's answer may be a little harder to compute than the truth."""
SMALL = 2.0**-6
"""An error below this part of the tensor may be rounding; known mistakes are larger."""
MANY_PAIRS = 1 << 22
"""Beyond this, the first mistake that fits is enough."""
Cause = tuple[str, str]
"""Name and evidence."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What a diagnosis looks at."""

    situation: Situation
    inputs: Inputs
    """Whole q, k, v and dout."""
    truth: Answer
    budgets: dict[str, Budget]
    found: dict[str, Tensor]
    wrong: tuple[str, ...]
    """Tensors that are wrong, in order."""
    bad_ranks: tuple[int, ...]
    """Ranks with wrong rows of the output."""
    missing: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def fits(self, name: str, right: Tensor, rows: Tensor | None = None) -> bool:
        """Whether a tensor that was found is this one, on these rows, and clearly more so than the truth."""
        error, wrong = (_distance(self.found[name], other, rows) for other in (right, self.truth[name]))
        return error <= SLACK * self.budgets[name].total and not error > wrong / 10


def _distance(found: Tensor, right: Tensor, rows: Tensor | None) -> float:
    found, right = found.double(), right.double()
    if rows is not None:
        found, right = found[:, :, rows], right[:, :, rows]
    return float(torch.where(found == right, torch.zeros_like(right), found - right).norm())


def diagnose(evidence: Evidence) -> dict[str, Cause]:
    """The likely cause of every wrong tensor."""
    causes: dict[str, Cause] = {}
    base, meaning = evidence.truth, evidence.situation.right
    forward = [name for name in ("out", "lse") if name in evidence.wrong]
    if forward:
        match = _matching(evidence, call_mistakes(evidence.situation), "out" if "out" in forward else "lse")
        if match is not None:
            cause, (alternative, base) = match
            meaning = alternative.meaning
        else:
            cause = _unmatched(evidence, "out" if "out" in forward else "lse")
        causes.update(dict.fromkeys(forward, cause))
        for name in evidence.wrong:
            if name not in causes and (match is None or evidence.fits(name, base[name])):
                causes[name] = cause
    rest = [name for name in evidence.wrong if name not in causes]
    if rest:
        causes.update(_of_gradients(evidence, rest, base, meaning))
    return causes


def _matching(
    evidence: Evidence, alternatives: Iterable[Alternative], name: str
) -> tuple[Cause, tuple[Alternative, Answer]] | None:
    """The first mistake that gives what was found on the wrong ranks' rows, and the names of others that do, too."""
    owner = evidence.situation.places.owner
    rows = torch.isin(owner, torch.tensor(evidence.bad_ranks)) if evidence.bad_ranks else None
    first: tuple[Alternative, Answer] | None = None
    others: list[str] = []
    for alternative in alternatives:
        given = answer(alternative.meaning, *evidence.inputs)
        if not evidence.fits(name, given[name], rows):
            continue
        if first is None:
            first = alternative, given
        elif alternative.cause != first[0].cause and alternative.cause not in others:
            others.append(alternative.cause)
        if alternative.meaning.seen.numel() > MANY_PAIRS:
            break
    if first is None:
        return None
    first = first[0], _on_these_ranks(evidence, first, rows)
    also = f" (The same here: {', '.join(others[:3])}.)" if others else ""
    if rows is not None and not bool(rows.all()):
        also += f" Only ranks {list(evidence.bad_ranks)} make the mistake."
    return (first[0].cause, first[0].evidence + also), first


def _on_these_ranks(evidence: Evidence, match: tuple[Alternative, Answer], rows: Tensor | None) -> Answer:
    """The mistake's answer, where only some ranks make it: their rows have its mask, all others the right one."""
    right, meaning = evidence.situation.right, match[0].meaning
    if rows is None or bool(rows.all()) or meaning.seen is right.seen:
        return match[1]
    seen = torch.where(rows.view(-1, 1), meaning.seen, right.seen)
    return answer(replace(meaning, seen=seen), *evidence.inputs)


def _unmatched(evidence: Evidence, name: str) -> Cause:
    found, truth = evidence.found[name], evidence.truth[name]
    nothing = ~evidence.situation.right.seen.any(-1)
    bad = ~found.isfinite() & truth.isfinite()
    bad = bad.any(-1) if bad.ndim == 4 else bad
    if bad.any():
        if torch.equal(bad, nothing & bad) and nothing.any():
            return "rows that see nothing are not 0", "All rows that are not finite see nothing: 0 / 0."
        return "not finite", f"{int(bad.sum())} rows are not finite, and they see something."
    if name == "out":
        ordered = out_of_order(evidence, name)
        if ordered is not None:
            return ordered
    scoring = evidence.situation.right.scoring
    good = sorted(set(range(evidence.situation.places.size)) - set(evidence.bad_ranks))
    if scoring is not None and scoring.dropout is not None and good:
        return (
            "dropout seed differs between ranks",
            f"Rows of ranks {good} are right, and those of the others match no other mistake.",
        )
    return _small(evidence, name)


def _small(evidence: Evidence, name: str) -> Cause:
    truth = evidence.truth[name]
    truth = truth[truth.isfinite()]
    error = float((evidence.found[name].double() - evidence.truth[name]).nan_to_num(0.0, posinf=0.0, neginf=0.0).norm())
    size = float(truth.norm())
    if size and error <= SMALL * size:
        return (
            "rounding",
            f"No known mistake fits, and the error is {error / size:.1e} of the tensor: as much as rounding too early"
            f" (lse or sums in a narrow dtype) would give.",
        )
    return UNKNOWN, "None of the known mistakes gives this result."


def out_of_order(evidence: Evidence, name: str) -> Cause | None:
    """Whether wrong rows are right rows of other positions."""
    found = evidence.found[name].double().movedim(2, 0).flatten(1)
    truth = evidence.truth[name].movedim(2, 0).flatten(1)
    distance = torch.cdist(found, truth)
    nearest = distance.argmin(1)
    own = distance.diagonal()
    rows = evidence.budgets[name].rows
    assert rows is not None
    wrong = own > rows
    moved = wrong & (distance.amin(1) <= SLACK * rows[nearest]) & (nearest != torch.arange(len(own)))
    if (
        not wrong.any()
        or int(moved.sum()) < 0.8 * int(wrong.sum())
        or len(nearest[moved].unique()) < 0.8 * int(moved.sum())
    ):
        return None
    first = int(moved.nonzero()[0])
    return (
        "output not in layout order" if name == "out" else "gradient not in layout order",
        f"{int(moved.sum())} of {int(wrong.sum())} wrong rows are right rows of other positions: the one at {first}"
        f" belongs to {int(nearest[first])}.",
    )


def _of_gradients(evidence: Evidence, names: list[str], base: Answer, meaning: Meaning) -> dict[str, Cause]:
    """Causes for gradients whose output is explained."""
    causes: dict[str, Cause] = {}
    for name in names:
        plain = plain_cause(evidence, name, base[name])
        if plain is not None:
            causes[name] = plain
    places = evidence.situation.places
    rest = [name for name in names if name not in causes]
    for alternative in gradient_mistakes(meaning, places) if rest else ():
        given = answer(alternative.meaning, *evidence.inputs)
        for name in rest:
            if name not in causes and evidence.fits(name, given[name]):
                causes[name] = alternative.cause, alternative.evidence
    rest = [name for name in names if name not in causes]
    stale = stale_gradients(meaning, places, *evidence.inputs) if rest else None
    for name in rest:
        if stale is not None and evidence.fits(name, stale[name]):
            causes[name] = (
                "stale K/V in backward",
                "The gradients are those of a backward in which every rank uses its own K/V for each block.",
            )
        else:
            causes[name] = out_of_order(evidence, name) or _small(evidence, name)
    return causes


def plain_cause(evidence: Evidence, name: str, right: Tensor) -> Cause | None:
    """No gradient at all, or a multiple of the right one."""
    found = evidence.found[name].double()
    if name in evidence.missing:
        return "no gradient", f"Nothing reached it on ranks {list(evidence.missing[name])}: it is not in the graph."
    if not found.any() and right.any():
        return "no gradient", "It is 0 everywhere."
    ratio = multiple(found, right, evidence.budgets[name].total)
    if ratio is None or abs(ratio - 1) < 1e-3:
        return None
    return "gradients scaled", said_multiple(ratio, evidence.situation.places.size)


def multiple(found: Tensor, right: Tensor, budget: float) -> float | None:
    """The number by which the right tensor was multiplied; None if it was not."""
    found, right = found.double(), right.double()
    size = float((right * right).sum())
    if size <= budget**2 or not found.isfinite().all():
        return None
    ratio = float((found * right).sum()) / size
    rest = float((found - ratio * right).norm())
    return ratio if abs(ratio) > 1e-2 and rest <= SLACK * max(1.0, abs(ratio)) * budget else None


def said_multiple(ratio: float, size: int) -> str:
    """The factor, and what it is in ranks."""
    for text, value in (
        ("the number of ranks", size), ("one over the number of ranks", 1 / size),
        ("the number of ranks squared", size**2), ("one over the number of ranks squared", 1 / size**2),
    ):  # fmt: skip
        if size > 1 and abs(ratio / value - 1) < 1e-2:
            return f"It is {ratio:.4g} times one device's everywhere: {text}."
    return f"It is {ratio:.4g} times one device's everywhere."
