"""Mistakes that are planted before `longspan acceptance` runs, each of which must turn its own line red and no other.

By name, from tests only: `python -m torch.distributed.run ... -m tests.gloo.acceptance_work PLANT ARGUMENTS...`.
"""

import contextlib
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from longspan.cli import measure
from longspan.kernels import kernel_named
from longspan.kernels.cuda_flash import Flash
from longspan.run.transports import ProcessGroup
from tests.gloo.cli_work import command
from tests.gpu import session, test_faults

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
    kernel = kernel_named("cpu_flash").kernel
    right = kernel.backward_op

    def backward_op(dout, q, *rest):
        dq, dk, dv = right(dout, q, *rest)
        return (dq * 1.01 if q.dtype == torch.float16 else dq), dk, dv

    return replaced(kernel, "backward_op", backward_op)


def kernel_reads_beside():
    """Keys of float16 are read one row too far, as from a pointer that is off."""
    kernel = kernel_named("cpu_flash").kernel
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
        if work.q_BHQD.isnan().any():
            raise ValueError
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


def death():
    """Rank 2 is killed in one line."""
    return in_one_line(lambda: os.kill(os.getpid(), signal.SIGKILL))


def raises():
    """Rank 2 alone raises in one line, with a text that names a path."""

    def fail():
        raise OSError("cannot read /home/someone/secret.bin")

    return in_one_line(fail)


def in_one_line(act):
    right = session.Session._try

    def attempt(self, name, least_ranks, test, arguments):
        if name == "exact.exchange" and self.site.ranks.rank == 2:
            test, arguments = act, {}
        return right(self, name, least_ranks, test, arguments)

    return replaced(session.Session, "_try", attempt)


def blind_watch():
    """Faults happen to jobs whose ranks do not watch each other."""
    return replaced(test_faults, "PROGRAM", "tests.gloo.acceptance_blind_rank")


PLANTS = {
    plant.__name__: plant
    for plant in (
        nothing, wrong_kernel, kernel_reads_beside, slow_link, sync, copy, hoard, slow_call, death, raises, blind_watch,
    )
}  # fmt: skip


def planted(name, *words):
    """(exit code, stdout, stderr) of the command with something planted."""
    with PLANTS[name]():
        return command("acceptance", *words)


if __name__ == "__main__":
    from longspan.cli import main

    with PLANTS[sys.argv[1]]():
        sys.exit(main(["acceptance", *sys.argv[2:]]))
