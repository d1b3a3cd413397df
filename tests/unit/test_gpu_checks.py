"""The checks of tests/gpu: kernels by model, guard zones, samples of long sequences, names of tests."""

import contextlib
import doctest
from dataclasses import replace
from itertools import product

import pytest
import torch

import longspan
import tests.gpu.conftest
from longspan import kernels
from longspan.cli.launch import JobRanks
from longspan.kernels import cuda_sdpa, kernel_named
from longspan.kernels.cuda_flash import Flash
from tests.gpu import (
    claims,
    facts,
    guard_zones,
    programs,
    sampled,
    site,
    test_exact,
    test_host,
    test_memory,
    test_operators,
)
from tests.gpu.guard_zones import GUARD, LAYOUTS, GuardedMemory
from tests.gpu.site import Site
from tests.gpu.suite import FOLDER
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


@pytest.mark.parametrize("module", [claims, facts, guard_zones, programs, site, test_exact, test_memory])
def test_examples_in_docstrings(module):
    assert doctest.testmod(module).failed == 0


# ---- names -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def collected(monkeypatch):
    """The names of all tests that a device collects."""

    def names(device, *words):
        ranks = JobRanks(0, 1, 1, "nccl" if device == "cuda:0" else "gloo", device)
        if "--one-gpu" in words:
            ranks = replace(ranks, backend="gloo")
        monkeypatch.setattr(tests.gpu.conftest, "join_ranks", lambda _: contextlib.nullcontext(ranks))
        monkeypatch.setattr(tests.gpu.conftest, "join_one_card", lambda: contextlib.nullcontext(ranks))
        plugin = Collected()
        quiet = ("-p", "no:terminal", "-p", "no:faulthandler", "-p", "no:unraisableexception", "--collect-only")
        assert pytest.main([str(FOLDER), *words, *quiet], plugins=[plugin]) == 0
        return plugin.names

    return names


class Collected:
    def pytest_collection_finish(self, session):
        self.names = [claims.name_of(item.nodeid) for item in session.items]


def test_a_gpu_collects_every_kernel_and_both_kinds_of_group(collected):
    names = collected("cuda:0")
    assert len(set(names)) == len(names)
    assert list(dict.fromkeys(name.partition(".")[0] for name in names)) == list(tests.gpu.conftest.FILES)
    exact = [name for name in names if name.startswith("exact.")]
    assert exact[:2] == ["exact.first_call[first_call.nccl]", "exact.first_call[first_call.mixed]"]
    assert {"exact.group[group.nccl]", "exact.group[group.mixed]", "time.workload[causal.1M]"} <= set(names)
    found = {name.partition("[")[2].partition(".")[0] for name in names if name.startswith("operators.kernel")}
    assert found == set(kernels._KERNELS) - {"cpu_flash"}
    assert {f"long.kernel[{name}]" for name in ("fa3", "fa4", "cudnn_varlen", "varlen")} <= set(names)


def test_one_card_runs_gloo_in_the_place_of_nccl(collected):
    names = set(collected("cuda:0", "--one-gpu"))
    assert names - set(collected("cuda:0")) == {"exact.first_call[first_call.gloo]", "exact.group[group.gloo]"}


def test_every_test_stands_for_a_claim(collected):
    names = [*collected("cpu"), *collected("cuda:0"), *collected("cuda:0", "--one-gpu")]
    assert {claims.claim_of(name) for name in names} == set(claims.CLAIMS)


def test_a_claim_is_wrong_if_one_of_its_tests_is():
    ended = {"long.sampled[ring]": ("passed", ""), "long.kernel[fa3]": ("skipped", "Skipped: it is not installed")}
    word = lambda more: next(v for v in claims.verdicts(ended | more) if v.claim.startswith("long")).word  # noqa: E731
    assert word({}) == "right"
    assert word({"long.sampled[exchange]": ("failed", "dk is off")}) == "wrong"
    assert word({"long.sampled[ring]": ("left out", "left out by --quick")}) == "not run"


def test_the_quick_run_has_some_of_every_file(collected):
    for device in ("cpu", "cuda:0"):
        quick = collected(device, "--quick")
        assert {name.partition(".")[0] for name in quick} == set(tests.gpu.conftest.FILES)
        assert len(quick) < len(collected(device))


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


# ---- facts -----------------------------------------------------------------------------------------------------------


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


# ---- what only GPUs run, on stand-ins: that the code runs, not that the figures are right ----------------------------


class GpuSite(Site):
    """Says that it has GPUs; its tensors are on the CPU."""

    @property
    def is_gpu(self):
        return True

    @property
    def half(self):
        return torch.bfloat16

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
    assert gpu_site.found["taken_bytes"] > 49_000_000


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
    assert "no host wait" in gpu_site.found["found"]
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
