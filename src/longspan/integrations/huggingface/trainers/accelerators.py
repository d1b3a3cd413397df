"""The accelerator as TRL's trainers see it, where ranks hold parts of one sequence.

TRL counts processes: it divides by them, cuts gathered rewards by the number of its own one, and gathers metrics from
all. Ranks of one sequence all have the same samples, so to TRL they are one process: with 8 ranks and 4 parts a
sequence there are two of them, and rank 5 is number 1. What wraps and runs models stays accelerate's, over all ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.integrations.huggingface.accelerate import Ranks


class _Delegate:
    """An accelerator that answers some questions differently, and shares everything else with the real one."""

    def __init__(self, real: Any, ranks: Ranks) -> None:
        vars(self).update(real=real, ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)


class SequenceAccelerator(_Delegate):
    """Ranks of one sequence as one process."""

    real: Any
    ranks: Ranks

    @property
    def num_processes(self) -> int:
        return 1 if self.ranks.dp is None else self.ranks.dp.size()

    @property
    def process_index(self) -> int:
        return 0 if self.ranks.dp is None else self.ranks.dp.get_local_rank()

    def gather(self, data: Any) -> Any:
        return each_once(self.real.gather(data), self.ranks)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """As `gather`; where a last batch was filled up with samples of the first, these are left out."""
        if use_gather_object:
            return self.real.gather_for_metrics(data, use_gather_object)
        state, found = self.real.gradient_state, self.gather(data)
        if state.end_of_dataloader and state.remainder > 0:
            return _first(found, state.remainder)
        return found

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if not isinstance(data, Tensor):
            return type(data)(self.reduce(item, reduction, scale) for item in data)
        if self.ranks.dp is None:
            return data
        total = data.clone()
        dist.all_reduce(total, group=self.ranks.dp.get_group())
        return total * (scale / self.num_processes if reduction == "mean" else scale)


class PartsAccelerator(_Delegate):
    """For trainers that add up what each rank says of its part: nothing is left out where a last batch was filled up,
    since what is gathered belongs to ranks, not to samples."""

    real: Any

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            return self.real.gather_for_metrics(data, use_gather_object)
        return self.real.gather(data)


def each_once(gathered: Any, ranks: Ranks) -> Any:
    """What was gathered from all ranks, in their order, without repetition: that of the first rank of each sequence.

    A list of objects, or tensors with one row or more a rank; 4 ranks in pairs, two rows each: rows 0, 1 and 4, 5 stay.
    """
    if isinstance(gathered, tuple):
        return tuple(each_once(item, ranks) for item in gathered)
    if isinstance(gathered, dict):
        return {name: each_once(item, ranks) for name, item in gathered.items()}
    samples = 1 if ranks.dp is None else ranks.dp.size()
    rows = len(gathered) // (samples * ranks.cp.size())
    starts = [n * ranks.cp.size() * rows for n in range(samples)]
    kept = [gathered[start : start + rows] for start in starts]
    return torch.cat(kept) if isinstance(gathered, Tensor) else [item for part in kept for item in part]


def _first(data: Any, number: int) -> Any:
    if isinstance(data, tuple | list):
        return type(data)(_first(item, number) for item in data)
    return data[:number]
