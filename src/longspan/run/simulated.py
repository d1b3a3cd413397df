"""Simulated ranks: threads of this process, to run a model over ranks without a process group.

Threads run one at a time. Where ranks would exchange messages, the threads wait for each other: their inputs are
concatenated, the operator runs once on whole sequences, and each thread takes its part of the result. So all ranks
share one autograd graph, and one backward pass of the sum of their losses gives the sum of their gradients.

Two ranks with two tokens each, and a sum over tokens::

    rank 0: passes 1, 2 and waits.   rank 1: passes 4, 8 as the last one, so it computes 1 + 2 + 4 + 8.
    rank 1: continues with 15.       rank 0: wakes up with 15.
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
"""Maps the values of all ranks to the results of all ranks."""


class ApartError(LongspanError, RuntimeError):
    """Simulated ranks make different calls: one waits for others that never arrive."""


class NotSimulatedError(LongspanError, RuntimeError):
    """A call of torch.distributed, which supports process groups only."""


TAKEN = (
    "Simulated ranks are accepted as group= of Longspan's own calls: attention, flex_attention, causal_conv1d, the"
    " recurrences, and Head, token_loss, per_sequence, per_token, gather_tokens, gather_outputs, relayout and"
    " check_same of longspan.training. Use group.rank() and group.size() for the rank and world size. For everything"
    " else use a process group, as verify_model does."
)


class _LeftError(Exception):
    """Another rank has failed: end this one silently."""


class _Room:
    """Where ranks wait for each other and exchange values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.turn = threading.Condition()
        self.values: dict[int, tuple[str, Any]] = {}
        self.results: dict[int, Any] = {}
        self.ended: list[int] = []
        self.failed: BaseException | None = None

    def meet(self, rank: int, call: str, value: Any, compute: Meeting) -> Any:
        if len(self.ended) == self.size:
            raise ApartError(
                f"Simulated rank {rank} called {call} after all ranks had ended, as activation checkpointing does when"
                f" it recomputes in backward. Turn it off for simulated ranks: it does not change results."
            )
        self.values[rank] = call, value
        if len(self.values) == self.size:
            if len({call for call, _ in self.values.values()}) > 1:
                calls = "; ".join(f"rank {number} in {call}" for number, (call, _) in sorted(self.values.items()))
                raise ApartError(f"Ranks must make the same calls in the same order, but got {calls}.")
            results = compute([self.values[number][1] for number in range(self.size)])
            self.values.clear()
            self.results.update(enumerate(results))
            self.turn.notify_all()
        else:
            self._check_others()
            self.turn.wait_for(lambda: rank in self.results or self.failed is not None)
        if self.failed is not None:
            raise _LeftError
        return self.results.pop(rank)

    def leave(self, rank: int) -> None:
        self.ended.append(rank)
        self._check_others()

    def _check_others(self) -> None:
        if self.ended and self.values and len(self.ended) + len(self.values) == self.size:
            waiting, (call, _) = next(iter(self.values.items()))
            raise ApartError(
                f"Ranks must make the same calls, but rank {waiting} waits in {call}, and rank {self.ended[0]} has"
                f" ended without it."
            )


class SimulatedRank:
    """One simulated rank, accepted as `group=` of Longspan's own calls."""

    def __init__(self, rank: int, room: _Room) -> None:
        self._rank, self._room = rank, room

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._room.size

    def meet(self, call: str, value: Any, compute: Meeting) -> Any:
        """Return this rank's result of `compute` on the values of all ranks."""
        return self._room.meet(self._rank, call, value, compute)

    def summed(self, x: Any) -> Any:
        """Return the differentiable sum over the ranks."""
        return self.meet("a sum", x, lambda parts: [sum(parts[1:], parts[0])] * len(parts))

    def __repr__(self) -> str:
        return f"<simulated rank {self._rank} of {self._room.size}>"


class OnlyRank(SimulatedRank):
    """The only rank of a group of one, in a process without a process group.

    >>> OnlyRank().summed(3)
    3
    """

    def __init__(self) -> None:
        super().__init__(0, _Room(1))

    def meet(self, call: str, value: Any, compute: Meeting) -> Any:  # noqa: ARG002
        return compute([value])[0]


def simulate(world_size: int, work: Callable[[SimulatedRank], T]) -> list[T]:
    """Run `work` on every rank and return the results. Raise the first error.

    >>> simulate(3, lambda rank: rank.summed(10 ** rank.rank()))
    [111, 111, 111]
    """
    room = _Room(world_size)
    results: list[Any] = [None] * world_size

    def run(rank: int) -> None:
        with room.turn:  # one thread at a time: waiting releases the lock
            try:
                if room.failed is None:
                    results[rank] = work(SimulatedRank(rank, room))
                    room.leave(rank)
            except _LeftError:
                pass
            except BaseException as error:
                room.failed = _explain_error(error, rank)
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
    return results


def _explain_error(error: BaseException, rank: int) -> BaseException:
    """Return the error, or a refusal if it was raised in a call of torch.distributed."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    inner = takewhile(lambda frame: _module(frame).partition(".")[0] == "torch", reversed(frames))
    called = [f for f in inner if _module(f).startswith("torch.distributed") and ".tensor" not in _module(f)]
    if not called:
        return error
    first = called[-1]
    name = getattr(first.f_locals.get("func"), "__name__", first.f_code.co_name)  # PyTorch wraps it to log errors
    text = str(error).partition("\n")[0]
    refusal = NotSimulatedError(
        f"Simulated rank {rank} called torch.distributed.{name}, which raised {type(error).__name__}: {text} {TAKEN}"
    )
    refusal.__cause__ = error
    return refusal


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "")
