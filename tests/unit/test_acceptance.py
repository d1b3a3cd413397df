"""`longspan acceptance` (tests/gpu) by parts: kernels by model, guard zones, verdicts, names, an anonymous page."""

import contextlib
import doctest
import json
import os
import platform
import re
import signal
import sys
import threading
from dataclasses import replace
from itertools import product

import pytest
import torch

import longspan
import tests.gpu.conftest
from longspan import kernels
from longspan.cli import main
from longspan.cli.launch import JobRanks
from longspan.errors import LongspanError
from longspan.kernels import cuda_sdpa, kernel_named
from longspan.kernels.cuda_flash import Flash
from tests.gpu import (
    facts,
    guard_zones,
    page,
    programs,
    sampled,
    session,
    site,
    test_exact,
    test_host,
    test_memory,
    test_operators,
)
from tests.gpu.guard_zones import GUARD, LAYOUTS, GuardedMemory
from tests.gpu.page import Report, anonymize, markdown, private_words, write
from tests.gpu.session import Session, select
from tests.gpu.site import VERDICTS, Outcome, Site, compare_times, worst
from tests.gpu.test_operators import check_case, operator_cases
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
    """As far as models by address are right. Cases that a kernel refuses are left out, as on a GPU."""
    kernel, num_checked = KERNELS[name], 0
    for case, dtype in product(FULL, DTYPES[name][-1:]):
        if name == "cudnn" and max(case.dims) > 128:
            continue
        if isinstance(kernel, Flash) and kernel.version.widths(*case.dims) is None:
            continue
        if name == "cudnn_varlen" and case.heads[0] != case.heads[1]:
            continue
        num_checked += 1
        assert not off(kernel, case, dtype), (case.name, dtype)
    assert num_checked


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
@pytest.mark.parametrize("dtype", test_operators.DTYPES, ids=str)
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
    assert {case.dims for case in FULL} >= {(64, 64), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256)}
    assert {case.heads[0] // case.heads[1] for case in FULL} >= {1, 4, 8}
    assert {case.layout for case in FULL} == set(LAYOUTS)
    for case in FULL:
        rows = [set(range(tile.q0, tile.q1)) for tile in case.tiles]
        assert sum(map(len, rows)) == len(set().union(*rows)), f"{case.name}: a row's result must be final"
    assert any(not case.seen()[0, 0].any(-1).all() for case in FULL)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operands_lie_in_nan(layout):
    x = torch.randn(2, 3, 5, 8)
    found = GuardedMemory().place("q", x, layout)
    assert torch.equal(found, x)
    whole = torch.empty(0).set_(found.untyped_storage())
    assert int((~whole.isnan()).sum()) == x.numel()
    assert whole[:GUARD].isnan().all()
    assert whole[-GUARD:].isnan().all()


# ---- verdicts --------------------------------------------------------------------------------------------------------


def right(text="", **figures):
    return Outcome("right", text, figures)


def wrong(text):
    return Outcome("wrong", text)


def test_which_verdicts_are_red():
    assert [verdict for verdict in VERDICTS if Outcome(verdict).is_red] == ["too slow", "wrong"]
    assert compare_times(2.0, (1.25, 2.0), "").verdict == "slower"
    assert compare_times(1.25, (1.25, 2.0), "").verdict == "right"


def test_the_worst_rank_decides():
    assert worst([right("a"), Outcome("not run", "b"), right("c")]).text == "rank 1: b"
    assert worst([wrong("a"), wrong("b")]) == wrong("a")
    assert worst([compare_times(1.1, (2, 3), "a"), compare_times(1.4, (2, 3), "b")]).text == "b"
    assert worst([right("fine", used=0.2)] * 3) == right("fine", used=0.2)


@pytest.mark.parametrize("module", [facts, guard_zones, page, programs, session, site, test_exact, test_memory])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


# ---- lines by name ---------------------------------------------------------------------------------------------------


@pytest.fixture
def lines(monkeypatch, capsys):
    """The names of all lines, as `--list` prints them for a device."""

    def names(device, *words):
        ranks = JobRanks(0, 1, 1, "nccl" if device == "cuda:0" else "gloo", device)
        monkeypatch.setattr(tests.gpu.conftest, "join_ranks", lambda *_, **__: contextlib.nullcontext(ranks))
        assert main(["acceptance", "--list", *words]) == 0
        return capsys.readouterr().out.split()

    return names


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_names_of_lines_are_unique_and_sections_whole(lines, device):
    names = lines(device)
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(name.partition(".")[0] for name in names)) == list(tests.gpu.conftest.SECTIONS)
    assert all(re.fullmatch(r"[a-z]+(\.\w+)+", name) for name in names)
    quick = lines(device, "--quick")
    assert {name.partition(".")[0] for name in quick} == set(tests.gpu.conftest.SECTIONS)
    assert len(quick) < len(names)


def test_on_gpus_both_kinds_of_group_are_there_and_a_first_call_comes_first(lines):
    names = lines("cuda:0")
    assert len(names) == 82
    exact = [name for name in names if name.startswith("exact.")]
    assert exact[:2] == ["exact.first_call.nccl", "exact.first_call.mixed"]
    assert {"exact.group.nccl", "exact.group.mixed"} <= set(names)
    with_lines = {name.split(".")[1] for name in names if name.startswith("operators.")}
    assert with_lines == set(kernels._KERNELS) - {"cpu_flash"}
    assert {f"long.{name}" for name in ("fa3", "fa4", "cudnn_varlen", "varlen", "varlen.FA3", "varlen.FA4")} <= set(
        names
    )
    assert {"time.causal.1M", "time.documents.64k", "time.window.256k"} <= set(names)


def test_lines_are_chosen_by_name_or_beginning(lines):
    assert lines("cpu", "--quick", "--only", "exact.ring") == ["exact.ring"]
    assert lines("cpu", "--only", "host.waits") == ["host.waits"]
    for unknown in ("exact.rin", "", "ring", "exact.ring,nothing"):
        with pytest.raises(LongspanError, match=r"--only must name lines .* They are: exact.ring, host"):
            select({"exact.ring": False, "host": False}, unknown, quick=False)


def test_new_batches_differ_however_short():
    batches = [tuple(test_memory.packed_lengths(tokens, number)) for tokens in (384, 1 << 16) for number in range(100)]
    assert len(set(batches)) == 200
    assert {sum(lengths) for lengths in batches} == {384, 1 << 16}
    assert all(min(lengths) > 0 for lengths in batches)


def test_ranks_without_messages_are_in_the_first_call():
    for size in (3, 4, 8):
        made = test_exact.quiet_plan(size, "float32")
        busy = {r for r in range(size) if made.bytes_received(r) or made.bytes_received(r, "backward")}
        assert busy == {0, 1}


# ---- samples of long sequences ---------------------------------------------------------------------------------------


def sampled_call(dtype, lengths=(300, 17, 195), dims=(24, 16), window=None):
    """What a call of one rank takes and returns, on a layout with padding."""
    tokens, draw = sum(lengths), torch.Generator().manual_seed(1)
    band = longspan.masks.causal() if window is None else longspan.masks.sliding_window(window)
    mask = longspan.masks.documents(list(lengths)) & band
    layout = longspan.layouts.contiguous(tokens, 1)
    plan = longspan.plan(mask, layout, q_heads=4, kv_heads=2, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype)
    shapes = {"q": (4, dims[0]), "k": (2, dims[0]), "v": (2, dims[1]), "dout": (4, dims[1])}
    tensors = {
        name: torch.randn(1, heads, tokens, dim, generator=draw).to(dtype).requires_grad_(name != "dout")
        for name, (heads, dim) in shapes.items()
    }
    inputs = [tensors[name] for name in "qkv"]
    out, lse = longspan.attention(*inputs, mask, return_lse=True)
    grads = torch.autograd.grad(out, inputs, tensors["dout"])
    tensors |= {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    tensors = {name: x.detach() for name, x in tensors.items()}
    return sampled.Shard(Site(ALONE, quick=True), plan, documents, tensors, window)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_samples_of_a_right_call_pass(dtype, window):
    shard = sampled_call(dtype, window=window)
    assert all(check.ratio < 0.6 for seed in range(5) for check in sampled.check_samples(shard, seed))


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1 + 1e-4), (torch.bfloat16, 1.1)], ids=str)
@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_samples_see_every_tensor(name, dtype, factor):
    shard = sampled_call(dtype)
    shard.tensors[name] *= factor
    wrong = {check.tensor for check in sampled.check_samples(shard, 0) if not check.ratio <= 1}
    assert name in wrong
    assert name in ("out", "lse") or wrong == {name}


def test_samples_see_another_window():
    shard = replace(sampled_call(torch.bfloat16, window=40), window=44)
    wrong = {check.tensor for check in sampled.check_samples(shard, 0) if not check.ratio <= 1}
    assert {"out", "dv"} <= wrong


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_samples_see_a_tenth_of_the_rows(name):
    """As if one message had been lost."""
    shard = sampled_call(torch.bfloat16)
    shard.tensors[name][:, :, 100:151] = 0
    assert any(not check.ratio <= 1 for check in sampled.check_samples(shard, 0) if check.tensor == name)


# ---- the page --------------------------------------------------------------------------------------------------------


def report_of(*outcomes, complete=True):
    found = Report({"device": "CPU", "versions": {"torch": "2.13"}}, 4, False, private_words())
    for number, outcome in enumerate(outcomes):
        found.add(f"exact.line{number}", outcome, 0.5)
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
    assert gone not in anonymize(text, private_words())
    found = report_of(wrong(text))
    assert gone not in markdown(found) + json.dumps(found.as_dict())


@pytest.mark.parametrize(
    "text",
    ["off by 2.5e-03 of 1.0", "torch 2.13.0+cu132", "3:4 heads and/or keys", "1.5 GB/s a/b", "rank 1: dq differs"],
)
def test_what_is_no_secret_stays(text):
    assert anonymize(text, ["node7"]) == text


def test_the_page_says_how_to_repeat_a_line_and_whether_it_is_accepted():
    good, slow, bad = right("fine"), compare_times(1.6, (1.25, 2.0), "slow"), wrong("dq is off")
    assert report_of(good, slow).ok
    assert not report_of(good, complete=False).ok
    found = report_of(good, slow, bad)
    assert not found.ok
    text = markdown(found)
    assert "NOT ACCEPTED: 1 right, 1 slower, 1 wrong" in text
    assert "slower than predicted by 1.60x" in text
    assert "torchrun --nproc-per-node 4 -m longspan acceptance --only exact.line2" in text
    lines = found.as_dict()["lines"]
    assert [line["red"] for line in lines] == [False, False, True]
    assert lines[1]["repeat"].endswith("--only exact.line1")


def test_the_page_counts_sections_and_gives_reasons_and_worst_figures():
    found = report_of(
        right("a", used=0.2), right("b", used=0.4), wrong("dq is off"), Outcome("not run", "needs 4 ranks")
    )
    found.add("time.causal.64k", compare_times(1.6, (1.25, 2.0), "slow"), 1.0)
    found.add("memory.batches.exchange", right("c", used=0.1, new_seconds=3.0, warm_seconds=1.5), 1.0)
    page = markdown(found).partition("<details>")[0]
    assert "| exact | 2 |  | 1 | 1 | 0.40 of what rounding explains (exact.line1) |" in page
    assert "| time |  | 1 |  |  | 1.60 the predicted time (time.causal.64k) |" in page
    assert "not run: exact.line3: needs 4 ranks" in page
    assert "exact.line2: WRONG.** dq is off" in page
    assert "| a new batch | 2.0x the time of the same again (memory.batches.exchange) |" in page
    assert found.as_dict()["sections"]["exact"]["worst_line"] == "exact.line1"


def test_files_are_whole(tmp_path):
    write(report_of(right("fine")), tmp_path / "found")
    assert json.loads((tmp_path / "found.json").read_text())["ok"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.json", "found.md"]


def test_links_as_nvidia_smi_prints_them():
    head = "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    table = f"{head}GPU0\t X \tNV18\tPIX\t0-47\t0\t\tN/A\nGPU1\tNV18\t X \tSYS\t0-47\t0\t\tN/A\nNIC0\tPIX\tSYS\t X \n"
    assert facts.link_kinds(table) == "NV18 2"
    assert facts.link_kinds("") is None


def test_variables_with_paths_are_told_by_name_alone(monkeypatch):
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/someone/topology.xml")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    told = facts.settings()
    assert "NCCL_DEBUG=WARN" in told
    assert "NCCL_TOPO_FILE" in told
    assert not any("someone" in line for line in told)


# ---- one process -----------------------------------------------------------------------------------------------------


def test_without_a_launcher_it_says_what_to_type(capsys):
    assert main(["acceptance"]) == 2
    assert "torchrun --nproc-per-node 4 -m longspan acceptance" in capsys.readouterr().err


def test_lines_are_listed_without_a_launcher(capsys):
    assert main(["acceptance", "--list"]) == 0
    names = capsys.readouterr().out.split()
    assert "exact.first_call.gloo" in names
    assert len(names) == 55


def test_without_a_checkout_it_says_how_to_get_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(longspan, "__file__", str(tmp_path / "site-packages" / "longspan" / "__init__.py"))
    assert main(["acceptance", "--list"]) == 2
    assert "in a checkout" in capsys.readouterr().err


def test_without_pytest_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert main(["acceptance", "--list"]) == 2
    assert "pip install pytest" in capsys.readouterr().err


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
    monkeypatch.setattr(site, "tokens_of", lambda _: 256)
    for module in (test_host, test_memory):
        call = module.attention
        monkeypatch.setattr(module, "attention", lambda q, k, v, plan, group, call=call: call(q, k, v, plan.mask))
    return GpuSite(ALONE, quick=False)


def test_memory_of_gpus_by_the_allocator(gpu_site):
    with pytest.raises(pytest.fail.Exception, match="the plan says"):  # 50 MB are more than 256 tokens may take
        test_memory.test_peak(gpu_site, "ring", "causal")
    assert gpu_site.outcome.figures["taken_bytes"] > 49_000_000


def test_host_time_of_gpus_by_events(gpu_site, monkeypatch):
    monkeypatch.setattr(gpu_site, "ranks", replace(ALONE, size=1))
    with pytest.raises(pytest.skip.Exception, match="2 ranks"):
        test_host.test_time(gpu_site)
    seconds = test_host.gpu_seconds(gpu_site, gpu_site.plan("causal", "256k"))
    assert all(0 < host < 5 and device == 0.005 for host, device in seconds.values())


def test_launches_of_gpus_by_the_profiler(gpu_site, monkeypatch):
    profile = test_host.profile
    cpu = test_host.ProfilerActivity.CPU
    monkeypatch.setattr(test_host, "profile", lambda activities: profile(activities=[cpu]))
    test_host.test_waits(gpu_site)
    assert "no host wait" in gpu_site.outcome.text
    error = RuntimeError("called a synchronizing CUDA operation")
    monkeypatch.setattr(test_host, "no_host_waits", lambda _: (_ for _ in ()).throw(error))
    with pytest.raises(pytest.fail.Exception, match="called a synchronizing CUDA operation"):
        test_host.test_waits(gpu_site)


def test_waits_of_gpus_are_forbidden_around_kernels_and_calls(gpu_site, monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with test_operators.no_host_waits("cuda:0"):
        assert modes == ["error"]
    assert modes == ["error", "default"]
    with pytest.raises(ValueError, match="x"), test_operators.no_host_waits("cuda:0"):
        raise ValueError("x")
    assert modes[-1] == "default"


# ---- a job that ends early -------------------------------------------------------------------------------------------


def session_of(*names):
    return Session(Site(ALONE, quick=True), names, None, lambda name: None, lambda report: None)


def verdicts(running):
    return [outcome.verdict for _, outcome, _ in running.report.rows]


def test_the_running_line_has_its_own_seconds(monkeypatch):
    """They were once counted from the start of the machine's clock: 8,782 s."""
    running = session_of("a", "b", "c")
    running.run("a", 1, lambda: None, {})
    running.test_start -= 5.0  # the second line began five seconds ago
    monkeypatch.setattr(session, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(os, "_exit", lambda code: None)
    read, write_end = os.pipe()
    os.write(write_end, bytes([signal.SIGTERM]))
    running._wait_for_sigterm(read)
    os.close(write_end)
    assert verdicts(running) == ["right", "wrong", "not run"]
    assert 5.0 <= running.report.rows[1][2] < 6.0
    assert running.report.seconds < 5.0
    assert not running.report.is_complete


def test_a_test_that_hangs_ends_the_run(monkeypatch):
    ended = threading.Event()
    monkeypatch.setattr(session, "TEST_SECONDS", 0.05)
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    running = session_of("a", "b")
    running.run("a", 1, lambda: ended.wait(30), {})
    assert ended.is_set()
    assert verdicts(running) == ["wrong", "not run"]
    assert "not finished within" in running.report.rows[0][1].text
    assert not running.report.ok


def test_outcomes_of_a_test(monkeypatch):
    running = session_of("a", "b", "c", "d", "e")
    site = running.site
    assert running.run("a", 1, lambda: site.record("fine", cases=3), {}) == right("fine", cases=3)
    assert running.run("b", 2, lambda: None, {}).text == "it needs 2 ranks, and there are 1"
    assert running.run("c", 1, pytest.skip, {"reason": "why"}) == Outcome("not run", "why")
    assert running.run("d", 1, pytest.fail, {"reason": "off"}) == wrong("off")
    assert running.run("e", 1, lambda: [].pop(), {}) == wrong("IndexError: pop from empty list")
    running.end()
    assert running.report.is_complete
