"""How far rounding may take a right answer: measured, by playing rounding at random, and never guessed.

The reference runs again in float64 with every number that a careful implementation rounds moved by up to one rounding
of its dtype. Inputs that are hard (large scores, cancellation, long sums) get what they need, easy ones no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.execution.tile import wide
from longspan.verification.report import Check

TOTAL, ROW = 4.0, 16.0
"""Budgets over the measured effect of one rounding: of a whole tensor (its norm), and of the worst single row.

Chosen from right runs: 300 random ones in four dtypes used at most 0.33 of their budgets, 80 with scores of hundreds to
thousands in float32 at most 0.52. A single row has few numbers, so chance does not average out.
"""
SAMPLES = 5


@dataclass(frozen=True)
class Budget:
    """What a tensor may be off by: in all, and row by row along its tokens (None without tokens)."""

    total: float
    rows: Tensor | None


def unit(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding."""
    return torch.finfo(dtype).eps / 2


def units(dtype: torch.dtype) -> tuple[float, float]:
    """One rounding of the tensors, and of statistics and sums."""
    return unit(dtype), unit(wide(dtype))


def budgets(
    truth: dict[str, Tensor], played: Sequence[dict[str, Tensor]], dim: int | None, smallest: float, factor: float
) -> dict[str, Budget]:
    """The budget of every tensor from samples of the truth with rounding; `dim` counts tokens.

    `smallest` is a relative error below which nothing is told apart.
    """
    by_name: dict[str, Budget] = {}
    for name, right in truth.items():
        squares = torch.stack([_squares(sample[name], right) for sample in played]).mean(0)
        floor = smallest * float(_finite(right).norm()) + 1e-300
        total = factor * (TOTAL * float(squares.sum().sqrt()) + floor)
        rows = None
        if dim is not None and right.ndim > dim:
            by_row = _by_row(squares, dim)
            least = (by_row.mean() / 8).clamp(min=0)  # a row that is 0 by cancellation still shares its neighbours'
            rows = factor * (ROW * torch.maximum(by_row, least).sqrt() + floor)
        by_name[name] = Budget(total, rows)
    return by_name


def compared(found: Tensor, right: Tensor, budget: Budget, name: str, dim: int = 2) -> tuple[Check, Tensor | None]:
    """The check, and each row's error over its budget; what is not finite on one side only is infinitely far off."""
    squares = _squares(found, right)
    error = float(squares.sum().sqrt())
    check = Check(name, error, budget.total)
    if budget.rows is None:
        return check, None
    rows = _by_row(squares, dim).sqrt()
    ratio = torch.where(rows > 0, rows / budget.rows, torch.zeros_like(rows)).nan_to_num(torch.inf, posinf=torch.inf)
    if check.ratio <= 1 < float(ratio.max() if ratio.numel() else 0):  # one row is wrong, too few to show in the norm
        worst = int(ratio.argmax())
        check = Check(name, float(rows[worst]), float(budget.rows[worst]))
    return check, ratio


def play(run: Callable[[int], dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """A few samples of the truth with rounding."""
    return [run(number) for number in range(SAMPLES)]


def _finite(x: Tensor) -> Tensor:
    return x[x.isfinite()]


def _squares(found: Tensor, right: Tensor) -> Tensor:
    """Squared differences; infinite where one is not finite and the other is not the same."""
    found, right = found.double(), right.double()
    same = (found == right) | (found.isnan() & right.isnan())
    difference = torch.where(same, torch.zeros_like(right), found - right)
    return difference.square().nan_to_num(torch.inf, posinf=torch.inf)


def _by_row(squares: Tensor, dim: int) -> Tensor:
    return squares.movedim(dim, 0).flatten(1).sum(1)
