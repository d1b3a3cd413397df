"""Fine-tune Qwen3-8B with TRL's SFTTrainer on packed sequences of 262,144 tokens, with sequences and parameters (FSDP2)
sharded over all GPUs.

Install:            pip install ".[trl]"
On 8 GPUs:          torchrun --nproc-per-node 8 examples/qwen3_256k_trl.py --dataset data.jsonl
With accelerate:    accelerate launch --multi_gpu --num_processes 8 examples/qwen3_256k_trl.py --dataset data.jsonl
LoRA, 4-bit LoRA:   add --lora, or --qlora (pip install bitsandbytes)
Smoke run:          torchrun --nproc-per-node 2 examples/qwen3_256k_trl.py --smoke
In one process:     torchrun --nproc-per-node 1 examples/qwen3_256k_trl.py --smoke, or python

Only --smoke has run, on CPUs: nothing here has run on a GPU. `longspan plan --model qwen3-8b --seq 256k --ranks 8`
computes 34.5 GiB for each of 8 GPUs, with all parameters trained.
"""

import argparse
import itertools
import tempfile

import torch
import torch.distributed as dist
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, set_seed
from transformers.distributed import DistributedConfig
from trl import SFTConfig, SFTTrainer

from longspan.huggingface.trainer import ContextParallelTrainer

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class LongSFT(ContextParallelTrainer, SFTTrainer):  # the only change, with attn_implementation="longspan"
    pass


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="Hub name or folder")
    parser.add_argument("--dataset", help="Hub name, or a .jsonl file; 'text', 'messages' or 'prompt' and 'completion'")
    parser.add_argument("--length", type=int, default=262_144, help="tokens of a packed sequence")
    parser.add_argument("--trained-length", type=int, default=32_768, help="YaRN extends positions from here")
    parser.add_argument("--ranks-per-sequence", type=int, help="default: all; fewer leave the others other sequences")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora", action="store_true", help="train adapters; the sharded weights are frozen")
    parser.add_argument("--qlora", action="store_true", help="train adapters; every GPU has all weights in 4 bits")
    parser.add_argument("--output", default="qwen3-256k")
    parser.add_argument("--smoke", action="store_true", help="a tiny model in float32, compared with one process")
    options = parser.parse_args()
    if not (options.dataset or options.smoke):
        parser.error("--dataset is missing: a Hub name or a .jsonl file")
    return options


def extended(options):
    """Return the model's configuration, with positions extended by YaRN if sequences are longer than it knows."""
    config = AutoConfig.from_pretrained(options.model)
    if options.length > config.max_position_embeddings:
        yarn = {"rope_type": "yarn", "original_max_position_embeddings": options.trained_length}
        yarn["factor"] = options.length / options.trained_length
        config.rope_parameters = {**config.rope_parameters, **yarn}
        config.max_position_embeddings = options.length
    return config


def four_bits(dtype):
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def train(options):
    on_gpus = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpus and not options.smoke else torch.float32
    args = SFTConfig(
        options.output, packing=True, max_length=options.length, per_device_train_batch_size=1,
        max_steps=options.steps, learning_rate=options.learning_rate, lr_scheduler_type="constant", logging_steps=1,
        gradient_checkpointing=True, bf16=False, use_cpu=not on_gpus, dataloader_pin_memory=on_gpus,
        save_strategy="no", report_to=[], disable_tqdm=options.smoke, ddp_find_unused_parameters=False,
    )  # fmt: skip
    if options.qlora:  # 4-bit weights are not sharded: every rank has all of them, and DDP averages the adapters'
        placed = {"quantization_config": four_bits(dtype), "dtype": dtype, "device_map": {"": args.device}}
    else:  # FSDP2: shards in float32, which are gathered and computed with in bfloat16 (hence bf16=False above)
        sharded = DistributedConfig(fsdp_size=args.world_size, fsdp_mixed_precision=dtype == torch.bfloat16)
        placed = {"distributed_config": sharded, "dtype": torch.float32}
    model = AutoModelForCausalLM.from_pretrained(
        options.model, config=extended(options), attn_implementation="longspan", **placed
    )
    name = options.dataset
    data = load_dataset("json", data_files=name) if name.endswith((".json", ".jsonl")) else load_dataset(name)
    trainer = LongSFT(
        model=model, args=args, train_dataset=data["train"], cp_size=options.ranks_per_sequence,
        processing_class=AutoTokenizer.from_pretrained(options.model),
        peft_config=LORA if options.lora or options.qlora else None,
    )  # fmt: skip
    trainer.train()
    trainer.save_model()
    return trainer


def smoke(options):
    """Train a tiny model by the same code; rank 0 compares the losses with those of plain transformers."""
    import smoke

    with tempfile.TemporaryDirectory() as folder:  # each rank writes its own, with the same contents
        options.model, options.dataset = smoke.write_model(folder), smoke.write_texts(folder)
        options.length, options.trained_length, options.output = smoke.LENGTH, smoke.TRAINED_LENGTH, f"{folder}/trained"
        options.steps, options.learning_rate = 4, 1e-3
        trainer = train(options)
        curve = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        batches = list(itertools.islice(trainer.get_train_dataloader(), options.steps))
        if trainer.is_world_process_zero():
            placed = {"quantization_config": four_bits(torch.float32)} if options.qlora else {}
            alone = AutoModelForCausalLM.from_pretrained(
                options.model, config=extended(options), attn_implementation="eager", **placed
            )
            if options.lora or options.qlora:
                set_seed(trainer.args.seed)  # as TRL does, which also rounds adapters of 4-bit weights to bfloat16
                alone = get_peft_model(alone, LORA)
            alone.to(trainer.args.device)
            smoke.compare(curve, smoke.train_alone(alone, batches, options.learning_rate), trainer.model)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    options = parse_arguments()
    smoke(options) if options.smoke else train(options)
