"""What a rank does in a case over a group that behaves like NCCL: faults that must be named, and things that look like
faults and must not be.

The host never waits in a call. It waits for its device where a training loop does, in `finish`: whatever happened by
then must be raised there or before.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import time

from tests.gloo import nccl_like
from tests.gloo.alarm_work import Lines, hold
from tests.gloo.fault_work import Rank

AT_ONCE = "first", "joining"
"""Cases that come before any right call."""


class NcclRank(Rank):
    def __init__(self, rank, case, port, pipe):
        super().__init__(rank, case, port, pipe)
        if "mutant" in case.settings:
            MUTANTS[case.settings["mutant"]]()
        self.group = nccl_like.pretend(case.settings["group"])
        self.said = Lines()
        logging.getLogger("longspan").addHandler(self.said)

    def step(self, **changes):
        self.attention(self.plan(**changes)).sum().backward()
        self.finish()

    def finish(self):
        """The host waits for its device, as in `loss.item()`."""
        self.group.synchronize()

    def run(self):
        try:
            self.rehearse()
            getattr(self, self.case.where.replace(" ", "_"))()
            self.finish()
            self.step()
            self.report("fine", "")
        except Exception as error:
            self.report(type(error).__name__, str(error))

    def rehearse(self):
        """A right call first, in most cases."""
        if self.case.where not in AT_ONCE:
            self.step()

    def report(self, kind, text):
        """How it ended; whether the communicator was aborted, now or in a moment; and what was logged as an error."""
        when, end = time.time(), time.monotonic() + 1.5
        while kind == "RankError" and not self.group.is_aborted and time.monotonic() < end:
            time.sleep(0.02)
        errors = [line for line in self.said.lines if line.startswith("rank ") and "has waited" not in line]
        self.pipe.send((kind, when, f"{text} [aborted: {self.group.is_aborted}, errors: {len(errors)}]"))

    # -- where faults happen ----------------------------------------------------------------------------------------

    def first(self):
        """In the very first call, after the communicator was made."""
        self.forward()

    def joining(self):
        """The victim does not come to the first operation: the others' hosts stand inside of it."""
        self.group.before_join = self.strike
        self.step()

    def layers(self):
        """Between two of several layers that are under way."""
        plan = self.plan()
        for layer in range(6):
            if layer == 4:
                self.strike()
            self.attention(plan)

    def ahead(self):
        """Hosts are far ahead of their devices, further than a status tells of."""
        plan = self.plan()
        for _ in range(12):
            self.group.kernel(0.2)
            self.attention(plan)
        time.sleep(0.6)  # the others know by now how far its host is
        self.strike()

    def swapped(self):
        """The victim makes two calls of one plan in another order. Their messages have the same sizes: they meet."""
        plan = self.plan()
        for name in ("text", "image"):
            self.attention(plan, name=name)
        self.finish()
        self.pipe.send(("struck", time.time(), ""))
        for name in ("image", "text") if self.is_victim else ("text", "image"):
            self.attention(plan, name=name)
        self.finish()
        end = time.monotonic() + 8
        while time.monotonic() < end:  # whatever else a loop does; the calls themselves were over at once
            time.sleep(0.01)

    def other_kernel(self):
        """The victim's flash attention is another one."""
        import longspan as ls
        from longspan.run import ops

        self.pipe.send(("struck", time.time(), ""))
        ops.full_name = lambda name: "fa3" if self.is_victim else "varlen (FA2)"
        self.step(mask=ls.masks.causal() & ls.masks.sliding_window(30))

    # -- what looks like a fault and is none ------------------------------------------------------------------------

    def nothing(self):
        for _ in range(3):
            self.step()

    def long_kernel(self):
        """One device is busy for much longer than anybody's patience; its host is far ahead."""
        if self.is_victim:
            self.group.kernel(6.0)
        for _ in range(4):
            self.attention(self.plan())

    def long_kernels(self):
        """All devices are."""
        self.group.kernel(4.5 + 0.5 * self.rank)
        self.step()

    def many_in_flight(self):
        """Thirty calls under way, one device ten times slower than the others."""
        plan = self.plan()
        for _ in range(30):
            self.group.kernel(0.2 if self.is_victim else 0.02)
            self.attention(plan)

    def slow_host(self):
        """One host comes late to every layer."""
        for _ in range(3):
            if self.is_victim:
                time.sleep(3.0)
            self.attention(self.plan())

    def lock(self):
        """The interpreter's lock is held, so that no thread of the rank can speak."""
        if self.is_victim:
            hold(5.0)
        self.step()

    def short_stop(self):
        if self.is_victim:
            self._let_go_after(1.0, f"os.kill({os.getpid()}, {int(signal.SIGCONT)})")
            os.kill(os.getpid(), signal.SIGSTOP)
        self.step()

    def unneeded_stop(self):
        """One rank is stopped for longer than anybody's patience, while nobody needs it."""
        if self.is_victim:
            self._let_go_after(3.0, f"os.kill({os.getpid()}, {int(signal.SIGCONT)})")
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            time.sleep(3.5)
        self.step()

    def debugger(self):
        """A debugger holds one rank for much longer than anybody's patience."""
        if self.is_victim:
            ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1 & (2**64 - 1)), 0, 0, 0)  # anybody may
            with subprocess.Popen([sys.executable, "-S", "-c", DEBUGGER, str(os.getpid())], stdout=-1) as process:
                assert process.stdout.readline() == b"held\n"  # which it can only read when it was let go again
        self.step()

    def _let_go_after(self, seconds, line):
        subprocess.Popen([sys.executable, "-S", "-c", f"import os, time; time.sleep({seconds}); {line}"])

    def early_end(self):
        """Rank 0 has sent all that it had to, and ends; rank 1 is not done, because the device of rank 2 is slow."""
        import atexit

        import longspan as ls

        mask = ls.masks.documents([96, 96]) & ls.masks.causal()
        plan = self.plan(mask=mask, scheme="exchange")
        if self.rank == 2:
            self.group.kernel(6.0)
        self.attention(plan)
        if self.is_victim:
            self.finish()
            time.sleep(0.5)
            self.report("fine", "")
            atexit._run_exitfuncs()
            os._exit(0)
        self.finish()
        self.report("fine", "")
        self.pipe.recv()

    def disagreement(self):
        """A call that all refuse harms nothing."""
        import longspan as ls
        from longspan.errors import AgreementError

        for _ in range(2):
            try:
                self.step(mask=ls.masks.causal() & ls.masks.sliding_window(17 + self.is_victim))
            except AgreementError:
                continue
            raise RuntimeError("different masks were not noticed")
        time.sleep(1.0)  # time in which a trail that differs would be noticed
        self.step()


DEBUGGER = """
import ctypes, os, sys, time
libc, pid = ctypes.CDLL(None, use_errno=True), int(sys.argv[1])
SEIZE, INTERRUPT, DETACH = 0x4206, 0x4207, 17
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
threads = [int(t) for t in os.listdir(f"/proc/{pid}/task")]
for t in threads:
    assert libc.ptrace(SEIZE, t, None, None) == 0, ctypes.get_errno()
    assert libc.ptrace(INTERRUPT, t, None, None) == 0, ctypes.get_errno()
for t in threads:
    os.waitpid(t, 0x40000000)
print("held", flush=True)
time.sleep(5)
for t in threads:
    libc.ptrace(DETACH, t, None, None)
"""


# -- mutants of the code under test, each in the processes of one case ------------------------------------------------


def nothing_is_polled():
    from longspan.watch.devices import WorkQueue

    WorkQueue.poll = lambda self: None


def nobody_looks():
    from longspan.watch.devices import DevicePoller

    DevicePoller.tick = lambda self, now: None


def nothing_is_aborted():
    from longspan import _torch

    _torch.abort = lambda group, device: None


def nobody_is_interrupted():
    from longspan.watch.devices import Interrupt

    Interrupt.send = lambda self, text: None


def patience_is_ignored():
    from longspan.watch.detector import Detector

    Detector.patience = property(lambda self: 0.2, lambda self, seconds: None)


def devices_are_taken_for_hosts():
    from longspan.watch.detector import Status

    Status.has_finished = Status.has_left


def who_has_delivered_is_not_known():
    from longspan.watch.detector import Status

    Status.has_finished = lambda self, call: False


def calls_are_not_compared():
    from longspan.watch import detector

    detector.first_difference = lambda calls, theirs: None


def calls_are_compared_too_early():
    from longspan.watch.monitor import Watch

    begin_call = Watch.begin_call

    def begin(self, call, identity, name, **fields):
        self.detector.remember(call, identity)
        begin_call(self, call, identity, name, **fields)

    Watch.begin_call = begin


def rows_are_not_compared():
    from longspan.run import agreement

    agreement.DIFFERENT = agreement.SAME


def debuggers_are_stops():
    from longspan.watch import monitor
    from longspan.watch.processes import STOPPED, TRACED, ProcessState, inspect_process

    def seeing(process):
        found = inspect_process(process)
        return ProcessState(STOPPED, found.seconds) if found.state == TRACED else found

    monitor.inspect_process = seeing


def the_start_is_not_watched():
    """As if works were only kept once the host has begun them."""
    from longspan.watch.devices import DevicePoller

    check = DevicePoller._check_ranks
    DevicePoller._check_ranks = lambda self, now: None if self.queue.oldest.works is None else check(self, now)


MUTANTS = {
    f.__name__.replace("_", " "): f
    for f in (
        nothing_is_polled, nobody_looks, nothing_is_aborted, nobody_is_interrupted, patience_is_ignored,
        devices_are_taken_for_hosts, who_has_delivered_is_not_known, calls_are_not_compared,
        calls_are_compared_too_early, rows_are_not_compared, debuggers_are_stops, the_start_is_not_watched,
    )
}  # fmt: skip
