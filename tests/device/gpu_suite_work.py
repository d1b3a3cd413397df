"""tests/gpu in ranks with the form "cuda": the tests as they are, with tensors that CPUs can compute."""

import math
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from longspan import _torch
from longspan.cli import measure
from longspan.kernels import cuda_flash, kernel_named
from longspan.planning.steps import Sizes
from longspan.run import transports
from tests.device import forms
from tests.gloo.gpu_suite_work import replaced
from tests.gpu import site, test_exact, test_host, test_memory, test_time, test_training
from tests.gpu.one_card import Message
from tests.gpu.suite import run_suite

TOKENS = {"4k": 320, "16k": 256, "32k": 320, "64k": 384, "256k": 512, "1M": 768}
"""In the place of the sizes that tests are named after."""
ANY_TIME = float("inf")


class LaunchProfile:
    """In the place of PyTorch's profiler, which sees CUDA's kernels through NVIDIA's own library."""

    def __init__(self, activities):
        self.launches = 0

    def __enter__(self):
        self.before = forms.native.launches()
        return self

    def __exit__(self, *_):
        self.launches = forms.native.launches() - self.before

    def key_averages(self):
        return [SimpleNamespace(count=self.launches, self_device_time_total=1.0)]


def replacements(judges_speed):
    """(owner, name, value) of what is smaller here, and of what a CPU has not got."""
    yield site, "tokens_of", TOKENS.__getitem__
    yield site.Site, "sizes", Sizes(8, 4, 32, 32, 2)
    yield test_exact, "LONG", test_exact.SHORT
    yield measure, "GPU_TILES", ((256, 256, True), (128, 256, False), (64, 512, False), (192, 192, True))
    yield measure, "GPU_COPIED", measure.COPIED
    yield measure, "GPU_SHORT", 64
    yield measure, "GPU_LONG", 256
    yield test_memory, "BATCHES", {"cuda": (3, 20)}
    yield test_time, "LINK_BYTES", {"cuda": 1 << 20}
    yield test_host, "profile", LaunchProfile
    yield test_training, "COMPILER", {"cuda": "aot_eager"}
    if not judges_speed:
        yield test_time, "LIMIT", ANY_TIME
        yield test_time, "SLOW_LINK", {"cuda": ANY_TIME}
        yield test_host, "LIMIT", ANY_TIME


def stale_buffer():
    """The memory of a message on the card is read before the message is in it."""

    def wait_all(works):
        for work in works:
            (work.work if isinstance(work, Message) else work).wait()

    return transports, "wait_all", wait_all


def wrong_alignment():
    """Windows are given to flash attention as if its diagonal began in the top-left corner."""

    def window_of(tight):
        left, right = tight.hi, None if tight.lo is None else -tight.lo
        return tuple(-1 if bound is None else max(bound, 0) for bound in (left, right))

    return cuda_flash, "window_of", window_of


def lse_in_log2():
    right = _torch.flash

    def flash(*operands):
        out, lse = right(*operands)
        return out, lse * math.log2(math.e)

    return kernel_named("varlen"), "op", flash


def real_clamp():
    """Tiles of more rows than keys are given to FA2 whole, whose host code closes the open side of their window."""
    return cuda_flash, "fa2_parts", lambda tile: (tile,)


PLANTS = {plant.__name__: plant for plant in (stale_buffer, wrong_alignment, lse_in_log2, real_clamp)}


def on_device(*words, judges_speed=False, plant=None):
    """Exit status and outcomes of the tests on this rank; times are measured, and judged only if asked for."""
    torch.accelerator.set_device_index(0 if "--one-gpu" in words else dist.get_rank())
    try:
        with ExitStack() as stack:
            for owner, name, value in replacements(judges_speed):
                stack.enter_context(mock.patch.object(owner, name, value))
            if plant is not None:
                stack.enter_context(replaced(*PLANTS[plant]()))
            return run_suite(*words)
    finally:
        torch.accelerator.set_device_index(dist.get_rank())
