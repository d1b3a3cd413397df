"""`longspan acceptance`, piece by piece: kernels by model, guard zones, verdicts, names of lines, and a page that names
nobody."""

import json
import os
import platform
import re
import signal
from dataclasses import replace
from itertools import product

import pytest
import torch

from longspan.cli import main
from longspan.cli.acceptance import exactness, facts, host, memory, operators, timing
from longspan.cli.acceptance.guard_zones import GUARD, LAYOUTS, GuardedMemory
from longspan.cli.acceptance.lines import (
    AcceptanceLine,
    Judgement,
    Site,
    compared,
    not_run,
    right,
    worst,
    wrong,
)
from longspan.cli.acceptance.operators import check_case, operator_cases
from longspan.cli.acceptance.page import AcceptanceReport, cleaned, markdown, private_words, write
from longspan.cli.acceptance.session import Session, all_lines, chosen_lines
from longspan.cli.launch import JobRanks
from longspan.errors import LongspanError
from longspan.kernels import cuda_sdpa, kernel_named
from tests.unit.test_kernel_addresses import DTYPES, KERNELS

FULL = operator_cases(quick=False)
ALONE = JobRanks(0, 1, 1, "gloo", "cpu")


def named(name):
    return next(case for case in FULL if case.name == name)


def off(kernel, case, dtype):
    """Names of tensors that a kernel gets wrong."""
    return {check.tensor for check in check_case(kernel, case, dtype, "cpu") if not check.ratio <= 1}


# ---- operators -------------------------------------------------------------------------------------------------------


@pytest.mark.share(2)
@pytest.mark.parametrize("name", KERNELS)
def test_right_gpu_kernels_pass_every_case(name):
    """As far as models by address are right: no case asks a kernel for what it does not do."""
    kernel = KERNELS[name]
    for case, dtype in product(FULL, DTYPES[name][-1:]):
        if name == "cudnn" and max(case.dims) > 128:
            continue
        assert not off(kernel, case, dtype), (case.name, dtype)


def test_a_layout_that_a_gpu_kernel_takes_for_granted_is_seen(monkeypatch):
    """`efficient` in half precision with `out` as it lies, which is how it once was."""
    monkeypatch.setattr(cuda_sdpa, "_rows_first", lambda x: x)
    for name in ("causal", "heads 8:1"):
        with pytest.raises(AssertionError, match="beyond the end"):  # where the model cannot read NaN instead
            off(KERNELS["efficient"], named(name), torch.float16)
    assert not off(KERNELS["efficient"], named("strided"), torch.float16), "this one lies as the kernel reads it"


class Misreading:
    """A kernel that takes one operand for laid out otherwise than it is."""

    def __init__(self, operand, moved):
        self.kernel, self.operand, self.moved = kernel_named("cpu_flash"), operand, moved

    def _read(self, work):
        return replace(work, **{self.operand: self.moved(getattr(work, self.operand))})

    def groups(self, *what):
        return self.kernel.groups(*what)

    def forward(self, work):
        return self.kernel.forward(self._read(work))

    def backward(self, work, upstream):
        return self.kernel.backward(self._read(work), upstream)


def taken_for_dense(x):
    strides = [x[0].numel(), x[0, 0].numel(), x.shape[3], 1]
    return x.as_strided(x.shape, strides, x.storage_offset())


def one_row_on(x):
    return x.as_strided(x.shape, x.stride(), x.storage_offset() + x.stride(2))


@pytest.mark.parametrize("operand", ["q_BHQD", "k_BGKD", "v_BGKE"])
@pytest.mark.parametrize("case", ["strided", "sliced", "odd rows", "strided slices"])
def test_a_kernel_that_does_not_look_at_strides_is_seen(case, operand):
    assert off(Misreading(operand, taken_for_dense), named(case), torch.float32)
    assert not off(Misreading(operand, lambda x: x), named(case), torch.float32)


@pytest.mark.parametrize("case", ["causal", "single row", "rectangle", "heads 4:4"])
@pytest.mark.parametrize("operand", ["q_BHQD", "k_BGKD"])
def test_a_kernel_that_reads_behind_the_end_is_seen(case, operand):
    assert off(Misreading(operand, one_row_on), named(case), torch.float32)


def test_what_a_kernel_writes_beside_its_operands_is_seen():
    class Writing(Misreading):
        def backward(self, work, upstream):
            q = work.q_BHQD
            q.as_strided((1,), (1,), q.storage_offset() + q.numel() + 5).fill_(3.0)
            return self.kernel.backward(work, upstream)

    assert off(Writing("q_BHQD", lambda x: x), named("causal"), torch.float32) == {"memory beside q"}


@pytest.mark.parametrize("tensor", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", operators.DTYPES, ids=str)
def test_every_tensor_is_compared(tensor, dtype):
    """Off by eight roundings of its dtype in every number, and only this one is."""

    class Off(Misreading):
        def forward(self, work):
            for out, lse in self.kernel.forward(work):
                yield spoiled(out, "out"), lse * (1 + 1e-2) if tensor == "lse" else lse

        def backward(self, work, upstream):
            for grads in self.kernel.backward(work, upstream):
                yield tuple(spoiled(x, name) for x, name in zip(grads, ("dq", "dk", "dv"), strict=True))

    def spoiled(x, name):
        return x.double() * (1 + 16 * torch.finfo(dtype).eps) if name == tensor else x

    assert off(Off("q_BHQD", lambda x: x), named("blind rows"), dtype) == {tensor}


def test_cases_have_what_plans_make():
    names = {case.name for case in FULL}
    assert {"causal", "window", "rectangle", "single row", "200 slices", "blind rows", "strided", "sliced"} <= names
    assert {case.dims[0] for case in FULL} == {64, 96, 128, 192, 256}
    assert {case.heads[0] // case.heads[1] for case in FULL} >= {1, 4, 8}
    assert {case.layout for case in FULL} == set(LAYOUTS)
    for case in FULL:
        rows = [set(range(tile.q0, tile.q1)) for tile in case.tiles]
        assert sum(map(len, rows)) == len(set().union(*rows)), f"{case.name}: a row's result must be final"
    assert any(not case.seen()[0, 0].any(-1).all() for case in FULL)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_lie_in_nan(layout):
    x = torch.randn(2, 3, 5, 8)
    found = GuardedMemory().placed("q", x, layout)
    assert torch.equal(found, x)
    whole = torch.empty(0).set_(found.untyped_storage())
    assert int((~whole.isnan()).sum()) == x.numel()
    assert whole[:GUARD].isnan().all()
    assert whole[-GUARD:].isnan().all()


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_what_is_red():
    assert [kind for kind in Judgement if kind.is_red] == [Judgement.TOO_SLOW, Judgement.WRONG]
    assert compared(2.0, (1.25, 2.0), "").judgement == Judgement.SLOWER
    assert compared(1.25, (1.25, 2.0), "").judgement == Judgement.RIGHT


def test_the_worst_rank_speaks_for_all():
    assert worst([right("a"), not_run("b"), right("c")]).text == "rank 1: b"
    assert worst([wrong("a"), wrong("b")]) == wrong("a")
    assert worst([compared(1.1, (2, 3), "a"), compared(1.4, (2, 3), "b")]).text == "b"
    assert worst([right("fine", used=0.2)] * 3) == right("fine", used=0.2)


# ---- lines by name ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_gpu", [False, True])
def test_names_of_lines_are_unique_and_sections_whole(is_gpu):
    lines = all_lines(is_gpu=is_gpu)
    names = [line.name for line in lines]
    assert len(set(names)) == len(names)
    assert {line.section for line in lines} == {"operators", "exact", "memory", "time", "host", "faults"}
    assert all(re.fullmatch(r"[a-z]+(\.\w+)+", name) for name in names)
    quick = chosen_lines(lines, None, quick=True)
    assert {line.section for line in quick} == {line.section for line in lines}
    assert len(quick) < len(lines)


def test_on_gpus_both_kinds_of_group_are_there_and_a_first_call_comes_first():
    names = [line.name for line in all_lines(is_gpu=True)]
    exact = [name for name in names if name.startswith("exact.")]
    assert exact[:2] == ["exact.first_call.nccl", "exact.first_call.mixed"]
    assert {"exact.group.nccl", "exact.group.mixed", "faults.kill.nccl", "faults.kill.gloo"} <= set(names)
    assert {name.split(".")[1] for name in names if name.startswith("operators.")} == {
        "varlen", "efficient", "flash", "cudnn", "flex", "reference",
    }  # fmt: skip
    assert {"time.causal.1M", "time.documents.64k", "time.window.256k"} <= set(names)


def test_lines_are_chosen_by_name_or_beginning():
    lines = all_lines(is_gpu=False)
    assert [line.name for line in chosen_lines(lines, "exact.ring", quick=True)] == ["exact.ring"]
    assert [line.name for line in chosen_lines(lines, "faults", quick=True)] == ["faults.kill.gloo"]
    assert [line.name for line in chosen_lines(lines, "faults.late.gloo", quick=True)] == ["faults.late.gloo"]
    faults = [line.name for line in chosen_lines(lines, "faults, host.waits", quick=False)]
    assert faults == ["host.waits", *(f"faults.{what}.gloo" for what in ("kill", "stop", "raise", "late"))]
    for unknown in ("exact.rin", "", "ring", "exact.ring,nothing"):
        with pytest.raises(LongspanError, match=r"--only.*operators"):
            chosen_lines(lines, unknown, quick=False)


def test_ranks_without_messages_are_in_the_first_call():
    for size in (3, 4, 8):
        made = exactness.quiet_plan(size, "float32")
        busy = {r for r in range(size) if made.bytes_received(r) or made.bytes_received(r, "backward")}
        assert busy == {0, 1}


# ---- the page --------------------------------------------------------------------------------------------------------


def report_of(*outcomes, complete=True):
    found = AcceptanceReport({"device": "CPU", "versions": {"torch": "2.13"}}, 4, False, private_words())
    for number, outcome in enumerate(outcomes):
        found.add(AcceptanceLine(f"exact.line{number}", not_run), outcome, 0.5)
    found.is_complete = complete
    return found


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("cannot open /home/someone/x.json: no", "/home"),
        ("peer [127.0.0.1]:29500 closed", "127.0"),
        ("peer 10.1.2.3 closed", "10.1.2.3"),
        ("peer [fe80::1:2:3%eth0]:80 closed", "fe80"),
        ("~/data/x.bin", "data"),
        (f"on {platform.node()} it failed", platform.node()),
        ('File "/usr/lib/python3/x.py", line 3', "python3"),
    ],
)
def test_the_page_names_no_host_person_or_path(text, gone):
    assert gone not in cleaned(text, private_words())
    found = report_of(wrong(text))
    assert gone not in markdown(found) + json.dumps(found.as_dict())


@pytest.mark.parametrize(
    "text",
    ["off by 2.5e-03 of 1.0", "torch 2.13.0+cu132", "3:4 heads and/or keys", "1.5 GB/s a/b", "rank 1: dq differs"],
)
def test_what_is_no_secret_stays(text):
    assert cleaned(text, ["node7"]) == text


def test_the_page_says_how_to_repeat_a_line_and_whether_it_is_accepted():
    good, slow, bad = right("fine"), compared(1.6, (1.25, 2.0), "slow"), wrong("dq is off")
    assert report_of(good, slow).ok
    assert not report_of(good, complete=False).ok
    found = report_of(good, slow, bad)
    assert not found.ok
    page = markdown(found)
    assert "NOT ACCEPTED: 1 right, 1 slower, 1 wrong" in page
    assert "slower than predicted by 1.60x" in page
    assert "torchrun --nproc-per-node 4 -m longspan acceptance --only exact.line2" in page
    lines = found.as_dict()["lines"]
    assert [line["red"] for line in lines] == [False, False, True]
    assert lines[1]["repeat"].endswith("--only exact.line1")


def test_files_are_whole(tmp_path):
    page, data = write(report_of(right("fine")), tmp_path / "found")
    assert (page.name, data.name) == ("found.md", "found.json")
    assert json.loads(data.read_text())["ok"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_links_as_nvidia_smi_prints_them():
    head = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    table = f"{head}GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\nNIC0\tPIX\tSYS\t X \n"
    assert facts.link_kinds(table) == "NV18 2"
    assert facts.link_kinds("") is None


def test_variables_with_paths_are_told_by_name_alone(monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/someone/topology.xml")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    told = facts._settings()
    assert "NCCL_DEBUG=WARN" in told
    assert "NCCL_TOPO_FILE" in told
    assert not any("someone" in line for line in told)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_without_a_launcher_it_says_what_to_type(capsys):
    assert main(["acceptance"]) == 2
    assert "torchrun --nproc-per-node 4 -m longspan acceptance" in capsys.readouterr().err


def test_lines_are_listed_without_a_launcher(capsys):
    assert main(["acceptance", "--list"]) == 0
    assert capsys.readouterr().out.split() == [line.name for line in all_lines(is_gpu=False)]


# ---- what only GPUs run, on stand-ins: that the code runs, not that the figures are right ----------------------------


class GpuSite(Site):
    """Says that it has GPUs; its tensors are on the CPU."""

    @property
    def is_gpu(self):
        return True

    @property
    def sizes(self):
        return replace(super().sizes, q_heads=4, kv_heads=2, head_dim=16, v_head_dim=16)

    def group(self, backend=None):
        return None


@pytest.fixture
def gpu_site(monkeypatch):
    class Event:
        def __init__(self, **_):
            pass

        def record(self):
            pass

        def elapsed_time(self, _):
            return 5.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 1000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 50_000_000)
    monkeypatch.setattr(timing, "tokens_of", lambda _: 256)
    monkeypatch.setattr(host, "tokens_of", lambda _: 256)
    monkeypatch.setattr(memory, "tokens_of", lambda _: 256)
    for module in (host, memory):
        call = module.attention
        monkeypatch.setattr(module, "attention", lambda q, k, v, plan, group, call=call: call(q, k, v, plan.mask))
    return GpuSite(ALONE, quick=False)


def test_memory_of_gpus_by_the_allocator(gpu_site):
    found = memory._memory("ring", "causal", "256k", gpu_site)
    assert found.judgement == Judgement.WRONG, "50 MB are more than a call of 256 tokens may take"
    assert found.figures["taken_bytes"] > 49_000_000


def test_host_time_of_gpus_by_events(gpu_site):
    found = host._host_time(gpu_site)
    assert found.judgement != Judgement.NOT_RUN
    assert "of the device's time" in found.text


def test_launches_of_gpus_by_the_profiler(gpu_site, monkeypatch):
    profile = host.profile
    monkeypatch.setattr(host, "profile", lambda activities: profile(activities=[host.ProfilerActivity.CPU]))
    found = host._waits(gpu_site)
    assert found.judgement == Judgement.RIGHT, found
    error = RuntimeError("called a synchronizing CUDA operation")
    monkeypatch.setattr(host, "no_waiting", lambda _: (_ for _ in ()).throw(error))
    assert "called a synchronizing CUDA operation" in host._waits(gpu_site).text


def test_waits_of_gpus_are_forbidden_around_kernels_and_calls(gpu_site, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with operators.no_waiting("cuda:0"):
        assert modes == ["error"]
    assert modes == ["error", "default"]
    with pytest.raises(ValueError, match="x"), operators.no_waiting("cuda:0"):
        raise ValueError("x")
    assert modes[-1] == "default"


# ---- a job that is ended ---------------------------------------------------------------------------------------------


def test_the_line_under_way_has_its_own_seconds(monkeypatch):
    """It was once counted from the start of the machine's clock: 8,782 s."""
    session = Session(Site(ALONE, quick=True), [AcceptanceLine("exact.ring", lambda _: right(""))] * 3, None)
    session._run_line(session.lines[0])
    session._line_begin -= 5.0  # the second line began five seconds ago
    monkeypatch.setattr("longspan.cli.acceptance.session.GRACE", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    read, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    session._speak_at_the_end(read, lambda report: None)
    os.close(write_end)
    (_, first, _), (_, ended, seconds), (_, last, _) = session.report.rows
    assert [str(outcome.judgement) for outcome in (first, ended, last)] == ["right", "wrong", "not run"]
    assert 5.0 <= seconds < 6.0
    assert session.report.seconds < 5.0
