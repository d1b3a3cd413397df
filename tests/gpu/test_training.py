"""Training steps over all ranks against one device: compiled, checkpointed, under FSDP2, of Hugging Face, with mixers.

Models and batches are tiny. Steps are compared by `verify_model`, recurrences and convolutions with float64.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.layouts import Layout
from longspan.testing import allowed
from longspan.tile import accumulation_dtype
from longspan.training import shard_batch, token_loss
from longspan.verification import verify_model
from longspan.verification.reference import unit
from tests.gpu.site import Site
from tests.gpu.test_exact import judge

HEADS, HEAD_DIM, WORDS, BLOCKS = 2, 16, 50, 2
LENGTHS = [40, 9, 79]
TOKENS = sum(LENGTHS)
COMPILER = {"cuda": "inductor", "cpu": "aot_eager"}
MARGIN = 8
"""Error over ranks, as a multiple of that of one device in the same dtype: sums have another order."""
pytestmark = pytest.mark.ranks(2)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        return x + self.out(attend(q, k, v).transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = HEADS * HEAD_DIM
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.bias = nn.Parameter(torch.zeros(WORDS))
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, ids: Tensor, attend: Attend, run: Callable[..., Tensor] | None = None) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, attend) if run is None else run(block, x, attend)
        return self.head(x) + self.bias  # not a view, which FSDP2 warns of


def whole_step(model: nn.Module, batch: dict[str, Tensor], mask: Any) -> tuple[Tensor, Tensor]:
    """Return loss and logits of one device, with PyTorch's own attention."""
    seen = allowed(mask, 1, 1, TOKENS).to(batch["input_ids"].device)
    logits = model(batch["input_ids"], lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=seen))
    labels = shard_batch(batch, ls.layouts.contiguous(TOKENS, 1), 0, documents=LENGTHS, positions="document")[
        "shift_labels"
    ]
    return token_loss(logits, labels, group=None, gradients="sum"), logits


def checkpointed(block: nn.Module, x: Tensor, attend: Attend) -> Tensor:
    return checkpoint(block, x, attend, use_reentrant=False)


FSDP_ENDS = "FSDP2 ended the process on one simulated card, and the cause is not known"


@pytest.mark.parametrize(
    "way",
    [
        "checkpointing",
        pytest.param("compile", marks=pytest.mark.slow),
        pytest.param("fsdp2", marks=[pytest.mark.slow, pytest.mark.cards(FSDP_ENDS)]),
    ],
)
def test_step(site: Site, way: str) -> None:
    """A step of two blocks with attention. FSDP2 shards the model over the ranks that share the sequence."""
    group, device, rank = site.group(), site.ranks.device, site.ranks.rank
    mask = ls.masks.documents(LENGTHS) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=site.ranks.size)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="float32")
    torch.manual_seed(0)
    model, reference, run = Model().to(device), None, None
    gradients = "sum"
    if way == "checkpointing":
        run = checkpointed
    elif way == "compile":
        compiled = torch.compile(Block.forward, backend=COMPILER[torch.device(device).type], fullgraph=True)
        run = lambda block, x, attend: compiled(block, x, attend)  # noqa: E731
    else:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        reference, gradients = copy.deepcopy(model), "average"
        mesh = DeviceMesh.from_group(group, torch.device(device).type)
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ls.attention(q, k, v, plan, group=group)

    def local_step(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        mine = shard_batch(batch, layout, rank, documents=LENGTHS, positions="document")
        logits = model(mine["input_ids"], attend, run)
        return token_loss(logits, mine["shift_labels"], group=group, gradients=gradients), logits

    ids = torch.randint(WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    report = verify_model(
        model, {"input_ids": ids, "labels": ids}, local=local_step, whole=whole_step, layout=layout, group=group,
        mask=mask, reference=reference, gradients="sum" if reference is None else "done", probes=1,
    )  # fmt: skip
    judge(site, {"loss, logits and gradients": report})


@pytest.mark.slow
def test_huggingface(site: Site) -> None:
    """A step of a tiny Llama, packed, by `shard_inputs` as users call it, with the check at its first use."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from longspan import huggingface

    group, device = site.group(), site.ranks.device
    config = transformers.LlamaConfig(
        vocab_size=WORDS, hidden_size=HEADS * HEAD_DIM, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=1, head_dim=HEAD_DIM, initializer_range=0.17,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="longspan").float().to(device)
    ids = torch.randint(3, WORDS, (1, TOKENS), generator=torch.Generator().manual_seed(1)).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None].to(device)
    labels = ids.masked_fill(positions == 0, -100)  # the last token of a document has no next one

    def local_step(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        inputs = huggingface.shard_inputs(model, batch, group)
        return huggingface.full_loss(model(**inputs).loss, inputs)

    def whole_step(model: nn.Module, batch: dict[str, Tensor], _: Any) -> Tensor:
        return model(**batch, use_cache=False).loss

    report = verify_model(
        model, {"input_ids": ids, "labels": labels, "position_ids": positions}, local=local_step, whole=whole_step,
        layout=ls.layouts.contiguous(TOKENS, site.ranks.size), group=group, probes=0,
    )  # fmt: skip
    judge(site, {"loss and gradients of Llama": report})


# -- Recurrences and convolutions --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixer:
    """A call with tensors that have tokens at dim 1, and weights that all ranks share."""

    tokens: dict[str, Tensor]
    weights: dict[str, Tensor]
    call: Callable[..., Tensor]
    """Gets all tensors by name, and `documents`, or `plan` and `group`."""
    plan: Any


def delta_rule(layout: Layout, dtype: torch.dtype) -> Mixer:
    draw = torch.Generator().manual_seed(3)
    shapes = {"q": (HEADS, 8), "k": (HEADS, 8), "v": (HEADS, 12), "g": (HEADS,), "beta": (HEADS,)}
    tokens = {name: torch.randn(1, TOKENS, *shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    tokens["g"], tokens["beta"] = -tokens["g"].abs() / 8, tokens["beta"].sigmoid()
    plan = ls.scan_plan(LENGTHS, layout, heads=HEADS, keys=8, values=12, maps="matrix")
    return Mixer(tokens, {}, lambda **tensors: ls.gated_delta_rule(**tensors, l2norm=True), plan)


def convolution(layout: Layout, dtype: torch.dtype) -> Mixer:
    draw = torch.Generator().manual_seed(4)
    x, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((1, TOKENS, 24), (24, 4), (24,)))
    plan = ls.conv_plan(LENGTHS, layout, channels=24, width=4, dtype=dtype)
    call = lambda **tensors: ls.causal_conv1d(**tensors, activation="silu")  # noqa: E731
    return Mixer({"x": x}, {"weight": weight, "bias": bias}, call, plan)


@pytest.mark.parametrize(
    "mixer", [pytest.param(delta_rule, id="recurrence"), pytest.param(convolution, id="convolution")]
)
def test_mixer(site: Site, mixer: Callable[[Layout, torch.dtype], Mixer]) -> None:
    group, device, rank = site.group(), site.ranks.device, site.ranks.rank
    layout = ls.layouts.zigzag(TOKENS, site.ranks.size)
    case = mixer(layout, torch.float32)
    names = [*case.tokens, *case.weights]
    whole = case.tokens | case.weights
    out = case.call(**whole, documents=LENGTHS)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(5))

    def gradients(tensors: dict[str, Tensor], dout: Tensor, **place: Any) -> dict[str, Tensor]:
        leaves = {name: x.detach().clone().requires_grad_() for name, x in tensors.items()}
        out = case.call(**leaves, **place)
        return {
            "out": out.detach(),
            **dict(zip(names, torch.autograd.grad(out, [*leaves.values()], dout), strict=True)),
        }

    truth = gradients({name: x.double() for name, x in whole.items()}, dout.double(), documents=LENGTHS)
    alone = gradients({name: x.to(device) for name, x in whole.items()}, dout.to(device), documents=LENGTHS)
    own = {name: layout.shard(x, rank, 1).to(device) for name, x in case.tokens.items()}
    own |= {name: x.to(device) for name, x in case.weights.items()}
    found = gradients(own, layout.shard(dout, rank, 1).to(device), plan=case.plan, group=group)
    tokens, worst = int(layout.num_tokens[rank]), 0.0
    for name, right in truth.items():
        if name in case.weights:  # this rank's share
            dist.all_reduce(found[name], group=group)
            observed = found[name].cpu()
        else:
            right, observed = layout.shard(right, rank, 1)[:, :tokens], found[name][:, :tokens].cpu()
        usual = (alone[name].cpu().double() - truth[name]).norm()
        budget = float(MARGIN * (usual + unit(accumulation_dtype(torch.float32)) * truth[name].norm()))
        error = float((observed.double() - right).norm())
        if not error <= budget:
            pytest.fail(f"{name} is off by {error:.2e}, and rounding explains {budget:.2e}")
        worst = max(worst, error / budget)
    site.record(f"{', '.join(truth)}: off by at most {worst:.2f} of what rounding explains", used=worst)
