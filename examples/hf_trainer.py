"""Train with Hugging Face's Trainer on packed documents, with each sequence sharded over all ranks.

On two CPU processes, with a tiny model:  torchrun --nproc-per-node 2 examples/hf_trainer.py
On 8 GPUs, with your own model:           torchrun --nproc-per-node 8 examples/hf_trainer.py Qwen/Qwen3-8B
"""

import copy
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, Qwen3Config, Trainer, TrainingArguments

from longspan.huggingface.trainer import ContextParallelTrainer


class PackedTrainer(ContextParallelTrainer, Trainer):  # the only change, with attn_implementation below
    pass


def documents(number, seed):
    """Return sequences of different lengths that count up, each by its own step."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.arange(int(torch.randint(20, 90, (1,), generator=draw))) * (i % 3 + 1) % 64 for i in range(number)]
    return [{"input_ids": each.tolist(), "labels": each.tolist()} for each in ids]


def load():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        return AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="longspan")
    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, use_sliding_window=True, sliding_window=16,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="longspan")


if __name__ == "__main__":
    model = load()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, use_cpu=not torch.cuda.is_available(), max_steps=20, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, gradient_checkpointing=True, learning_rate=3e-3, logging_steps=5,
            save_strategy="no", report_to=[], ddp_find_unused_parameters=False, dataloader_pin_memory=False,
            disable_tqdm=True,
        )  # fmt: skip
        collator = DataCollatorWithFlattening()  # packs a batch into one row, with position_ids that restart
        data = {"train_dataset": documents(64, 1), "eval_dataset": documents(8, 2)}
        trainer = PackedTrainer(model=model, args=args, data_collator=collator, **data)
        trainer.train()
        result = trainer.evaluate()["eval_loss"]
    alone = copy.deepcopy(trainer.model).eval()  # one process, whole sequences, transformers' own attention
    alone.set_attn_implementation("eager")
    batch = {
        name: torch.as_tensor(value, device=alone.device) for name, value in collator(data["eval_dataset"]).items()
    }
    expected = alone(**batch).loss.item()
    print(f"rank {dist.get_rank()}: loss {result:.6f}, off that of one process {abs(result - expected):.1e}")
    dist.destroy_process_group()
