"""What a warm call costs the host: its time, what it launches, and whether it waits for the device.

On a GPU the real call is measured. On CPUs one rank's program runs on meta tensors, which stand for those of a GPU,
without the GPU's kernel: it launches, copies and waits for the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from longspan.api import attention
from longspan.cli.measure import DIRECTIONS, MeasuredRun
from longspan.formatting import seconds_text
from longspan.planning.plan import Plan
from tests.gpu.programs import LaunchCounter, drive, programs_without_kernel
from tests.gpu.site import Site
from tests.gpu.test_operators import no_host_waits

ROUNDS = 5
LIMIT = 1.0
"""Share of the device's time: a host that takes longer leaves the device without work."""


def plans(site: Site) -> list[tuple[str, Plan]]:
    return [
        (mask, site.plan(mask, ("32k" if site.on_one_card else "256k") if site.is_gpu else "1k"))
        for mask in ("causal", "documents", "window")
    ]


def one_pass(run: MeasuredRun, group: Any, direction: str, out: Tensor | None) -> Tensor | None:
    q, k, v = run.inputs
    if direction == "forward":
        return attention(q, k, v, run.plan, group=group)
    assert out is not None
    torch.autograd.grad(out, run.inputs, run.upstream)
    return None


def test_waits(site: Site) -> None:
    """A host that waits for the device inside a call cannot prepare the next layer meanwhile."""
    launches: dict[str, int] = {}
    for mask, plan in plans(site):
        count = gpu_launches if site.is_gpu else meta_launches
        launches |= {f"{mask}_{direction}": number for direction, number in count(site, mask, plan).items()}
    parts = [f"{name.replace('_', ' ')} {number}" for name, number in launches.items()]
    noun = "launches" if site.is_gpu else "operators without attention, on meta tensors and without Triton"
    site.record(f"no host wait and no copy in a warm call; {noun}: {', '.join(parts)}", **launches)


def meta_launches(site: Site, mask: str, plan: Plan) -> dict[str, int]:
    with LaunchCounter("meta") as first:  # reading a number of a meta tensor raises, in the first call as well
        try:
            programs = programs_without_kernel(plan, site.ranks.rank, "meta")
        except (RuntimeError, NotImplementedError):
            if not first.waits:
                raise
            pytest.fail(f"{mask}, first call: the host waits for the device ({first.waited[-1]})")
    launches: dict[str, int] = {}
    for direction in DIRECTIONS:
        with LaunchCounter("meta") as counter:
            drive(programs.program(direction))
        if waits := counter.waits + counter.copies:
            which = ", ".join(counter.waited[:4])
            pytest.fail(f"{mask}, {direction}: the host waits for the device, or copies to it, {waits} times ({which})")
        launches[direction] = counter.launches
    return launches


def gpu_launches(site: Site, mask: str, plan: Plan) -> dict[str, int]:
    """Return the kernels that a warm call starts on this GPU, with host waits forbidden."""
    run, group = MeasuredRun(plan, site.ranks), site.group()
    warm = one_pass(run, group, "forward", None)  # what is built once per plan may be copied and waited for
    one_pass(run, group, "backward", warm)
    launches: dict[str, int] = {}
    out: Tensor | None = None
    for direction in DIRECTIONS:
        site.ranks.finish()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            try:
                with no_host_waits(site.ranks.device):
                    out = one_pass(run, group, direction, out)
            except RuntimeError as error:
                pytest.fail(f"{mask}, {direction}: the host waits for the device: {str(error).splitlines()[0]}")
            site.ranks.finish()
        launches[direction] = sum(event.count for event in profiler.key_averages() if event.self_device_time_total)
    return launches


@pytest.mark.cards
def test_time(site: Site) -> None:
    """The host time of a warm call: on a GPU, the time in which nothing new is queued."""
    if site.is_gpu and site.ranks.size < 2:
        pytest.skip("it needs 2 ranks, and there are 1")
    seconds: dict[str, float] = {}
    share = 0.0
    for mask, plan in plans(site):
        for direction, (host, device) in (gpu_seconds if site.is_gpu else cpu_seconds)(site, plan).items():
            seconds[f"{mask}_{direction}_seconds"] = host
            share = max(share, host / device)
    parts = [f"{name.removesuffix('_seconds').replace('_', ' ')} {seconds_text(s)}" for name, s in seconds.items()]
    text = f"host time of a warm call: {', '.join(parts)}"
    if site.is_gpu:
        site.record(f"{text}; at most {share:.2f} of the device's time", used=share, **seconds)
        if share > LIMIT:
            pytest.fail(f"{text}: {share:.2f} of the device's time")
    else:
        site.record(f"{text}; not judged: there is no device", **seconds)


def cpu_seconds(site: Site, plan: Plan) -> dict[str, tuple[float, float]]:
    programs = programs_without_kernel(plan, site.ranks.rank, "cpu")
    return {direction: (fastest(lambda d=direction: drive(programs.program(d))), 1.0) for direction in DIRECTIONS}


def fastest(call: Callable[[], Any]) -> float:
    """Return the least seconds of this thread in a few rounds."""
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        call()
        seconds.append(time.thread_time() - begin)
    return min(seconds)


def gpu_seconds(site: Site, plan: Plan) -> dict[str, tuple[float, float]]:
    """Return (host, device) seconds of each direction, the least of a few rounds."""
    run, group = MeasuredRun(plan, site.ranks), site.group()
    seconds: dict[str, tuple[float, float]] = dict.fromkeys(DIRECTIONS, (float("inf"), float("inf")))
    for _ in range(ROUNDS):
        out: Tensor | None = None
        for direction in DIRECTIONS:
            site.ranks.barrier()
            begin, start, stop = time.perf_counter(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = one_pass(run, group, direction, out)
            host = time.perf_counter() - begin
            stop.record()
            site.ranks.finish()
            least = seconds[direction]
            seconds[direction] = min(least[0], host), min(least[1], start.elapsed_time(stop) / 1e3)
    return seconds
