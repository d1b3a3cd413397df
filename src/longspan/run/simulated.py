"""Simulated ranks: threads of this process, to run a model over ranks without a process group.

Threads run one at a time. Where ranks would exchange messages, the threads wait for each other instead: their inputs
are concatenated, the operator runs once on whole sequences, and each thread takes its part of the result. So all ranks
share one autograd graph, and one backward pass of the sum of their losses gives the sum of their gradients.

Two ranks with two tokens each, and a sum over tokens::

    rank 0: brings 1, 2 and waits.  rank 1: brings 4, 8, the last one, so it computes: 1 + 2 + 4 + 8.
    rank 1: goes on with 15.        rank 0: wakes up with 15.
"""

from __future__ import annotations

import contextvars
import threading
import traceback
from collections.abc import Callable, Sequence
from itertools import takewhile
from types import FrameType
from typing import Any, TypeVar

from longspan.errors import LongspanError

T = TypeVar("T")
Meeting = Callable[[list[Any]], Sequence[Any]]
"""From what each rank brought to what each takes away."""


class ApartError(LongspanError, RuntimeError):
    """Simulated ranks that do not do the same: one waits for the others where they never come."""


class NotSimulatedError(LongspanError, RuntimeError):
    """A call of torch.distributed, which knows process groups alone."""


TAKEN = (
    "Simulated ranks are for group= of Longspan's own calls: attention, flex_attention, causal_conv1d, the recurrences,"
    " and Head, token_loss, per_sequence, per_token, gather_tokens, gather_outputs, relayout and check_same of"
    " longspan.training. What rank it is, and of how many, say group.rank() and group.size(), as of process groups. For"
    " all else use a process group, as verify_model does."
)


class _LeftError(Exception):
    """Another rank has failed, and this one can go home."""


class _Room:
    """Where ranks meet: what they brought, in turn."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.brought: dict[int, tuple[str, Any]] = {}
        self.taken: dict[int, Any] = {}
        self.gone: list[int] = []
        self.failed: BaseException | None = None

    def meet(self, rank: int, what: str, mine: Any, compute: Meeting) -> Any:
        if len(self.gone) == self.size:
            raise ApartError(
                f"simulated rank {rank} came to {what} when all ranks had ended, as activation checkpointing does: it"
                f" computes again in the backward pass, when nobody is there to meet. Turn it off here: it changes no"
                f" number."
            )
        self.brought[rank] = what, mine
        if len(self.brought) == self.size:
            self._compute(compute)
        else:
            self._check_others()
            self.turn.wait_for(lambda: rank in self.taken or self.failed is not None)
        if self.failed is not None:
            raise _LeftError
        return self.taken.pop(rank)

    def _compute(self, compute: Meeting) -> None:
        asked = {what for what, _ in self.brought.values()}
        if len(asked) > 1:
            said = "; ".join(f"rank {rank} in {what}" for rank, (what, _) in sorted(self.brought.items()))
            raise ApartError(f"ranks have come to different places: {said}. They must make the same calls in turn.")
        results = compute([self.brought[rank][1] for rank in range(self.size)])
        self.brought.clear()
        self.taken.update(enumerate(results))
        self.turn.notify_all()

    def leave(self, rank: int) -> None:
        self.gone.append(rank)
        self._check_others()

    def _check_others(self) -> None:
        if self.gone and self.brought and len(self.gone) + len(self.brought) == self.size:
            waiting, (what, _) = next(iter(self.brought.items()))
            raise ApartError(
                f"rank {waiting} waits in {what}, and rank {self.gone[0]} has ended without it. All ranks must make the"
                f" same calls."
            )


class SimulatedRank:
    """One of them. It goes where a process group goes, as `group=` of Longspan's own calls."""

    def __init__(self, rank: int, room: _Room) -> None:
        self._rank, self._room = rank, room

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._room.size

    def meet(self, what: str, mine: Any, compute: Meeting) -> Any:
        """This rank's part of what `compute` makes of what all ranks brought."""
        return self._room.meet(self._rank, what, mine, compute)

    def summed(self, x: Any) -> Any:
        """The sum over the ranks, with its graph."""
        return self.meet("a sum", x, lambda parts: [sum(parts[1:], parts[0])] * len(parts))

    def __repr__(self) -> str:
        return f"<simulated rank {self._rank} of {self._room.size}>"


class OnlyRank(SimulatedRank):
    """The rank of a group of one, in a process that may have no group at all: it never waits.

    >>> OnlyRank().summed(3)
    3
    """

    def __init__(self) -> None:
        super().__init__(0, _Room(1))

    def meet(self, what: str, mine: Any, compute: Meeting) -> Any:  # noqa: ARG002
        return compute([mine])[0]


def simulate(world_size: int, work: Callable[[SimulatedRank], T]) -> list[T]:
    """What `work` gives on every rank; the first error, where one raises.

    >>> simulate(3, lambda rank: rank.summed(10 ** rank.rank()))
    [111, 111, 111]
    """
    room = _Room(world_size)
    found: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        with room.turn:  # one at a time: who waits lets others in
            try:
                if room.failed is None:
                    found[rank] = work(SimulatedRank(rank, room))
                    room.leave(rank)
            except _LeftError:
                pass
            except BaseException as error:
                room.failed = _explained(error, rank)
            finally:
                room.turn.notify_all()

    context = contextvars.copy_context()
    threads = [threading.Thread(target=context.copy().run, args=(run, rank), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if room.failed is not None:
        raise room.failed
    return found


def _explained(error: BaseException, rank: int) -> BaseException:
    """The error itself, or what to do where it was raised in a call of torch.distributed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = takewhile(lambda frame: _module(frame).partition(".")[0] == "torch", reversed(frames))
    called = [f for f in inner if _module(f).startswith("torch.distributed") and ".tensor" not in _module(f)]
    if not called:
        return error
    first = called[-1]
    name = getattr(first.f_locals.get("func"), "__name__", first.f_code.co_name)  # PyTorch's log of errors wraps it
    text = str(error).partition("\n")[0]
    refusal = NotSimulatedError(
        f"simulated rank {rank} called torch.distributed.{name}, which raised {type(error).__name__}: {text} {TAKEN}"
    )
    refusal.__cause__ = error
    return refusal


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
