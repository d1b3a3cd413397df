"""Training steps on the device: losses, FSDP2 with checkpointing, Hugging Face, compiled code. Importable by ranks."""

import copy
import os
import tempfile
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import longspan as ls
from longspan.training import Head, shift_tokens, token_logprobs, token_loss
from tests.device import forms
from tests.device.attention_work import here
from tests.hosts.hf_versions import checkpoint_layers

DIM, HEADS, TOKENS, WORDS = 32, 4, 96, 37


# ---- losses ----------------------------------------------------------------------------------------------------------


def losses(schedules):
    """`token_loss` and `token_logprobs`, from logits and from hidden states, beside the same calls on the CPU."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layout = ls.layouts.zigzag(TOKENS, world)
    draw = torch.Generator().manual_seed(5)
    hidden, weight = torch.randn(TOKENS, DIM, generator=draw), torch.randn(WORDS, DIM, generator=draw)
    labels = torch.randint(WORDS, (TOKENS,), generator=draw)
    labels[torch.rand(TOKENS, generator=draw) < 0.3] = -100
    compared, expected = 0, None
    for place in ("cpu", *schedules):
        device = "cpu" if place == "cpu" else here()
        with forms.schedule("plain" if place == "cpu" else place):
            own, words = (layout.shard(x, rank, 0).to(device) for x in (hidden, labels))
            found = []
            for head in (True, False):
                x, w = own.clone().requires_grad_(), weight.to(device, copy=True).requires_grad_()
                values = x if head else x @ w.T
                given = {"head": Head(w)} if head else {}
                loss = token_loss(values, words, group=dist.group.WORLD, gradients="sum", z_loss=1e-3, **given)
                chances = token_logprobs(values, words, **given)
                (loss + sum(x.sum() for x in chances) / TOKENS).backward()
                found += [t.detach().cpu() for t in (loss, *chances, x.grad, w.grad)]
        if expected is None:
            expected = found
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6), f"{place}: {(a - b).abs().max()} from the CPU's"
        compared += 1
    return compared


def warm_loss_waits():
    """Where the host waited in a warm loss."""
    x = torch.randn(TOKENS, DIM, device=here(), requires_grad=True)
    w = torch.randn(WORDS, DIM, device=here(), requires_grad=True)
    labels = torch.randint(WORDS, (TOKENS,), device=here())
    labels[:: 3 + dist.get_rank()] = -100
    found = {}
    for name, run in {
        "token_loss": lambda: token_loss(x @ w.T, labels, group=dist.group.WORLD, gradients="sum"),
        "token_loss of hidden states": lambda: token_loss(x, labels, group=dist.group.WORLD, gradients="sum", head=w),
        "token_logprobs": lambda: token_logprobs(x, labels, head=w).logprobs.sum(),
    }.items():
        for _ in range(2):
            with forms.HostWaits() as waits:
                run().backward()
        found[name] = waits.by("/src/longspan/")
    return found


def fake_batches():
    """Shapes and devices of fake tensors, which have no memory that could be pinned."""
    with FakeTensorMode():
        tokens = torch.empty(1, TOKENS, dtype=torch.int64, device=here())
        part = ls.layouts.zigzag(TOKENS, 2).shard(tokens, 0, 1)
        return [(tuple(x.shape), x.device == here()) for x in (part, shift_tokens(tokens, 1))]


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.qkv, self.out = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x, plan, group):
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(ls.attention(q, k, v, plan, group=group).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, DIM), nn.Linear(DIM, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids, plan, group=None, kind=None):
        x = self.embedding(ids)
        for block in self.blocks:
            if kind is None:
                x = block(x, plan, group)
            else:
                x = checkpoint(block, x, plan, group, use_reentrant=kind == "reentrant")
        return self.head(x)


def fsdp(kind, schedule, dtype=None):
    """Three steps of FSDP2 with checkpointed blocks, beside one CPU.

    Returns the largest difference of weights, and where the host waited in the last step.
    """
    rank, world, device = dist.get_rank(), dist.get_world_size(), here()
    mask = ls.masks.documents([40, 56]) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=world)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float32")
    torch.manual_seed(0)
    model = Model()
    ids, labels = torch.randint(WORDS, (2, 1, TOKENS))
    alone = copy.deepcopy(model)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(3):
        functional.cross_entropy(alone(ids, mask)[0], labels[0]).backward()
        optimizer.step()
        optimizer.zero_grad()

    mesh = init_device_mesh(forms.form, (world,), mesh_dim_names=("cp",))
    model.to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own_ids, own_labels = (layout.shard(x, rank, 1).to(device) for x in (ids, labels))
    with forms.schedule(schedule):
        for _ in range(3):
            with forms.HostWaits() as waits:
                logits = model(own_ids, plan, dist.group.WORLD, kind)[0]
                loss = functional.cross_entropy(logits, own_labels[0], reduction="sum") / TOKENS
                (loss * world).backward()  # FSDP averages over ranks
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    off = [float((whole[name].cpu() - p).abs().max()) for name, p in alone.named_parameters()] if rank == 0 else [0.0]
    return max(off), [f"{reason} at {frames[0]}" for reason, frames in waits.all]


# ---- compiled --------------------------------------------------------------------------------------------------------


def compiled(backend):
    """A compiled block beside the same block outside of compiled code."""
    rank, world, device = dist.get_rank(), dist.get_world_size(), here()
    mask = ls.masks.documents([40, 56]) & ls.masks.causal()
    layout = ls.layouts.zigzag(TOKENS, world)
    plan = ls.plan(mask, layout, q_heads=HEADS, kv_heads=HEADS, head_dim=DIM // HEADS, dtype="float32")
    torch.manual_seed(0)
    block, x = Block().to(device), layout.shard(torch.randn(1, TOKENS, DIM), rank, 1).to(device)
    results = []
    for run in (block, torch.compile(block, backend=backend, fullgraph=True)):
        block.zero_grad()
        out = run(x, plan, dist.group.WORLD)
        out.square().sum().backward()
        results.append([t.detach().cpu() for t in (out, *(p.grad for p in block.parameters()))])
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(*results, strict=True))


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def huggingface_step(family, kind, schedule, checkpointed):
    """A step of a tiny model over ranks, beside transformers' own attention on one CPU.

    Returns differences of the loss and of gradients and the size of these; and what waited in the warm step, of ours:
    in the step itself, and in `shard_inputs`.
    """
    from longspan import huggingface
    from tests.hosts.hf_work import batch_of, difference, gradients, model_of, truth

    model, batch = model_of(family), batch_of(kind)
    expected = truth(model, batch, apart=kind == "packed")
    model.set_attn_implementation("longspan")
    model.to(here()).train()
    if checkpointed:
        checkpoint_layers(model)
    batch = {name: x.to(here()) for name, x in batch.items()}
    with forms.schedule(schedule):
        for _ in range(2):
            model.zero_grad()
            with forms.HostWaits() as before:
                inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD)
            with forms.HostWaits() as waits:
                loss = huggingface.full_loss(model(**inputs).loss, inputs)
                loss.backward()
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
        found = loss.item(), {name: g.cpu() for name, g in gradients(model).items()}
    return difference(found, expected), waits.by("/src/longspan/"), before.by("/src/longspan/")


def huggingface_trainer(steps, fsdp=""):
    """Losses of the Trainer: over ranks on the device, or, in one process, plain transformers on the CPU.

    `fsdp` is how accelerate is told to shard parameters: "" not at all (DDP), "arguments" and "mesh" by arguments of
    the Trainer, without and with a ParallelismConfig, "launcher" by variables of `accelerate launch`.
    """
    from accelerate import ParallelismConfig
    from transformers import Trainer, TrainingArguments

    from longspan.huggingface.trainer import ContextParallelTrainer
    from tests.hosts.hf_training_work import launched
    from tests.hosts.hf_work import VOCAB, model_of

    class OverRanks(ContextParallelTrainer, Trainer):
        pass

    is_alone = dist.get_world_size() == 1
    layers = "LlamaDecoderLayer"
    options = {"gradient_checkpointing": fsdp in ("mesh", "launcher")}
    if fsdp in ("arguments", "mesh"):
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": [layers]}
        options |= {"fsdp": True, "fsdp_config": {**wrapped, "activation_checkpointing": fsdp == "arguments"}}
    if fsdp == "mesh":
        options["parallelism_config"] = ParallelismConfig(cp_size=dist.get_world_size())
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": layers}
    variables |= {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_RESHARD_AFTER_FORWARD": "true"}
    draw = torch.Generator().manual_seed(3)
    samples = [{"input_ids": x, "labels": x} for x in torch.randint(3, VOCAB, (2 * steps, 48), generator=draw)]
    with tempfile.TemporaryDirectory() as folder, launched(), mock.patch.dict(os.environ):
        if fsdp == "launcher":
            os.environ.update(variables)
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=2, logging_steps=1, report_to=[], save_strategy="no",
            learning_rate=1e-2, disable_tqdm=True, use_cpu=is_alone, **options,
        )  # fmt: skip
        kind, attention = (Trainer, "eager") if is_alone else (OverRanks, "longspan")
        trainer = kind(model=model_of("llama", attention), args=arguments, train_dataset=samples)
        trainer.train()
        assert trainer.model.device.type == ("cpu" if is_alone else forms.form)
        assert isinstance(trainer.model_wrapped, FSDPModule) == bool(fsdp)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
