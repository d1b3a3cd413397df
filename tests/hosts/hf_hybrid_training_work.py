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
BATCHES = 10
"""They come again: plans are made once."""
CHANGES = {
    # A token goes to all experts: where two are near to each other, rounding would choose between them.
    "qwen3_next": {
        "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts_per_tok": 4,
    },
    "nemotron_h": {"num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "mlp"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip
LEARNING_RATE = 3e-3
EPSILON = 1e-5
"""Adam's, above rounding: gradients that are zero but for it would otherwise move parameters by their sign."""


def model_of(model_type, dtype, attention="longspan"):
    return hf_hybrid_work.model_of(model_type, attention, **CHANGES[model_type]).to(dtype)


def lengths_of(step):
    """Document lengths of every row of a step's batch."""
    draw = torch.Generator().manual_seed(step % BATCHES)
    rows = []
    for _ in range(ROWS):
        cuts = torch.randperm(TOKENS - 1, generator=draw)[:3].sort().values + 1
        rows.append(torch.tensor([0, *cuts, TOKENS]).diff().tolist())
    return rows


def batch_of(step):
    """Packed rows; documents count up from somewhere, by 1 to 3: something to learn, nothing to guess."""
    draw = torch.Generator().manual_seed(1000 + step % BATCHES)
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


def one_process(model_type, dtype=torch.float32, steps=STEPS, autocast=False):
    """Losses of a training of plain transformers that gets every document alone; in float64, with recurrences token by
    token."""
    model = model_of(model_type, dtype, "sdpa")
    optimizer, curve = optimizer_of(model), []
    with hf_hybrid_work.judged(model) if dtype == torch.float64 else contextlib.nullcontext():
        for step in range(steps):
            batch, lengths = batch_of(step), lengths_of(step)
            with cast(autocast):
                loss = alone(model, batch["input_ids"], lengths)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(float(loss.detach()))
    return curve


def alone(model, ids, rows):
    """The mean loss of all labels: each token but the first of each document of each row."""
    total = sum(length - 1 for lengths in rows for length in lengths)
    loss = torch.zeros((), dtype=torch.float64)
    for row, lengths in zip(ids, rows, strict=True):
        for document in row.split(lengths):
            logits = model(input_ids=document[None], use_cache=False).logits
            loss = loss + functional.cross_entropy(logits[0, :-1].double(), document[1:], reduction="sum") / total
    return loss


def cast(autocast):
    return torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()


def packed_by_transformers(model_type, steps):
    """Losses of plain transformers that gets the packed batches as they are."""
    model = model_of(model_type, torch.float32, "sdpa")
    optimizer, curve = optimizer_of(model), []
    for step in range(steps):
        loss = model(**batch_of(step), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        curve.append(float(loss.detach()))
    return curve


# -- over ranks --------------------------------------------------------------------------------------------------------


def sharded_training(model_type, cp, steps=STEPS, autocast=False):
    """Losses of FSDP2 over all ranks, with sequences split over `cp` of them and rows dealt to the others."""
    from longspan import huggingface
    from longspan.training import make_mesh

    size = dist.get_world_size()
    mesh = make_mesh(dp=size // cp, cp=cp, device_type="cpu")
    model = model_of(model_type, torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh.dp_cp)
    fully_shard(model, mesh=mesh.dp_cp)
    optimizer, curve = optimizer_of(model), []
    mine = slice(mesh.dp.get_local_rank(), None, mesh.dp.size())
    for step in range(steps):
        batch = batch_of(step)
        total = (batch["labels"] != -100).sum()
        part = {**{name: value[mine] for name, value in batch.items()}, "num_items_in_batch": total}
        inputs = huggingface.shard_inputs(model, part, mesh.cp)
        with cast(autocast):
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

SAMPLES, AT_ONCE, NORM = 24, 3, 1.0


def samples():
    return [[t % VOCAB for t in sample["input_ids"]] for sample in hf_training_work.samples(SAMPLES)]


def trainer_training(model_type, steps):
    """Losses and norms of the Trainer, with documents flattened into one row, accumulation and checkpointing."""
    from transformers import DataCollatorWithFlattening, PrinterCallback, Trainer

    with hf_training_work.launched(), tempfile.TemporaryDirectory() as folder:
        args = hf_training_work.arguments(
            folder, AT_ONCE, max_steps=steps, train_sampling_strategy="sequential", adam_epsilon=EPSILON,
            learning_rate=LEARNING_RATE, lr_scheduler_type="constant", max_grad_norm=NORM,
        )  # fmt: skip
        trainer = hf_training_work.trainer_class(Trainer, True)(
            model=model_of(model_type, torch.float32),
            args=args,
            train_dataset=[{"input_ids": ids, "labels": ids} for ids in samples()],
            data_collator=DataCollatorWithFlattening(),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return hf_training_work.curve(trainer)


def trained_alone(model_type, steps):
    """The same in a loop of one process, with every document alone."""
    model = model_of(model_type, torch.float32, "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    documents, curve = samples(), []
    for step in range(steps):
        chosen = [documents[(2 * AT_ONCE * step + i) % SAMPLES] for i in range(2 * AT_ONCE)]
        ids = torch.tensor([token for document in chosen for token in document])[None]
        loss = alone(model, ids, [[len(document) for document in chosen]])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(loss.detach()), float(norm)))
    return curve
