"""A call as the record that ranks compare (`trust.agreement`): what this rank was asked for."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch

from longspan.execution.engine.halo import HaloTask
from longspan.execution.engine.runner import Job
from longspan.execution.kernels.cuda_flash import implementation
from longspan.execution.scoring.pipeline import Scoring
from longspan.execution.trust.agreement import WIDTH, Record
from longspan.execution.trust.settings import Safety
from longspan.schedules.plan import Plan
from longspan.version import VERSION

MAX_OF_ONE = 64
_records: WeakKeyDictionary[Plan, dict[tuple[str, ...], Record]] = WeakKeyDictionary()
"""A plan's records, by what may differ between its calls: a plan is called many times, and its texts are long."""


def record_of(job: Job | HaloTask, device: torch.device, sums: bool | None, name: str, safety: Safety) -> Record:
    """What this rank was asked for; `sums` is None where no gradients are wanted."""
    texts = (
        job.plan.fingerprint[: WIDTH - 1],
        _device(device),
        *_asked(job),
        "not wanted" if sums is None else "sum" if sums else "share",
        str(safety.checked),
        repr(name) if name else "none",
    )
    known = _records.setdefault(job.plan, {})
    if texts not in known:
        while len(known) >= MAX_OF_ONE:
            del known[next(iter(known))]
        known[texts] = _build(job.plan, *texts)
    return known[texts]


def _build(plan: Plan, fingerprint: str, *texts: str) -> Record:
    parts = plan.mask.fingerprint[:16], plan.layout.fingerprint[:16], plan.sizes.text(), plan.dtype
    return Record(VERSION, str(torch.__version__), fingerprint, *parts, *texts)


def _asked(job: Job | HaloTask) -> tuple[str, str, str, str]:
    """Scheme, scale, scores and sinks; a convolution has nothing but a width."""
    if isinstance(job, HaloTask):
        return f"convolution of width {job.conv.width}", "none", "none", "none"
    sinks = "none" if job.sinks is None else f"{tuple(job.sinks.shape)}"
    return _scheme(job.plan), repr(job.scale), _scores(job.scoring), sinks


def _device(device: torch.device) -> str:
    """Ranks must not only compute on devices of one kind, but by one implementation of flash attention."""
    return device.type if device.type == "cpu" else f"{device.type}, {implementation()}"


def _scheme(plan: Plan) -> str:
    name = plan.scheme.name + (", keep" if plan.keep else "")
    return name if plan.chunks is None else f"{name}, chunks = {plan.chunks}, threads = {torch.get_num_threads()}"


def _scores(scoring: Scoring | None) -> str:
    if scoring is None:
        return "none"
    captured = [tuple(t.shape) for t in scoring.captured]
    return f"{len(scoring.functions)} of them, captured {captured}, {scoring.dropout}"
