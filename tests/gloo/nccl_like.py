"""A process group that behaves like NCCL, as far as anybody can tell who has no GPU.

What it has of NCCL: operations are put on a queue and done later, in order, by a device (a thread here); a work's
`wait` only orders streams, so it returns at once, and `is_completed` tells whether the device has got there; messages
have no tags, they meet by their order, and one that meets another of a different size never ends; a send ends when the
other side has taken it; the first operation makes the communicator, in which the host waits until all ranks have come;
`abort` ends everything as if it were done, what comes later raises. `synchronize` is the host that waits for its
device: when all was aborted, it returns as if nothing had happened.

Tensors are on the CPU, and pretend: `pretend` tells the code under test that calls are on "cuda:0" and that the group's
backends are those of an NCCL job, or of a mixed one, whose CPU messages go over real Gloo. The bytes go through the
job's store. What is computed from a message that has not arrived is nonsense, as a host's arithmetic does not wait for
a device; results are none of the matters that are tested with it.
"""

import atexit
import contextlib
import threading
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from longspan.run import group as trust_group

DEVICE = torch.device("cuda", 0)
STEPS = 1024
"""Steps that a tag can tell; those from COMPARED on are messages of the host."""
TICK = 0.003


class Work:
    """What was begun. Never waited for: only put in order."""

    def __init__(self, group, progress):
        self.group, self.progress = group, progress
        self.is_done = False

    def wait(self, timeout=None):
        self.group.check()
        return True

    def is_completed(self):
        self.group.num_polls += 1
        return self.is_done or self.group.is_aborted


class NcclLike(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.store, self.timeout = store, timeout
        self.joined, self.is_aborted, self.num_polls = False, False, 0
        self.before_join = lambda: None
        self.gloo = None
        self._numbers, self._queue, self._active = {}, deque(), deque()
        self._lock = threading.Lock()
        self._is_over = False
        self._thread = threading.Thread(target=self._device, daemon=True)
        self._thread.start()
        atexit.register(self._end)

    # -- what PyTorch and Longspan ask for --------------------------------------------------------------------------

    def send(self, tensors, dst, tag=0):
        if tag % STEPS >= trust_group.COMPARED and self.gloo is not None:
            return self.gloo.send(tensors, dst, tag)
        key, raw = self._next(self.rank(), dst), tensors[0].detach().contiguous().view(torch.uint8).numpy().tobytes()
        state = {}

        def progress():
            if not state:
                state["sent"] = True
                self.store.set(key, raw or b" ")
            return not self.store.check([key])

        return self._begin(progress)

    def recv(self, tensors, src, tag=0):
        if tag % STEPS >= trust_group.COMPARED:
            return self.gloo.recv(tensors, src, tag)
        key, (tensor,) = self._next(src, self.rank()), tensors

        def progress():
            if not self.store.check([key]):
                return False
            raw = self.store.get(key)
            if len(raw) != max(1, tensor.numel() * tensor.element_size()):
                return False  # and never will be
            if tensor.numel():
                tensor.view(torch.uint8).copy_(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
            self.store.delete_key(key)
            return True

        return self._begin(progress)

    def allreduce(self, tensors, opts=None):
        name, state = self._next("all", "all"), {}

        def progress():
            if not state:
                state["came"] = True
                self.store.add(name, 1)
            return int(self.store.add(name, 0)) >= self.size()

        return self._begin(progress)

    def abort(self):
        self.is_aborted = True

    def _end(self):
        """A thread that is inside of the store's code when the interpreter ends would end the process by a signal."""
        self._is_over = True
        self._thread.join(5.0)

    def _get_backend(self, device):
        return self

    def getBackendName(self):  # noqa: N802
        return "nccl_like"

    @property
    def group_name(self):
        return dist.distributed_c10d._world.pg_names[self]

    # -- the device -------------------------------------------------------------------------------------------------

    def kernel(self, seconds):
        """A kernel that takes this long, behind all that is on the queue and before all that comes."""
        return self._put(Work(self, seconds))

    def synchronize(self):
        """The host waits for its device."""
        while not self.is_aborted and (self._queue or self._active):
            time.sleep(TICK)

    def check(self):
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted on this rank")

    def _begin(self, progress):
        self.check()
        if not self.joined:
            self._join()
        return self._put(Work(self, progress))

    def _put(self, work):
        with self._lock:
            self._queue.append(work)
        return work

    def _join(self):
        """The communicator is made by all ranks together, inside of the first operation."""
        self.before_join()
        self.store.add("joined", 1)
        while int(self.store.add("joined", 0)) < self.size():
            self.check()
            time.sleep(TICK)
        self.joined = True

    def _next(self, src, dst):
        """The name of the next message from one rank to another: messages meet by their order alone."""
        self._numbers[src, dst] = number = self._numbers.get((src, dst), 0) + 1
        return f"{src}>{dst}/{number}"

    def _device(self):
        with contextlib.suppress(dist.DistStoreError, dist.DistNetworkError, RuntimeError):  # the job is over
            while not self.is_aborted and not self._is_over:
                time.sleep(TICK)
                self._do_some()

    def _do_some(self):
        while not self.is_aborted and not self._is_over:
            with self._lock:
                work = self._queue[0] if self._queue else None
                if work is None or (isinstance(work.progress, float) and self._active):
                    break
                self._active.append(self._queue.popleft())
            if isinstance(work.progress, float):
                end = time.monotonic() + work.progress
                while time.monotonic() < end and not self.is_aborted and not self._is_over:
                    time.sleep(TICK)
                self._active.popleft()
                work.is_done = True
        states = [work.is_done or work.progress() for work in self._active]  # all that were begun go on at once
        for work, state in zip(list(self._active), states, strict=True):
            work.progress = (lambda: True) if state else work.progress
        while self._active and states.pop(0):
            self._active[0].is_done = True
            self._active.popleft()


def pretend(kind):
    """A new group of all ranks, "nccl" or "mixed"; calls over it are on a device from now on."""
    if "nccl_like" not in dist.Backend.backend_list:
        dist.Backend.register_backend("nccl_like", NcclLike, devices=["cpu"])
    ranks, timeout = list(range(dist.get_world_size())), timedelta(seconds=60)
    group = dist.new_group(ranks, backend="nccl_like", timeout=timeout)
    config = "cuda:nccl_like"
    if kind == "mixed":
        config = "cpu:gloo,cuda:nccl_like"
        group.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", group.store), group.rank(), group.size(), timeout)
    dist.distributed_c10d._world.pg_backend_config[group] = config
    call = trust_group.Members.call
    trust_group.Members.call = lambda self, made: call(self, replace(made, device=DEVICE))
    trust_group.token_on = lambda device: torch.zeros(1, dtype=torch.uint8)
    return group
