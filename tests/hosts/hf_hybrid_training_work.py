"""Short trainings of tiny hybrid models over ranks, and of one process that gets every document alone; importable by
name.
"""

import contextlib
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from tests.hosts import hf_hybrid_work, hf_training_work

STEPS, ROWS, TOKENS, VOCAB = 50, 2, 41, hf_hybrid_work.VOCAB
LEARNING_RATE = 3e-3
EPSILON = 1e-5
"""Adam's, above rounding: gradients that are zero but for it would otherwise move parameters by their sign."""


def model_of(model_type, dtype, attention="longspan"):
    return hf_hybrid_work.model_of(model_type, attention).to(dtype)


def lengths_of(step):
    """Document lengths of every row of a step's batch."""
    draw = torch.Generator().manual_seed(step)
    rows = []
    for _ in range(ROWS):
        cuts = torch.randperm(TOKENS - 1, generator=draw)[:3].sort().values + 1
        rows.append(torch.tensor([0, *cuts, TOKENS]).diff().tolist())
    return rows


def batch_of(step):
    """Packed rows; documents count up from somewhere, by 1 to 3: something to learn, nothing to guess."""
    draw = torch.Generator().manual_seed(1000 + step)
    rows = {"input_ids": [], "labels": [], "position_ids": []}
    for lengths in lengths_of(step):
        places = torch.cat([torch.arange(n) for n in lengths])
        starts, steps = (
            torch.cat([torch.randint(*span, (1,), generator=draw).expand(n) for n in lengths])
            for span in ((0, VOCAB), (1, 4))
        )
        ids = (places * steps + starts) % VOCAB
        rows["input_ids"].append(ids)
        rows["labels"].append(torch.where(places == 0, -100, ids))
        rows["position_ids"].append(places)
    return {name: torch.stack(values) for name, values in rows.items()}


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)


# -- one process -------------------------------------------------------------------------------------------------------


def one_process(model_type, dtype, steps=STEPS):
    """Losses of a training in which the model gets every document alone, with recurrences token by token."""
    model = model_of(model_type, dtype, "sdpa")
    optimizer, curve = optimizer_of(model), []
    with hf_hybrid_work.judged(model):
        for step in range(steps):
            loss = alone(model, batch_of(step), lengths_of(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
    return curve


def alone(model, batch, rows):
    """The mean loss of all labels."""
    total = (batch["labels"] != -100).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(rows):
        ends = torch.tensor(lengths).cumsum(0).tolist()
        for start, stop in zip([0, *ends], ends, strict=False):
            ids = batch["input_ids"][row : row + 1, start:stop]
            logits = model(input_ids=ids, use_cache=False).logits
            loss = loss + functional.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="sum") / total
    return loss


# -- over ranks --------------------------------------------------------------------------------------------------------


def sharded_training(model_type, cp, steps=STEPS, autocast=False, dtype=torch.float32):
    """Losses of FSDP2 over all ranks, with sequences split over `cp` of them and rows dealt to the others."""
    from longspan.integrations import huggingface
    from longspan.training import make_mesh

    size = dist.get_world_size()
    mesh = make_mesh(dp=size // cp, cp=cp, device_type="cpu")
    model = model_of(model_type, dtype)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.dp_cp)
    fully_shard(model, mesh=mesh.dp_cp)
    optimizer, curve = optimizer_of(model), []
    mine = slice(mesh.dp.get_local_rank(), None, mesh.dp.size())
    cast = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()
    for step in range(steps):
        batch = batch_of(step)
        total = (batch["labels"] != -100).sum()
        part = {**{name: value[mine] for name, value in batch.items()}, "num_items_in_batch": total}
        inputs = huggingface.shard_inputs(model, part, mesh.cp)
        with cast:
            share = model(**inputs).loss
        whole = huggingface.full_loss(share, inputs, gradients="average") * mesh.dp.size()  # FSDP divides by all
        whole.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = share.detach().double()
        dist.all_reduce(loss)
        curve.append(float(loss))
    return curve


# -- the Trainer -------------------------------------------------------------------------------------------------------


def trainer_training(model_type, steps):
    """Losses and norms of the Trainer with packed batches, accumulation and checkpointing; on one rank, a group of one
    keeps documents apart, too."""
    from transformers import DataCollatorWithFlattening, PrinterCallback

    from longspan.integrations.huggingface.trainer import ContextParallelTrainer

    with hf_training_work.launched(), tempfile.TemporaryDirectory() as folder:
        args = hf_training_work.arguments(
            folder, 3, max_steps=steps, train_sampling_strategy="sequential", adam_epsilon=EPSILON
        )
        trainer = ContextParallelTrainer(
            model=model_of(model_type, torch.float32),
            args=args,
            train_dataset=samples(24),
            data_collator=DataCollatorWithFlattening(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return hf_training_work.curve(trainer)


def samples(number):
    return [
        {"input_ids": [t % VOCAB for t in sample["input_ids"]], "labels": [t % VOCAB for t in sample["labels"]]}
        for sample in hf_training_work.samples(number)
    ]
