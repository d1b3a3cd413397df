"""tests/gpu in ranks with the form "cuda": the tests as they are, with tensors that CPUs can compute."""

from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from longspan.cli import measure
from longspan.planning.steps import Sizes
from tests.device import forms
from tests.gpu import site, test_exact, test_host, test_memory, test_time, test_training
from tests.gpu.suite import run_suite

TOKENS = {"4k": 320, "16k": 256, "64k": 384, "256k": 512, "1M": 768}
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


def on_device(*words, judges_speed=False):
    """Exit status and outcomes of the tests on this rank; times are measured, and judged only if asked for."""
    torch.accelerator.set_device_index(dist.get_rank())
    with ExitStack() as stack:
        for owner, name, value in replacements(judges_speed):
            stack.enter_context(mock.patch.object(owner, name, value))
        return run_suite(*words)
