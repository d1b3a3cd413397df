"""What a step's time means: tokens per second, the share of a machine's peak, and money."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.sizing.modules import Heads, ModelSizes
from longspan.sizing.seconds import AttentionSeconds

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step of so many tokens on so many GPUs.

    1,000 tokens in 2 seconds on 4 GPUs of 1 PFLOP/s, 2e15 operations in all; an hour of a GPU costs 3.60, so that all
    of them cost 0.004 a second:

    >>> cost = StepCost(gpus=4, tokens=1000, seconds=2.0, flop=2e15, peak=1e15)
    >>> cost.tokens_per_second, cost.tokens_per_second_per_gpu, cost.mfu
    (500.0, 125.0, 0.25)
    >>> round(cost.per_billion(3.60), 2)
    8000.0
    """

    gpus: int
    tokens: int
    seconds: float
    flop: float
    """Of the model, on all GPUs together, without what is computed again."""
    peak: float
    """Of one GPU, a second."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP utilisation: operations a second that the model needs, as a share of peak."""
        return self.flop / (self.seconds * self.gpus * self.peak)

    def per_billion(self, price: float) -> float:
        """What a billion tokens cost, where an hour of a GPU costs `price`."""
        if not math.isfinite(price) or price <= 0:
            raise PlanError(f"a price of {price!r} an hour was given. Give what an hour of one GPU costs, above 0.")
        return self.gpus * price * self.seconds / HOUR / self.tokens * 1e9


def model_flop(sizes: ModelSizes, tokens: int, seconds: Mapping[Heads, AttentionSeconds], ranks: int) -> float:
    """Operations that a step needs: 6 for each token and parameter that it meets, and three times attention's forward
    pass, of pairs that the mask has; as published figures of utilisation are counted."""
    attention = sum(number * seconds[heads].flop for heads, number in sizes.attentions.items())
    return 6.0 * sizes.active_params * tokens + 3.0 * attention * ranks
