"""What test_torchtitan runs in processes of its own: torchtitan's command line, with its data, weights and metrics
replaced through torchtitan's own overrides, so that every run starts alike and nothing is downloaded.

    python -m tests.hosts.titan_work OUT JOB...

with RANK etc. as torchrun sets them. A JOB is a JSON list of arguments for torchtitan, or the name of a check
in titan_checks.py.
"""

import json
import os
import sys
from dataclasses import dataclass, replace

from tests.hosts import titan_shim  # noqa: F401  # isort: skip
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer
from torchtitan.config import ConfigManager, override
from torchtitan.config.override import derive
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models.common import Embedding, Linear
from torchtitan.models.common.attention import FlexAttention, VarlenAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel, llama3_debugmodel_varlen_attn

VOCAB = 2048
ROWS = 4  # of one batch over all data-parallel ranks
OVERRIDES = [
    f"tests.hosts.titan_work.{name}" for name in ("documents", "tokenizer", "recorder", "linears", "embeddings")
]
records = []
made = []


class Documents(BaseDataLoader):
    """Packed documents of random lengths. With `changed`, all but the last document of every row have other tokens;
    with `last_only`, nothing but the last document has labels. Then the loss must be what it was. With `told` off,
    nobody says where documents start."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        infinite: bool = True
        documents: int = 4
        last_only: bool = False
        changed: bool = False
        told: bool = True

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        assert dp_world_size * local_batch_size == ROWS
        self.config, self.seq_len = config, seq_len
        self.rows = slice(dp_rank * local_batch_size, (dp_rank + 1) * local_batch_size)

    def __iter__(self):
        generator = torch.Generator().manual_seed(7)
        while True:
            yield self.batch(generator)

    def batch(self, generator):
        length = self.seq_len
        tokens = torch.randint(0, VOCAB, (ROWS, length + 1), generator=generator)
        starts = torch.rand(ROWS, length, generator=generator) < (self.config.documents - 2) / length
        starts[:, length // 2 + 5] = True  # at least two documents
        starts[:, 0] = True
        counts = torch.arange(length).expand(ROWS, -1)
        begin = torch.where(starts, counts, 0).cummax(dim=1).values
        struck = torch.rand(ROWS, length, generator=generator) < torch.tensor([0.1, 0.6, 0.0, 0.3])[:, None]
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].masked_fill(struck, IGNORE_INDEX)
        last = begin == begin[:, -1:]
        if self.config.last_only:
            labels = labels.masked_fill(~last, IGNORE_INDEX)
        if self.config.changed:
            inputs = torch.where(last, inputs, (inputs + 1000) % VOCAB)
        positions = counts - begin if self.config.told else counts
        return {"input": inputs[self.rows], "positions": positions[self.rows]}, labels[self.rows]

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_):
        return []

    def decode(self, *_):
        return ""

    def get_vocab_size(self):
        return VOCAB


class Recorder(MetricsProcessor):
    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        """Notes torchtitan's numbers, and the norm of all gradients in float64: its own sums half a million float32
        squares, whose rounding depends on how many ranks share them. Runs do not clip, so gradients are still whole."""
        squares = [_whole(p.grad).double().square().sum() for part in self.model_parts for p in part.parameters()]
        exact = float(torch.stack(squares).sum().sqrt())
        records[-1]["steps"].append((global_avg_loss, grad_norm, exact, extra_metrics["n_tokens_seen"]))

    def log_validation(self, loss, step):
        records[-1]["validation"].append(loss)


def _whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class DenseAttention(FlexAttention):
    """Attention with a mask written out pair by pair from torchtitan's BlockMask: what runs are compared with."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        left: int = -1

    def __init__(self, config):
        super().__init__(config)
        self.left = config.left

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks, scale=None, enable_gqa=False, out_transform=None):
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        b, i, j = (torch.arange(n) for n in (q.shape[0], q.shape[2], k.shape[2]))
        seen = attention_masks.mask_mod(b[:, None, None, None], torch.tensor(0), i[:, None], j)
        if self.left >= 0:
            seen = seen & (i[:, None] - j <= self.left)
        scores = (q @ k.mT * (q.shape[3] ** -0.5 if scale is None else scale)).masked_fill(~seen, -torch.inf)
        lse = scores.logsumexp(dim=-1)
        out = (torch.exp(scores - lse[..., None]) @ v).transpose(1, 2)
        return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


@override(target=HuggingFaceTextDataLoader.Config)
def documents(config, **fields):
    return Documents.Config(**fields)


@override(target=HuggingFaceTokenizer.Config)
def tokenizer(config):
    return NoTokenizer.Config()


@override(target=MetricsProcessor.Config)
def recorder(config):
    return derive(config, Recorder.Config, log_freq=1)


@override(target=FlexAttention.Config)
def dense(config):
    return derive(config, DenseAttention.Config)


def _seeded(config, std):
    """The same weights on any number of ranks: torch does not promise that of random DTensors on CPUs."""
    seed = len(made)
    made.append(config)

    @torch.no_grad()
    def fill(param):
        whole = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed)) * std
        if isinstance(param, DTensor):
            part = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.to_local().copy_(part.to_local())
        else:
            param.copy_(whole)

    return replace(config, param_init={"weight": fill, "bias": torch.nn.init.zeros_})


@override(target=Linear.Config)
def linears(config):
    return _seeded(config, 0.05)


@override(target=Embedding.Config)
def embeddings(config):
    return _seeded(config, 1.0)


def windowed():
    """Every second layer sees 20 tokens back and itself, as a user's config file would say it."""
    from longspan.torchtitan.hooks import with_longspan

    config = llama3_debugmodel_varlen_attn()
    for layer in config.model_spec.model.layers[::2]:
        layer.attention.inner_attention = VarlenAttention.Config(window_size=(20, 0))
    return with_longspan(config)


def windowed_dense():
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = DenseAttention.Config()
    for layer in config.model_spec.model.layers[::2]:
        layer.attention.inner_attention = DenseAttention.Config(left=20)
    return config


def run(args):
    """One training run through torchtitan's command line; losses, gradient norms and tokens seen, by step."""
    records.append({"steps": [], "validation": []})
    made.clear()
    trainer = ConfigManager().parse_args(args).build()
    try:
        trainer.train()
        records[-1]["tokens_local"] = trainer.ntokens_seen
    finally:
        trainer.close()
    return records[-1]


def main():
    out, *jobs = sys.argv[1:]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=rank, world_size=world)
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it makes the group itself
    from tests.hosts.titan_checks import CHECKS

    results = [CHECKS[job]() if job in CHECKS else run(json.loads(job)) for job in jobs]
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        with open(out, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    from tests.hosts import titan_work  # overrides are found by this name, and must write to the same lists

    titan_work.main()
