"""Start the stand-in device in this process, and what tests ask it for."""

import atexit
import contextlib
import ctypes
import sys
import traceback
import types
from datetime import timedelta

from tests.device import build

FORMS = ("standin", "cuda")
native = None
"""The extension, once started."""
form = ""


def start(name, devices=4):
    """Make the device known to PyTorch under this name. "cuda" must be started before torch is imported."""
    global native, form
    if form:
        assert form == name, f"this process has the form {form!r} already"
        return
    if name == "cuda":
        assert "torch" not in sys.modules, "PyTorch looks for CUDA's hooks once, when it is imported"
        # PyTorch's libraries first: the extension finds their symbols, and its hooks are there when torch asks.
        ctypes.CDLL(str(build.torch_folder() / "lib/libtorch_python.so"), ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(build.build()), ctypes.RTLD_GLOBAL).standin_take_the_place_of_cuda()
        sys.modules["triton"] = None  # as if not installed: it needs a real driver
    import torch  # noqa: F401  (the extension needs its symbols)

    native = build.load()
    native.start(devices)
    form = name
    if name == "cuda":
        from tests.device import cuda_form

        cuda_form.install()
    else:
        _install_standin(name)
    _register_backend(name)
    from tests.kernel_models import rows

    rows.install(_launch_rows)
    atexit.register(native.drain, True)  # kernels may be Python functions, which cannot run once Python has ended


# ---- the device's module ---------------------------------------------------------------------------------------------


def index_of(device):
    """The index of a device that is given as PyTorch's functions take it: None, a number, a name or a torch.device."""
    import torch

    if isinstance(device, int):
        return device if device >= 0 else native.current_device()
    index = None if device is None else torch.device(device).index
    return native.current_device() if index is None else index


def module_functions(name):
    """What `torch.cuda` has and frameworks ask any device's module for."""
    import torch

    class Stream(torch.Stream):
        def __new__(cls, device=None, priority=0, **known):
            if known:
                return super().__new__(cls, **known)
            return super().__new__(cls, device=torch.device(name, index_of(device)), priority=priority)

    def event(enable_timing=False, blocking=False, interprocess=False):  # not a class: torch.Event takes only itself
        return torch.Event(name, enable_timing=enable_timing)

    class StreamContext:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            if self.stream is not None:
                self.device_before = native.current_device()
                native.set_device(self.stream.device_index)
                self.before = torch.accelerator.current_stream(self.stream.device_index)
                torch.accelerator.set_stream(self.stream)

        def __exit__(self, *_):
            if self.stream is not None:
                torch.accelerator.set_stream(self.before)
                native.set_device(self.device_before)

    class DeviceContext:
        def __init__(self, device):
            self.index = index_of(device)

        def __enter__(self):
            self.before = native.current_device()
            native.set_device(self.index)

        def __exit__(self, *_):
            native.set_device(self.before)

    def generators():
        return [native.default_generator(index) for index in range(native.device_count())]

    def exchange_device(index):
        before = native.current_device()
        if index >= 0:
            native.set_device(index)
        return before

    def manual_seed_all(seed):
        for generator in generators():
            generator.manual_seed(seed)

    def set_rng_state_all(states):
        for generator, state in zip(generators(), states, strict=True):
            generator.set_state(state)

    def memory_stats(device=None):
        now, peak, reserved, allocations = native.memory(index_of(device))
        return {
            "allocated_bytes.all.current": now,
            "allocated_bytes.all.peak": peak,
            "reserved_bytes.all.current": reserved,
            "reserved_bytes.all.peak": reserved,
            "allocation.all.allocated": allocations,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    sync_debug_mode = 0

    def set_sync_debug_mode(mode):
        nonlocal sync_debug_mode
        sync_debug_mode = 2 * (mode in ("error", 2))
        native.forbid_waits(bool(sync_debug_mode))

    total = 2**34
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "_initialized": True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index_of(device)),
        "_exchange_device": exchange_device,
        "_maybe_exchange_device": lambda index: exchange_device(index),  # another one: dynamo tells them apart
        "synchronize": lambda device=None: torch.accelerator.synchronize(index_of(device)),
        "Stream": Stream,
        "Event": event,
        "stream": StreamContext,
        "StreamContext": StreamContext,
        "device": DeviceContext,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index_of(device)),
        "default_stream": lambda device=None: torch.Stream(0, index_of(device), torch._C._get_accelerator().type),
        "set_stream": torch.accelerator.set_stream,
        "manual_seed": lambda seed: native.default_generator(native.current_device()).manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "initial_seed": lambda: native.default_generator(native.current_device()).initial_seed(),
        "get_rng_state": lambda device=None: native.default_generator(index_of(device)).get_state(),
        "set_rng_state": lambda state, device=None: native.default_generator(index_of(device)).set_state(state),
        "get_rng_state_all": lambda: [generator.get_state() for generator in generators()],
        "set_rng_state_all": set_rng_state_all,
        "get_amp_supported_dtype": lambda: [torch.float16, torch.bfloat16],
        "memory_stats": memory_stats,
        "memory_allocated": lambda device=None: native.memory(index_of(device))[0],
        "max_memory_allocated": lambda device=None: native.memory(index_of(device))[1],
        "memory_reserved": lambda device=None: native.memory(index_of(device))[2],
        "max_memory_reserved": lambda device=None: native.memory(index_of(device))[2],
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "mem_get_info": lambda device=None: (total - native.memory(index_of(device))[2], total),
        "empty_cache": lambda: None,
        "set_sync_debug_mode": set_sync_debug_mode,
        "get_sync_debug_mode": lambda: sync_debug_mode,
    }


def _install_standin(name):
    import torch

    torch.utils.rename_privateuse1_backend(name)
    module = types.ModuleType(f"torch.{name}")
    vars(module).update(module_functions(name))
    torch._register_device_module(name, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


# ---- process groups --------------------------------------------------------------------------------------------------


def make_group(store, rank, size, timeout):
    import torch.distributed as dist

    timeout = timeout or timedelta(minutes=10)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("standin", store), rank, size, timeout)
    return native.group(gloo, int(timeout.total_seconds() * 1000))


def _register_backend(name):
    import torch.distributed as dist

    if name == "cuda":
        from tests.device import cuda_form

        cuda_form.install_nccl()
    else:
        dist.Backend.register_backend("standinccl", make_group, devices=[name])


def backend(alone=False):
    """The argument of `init_process_group` for this form; `alone` without Gloo for CPU tensors."""
    own = {"standin": "standin:standinccl", "cuda": "cuda:nccl"}[form]
    return own if alone else f"cpu:gloo,{own}"


# ---- for tests -------------------------------------------------------------------------------------------------------


def device(index=0):
    import torch

    return torch.device(form, index)


def _launch_rows(function, args, constants):
    """Enqueue a model of a Triton kernel, which takes memory of one device only."""
    from tests.kernel_models.rows import Pointer, at_once

    devices = {x.tensor.device for x in args if isinstance(x, Pointer)}
    if len(devices) > 1:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {devices}")
    if {index_of(device) for device in devices} != {native.current_device()}:
        raise RuntimeError(f"Triton launches on the current device, and not on {devices}")
    aliases = [Pointer(native.cpu_alias(x.tensor), x.dtype) if isinstance(x, Pointer) else x for x in args]
    native.launch(devices.pop().index, lambda: at_once(function, aliases, constants))


PLAIN = {"kernel_delay": 0, "message_delay": 0, "late_kernels": 0, "late_messages": 0}
"""Microseconds: see native/streams.h."""
SCHEDULES = {
    "plain": {},
    "slow kernels": {"kernel_delay": 200},
    "slow messages": {"message_delay": 3000},
    "late messages": {"late_messages": 5_000_000},
    "late kernels": {"late_kernels": 5_000_000},
    "all late": {"late_kernels": 5_000_000, "late_messages": 5_000_000},
    # For what needs a whole forward to go wrong, which may take longer on a busy machine.
    "all very late": {"late_kernels": 40_000_000, "late_messages": 40_000_000},
}


@contextlib.contextmanager
def schedule(name):
    """Run what is inside under one of SCHEDULES, and wait for all of it at the end."""
    set_schedule(name)
    try:
        yield
    finally:
        native.drain(True)
        set_schedule("plain")


def set_schedule(name):
    native.set_schedule(*(PLAIN | SCHEDULES[name]).values())


class HostWaits:
    """What made the host wait inside of `with`: (operator, innermost frames as "file:line") of each wait."""

    def __init__(self):
        self.all = []

    def __enter__(self):
        native.reset_waits()
        native.observe_waits(self._note)
        return self

    def __exit__(self, *_):
        native.observe_waits(None)

    def _note(self, reason):
        frames = [f"{frame.filename}:{frame.lineno}" for frame in reversed(traceback.extract_stack()[:-1])]
        self.all.append((reason, frames))

    def by(self, folder):
        """Those whose innermost frame outside of PyTorch lies under a folder, as "operator at file:line"."""
        found = []
        for reason, frames in self.all:
            own = [frame for frame in frames if "/torch/" not in frame and "<frozen" not in frame]
            if own and folder in own[0]:
                found.append(f"{reason} at {own[0]}")
        return found
