"""Long sequences over all ranks: sampled queries and keys of every scheme and flash attention against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.workload import drawn_lengths
from longspan.kernels import kernel_named
from longspan.kernels.cuda_flash import implementation
from longspan.planning.plan import Plan
from tests.gpu.sampled import NUM_SAMPLES, Shard, check_samples
from tests.gpu.site import Site

Dims = tuple[int, int]
"""Features of queries and keys, and of values."""
Cases = tuple[tuple[str, tuple[Dims, ...]], ...]
"""Sequence lengths, each with the head dims that run at it."""
DIMS: tuple[Dims, ...] = ((64, 64), (128, 128), (192, 128), (256, 256))
KERNEL_SIZE = "64k"
pytestmark = pytest.mark.ranks(2)


def cases(site: Site) -> Cases:
    if site.quick:
        return (("64k", DIMS[1:2]),) if site.is_gpu else (("1k", DIMS[:1]),)
    if site.on_one_card:
        return ("64k", DIMS), ("256k", DIMS[1:2])
    return (("64k", DIMS), ("256k", DIMS[2:]), ("1M", DIMS[1:2])) if site.is_gpu else (("1k", DIMS), ("4k", DIMS[:1]))


def run_call(
    site: Site, group: dist.ProcessGroup, lengths: list[int], window: int | None, dims: Dims, scheme: str, kernel: str,
    heads: int,
) -> Shard:  # fmt: skip
    """Return this rank's tensors of a forward and backward pass over causal documents, perhaps with a window, with so
    many query heads for each key head."""
    ranks, tokens = site.ranks, sum(lengths)
    mask = masks.documents(lengths) & (masks.causal() if window is None else masks.sliding_window(window))
    dtype = site.half if site.is_gpu else torch.float32
    work: Plan = plan(
        mask, layouts.balanced(mask, world_size=ranks.size, seq_len=tokens), q_heads=heads * ranks.size,
        kv_heads=ranks.size, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, scheme=scheme,
    )  # fmt: skip
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    slots = work.layout.num_slots(ranks.rank)
    shapes = {"q": (heads, dims[0]), "k": (1, dims[0]), "v": (1, dims[1]), "dout": (heads, dims[1])}
    tensors = {
        name: torch.randn(
            1, num * ranks.size, slots, dim, generator=generator, device=ranks.device, dtype=dtype
        ).requires_grad_(name != "dout")
        for name, (num, dim) in shapes.items()
    }
    q, k, v = (tensors[name] for name in "qkv")
    out, lse = attention(q, k, v, work, group=group, kernel=kernel, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    results = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(ranks.device)
    return Shard(site, work, documents, {name: x.detach() for name, x in (tensors | results).items()}, window)


@pytest.mark.parametrize(
    "scheme",
    [
        "exchange",
        *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("ring", "all_gather", "all_to_all")),
        pytest.param("hybrid(2)", id="hybrid", marks=[pytest.mark.slow, pytest.mark.ranks(4)]),
    ],
)
def test_sampled(site: Site, scheme: str) -> None:
    judge_samples(site, cases(site), scheme)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["fa3", "fa4", "cudnn_varlen", "varlen"])
def test_kernel(site: Site, kernel: str) -> None:
    """Every flash attention by name; the lines above run the one that is the default here."""
    judge_samples(site, ((KERNEL_SIZE, DIMS),), "exchange", kernel)


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, id=f"varlen.{name}") for name in ("FA3", "FA4")])
def test_activated(site: Site, name: str) -> None:
    """The same in the place of PyTorch's own operator, where a user has activated it."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if activate is None:
        pytest.skip(f"this PyTorch cannot activate {name}")
    before = implementation()
    try:
        activate(name)
    except Exception as error:  # of the package that it would import, or of this GPU
        pytest.skip(f"{name} cannot be activated here: {type(error).__name__}: {error}")
    try:
        judge_samples(site, ((KERNEL_SIZE, DIMS[:2]),), "exchange", "varlen")
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        if before != implementation():
            activate(before)


def refusal(site: Site, kernel: str, dims: Dims, heads: int) -> str | None:
    """Return why the kernel does not take tensors with so many query heads for each key head, or None."""
    shapes = ((heads, dims[0]), (1, dims[0]), (1, dims[1]))
    tensors = (torch.empty(1, h, 1, dim, dtype=site.half, device=site.ranks.device) for h, dim in shapes)
    return kernel_named(kernel).refuses(*tensors)


def judge_samples(site: Site, cases: Cases, scheme: str, kernel: str = "auto") -> None:
    used, sizes, group, refused = 0.0, list[str](), site.group(), list[str]()
    for size, all_dims in cases:
        tokens, widths = site.tokens(size), list[str]()
        packed = drawn_lengths("longtail", tokens).tolist()
        kinds = {"packed": (packed, None), "causal": ([tokens], None), "window": ([tokens], tokens // 32)}
        for dims in all_dims:
            width, heads = f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]}/{dims[1]}", 2
            if kernel != "auto" and refusal(site, kernel, dims, heads):
                heads = 1
                if why := refusal(site, kernel, dims, heads):
                    refused.append(f"{width}: {why}")
                    continue
            widths.append(width)
            for name, (documents, window) in kinds.items():
                shard = run_call(site, group, documents, window, dims, scheme, kernel, heads)
                for check in check_samples(shard, seed=dims[0]):
                    if not check.ratio <= 1:
                        pytest.fail(
                            f"{name}, {size} x {width}: {check.tensor} of sampled rows is off by {check.error:.2e}, and"
                            f" rounding explains {check.budget:.2e}"
                        )
                    used = max(used, check.ratio)
        sizes.append(f"{size} x {', '.join(widths)}")
    if not used:
        pytest.skip(f"refused here: {refused[0]}")
    site.record(
        f"{NUM_SAMPLES} queries and {NUM_SAMPLES} keys against all others, packed, causal and with a window,"
        f" {'; '.join(sizes)}: off by at most {used:.2f} of what rounding explains"
        f"{'; refused: ' if refused else ''}{'; '.join(refused)}",
        used=used,
    )
