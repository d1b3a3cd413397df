"""What README's lines for the Trainer and TRL take as given: a tiny model and texts; and a check that it trains."""

import os
import tempfile

import torch
import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging
from trl import SFTConfig, SFTTrainer  # noqa: F401

disable_progress_bars()
logging.disable_progress_bar()
torch.manual_seed(0)
folder = tempfile.mkdtemp()
name = os.path.join(folder, "model")
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(name)
config = Qwen3Config(
    vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip
Qwen3ForCausalLM(config).save_pretrained(name)
data = Dataset.from_list([{"text": " ".join(f"w{2 + n % 62}" for n in range(5 + 7 * i % 40))} for i in range(64)])
args = SFTConfig(
    folder, packing=True, max_length=128, per_device_train_batch_size=1, max_steps=10, learning_rate=3e-3,
    logging_steps=5, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
    dataloader_pin_memory=False, activation_checkpointing=False, ddp_find_unused_parameters=False,
)  # fmt: skip

# README's block

ids = torch.arange(2, 34)[None]
with torch.no_grad():
    before, after = (
        each.eval()(input_ids=ids, labels=ids).loss.item()
        for each in (AutoModelForCausalLM.from_pretrained(name), model)  # noqa: F821
    )
assert after < before - 0.3, (before, after)
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, after)
assert len(set(seen)) == 1, seen  # the same weights on every rank
print(f"rank {dist.get_rank()}: loss {before:.2f} before, {after:.2f} after")
dist.destroy_process_group()
