"""What tests/hosts/test_verify_documents.py runs on ranks, and models that it asks about; importable by name."""

import torch
import torch.distributed as dist
from torch.nn import functional

from tests.hosts import hf_hybrid_work as hybrids


def model_of(model_type, attention):
    """A tiny model whose layers do nothing but attend."""
    from transformers import AutoConfig, AutoModelForCausalLM

    import longspan.huggingface  # noqa: F401  (registers the attention)

    torch.manual_seed(5)
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = AutoConfig.for_model(
        model_type, **hybrids.BASE, **(experts if model_type in ("mixtral", "qwen3_moe") else {})
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")


def through_shard_inputs(model_type):
    from longspan import huggingface
    from longspan.verification import verify_documents

    def run(model, batch):
        return model(**huggingface.shard_inputs(model, batch, dist.group.WORLD, layout="contiguous", logits=True))

    report = verify_documents(hybrids.model_of(model_type).float(), hybrids.batch_of("packed")[0], run=run)
    return report.ok, str(report)


def loss_of(logits, labels):
    targets = functional.pad(labels[:, 1:], (0, 1), value=-100)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)


def steps():
    """verify_model of LFM2 on all ranks, with a one-device run that leaks, and with one that does not."""
    from longspan import huggingface, layouts
    from longspan.verification import verify_model

    batch, _ = hybrids.batch_of("packed")
    model = hybrids.model_of("lfm2").float()
    layout = layouts.zigzag(hybrids.TOKENS, dist.get_world_size())

    def local(model, batch):
        inputs = huggingface.shard_inputs(model, batch, dist.group.WORLD, layout=layout, logits=True)
        out = model(**inputs)
        return out.loss, out.logits

    def mixed(model, batch, _mask):
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        return loss_of(logits, batch["labels"]), logits

    def apart(model, batch, _mask):
        rows = []
        for ids, lengths in zip(batch["input_ids"], hybrids.LENGTHS, strict=True):
            parts = [model(input_ids=part[None], use_cache=False).logits for part in ids.split(lengths)]
            rows.append(torch.cat(parts, 1))
        logits = torch.cat(rows)
        return loss_of(logits, batch["labels"]), logits

    options = {"local": local, "layout": layout, "group": dist.group.WORLD, "loss": "share"}
    wrong = verify_model(model, batch, whole=mixed, **options)
    right = verify_model(model, batch, whole=apart, **options)
    return (wrong.ok, wrong.causes, wrong.findings[0].what), (right.ok, right.causes)
