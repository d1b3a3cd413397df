"""Which kernel runs on which GPU: by capability, by what is asked, never on ROCm; and operators outside CUDA graphs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import longspan as ls
from longspan import _torch
from longspan.errors import KernelError
from longspan.kernels import Features, choose_kernel, flex, why_not_inside
from longspan.run import ops
from longspan.scoring.pipeline import Scoring

FUSED = ("varlen", "flash", "efficient", "cudnn", "flex")
MASK, SCORE = Features(mask_function=True), Features(score_function=True)
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


def _three(dtype, dim=64):
    return (torch.empty(1, 2, 8, dim, dtype=dtype, device="cuda"),) * 3


@pytest.fixture
def gpu(monkeypatch):
    """Sets the capability of the GPU that fake tensors are on."""
    monkeypatch.setattr(flex, "has_triton", lambda: True)
    with FakeTensorMode():
        yield lambda found: monkeypatch.setattr(_torch, "capability", lambda device: found)


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
    with pytest.raises(KernelError, match=rf"'{name}' cannot run: it needs a GPU of compute capability 8\.0") as e:
        choose_kernel(name, *_three(HALF))
    assert "7.5" in str(e.value)
    assert "Use 'efficient' or 'flex' or 'reference', or 'auto'" in str(e.value)
    gpu((8, 0))
    assert choose_kernel(name, *_three(HALF)) == name


def test_bfloat16_wants_ampere_of_efficient_too(gpu):
    gpu((7, 5))
    with pytest.raises(KernelError, match=r"capability 8\.0 or more, and that of cuda:0 is 7\.5"):
        choose_kernel("efficient", *_three(BRAIN))
    assert choose_kernel("efficient", *_three(HALF)) == "efficient"


@pytest.mark.parametrize("name", FUSED)
def test_rocm_is_refused_by_name(name, gpu, monkeypatch):
    gpu((9, 4))
    monkeypatch.setattr(_torch, "rocm", lambda: "6.4")
    with pytest.raises(KernelError, match=rf"'{name}' .* built for ROCm 6\.4, which is untested. Use 'ref"):
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
