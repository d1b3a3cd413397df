"""Jobs of fault cases: fresh processes for every case, a few cases at a time, with a store that the tests hold."""

import queue
import socket
import threading
import time

from tests.gloo.fault_work import Case, main
from tests.pool import context

LIMIT = 60.0


def name_of(case):
    more = [case.settings[key] for key in ("differs", "mutant", "function") if key in case.settings]
    return "-".join((str(case), *more))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Launcher:
    """Holds the store, as torchrun does, and runs cases, a few at a time: most of their time is waiting."""

    def __init__(self, cases, repeats, at_once=2):
        import torch.distributed as dist

        self.repeats, self.at_once = repeats, at_once
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.results = {name_of(case): [None] * repeats for case in cases}
        self.done = {name: threading.Event() for name in self.results}
        self.work = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.started = False
        context()

    def result(self, case, wanted):
        """What the ranks of every repeat reported; the first question starts all cases that were selected."""
        if not self.started:
            self.started = True
            for number, each in enumerate(wanted):
                for repeat in range(self.repeats):
                    self.work.put((each, repeat, number * self.repeats + repeat))
            for _ in range(self.at_once):
                threading.Thread(target=self._serve, daemon=True).start()
        name = name_of(case)
        assert self.done[name].wait(280), "the case did not run"
        return self.results[name]

    def _serve(self):
        while True:
            try:
                case, repeat, number = self.work.get_nowait()
            except queue.Empty:
                return
            found = self._run(case, number)
            with self.lock:
                results = self.results[name_of(case)]
                results[repeat] = found
                if None not in results:
                    self.done[name_of(case)].set()

    def _run(self, case, number):
        port = free_port() if case.store == "rank 0" else self.store.port
        case = Case(**{**case.__dict__, "settings": {**case.settings, "number": number}})
        pipes, processes = [], []
        for rank in range(case.world):
            here, there = context().Pipe()
            with self.lock:  # the forkserver takes one request at a time
                process = context().Process(target=main, args=(rank, case, port, there), daemon=True)
                process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return [self._heard(pipe, case, rank) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(10)

    def _heard(self, pipe, case, rank):
        """Everything a rank said, until it reported or died; of one that was struck, not more than that."""
        heard, end = [], time.monotonic() + case.settings.get("limit", LIMIT)
        last = rank == case.victim and not case.everyone
        while time.monotonic() < end and not (last and heard):
            try:
                if not pipe.poll(0.2):
                    continue
                heard.append(pipe.recv())
            except (EOFError, OSError):
                break
            if heard[-1][0] != "struck":
                break
        return heard
