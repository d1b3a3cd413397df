"""Backward of a scan is its forward turned round: gradients of states go back along the way that states came.

Forward is linear in what segments add (U) as long as maps (M) are given, so its backward is its transpose. Where
forward folded [i:k) and [k:j), backward gives M_right^T of the whole's gradient to the left part and the gradient
itself to the right part; where a piece was sent, its gradient comes back, and all that come for one piece are added. So
no map travels twice: a rank keeps the M of every right part that it folded.

Backward begins with the gradient of every entering state [0:i), as if nothing came back from later segments, and ends
with the gradient of every [i:i+1): what the state that leaves segment i is worth to all segments after it.

    forward    step 0  0 ── state[0:1] ──► 1      step 1  1 folds state[0:1] map[1:2], 1 ── state[0:2] ──► 2
    backward   step 0  2 ── dstate[0:2] ──► 1     step 1  1 takes it apart, 1 ── dstate[0:1] ──► 0    step 2
"""

from __future__ import annotations

from longspan.schedules.scans.words import ChainPiece, ScanStep, StateTransfer


def transposed(steps: tuple[ScanStep, ...]) -> tuple[ScanStep, ...]:
    """One rank's backward steps from its forward steps.

    >>> from longspan.schedules.scans.words import Fold
    >>> state, mapped, whole = map(ChainPiece.parse, ("state[0:1]c0b0:1", "map[1:2]c0b0:1", "state[0:2]c0b0:1"))
    >>> came = StateTransfer(0, 1, state, 2)
    >>> went = StateTransfer(1, 2, whole, 2)
    >>> for step in transposed((ScanStep((came,)), ScanStep((went,), (Fold(1, state, mapped),)), ScanStep())):
    ...     print(step.transfers, step.computes)
    (2>1 dstate[0:2]c0b0:1,) ()
    (1>0 dstate[0:1]c0b0:1,) (fold state[0:1]c0b0:1 map[1:2]c0b0:1,)
    () ()
    """
    count = len(steps)
    made: list[ScanStep] = []
    for number in reversed(range(count)):
        before = steps[number - 1].transfers if number else ()
        back = [StateTransfer(t.dst, t.src, t.piece.to_gradient(), count) for t in before]
        made.append(ScanStep(tuple(back), steps[number].computes[::-1]))
    return tuple(made)


def kept(steps: tuple[ScanStep, ...]) -> tuple[ChainPiece, ...]:
    """The pieces whose M the rank keeps for backward, in the order of their first fold."""
    return tuple(dict.fromkeys(fold.right for step in steps for fold in step.computes))
