"""What PyTorch's compiler makes of the flex kernel for an H100, on a machine that has none.

    python -m tests.kernel_models.flex_code FOLDER CASE

A library of a few lines makes tensors without data pretend to be on a GPU; what the compiler asks about the GPU is
answered here. Nothing is launched. FOLDER gets the code of the case's forward and backward, by the installed PyTorch.
One case to a process: what is remembered of one are tensors without data of that one.
"""

import ctypes
import json
import subprocess
import sys
import types
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch

from tests.kernel_models.flex_cases import CASES

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
// To a build of PyTorch without CUDA, "cuda" becomes a device whose guard does nothing: no more is needed without data.
namespace {
struct Pretended final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};
c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new Pretended());
}
"""
H100 = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=50 << 20,
    gcnArchName="", clock_rate=1980000, memory_clock_rate=2619000, memory_bus_width=5120, max_threads_per_block=1024,
    is_integrated=0,
)  # fmt: skip


def load_guard(folder: Path) -> None:
    source, library = folder / "guard.cpp", folder / "guard.so"
    if library.exists():
        ctypes.CDLL(str(library))
        return
    source.write_text(GUARD)
    home = Path(torch.__file__).parent
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}", str(source), "-o", str(library)]
    subprocess.run([*command, f"-L{home / 'lib'}", "-lc10"], check=True, timeout=200, capture_output=True)
    ctypes.CDLL(str(library))


@contextmanager
def pretended_h100():
    """PyTorch's compiler and Triton take the machine for one with an H100."""
    import triton.runtime.driver
    from torch._dynamo import device_interface
    from triton.backends.compiler import GPUTarget

    class Answers(device_interface.CudaInterface):
        class Worker(device_interface.CudaInterface.Worker):
            get_device_properties = staticmethod(lambda device=None: H100)
            current_device = staticmethod(lambda: 0)

        get_device_properties = staticmethod(lambda device=None: H100)
        is_available = staticmethod(lambda: True)
        get_compute_capability = staticmethod(lambda device=None: 90)
        is_triton_capable = staticmethod(lambda device=None: True)
        raise_if_triton_unavailable = staticmethod(lambda device=None: None)
        current_device = staticmethod(lambda: 0)
        synchronize = staticmethod(lambda device=None: None)

    class Driver:
        get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
        get_current_device = staticmethod(lambda: 0)
        get_device_interface = staticmethod(lambda: Answers)
        get_active_torch_device = staticmethod(lambda: torch.device("cuda:0"))
        get_benchmarker = staticmethod(lambda: None)

    device_interface.init_device_reg()
    for name in ("cuda", "cuda:0"):
        device_interface.register_interface_for_device(name, Answers)
    triton.runtime.driver.set_active(Driver())
    told = {
        "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
        "get_device_properties": lambda d=None: H100, "get_device_capability": lambda d=None: (9, 0),
        "_lazy_init": lambda: None, "synchronize": lambda d=None: None, "set_device": lambda d: None,
        "get_rng_state": lambda d=None: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *a, **k: None,
        "_exchange_device": lambda d: 0, "_maybe_exchange_device": lambda d: 0,
    }  # fmt: skip
    with ExitStack() as stack:
        for name, answer in told.items():
            stack.enter_context(mock.patch(f"torch.cuda.{name}", answer))
        yield


def gradient_by_cpu(trace):
    """Autograd wants a GPU that is there: gradients are traced with CPU tensors, and say "cuda" afterwards."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    def traced(function, arguments, num_index):
        with unset_fake_temporarily():
            examples = [
                torch.zeros(x.shape, dtype=x.dtype).requires_grad_(x.requires_grad and x.is_floating_point())
                for x in arguments
            ]
            graph = trace(function, examples, num_index)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cuda:0")}
        graph.recompile()
        return graph

    return traced


def generated(name: str) -> list[str]:
    """The code of a case's forward and of its backward."""
    import torch._inductor.config
    from torch._inductor import graph as lowering
    from torch._inductor.fx_passes import fuse_attention
    from torch._subclasses.fake_tensor import FakeTensorMode

    from longspan import _torch
    from longspan.kernels import flex
    from longspan.kernels.contract import Upstream

    class StoppedError(Exception):
        """All that was wanted is there."""

    made: list[str] = []

    def grab(self, *args, **kwargs):
        made.append(self.codegen()[0].value)
        raise StoppedError

    def compiled(graph, inputs):
        before = len(made)
        with mock.patch.object(lowering.GraphLowering, "compile_to_module", grab):
            try:
                torch._inductor.compile(graph, list(inputs))
            except BaseException:
                if len(made) == before:
                    raise
        return graph  # whose operators give results without data

    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    fuse_attention._sfdp_init = lambda *args, **kwargs: None  # looks for patterns that it would have to run for
    case = CASES[name]
    with (
        pretended_h100(), FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch.object(_torch, "compile_graph", compiled), mock.patch.object(flex, "_compiled", {}),
        mock.patch.object(_torch, "trace_gradient", gradient_by_cpu(_torch.trace_gradient)),
    ):  # fmt: skip
        flex._blocks_of.cache_clear()
        q, k, v, dout, *tables = case.tensors("cuda")
        kernel, work = flex.Flex(), case.work(q, k, v, *tables)
        assert len(list(kernel.forward(work))) == 1
        full = torch.empty(dout.shape[:3], dtype=torch.float32, device="cuda")
        assert len(list(kernel.backward(work, Upstream(dout, dout, full, full)))) == 1
        flex._blocks_of.cache_clear()
    assert len(made) == 2, len(made)
    return made


def main(folder: str, name: str) -> None:
    torch.set_num_threads(1)
    load_guard(Path(folder))
    (Path(folder) / f"{name}.json").write_text(json.dumps(generated(name)))


if __name__ == "__main__":
    main(*sys.argv[1:])
