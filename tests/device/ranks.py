"""Ranks with the stand-in device: a server process for each form, which starts the device, imports what ranks need, and
forks them. Nothing is started in the process that runs the tests.

A pool that failed or timed out is ended and made anew, as in `tests/pool.py`.
"""

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from multiprocessing.connection import Client, Listener
from pathlib import Path

import pytest

from tests.device import build

ROOT = Path(__file__).parents[2]
PRELOAD = ("torch.distributed.fsdp", "torch.utils.checkpoint", "longspan.training", "tests.device.models")
TIMEOUT = 120.0
_servers = {}
_pools = {}


def ranks(world, form="standin"):
    """The pool of so many ranks; skips the test where the device cannot be built."""
    if why := build.missing_tool():
        pytest.skip(why)
    if (form, world) not in _pools:
        if form not in _servers:
            _servers[form] = Server(form)
        _pools[form, world] = Ranks(_servers[form], form, world)
    return _pools[form, world]


class Server:
    """A process with the device that forks ranks."""

    def __init__(self, form):
        build.build()  # here, with its own time limit
        self.folder = tempfile.TemporaryDirectory(prefix="longspan-device-")
        self.address = os.path.join(self.folder.name, "server")
        self.listener = Listener(self.address, "AF_UNIX", backlog=64)
        path = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        command = [sys.executable, "-m", "tests.device.ranks", form, self.address]
        self.process = subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True)
        self.pipe = self.accept(TIMEOUT)
        atexit.register(self.end)

    def accept(self, timeout):
        self.listener._listener._socket.settimeout(timeout)
        return self.listener.accept()

    def fork(self, world, rank, store):
        """The process id of a new rank, and a pipe to it."""
        self.pipe.send((world, rank, store))
        pid = self.pipe.recv()
        return pid, self.accept(TIMEOUT)

    def end(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # the session that was started above, and its ranks
        self.process.wait(10)
        self.listener.close()
        self.folder.cleanup()


class Ranks:
    """`world` processes, one rank and one device each, in one process group."""

    def __init__(self, server, form, world):
        self.server, self.key, self.world = server, (form, world), world
        store = os.path.join(server.folder.name, f"store-{os.urandom(4).hex()}")
        self.members = [server.fork(world, rank, store) for rank in range(world)]

    def run(self, function, *args, timeout=TIMEOUT):
        """function(*args) on every rank; results by rank. The function must be importable by name."""
        for _, pipe in self.members:
            pipe.send((function, args))
        results = []
        for rank, (_, pipe) in enumerate(self.members):
            if not pipe.poll(timeout):
                self.end()
                raise TimeoutError(f"rank {rank} of {self.world} did not answer within {timeout} s")
            try:
                kind, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                kind, value = "error", "the process ended"
            if kind == "error":
                self.end()
                raise AssertionError(f"rank {rank} of {self.world} raised:\n{value}")
            results.append(value)
        return results

    def end(self):
        _pools.pop(self.key, None)
        for pid, pipe in self.members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            pipe.close()


# ---- in the server's process -----------------------------------------------------------------------------------------


def _serve_ranks(form, address):
    from tests.device import forms

    forms.start(form)
    for name in PRELOAD:
        __import__(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks that end are not waited for
    pipe = Client(address, "AF_UNIX")
    while True:
        try:
            world, rank, store = pipe.recv()
        except EOFError:
            return
        pid = os.fork()
        if not pid:
            pipe.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            try:
                _serve_calls(world, rank, store, Client(address, "AF_UNIX"))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        pipe.send(pid)


def _serve_calls(world, rank, store, pipe):
    import torch
    import torch.distributed as dist

    from tests.device import forms

    torch.set_num_threads(1)
    torch.accelerator.set_device_index(rank)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    dist.init_process_group(forms.backend(), init_method=f"file://{store}", rank=rank, world_size=world)
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            answer = "result", function(*args)
        except BaseException:
            answer = "error", traceback.format_exc()
        forms.set_schedule("plain")
        pipe.send(answer)


if __name__ == "__main__":
    _serve_ranks(*sys.argv[1:])
