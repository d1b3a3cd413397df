"""Mistakes that are planted before tests/gpu runs, each of which must fail its own test and no other."""

import contextlib
import time
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist

import longspan as ls
from longspan.cli import measure
from longspan.kernels import kernel_named
from longspan.kernels.cuda_flash import Flash
from longspan.run.transports import ProcessGroup
from tests.gpu import site, test_exact, test_training
from tests.gpu.suite import run_suite

SLOW = 10e6
"""Bytes per second of the slow link, from rank 1 to rank 2."""


@contextlib.contextmanager
def replaced(owner, name, value):
    """Also of frozen values."""
    before = getattr(owner, name)
    setting = setattr if isinstance(owner, type) or not hasattr(owner, "__dataclass_fields__") else object.__setattr__
    setting(owner, name, value)
    try:
        yield
    finally:
        setting(owner, name, before)


def nothing():
    return contextlib.nullcontext()


def wrong_kernel():
    """dq of float16 is 1% too large. Attention over ranks is checked in other dtypes."""
    kernel = kernel_named("cpu_flash")
    right = kernel.backward_op

    def backward_op(dout, q, *rest):
        dq, dk, dv = right(dout, q, *rest)
        return (dq * 1.01 if q.dtype == torch.float16 else dq), dk, dv

    return replaced(kernel, "backward_op", backward_op)


def kernel_reads_beside():
    """Keys of float16 are read one row too far, as from a pointer that is off."""
    kernel = kernel_named("cpu_flash")
    right = kernel.op

    def op(q, k, *rest):
        end = k.storage_offset() + k.stride(2) + sum((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True))
        if q.dtype == torch.float16 and end < k.untyped_storage().nbytes() // k.element_size():
            k = k.as_strided(k.shape, k.stride(), k.storage_offset() + k.stride(2))
        return right(q, k, *rest)

    return replaced(kernel, "op", op)


class Late:
    """A message that arrives as late as a slow link would bring it."""

    def __init__(self, work, num_bytes):
        self.work, self.when = work, time.monotonic() + num_bytes / SLOW

    def wait(self, *more):
        self.work.wait(*more)
        time.sleep(max(0.0, self.when - time.monotonic()))
        return True


def slow_link():
    """Whatever rank 2 gets from rank 1 takes its time."""
    start = dist.batch_isend_irecv

    def batch(ops):
        slow = dist.get_rank() == 2
        works = start(ops)
        return [
            Late(work, op.tensor.numel()) if slow and op.op is dist.irecv and op.group_peer == 1 else work
            for op, work in zip(ops, works, strict=True)
        ]

    return replaced(dist, "batch_isend_irecv", batch)


def sync():
    """The GPU's kernel looks at a number before it starts."""
    right = Flash.forward

    def forward(self, work):
        with contextlib.suppress(RuntimeError):  # a meta tensor has no number; the operator was called all the same
            bool(work.q_BHQD.isnan().any())
        return right(self, work)

    return replaced(Flash, "forward", forward)


def copy():
    """The GPU's kernel makes a tensor on the host and copies it, in every call."""
    right = Flash.backward

    def backward(self, work, upstream):
        torch.tensor([work.scale]).to(work.q_BHQD.device)
        return right(self, work, upstream)

    return replaced(Flash, "backward", backward)


def hoard():
    """Every step allocates far more than the plan says."""
    start = ProcessGroup._start

    def hoarding(self, exchange):
        self.hoard = torch.zeros(64 << 20, dtype=torch.uint8)
        return start(self, exchange)

    return replaced(ProcessGroup, "_start", hoarding)


def slow_call():
    """Calls of 4,096 tokens sleep; those that calibrate are shorter or longer."""
    right = measure.attention

    def attention(q, k, v, plan, **options):
        time.sleep(2.0 if plan.layout.seq_len == 4096 else 0.0)
        return right(q, k, v, plan, **options)

    return replaced(measure, "attention", attention)


def raises():
    """Rank 2 alone raises in one test."""
    right = test_exact.verify_plan

    def verify_plan(site, plan, group, **options):
        if site.ranks.rank == 2 and plan.scheme.name == "exchange":
            raise OSError("cannot read the data")
        return right(site, plan, group, **options)

    return replaced(test_exact, "verify_plan", verify_plan)


def far_rows():
    """dk of float32 is 1% too large in tiles with more keys than short sequences have."""
    kernel = kernel_named("cpu_flash")
    right = kernel.backward_op

    def backward_op(dout, q, k, *rest):
        dq, dk, dv = right(dout, q, k, *rest)
        return dq, (dk * 1.01 if q.dtype == torch.float32 and k.shape[2] > 150 else dk), dv

    return replaced(kernel, "backward_op", backward_op)


def kept_messages():
    """Every exchange leaves memory behind: too little to be seen in the peak of one call."""
    start, kept = ProcessGroup._start, []

    def keeping(self, exchange):
        kept.append(torch.zeros(1 << 16, dtype=torch.uint8))
        return start(self, exchange)

    return replaced(ProcessGroup, "_start", keeping)


def scaled(owner, name, when):
    """A call's result is 0.1% too large."""
    right = getattr(owner, name)

    def call(*args, **options):
        result = right(*args, **options)
        return result * 1.001 if when(options) else result

    return replaced(owner, name, call)


def part_of_group():
    return scaled(test_exact, "attention", lambda options: options["group"].size() < dist.get_world_size())


def recurrence():
    return scaled(ls, "gated_delta_rule", lambda options: "plan" in options)


def convolution():
    return scaled(ls, "causal_conv1d", lambda options: "plan" in options)


def huggingface_loss():
    from longspan import huggingface

    return scaled(huggingface, "full_loss", lambda options: True)


def recomputed():
    """What is computed again in backward has other inputs."""
    right = test_training.checkpoint

    def checkpoint(block, x, attend, **options):
        calls = []

        def run(x, attend):
            calls.append(x)
            return block(x * (1.01 if len(calls) > 1 else 1.0), attend)

        return right(run, x, attend, **options)

    return replaced(test_training, "checkpoint", checkpoint)


def compiled():
    return replaced(torch, "compile", lambda call, **options: lambda *args: call(*args) * 1.001)


def averaged():
    """Gradients that FSDP2 averages are shares of a sum."""
    right = test_training.token_loss
    return replaced(
        test_training, "token_loss", lambda *args, **options: right(*args, **options | {"gradients": "sum"})
    )


PLANTS = {
    plant.__name__: plant
    for plant in (
        nothing, wrong_kernel, kernel_reads_beside, slow_link, sync, copy, hoard, slow_call, raises, far_rows,
        kept_messages, part_of_group, recurrence, convolution, huggingface_loss, recomputed, compiled, averaged,
    )
}  # fmt: skip


def planted(name, *words):
    """Exit status and outcomes of the tests on this rank, with something planted."""
    with PLANTS[name](), mock.patch.object(site, "GROUP_TIMEOUT", timedelta(seconds=20)):
        return run_suite(*words)
