"""Ranks that are healthy but look dead: the interpreter's lock is held, a process is stopped for a second, the cores
are taken by others. Nobody may be named. Beside them, ranks that pretend to be on different hosts."""

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time


def hold(seconds):
    """Keeps the interpreter's lock, as a long garbage collection or a foreign extension does."""
    ctypes.PyDLL(None).usleep(int(1e6 * seconds))


class Lines(logging.Handler):
    """What is warned of."""

    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


class Rank:
    def __init__(self, rank, world, port, name, far):
        import torch
        import torch.distributed as dist

        from longspan.watch import monitor as liveness

        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.rank, self.world, self.torch = rank, world, torch
        if far:  # every rank on a host of its own, as far as the others can tell
            this = liveness.current_process
            liveness.current_process = lambda: this()._replace(host=bytes([rank + 1]) * 16)
        store = dist.TCPStore("127.0.0.1", port, world, False, wait_for_workers=False)
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=world)
        self.group, self.said = dist.group.WORLD, Lines()
        logging.getLogger("longspan").addHandler(self.said)
        import longspan as ls

        self.plan = ls.plan(
            ls.masks.causal(), ls.layouts.zigzag(64 * world, world), q_heads=2, kv_heads=2, head_dim=16,
            dtype="float32", scheme="ring",
        )  # fmt: skip

    def step(self, forward=None, between=None, backward=None):
        import longspan as ls

        done = []

        def function(score, b, h, q, kv):
            if score.ndim:
                act = backward if self.torch.is_grad_enabled() else forward
                if act is not None and not done:
                    done.append(True)
                    act()
            return score

        q, k, v = self.torch.randn(3, 1, 2, 64, 16, requires_grad=True)
        out = ls.attention(q, k, v, self.plan, group=self.group, score_mod=function)
        if between is not None:
            between()
        out.sum().backward()


def held(rank, world, port, where, who, seconds, far):
    """The lock is held on one or all ranks, somewhere in a step."""
    found = Rank(rank, world, port, f"held {where} {who} {seconds} {far}", far)
    found.step()
    act = (lambda: hold(seconds)) if who in ("all", rank) else None
    found.step(**{where: act})
    found.step()
    return found.said.lines


def stopped(rank, world, port, seconds, far):
    """Rank 1 is stopped for a moment while the others wait for it."""
    found = Rank(rank, world, port, f"stopped {seconds} {far}", far)
    found.step()
    if rank == 1:
        script = f"import os, time; time.sleep({seconds}); os.kill({os.getpid()}, {int(signal.SIGCONT)})"
        with subprocess.Popen([sys.executable, "-S", "-c", script]):
            os.kill(os.getpid(), signal.SIGSTOP)
    found.step()
    return found.said.lines


def crowded(rank, world, port, seconds, far):
    """Calls while the cores are taken by others."""
    found = Rank(rank, world, port, f"crowded {seconds} {far}", far)
    end, stop, steps = time.monotonic() + seconds, found.torch.zeros(1), 0
    while not stop.item():
        found.step()
        steps += 1
        stop = found.torch.tensor([float(time.monotonic() > end)])
        found.torch.distributed.broadcast(stop, 0)
    return [*found.said.lines, f"{steps} steps"]


def struck(rank, world, port, what):
    """Ranks on different hosts, as it seems: rank 1 is killed or stopped, or its host is lost with its watcher."""
    found = Rank(rank, world, port, f"struck {what}", True)
    found.step()
    if rank == 1:
        from longspan.run.group import members_of
        from longspan.watch.monitor import _watchers

        store = members_of(found.group)._watch.store.again(20.0)
        while store.get("heartbeat/1") is None:  # its watcher has not begun
            time.sleep(0.1)
        time.sleep(0.5)
        watcher = next(iter(_watchers.values())).process.pid
        found.pipe.send(("struck", time.time(), watcher))
        if what == "lost":
            os.kill(watcher, signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
    found.step()


def threads(rank, world, port):
    """A second thread comes while the first is inside of a call: it is refused, the first goes on."""
    from longspan.errors import BusyError

    found, refused = Rank(rank, world, port, "threads", False), []
    found.step()

    def second():
        try:
            found.step()
        except BusyError as error:
            refused.append(str(error))

    def while_inside():
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()

    found.step(forward=while_inside)
    found.step(backward=while_inside)
    second()  # nobody else is inside now: another thread would do as well
    thread = threading.Thread(target=second)
    thread.start()
    thread.join()
    found.step()
    return refused


def main(name, rank, world, port, args, pipe):
    """A rank's process. It says how it ended, and stays: nobody learns of a fault by a neighbour's exit."""
    Rank.pipe = pipe
    try:
        pipe.send(("fine", time.time(), globals()[name](rank, world, port, *args)))
    except BaseException as error:
        pipe.send((type(error).__name__, time.time(), str(error)))
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    sys.exit(0)


def busy():
    """One that takes a core for itself."""
    while True:
        for _ in range(1_000_000):
            pass
