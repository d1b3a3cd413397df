"""Train with TRL's SFTTrainer and packing, with each packed row sharded over all ranks.

On two CPU processes, with a tiny model:  torchrun --nproc-per-node 2 examples/trainers/trl_sft.py
On 8 GPUs, with your own model:           torchrun --nproc-per-node 8 examples/trainers/trl_sft.py Qwen/Qwen3-0.6B

Every GPU holds the whole model, its gradients and the optimizer's state (DDP): 8 bytes a parameter in bfloat16, 64 GB
for 8e9 parameters before any activation. Shard larger models by FSDP2, as examples/qwen3_256k_trl.py does.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from longspan.huggingface.trainer import ContextParallelTrainer


class PackedSFT(ContextParallelTrainer, SFTTrainer):  # the only change, with attn_implementation below
    pass


def load():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="longspan", dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(sys.argv[1])
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longspan")
    return model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")


def texts(number):
    """Return texts of different lengths that count up."""
    return Dataset.from_list(
        [{"text": " ".join(f"w{2 + n % 62}" for n in range(5 + 7 * i % 40))} for i in range(number)]
    )


if __name__ == "__main__":
    disable_progress_bars()
    model, tokenizer = load()
    on_cpus = not torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, packing=True, max_length=256, per_device_train_batch_size=2, per_device_eval_batch_size=64,
            max_steps=10, learning_rate=3e-3, logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=on_cpus, bf16=not on_cpus, dataloader_pin_memory=not on_cpus, ddp_find_unused_parameters=False,
        )  # fmt: skip
        data = {"train_dataset": texts(256), "eval_dataset": texts(16)}
        trainer = PackedSFT(model=model, args=args, processing_class=tokenizer, **data)
        trainer.train()
        result = trainer.evaluate()["eval_loss"]
    batch = trainer.data_collator(list(trainer.eval_dataset))  # one row, with position_ids that restart
    model.set_attn_implementation("eager")
    with torch.no_grad():  # whole sequences, with transformers' own loss
        expected = model.eval()(**trainer._prepare_inputs(batch)).loss.item()
    print(f"rank {dist.get_rank()}: loss {result:.6f}, off that of one process {abs(result - expected):.1e}")
    dist.destroy_process_group()
