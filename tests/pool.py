"""Ranks as long-lived processes: forkserver with torch preloaded, Gloo on loopback, one function call at a time.

A pool that failed or timed out is ended and made anew, so that no later test meets half-finished messages.
"""

import contextlib
import multiprocessing
import os
import tempfile
import traceback

# Each takes seconds, once here and not in every rank. What is not installed is left out.
PRELOAD = [
    *("torch", "torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "longspan.training"),
    *("transformers.models.llama.modeling_llama", "transformers.trainer"),
]
_context = None
_pools = {}
TIMEOUT = 120.0


def context():
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
    return _context


def _serve(rank, world, store, pipe):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        call = pipe.recv()
        if call is None:
            return
        function, args = call
        try:
            pipe.send(("result", function(*args)))
        except BaseException:
            pipe.send(("error", traceback.format_exc()))


class RankPool:
    """`world` processes in one Gloo group."""

    def __init__(self, world):
        self.world = world
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = context().Pipe()
            process = context().Process(target=_serve, args=(rank, world, store, there), daemon=True)
            process.start()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function, *args, timeout=TIMEOUT):
        """function(*args) on every rank; results by rank. The function must be importable by name."""
        for pipe in self.pipes:
            pipe.send((function, args))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                self.end()
                raise TimeoutError(f"rank {rank} of {self.world} did not answer within {timeout} s")
            kind, value = pipe.recv()
            if kind == "error":
                self.end()
                raise AssertionError(f"rank {rank} of {self.world} raised:\n{value}")
            results.append(value)
        return results

    def end(self):
        _pools.pop(self.world, None)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(5)
        self.folder.cleanup()


def pool(world) -> RankPool:
    """The pool of this size, made when first asked for."""
    if world not in _pools:
        _pools[world] = RankPool(world)
    return _pools[world]


def end_all():
    for found in list(_pools.values()):
        with contextlib.suppress(Exception):
            found.end()
