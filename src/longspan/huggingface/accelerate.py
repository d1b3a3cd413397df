"""Which ranks get the same batch, for Hugging Face's accelerate and for TRL's trainers.

`split_sequences` makes ranks of one sequence load the same batch. TRL also counts processes: it divides by them and
gathers metrics from all. Ranks of one sequence have the same samples, so TRL sees them as one process: with 8 ranks and
4 of them per sequence there are two processes, and rank 5 belongs to process 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from longspan import _torch
from longspan.training import BatchError

WHOLE = ("scores", "distills")
"""Trainers that receive whole sequences: the models that they call run over ranks."""
KINDS = {
    "SFTTrainer": "parts",
    "DPOTrainer": "scores",
    "GRPOTrainer": "scores",
    "RLOOTrainer": "scores",
    "DistillationTrainer": "distills",
}
"""How the loss is computed: of a rank's part; from scores of all tokens; by a divergence of a rank's tokens."""


def kind_of(trainer: type) -> str:
    """Return how a trainer's loss is computed over ranks; raise for an unknown trainer of TRL.

    >>> kind_of(object)
    'plain'
    """
    bases = [base for base in trainer.__mro__ if base.__module__.split(".")[0] == "trl"]
    for base in bases:
        if base.__name__ in KINDS:
            return KINDS[base.__name__]
    for base in bases:
        if "compute_loss" in vars(base):
            raise BatchError(
                f"TRL's trainer must be one of {', '.join(KINDS)} on split sequences, but got {base.__name__}, whose"
                f" loss was not tested over ranks. Write its loss in a loop of your own, with longspan.training."
            )
    return "plain"


class Ranks(NamedTuple):
    """The groups of a run: `cp` for parts of one sequence, `dp` for different samples (None if all have the same)."""

    cp: DeviceMesh
    dp: DeviceMesh | None

    @property
    def num_samples(self) -> int:
        return 1 if self.dp is None else self.dp.size()


def split_sequences(accelerator: Any, cp_size: int | None = None) -> Ranks | None:
    """Let every `cp_size` neighbouring ranks hold parts of one sequence; return None if nothing is split.

    Call it before `accelerator.prepare`: data loaders prepared later give these ranks the same batches. The default of
    `cp_size` is that of the accelerator's ParallelismConfig, or else all ranks. Models stay wrapped as accelerate wraps
    them, over all ranks (DDP, FSDP2): parameters are the same for all samples and all parts of a sequence.
    """
    world, config = accelerator.num_processes, getattr(accelerator, "parallelism_config", None)
    has_cp = config is not None and config.cp_enabled
    size = cp_size if cp_size is not None else config.cp_size if has_cp else world  # type: ignore[union-attr]
    if size < 1 or world % size:
        raise BatchError(
            f"cp_size must divide the number of ranks, {world}, but got {size}: they cannot be cut into groups of"
            f" {size}. Choose a divisor, or start another number of ranks."
        )
    if config is not None:
        if has_cp and cp_size not in (None, config.cp_size):
            raise BatchError(
                f"cp_size must be {config.cp_size}, as in the ParallelismConfig, but got {cp_size}. Leave one out."
            )
        if size > 1 and not has_cp:
            raise BatchError(
                f"cp_size = {size} needs a ParallelismConfig with cp_size, whose mesh would be replaced otherwise. Give"
                f" ParallelismConfig(cp_size={size}, ...)."
            )
        if size > 1 and (config.tp_enabled or config.sp_enabled):
            raise BatchError(
                f"the ParallelismConfig must have tp_size = 1 and sp_size = 1 with split sequences, but got"
                f" {config.tp_size} and {config.sp_size}. longspan.training.make_mesh has the recipe for tensor"
                f" parallelism."
            )
    if size == 1:
        return None
    if has_cp:
        accelerator._prepare_cp = lambda *objects: objects  # accelerate's would drop masks and refuse windows
        mesh = accelerator.torch_device_mesh
        names = tuple(name for name in mesh.mesh_dim_names if name.startswith("dp"))
        if len(names) < 2:
            return Ranks(mesh["cp"], mesh[names[0]] if names else None)
        return Ranks(mesh["cp"], _torch.flatten_mesh(mesh[names], "samples"))
    if not dist.is_initialized():
        raise BatchError(f"cp_size = {size} needs torch.distributed, which is not initialised. Use torchrun.")
    mesh = init_device_mesh(accelerator.device.type, (world // size, size), mesh_dim_names=("dp_shard", "cp"))
    # For data loaders alone: FSDP2 would take a mesh in `accelerator.state` as that of a ParallelismConfig.
    accelerator._prepare_device_mesh = lambda: mesh
    return Ranks(mesh["cp"], mesh["dp_shard"] if world > size else None)


# -- Accelerators of TRL's trainers ------------------------------------------------------------------------------------


class _Delegate:
    """An accelerator with some methods of its own; everything else is the real accelerator's."""

    real: Any
    ranks: Ranks

    def __init__(self, real: Any, ranks: Ranks) -> None:
        vars(self).update(real=real, ranks=ranks)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["real"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real, name, value)

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        """Gather data; of a last batch that was filled up with samples of the first, only its own samples."""
        if use_gather_object:
            return self.real.gather_for_metrics(data, use_gather_object)
        state, gathered = self.real.gradient_state, self.gather(data)
        is_filled = state.end_of_dataloader and state.remainder > 0
        return map_tensors(lambda item: item[: state.remainder], gathered) if is_filled else gathered


class SequenceAccelerator(_Delegate):
    """An accelerator that sees ranks of one sequence as one process."""

    @property
    def num_processes(self) -> int:
        return self.ranks.num_samples

    @property
    def process_index(self) -> int:
        return 0 if self.ranks.dp is None else self.ranks.dp.get_local_rank()

    def gather(self, data: Any) -> Any:
        return drop_cp_duplicates(self.real.gather(data), self.ranks)

    def reduce(self, data: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        if not isinstance(data, Tensor):
            return type(data)(self.reduce(item, reduction, scale) for item in data)
        if self.ranks.dp is None:
            return data
        total = data.clone()
        dist.all_reduce(total, group=self.ranks.dp.get_group())
        return total * (scale / self.num_processes if reduction == "mean" else scale)


class PartsAccelerator(_Delegate):
    """An accelerator for trainers that add up values of each rank's part: values belong to ranks, not to samples, so
    none is dropped if a last batch was filled up."""

    def gather_for_metrics(self, data: Any, use_gather_object: bool = False) -> Any:
        if use_gather_object:
            return self.real.gather_for_metrics(data, use_gather_object)
        return self.real.gather(data)


def map_tensors(function: Any, data: Any) -> Any:
    """Apply a function to the items of nested tuples, lists and dicts."""
    if isinstance(data, tuple | list):
        return type(data)(map_tensors(function, item) for item in data)
    if isinstance(data, dict):
        return {name: map_tensors(function, item) for name, item in data.items()}
    return function(data)


def drop_cp_duplicates(gathered: Any, ranks: Ranks) -> Any:
    """Return data gathered from all ranks, in their order, without duplicates: that of the first rank of each sequence.

    A list of objects, or tensors with one row or more a rank; 4 ranks in pairs, two rows each: rows 0, 1 and 4, 5 stay.
    """
    if isinstance(gathered, tuple):
        return tuple(drop_cp_duplicates(item, ranks) for item in gathered)
    if isinstance(gathered, dict):
        return {name: drop_cp_duplicates(item, ranks) for name, item in gathered.items()}
    samples = 1 if ranks.dp is None else ranks.dp.size()
    rows = len(gathered) // (samples * ranks.cp.size())
    starts = [n * ranks.cp.size() * rows for n in range(samples)]
    kept = [gathered[start : start + rows] for start in starts]
    return torch.cat(kept) if isinstance(gathered, Tensor) else [item for part in kept for item in part]
