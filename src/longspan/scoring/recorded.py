"""Score functions in compiled code: recorded as text while the model is traced, with everything that they read.

A function is called once on one pair under a torch-function mode. Operations on the pair are recorded; operations on
anything else are the same for all pairs, so they stay in the surrounding graph, gradients included. A function that
cannot be recorded is refused: `Recorded.why` gives the reason.

This module is itself traced. It uses only plain lists, strings and `is`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from longspan._compile import assume_constant
from longspan._torch import higher_order_calls, inside_of_call, whole_graph
from longspan.errors import KernelError
from longspan.scoring.pipeline import Scoring, check_captured, dropout_of
from longspan.tile import accumulation_dtype

# -- A score function as text, which compiled code passes to the operator ----------------------------------------------
# A graph holds numbers, strings and tensors. So a score function becomes a text with one operation per line, and what
# it reads becomes arguments of the operator. The text means the same in any process (PyTorch keeps compiled graphs on
# disk), and nothing in it needs to be kept alive.
#
#     t5 = Tensor.sub(t3, t4)                t0 to t4 are score, b, h, q_idx and kv_idx
#     t6 = Tensor.__getitem__(c0, t2)        c: captured tensors, which get gradients; k: other tensors
#     t7 = Tensor.mul(t6, t5)                i: integers; f: other numbers
#     t8 = Tensor.sub(t0, t7)
#     return t8


SPACES: dict[str, Any] = {"Tensor": Tensor, "torch": torch, "functional": functional, "special": torch.special}
"""Namespaces of operations."""
Values = dict[str, Any]
Get = Callable[[Values], Any]


@dataclass(frozen=True)
class Operands:
    """The operands of a text: tensors that get gradients, other tensors, integers and other numbers."""

    captured: Sequence[Tensor] = ()
    constants: Sequence[Tensor] = ()
    numbers: Sequence[int] = ()
    reals: Sequence[float] = ()

    def by_name(self) -> Values:
        lists = ("c", self.captured), ("k", self.constants), ("i", self.numbers), ("f", self.reals)
        return {f"{letter}{at}": value for letter, values in lists for at, value in enumerate(values)}


@dataclass(frozen=True, eq=False)
class ScoreText:
    """A parsed text: its operations in order, dropout, and a bias."""

    lines: tuple[tuple[tuple[str, ...], Get], ...]
    """The names of an operation's results, and the function that computes them."""
    result: Get
    dropout: Get | None
    bias: str | None
    """The name of a tensor that must be as long as the sequence."""

    def function(self, operands: Operands) -> Callable[..., Tensor]:
        """Return the score function with these operands.

        >>> text = parse_text("t5 = Tensor.__getitem__(c0, t2)\\nt6 = Tensor.mul(t0, t5)\\nreturn t6")
        >>> scaled = text.function(Operands(captured=[torch.tensor([2.0, 3.0])]))
        >>> head = torch.tensor(1)
        >>> scaled(torch.tensor(5.0), head, head, head, head)
        tensor(15.)
        """
        known = operands.by_name()

        def run(*arguments: Tensor) -> Tensor:
            values = known | {f"t{i}": argument for i, argument in enumerate(arguments)}
            for names, compute in self.lines:
                result = compute(values)
                results = result if isinstance(result, tuple | list) else (result,)
                values.update(zip(names, results, strict=True))
            return self.result(values)

        return run


def scoring_of(text: str, operands: Operands, like: Tensor) -> Scoring:
    """Return the scoring of a text and its operands, for a call with tensors like this one."""
    score_text = parse_text(text)
    check_captured(operands.captured)
    dropout = None if score_text.dropout is None else dropout_of(*score_text.dropout(operands.by_name()))
    score = torch.zeros((), dtype=accumulation_dtype(like.dtype), device=like.device)
    function = score_text.function(operands)
    return Scoring((function,), tuple(operands.captured), dropout, like=score, is_mapped=True)


def bias_in(text: str, operands: Operands) -> Tensor | None:
    """Return the bias tensor, which must be as long as the sequence, or None."""
    name = parse_text(text).bias
    return None if name is None else operands.by_name()[name]


@lru_cache(maxsize=256)
def parse_text(text: str) -> ScoreText:
    """Parse a text.

    >>> parse_text("dropout(f0, i0)\\nreturn t0").dropout({"f0": 0.5, "i0": 7})
    (0.5, 7)
    """
    lines: list[tuple[tuple[str, ...], Get]] = []
    special: dict[str, Any] = {"dropout": None, "bias": None}
    *body, last = text.splitlines()
    for line in body:
        statement: Any = ast.parse(line).body[0]
        if isinstance(statement, ast.Expr):
            call: Any = statement.value
            special[call.func.id] = call.args
        else:
            target = statement.targets[0]
            names: list[Any] = target.elts if isinstance(target, ast.Tuple) else [target]
            lines.append((tuple(name.id for name in names), _getter(statement.value)))
    dropout = None if special["dropout"] is None else _getter(ast.Tuple(special["dropout"]))
    bias = None if special["bias"] is None else special["bias"][0].id
    return ScoreText(tuple(lines), _getter(ast.parse(last.removeprefix("return ")).body[0].value), dropout, bias)  # type: ignore[attr-defined]


def _getter(node: Any) -> Get:
    """Return the function from values of names to the value of an expression that `record` has written."""
    match node:
        case ast.Constant(value):
            return lambda _: value
        case ast.Name(name):
            return lambda values: values[name]
        case ast.Tuple(elts):
            parts = [_getter(part) for part in elts]
            return lambda values: tuple(part(values) for part in parts)
        case ast.List(elts):
            parts = [_getter(part) for part in elts]
            return lambda values: [part(values) for part in parts]
        case ast.Attribute(ast.Name("torch"), name) if isinstance(getattr(torch, name), torch.dtype):
            dtype = getattr(torch, name)
            return lambda _: dtype
        case ast.Call(ast.Name("slice"), args):
            bounds = [_getter(part) for part in args]
            return lambda values: slice(*(part(values) for part in bounds))
        case ast.Call(ast.Name("device"), [ast.Constant(name)]):
            device = torch.device(str(name))
            return lambda _: device
        case ast.Call(ast.Attribute(ast.Name(space), name), args, keywords):
            run = getattr(SPACES[space], name)
            positional = [_getter(part) for part in args]
            named = {str(keyword.arg): _getter(keyword.value) for keyword in keywords}
            return lambda values: run(
                *[part(values) for part in positional], **{key: part(values) for key, part in named.items()}
            )
    raise AssertionError(f"no part of a score function's text: {ast.dump(node)}")


# -- Recording ---------------------------------------------------------------------------------------------------------


RANDOM = ("rand", "randn", "randint", "randperm", "bernoulli", "normal", "multinomial", "poisson", "dropout", "rrelu")
VALUES = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__", "is_nonzero", "equal", "allclose")
"""Operations that return values of a tensor, on which code may branch."""
METADATA = ("dim", "ndimension", "numel", "nelement", "size", "is_floating_point", "is_complex", "element_size")
"""Operations that return metadata of a tensor."""


@dataclass
class Recorded:
    """A score function as text, and its operands; see `ScoreText`."""

    text: str = ""
    captured: list[Tensor] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    reals: list[float] = field(default_factory=list)
    why: str = ""
    """Why it cannot be compiled; "" if it can."""

    def name_of(self, tensor: Tensor) -> str:
        """Return the name of an operand in the text."""
        for letter, tensors in (("c", self.captured), ("k", self.constants)):
            for at, other in enumerate(tensors):
                if other is tensor:
                    return f"{letter}{at}"
        raise AssertionError("not an operand of this function")


class _Recorder(TorchFunctionMode):
    """Records operations on tensors that depend on the pair."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()
        self.inside = {argument: f"t{i}" for i, argument in enumerate(arguments)}
        """Tensors that depend on the pair, and their names."""
        self.outside: dict[Tensor, str] = {}
        """Tensors that do not, and that operations on the pair read, and their names."""
        self.created: dict[Tensor, bool] = {}
        """Tensors that do not, and that operations inside have created."""
        self.num_tensors = len(arguments)
        self.roots: list[Tensor] = []
        """Tensors that no recorded operation has created."""
        self.result = Recorded()
        self.lines: list[str] = []
        self.learns, self.compiling = torch.is_grad_enabled(), torch.compiler.is_compiling()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if inside_of_call():  # of an autograd.Function or torch.cond, which is refused; nothing may be recorded inside
            return func(*args, **kwargs)
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
                self.created[tensor] = True
            return result
        where = _place_of(func)
        if where == "":
            self.refuse(f"it uses {name}, which is not an operation of torch, torch.Tensor or torch.nn.functional")
            return func(*args, **kwargs)
        if _in_place(func) and not self._depends(args[:1]):
            self.refuse(f"it changes a tensor that it captured in place, by {name}")
        operands = [self.write_value(value) for value in args]
        operands += [f"{key}={self.write_value(value)}" for key, value in kwargs.items()]
        if name == "__getitem__":  # by 0: PyTorch would look at the index's value
            at = args[1] if isinstance(args[1], tuple) else (args[1],)
            result = func(args[0], tuple([0 if _is_index(i) else i for i in at]))
        else:
            result = func(*args, **kwargs)
        self._note(f"{where}({', '.join(operands)})", name, result)
        return result

    def refuse(self, why: str) -> None:
        self.result.why = self.result.why or why

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
        self.roots.extend([tensor for tensor in _tensors(values) if tensor not in self.created])

    def write_value(self, value: Any) -> str:
        """Return a value as it is written in the text."""
        if isinstance(value, Tensor):
            return self._tensor(value)
        if value is None or value is Ellipsis or isinstance(value, bool):
            return "..." if value is Ellipsis else str(value)
        if isinstance(value, int):
            self.result.numbers.append(value)
            return f"i{len(self.result.numbers) - 1}"
        if isinstance(value, float):
            self.result.reals.append(value)
            return f"f{len(self.result.reals) - 1}"
        if isinstance(value, tuple | list):
            parts = ", ".join([self.write_value(part) for part in value])
            return f"({parts}{',' if len(value) == 1 else ''})" if isinstance(value, tuple) else f"[{parts}]"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self.write_value, (value.start, value.stop, value.step)))})"
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
            kept = self.result.captured if tensor.requires_grad else self.result.constants
            self.outside[tensor] = f"{'c' if tensor.requires_grad else 'k'}{len(kept)}"
            kept.append(tensor)
        return self.outside[tensor]


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested values."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor] = []
    if isinstance(value, tuple | list):
        for part in value:
            tensors.extend(_tensors(part))
    return tensors


# Facts about an operation are constants of the graph.


@assume_constant
def _name(func: Any) -> str:
    return getattr(func, "__name__", type(func).__name__)


@assume_constant
def _is_random(func: Any) -> bool:
    return _name(func).removesuffix("_like").removesuffix("_") in RANDOM


@assume_constant
def _in_place(func: Any) -> bool:
    name = _name(func)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    return name.endswith("_")


@assume_constant
def _place_of(func: Any) -> str:
    """Return the name of an operation with its namespace, or "". The function that `**` calls has its method's name.

    >>> _place_of(torch.where), _place_of(Tensor.where), _place_of(Tensor.__pow__), _place_of(len)
    ('torch.where', 'Tensor.where', 'Tensor.__pow__', '')
    """
    for name in (_name(func), f"__{_name(func)}__", _name(func).removeprefix("special_")):
        for space, holder in SPACES.items():
            if getattr(holder, name, None) is func:
                return f"{space}.{name}"
    return ""


def _is_index(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0 and not value.is_floating_point() and value.dtype != torch.bool


ScoreMods = Sequence[Callable[..., Any]]


def record(functions: ScoreMods, score: Tensor) -> Recorded:
    """Record functions that run one after the other as a text, and what they read. `score` is any one score; it needs
    a gradient if scores do, so that PyTorch knows whether a custom backward matters.

    >>> slopes = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> recorded = record([lambda s, b, h, q, kv: s - slopes.exp()[h] * (q - kv)], torch.tensor(1.0))
    >>> print(recorded.text)
    t5 = Tensor.__getitem__(c0, t2)
    t6 = Tensor.sub(t3, t4)
    t7 = Tensor.mul(t5, t6)
    t8 = Tensor.sub(t0, t7)
    return t8
    >>> recorded.captured[0].equal(slopes.exp())
    True
    """
    if inside_of_call():
        return Recorded(
            why="it is inside of a call that takes a function, such as torch.utils.checkpoint, where PyTorch's compiler"
            " allows no torch-function mode: let the checkpoint be around the compiled part"
        )
    # Without autocast, as the operator runs them; with a graph break inside, only a part would be recorded.
    with torch.autocast(score.device.type, enabled=False), whole_graph():
        first, second = _record(functions, score), _record(functions, score)
    if first.result.why == "" and not _same_reads(first, second):
        first.refuse(
            "it reads something that every call creates without a recorded operation (an attribute like x.T, a loop"
            " over a tensor, torch.vmap), or does not do the same in every call"
        )
    return first.result


def _record(functions: ScoreMods, score: Tensor) -> _Recorder:
    dtype, score = score.dtype, score.clone()  # a function may work in place
    index = [torch.zeros((), dtype=torch.int64, device=score.device) for _ in range(4)]
    recorder, calls = _Recorder([score, *index]), higher_order_calls()
    with recorder:
        for function in functions:
            result = function(score, *index)
            if not isinstance(result, Tensor) or not result.is_floating_point() or result.ndim != 0:
                kind = f"{result.dtype}" if isinstance(result, Tensor) else type(result).__name__
                raise KernelError(
                    f"score_mod must return a floating-point tensor without dims for one pair, but it returned {kind}."
                    f" To hide pairs use a mask."
                )
            score = result if result.dtype == dtype else result.to(dtype)
    if higher_order_calls() != calls:
        recorder.refuse("it uses an autograd.Function, torch.cond or the like")
    recorder.lines.append(f"return {recorder.write_value(score)}")
    recorder.result.text = "\n".join(recorder.lines)
    return recorder


def _same_reads(first: _Recorder, second: _Recorder) -> bool:
    """Return whether both runs read the same values from outside. A tensor that is new in every run, without a
    recorded operation that created it, may depend on the pair."""
    if first.result.text != second.result.text or len(first.roots) != len(second.roots):
        return False
    numbers = zip(
        [*first.result.numbers, *first.result.reals], [*second.result.numbers, *second.result.reals], strict=True
    )
    pairs = zip(first.roots, second.roots, strict=True)
    return all(a == b or a != a for a, b in numbers) and all(a is b for a, b in pairs)
