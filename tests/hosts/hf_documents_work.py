"""What ranks do in tests/hosts/test_hf_documents.py: trainings on documents of very different lengths."""

import contextlib
import threading
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from tests.hosts.hf_training_work import (
    EPSILON,
    LEARNING_RATE,
    arguments,
    begin_noted,
    curve,
    first_step,
    launched,
    model_of,
    samples,
    trainer_class,
)

EPOCHS, SEED = 2, 3
TOKENS, STEP_TOKENS = 88, 230
"""Tokens of a micro-batch on all ranks, and of a step."""
PLAIN = {
    "max_steps": -1, "num_train_epochs": EPOCHS, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 1,
    "lr_scheduler_type": "constant", "seed": SEED,
}  # fmt: skip


def documents():
    """Mostly short documents, a few of a micro-batch's size, one token, and prompts without labels."""
    found = samples(34, seed=6)
    rng = np.random.default_rng(1)
    for length in (1, 2, 85, 70):
        ids = rng.integers(0, 64, length).tolist()
        found.append({"input_ids": ids, "labels": ids})
    for number, document in enumerate(found):
        start = min(number % 5, len(document["input_ids"]))
        document["labels"] = [-100] * start + document["labels"][start:]
    return found


def batches_for(ranks, **changes):
    return {"tokens_per_rank": TOKENS // ranks, "tokens_per_step": STEP_TOKENS, **changes}


def reference():
    """Losses and gradient norms of every step, document by document in plain transformers, and documents by epoch."""
    import longspan as ls
    from longspan.planning.batches import shuffled_numbers

    data = documents()
    model = model_of("llama", "eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.0)
    steps = ls.batches([len(x["input_ids"]) for x in data], ranks=1, seed=SEED, **batches_for(1))
    found = []
    for number in [*range(len(steps)), *shuffled_numbers(len(steps), SEED + 1).tolist()]:
        numbers = np.concatenate([micro.documents for micro in steps[number]]).tolist()
        rows = [(torch.tensor([data[i]["input_ids"]]), torch.tensor(data[i]["labels"])) for i in numbers]
        count, total = sum(int((labels[1:] != -100).sum()) for _, labels in rows), 0.0
        for ids, labels in rows:
            if len(labels) > 1:
                logits = model(ids, use_cache=False).logits[0, :-1]
                loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum") / count
                loss.backward()
                total += float(loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append((total, float(norm)))
    return {"curve": found, "steps": len(steps)}


@contextlib.contextmanager
def mistaken(mistake):
    """A mistake in what the trainer does with a step."""
    from longspan.huggingface import documents as module
    from longspan.huggingface.trainer import ContextParallelTrainer

    read, parts = module.Steps.__getitem__, module.StepLoader.parts
    compute_loss = ContextParallelTrainer.compute_loss

    def lost(self, number):
        item = read(self, number)
        item["labels"][:, : int((item["position_ids"][0] == 0).nonzero()[1])] = -100
        return item

    def doubled(self, number):
        first, *rest = parts(self, number)
        return iter([first, first, *rest])

    def shortened(self, number):
        return iter(list(parts(self, number))[1:])

    def averaged(self, model, inputs, return_outputs=False, num_items_in_batch=None):  # means of micro-batches
        count = (inputs["labels"] != -100).sum().clamp(min=1) * self.current_gradient_accumulation_steps
        return compute_loss(self, model, inputs, return_outputs, count)

    def all_tokens(self, batches, device):  # also prompts and first tokens, which are not predicted
        return torch.tensor(sum(batch["labels"].numel() for batch in batches))

    patches = {
        "averaged": (ContextParallelTrainer, "compute_loss", averaged),
        "all tokens": (ContextParallelTrainer, "_get_num_items_in_batch", all_tokens),
        "lost": (module.Steps, "__getitem__", lost),
        "doubled": (module.StepLoader, "parts", doubled),
        "shortened": (module.StepLoader, "parts", shortened),
    }
    with mock.patch.object(*patches[mistake]) if mistake else contextlib.nullcontext():
        yield


def train(folder, cp_size=None, resume=None, save=False, mistake="", max_steps=-1, **changes):
    from datasets import Dataset
    from transformers import PrinterCallback, Trainer

    from longspan.planning import plan as planning

    world, planners = dist.get_world_size(), []
    build = planning.choose

    def noted(*args, **kwargs):
        planners.append(threading.current_thread().name)
        return build(*args, **kwargs)

    with launched(), mistaken(mistake), mock.patch.object(planning, "choose", noted):
        saving = {"save_strategy": "steps", "save_steps": 3} if save else {}
        trainer = trainer_class(Trainer, True)(
            model=model_of("llama", "longspan" if world > 1 else "eager"),
            args=arguments(folder, 1, **{**PLAIN, **saving, "max_steps": max_steps, **changes}),
            train_dataset=Dataset.from_list(documents()),
            batches=batches_for(cp_size or world),
            cp_size=cp_size,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(begin_noted())
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return {
            "curve": curve(trainer),
            "first": first_step(trainer),
            "tokens": trainer.state.num_input_tokens_seen,
            "planners": planners,
        }


def sft(folder):
    """TRL's SFTTrainer, which makes labels in its collator."""
    from datasets import Dataset
    from transformers import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from tests.hosts.trl_work import tokenizer

    world = dist.get_world_size()
    with launched():
        more = {"bf16": False, "max_length": None, "shuffle_dataset": False}
        args = SFTConfig(**{**arguments(folder, 1, **PLAIN).to_dict(), **more})
        trainer = trainer_class(SFTTrainer, True)(
            model=model_of("llama", "longspan"),
            args=args,
            processing_class=tokenizer(),
            train_dataset=Dataset.from_list(documents()),
            batches=batches_for(world),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return {"curve": curve(trainer)}


def refusals(folder):
    """What the trainer says about settings that batches= contradicts, on one process."""
    from datasets import Dataset
    from transformers import DataCollatorWithFlattening, Trainer

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(documents())

    def doubled(features):
        return {name: torch.tensor([2 * features[0][name]]) for name in ("input_ids", "labels")}

    def unlabelled(features):
        return {"input_ids": torch.tensor([features[0]["input_ids"]])}

    data, said = Dataset.from_list(documents()), {}
    cases = {
        "accepted": ({}, {}),
        "flattening": ({}, {"data_collator": DataCollatorWithFlattening()}),
        "list": ({}, {"train_dataset": documents()}),
        "length": ({}, {"train_dataset": data.add_column("length", [len(x) for x in data["input_ids"]])}),
        "rows": ({"per_device_train_batch_size": 2}, {}),
        "accumulation": ({"gradient_accumulation_steps": 2}, {}),
        "strategy": ({"train_sampling_strategy": "group_by_length"}, {}),
        "drop": ({"dataloader_drop_last": True}, {}),
        "stream": ({}, {"train_dataset": Stream()}),
        "text": ({}, {"train_dataset": Dataset.from_list([{"text": "a"}])}),
        "lengths": ({}, {"train_dataset": data.add_column("length", [9] * len(data))}),
        "collator": ({}, {"data_collator": doubled}),
        "labels": ({}, {"data_collator": unlabelled}),
        "packed": ({}, {"data_collator": DataCollatorWithFlattening(return_flash_attn_kwargs=True)}),
        "options": ({}, {"batches": {"tokens_per_rank": TOKENS, "seed": 1}}),
        "limit": ({}, {"batches": {"tokens_per_rank": 40}}),
        "layout": ({}, {"layout": "zigzag"}),
    }
    with launched():
        for name, (arguments_, options) in cases.items():
            try:
                trainer = trainer_class(Trainer, True)(
                    model=model_of("llama", "eager"),
                    args=arguments(folder, 1, **{**PLAIN, **arguments_, "max_steps": 4}),
                    **{"train_dataset": data, "batches": batches_for(1), **options},
                )
                trainer.train()
                said[name] = [loss for loss, _ in curve(trainer)]
            except Exception as error:
                said[name] = f"{type(error).__name__}: {error}"
    return said
