"""Lets torchtitan 0.3.0 train on CPUs with Gloo and torch 2.13. For tests only; imported before torchtitan.

torchtitan asks an accelerator for its name and memory, sets a timeout with a function that torch 2.13 lacks, and
divides FSDP gradients by 1 with an operation that Gloo lacks.
"""

import types
import warnings

import torch
import torch._utils
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

torch._utils._get_available_device_type = lambda: "cpu"


def _answers(value):
    return lambda *args, **kwargs: value


for name, value in {
    "get_device_name": "CPU",
    "get_device_properties": types.SimpleNamespace(total_memory=16 << 30, name="CPU"),
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "memory_stats": {},
    "current_device": 0,
    "device_count": 1,
}.items():
    setattr(torch.cpu, name, _answers(value))

if not hasattr(dist, "set_timeout"):
    dist.set_timeout = _answers(None)

_set_factor = FSDPModule.set_gradient_divide_factor


def _sum_and_divide(module, factor):
    module.set_force_sum_reduction_for_comms(True)
    return _set_factor(module, factor)


FSDPModule.set_gradient_divide_factor = _sum_and_divide
warnings.filterwarnings("ignore", message=".*torch.jit.script_method.*", category=DeprecationWarning)
