"""A score function as text: what compiled code hands to the operator in place of a function.

A graph holds numbers, texts and tensors. So a score function becomes a text with one operation on a line, and what it
reads becomes arguments of the operator. The text means the same in any process (PyTorch keeps compiled graphs on disk),
and nothing in it needs to be kept alive.

    t5 = Tensor.sub(t3, t4)                t0 to t4 are score, b, h, q_idx and kv_idx
    t6 = Tensor.__getitem__(c0, t2)        c: captured tensors, which get gradients; k: other tensors
    t7 = Tensor.mul(t6, t5)                i: whole numbers; f: other numbers
    t8 = Tensor.sub(t0, t7)
    return t8
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longspan.execution.scoring.dropout import dropout_of
from longspan.execution.scoring.pipeline import ScoreFunction, Scoring
from longspan.execution.tile import wide
from longspan.masks.functions.elementwise import elementwise

SPACES: dict[str, Any] = {"Tensor": Tensor, "torch": torch, "functional": functional, "special": torch.special}
"""Where operations are found by name."""
NUM_ARGUMENTS = 5
Values = dict[str, Any]
Get = Callable[[Values], Any]


@dataclass(frozen=True)
class Operands:
    """What a text reads: tensors that get gradients, other tensors, whole numbers and other numbers."""

    captured: Sequence[Tensor] = ()
    constants: Sequence[Tensor] = ()
    numbers: Sequence[int] = ()
    reals: Sequence[float] = ()

    def named(self) -> Values:
        lists = ("c", self.captured), ("k", self.constants), ("i", self.numbers), ("f", self.reals)
        return {f"{letter}{at}": value for letter, values in lists for at, value in enumerate(values)}


@dataclass(frozen=True, eq=False)
class ScoreText:
    """A text that was read: its operations in order, and what else it asks for."""

    lines: tuple[tuple[tuple[str, ...], Get], ...]
    """The names of an operation's results, and what works them out."""
    result: Get
    dropout: Get | None
    bias: str | None
    """The name of a tensor that must be as long as the sequence."""

    def function(self, operands: Operands) -> Callable[..., Tensor]:
        """The score function with these operands.

        >>> text = parsed("t5 = Tensor.__getitem__(c0, t2)\\nt6 = Tensor.mul(t0, t5)\\nreturn t6")
        >>> scaled = text.function(Operands(captured=[torch.tensor([2.0, 3.0])]))
        >>> head = torch.tensor(1)
        >>> scaled(torch.tensor(5.0), head, head, head, head)
        tensor(15.)
        """
        known = operands.named()

        def run(*arguments: Tensor) -> Tensor:
            values = known | {f"t{i}": argument for i, argument in enumerate(arguments)}
            for names, work_out in self.lines:
                found = work_out(values)
                results = found if isinstance(found, tuple | list) else (found,)
                if len(results) != len(names):  # on a tile, unlike on a pair
                    raise RuntimeError(f"{len(names)} results were expected, and there are {len(results)}")
                values.update(zip(names, results, strict=True))
            return self.result(values)

        return run

    def scoring(self, operands: Operands, like: Tensor) -> Scoring:
        """All that happens to scores, for a call with tensors like this one."""
        dropout = None if self.dropout is None else dropout_of(*self.dropout(operands.named()))
        score = torch.zeros((), dtype=wide(like.dtype), device=like.device)
        return Scoring((_OfText(self, operands),), tuple(operands.captured), dropout, like=score)


class _OfText(ScoreFunction):
    """A score function that was a text. What is known about it belongs to the text, which calls share."""

    def __init__(self, text: ScoreText, operands: Operands) -> None:
        self.text, self.operands = text, operands
        self.elementwise = elementwise(text, text.function(operands))  # type: ignore[arg-type]


def scoring_of(text: str, operands: Operands, like: Tensor) -> Scoring:
    """What happens to scores, said by a text and its operands."""
    return _read(text, operands).scoring(operands, like)


def bias_in(text: str, operands: Operands) -> Tensor | None:
    """The tensor that must be as long as the sequence; None without one."""
    name = _read(text, operands).bias
    return None if name is None else operands.named()[name]


def _read(text: str, operands: Operands) -> ScoreText:
    return parsed(text, tuple(t.ndim for t in (*operands.captured, *operands.constants)))


@lru_cache(maxsize=256)
def parsed(text: str, dims: tuple[int, ...] = ()) -> ScoreText:  # noqa: ARG001
    """The text, read. Texts of tensors with other dims are others: how one is called on tiles may depend on them.

    >>> parsed("dropout(f0, i0)\\nreturn t0").dropout({"f0": 0.5, "i0": 7})
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
    """What an expression stands for, given the values of its names. Nothing but what `record` writes is known."""
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
            given = [_getter(part) for part in args]
            named = {str(keyword.arg): _getter(keyword.value) for keyword in keywords}
            return lambda values: run(
                *[part(values) for part in given], **{key: part(values) for key, part in named.items()}
            )
    raise AssertionError(f"no part of a score function's text: {ast.dump(node)}")
