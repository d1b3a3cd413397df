"""What a rank does in a fault case: a right call first, then the fault on one rank, while the others report what they
see and stay alive, so that nobody learns of a fault by a neighbour's exit."""

import atexit
import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field

KILL, STOP, RAISE, LEAVE = "kill", "stop", "raise", "leave"


@dataclass(frozen=True)
class Case:
    """One fault: what happens to whom, where."""

    what: str
    where: str = "forward"
    world: int = 3
    victim: int = 2
    scheme: str = "ring"
    megabytes: int = 0
    store: str = "launcher"
    named: str = ""
    """What every survivor's message must hold beside the victim's name."""
    kind: str = "RankError"
    everyone: bool = False
    """The victim raises, too."""
    settings: dict = field(default_factory=dict, hash=False)

    def __str__(self):
        size = f"-{self.megabytes}MB" if self.megabytes else ""
        group = f"{self.settings['group']}-" if "group" in self.settings else ""
        return f"{group}{self.what}-{self.where}{size}-{self.scheme}-{self.world}-victim{self.victim}-{self.store}"


class Rank:
    """One rank of a case, in a process of its own."""

    def __init__(self, rank, case, port, pipe):
        import torch
        import torch.distributed as dist

        self.rank, self.case, self.pipe = rank, case, pipe
        self.is_victim = rank == case.victim
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = case.settings.get("interfaces", "lo")
        hosts = case.store == "rank 0" and rank == 0
        store = dist.TCPStore("127.0.0.1", port, case.world, hosts, wait_for_workers=False)
        name = "case" if case.store == "rank 0" else str(case.settings["number"])
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=case.world)
        self.group = dist.group.WORLD

    def plan(self, **changes):
        import longspan as ls

        heads, dim, tokens = 2, 16, 64 * self.case.world
        if self.case.megabytes:  # rows of 64-token documents: much to send, little to compute
            heads, dim = 4, 256
            tokens = self.case.world * max(64, self.case.megabytes * 2**20 // (heads * dim * 2 * 4) // 64 * 64)
        mask = ls.masks.documents([64] * (tokens // 64)) if self.case.megabytes else ls.masks.causal()
        mask = changes.pop("mask", mask)
        layout = changes.pop("layout", ls.layouts.contiguous(tokens, self.case.world))
        asked = {"q_heads": heads, "kv_heads": heads, "head_dim": dim, "dtype": "float32", "scheme": self.case.scheme}
        return ls.plan(mask, layout, **{**asked, **changes})

    def attention(self, plan, function=None, **options):
        import torch

        import longspan as ls

        sizes = plan.sizes
        tokens = int(plan.layout.num_tokens[self.rank])
        dtype = getattr(torch, plan.dtype)
        shape = (1, sizes.q_heads, tokens, sizes.head_dim)
        q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_() for _ in range(3))
        return ls.attention(q, k, v, plan, group=self.group, score_mod=function, **options)

    def convolution(self):
        import torch

        import longspan as ls

        layout = ls.layouts.contiguous(64 * self.case.world, self.case.world)
        plan = ls.conv_plan(None, layout, channels=8, width=4, dtype="float32")
        x = torch.randn(1, 64, 8, requires_grad=True)
        return ls.causal_conv1d(x, torch.randn(8, 4), plan=plan, group=self.group)

    def strike(self):
        """The fault itself, on the victim, with the moment it happened."""
        if not self.is_victim:
            return
        self.pipe.send(("struck", time.time(), ""))
        if self.case.what == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.case.what == STOP:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.case.what == RAISE:
            raise ValueError("mask_mod met a token it did not like")

    def striking(self, direction):
        """A score function that strikes when it is called in this direction, on a tile of rows."""
        import torch

        def function(score, b, h, q, kv):
            if score.ndim and torch.is_grad_enabled() == (direction == "backward"):
                self.strike()
            return score

        return function

    def run(self):
        import longspan.training as training

        try:
            with contextlib.ExitStack() as stack:
                if self.case.settings.get("watch"):
                    stack.enter_context(training.watch(self.group, **self.case.settings["watch"]))
                self.attention(self.plan()).sum().backward()
                getattr(self, self.case.where.replace(" ", "_"))()
                # Who needed nothing of the victim was right to finish; the next call needs everybody.
                self.attention(self.plan()).sum().backward()
            self.pipe.send(("fine", time.time(), ""))
        except Exception as error:
            self.pipe.send((type(error).__name__, time.time(), str(error)))

    # -- where faults happen ----------------------------------------------------------------------------------------

    def idle(self):
        time.sleep(0.5)
        self.strike()
        self.attention(self.plan()).sum().backward()

    def forward(self):
        self.attention(self.plan(), self.striking("forward")).sum().backward()

    def backward(self):
        self.attention(self.plan(), self.striking("backward")).sum().backward()

    def between(self):
        out = self.attention(self.plan())
        self.strike()
        out.sum().backward()

    def convolved(self):
        """As `between`, of a convolution: the victim's halos have come, its gradients will not."""
        out = self.convolution()
        self.strike()
        out.sum().backward()

    def convolving(self):
        """The others are in a convolution that they had agreed on, and the victim does not come."""
        self.convolution().sum().backward()
        self.strike()
        self.convolution().sum().backward()

    def message(self):
        if self.is_victim:
            threading.Thread(target=self._strike_soon, daemon=True).start()
        plan = self.plan()
        for _ in range(200):
            self.attention(plan).sum().backward()

    def _strike_soon(self):
        time.sleep(0.3 + 0.4 * (time.time() % 1))
        self.strike()

    def skipped_forward(self):
        """The victim swallows an error before its forward and goes on with the next step."""
        if self.is_victim:
            self.pipe.send(("struck", time.time(), ""))
        else:
            self.attention(self.plan()).sum().backward()
        out = [self.attention(self.plan()) for _ in range(2)]
        sum(o.sum() for o in out).backward()

    def skipped_backward(self):
        out = self.attention(self.plan())
        if self.is_victim:
            self.pipe.send(("struck", time.time(), ""))
        else:
            out.sum().backward()
        self.attention(self.plan()).sum().backward()

    def skipped_backward_of_a_convolution(self):
        out = self.convolution()
        if self.is_victim:
            self.pipe.send(("struck", time.time(), ""))
        else:
            out.sum().backward()
        self.convolution().sum().backward()

    def skipped_step(self):
        """A whole step is skipped: only its number tells."""
        import longspan.training as training

        with training.watch(self.group) as watching:
            for step in range(3):
                watching.step(step)
                if self.is_victim and step == 1:
                    self.pipe.send(("struck", time.time(), ""))
                    continue
                self.attention(self.plan()).sum().backward()

    def outside(self):
        """An error in the training loop, not in attention."""
        import longspan.training as training

        with training.watch(self.group):
            self.strike()
            self.attention(self.plan()).sum().backward()

    def swallowed(self):
        """An error inside of a call is swallowed; the next call must not pair up with anything."""
        with contextlib.suppress(ValueError):
            self.attention(self.plan(), self.striking("forward"))
        self.attention(self.plan()).sum().backward()

    def left(self):
        """The victim's loop ends early, its process normally."""
        if self.is_victim:
            self.pipe.send(("struck", time.time(), ""))
            atexit._run_exitfuncs()  # what the interpreter does, and a process of multiprocessing does not
            os._exit(0)
        self.attention(self.plan()).sum().backward()

    def different(self):
        """The victim asks for something else, in a new plan."""
        import torch

        import longspan as ls

        self.pipe.send(("struck", time.time(), ""))
        tokens, world, odd = 64 * self.case.world, self.case.world, self.is_victim
        options, changes, name = {}, {}, self.case.settings["differs"]
        fresh = {"mask": ls.masks.causal() & ls.masks.sliding_window(40)}
        if name == "mask":
            changes = {"mask": ls.masks.causal() & ls.masks.sliding_window(17 if odd else 18)}
        elif name == "layout":
            changes = fresh | {"layout": (ls.layouts.zigzag if odd else ls.layouts.contiguous)(tokens, world)}
        elif name == "scheme":
            changes = fresh | {"scheme": "exchange" if odd else "ring"}
        elif name == "dtype":
            changes = fresh | {"dtype": "bfloat16" if odd else "float32"}
        elif name == "shapes":
            changes = fresh | {"head_dim": 32 if odd else 16}
        elif name == "keep":
            changes = fresh | {"keep": odd}
        elif name == "scale":
            options = {"scale": 0.5 if odd else 0.125}
        elif name == "half":  # two ranks against two: one pair repeats what was agreed before
            options = {"scale": 0.5} if self.rank >= 2 else {}
        elif name == "one scale":  # the others repeat what was agreed before
            options = {"scale": 0.5} if odd else {}
        elif name == "one sink":
            options = {"sinks": torch.zeros(2, requires_grad=True)} if odd else {}
        elif name == "one function":
            options = {"function": (lambda s, b, h, i, j: s * 2)} if odd else {}
        elif name == "seed":
            options = {"dropout": 0.1, "seed": 7 if odd else 8}
        elif name == "sinks":
            options = {"sinks": torch.zeros(2, requires_grad=True)} if odd else {"scale": 0.25}
            changes = fresh
        elif name == "gradients":
            options = {"sinks": torch.zeros(2, requires_grad=True), "captured_grads": "share" if odd else "sum"}
        elif name == "function":
            options = {"function": (lambda s, b, h, i, j: s * 2)} if odd else {}
            changes = fresh
        elif name == "cached":  # the victim repeats an agreed plan while the others come with a new one
            changes = {} if odd else fresh
        self.attention(self.plan(**changes), **options).sum().backward()

    def late(self):
        """The victim comes late to a comparison that another rank's mask fails."""
        import longspan as ls

        if self.is_victim:
            time.sleep(1.5)
            self.pipe.send(("struck", time.time(), ""))
        self.attention(self.plan(mask=ls.masks.causal() & ls.masks.sliding_window(17 if self.rank == 1 else 18)))

    def damaged(self):
        """The victim's messages change on their way; checked mode finds it."""
        from longspan.run import agreement

        sealed = agreement.add_header

        def spoiled(header, message):
            self.pipe.send(("struck", time.time(), ""))
            whole = sealed(header, message)
            whole[-1] += 1
            return whole

        if self.is_victim:
            agreement.add_header = spoiled
        self.attention(self.plan()).sum().backward()

    def mislabelled(self):
        """The victim sends the message of another step."""
        from dataclasses import replace

        from longspan.run import agreement

        sealed = agreement.add_header

        def spoiled(header, message):
            self.pipe.send(("struck", time.time(), ""))
            return sealed(replace(header, step=header.step + 1), message)

        if self.is_victim:
            agreement.add_header = spoiled
        self.attention(self.plan()).sum().backward()

    def refused(self):
        """The victim's tensors do not fit its own plan, so it refuses before anything is sent."""
        import torch

        import longspan as ls

        self.pipe.send(("struck", time.time(), ""))
        plan = self.plan()
        if self.is_victim:
            bad = torch.randn(1, 2, 63, 16)
            ls.attention(bad, bad, bad, plan, group=self.group)
        self.attention(plan).sum().backward()


def main(rank, case, port, pipe):
    """A rank's process."""
    if "group" in case.settings:
        from tests.gloo.nccl_work import NcclRank

        NcclRank(rank, case, port, pipe).run()
    elif case.settings.get("call") == "scan":
        from tests.gloo.scan_fault_work import ScanRank

        ScanRank(rank, case, port, pipe).run()
    elif case.settings.get("call") == "loss":
        from tests.breaks.losses_work import LossRank

        LossRank(rank, case, port, pipe).run()
    else:
        Rank(rank, case, port, pipe).run()
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # survivors stay until the end
    os._exit(0)


def leave_after_the_fault(rank, port, pipe):
    """A survivor of a stop while plans are compared; its process must end on its own."""
    import torch.distributed as dist

    import longspan as ls

    found = Rank(rank, Case(STOP, "comparing", 2, 1, "exchange", settings={"number": "leaves"}), port, pipe)
    dist.barrier()
    found.attention(found.plan())
    found.strike()
    try:
        found.attention(found.plan(mask=ls.masks.causal() & ls.masks.sliding_window(9)))
    except ls.LongspanError as error:
        pipe.send((type(error).__name__, time.time(), str(error)))


def stand_still(rank, port, pipe):
    """Rank 1 comes late; meanwhile both are stopped for longer than their patience, and go on."""
    found = Rank(rank, Case(STOP, "pause", 2, 1, "exchange", settings={"number": "pause"}), port, pipe)
    found.attention(found.plan()).sum().backward()
    pipe.send(("ready", time.time(), ""))
    time.sleep(4.5 * rank)
    try:
        found.attention(found.plan()).sum().backward()
        pipe.send(("fine", time.time(), ""))
    except Exception as error:
        pipe.send((type(error).__name__, time.time(), str(error)))
    pipe.recv()
