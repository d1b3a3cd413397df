"""Score functions in compiled code: recorded as text while the model is traced, with all that they read.

A function is called once on one pair under a torch-function mode. Operations on the pair are written down; operations
on anything else mean the same for all pairs, so they are left to the graph around, gradients included. What cannot be
written down is refused: `Recorded.why` says why.

This module is traced itself. It keeps to plain lists, texts and `is`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from longspan.errors import KernelError
from longspan.execution._torch_compiler import higher_order_calls, inside_of_call, whole_graph
from longspan.execution.scoring.score_text import SPACES

RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "dropout", "rrelu")
VALUES = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose")
"""Operations that tell what is in a tensor, which code then goes by."""
METADATA = ("dim", "ndimension", "numel", "nelement", "size", "is_floating_point", "is_complex", "element_size")
"""Operations that tell what a tensor is like, not what is in it."""


@dataclass
class Recorded:
    """A score function as text and what it reads; see `score_text`."""

    text: str = ""
    captured: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    reals: list[float] = field(default_factory=list)
    why: str = ""
    """Why it cannot be compiled; "" if it can."""

    def name_of(self, tensor: Tensor) -> str:
        """A tensor that it reads, as the text has it."""
        for letter, tensors in (("c", self.captured), ("k", self.constants)):
            for at, other in enumerate(tensors):
                if other is tensor:
                    return f"{letter}{at}"
        raise AssertionError("no tensor of this function")


class _Recorder(TorchFunctionMode):
    """Writes down what happens to tensors that depend on the pair."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.inside = {argument: f"t{i}" for i, argument in enumerate(arguments)}
        """Tensors that depend on the pair, and their names."""
        self.outside: dict[Tensor, str] = {}
        """Tensors that do not, and that operations on the pair read."""
        self.made: dict[Tensor, bool] = {}
        """Tensors that do not, and that operations inside have made."""
        self.num_tensors = len(arguments)
        self.roots: list[Tensor] = []
        """Tensors that nothing inside was seen to make."""
        self.found = Recorded()
        self.lines: list[str] = []
        self.learns, self.compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if torch.compiler.is_compiling() is not self.compiling:
            self.refuse("PyTorch's compiler ends the graph inside of it")
        if _is_random(func):
            self.refuse(f"it draws random numbers by {name}")
        if not self._depends(args) and not self._depends(list(kwargs.values())):
            if name in VALUES:
                self.refuse(f"it looks at values, by {name}")
            if _in_place(func):
                self.refuse(f"it changes a tensor that it captured in place, by {name}")
            self._note_roots(args)
            self._note_roots(list(kwargs.values()))
            result = func(*args, **kwargs)
            for tensor in _tensors(result):
                self.made[tensor] = True
            return result
        where = _place_of(func)
        if where == "":
            self.refuse(f"it uses {name}, which is not an operation of torch, torch.Tensor or torch.nn.functional")
            return func(*args, **kwargs)
        if _in_place(func) and not self._depends(args[:1]):
            self.refuse(f"it changes a tensor that it captured in place, by {name}")
        given = [self.written(value) for value in args]
        given += [f"{key}={self.written(value)}" for key, value in kwargs.items()]
        result = _example(name, func, args, kwargs)
        self._note(f"{where}({', '.join(given)})", name, result)
        return result

    def refuse(self, why: str) -> None:
        self.found.why = self.found.why or why

    def _note(self, call: str, name: str, result: Any) -> None:
        results = _tensors(result)
        if len(results) == 0:
            if name not in METADATA:
                self.refuse(f"it looks at values, by {name}")
            return
        numbers = [f"t{self.num_tensors + i}" for i in range(len(results))]
        self.num_tensors += len(results)
        for tensor, number in zip(results, numbers, strict=True):
            self.inside[tensor] = number
        self.lines.append(f"{', '.join(numbers)} = {call}")
        if self.learns and not torch.is_grad_enabled():
            self.lines.extend([f"{number} = Tensor.detach({number})" for number in numbers])

    def _depends(self, values: Any) -> bool:
        return any(tensor in self.inside for tensor in _tensors(values))

    def _note_roots(self, values: Any) -> None:
        self.roots.extend([tensor for tensor in _tensors(values) if tensor not in self.made])

    def written(self, value: Any) -> str:
        """A value as the text has it."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if value is None or value is Ellipsis or isinstance(value, bool):
            return "..." if value is Ellipsis else str(value)
        if isinstance(value, int):
            self.found.numbers.append(value)
            return f"i{len(self.found.numbers) - 1}"
        if isinstance(value, float):
            self.found.reals.append(value)
            return f"f{len(self.found.reals) - 1}"
        if isinstance(value, tuple | list):
            parts = ", ".join([self.written(part) for part in value])
            return f"({parts}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{parts}]"
        if isinstance(value, slice):
            return f"slice({self.written(value.start)}, {self.written(value.stop)}, {self.written(value.step)})"
        if isinstance(value, torch.dtype):
            return f"{value}"
        if isinstance(value, torch.device):
            return f"device('{value}')"
        if isinstance(value, str):
            return f"'{value}'"
        self.refuse(f"it hands {type(value).__name__} to an operation")
        return "None"

    def _tensor(self, tensor: Tensor) -> str:
        if tensor in self.inside:
            return self.inside[tensor]
        if tensor not in self.outside:
            self._note_roots(tensor)
            kept = self.found.captured if tensor.requires_grad else self.found.constants
            self.outside[tensor] = f"{'c' if tensor.requires_grad else 'k'}{len(kept)}"
            kept.append(tensor)
        return self.outside[tensor]


def _tensors(value: Any) -> list[Tensor]:
    """Tensors in nested values."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, tuple | list):
        for part in value:
            found.extend(_tensors(part))
    return found


# What is asked about an operation is a constant of the graph.


@torch.compiler.assume_constant_result
def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


@torch.compiler.assume_constant_result
def _is_random(func: Any) -> bool:
    return _name(func).removesuffix("_like").removesuffix("_") in RANDOM


@torch.compiler.assume_constant_result
def _in_place(func: Any) -> bool:
    name = _name(func)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


@torch.compiler.assume_constant_result
def _place_of(func: Any) -> str:
    """Where the operation is found, "" if nowhere. What `**` calls is named like the method that it wraps.

    >>> _place_of(torch.where), _place_of(Tensor.where), _place_of(Tensor.__pow__), _place_of(len)
    ('torch.where', 'Tensor.where', 'Tensor.__pow__', '')
    """
    for name in (_name(func), f"__{_name(func)}__", _name(func).removeprefix("special_")):
        for space, holder in SPACES.items():
            if getattr(holder, name, None) is func:
                return f"{space}.{name}"
    return ""


def _example(name: str, func: Any, args: Any, kwargs: Any) -> Any:
    """The operation's result for one pair, whichever: PyTorch would look at the number to index by it."""
    if name != "__getitem__":
        return func(*args, **kwargs)
    at = args[1] if isinstance(args[1], tuple) else (args[1],)
    return func(args[0], tuple([0 if _is_index(i) else i for i in at]))


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool


ScoreMods = Sequence[Callable[..., Any]]


def record(functions: ScoreMods, score: Tensor) -> Recorded:
    """The functions, one after the other, as a text, and what they read. `score` is any one score; it needs a gradient
    where scores do, by which PyTorch tells whether a backward of the user's own matters.

    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> found = record([lambda s, b, h, q, kv: s - slopes.exp()[h] * (q - kv)], torch.tensor(1.0))
    >>> print(found.text)
    t5 = Tensor.__getitem__(c0, t2)
    t6 = Tensor.sub(t3, t4)
    t7 = Tensor.mul(t5, t6)
    t8 = Tensor.sub(t0, t7)
    return t8
    >>> found.captured[0].equal(slopes.exp())
    True
    """
    if inside_of_call():
        return Recorded(
            why="it is inside of a call that takes a function, such as torch.utils.checkpoint, where PyTorch's compiler"
            " allows no torch-function mode: let the checkpoint be around the compiled part"
        )
    # as the operator runs them; a graph that ended inside would be recorded in part
    with torch.autocast(score.device.type, enabled=False), whole_graph():
        first, second = _recorded(functions, score), _recorded(functions, score)
    if first.found.why == "" and not _same_reads(first, second):
        first.refuse(
            "it reads something that is made anew in every call in a way that is not seen (an attribute like x.T, a"
            " loop over a tensor, torch.vmap), or does not do the same in every call"
        )
    return first.found


def _recorded(functions: ScoreMods, score: Tensor) -> _Recorder:
    dtype, score = score.dtype, score.clone()  # a function may work in place
    index = [torch.zeros((), dtype=torch.int64, device=score.device) for _ in range(4)]
    recorder, calls = _Recorder([score, *index]), higher_order_calls()
    with recorder:
        for function in functions:
            result = function(score, *index)
            if not isinstance(result, Tensor) or not result.is_floating_point() or result.ndim != 0:
                kind = f"{result.dtype}" if isinstance(result, Tensor) else type(result).__name__
                raise KernelError(
                    f"score_mod was called on one pair and returned {kind}. It must return a floating-point tensor of"
                    f" no dims: a score. To hide pairs use a mask."
                )
            score = result if result.dtype == dtype else result.to(dtype)
    if higher_order_calls() != calls:
        recorder.refuse("it uses an autograd.Function, torch.cond or the like")
    recorder.lines.append(f"return {recorder.written(score)}")
    recorder.found.text = "\n".join(recorder.lines)
    return recorder


def _same_reads(first: _Recorder, second: _Recorder) -> bool:
    """Whether all that comes from outside is the same in both runs. What is new in every run, and nothing was seen to
    make, may depend on the pair without having been written down."""
    if first.found.text != second.found.text or len(first.roots) != len(second.roots):
        return False
    numbers = zip([*first.found.numbers, *first.found.reals], [*second.found.numbers, *second.found.reals], strict=True)
    pairs = zip(first.roots, second.roots, strict=True)
    return all(a == b or a != a for a, b in numbers) and all(a is b for a, b in pairs)
