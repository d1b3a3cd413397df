"""Train with TRL's GRPOTrainer, with prompts and completions sharded over all ranks after generation.

On two CPU processes, with a tiny model:  torchrun --nproc-per-node 2 examples/trainers/trl_grpo.py
On 8 GPUs, with your own model:           torchrun --nproc-per-node 8 examples/trainers/trl_grpo.py Qwen/Qwen3-0.6B

Every GPU holds the whole model, its gradients and the optimizer's state (DDP): 8 bytes a parameter in bfloat16, 64 GB
for 8e9 parameters before any activation. Shard larger models by FSDP2, as examples/grpo_fsdp2.py does.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from longspan.huggingface.trainer import ContextParallelTrainer


class LongGRPO(ContextParallelTrainer, GRPOTrainer):  # the only change, with attn_implementation below
    pass


def load():
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="longspan", dtype=torch.bfloat16)
        return model, AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="longspan")
    return model, PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1", padding_side="left")


def variety(completion_ids, **_):
    """Return the reward: the number of different tokens in a completion."""
    return [float(len(set(ids))) for ids in completion_ids]


if __name__ == "__main__":
    model, tokenizer = load()
    on_cpus = not torch.cuda.is_available()
    prompts = Dataset.from_list([{"prompt": " ".join(f"w{2 + n % 62}" for n in range(i, i + 9))} for i in range(64)])
    with tempfile.TemporaryDirectory() as folder:
        args = GRPOConfig(
            folder, per_device_train_batch_size=4, num_generations=4, max_completion_length=16, max_steps=5,
            learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=on_cpus,
            bf16=not on_cpus, dataloader_pin_memory=not on_cpus, ddp_find_unused_parameters=False,
        )  # fmt: skip
        trainer = LongGRPO(model, variety, args, train_dataset=prompts, processing_class=tokenizer)
        trainer.train()
    ids = torch.arange(2, 50, device=trainer.model.device)[None]
    with torch.no_grad():  # log-probabilities of 47 tokens, over ranks and on one process
        result = trainer.model(input_ids=ids, labels=ids, fused_lm_head=True).log_probs
        model.set_attn_implementation("eager")
        logits = model(input_ids=ids).logits[:, :-1].float()
    error = (result - logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]).abs().max()
    print(f"rank {dist.get_rank()}: log-probabilities are off those of one process {error:.1e}")
    dist.destroy_process_group()
