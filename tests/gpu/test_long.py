"""Long sequences over all ranks: sampled queries and keys of every scheme and flash attention against float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
import torch.nn.attention

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.workload import drawn_lengths
from longspan.kernels.cuda_flash import implementation
from longspan.planning.plan import Plan
from tests.gpu.sampled import NUM_SAMPLES, Shard, check_samples
from tests.gpu.site import Site

Dims = tuple[int, int]
"""Features of queries and keys, and of values."""
Cases = tuple[tuple[str, tuple[Dims, ...]], ...]
"""Sequence lengths, each with the head dims that run at it."""
DIMS: tuple[Dims, ...] = ((64, 64), (128, 128), (192, 128), (256, 256))
pytestmark = pytest.mark.ranks(2)


def cases(site: Site) -> Cases:
    if site.quick:
        return (("64k", DIMS[1:2]),) if site.is_gpu else (("1k", DIMS[:1]),)
    return (("64k", DIMS), ("256k", DIMS[2:]), ("1M", DIMS[1:2])) if site.is_gpu else (("1k", DIMS), ("4k", DIMS[:1]))


def run_call(site: Site, group: dist.ProcessGroup, lengths: list[int], dims: Dims, scheme: str) -> Shard:
    """Return this rank's tensors of a forward and backward pass over causal documents."""
    ranks, tokens = site.ranks, sum(lengths)
    mask = masks.documents(lengths) & masks.causal()
    dtype = torch.bfloat16 if site.is_gpu else torch.float32
    work: Plan = plan(
        mask, layouts.balanced(mask, world_size=ranks.size, seq_len=tokens), q_heads=2 * ranks.size,
        kv_heads=ranks.size, head_dim=dims[0], v_head_dim=dims[1], dtype=dtype, scheme=scheme,
    )  # fmt: skip
    generator = torch.Generator(ranks.device).manual_seed(ranks.rank)
    slots = work.layout.num_slots(ranks.rank)
    shapes = {"q": (2, dims[0]), "k": (1, dims[0]), "v": (1, dims[1]), "dout": (2, dims[1])}
    tensors = {
        name: torch.randn(
            1, heads * ranks.size, slots, dim, generator=generator, device=ranks.device, dtype=dtype
        ).requires_grad_(name != "dout")
        for name, (heads, dim) in shapes.items()
    }
    q, k, v = (tensors[name] for name in "qkv")
    out, lse = attention(q, k, v, work, group=group, return_lse=True)
    grads = torch.autograd.grad(out, (q, k, v), tensors["dout"])
    results = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    documents = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(ranks.device)
    return Shard(site, work, documents, {name: x.detach() for name, x in (tensors | results).items()})


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FA3", "FA4"])
def test_flash(site: Site, name: str) -> None:
    """Flash attention that is installed beside PyTorch's own, in its place."""
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if not site.is_gpu or activate is None:
        pytest.skip(f"{name} needs a GPU, and a PyTorch that can activate it")
    before = implementation()
    try:
        activate(name)
    except Exception as error:  # of the package that it would import, or of this GPU
        pytest.skip(f"{name} cannot be activated here: {type(error).__name__}: {error}")
    try:
        judge_samples(site, (("64k", DIMS[:2]), ("256k", DIMS[1:2])), "exchange")
    finally:
        torch.nn.attention.restore_flash_attention_impl()
        if before != implementation():
            activate(before)


def judge_samples(site: Site, cases: Cases, scheme: str) -> None:
    used, sizes, group = 0.0, list[str](), site.group()
    for size, dims_of in cases:
        tokens = site.tokens(size)
        widths = [f"{d}" if d == e else f"{d}/{e}" for d, e in dims_of]
        sizes.append(f"{size} x {', '.join(widths)}")
        lengths = {"packed": drawn_lengths("longtail", tokens).tolist(), "causal": [tokens]}
        for (dims, width), (name, documents) in product(zip(dims_of, widths, strict=True), lengths.items()):
            for check in check_samples(run_call(site, group, documents, dims, scheme), seed=dims[0]):
                if not check.ratio <= 1:
                    pytest.fail(
                        f"{name}, {size} x {width}: {check.tensor} of sampled rows is off by {check.error:.2e}, and"
                        f" rounding explains {check.budget:.2e}"
                    )
                used = max(used, check.ratio)
    site.record(
        f"{NUM_SAMPLES} queries and {NUM_SAMPLES} keys against all others, packed and causal, {'; '.join(sizes)}: off"
        f" by at most {used:.2f} of what rounding explains",
        used=used,
    )
