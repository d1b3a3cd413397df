"""`longspan acceptance` in ranks with the form "cuda": its GPU half, at sizes that CPUs can compute."""

import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist

from longspan.cli.acceptance import host, memory, timing
from longspan.cli.acceptance.lines import Site
from longspan.cli.acceptance.session import Session, all_lines
from longspan.cli.launch import JobRanks
from longspan.planning.steps import Sizes
from tests.device import forms

SMALL = Sizes(8, 4, 32, 32, 2)
TOKENS = 1024


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


def outcomes(names, quick):
    """(judgement, text, seconds) of every line whose name begins with one of these."""
    torch.accelerator.set_device_index(dist.get_rank())
    ranks = JobRanks(dist.get_rank(), dist.get_world_size(), dist.get_world_size(), forms.backend(alone=True), "cuda")
    site, found = Site(ranks, quick=quick), {}
    with ExitStack() as stack:
        for module in (memory, host, timing):
            stack.enter_context(mock.patch.object(module, "tokens_of", return_value=TOKENS))
        stack.enter_context(mock.patch.object(host, "profile", LaunchProfile))
        stack.enter_context(mock.patch.object(Site, "sizes", SMALL))
        for line in all_lines(is_gpu=True):
            if line.name.startswith(tuple(names)) and (line.is_quick or not quick):
                begin = time.process_time()
                outcome = Session._tried(mock.Mock(site=site), line)
                site.close_groups()
                found[line.name] = str(outcome.judgement), outcome.text, time.process_time() - begin
    return found
