"""Mistakes as meanings: what a broken integration would have computed, so that a wrong result can be recognised.

Nothing is guessed: a cause is named only if its own answer equals what was found, within the budget of rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan.verification.places import Places, mask_mistakes
from longspan.verification.reference import Meaning

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
