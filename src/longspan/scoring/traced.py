"""Functions of single numbers as graphs, for kernels that run them inside: score functions and mask functions.

Every tensor that a function uses becomes an argument of its graph, so that functions with equal code share one graph,
and gradients of captured tensors are returned by argument.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from longspan import _torch
from longspan.errors import KernelError


def key_of(graph: GraphModule) -> tuple[object, ...]:
    """Return the code of a graph and its constants; graphs with equal keys are equal."""
    constants = [(name, getattr(graph, name)) for name in sorted(vars(graph)) if name.startswith("_tensor_constant")]
    constants += sorted(graph.named_buffers(), key=lambda item: item[0])
    return graph.code, *((name, str(value.dtype), str(value.tolist())) for name, value in constants)


@dataclass(frozen=True, eq=False)
class Program:
    """A function of single numbers as a graph of (numbers, given tensors, tensors that it uses)."""

    function: Callable[..., Tensor]
    examples: tuple[Tensor, ...]
    """An example of every argument of the graph."""
    num_given: int
    used: tuple[Tensor | int, ...]
    """Tensors from outside; for captured ones, their number."""

    @cached_property
    def graph(self) -> GraphModule:
        return _trace_or_refuse(lambda: _torch.trace_function(self.function, [x.detach() for x in self.examples]))

    @cached_property
    def key(self) -> tuple[object, ...]:
        return key_of(self.graph)

    @cached_property
    def gradient(self) -> GraphModule:
        """The graph (score, b, h, i, j, gradient, buffers) -> gradients; those of captured tensors by index only."""
        graph = _trace_or_refuse(lambda: _torch.trace_gradient(self.function, self.examples, 4))
        if False in _torch.adds_by_index(graph):
            raise KernelError(
                "kernel 'flex' adds gradients of captured tensors up by index, but the score function uses one of them"
                " as a whole. Take elements out of it, as in table[h], and compute with those, or use"
                " kernel='reference'."
            )
        return graph

    @cached_property
    def why_not(self) -> str | None:
        """The error of tracing, or None."""
        return _refusal_of(lambda: self.graph)

    @cached_property
    def why_no_gradient(self) -> str | None:
        """The error of tracing the function or its gradient, or None."""
        return self.why_not or _refusal_of(lambda: self.gradient)

    def values(self, given: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor]:
        """Return the arguments of the graph after the numbers."""
        assert len(given) == self.num_given
        return [*given, *(_element(captured[use]) if isinstance(use, int) else use for use in self.used)]

    def mark_differentiable(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return these arguments, with requires_grad set for those that get a gradient."""
        kinds = _torch.adds_by_index(self.gradient)
        return [x if kind is None else x.detach().requires_grad_() for x, kind in zip(values, kinds, strict=True)]

    def captured_gradients(self, gradients: Sequence[Tensor | None]) -> Iterator[tuple[int, Tensor]]:
        """Yield (number of a captured tensor, gradient) from the gradients of all arguments after the numbers."""
        for use, gradient in zip(self.used, gradients[self.num_given :], strict=True):
            if isinstance(use, int) and gradient is not None:
                yield use, gradient


def _element(captured: Tensor) -> Tensor:
    """Return a tensor without dims as one of one element: gradients are added by index."""
    return captured.detach().view(1) if captured.ndim == 0 else captured.detach()


def _trace_or_refuse(trace: Callable[[], GraphModule]) -> GraphModule:
    try:
        with torch.no_grad():
            return trace()
    except KernelError:
        raise
    except Exception as error:  # whatever the user's function raises when it cannot be traced
        why = next(iter(str(error).splitlines()), type(error).__name__).rstrip(". ")
        raise KernelError(
            f"kernel 'flex' runs functions inside a kernel, so they are traced with single numbers in tensors, but"
            f" tracing one failed: {why}. Write it with tensor operations and without looking at values, or use"
            f" kernel='reference'."
        ) from error


def _refusal_of(trace: Callable[[], GraphModule]) -> str | None:
    try:
        trace()
    except KernelError as error:
        return str(error)
    return None


def program(
    function: Callable[..., Tensor],
    numbers: tuple[Tensor, ...],
    given: tuple[Tensor, ...],
    captured: Sequence[Tensor] = (),
    trial: tuple[Tensor, ...] | None = None,
) -> Program:
    """Return the program of a function (numbers, given tensors); `trial` are arguments to find the tensors it uses."""
    device, order = (*numbers, *given)[0].device, {id(t): i for i, t in enumerate(captured)}
    trial = (*numbers, *given) if trial is None else trial
    finder = Outside(trial, None, order)
    try:
        with torch.no_grad(), _torch.indexing(), finder:
            function(*trial)
    except KernelError:
        raise
    except Exception:  # noqa: S110  # tracing raises it again, with advice
        pass
    used = tuple(order[id(t)] if id(t) in order else t.detach().to(device) for t in finder.used)
    examples = tuple(_element(captured[use]).requires_grad_() if isinstance(use, int) else use for use in used)
    size = len(numbers) + len(given)

    def swapped(*arguments: Tensor) -> Tensor:
        with _torch.indexing(), Outside(arguments[:size], list(zip(finder.used, arguments[size:], strict=True)), order):
            return function(*arguments[:size])

    return Program(swapped, (*numbers, *given, *examples), len(given), used)


def _plain(func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
    """Call an operation in a form that kernels have for single numbers: without constant tensors in the code, and
    without expanding a number."""
    if func is torch.tensor and isinstance(args[0], bool | int | float):
        dtype = kwargs.get("dtype") or torch.tensor(args[0]).dtype
        return torch.full((), args[0], dtype=dtype, device=kwargs.get("device") or device)
    if func is Tensor.__getitem__:
        table, at = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
        if any(isinstance(i, Tensor) for i in at) or table.ndim == len(at):
            at = tuple(torch.full((), i, device=table.device) if type(i) is int else i for i in at)
        return func(table, at)
    result = func(*args, **kwargs)
    return args[0] if func is Tensor.expand and result.shape == args[0].shape else result


class Outside(TorchFunctionMode):
    """Finds the tensors from outside that a function uses, or replaces them: `others` are pairs of both.

    Every use of a captured tensor counts as another one: PyTorch takes gradients of one index for each. A tensor
    without a replacement stays: the trial on another device did not see it if it was only moved to a device.
    """

    def __init__(
        self, arguments: Sequence[Tensor], others: Sequence[tuple[Tensor, Tensor]] | None, captured: dict[int, int]
    ) -> None:
        super().__init__()
        self.used: list[Tensor] = []
        self._finds, self._captured, self._device = others is None, captured, arguments[0].device
        self._inside = {id(t): t for t in arguments}  # kept, so that an id is not used again
        self._others: dict[int, list[Tensor]] = {}
        for tensor, other in others or ():
            self._others.setdefault(id(tensor), []).append(other)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") == "__get__" and not isinstance(value := func(*args, **kwargs), Tensor):
            return value  # a shape or the like: its values are not used
        args, kwargs = _torch.tree_map(self._take, (args, kwargs))
        result = _plain(func, args, kwargs, self._device)
        _torch.tree_map(self._add_inside, result)
        return result

    def _add_inside(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self._inside[id(value)] = value

    def _take(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or id(value) in self._inside:
            return value
        if self._finds:
            if id(value) in self._captured or not any(value is known for known in self.used):
                self.used.append(value)
            return value
        others = self._others.get(id(value))
        if others is None:
            return value
        other = others.pop(0) if id(value) in self._captured else others[0]
        return _plain(Tensor.__getitem__, (other, 0), {}, self._device) if other.ndim > value.ndim else other
