"""A recurrence of a user's own: two functions of one segment's tokens, called segment by segment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.execution.scans.contract import Recurrence, ScanKernel, ScanWork

Local = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class OwnRecurrence(Recurrence):
    """`local(*tokens, state)` gives output and state of one segment of one batch row, `summary(*tokens)` M and U."""

    local: Local
    summary: Callable[..., Any]
    state: tuple[int, int, int]
    maps: tuple[int, int, int]
    is_dense: bool
    parameters: tuple[Tensor, ...] = ()
    name = "scan"

    @property
    def captured(self) -> tuple[Tensor, ...]:
        return self.parameters

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:  # noqa: ARG002
        return self.state

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:  # noqa: ARG002
        return self.maps

    def __repr__(self) -> str:
        functions = [getattr(f, "__qualname__", type(f).__name__) for f in (self.local, self.summary)]
        return f"scan({', '.join(functions)})"


class OwnKernel(ScanKernel):
    """Calls the user's functions on each segment."""

    name = "own"

    def why_not(self, work: ScanWork) -> str | None:
        return None if isinstance(work.recurrence, OwnRecurrence) else "it runs functions of ls.scan only"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        recurrence = _own(work)
        outs: list[tuple[tuple[int, int, int], Tensor]] = []
        leaving: list[Tensor] = []
        for (row, start, stop), state in zip(work.segments.table.tolist(), states, strict=True):
            part = [x[row, start:stop] for x in work.tokens]
            out, after = _pair(recurrence.local(*part, state), "local(...) must return output and state")
            _check(out, (stop - start,), "local(...) must return an output with one row for each token")
            _check(after, recurrence.state, "local(...) must return a state of shape")
            outs.append(((row, start, stop), out))
            leaving.append(after.to(states.dtype))
        if not outs:  # a rank without tokens asks what an output looks like
            none = recurrence.local(*(x[0, :0] for x in work.tokens), states.new_zeros(recurrence.state))
            empty, _ = _pair(none, "local(...) must return output and state, also of no tokens")
            _check(empty, (0,), "local(...) must return an output with one row for each token, also of no tokens:")
            return empty.new_zeros((*work.tokens[0].shape[:2], *empty.shape[1:])), states
        return _placed(outs, work), torch.stack(leaving)

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        recurrence, dtype = _own(work), work.recurrence.state_dtype(work.tokens)
        found: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for row, start, stop in work.segments.table.tolist():
                both = recurrence.summary(*(x[row, start:stop] for x in work.tokens))
                m, u = _pair(both, "summary(...) must return M and U")
                _check(m, recurrence.maps, "summary(...) must return M of shape")
                _check(u, recurrence.state, "summary(...) must return U of shape")
                found.append((m.to(dtype), u.to(dtype)))
        if not found:
            like = work.tokens[0].new_empty((0,), dtype=dtype)
            return like.view(0, *recurrence.maps), like.view(0, *recurrence.state)
        return torch.stack([m for m, _ in found]), torch.stack([u for _, u in found])


def _own(work: ScanWork) -> OwnRecurrence:
    assert isinstance(work.recurrence, OwnRecurrence)
    return work.recurrence


def _pair(found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 2:
        given = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
        raise KernelError(f"{what}, but {given} was returned.")
    return found[0], found[1]


def _check(found: Any, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(found, Tensor) or tuple(found.shape[: len(shape)]) != shape:
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise KernelError(f"{what} {shape}, but {given} was returned.")


def _placed(outs: list[tuple[tuple[int, int, int], Tensor]], work: ScanWork) -> Tensor:
    """Outputs of segments in their slots; slots of padding are 0."""
    batch, slots = work.tokens[0].shape[:2]
    whole = outs[0][1].new_zeros((batch, slots, *outs[0][1].shape[1:]))
    rows = [torch.full((stop - start,), row) for (row, start, stop), _ in outs]
    places = [torch.arange(start, stop) for (_, start, stop), _ in outs]
    at = tuple(torch.cat(parts).to(whole.device) for parts in (rows, places))
    return whole.index_put(at, torch.cat([out for _, out in outs]))
