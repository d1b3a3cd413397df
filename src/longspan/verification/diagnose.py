"""Find the likely cause of a wrong tensor: known mistakes, a leak probe, and the match between them and the result.

A cause is named if its result matches within `SLACK` budgets. If no mistake matches, the form of the difference is
reported (rows in another order, a constant factor, no gradient at all, an error as small as rounding), or that it was
not recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longspan.verification.reference import Answer, Budget, Inputs, Meaning, Places, mask_mistakes, reference_result
from longspan.verification.report import UNKNOWN

# -- Known mistakes: what a broken integration would compute -----------------------------------------------------------
# A cause is named only if its own result equals the observed one, within the budget of rounding.


ADVICE = {
    "mask replaced by plain causal": "Pass the plan (or the mask) to the attention call; is_causal=True is not it.",
    "mask dropped": "Pass the plan to the attention call: this call takes no mask, or ignores it.",
    "window dropped": "Put the window into the mask: masks.documents(lengths) & masks.sliding_window(left).",
    "documents leak": "Put the documents into the mask: masks.documents(lengths) & ...",
    "the future is seen": "Add & masks.causal() to the mask of the call.",
    "mask made causal": "Leave is_causal out, and pass the whole mask.",
    "no exchange between ranks": "Call longspan.attention with plan and group: this call works on the shard alone.",
    "K/V in wrong order": "After gathering shards, restore the order of positions: layout.unshard(shards, dim).",
    "mask sees local positions": "Evaluate the mask at layout.positions(rank), not at indices within the shard.",
    "score function sees local positions": "Call it with layout.positions(rank), or pass it to longspan.attention.",
    "one head's mask used for all": "Evaluate the mask for every head: masks.per_head has one for each.",
    "one row's mask used for all": "Evaluate the mask for every batch row.",
    "keys of some ranks missing": "Every rank must see every other: count the hops of the ring.",
    "scale wrong": "Pass scale= (default: one over the square root of head_dim), once.",
    "sinks dropped": "Pass sinks= to the call that runs on the ranks, too.",
    "softcap dropped": "Pass softcap= to the call that runs on the ranks, too.",
    "dropout seed differs between ranks": "Give every rank the same seed: positions make the pattern differ.",
    "query heads grouped wrongly": "Repeat keys with repeat_interleave(heads per key head, dim=1), not repeat.",
    "K and V swapped": "Pass keys second and values third.",
    "V of another rank than K": "Send K and V in one message, or give them the same tag.",
    "blocks merged without weights": "Weigh every block by exp(lse - lse of all blocks).",
    "rows that see nothing average everything": "Rows that see nothing are 0: mask with -inf and guard the division.",
    "remote pairs give no gradient": "Send gradients of K/V back to their owners, and add up dq over all blocks.",
    "stale K/V in backward": "Receive every block again in backward, or save it: the local one is another rank's.",
    "output not in layout order": "Return rows in the order of layout.positions(rank).",
    "gradients scaled": "Reduce gradients over the group once: 'sum' adds shares, 'average' is for DDP and FSDP.",
    "captured gradient not reduced": "Add it up over the group, or say captured_grads='share' if the trainer does.",
    "captured gradient reduced twice": "Say captured_grads='share' in the call if the trainer reduces gradients.",
    "no gradient": "Something cuts the graph: detach(), no_grad(), .data, or an output copied into a buffer.",
    "rounding": "Keep lse and sums in float32, on the wire too; if the call is as intended, pass factor=.",
}  # fmt: skip


Alternative = tuple[str, str, Meaning]
"""A mistake: its name, the evidence, and the meaning of a call that makes it."""


SLACK = 3.0
"""Budgets that a mistake's result may be off by: it may be a little harder to compute than the truth."""
SMALL = 2.0**-6
"""An error below this part of the tensor may be rounding; known mistakes are larger."""
CUTS = {
    "qkv": "q, k and v only through pairs of one rank's own tokens",
    "kv": "k and v only from the rank's own queries",
    "q": "q only from the rank's own keys",
    "k": "k only from the rank's own queries",
    "v": "v only from the rank's own queries",
}
"""Gradients that a backward without remote pairs leaves out (`Meaning.cut`), and what reaches them then."""
MANY_PAIRS = 1 << 22
"""Beyond this, the search ends at the first mistake that fits."""
Cause = tuple[str, str]
"""Name and evidence."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """A call's reference, and what was observed."""

    right: Meaning
    options: list[str]
    """Options of the call that change the result."""
    without: Callable[[str], Meaning]
    """Returns the meaning without one of the options."""
    places: Places
    inputs: Inputs
    """Whole q, k, v and dout."""
    truth: Answer
    budgets: dict[str, Budget]
    observed: dict[str, Tensor]
    wrong: tuple[str, ...]
    """Tensors that are wrong, in order."""
    bad_ranks: tuple[int, ...]
    """Ranks with wrong rows of the output."""
    missing: dict[str, tuple[int, ...]]
    """Tensors that got no gradient at all, and on which ranks."""

    def fits(self, name: str, right: Tensor, rows: Tensor | None = None) -> bool:
        """Whether an observed tensor is this one, on these rows, and clearly more so than the truth."""

        def distance(expected: Tensor) -> float:
            observed, expected = self.observed[name].double(), expected.double()
            if rows is not None:
                observed, expected = observed[:, :, rows], expected[:, :, rows]
            return float(torch.where(observed == expected, torch.zeros_like(expected), observed - expected).norm())

        error = distance(right)
        return error <= SLACK * self.budgets[name].total and not error > distance(self.truth[name]) / 10


def call_mistakes(evidence: Evidence) -> Iterator[Alternative]:
    """Yield meanings that a broken call may have had, the likeliest first."""
    right, places, result = evidence.right, evidence.places, "The result is that of"
    for name in evidence.options:
        yield f"{name} dropped", f"{result} a call without {name}.", evidence.without(name)
    if right.scoring is not None and right.scoring.functions and places.size > 1:
        everywhere = torch.arange(len(places.slot))
        for q_at, kv_at, text in (
            (places.slot, places.joined, "query's place in its shard and the key's in rank order"),
            (places.slot, everywhere, "query's place in its shard and the key's global position"),
            (places.slot, places.slot, "query's and key's places in their shards"),
            (everywhere, places.joined, "query's global position and the key's place in rank order"),
        ):
            if not (torch.equal(q_at, everywhere) and torch.equal(kv_at, everywhere)):
                text = f"{result} score functions which see the {text}."
                yield "score function sees local positions", text, replace(right, q_at=q_at, kv_at=kv_at)
    for cause, text, seen in mask_mistakes(right.seen, places):
        if not torch.equal(seen, right.seen):
            yield cause, text, replace(right, seen=seen)
    d, e, ln2 = evidence.inputs[0].shape[3], evidence.inputs[2].shape[3], 0.6931471805599453
    scales = (1.0, 1 / d, d**-0.5, e**-0.5, d**0.5, right.scale**2, right.scale / 2, right.scale * 2)
    for scale in dict.fromkeys((*scales, right.scale * ln2, right.scale / ln2)):
        if abs(scale / right.scale - 1) > 1e-3:
            text = f"{result} scale = {scale:.5g}, not {right.scale:.5g}."
            yield "scale wrong", text, replace(right, scale=scale)
    dropout = None if right.scoring is None else right.scoring.dropout
    if dropout is not None and places.size > 1:
        for text, seeds in (
            ("seed + rank", dropout.seed + places.owner),
            ("seed * ranks + rank", dropout.seed * places.size + places.owner),
            ("the rank", places.owner),
        ):
            text = f"{result} {text} as the seed on every rank."
            yield "dropout seed differs between ranks", text, replace(right, seeds=seeds)
    text = f"{result} query head h using key head h % kv_heads."
    yield "query heads grouped wrongly", text, replace(right, is_tiled=True)
    if d == e:
        text = f"{result} values as keys and keys as values."
        yield "K and V swapped", text, replace(right, is_swapped=True)
    if places.size > 1:
        text = "The result is the plain mean of each rank's block."
        yield "blocks merged without weights", text, replace(right, blocks=places.owner)
    if not bool(right.seen.any(-1).all()):
        text = "Rows that see nothing hold the mean of all values."
        yield "rows that see nothing average everything", text, replace(right, empty_mean=True)
    if places.size > 1 and places.are_equal:
        for shift in sorted({1, places.size - 1}):
            text = f"Remote keys come with values of the rank {shift} after theirs."
            meaning = replace(right, remote=places.remote, v_from=places.neighbour(shift))
            yield "V of another rank than K", text, meaning


def stale_gradients(
    right: Meaning, places: Places, q: Tensor, k: Tensor, v: Tensor, dout: Tensor
) -> dict[str, Tensor] | None:
    """Return gradients of a backward in which every rank uses its own K/V in place of each block.

    None for unequal shards, score functions and sinks.
    """
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
# It needs no reference, so it also finds mistakes of the reference, and pairs with weights too small to show in a norm.


LOUD = 16.0
"""The scale of changed tokens: even a small weight on them shows."""


def make_probes(seen: Tensor, kv_heads: int, count: int, draw: torch.Generator) -> dict[int, dict[str, Tensor]]:
    """Return tokens that most rows after them, before them, and anywhere must not see.

    Each has the rows (B, H or kv heads, S) of every tensor that must not move when it changes.
    """
    size = seen.shape[2]
    if not size or not count:
        return {}
    at = torch.arange(size)
    hidden = (~seen).sum((0, 1))  # (S, S): how many planes hide the pair
    after = torch.where(at[:, None] > at, hidden, 0).sum(0)
    before = torch.where(at[:, None] < at, hidden, 0).sum(0)
    chosen = [int(counts.argmax()) for counts in (after, before) if counts.any()]
    weights = (after + before).double()
    while len(chosen) < count and weights.any():
        chosen.append(int(torch.multinomial(weights, 1, generator=draw)))
        weights[chosen[-1]] = 0
    probes: dict[int, dict[str, Tensor]] = {}
    for position in dict.fromkeys(chosen[:count]):
        # A row moves if it is the token or sees it; a key's gradient moves if any row that sees the key does.
        moves = seen[..., position].clone()
        moves[..., position] = True
        keys = (seen & moves[..., None]).any(2).unflatten(1, (kv_heads, -1)).any(2)
        keys[..., position] = True
        probes[position] = {"out": ~moves, "dq": ~moves, "dk": ~keys, "dv": ~keys}
    return probes


def change_token(tensors: Inputs, position: int, draw: torch.Generator) -> Inputs:
    """Return q, k, v and dout with one token replaced by large values; q and k smaller, so that nothing overflows."""
    changed: list[Tensor] = []
    for tensor, size in zip(tensors, (2.0, 2.0, LOUD, LOUD), strict=True):
        tensor = tensor.clone()
        row = tensor[:, :, position]
        noise = torch.randn(row.shape, generator=draw, dtype=torch.float64).to(row.device)
        tensor[:, :, position] = (size * noise).to(row.dtype)
        changed.append(tensor)
    q, k, v, dout = changed
    return q, k, v, dout


def find_moved(still: Tensor, before: Tensor, after: Tensor, rows: Tensor) -> tuple[Tensor, float, float]:
    """Return positions that moved though the token is hidden from them, the largest change, and the budget there.

    Correct code does not change a bit; other tile orders may round differently, so half a row's budget is allowed.
    """
    difference = torch.where(before == after, torch.zeros_like(before), before - after).double()
    norms = (
        (difference.square().sum(-1) * still.to(before.device))
        .nan_to_num(torch.inf, posinf=torch.inf)
        .sum((0, 1))
        .sqrt()
    )
    budget = rows.to(norms.device) / 2
    wrong = (norms > budget).nonzero().flatten()
    if not len(wrong):
        return wrong, 0.0, 0.0
    worst = int((norms / budget).argmax())
    order = torch.cat((torch.tensor([worst], device=wrong.device), wrong[wrong != worst]))
    return order.cpu(), float(norms[worst]), float(budget[worst])


# -- Diagnosis ---------------------------------------------------------------------------------------------------------


def diagnose(evidence: Evidence) -> dict[str, Cause]:
    """Return the likely cause of every wrong tensor."""
    causes: dict[str, Cause] = {}
    base, meaning = evidence.truth, evidence.right
    forward = [name for name in ("out", "lse") if name in evidence.wrong]
    if forward:
        name = forward[0]
        match = _find_match(evidence, name)
        if match is not None:
            cause, meaning, base = match
        else:
            cause = _unknown_cause(evidence, name)
        causes.update(dict.fromkeys(forward, cause))
        for name in evidence.wrong:
            if name not in causes and (match is None or evidence.fits(name, base[name])):
                causes[name] = cause
    rest = [name for name in evidence.wrong if name not in causes]
    if rest:
        causes.update(_explain_gradients(evidence, rest, base, meaning))
    return causes


def _find_match(evidence: Evidence, name: str) -> tuple[Cause, Meaning, Answer] | None:
    """Return the first mistake that gives the observed rows of the wrong ranks; its evidence names others that do."""
    owner = evidence.places.owner
    rows = torch.isin(owner, torch.tensor(evidence.bad_ranks)) if evidence.bad_ranks else None
    matches: dict[str, tuple[str, Meaning, Answer]] = {}
    for cause, text, meaning in call_mistakes(evidence):
        result = reference_result(meaning, *evidence.inputs)
        if evidence.fits(name, result[name], rows):
            matches.setdefault(cause, (text, meaning, result))
            if meaning.seen.numel() > MANY_PAIRS:
                break
    if not matches:
        return None
    cause, *others = matches
    text, meaning, result = matches[cause]
    text += f" (The same here: {', '.join(others[:3])}.)" if others else ""
    if rows is not None and not bool(rows.all()):
        text += f" Only ranks {list(evidence.bad_ranks)} make the mistake."
        if meaning.seen is not evidence.right.seen:  # rows of these ranks have its mask, all others the right one
            seen = torch.where(rows.view(-1, 1), meaning.seen, evidence.right.seen)
            result = reference_result(replace(meaning, seen=seen), *evidence.inputs)
    return (cause, text), meaning, result


def _unknown_cause(evidence: Evidence, name: str) -> Cause:
    nothing, scoring = ~evidence.right.seen.any(-1), evidence.right.scoring
    bad = ~evidence.observed[name].isfinite() & evidence.truth[name].isfinite()
    bad = bad.any(-1) if bad.ndim == 4 else bad
    if bad.any():
        if torch.equal(bad, nothing & bad) and nothing.any():
            return "rows that see nothing are not 0", "All rows that are not finite see nothing: 0 / 0."
        return "not finite", f"{int(bad.sum())} rows are not finite, and they see something."
    ordered = _out_of_order(evidence, name) if name == "out" else None
    if ordered is not None:
        return ordered
    good = sorted(set(range(evidence.places.size)) - set(evidence.bad_ranks))
    if scoring is not None and scoring.dropout is not None and good:
        text = f"Rows of ranks {good} are right, and those of the others match no other mistake."
        return "dropout seed differs between ranks", text
    return _rounding_or_unknown(evidence, name)


def _rounding_or_unknown(evidence: Evidence, name: str) -> Cause:
    truth = evidence.truth[name]
    error = float((evidence.observed[name].double() - truth).nan_to_num(0.0, posinf=0.0, neginf=0.0).norm())
    size = float(truth[truth.isfinite()].norm())
    if size and error <= SMALL * size:
        return (
            "rounding",
            f"No known mistake fits, and the error is {error / size:.1e} of the tensor: as much as rounding too early"
            f" (lse or sums in a narrow dtype) would give.",
        )
    return UNKNOWN, "None of the known mistakes gives this result."


def _out_of_order(evidence: Evidence, name: str) -> Cause | None:
    """Return a cause if wrong rows are right rows of other positions."""
    observed = evidence.observed[name].double().movedim(2, 0).flatten(1)
    truth = evidence.truth[name].movedim(2, 0).flatten(1)
    distance = torch.cdist(observed, truth)
    nearest = distance.argmin(1)
    rows = evidence.budgets[name].rows
    assert rows is not None
    wrong = distance.diagonal() > rows
    moved = wrong & (distance.amin(1) <= SLACK * rows[nearest]) & (nearest != torch.arange(len(wrong)))
    num_wrong, num_moved = int(wrong.sum()), int(moved.sum())
    if not num_wrong or num_moved < 0.8 * num_wrong or len(nearest[moved].unique()) < 0.8 * num_moved:
        return None
    first = int(moved.nonzero()[0])
    return (
        "output not in layout order" if name == "out" else "gradient not in layout order",
        f"{num_moved} of {num_wrong} wrong rows are right rows of other positions: the one at {first} belongs to"
        f" {int(nearest[first])}.",
    )


def _explain_gradients(evidence: Evidence, names: list[str], base: Answer, meaning: Meaning) -> dict[str, Cause]:
    """Return causes for gradients whose output is explained."""
    plain = {name: plain_cause(evidence, name, base[name]) for name in names}
    causes = {name: cause for name, cause in plain.items() if cause is not None}
    places = evidence.places
    rest = [name for name in names if name not in causes]
    for cut, reached in CUTS.items() if rest and places.size > 1 else ():
        result = reference_result(replace(meaning, remote=places.remote, cut=cut), *evidence.inputs)
        for name in rest:
            if name not in causes and evidence.fits(name, result[name]):
                causes[name] = "remote pairs give no gradient", f"The gradients are those that reach {reached}."
    rest = [name for name in names if name not in causes]
    stale = stale_gradients(meaning, places, *evidence.inputs) if rest else None
    for name in rest:
        if stale is not None and evidence.fits(name, stale[name]):
            text = "The gradients are those of a backward in which every rank uses its own K/V for each block."
            causes[name] = "stale K/V in backward", text
        else:
            causes[name] = _out_of_order(evidence, name) or _rounding_or_unknown(evidence, name)
    return causes


def plain_cause(evidence: Evidence, name: str, right: Tensor) -> Cause | None:
    """Return a cause if there is no gradient at all, or a multiple of the right one."""
    observed = evidence.observed[name].double()
    if name in evidence.missing:
        return "no gradient", f"Nothing reached it on ranks {list(evidence.missing[name])}: it is not in the graph."
    if not observed.any() and right.any():
        return "no gradient", "It is 0 everywhere."
    ratio = find_multiple(observed, right, evidence.budgets[name].total)
    if ratio is None or abs(ratio - 1) < 1e-3:
        return None
    return "gradients scaled", describe_multiple(ratio, evidence.places.size)


def find_multiple(observed: Tensor, right: Tensor, budget: float) -> float | None:
    """Return the number by which the right tensor was multiplied; None if it was not."""
    observed, right = observed.double(), right.double()
    size = float((right * right).sum())
    if size <= budget**2 or not observed.isfinite().all():
        return None
    ratio = float((observed * right).sum()) / size
    rest = float((observed - ratio * right).norm())
    return ratio if abs(ratio) > 1e-2 and rest <= SLACK * max(1.0, abs(ratio)) * budget else None


def describe_multiple(ratio: float, size: int) -> str:
    """Return the factor, and its meaning in ranks."""
    for text, value in (
        ("the number of ranks", size), ("one over the number of ranks", 1 / size),
        ("the number of ranks squared", size**2), ("one over the number of ranks squared", 1 / size**2),
    ):  # fmt: skip
        if size > 1 and abs(ratio / value - 1) < 1e-2:
            return f"It is {ratio:.4g} times one device's everywhere: {text}."
    return f"It is {ratio:.4g} times one device's everywhere."
