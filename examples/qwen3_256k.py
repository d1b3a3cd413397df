"""Fine-tune Qwen3-8B on packed sequences of 262,144 tokens in plain PyTorch, with sequences and parameters (FSDP2)
sharded over all GPUs. The model is that of transformers; the loop is this file's own.

Install:            pip install ".[hf]" datasets peft
On 8 GPUs:          torchrun --nproc-per-node 8 examples/qwen3_256k.py --dataset data.jsonl
LoRA:               add --lora
Smoke run:          torchrun --nproc-per-node 2 examples/qwen3_256k.py --smoke
In one process:     torchrun --nproc-per-node 1 examples/qwen3_256k.py --smoke

Only --smoke has run, on CPUs: nothing here has run on a GPU. Every rank reads all weights before it shards them: 33 GB
of host memory each for Qwen3-8B.
"""

import argparse
import itertools
import os
import tempfile

import torch
import torch.distributed as dist
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from longspan import huggingface
from longspan.training import make_mesh

LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-8B", help="Hub name or folder")
    parser.add_argument("--dataset", help="Hub name, or a .jsonl file, with a column 'text'")
    parser.add_argument("--length", type=int, default=262_144, help="tokens of a packed sequence")
    parser.add_argument("--trained-length", type=int, default=32_768, help="YaRN extends positions from here")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--lora", action="store_true", help="train adapters; the sharded weights are frozen")
    parser.add_argument("--output", default="qwen3-256k")
    parser.add_argument("--smoke", action="store_true", help="a tiny model in float32, compared with one process")
    options = parser.parse_args()
    if not (options.dataset or options.smoke):
        parser.error("--dataset is missing: a Hub name or a .jsonl file")
    return options


def load(options, attention):
    """Return the whole model on the host, in float32; positions are extended by YaRN if they do not suffice."""
    config = AutoConfig.from_pretrained(options.model)
    if options.length > config.max_position_embeddings:
        yarn = {"rope_type": "yarn", "original_max_position_embeddings": options.trained_length}
        yarn["factor"] = options.length / options.trained_length
        config.rope_parameters = {**config.rope_parameters, **yarn}
        config.max_position_embeddings = options.length
    model = AutoModelForCausalLM.from_pretrained(
        options.model, config=config, attn_implementation=attention, dtype=torch.float32
    )
    torch.manual_seed(1)  # the same adapters on every rank
    return get_peft_model(model, LORA) if options.lora else model


def shard(model, mesh, dtype):
    """Checkpoint and shard every layer, then the rest. Shards are float32, and gathered to compute in `dtype`."""
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if hasattr(inner, "activation_checkpointing_enable"):
        inner.activation_checkpointing_enable()
    else:  # before transformers 5.23
        inner.gradient_checkpointing_enable()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in (*inner.model.layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)  # moves it to the mesh's device
    return model.train()


def save(model, folder):
    """Gather all parameters on rank 0, which writes them as transformers does (of LoRA, the adapters)."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)


def packed_rows(options, device):
    """Yield batches of one row that is full of documents, each with positions from 0; what does not fit into a row is
    another document in the next one. All ranks read the same rows."""
    name, tokenizer = options.dataset, AutoTokenizer.from_pretrained(options.model)
    data = load_dataset("json", data_files=name) if name.endswith((".json", ".jsonl")) else load_dataset(name)
    ids, positions = [], []
    while True:
        for sample in data["train"]:
            document = [*tokenizer(sample["text"])["input_ids"], tokenizer.eos_token_id]
            while document:
                part, document = document[: options.length - len(ids)], document[options.length - len(ids) :]
                ids, positions = ids + part, [*positions, *range(len(part))]
                if len(ids) == options.length:
                    row, places = torch.tensor([[ids], [positions]], device=device)
                    yield {"input_ids": row, "labels": row, "position_ids": places}
                    ids, positions = [], []


def start(options):
    """Return this rank's device, the dtype to compute in, and a mesh in which all ranks share each sequence."""
    device, dtype = torch.device("cpu"), torch.float32
    if torch.cuda.is_available():
        device, dtype = torch.device("cuda", int(os.environ["LOCAL_RANK"])), dtype if options.smoke else torch.bfloat16
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "nccl")
    return device, dtype, make_mesh(cp=dist.get_world_size(), device_type=device.type)


def update(optimizer, trained, loss, curve):
    """Run backward and a step of the optimizer; add loss and norm of the gradient to `curve`, and print both."""
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(trained, 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    curve.append((loss.item(), norm.item()))
    if dist.get_rank() == 0:
        print(f"step {len(curve) - 1}: loss {curve[-1][0]:.4f}, gradient norm {curve[-1][1]:.4f}", flush=True)


def train(options):
    device, dtype, mesh = start(options)
    model = shard(load(options, "longspan"), mesh.dp_cp, dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, curve = torch.optim.AdamW(trained, lr=options.learning_rate, weight_decay=0.0), []
    for batch in itertools.islice(packed_rows(options, device), options.steps):
        part = huggingface.shard_inputs(model, batch, mesh.cp)  # with labels that were shifted while whole
        loss = huggingface.full_loss(model(**part).loss, part, gradients="average")  # FSDP2 averages
        update(optimizer, trained, loss, curve)
    save(model, options.output)
    return model, curve


def smoke(options):
    """Train a tiny model by the same code; rank 0 compares the losses with those of plain transformers."""
    import smoke

    with tempfile.TemporaryDirectory() as folder:  # each rank writes its own, with the same contents
        options.model, options.dataset = smoke.write_model(folder), smoke.write_texts(folder)
        options.length, options.trained_length, options.output = smoke.LENGTH, smoke.TRAINED_LENGTH, f"{folder}/trained"
        options.steps, options.learning_rate = 4, 1e-3
        model, curve = train(options)
        if dist.get_rank() == 0:
            batches = itertools.islice(packed_rows(options, "cpu"), options.steps)
            alone = smoke.train_alone(load(options, "eager"), batches, options.learning_rate)
            smoke.compare(curve, alone, model)


if __name__ == "__main__":
    options = parse_arguments()
    smoke(options) if options.smoke else train(options)
    dist.destroy_process_group()
