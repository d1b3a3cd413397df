"""What two ranks say of where they are, compared: do they make the same calls? If not, in words for a person."""

from __future__ import annotations

from collections.abc import Mapping

from longspan.execution.liveness.records import TRAIL, Phase, Status


def difference(mine: Status, theirs: Status, me: str, who: str) -> str | None:
    """How a rank in the call of this number does something else than this rank, if it does."""
    # All ranks remember the same agreements, so a call is new to all of them or to none.
    if theirs.compares != mine.compares and (theirs.training_step, theirs.direction) == (
        mine.training_step,
        mine.direction,
    ):
        compares = who if theirs.compares else me
        return (
            f"{who} was asked for something else: it is {theirs}, while {me} is {mine}, and only {compares} was asked"
            f" for something new."
        )
    if theirs.phase is Phase.IDLE:
        return None
    both = theirs.phase is Phase.AGREEING and mine.phase is Phase.AGREEING  # they will see it for themselves
    for name in ("training_step", "direction") if both else ("training_step", "direction", "plan", "forward", "name"):
        if getattr(theirs, name) != getattr(mine, name):
            return f"{who} does something else: it is {theirs}, while {me} is {mine}."
    return None


def first_apart(made: Mapping[int, int], theirs: Status) -> int | None:
    """The first of the calls in a rank's trail that was another one here, where `made` has calls by number; None if
    there is none. Calls that only one of them knows of are not compared.

    >>> theirs = Status().entered(1, 70, "").entered(2, 80, "").entered(3, 90, "")
    >>> first_apart({1: 70, 2: 80}, theirs), first_apart({2: 81, 3: 91}, theirs), first_apart({4: 100}, theirs)
    (None, 2, None)
    """
    calls = range(max(1, theirs.call - TRAIL + 1), theirs.call + 1)
    return next((c for c in calls if 0 != theirs.was_in(c) != made.get(c, theirs.was_in(c))), None)
