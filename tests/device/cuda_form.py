"""The form that takes the place of "cuda": what a CPU build of PyTorch lacks in `torch.cuda`, `torch._C` and NCCL."""

import types

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tests.device import forms


def install():
    native, cuda = forms.native, torch.cuda
    functions = forms.module_functions("cuda")
    for name, value in functions.items():
        setattr(cuda, name, value)
    properties = types.SimpleNamespace(
        name="stand-in device", major=9, minor=0, total_memory=2**34, multi_processor_count=4, warp_size=32,
        gcnArchName="", L2_cache_size=2**20, shared_memory_per_block_optin=232448, regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048, uuid="0",
    )  # fmt: skip
    for name, value in {
        "_is_compiled": lambda: True,
        "_initialized": True,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "current_blas_handle": lambda: 0,
        "default_generators": tuple(native.default_generator(index) for index in range(native.device_count())),
    }.items():
        setattr(cuda, name, value)
    cuda.nccl.version = lambda: (2, 28, 0)
    for name, value in {
        "_cuda_getCurrentRawStream": lambda device: 0,
        "_cuda_getDeviceCount": native.device_count,
        "_cuda_getDevice": native.current_device,
        "_cuda_setDevice": native.set_device,
        "_cuda_isInBadFork": lambda: False,
        "_cuda_exchangeDevice": functions["_exchange_device"],
        "_cuda_maybeExchangeDevice": functions["_maybe_exchange_device"],
    }.items():
        setattr(torch._C, name, value)
    _resize_storages(native)


def _resize_storages(native):
    """FSDP2 frees parameters by resizing their storages, which a CPU build refuses for "cuda"."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage, num_bytes):
        if storage.device.type != "cuda":
            return resize(storage, num_bytes)
        native.resize_storage(storage, num_bytes)
        return storage

    torch.UntypedStorage.resize_ = resize_


class _NcclType(type):
    def __call__(cls, store, rank, size, options=None):
        timeout = getattr(options, "_timeout", None)
        return forms.make_group(store, rank, size, timeout)

    def __instancecheck__(cls, backend):
        return isinstance(backend, dist._Backend) and backend.name() == "standin"


class ProcessGroupNCCL(metaclass=_NcclType):
    """What `init_process_group("nccl")` makes."""

    class Options:
        def __init__(self, is_high_priority_stream=False):
            self.is_high_priority_stream = is_high_priority_stream
            self.config = types.SimpleNamespace()
            self.global_ranks_in_group, self.group_name, self.split_color = [], "", None


def install_nccl():
    for module in (dist, distributed_c10d):
        module.ProcessGroupNCCL = ProcessGroupNCCL
        module.is_nccl_available = lambda: True
