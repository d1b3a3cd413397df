"""Inputs of the `--smoke` runs of qwen3_256k.py, qwen3_256k_trl.py and grpo_fsdp2.py: a tiny random model and data."""

import json
from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

WORDS, LENGTH, TRAINED_LENGTH = 64, 192, 64


def write_model(folder):
    """Write a random Qwen3 and its tokenizer into a folder, the same on every rank, and return the folder."""
    logging.disable_progress_bar()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=TRAINED_LENGTH, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1").save_pretrained(folder)
    return str(folder)


def write_texts(folder, number=40):
    """Write texts of 5 to 99 words that count up, each by its own step, and return the path."""
    datasets.disable_progress_bars()
    datasets.config.HF_DATASETS_CACHE = Path(folder) / "cache"  # removed with the folder
    path = Path(folder) / "texts.jsonl"
    texts = [" ".join(f"w{2 + n * (1 + i % 3) % 62}" for n in range(5 + 37 * i % 95)) for i in range(number)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_rollouts(folder, number=4):
    """Write groups of four completions of different lengths with random rewards, and return the path."""
    path, draw = Path(folder) / "rollouts.jsonl", torch.Generator().manual_seed(1)

    def words(least, most):
        length = int(torch.randint(least, most, (1,), generator=draw))
        return " ".join(f"w{word}" for word in torch.randint(2, WORDS, (length,), generator=draw).tolist())

    groups = [
        {
            "prompt": words(2, 20),
            "completions": [words(3, 60) for _ in range(4)],
            "rewards": torch.randn(4, generator=draw).tolist(),
        }
        for _ in range(number)
    ]
    path.write_text("".join(json.dumps(group) + "\n" for group in groups))
    return str(path)


def train_alone(model, batches, learning_rate):
    """Train a model on whole batches, in this process and without Longspan.

    Returns the loss and the norm of the gradient of every step.
    """
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optimizer, curve = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0), []
    for batch in batches:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((loss.item(), norm.item()))
    return curve


def compare(curve, expected, model):
    """Print (loss, norm of the gradient) of each step, and how far they are off those of one process; and how many
    parameters FSDP2 has sharded."""
    parameters = list(model.parameters())
    print(f"{sum(isinstance(each, DTensor) for each in parameters)} of {len(parameters)} parameters are sharded")
    for step, (loss, norm) in enumerate(curve):
        print(f"step {step} loss {loss:.7f} gradient norm {norm:.7f}")
    errors = (torch.tensor(curve) - torch.tensor(expected)).abs().amax(0)
    print(f"losses differ from one process by {errors[0]:.1e}, gradient norms by {errors[1]:.1e}")
