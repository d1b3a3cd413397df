"""Hugging Face's Trainer over split sequences: `class MyTrainer(ContextParallelTrainer, Trainer)`.

What is overridden, and why: the accelerator (which ranks get the same batch), the loss (sharded inputs in), predictions
(whole sequences out, each sample once), and counters that would count a token once per rank. Everything else is the
Trainer's: it counts labels over all ranks and DDP or FSDP2 average over them, which together is one mean. What TRL's
trainers do on top is in `trainers/`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from longspan.errors import renamed
from longspan.integrations import huggingface
from longspan.integrations.huggingface._transformers import labels_of_sequences
from longspan.integrations.huggingface.accelerate import Ranks, split_sequences
from longspan.integrations.huggingface.models import check_model
from longspan.integrations.huggingface.trainers.accelerators import PartsAccelerator
from longspan.integrations.huggingface.trainers.counts import count_evaluated, count_generations, count_tokens
from longspan.integrations.huggingface.trainers.distillation import Distilled
from longspan.integrations.huggingface.trainers.kinds import PARTS, PLAIN, WHOLE, kind_of
from longspan.integrations.huggingface.trainers.liger import check_patched, prove_before
from longspan.integrations.huggingface.trainers.losses import PartLabels, PartLoss, PartSmoother
from longspan.integrations.huggingface.trainers.noise import replace_noise
from longspan.integrations.huggingface.trainers.policies import WholeScores
from longspan.integrations.huggingface.trainers.refusals import (
    check_arguments,
    check_attention,
    check_bases,
    check_sharded,
)
from longspan.integrations.huggingface.trainers.separate import Separator
from longspan.training import BatchError, check_same, gather_outputs

if TYPE_CHECKING:
    from transformers import Trainer as _Base

    from longspan.layouts import Layout
else:
    _Base = object


class ContextParallelTrainer(Distilled, WholeScores, _Base):
    """A mixin for `transformers.Trainer` and its subclasses, TRL's trainers among them; name it first among the bases.

    `cp_size` neighbouring ranks hold parts of each sequence, the others other samples; all ranks unless given.
    `layout`, `scheme` and `trust_model` are those of `huggingface.shard_inputs`. Losses, gradients, evaluation and
    predictions are those of one process with the same batches. On one process it is the plain trainer, but packed
    documents of hybrid models are kept apart, as they are over ranks.
    """

    own_loss_takes_shards = False
    """Say True in a class whose `compute_loss` takes this rank's part of the batch, with labels already shifted, and
    divides by `num_items_in_batch`."""
    _kind = PLAIN
    _wants_logits = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if check_bases(cls, ContextParallelTrainer):
            huggingface.register()  # models are loaded with this attention before there is a trainer

    @renamed(schedule="scheme")
    def __init__(
        self,
        *args: Any,
        cp_size: int | None = None,
        layout: str | Layout = "balanced",
        scheme: str = "auto",
        trust_model: bool = False,
        **kwargs: Any,
    ) -> None:
        self._cp_size, self._sharding = cp_size, {"layout": layout, "scheme": scheme, "trust_model": trust_model}
        self._ranks: Ranks | None = None
        self._sequence: Any = None
        self._labels: PartLabels | None = None
        self._unchecked = True
        self._num_micro_batches = 0
        self._noise: Any = None
        self._separator = Separator()
        huggingface.register()
        super().__init__(*args, **kwargs)
        if self._ranks is not None:
            check_arguments(self)
            if self.model is not None:  # else model_init makes it later, and the first batch finds out
                check_attention(self.model)
                check_model(self.model, {})
            self._join_ranks()
            self._take_parts()

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._ranks = split_sequences(self.accelerator, self._cp_size)
        if self._ranks is not None:
            self._kind = kind_of(type(self))
            count_generations(self)

    def _take_parts(self) -> None:
        """What the Trainer computes itself is computed for a rank's part from now on."""
        assert self._ranks is not None
        if self._kind == PARTS:
            self.accelerator = PartsAccelerator(self.accelerator, self._ranks)
        if self.label_smoother is not None:
            self.label_smoother = PartSmoother(self.label_smoother, lambda: self._labels)
        if self.compute_loss_func is not None:
            self.compute_loss_func = PartLoss(self.compute_loss_func, lambda: self._labels)

    def get_cp_size(self) -> int:
        return 1 if self._ranks is None else self._ranks.cp.size()

    def _prepare_context_parallel_inputs(
        self,
        model: nn.Module,  # noqa: ARG002
        inputs: Any,
    ) -> tuple[Callable[..., Any], Any]:
        """Nothing: inputs are sharded where the loss is computed, which is where all trainers pass."""
        return contextlib.nullcontext, inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._ranks is not None:
            check_sharded(self, model)
        if self._ranks is None or self._kind in WHOLE or huggingface.NAME in inputs:
            inputs = self._apart(model, inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None:
            if torch.is_grad_enabled():
                raise BatchError(_no_count(inputs))
            num_items_in_batch = count_evaluated(inputs, self._ranks)  # TRL does not count here
        part = self._part(model, {**inputs, "num_items_in_batch": num_items_in_batch})
        before = getattr(self, "_total_train_tokens", 0)
        self._labels = PartLabels(inputs, self._sequence, num_items_in_batch)
        try:
            found = super().compute_loss(model, part, return_outputs, num_items_in_batch)
        finally:
            self._labels = None
        if self._kind == PARTS and model.training:
            count_tokens(self, inputs, before)
        return found

    def train(self, *args: Any, **kwargs: Any) -> Any:
        if self._ranks is not None and self.args.use_liger_kernel:
            prove_before(self)
        return super().train(*args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._ranks is not None:
            self._noise = replace_noise(self, self._noise)
        return super().training_step(*args, **kwargs)

    def _part(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        """This rank's part of a batch that all ranks of the sequence have whole."""
        assert self._ranks is not None
        if self._unchecked:
            _check_batch(inputs, self._ranks)
            check_patched(model)
            self._unchecked = False
        own_loss = self.label_smoother is not None or self.compute_loss_func is not None
        part = huggingface.shard_inputs(
            self.accelerator.unwrap_model(model),
            inputs,
            self._ranks.cp,
            logits=self._wants_logits or self._kind == PARTS or own_loss,
            dropout_seed=self._dropout_seed(model.training),
            **self._sharding,
        )
        part.pop("num_items_in_batch", None)  # the Trainer passes it to models that take it
        self._sequence = part[huggingface.NAME]
        if own_loss:
            self._sequence.labels = None  # nobody asks for the model's
        return part

    def _apart(self, model: nn.Module, inputs: Any) -> Any:
        """The batch, with documents of a hybrid model kept apart where it runs on one process."""
        if self._ranks is not None or not isinstance(inputs, Mapping) or huggingface.NAME in inputs:
            return inputs
        settings = {"trust_model": self._sharding["trust_model"], "dropout_seed": self._dropout_seed(model.training)}
        return self._separator.apply(self.accelerator.unwrap_model(model), inputs, settings)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        counted = super()._get_num_items_in_batch(*args, **kwargs)
        return labels_of_sequences(counted, self.accelerator, self.get_cp_size())

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._num_micro_batches = 0  # the Trainer asks for all micro-batches of a step at once
        return super().get_batch_samples(*args, **kwargs)

    def _dropout_seed(self, training: bool) -> int:
        """A new seed for every batch, the same for all parts of it. It is known from the step and the place in it
        alone, so that a run that is resumed, or evaluates in between, drops the same pairs."""
        self._num_micro_batches += int(training)
        place = 0 if self._ranks is None or self._ranks.dp is None else self._ranks.dp.get_local_rank()
        numbers = f"{self.args.seed} {self.state.global_step} {self._num_micro_batches} {place}"
        return int.from_bytes(hashlib.sha256(numbers.encode()).digest()[:7], "big")

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        if self._ranks is None or self._kind in WHOLE:
            inputs = self._apart(model, inputs)
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        names = self.label_names
        self._wants_logits = not prediction_loss_only
        try:
            if not names or any(inputs.get(name) is None for name in names):
                inputs = self._part(model, self._prepare_inputs(inputs))  # no loss: the trainer calls the model itself
            loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        finally:
            self._wants_logits = False
        if loss is not None:
            dist.all_reduce(loss, group=self._ranks.cp.get_group())
            loss = loss / self._ranks.cp.size()
        return loss, _whole(logits, self._sequence, self._ranks), labels

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._ranks is not None:
            self._unchecked = True  # another data loader
            self.gather_function = self._gather_samples
        return super().evaluation_loop(*args, **kwargs)

    def _gather_samples(self, data: Any) -> Any:
        """Every sample once, in order: ranks of one sequence all have it, and the last batch may repeat some."""
        assert self._ranks is not None
        state = self.accelerator.gradient_state
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None
        return _gather(data, self._ranks.dp, last)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        times = 1 if self._kind in WHOLE else self.get_cp_size()
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // times

    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) // self.get_cp_size()


def _whole(outputs: Any, sequence: Any, ranks: Ranks) -> Any:
    """Outputs of all tokens in global order, on every rank of the sequence."""
    if outputs is None:
        return None
    if isinstance(outputs, tuple | list):
        return type(outputs)(_whole(item, sequence, ranks) for item in outputs)
    slots = len(sequence.layout.positions(ranks.cp.get_local_rank()))
    if not isinstance(outputs, Tensor) or outputs.ndim < 2 or outputs.shape[1] != slots:
        shape = tuple(getattr(outputs, "shape", ()))
        raise BatchError(
            f"the model returned {type(outputs).__name__} of shape {shape} beside logits, but only what has one row per"
            f" token in dim 1 ({slots} on this rank) can be put together again. Name it in ignore_keys."
        )
    return gather_outputs(outputs, sequence.layout, ranks.cp, 1)


def _gather(data: Any, group: Any, last: int | None) -> Any:
    if isinstance(data, tuple | list):
        return type(data)(_gather(item, group, last) for item in data)
    if isinstance(data, dict):
        return {name: _gather(item, group, last) for name, item in data.items()}
    if group is not None:
        parts = [torch.empty_like(data) for _ in range(group.size())]
        dist.all_gather(parts, data.contiguous(), group=group.get_group())
        data = torch.cat([part[None] if part.ndim == 0 else part for part in parts])
    return data if last is None else data[:last]


def _check_batch(inputs: Any, ranks: Ranks) -> None:
    try:
        check_same(inputs, ranks.cp)
    except BatchError as error:
        raise BatchError(
            f"{error} With the Trainer: leave data loaders to it (get_train_dataloader prepares them), and give"
            f" accelerator_config={{'dispatch_batches': False}} for iterable datasets."
        ) from error


def _no_count(inputs: Any) -> str:
    return (
        f"the Trainer counted no labels for this batch ({', '.join(inputs)}), so each rank would take the mean of its"
        f" own part. Give 'labels' in every batch, not shifted: they are counted over all ranks and micro-batches."
    )
