"""What a warm call costs the host: its time, what it launches, and whether it ever waits for the device.

On a GPU the real call is looked at. On CPUs one rank's program runs on tensors without data, which stand for those of a
GPU, with the GPU's kernel left out: what it would launch there, copy there and wait for is the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from longspan._torch import TorchDispatchMode
from longspan.api import attention
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, compared, right, wrong
from longspan.cli.acceptance.operators import no_waiting
from longspan.cli.acceptance.programs import RankPrograms, driven
from longspan.cli.acceptance.timing import tokens_of, workload_plan
from longspan.cli.measure import DIRECTIONS, MeasuredRun
from longspan.formatting import seconds_text
from longspan.kernels.cuda_flash import Flash
from longspan.planning.plan import Plan

VIEWS = {"view", "slice", "select", "transpose", "unsqueeze", "squeeze", "expand", "alias", "detach", "as_strided"}
VIEWS |= {"split", "permute", "_unsafe_view", "unbind", "split_with_sizes", "lift_fresh", "_reshape_alias", "unfold"}
ALLOCATIONS = {"empty", "new_empty", "empty_like", "empty_strided", "set_"}
WAITS = {"_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select"}
ROUNDS = 5
SHARE = (0.5, 1.0)
"""Of the device's time: a host that takes longer than all of it leaves the device without work."""


def host_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    return [AcceptanceLine("host.waits", _waits), AcceptanceLine("host.time", _host_time, 2 if is_gpu else 1)]


class Counted(TorchDispatchMode):
    """Counts what would be launched on a device, what would be copied to it, and what would wait for it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device
        self.launches = self.copies = self.waits = 0
        self.waited: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        kwargs = kwargs or {}
        if name in WAITS and self.device in _devices((args, kwargs)):
            self.waits += 1
            self.waited.append(name)
        found = func(*args, **kwargs)
        if func.is_view or name in VIEWS or name in ALLOCATIONS or name in WAITS:
            return found
        devices = _devices((args, kwargs, found))
        if name in ("_to_copy", "copy_") and len(devices) > 1:
            self.copies += 1
            self.waited.append("copy")
        elif self.device in devices:
            self.launches += 1
        return found


def _devices(value: Any) -> set[str]:
    """Types of the devices of all tensors in nested arguments."""
    if isinstance(value, Tensor):
        return {value.device.type}
    if isinstance(value, dict):
        value = tuple(value.values())
    return {kind for inner in value for kind in _devices(inner)} if isinstance(value, list | tuple) else set()


def no_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Neither output nor lse, in the shapes of the operator."""
    if q.dim() == 4:
        return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def no_backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def pretended(plan: Plan, rank: int, device: str) -> RankPrograms:
    """A rank's program with a GPU's kernel that computes nothing, warm in both directions."""
    programs = RankPrograms.of(plan, rank, device, Flash(op=no_forward, backward_op=no_backward))
    for way in DIRECTIONS:
        driven(programs.program(way))
    return programs


def _plans(site: Site) -> list[tuple[str, Plan]]:
    size = tokens_of("256k" if site.is_gpu else "2k")
    return [(word, workload_plan(site, word, size)) for word in ("causal", "documents", "window")]


def _waits(site: Site) -> Outcome:
    """A host that waits for the device inside of a call cannot prepare the next layer meanwhile."""
    launches: dict[str, int] = {}
    for word, made in _plans(site):
        for way, count in (_real_launches if site.is_gpu else _pretended_launches)(site, made).items():
            if isinstance(count, str):
                return wrong(f"{word}, {way}: {count}")
            launches[f"{word}_{way}"] = count
    words = [f"{name.replace('_', ' ')} {count}" for name, count in launches.items()]
    what = "launches" if site.is_gpu else "operators beside attention, on tensors without data and without Triton"
    return right(f"no host wait and no copy in a warm call; {what}: {', '.join(words)}", **launches)


def _pretended_launches(site: Site, made: Plan) -> dict[str, int | str]:
    found: dict[str, int | str] = {}
    with Counted("meta") as warming:  # to look at a number of a tensor without data raises, the first time as well
        try:
            programs = pretended(made, site.ranks.rank, "meta")
        except (RuntimeError, NotImplementedError):
            if not warming.waits:
                raise
            return {"first call": f"the host waits for the device ({warming.waited[-1]})"}
    for way in DIRECTIONS:
        with Counted("meta") as counted:
            driven(programs.program(way))
        waits = counted.waits + counted.copies
        said = f"the host waits for the device, or copies to it, {waits} times ({', '.join(counted.waited[:4])})"
        found[way] = said if waits else counted.launches
    return found


def _real_launches(site: Site, made: Plan) -> dict[str, int | str]:
    """Kernels that a warm call starts on this GPU, with host waits forbidden."""
    run, group = MeasuredRun(made, site.ranks), site.group()
    warm = _one_pass(run, group, "forward", None)  # what is worked out once per plan may be copied and waited for
    _one_pass(run, group, "backward", warm)
    found: dict[str, int | str] = {}
    out: Tensor | None = None
    for way in DIRECTIONS:
        site.ranks.finish()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            try:
                with no_waiting(site.ranks.device):
                    out = _one_pass(run, group, way, out)
            except RuntimeError as error:
                return {way: f"the host waits for the device: {str(error).splitlines()[0]}"}
            site.ranks.finish()
        found[way] = sum(event.count for event in profiler.key_averages() if event.self_device_time_total)
    return found


def _one_pass(run: MeasuredRun, group: Any, way: str, out: Tensor | None) -> Tensor | None:
    q, k, v = run.inputs
    if way == "forward":
        return attention(q, k, v, run.plan, group=group)
    assert out is not None
    torch.autograd.grad(out, run.inputs, run.upstream)
    return None


def _host_time(site: Site) -> Outcome:
    """Thread time of a warm call: on a GPU, that in which nothing new is queued."""
    figures: dict[str, float] = {}
    worst = 0.0
    for word, made in _plans(site):
        for way, seconds in (_real_seconds if site.is_gpu else _pretended_seconds)(site, made).items():
            host, device = seconds
            figures[f"{word}_{way}_seconds"] = host
            worst = max(worst, host / device)
    words = [f"{name.removesuffix('_seconds').replace('_', ' ')} {seconds_text(s)}" for name, s in figures.items()]
    text = f"host time of a warm call: {', '.join(words)}"
    if not site.is_gpu:
        return right(f"{text}; told, not judged: there is no device that would wait", **figures)
    return compared(worst, SHARE, f"{text}; at most {worst:.2f} of the device's time", **figures)


def _pretended_seconds(site: Site, made: Plan) -> dict[str, tuple[float, float]]:
    programs = pretended(made, site.ranks.rank, "cpu")
    return {way: (_best(lambda way=way: driven(programs.program(way))), 1.0) for way in DIRECTIONS}


def _best(run: Callable[[], Any]) -> float:
    """Seconds of this thread, the best of several."""
    times: list[float] = []
    for _ in range(ROUNDS):
        begin = time.thread_time()
        run()
        times.append(time.thread_time() - begin)
    return min(times)


def _real_seconds(site: Site, made: Plan) -> dict[str, tuple[float, float]]:
    """(host, device) seconds of either direction, the best of several."""
    run, group = MeasuredRun(made, site.ranks), site.group()
    found: dict[str, tuple[float, float]] = dict.fromkeys(DIRECTIONS, (float("inf"), float("inf")))
    for _ in range(ROUNDS):
        out: Tensor | None = None
        for way in DIRECTIONS:
            site.ranks.barrier()
            begin, start, stop = time.perf_counter(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            out = _one_pass(run, group, way, out)
            host = time.perf_counter() - begin
            stop.record()
            site.ranks.finish()
            found[way] = min(found[way][0], host), min(found[way][1], start.elapsed_time(stop) / 1e3)
    return found
