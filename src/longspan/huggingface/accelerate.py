"""Which ranks get the same batch, for Hugging Face's accelerate and for TRL's trainers.

`split_sequences` tells an `Accelerator` that ranks of one sequence load the same batch. TRL also counts processes: it
divides by them and gathers metrics from all. Ranks of one sequence have the same samples, so TRL sees them as one
process: with 8 ranks and 4 of them per sequence there are two processes, and rank 5 belongs to process 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan import _torch
from longspan.training import BatchError

# -- Kinds of TRL trainers ---------------------------------------------------------------------------------------------


PLAIN, PARTS, SCORES, DISTILLS = "plain", "parts", "scores", "distills"
WHOLE = (SCORES, DISTILLS)
"""Trainers that are handed whole sequences: what they call goes over ranks, not what they are called with."""
KINDS = {
    "SFTTrainer": PARTS,
    "DPOTrainer": SCORES,
    "GRPOTrainer": SCORES,
    "RLOOTrainer": SCORES,
    "DistillationTrainer": DISTILLS,
}
"""How the loss is computed: of a rank's part; from numbers of all tokens; by a divergence of a rank's tokens."""


def kind_of(trainer: type) -> str:
    """The way that a trainer's loss is computed over ranks; a trainer of TRL that is not known is refused.

    >>> kind_of(object)
    'plain'
    """
    own = [base for base in trainer.__mro__ if base.__module__.split(".")[0] == "trl" and "compute_loss" in vars(base)]
    for base in trainer.__mro__:
        if base.__module__.startswith("trl.") and base.__name__ in KINDS:
            return KINDS[base.__name__]
    if own:
        raise BatchError(
            f"{own[0].__name__} of TRL has a loss of its own, and nobody has looked at what it computes over ranks."
            f" Those that train on split sequences are {', '.join(KINDS)}; or write its loss in a loop of your own,"
            f" with longspan.training."
        )
    return PLAIN


# Ranks of an `accelerate.Accelerator`: which of them hold parts of one sequence, and which other samples.
# Accelerate has no place for another kind of context parallelism, but its data loaders look at the mesh in
# `accelerator.state.device_mesh` for ranks that are to get the same batches. That is all that is needed here.


@dataclass(frozen=True)
class Ranks:
    """The groups of a run: `cp` for parts of one sequence, `dp` for different samples (None where all see the same)."""

    cp: DeviceMesh
    dp: DeviceMesh | None


def split_sequences(accelerator: Any, cp_size: int | None = None) -> Ranks | None:
    """Makes every `cp_size` neighbouring ranks hold parts of one sequence; None on one process, where nothing is split.

    Call it before `accelerator.prepare`: data loaders prepared later feed these ranks the same batches. Without
    `cp_size` it is what the accelerator's ParallelismConfig says, or else all ranks. Models stay wrapped as accelerate
    wraps them, over all ranks (DDP, FSDP2): parameters are the same for all samples and all parts of a sequence.
    """
    world = accelerator.num_processes
    config = getattr(accelerator, "parallelism_config", None)
    named = config is not None and config.cp_enabled
    size = cp_size if cp_size is not None else config.cp_size if named else world  # type: ignore[union-attr]
    _check(accelerator, config, size, cp_size)
    if size == 1:
        return None
    if named:
        return _adopt_mesh(accelerator)
    if not dist.is_initialized():
        raise BatchError(f"cp_size = {size} was asked for, but torch.distributed is not initialised. Use torchrun.")
    names = ("dp_shard", "cp")  # accelerate's words
    mesh = init_device_mesh(accelerator.device.type, (world // size, size), mesh_dim_names=names)
    accelerator.state.device_mesh = mesh
    return Ranks(mesh["cp"], mesh["dp_shard"] if world > size else None)


def _adopt_mesh(accelerator: Any) -> Ranks:
    """The groups of a ParallelismConfig with cp_size > 1; accelerate's own context parallelism is left out: it would
    drop masks and refuse windows."""
    accelerator._prepare_cp = lambda *objects: objects
    mesh = accelerator.torch_device_mesh
    names = tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))
    if len(names) < 2:
        return Ranks(mesh["cp"], mesh[names[0]] if names else None)
    return Ranks(mesh["cp"], _torch.flattened(mesh[names], "samples"))


def _check(accelerator: Any, config: Any, size: int, asked: int | None) -> None:
    world = accelerator.num_processes
    if size < 1 or world % size:
        raise BatchError(
            f"cp_size = {size} was asked for, but {world} ranks cannot be cut into groups of {size}. Choose a divisor"
            f" of the number of ranks, or start another number of them."
        )
    if config is None:
        return
    if config.cp_enabled and asked not in (None, config.cp_size):
        raise BatchError(
            f"cp_size = {asked} was asked for, but the ParallelismConfig has cp_size = {config.cp_size}. Leave one out."
        )
    if size > 1 and not config.cp_enabled:
        raise BatchError(
            f"cp_size = {size} was asked for beside a ParallelismConfig without it, whose mesh would be replaced. Give"
            f" ParallelismConfig(cp_size={size}, ...)."
        )
    if size > 1 and (config.tp_enabled or config.sp_enabled):
        raise BatchError(
            f"the ParallelismConfig asks for tp_size = {config.tp_size} and sp_size = {config.sp_size} beside split"
            f" sequences. Leave them at 1 here; longspan.training.make_mesh has the recipe for tensor parallelism."
        )


# -- Accelerators of TRL's trainers ------------------------------------------------------------------------------------


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
