"""Which kernel runs on which GPU: by capability, by what is asked, never on ROCm; and operators outside CUDA graphs."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan import _torch, kernels
from longspan.errors import KernelError
from longspan.kernels import Features, choose_kernel, flex, why_not_inside
from longspan.run import ops
from longspan.scoring.pipeline import Scoring
from longspan.versions import minor

FUSED = ("varlen", "flash", "efficient", "cudnn", "flex", "fa3", "fa4", "cudnn_varlen")
MASK, SCORE = Features(mask_function=True), Features(score_function=True)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
FROM_2_14 = minor(torch.__version__) >= (2, 14)


def _three(dtype, dim=64):
    return (torch.empty(1, 2, 8, dim, dtype=dtype, device="cuda"),) * 3


@pytest.fixture
def gpu(monkeypatch):
    """Sets the capability of the GPU that fake tensors are on."""
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    with FakeTensorMode():
        yield lambda found: monkeypatch.setattr(_torch, "capability", lambda device: found)


@pytest.fixture
def installed(monkeypatch):
    """Sets which packages of flash attention can be loaded."""
    kernels._known_choices.clear()
    kernels._reported.clear()

    def install(*names):
        kernels._known_choices.clear()
        missing = "cannot be loaded (ModuleNotFoundError)"
        monkeypatch.setattr(
            _torch, "flash_package", lambda name: (None, None) if name in names else f"{name} {missing}"
        )

    yield install
    kernels._known_choices.clear()


@pytest.mark.parametrize(
    ("capability", "packages", "dims", "chosen"),
    [
        ((9, 0), ("FA3", "FA4"), (128, 128), "fa3"),
        ((9, 0), ("FA3",), (192, 128), "fa3"),
        ((9, 0), ("FA3",), (256, 256), "fa3"),
        ((9, 0), ("FA4",), (128, 128), "varlen"),
        ((10, 0), ("FA3", "FA4"), (128, 128), "fa4"),
        ((10, 3), ("FA4",), (192, 128), "fa4"),
        ((10, 0), ("FA4",), (256, 256), "varlen"),
        ((10, 0), ("FA3",), (128, 128), "varlen"),
        ((12, 0), ("FA3", "FA4"), (128, 128), "varlen"),
        ((8, 0), ("FA3", "FA4"), (128, 128), "varlen"),
        ((9, 0), (), (128, 128), "varlen"),
        ((9, 0), ("cuDNN", "FA3"), (128, 128), "fa3"),
        ((9, 0), ("cuDNN", "FA4"), (128, 128), "cudnn_varlen"),
        ((10, 0), ("cuDNN", "FA4"), (128, 128), "fa4"),
        ((10, 0), ("cuDNN",), (128, 64), "cudnn_varlen"),
        ((9, 0), ("cuDNN",), (192, 128), "varlen"),
        ((8, 0), ("cuDNN",), (128, 128), "varlen"),
        (None, ("FA3", "FA4", "cuDNN"), (128, 128), "varlen"),
    ],
)
def test_auto_takes_the_fastest_that_is_installed(capability, packages, dims, chosen, gpu, installed):
    gpu(capability)
    installed(*packages)
    q, v = (torch.empty(1, 2, 8, dim, dtype=BRAIN, device="cuda") for dim in dims)
    for _ in range(2):  # chosen, and remembered
        assert choose_kernel("auto", q, q, v) == chosen
        assert choose_kernel("sdpa", q, q, v) == "varlen", "PyTorch's own"
        assert choose_kernel("varlen", q, q, v) == "varlen", "named"
    assert choose_kernel("auto", *_three(SINGLE)) == "efficient"
    assert choose_kernel("auto", *_three(BRAIN), SCORE) in ("flex", "reference")


def test_a_named_package_is_used_or_refused(gpu, installed):
    installed("FA4")
    gpu((9, 0))
    assert choose_kernel("fa4", *_three(BRAIN)) == "fa4"
    with pytest.raises(KernelError, match=r"'fa3'.*FA3 cannot be loaded.*'varlen'"):
        choose_kernel("fa3", *_three(BRAIN))
    with pytest.raises(KernelError, match=r"'fa4'.*up to 128.*256"):
        choose_kernel("fa4", *_three(BRAIN, 256))
    gpu((8, 0))
    with pytest.raises(KernelError, match=r"'fa4'.*9\.x or 10\.x.*8\.0"):
        choose_kernel("fa4", *_three(BRAIN))


@pytest.mark.parametrize(("release", "takes"), [("2.14.1", False), ("2.15.0", True)])
def test_cudnn_takes_groups_of_heads_by_name(release, takes, gpu, installed, monkeypatch):
    monkeypatch.setattr(torch, "__version__", release)
    installed("cuDNN")
    gpu((9, 0))
    q, one = (torch.empty(1, heads, 8, 64, dtype=BRAIN, device="cuda") for heads in (2, 1))
    assert choose_kernel("auto", q, q, q) == choose_kernel("cudnn_varlen", q, q, q) == "cudnn_varlen"
    assert choose_kernel("auto", q, one, one) == "varlen", "nobody has run it on a GPU"
    if takes:
        assert choose_kernel("cudnn_varlen", q, one, one) == "cudnn_varlen"
        return
    with pytest.raises(KernelError, match=r"'cudnn_varlen'.*groups of heads from PyTorch 2\.15 on.*2 on 1"):
        choose_kernel("cudnn_varlen", q, one, one)


@pytest.mark.parametrize("warn_only", [False, True])
def test_fa3_is_refused_where_its_backward_is_not_deterministic(warn_only, gpu, installed):
    installed("FA3")
    gpu((9, 0))
    wide = _three(BRAIN, 200)  # rounded up to 256
    assert choose_kernel("auto", *wide) == "fa3"
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        assert choose_kernel("auto", *wide) == "varlen"
        with pytest.raises(KernelError, match=r"'fa3'.*deterministic up to head dim 192.*200"):
            choose_kernel("fa3", *wide)
        assert choose_kernel("auto", *_three(BRAIN, 192)) == "fa3"
    finally:
        torch.use_deterministic_algorithms(False)
    assert choose_kernel("auto", *wide) == "fa3"


@pytest.mark.parametrize(
    ("capability", "packages", "says"),
    [
        ((9, 0), (), r"kernel='fa3' is faster\. It needs FlashAttention 3 \(flash_attn_3.*FA3 cannot be loaded"),
        ((10, 3), (), r"kernel='fa4' is faster\. It needs FlashAttention 4 \(pip install flash-attn-4\).*FA4 cannot"),
        ((9, 0), ("FA3",), None),
        ((10, 0), ("FA4",), None),
        ((8, 0), (), None),
        ((12, 0), (), None),
    ],
)
def test_fa2_on_a_gpu_with_a_faster_kernel_is_a_warning(capability, packages, says, gpu, installed, caplog):
    gpu(capability)
    installed(*packages)
    for dim in (64, 128):
        for _ in range(2):
            choose_kernel("auto", *_three(BRAIN, dim))
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if says is None:
        assert not warned
        assert choose_kernel("varlen", *_three(BRAIN)) == "varlen", "named"
        assert ("It is installed." in caplog.text) == bool(packages)
        return
    (text,) = warned
    assert re.search(says, text)


def test_what_the_user_activated_is_obeyed(gpu, installed, monkeypatch):
    installed("FA3", "FA4", "cuDNN")
    gpu((9, 0))
    assert choose_kernel("auto", *_three(BRAIN)) == "fa3"
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4")
    assert choose_kernel("auto", *_three(BRAIN)) == "varlen"
    assert choose_kernel("fa3", *_three(BRAIN)) == "fa3"
    gpu((8, 0))  # PyTorch's operator raises there now
    with pytest.raises(KernelError, match=r"'varlen'.*9\.x or 10\.x"):
        choose_kernel("varlen", *_three(BRAIN))
    assert choose_kernel("auto", *_three(BRAIN)) == "efficient"


def test_the_choice_of_auto_is_logged_once(gpu, installed, caplog):
    gpu((9, 0))
    with caplog.at_level("INFO", logger="longspan"):
        for packages in ((), ("FA3",), (), ("FA3",)):
            installed(*packages)
            for dim in (64, 128):
                choose_kernel("auto", *_three(BRAIN, dim))
                choose_kernel("varlen", *_three(BRAIN, dim))
        choose_kernel("auto", *((torch.zeros(1, 2, 8, 16),) * 3))
    first, second = (record.getMessage() for record in caplog.records if record.levelname == "INFO")
    assert "'auto' runs varlen (FA2) on cuda:0 and not fa3: FA3 cannot be loaded" in first
    assert "cudnn_varlen: cuDNN cannot be loaded" in first
    assert "'auto' runs fa3 on cuda:0" in second


def test_packages_are_called_without_replacing_operators(monkeypatch):
    """With stand-ins for the two packages: what they are given, and that PyTorch's operators are the same after."""
    calls = []

    def forward(q, k, v, *args, **more):
        calls.append(("forward", args, more))
        return q, q[..., 0], None, None, None

    def backward(dout, q, k, v, *args, **more):
        calls.append(("backward", args[2:], more))
        return q, k, v

    monkeypatch.setattr(_torch, "flash_package", lambda name: (forward, backward))
    x, starts = torch.zeros(6, 2, 8), torch.tensor([0, 2, 6], dtype=torch.int32)
    for name in ("fa3", "fa4"):
        kernel = kernels.kernel_named(name)
        kernel.op(x, x, x, starts, starts, (4, 4), (-1, 0), 0.5)
        kernel.backward_op(x, x, x, x, x, x[..., 0], starts, starts, (4, 4), (3, 0), 0.5)
    expected = {"scale": 0.5, "window_size_left": -1, "window_size_right": 0}
    splits = {"num_splits": 1} if minor(torch.__version__) >= (2, 12) else {}
    assert [(kind, more) for kind, _, more in calls] == [
        ("forward", {**expected, **splits}), ("backward", {**expected, "window_size_left": 3})
    ] * 2  # fmt: skip
    assert all(args[2:6] == (4, 4, 0.0, kind == "forward") for kind, args, _ in calls)
    assert torch.nn.attention.current_flash_attention_impl() is None


PASSES_SPLITS = pytest.mark.skipif(minor(torch.__version__) < (2, 12), reason="PyTorch 2.11 runs neither FA3 nor FA4")


@PASSES_SPLITS
@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_a_missing_package_is_a_reason(name):
    _torch.flash_package.cache_clear()
    assert f"{name} cannot be loaded (ModuleNotFoundError" in _torch.flash_package(name)


def test_pytorch_2_11_runs_neither_fa3_nor_fa4(monkeypatch):
    """It passes no `num_splits`, and FA4 without windows."""
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    for name in ("FA3", "FA4"):
        _torch.flash_package.cache_clear()
        assert _torch.flash_package(name) == f"{name} needs PyTorch 2.12 or newer, and this is 2.11.0"
    _torch.flash_package.cache_clear()


def _call(run):
    """A causal call of three slices through PyTorch's wrapper of a package."""
    q, starts = torch.zeros(8, 2, 64, dtype=BRAIN), torch.tensor([0, 3, 8], dtype=torch.int32)
    return _torch.flash(q, q, q, starts, starts, (5, 5), (-1, 0), 1.0, run=run)


@PASSES_SPLITS
def test_fa3_does_not_split_keys(monkeypatch):
    """With 0 its host code may: 10 GiB of partial results for 1M causal tokens on 8 ranks."""
    from torch.nn.attention import _fa3

    seen = []

    def forward(q, *args):
        seen.append(args[-3])  # before pack_gqa and sm_margin
        return q, torch.zeros(2, len(q)), None, None

    monkeypatch.setattr(_fa3, "_fa3_forward_support_error", lambda *_: None)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", forward)
    _call(_fa3._fa3_flash_attention_forward_impl_default)
    assert seen == [1]


@PASSES_SPLITS
@pytest.mark.parametrize(
    ("release", "results", "fits"),
    [
        ("4.0.0b4", 2, False),  # no windows on 9.x
        ("4.0.0b18", 2, True),
        ("4.0.0b19.dev1+g12ab", 4, FROM_2_14),
        ("4.0.0b36", 5, FROM_2_14),
        ("4.0.0", 5, FROM_2_14),
    ],
)
def test_fa4_is_refused_where_pytorch_cannot_call_it(release, results, fits, monkeypatch):
    """PyTorch 2.12 and 2.13 take two results, and raise in every call with 4.0.0b19 or newer."""
    from torch.nn.attention import _fa4

    seen = []

    def forward(q, k, v, **options):
        seen.append(options["num_splits"])
        return q, torch.zeros(2, len(q)), *(None,) * (results - 2)

    package = ModuleType("flash_attn.cute.interface")
    package._flash_attn_fwd, package._flash_attn_bwd = forward, lambda q, k, v, *_, **__: (q, k, v)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
        sys.modules[name].__path__ = []
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", package)
    monkeypatch.setattr(_torch.metadata, "version", lambda _: release)
    monkeypatch.setattr(_fa4, "_fa4_forward_support_error", lambda *_: None)
    for known in (_torch.flash_package, _fa4._fa4_import_module):
        known.cache_clear()
    try:
        found = _torch.flash_package("FA4")
        if fits:
            _call(found[0])
            assert seen == [1]
        else:
            assert f"flash-attn-4 {release} does not fit PyTorch {torch.__version__}: 2.12 and 2.13 run" in found
        if results > 2 and not FROM_2_14:
            monkeypatch.setattr(_fa4, "_FA4_MODULE_PATH", "flash_attn.cute.interface")
            with pytest.raises(ValueError, match="too many values to unpack"):
                _call(_fa4._fa4_flash_attention_forward_impl)
    finally:
        for known in (_torch.flash_package, _fa4._fa4_import_module):
            known.cache_clear()


def test_cudnn_is_a_matter_of_versions(monkeypatch):
    """PyTorch 2.13 has the operator, but builds a graph in every call."""
    _torch.flash_package.cache_clear()
    assert re.search(r"2\.14 or newer|cuDNN 9\.18", _torch.flash_package("cuDNN"))
    has = SimpleNamespace(arguments=[SimpleNamespace(name="seqused_k")])
    operator = SimpleNamespace(default=SimpleNamespace(_schema=has))
    monkeypatch.setattr(_torch, "_aten", SimpleNamespace(_cudnn_attention_forward=operator))
    for version, ok in ((None, False), (91700, False), (91800, True)):
        _torch.flash_package.cache_clear()
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda version=version: version)
        assert isinstance(_torch.flash_package("cuDNN"), tuple) == ok
    _torch.flash_package.cache_clear()


@pytest.mark.parametrize(
    ("capability", "dtype", "asked", "chosen"),
    [
        ((9, 0), BRAIN, Features(), "varlen"),
        ((8, 0), HALF, Features(), "varlen"),
        ((9, 0), SINGLE, Features(), "efficient"),
        ((9, 0), BRAIN, MASK, "flex"),
        ((9, 0), SINGLE, MASK, "flex"),
        ((9, 0), BRAIN, SCORE, "flex"),
        ((7, 5), HALF, Features(), "efficient"),
        ((7, 5), SINGLE, Features(), "efficient"),
        ((7, 5), BRAIN, Features(), "reference"),
        ((7, 5), HALF, MASK, "flex"),
        ((6, 1), HALF, MASK, "efficient"),
        ((6, 1), HALF, SCORE, "reference"),
        (None, BRAIN, Features(), "varlen"),
    ],
)
def test_auto_goes_by_capability_and_by_what_is_asked(capability, dtype, asked, chosen, gpu):
    gpu(capability)
    assert choose_kernel("auto", *_three(dtype), asked) == chosen


def test_order_on_gpus(gpu):
    """With a function: flex before efficient, which asks the CPU block by block; efficient where flex cannot."""
    gpu((9, 0))
    assert choose_kernel("auto", *_three(BRAIN, 512), MASK) == "efficient"
    assert choose_kernel("auto", *_three(BRAIN), MASK, lambda: "tracing failed") == "efficient"
    assert choose_kernel("auto", *_three(BRAIN), SCORE, lambda: "tracing failed") == "reference"
    assert choose_kernel("flex", *_three(BRAIN), MASK, lambda: "tracing failed") == "flex", "named, it says so itself"
    assert choose_kernel("flex", *_three(BRAIN)) == "flex"


@pytest.mark.parametrize("name", ["varlen", "flash", "cudnn"])
def test_old_gpus_are_refused_by_name(name, gpu):
    gpu((7, 5))
    with pytest.raises(KernelError, match=rf"'{name}'.*8\.0") as e:
        choose_kernel(name, *_three(HALF))
    assert "7.5" in str(e.value)
    assert "Use 'efficient' or 'flex' or 'reference', or 'auto'" in str(e.value)
    gpu((8, 0))
    assert choose_kernel(name, *_three(HALF)) == name


def test_bfloat16_wants_ampere_of_efficient_too(gpu):
    gpu((7, 5))
    with pytest.raises(KernelError, match=r"8\.0.*cuda:0.*7\.5"):
        choose_kernel("efficient", *_three(BRAIN))
    assert choose_kernel("efficient", *_three(HALF)) == "efficient"


@pytest.mark.parametrize("name", FUSED)
def test_rocm_is_refused_by_name(name, gpu, monkeypatch):
    gpu((9, 4))
    monkeypatch.setattr(_torch, "rocm", lambda: "6.4")
    with pytest.raises(KernelError, match=rf"'{name}' .*ROCm 6\.4.*'ref"):
        choose_kernel(name, *_three(HALF))
    for asked in (Features(), MASK, SCORE):
        assert choose_kernel("auto", *_three(HALF), asked) == "reference"


def test_here_there_is_no_gpu_to_ask():
    assert _torch.capability(torch.device("cuda", 0)) is None or torch.cuda.is_available()
    assert _torch.rocm() == torch.version.hip
    cpu = (torch.zeros(1, 2, 8, 16),) * 3
    assert choose_kernel("auto", *cpu, MASK) == "cpu_flash"
    assert choose_kernel("auto", *cpu, SCORE) == "reference"


def _looks(b, h, q, kv):
    return q >= kv if int(q.sum()) % 2 else q > kv


def test_functions_that_look_at_numbers_are_found_before_a_kernel_is_chosen():
    like = torch.zeros(1, 2, 8, 16)
    traces = ls.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 != 1).resized(64)
    looks = ls.masks.from_mask_mod(_looks).resized(64)
    assert why_not_inside(traces, None, like) is None
    assert "tracing one failed" in why_not_inside(looks, None, like)
    assert "tracing one failed" in why_not_inside(looks, None, like)  # remembered

    plain = Scoring((lambda score, b, h, q, kv: score + (q - kv) * 0.1,))
    whole = Scoring((lambda score, b, h, q, kv: score if bool(q > 3) else score * 2,))
    assert why_not_inside(traces, plain, like) is None
    assert "tracing one failed" in why_not_inside(traces, whole, like)
    assert "tracing one failed" in why_not_inside(ls.masks.causal().resized(64), whole, like)


def test_operators_stay_out_of_cuda_graphs():
    for operator in (ops.attention, ops.attention_backward):
        tags = operator.tags
        assert torch.Tag.cudagraph_unsafe in tags
        assert torch.Tag.pt2_compliant_tag in tags, "and in compiled graphs"
