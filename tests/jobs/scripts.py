"""What small jobs do and how they end. An ending is one piece of code for two kinds of work: attention of Longspan, and
plain Gloo (isend, irecv), the control, which shows what an ending costs without us."""

from dataclasses import dataclass

LONGSPAN = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist, longspan as ls

dist.init_process_group("gloo")
rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
last, here = world - 1, True
mask, layout = ls.masks.documents([17, 31]) & ls.masks.causal(), ls.layouts.zigzag(48, world)
plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8, dtype="float32", scheme="SCHEME")
torch.manual_seed(0)
whole = torch.randn(3, 1, 2, 48, 8)
mine = [layout.shard(x, rank, dim=2).requires_grad_() for x in whole]


def forward(**options):
    return ls.attention(*mine, plan, group=group, **options)


def step(**options):
    forward(**options).square().sum().backward()


ids = (torch.arange(48) >= 17).long()
seen = (ids[:, None] == ids) & torch.ones(48, 48).tril().bool()
truth = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=seen)
error = (forward() - layout.shard(truth, rank, dim=2)).abs().max()
assert error < 1e-5, error
step()
"""

GLOO = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
rank, world, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
last, here = world - 1, True


def forward(score_mod=None):
    for number in range(2):
        size = dist.get_world_size(group)
        after, before = [dist.get_global_rank(group, (dist.get_rank(group) + by) % size) for by in (1, -1)]
        out, sent = torch.zeros(1000), torch.full((1000,), float(dist.get_rank(group)))
        works = [dist.isend(sent, after, group), dist.irecv(out, before, group)]
        if score_mod is not None:
            score_mod(out, 0, 0, 0, 0)
        for work in works:
            work.wait()
        assert (out == (dist.get_rank(group) - 1) % size).all()
    return sent.requires_grad_()


def step(**options):
    forward(**options)
    forward()


step()
"""

RIGHT = """
print(f"rank {rank} of {world} is right", flush=True)
"""

FAILING_SCORE = """
calls = []


def failing(score, b, h, i, j):
    calls.append(1)
    if len(calls) == 2 and (rank == 0 or WHERE == "all"):
        raise ValueError("the user's own error")
    return score + 0


"""


@dataclass(frozen=True)
class Ending:
    """How a job ends. `root` is the rank (None: any) and exit code that torchrun must name first; None: status 0.

    `gloo` says that plain Gloo survives this ending, so that a control job runs; where it does not, or has no such
    thing, it is the reason."""

    code: str
    root: tuple[int | str | None, int] | None = None
    line: str = "is right"
    gloo: bool | str = True
    ranks: tuple[int, ...] = (2, 3, 4)
    interrupt_at: str | None = None
    optimised: bool = False


OURS = "only Longspan has this"
RAISE = 'raise ValueError("the user\'s own error")'

ENDINGS = {
    # -- success -------------------------------------------------------------------------------------------------------
    "destroyed": Ending("dist.destroy_process_group()"),
    "not destroyed": Ending(""),
    "destroyed twice": Ending(
        "dist.destroy_process_group()\ntry:\n    dist.destroy_process_group()\n"
        "except Exception as error:\n    print('the second was refused', flush=True)"
    ),
    "destroyed by atexit": Ending("import atexit\natexit.register(dist.destroy_process_group)"),
    "destroyed, a graph in flight": Ending("out = forward()\ndist.destroy_process_group()"),
    "not destroyed, a graph in flight": Ending("out = forward()"),
    "forward only": Ending("with torch.no_grad():\n    for _ in range(5):\n        forward()"),
    "many steps": Ending("for _ in range(60):\n    step()\ndist.destroy_process_group()"),
    "a group of two": Ending(
        "group = dist.new_group([0, 1])\nif rank < 2:\n    REPLAN\n    step()\ndist.destroy_process_group()",
        ranks=(3, 4),
    ),
    "a group of two, not destroyed": Ending(
        "group = dist.new_group([0, 1])\nif rank < 2:\n    REPLAN\n    step()", ranks=(3, 4)
    ),
    "a second group": Ending(
        "group = dist.new_group()\nstep()\ndist.destroy_process_group(group)\ngroup = dist.group.WORLD\nstep()"
    ),
    "in a thread": Ending("thread = threading.Thread(target=step)\nthread.start()\nthread.join()"),
    "loader workers": Ending(
        "loader = iter(torch.utils.data.DataLoader(range(64), num_workers=1))\nnext(loader)\nstep()\n"
        "dist.destroy_process_group()"
    ),
    "many plans": Ending(
        "for length in range(1, 25):\n    layout = ls.layouts.striped(length, world)\n"
        "    plan = ls.plan(mask & ls.masks.full(48) if length == 48 else ls.masks.causal(), layout, q_heads=2,\n"
        '        kv_heads=2, head_dim=8, dtype="float32")\n'
        "    mine = [layout.shard(x[:, :, :length].detach(), rank, dim=2).requires_grad_() for x in whole]\n    step()",
        gloo=OURS,
    ),
    "compiled": Ending(
        'compiled = torch.compile(lambda: ls.attention(*mine, plan, group=group), backend="eager")\n'
        "compiled().sum().backward()\ndist.destroy_process_group()",
        gloo=OURS,
    ),
    "python -O": Ending("step()\ndist.destroy_process_group()", optimised=True),
    # -- exceptions ----------------------------------------------------------------------------------------------------
    # Who waits hears of an error at once and may be gone before the rank that raised it is: any of them comes first.
    "error on the first rank, others wait": Ending(f"if rank == 0:\n    {RAISE}\nstep()", (None, 1)),
    "error on the last rank, others wait": Ending(f"if rank == last:\n    {RAISE}\nstep()", (None, 1)),
    "error on the last rank, others sleep": Ending(f"if rank == last:\n    {RAISE}\ntime.sleep(20)", ("last", 1)),
    "error on all ranks": Ending(RAISE, (None, 1)),
    "error on all ranks, destroyed": Ending(
        f"try:\n    {RAISE}\nfinally:\n    dist.destroy_process_group()", (None, 1)
    ),
    "error on the first rank, destroyed": Ending(
        f"try:\n    if rank == 0:\n        {RAISE}\n    time.sleep(20)\nfinally:\n    dist.destroy_process_group()",
        (0, 1),
    ),
    "error in a score function": Ending(
        FAILING_SCORE.replace("WHERE", '"first"') + "step(score_mod=failing)", (None, 1)
    ),
    "error in a score function, others go on": Ending(
        FAILING_SCORE.replace("WHERE", '"first"') + "try:\n    step(score_mod=failing)\nexcept Exception:\n"
        "    if rank == 0:\n        raise\n    time.sleep(20)",
        (0, 1),
    ),
    "error in a score function on all ranks": Ending(
        FAILING_SCORE.replace("WHERE", '"all"') + "step(score_mod=failing)", (None, 1)
    ),
    "error between forward and backward": Ending(
        f"out = forward()\nif rank == 0:\n    {RAISE}\nout.square().sum().backward()\nstep()", (None, 1)
    ),
    "error between forward and backward on all ranks": Ending(f"out = forward()\n{RAISE}", (None, 1)),
    # -- errors that are caught ----------------------------------------------------------------------------------------
    "caught on all ranks": Ending(
        FAILING_SCORE.replace("WHERE", '"all"') + "try:\n    step(score_mod=failing)\nexcept ValueError:\n"
        "    print('caught', flush=True)",
        line="caught",
    ),
    "caught on all ranks, destroyed": Ending(
        FAILING_SCORE.replace("WHERE", '"all"') + "try:\n    step(score_mod=failing)\nexcept ValueError:\n"
        "    print('caught', flush=True)\ndist.destroy_process_group()",
        line="caught",
    ),
    "caught everywhere, one rank failed": Ending(
        FAILING_SCORE.replace("WHERE", '"first"') + "try:\n    step(score_mod=failing)\nexcept Exception:\n"
        "    print('caught', flush=True)",
        line="caught",
    ),
    "refused, then right": Ending(
        "try:\n    ls.attention(*[x[:, :1] for x in mine], plan, group=group)\nexcept ls.PlanError:\n"
        "    print('refused', flush=True)\nstep()\ndist.destroy_process_group()",
        line="refused",
        gloo=OURS,
    ),
    # -- signals and interrupts ----------------------------------------------------------------------------------------
    "KeyboardInterrupt on the first rank": Ending("if rank == 0:\n    raise KeyboardInterrupt\nstep()", (0, -2)),
    "KeyboardInterrupt on all ranks": Ending("raise KeyboardInterrupt", (None, -2)),
    "KeyboardInterrupt in a score function": Ending(
        FAILING_SCORE.replace("WHERE", '"first"').replace("ValueError", "KeyboardInterrupt")
        + "try:\n    step(score_mod=failing)\nexcept Exception:\n    time.sleep(20)",
        (0, -2),
    ),
    "SIGINT to a rank that sleeps": Ending(
        "if rank == 0:\n    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()\ntime.sleep(20)",
        (0, -2),
    ),
    "SIGINT to a rank that waits": Ending(
        "if rank == 0:\n    threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()\n    step()\n"
        "time.sleep(20)",
        (0, -2),
        gloo="a wait in Gloo hears no SIGINT before it is over",
    ),
    "SIGINT to torchrun": Ending("time.sleep(20)", None, interrupt_at="is right"),
    "SIGTERM to a rank": Ending("if rank == 0:\n    os.kill(os.getpid(), signal.SIGTERM)\nstep()", (0, -15)),
    "SIGKILL to a rank": Ending("if rank == last:\n    os.kill(os.getpid(), signal.SIGKILL)\nstep()", ("last", -9)),
    # -- sys.exit ------------------------------------------------------------------------------------------------------
    "sys.exit(0)": Ending("sys.exit(0)"),
    "sys.exit(0), destroyed": Ending("dist.destroy_process_group()\nsys.exit(0)"),
    "sys.exit(0) on the first rank": Ending("if rank == 0:\n    sys.exit(0)\ntime.sleep(1)"),
    "sys.exit(3) on all ranks": Ending("sys.exit(3)", (None, 3)),
    "sys.exit(3) on the first rank, others sleep": Ending("if rank == 0:\n    sys.exit(3)\ntime.sleep(20)", (0, 3)),
    "sys.exit(3) on the first rank, others wait": Ending("if rank == 0:\n    sys.exit(3)\nstep()", (0, 3)),
}

SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "auto")


def script(ending: Ending, work: str, scheme: str = "auto") -> str:
    """The text of a job: work that is checked, a line that says so, an ending."""
    head = (LONGSPAN if work == "longspan" else GLOO).replace("SCHEME", scheme)
    replan = "layout = ls.layouts.zigzag(48, 2)\n    plan = ls.plan(mask, layout, q_heads=2, kv_heads=2, head_dim=8,"
    replan += ' dtype="float32")\n    mine = [layout.shard(x, rank, dim=2).requires_grad_() for x in whole]'
    return head + RIGHT + ending.code.replace("REPLAN", replan if work == "longspan" else "pass") + "\n"
