"""`longspan acceptance` on 2 and 4 stand-in devices, with small tensors: every line runs and passes.

Each time, most lines of `--quick` run on 2 devices, some of them in turns, and a few on 4; at night, all lines run on
both. Times are measured and compared with their predictions, but none is too slow: no figure of speed means anything
here. Lines of kernels that need Triton or a package, or that do not take a dtype, say that they were not run, and why.
"""

import pytest

from tests.device import acceptance_work as work
from tests.device.ranks import ranks
from tests.lanes import share

SECTIONS = {"operators", "exact", "long", "training", "memory", "time", "host"}
PACKAGES = ("fa3", "fa4", "cudnn_varlen")
REFUSED = (
    *(f"operators.{name}" for name in ("varlen.float32", "flash.float32", "cudnn.float32", "flex.", *PACKAGES)),
    *(f"long.{name}" for name in (*PACKAGES, "varlen.FA")),
)


def lines_of(world, *words, timeout=900):
    """The page's lines by name, after the command has ended well on all ranks."""
    found = ranks(world, "cuda").run(work.accepted, *words, timeout=timeout)
    page = found[0][1]
    reds = [(line["line"], line["text"]) for line in page["lines"] if line["red"]]
    assert ([code for code, _ in found], reds, page["complete"]) == ([0] * world, [], True)
    assert page["facts"]["ranks"].startswith(f"{world} over nccl")
    return {line["line"]: line for line in page["lines"]}


def check_verdicts(lines, world):
    for name, line in lines.items():
        if line["verdict"] == "not run":
            assert name.startswith(REFUSED) or (world < 4 and "it needs 4 ranks" in line["text"]), line
            assert len(line["text"]) > 20, "why"
        else:
            assert line["verdict"] == "right", line


ALWAYS = ("exact", "memory.exchange", "memory.ring", "time.links", "host.waits")
IN_TURNS = (
    *(f"operators.{kernel}" for kernel in ("varlen", "efficient", "flash", "cudnn", "reference")),
    *("long.exchange", "training", "memory.batches.all_to_all", "time.calibration", "host.time"),
)


def test_quick_lines_pass_on_two_devices():
    names = (*ALWAYS, *share(IN_TURNS, 4))
    lines = lines_of(2, "--quick", "--only", ",".join(names))
    assert all(any(line.startswith(name) for line in lines) for name in names)
    check_verdicts(lines, 2)


def test_lines_that_need_four_devices_pass():
    lines = lines_of(
        4, "--quick", "--only", "exact.hybrid.ring,exact.cp_inside_tp,exact.first_call,memory.ring,host.waits"
    )
    assert {line["verdict"] for line in lines.values()} == {"right"}


def test_scores_that_learn_are_verified_on_the_device():
    lines = lines_of(2, "--only", "exact.score,exact.sinks")
    assert {line["verdict"] for line in lines.values()} == {"right"}


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 4])
def test_every_line_passes(world):
    lines = lines_of(world, timeout=3000)
    assert len(lines) == 91
    assert {name.partition(".")[0] for name in lines} == SECTIONS
    check_verdicts(lines, world)
