"""Documents of very different lengths for the Trainer: one item of the data loader is one step of `longspan.batches`.

An item is a row of all documents that this rank's group has in the step, one micro-batch after another. Ranks of a
group get the same row; `ContextParallelTrainer.training_step` takes it apart. So the Trainer counts labels of the whole
step before its first micro-batch, and skips steps when it resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from longspan.api import plan as make_plan
from longspan.huggingface.accelerate import WHOLE, kind_of
from longspan.huggingface.batches import IGNORE
from longspan.huggingface.sequence import ShardedSequence, Whole
from longspan.layouts import Layout, contiguous
from longspan.planning.batches import Batches, MicroBatch, batches, shuffled_numbers
from longspan.spans import Ints, truncated_repr
from longspan.training import BatchError
from longspan.training.batch import prefetch

STEP = "longspan_step"
"""The key of an item that has the number of its step."""
OPTIONS = ("tokens_per_rank", "tokens_per_step", "too_long", "ranks_per_node", "pair_cost")
COLLATED = ("input_ids", "labels", "attention_mask", "position_ids")


def check_settings(trainer: Any, options: Any) -> None:
    """Raise for settings of a trainer that `batches=` contradicts."""
    if not isinstance(options, Mapping) or "tokens_per_rank" not in options or not options.keys() <= {*OPTIONS}:
        raise BatchError(
            f"`batches` must be a dict of arguments of longspan.batches, tokens_per_rank and any of"
            f" {', '.join(OPTIONS[1:])}, but got {truncated_repr(options)}. The others follow from the trainer."
        )
    args = trainer.args
    strategy = getattr(args, "train_sampling_strategy", "random")
    refused = [
        (kind_of(type(trainer)) in WHOLE,
         f"a {type(trainer).__name__}, which makes its sequences itself,", "Use a loop."),
        (args.per_device_train_batch_size != 1, f"per_device_train_batch_size = {args.per_device_train_batch_size}",
         "Set it to 1: a micro-batch is one row of packed documents. Its documents follow from tokens_per_rank and"
         " tokens_per_step."),
        (args.gradient_accumulation_steps != 1, f"gradient_accumulation_steps = {args.gradient_accumulation_steps}",
         "Set it to 1: every step has as many micro-batches as its tokens need. Set tokens_per_step instead."),
        (strategy not in ("random", "sequential"), f"train_sampling_strategy = {strategy!r}",
         "Use 'random' or 'sequential': documents are balanced by cost already."),
        (args.dataloader_drop_last, "dataloader_drop_last = True", "Leave it out: every document is trained on."),
        (args.auto_find_batch_size, "auto_find_batch_size = True", "Use a smaller tokens_per_rank."),
        (args.ignore_data_skip, "ignore_data_skip = True", "Leave it out: skipping steps reads no documents."),
        (args.n_gpu > 1, f"one process with {args.n_gpu} GPUs", "Start a process for each GPU with torchrun."),
        (trainer._sharding["layout"] != "balanced", f"layout = {trainer._sharding['layout']!r}",
         "Leave it out: each micro-batch has its own."),
        (trainer.model is not None and not trainer.model_accepts_loss_kwargs and trainer.compute_loss_func is None,
         f"a model of class {type(trainer.model).__name__}, which takes no loss arguments,",
         "Its loss would be the mean of each micro-batch. Use a model whose forward takes num_items_in_batch."),
        (getattr(trainer.data_collator, "mlm", False), "a collator with mlm = True",
         "Labels are those of the next token. Use mlm=False."),
    ]  # fmt: skip
    for applies, name, advice in refused:
        if applies:
            raise BatchError(f"{name} is not supported with batches=. {advice}")


def lengths_of(dataset: Any, column: str) -> Ints:
    """Return the tokens of each document: the dataset's column of lengths, or else counted, which reads all of them."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise BatchError(
            f"`train_dataset` must be a map-style dataset with batches=, but got {type(dataset).__name__}: all lengths"
            f" must be known before the first step. Load it without streaming."
        )
    names = getattr(dataset, "column_names", None)
    if isinstance(names, list) and column in names:
        return np.array(list(dataset[column]), dtype=np.int64)
    if isinstance(names, list) and "input_ids" in names:
        return np.array([len(ids) for ids in dataset["input_ids"]], dtype=np.int64)
    first = dataset[0] if names is None and len(dataset) else None
    if not isinstance(first, Mapping) or "input_ids" not in first:
        got = names if names is not None else sorted(first) if isinstance(first, Mapping) else type(first).__name__
        raise BatchError(
            f"`train_dataset` must have token ids as 'input_ids', or lengths as {column!r}, with batches=, but got"
            f" {truncated_repr(got)}. Tokenize it before, or add a column of lengths."
        )
    return np.array([len(dataset[i]["input_ids"]) for i in range(len(dataset))], dtype=np.int64)


def layout_of(micro: MicroBatch) -> Layout:
    """Return the layout of a group's micro-batch. Models cannot run on ranks without tokens, so that with fewer tokens
    than ranks there is padding at the end, which is one more document."""
    layout = micro.layout
    return layout if layout.num_tokens.min() else contiguous(max(layout.seq_len, micro.ranks), micro.ranks)


def numbers_of(micro: MicroBatch, seq_len: int) -> Ints:
    """Return the document of each token, (1, tokens); padding is the last document."""
    lengths = np.append(micro.lengths, seq_len - micro.lengths.sum())
    return np.repeat(np.arange(len(lengths), dtype=np.int64), lengths)[None]


class Steps:
    """The steps of this rank's group as rows of tokens: a map-style dataset."""

    def __init__(self, documents: Any, collate: Callable[[list[Any]], Any], plan: Batches, rank: int) -> None:
        self.documents, self.collate, self.plan, self.rank = documents, collate, plan, rank

    def __len__(self) -> int:
        """Return the number of documents, which the Trainer reports."""
        return len(self.documents)

    def __getitem__(self, number: int) -> dict[str, Any]:
        ids, labels, places = [], [], []
        for micro in self.plan[number].of_rank(self.rank):
            rows = zip(micro.documents.tolist(), micro.starts.tolist(), micro.lengths.tolist(), strict=True)
            for document, start, length in rows:
                if length:
                    tokens, targets = self._read(document)
                    ids.append(tokens[start : start + length])
                    labels.append(targets[start : start + length].clone())
                    labels[-1][0] = IGNORE  # not predicted from the document before it
                    places.append(torch.arange(length))
            padding = layout_of(micro).seq_len - int(micro.lengths.sum())
            ids.append(torch.zeros(padding, dtype=torch.int64))
            labels.append(torch.full((padding,), IGNORE))
            places.append(torch.arange(padding))
        row = {"input_ids": ids, "labels": labels, "position_ids": places}
        return {name: torch.cat(parts)[None] for name, parts in row.items()} | {STEP: number}

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        """Return ids and labels of a document, from the trainer's collator."""
        batch, length = self.collate([self.documents[number]]), int(self.plan.lengths[number])
        others = [name for name, value in batch.items() if name not in COLLATED and value is not None]
        if others or "labels" not in batch:
            raise BatchError(
                f"the collator must return {', '.join(COLLATED)} at most, and labels, for a document with batches=, but"
                f" got {', '.join(batch)}. Documents are packed by their lengths: leave packing out, and let the"
                f" collator make labels, or the dataset have them."
            )
        mask, places = batch.get("attention_mask"), batch.get("position_ids")
        is_whole = mask is None or bool(mask.all())
        is_one = places is None or torch.equal(places.reshape(-1).cpu(), torch.arange(length))
        shapes = {tuple(batch[name].shape) for name in ("input_ids", "labels")}
        if shapes != {(1, length)} or not is_whole or not is_one:
            raise BatchError(
                f"document {number} must be one row of its {length} tokens after the collator, with positions from 0 on"
                f" and without padding, but got ids and labels of {sorted(shapes)}. Leave pad_to_multiple_of, packing"
                f" and truncation out, and let the dataset's lengths be those of its ids."
            )
        return batch["input_ids"][0].cpu(), batch["labels"][0].cpu()


class Order:
    """A batch sampler: the numbers of an epoch's steps. Epochs after the first have the same steps in another order, so
    that all have the same number of them, by which the Trainer finds its place when it resumes."""

    def __init__(self, trainer: Any, num_steps: int, seed: int | None) -> None:
        self.trainer, self.num_steps, self.seed = trainer, num_steps, seed
        self.epoch: int | None = None
        self.numbers: Ints = np.arange(num_steps, dtype=np.int64)

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[list[int]]:
        self.epoch = self.trainer.state.global_step // self.num_steps if self.epoch is None else self.epoch + 1
        if self.seed is not None and self.epoch:
            self.numbers = shuffled_numbers(self.num_steps, self.seed + self.epoch)
        return ([int(number)] for number in self.numbers)


class Part(NamedTuple):
    """A micro-batch of this rank's group, its place in the step's row, and its layout."""

    number: int
    start: int
    micro: MicroBatch
    layout: Layout


class StepLoader:
    """Makes the data loader of a training, and prepares the plans of the next micro-batch in a thread."""

    def __init__(self, trainer: Any, options: Mapping[str, Any]) -> None:
        args, dataset, collate = trainer.args, trainer.train_dataset, trainer.data_collator
        self.trainer, self.rank = trainer, args.process_index
        is_random = getattr(args, "train_sampling_strategy", "random") == "random"
        seed = args.seed if args.data_seed is None else args.data_seed
        lengths = lengths_of(dataset, args.length_column_name)
        self.plan = batches(
            lengths, ranks=args.world_size, ranks_per_group=trainer.get_cp_size(),
            seed=seed, order=None if is_random else np.arange(len(lengths)), **options,
        )  # fmt: skip
        if not len(self.plan):
            raise BatchError("`train_dataset` must have documents, but got none.")
        if getattr(dataset, "column_names", None) is not None:
            dataset = trainer._remove_unused_columns(dataset, description="Training")
        else:
            collate = trainer._get_collator_with_removed_columns(collate, description="Training")
        self.order = Order(trainer, len(self.plan), seed if is_random else None)
        self.loader = DataLoader(
            Steps(dataset, collate, self.plan, self.rank),  # type: ignore[arg-type]
            batch_sampler=self.order,
            collate_fn=itemgetter(0),
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            prefetch_factor=args.dataloader_prefetch_factor,
            multiprocessing_context=getattr(args, "dataloader_multiprocessing_context", None),
        )
        self._ahead = prefetch((), self._prepare)
        self._kinds: dict[Any, None] = {}
        """Kinds of layers and sizes that plans of attention are built for."""

    def close(self) -> None:
        """End the thread."""
        self._ahead.close()

    def parts(self, number: int) -> Iterator[Part]:
        """Yield the micro-batches of a step, and prepare the next one, of this step or of the one after it."""
        for _ in self.plan[number]:
            sequence = self.trainer._sequence
            self._kinds |= dict.fromkeys([] if sequence is None else sequence.plans)
            part = next(self._ahead, None)
            if part is None or part.number != number:
                self._ahead = prefetch(self._following(number), self._prepare)
                part = next(self._ahead)
            yield part

    def _following(self, number: int) -> Iterator[tuple[int, int, MicroBatch]]:
        """Yield the micro-batches of a step and of the rest of the epoch."""
        place = int(np.flatnonzero(self.order.numbers == number)[0])
        for later in self.order.numbers[place:].tolist():
            start = 0
            for micro in self.plan[later].of_rank(self.rank):
                yield later, start, micro
                start += max(int(micro.lengths.sum()), micro.ranks)

    def _prepare(self, item: tuple[int, int, MicroBatch]) -> Part:
        """Make the layout of a micro-batch, and plans of attention for the kinds of layers that ran before."""
        part = Part(*item, layout_of(item[2]))
        trainer, num_tokens = self.trainer, int(part.micro.lengths.sum())
        config = getattr(trainer.accelerator.unwrap_model(trainer.model), "config", None)
        balances = getattr(trainer, "aux_loss_enabled", False) or getattr(config, "output_router_logits", False)
        if balances and part.layout.seq_len > num_tokens:
            raise BatchError(
                f"a micro-batch must have a token for each of {part.micro.ranks} ranks if the loss balances experts,"
                f" but step {part.number} has one of {num_tokens}: padding would count. Leave short documents out, or"
                f" use a larger tokens_per_step."
            )
        sequence: ShardedSequence | None = trainer._sequence
        if sequence is None:
            return part
        numbers = numbers_of(part.micro, part.layout.seq_len)
        whole = Whole(1, part.layout.seq_len, None, numbers if numbers.any() else None)
        for kind, *sizes in list(self._kinds):
            if not isinstance(kind, tuple) or "chunk" in repr(kind):  # of a convolution or recurrence; by positions
                continue
            q_heads, kv_heads, head_dim, v_head_dim, dtype = sizes
            make_plan(
                whole.mask(kind), part.layout, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim,
                v_head_dim=v_head_dim, dtype=dtype, scheme=sequence.scheme, group=sequence.group,
            ).prepare(sequence.rank, trainer.args.device)  # fmt: skip
        return part
