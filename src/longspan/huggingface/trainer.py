"""Hugging Face's Trainer over sharded sequences: `class MyTrainer(ContextParallelTrainer, Trainer)`.

It overrides the accelerator (which ranks get the same batch), the loss (sharded inputs), predictions (whole sequences,
each sample once), and counters that would count a token once per rank. The Trainer itself counts labels over all ranks
and DDP or FSDP2 average over them, which together is one mean. `trl.py` has methods that only TRL's trainers call.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from longspan import huggingface
from longspan.huggingface.accelerate import (
    WHOLE,
    PartsAccelerator,
    Ranks,
    drop_cp_duplicates,
    kind_of,
    map_tensors,
    split_sequences,
)
from longspan.huggingface.adapter import adapter_of
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, LABELS, PACKED, read_batch, shifted_labels
from longspan.huggingface.documents import STEP, StepLoader, check_settings
from longspan.huggingface.head import replace_values
from longspan.huggingface.inputs import shard_inputs
from longspan.huggingface.masks import current
from longspan.huggingface.sharding import check_model
from longspan.huggingface.structure import labels_of_sequences, text_model
from longspan.huggingface.trl import TrlMethods
from longspan.layouts import Layout
from longspan.run.simulated import OnlyRank
from longspan.tile import accumulation_dtype
from longspan.training import BatchError, check_same, gather_outputs, gather_tokens
from longspan.training.groups import message_device
from longspan.training.loss import ValueWithGradOf

# -- Refusals ----------------------------------------------------------------------------------------------------------


def check_bases(kind: type, mixin: type) -> bool:
    """Return whether the class is a trainer; raise if it names the mixin after one, whose methods would be called."""
    order = list(kind.__mro__)
    trainer = next((b for b in order if (b.__module__, b.__name__) == ("transformers.trainer", "Trainer")), None)
    if trainer is not None and order.index(trainer) < order.index(mixin):
        first = next(base.__name__ for base in kind.__bases__ if issubclass(base, trainer))
        raise BatchError(
            f"class {kind.__name__} names {mixin.__name__} behind {first}, whose methods would be called instead:"
            f" nothing would be split. Name the mixin first: class {kind.__name__}({mixin.__name__}, {first})."
        )
    return trainer is not None


def check_arguments(trainer: Any) -> None:
    """Raise for settings that would treat a rank's part as the whole sequence, or count samples once per rank."""
    args, collator = trainer.args, trainer.data_collator
    own_loss = None
    for base in type(trainer).__mro__:
        if "compute_loss" in vars(base) and base.__module__.split(".")[0] not in ("longspan", "transformers", "trl"):
            own_loss = base.__name__
            break
    is_part = trainer._kind not in WHOLE
    refused = [
        (is_part and own_loss is not None and not trainer.own_loss_takes_shards, f"compute_loss of {own_loss}",
         "It receives a rank's part: shift_labels instead of labels to shift, and num_items_in_batch labels in all."
         " If it supports these, set own_loss_takes_shards = True in the class."),
        (is_part and not args.average_tokens_across_devices, "average_tokens_across_devices = False",
         "Ranks hold different numbers of labels, so their means must be weighted by these. Leave it at True."),
        (is_part and trainer.model is not None and not trainer.model_accepts_loss_kwargs,
         f"a model of class {type(trainer.model).__name__}, which takes no loss arguments,",
         "Its loss would be the mean of a rank's own labels. Use a model whose forward takes num_items_in_batch."),
        (args.eval_use_gather_object, "eval_use_gather_object = True",
         "Objects are gathered from all ranks, so each sample would count once per rank. Leave it out."),
        (trainer.is_deepspeed_enabled, "DeepSpeed", "Use DDP or FSDP2."),
        (trainer.get_tp_size() > 1, "tensor parallelism",
         "Use longspan.training.make_mesh in a loop of your own, which has the recipe."),
        (type(collator).__name__ == "DataCollatorWithFlattening" and not getattr(collator, "return_position_ids", True),
         "a collator that packs without position_ids",
         "Documents could not be separated. Use DataCollatorWithFlattening(return_position_ids=True)."),
    ]  # fmt: skip
    for applies, name, advice in refused:
        if applies:
            raise BatchError(
                f"{name} is not supported with sequences split over {trainer.get_cp_size()} ranks. {advice}"
            )


def check_sharded(trainer: Any, model: nn.Module) -> None:
    """Raise for a model that is not sharded although FSDP was requested: on CPUs accelerate wraps it in DDP instead."""
    is_set = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if not (trainer.args.fsdp or is_set):
        return
    if not any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules()):
        request = "TrainingArguments(fsdp=...)" if trainer.args.fsdp else "ACCELERATE_USE_FSDP=true"
        raise BatchError(
            f"the model must be sharded by FSDP, because of {request}, but got {type(model).__name__} with all"
            f" parameters on every rank. Accelerate does not shard on CPUs. Remove the request, or shard the model when"
            f" it is loaded: from_pretrained(..., distributed_config=DistributedConfig(fsdp_size=...))."
        )


# -- NEFTune -----------------------------------------------------------------------------------------------------------
# Noise of embeddings is that of whole sequences, and a rank adds the rows of its own tokens. The scale follows from the
# length of the whole sequence. Every rank draws noise for all tokens: if the ranks' generators agree (no dropout), it
# is the noise of one process; if they do not, rows of different ranks are independent.


DRAWN_AT_ONCE = 2**26
"""Numbers. More are drawn piece by piece, so that no rank holds noise of the whole sequence: on CPUs these are the same
numbers, on GPUs others of the same distribution."""


def add_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """Replace transformers' `neftune_post_forward_hook`, which knows this rank's tokens alone."""
    if not module.training:
        return output
    sequence = current()
    alpha: Any = module.neftune_noise_alpha
    if sequence is None or not sequence.is_cut:  # the module receives whole sequences
        bound = _noise_bound(alpha, output.shape[1], output.shape[2])
        return output + torch.zeros_like(output).uniform_(-bound, bound)
    return output + own_noise(output, alpha, sequence.layout, sequence.rank)


def own_noise(like: Tensor, alpha: float, layout: Layout, rank: int) -> Tensor:
    """Return this rank's rows of noise that is drawn for whole sequences, in the order of transformers."""
    rows, width, seq_len = like.shape[0], like.shape[2], layout.seq_len
    bound = _noise_bound(alpha, seq_len, width)
    if rows * seq_len * width <= DRAWN_AT_ONCE:
        return layout.shard(like.new_empty(rows, seq_len, width).uniform_(-bound, bound), rank, 1)
    places = torch.as_tensor(layout.positions(rank)[: int(layout.num_tokens[rank])], device=like.device)
    noise = torch.zeros_like(like)
    step = max(1, DRAWN_AT_ONCE // width)
    for row in range(rows):
        for start in range(0, seq_len, step):
            piece = like.new_empty(min(step, seq_len - start), width).uniform_(-bound, bound)
            mine = ((places >= start) & (places < start + step)).nonzero()[:, 0]
            noise[row, mine] = piece[places[mine] - start]
    return noise


def _noise_bound(alpha: float, seq_len: int, width: int) -> float:
    return float(alpha / torch.sqrt(torch.tensor(seq_len * width)))  # rounded as transformers rounds it


# -- Liger's kernels ---------------------------------------------------------------------------------------------------
# Layers that compute token by token, and a loss that takes shifted labels. The Trainer puts them into the model when
# training begins, so a model without an entry in the table of rules cannot be proved then.


def check_liger_loss(model: nn.Module) -> None:
    """Raise for a loss of Liger's that would shift a rank's own labels."""
    inner = text_model(model)
    forward = vars(inner).get("forward") if inner is not None else None
    function = getattr(forward, "__func__", forward)
    if function is None or not (getattr(function, "__module__", None) or "").startswith("liger"):
        return
    if "shift_labels" not in inspect.getsource(function):
        raise BatchError(
            f"use_liger_kernel = True needs a forward with shift_labels, but Liger's forward of {type(inner).__name__}"
            f" takes none and would shift a rank's own labels. Pass"
            f" liger_kernel_config={{'fused_linear_cross_entropy': False}}: Longspan computes the loss without logits,"
            f" too."
        )


# -- Losses that the Trainer computes from logits itself ---------------------------------------------------------------
# Smoothed labels, and a function of the user's. A rank has the logits of its own tokens, and the token after its last
# one is on another rank. So labels are shifted while the sequence is whole. A function that shifts labels by itself
# receives rows in which its own shift is right: logits with one more row, and labels that begin one place later. With
# tokens 3 to 5 of a sequence, whose next tokens are d, e, f:
#
#     logits  l3  l4  l5   0        it compares: l3 with d, l4 with e, l5 with f
#     labels -100  d   e   f


SHIFTS, IN_PLACE, WHOLE_LOSS = range(3)
TRIED = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])
"""Two parts of the twelve tokens that a user's function is tried on."""


class PartLabels(NamedTuple):
    """Labels of the batch whose loss is being computed, and the number of labels in all batches of the step."""

    batch: Mapping[str, Any]
    sequence: Any
    num_items: Any

    def of_part(self, shift: bool) -> Tensor:
        """Return this rank's labels: of the token after each one, or in place."""
        labels = shifted_labels(self.batch) if shift else self.batch.get("labels")
        if labels is None:
            raise BatchError(f"the batch must have 'labels', not shifted, but got {', '.join(self.batch)}.")
        return self.sequence.layout.shard(labels, self.sequence.rank, 1, IGNORE)


class PartSmoother:
    """The Trainer's label smoother, for a rank's part: shares add up to its value for whole sequences."""

    def __init__(self, smoother: Any, labels: Callable[[], PartLabels | None]) -> None:
        self.smoother, self.labels = smoother, labels

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, **options: Any) -> Tensor:
        now = self.labels()
        if now is None:  # whole sequences
            return self.smoother(outputs, labels, shift_labels=shift_labels, **options)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        share = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(accumulation_dtype(logits.dtype)),
            now.of_part(shift_labels).reshape(-1).to(logits.device),
            ignore_index=self.smoother.ignore_index,
            label_smoothing=self.smoother.epsilon,
            reduction="sum",
        )
        return share / torch.as_tensor(now.num_items, device=share.device).clamp(min=1)


class PartLoss:
    """A user's `compute_loss_func`, for a rank's part.

    It is tried once, on random logits of twelve tokens: its values for two parts must add up to its value for the
    whole, with its own shift of labels or without one. A function that does not add up (or that fails there, because it
    reads more than logits) receives whole sequences, which every rank then has to hold.
    """

    def __init__(self, function: Callable[..., Any], labels: Callable[[], PartLabels | None]) -> None:
        self.function, self.labels = function, labels
        self.alignment: int | None = None

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        now = self.labels()
        if now is None:
            return self.function(outputs, labels, num_items_in_batch=num_items_in_batch)
        sequence, group = now.sequence, now.sequence.group
        if self.alignment is None:
            alignment = detect_label_alignment(self.function, outputs, num_items_in_batch)
            # Whole sequences if ranks disagree, since these need every rank.
            extremes = torch.tensor([alignment, -alignment], device=message_device(group))
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
            self.alignment = alignment if int(extremes[0]) == -int(extremes[1]) else WHOLE_LOSS
        if self.alignment != WHOLE_LOSS:
            logits, mine = outputs["logits"], now.of_part(self.alignment == SHIFTS)
            if self.alignment == SHIFTS:
                logits, mine = _one_later(logits, mine)
            return self.function(replace_values(outputs, logits=logits), mine, num_items_in_batch=num_items_in_batch)

        # This rank's share: one part in as many of the value, and the gradient of this rank's tokens.
        slots = sequence.layout.num_slots(sequence.rank)

        def gather(value: Any) -> Any:
            if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == slots:
                return gather_tokens(value, sequence.layout, group, 1, gradients="sum")
            return value

        whole = {name: map_tensors(gather, value) for name, value in outputs.items()}
        loss = self.function(type(outputs)(**whole), now.batch["labels"], num_items_in_batch=num_items_in_batch)
        return ValueWithGradOf.apply(loss, loss.detach() / group.size())


def _one_later(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in which logits[:, :-1] against labels[:, 1:] is each token against its label.

    >>> logits, labels = _one_later(torch.zeros(1, 3, 5), torch.tensor([[7, 8, 9]]))
    >>> tuple(logits.shape), labels.tolist()
    ((1, 4, 5), [[-100, 7, 8, 9]])
    """
    row = torch.zeros_like(logits[:, :1])
    return torch.cat((logits, row), dim=1), torch.nn.functional.pad(labels, (1, 0), value=IGNORE)


@torch.no_grad()
def detect_label_alignment(function: Callable[..., Any], outputs: Any, num_items: Any) -> int:
    """Return whether a function takes parts with rows for its own shift, in place, or not at all."""
    like = outputs["logits"]
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 12, like.shape[-1], generator=draw).to(like.device)
    labels = torch.randint(0, like.shape[-1], (2, 12), generator=draw)
    labels[0, 4] = labels[1, 9] = IGNORE
    labels = labels.to(like.device)
    count = torch.full_like(num_items, 17) if isinstance(num_items, Tensor) else 17
    later = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)

    def compute(logits: Tensor, labels: Tensor) -> Tensor:
        value = function(type(outputs)(logits=logits), labels, num_items_in_batch=count)
        return torch.as_tensor(value).double().cpu()

    try:
        whole = compute(logits, labels)
        shifted = [compute(*_one_later(logits[:, part], later[:, part])) for part in TRIED]
        in_place = [compute(logits[:, part], labels[:, part]) for part in TRIED]
    except Exception:  # it reads other values, which whole sequences may have
        return WHOLE_LOSS
    for alignment, (first, second) in ((SHIFTS, shifted), (IN_PLACE, in_place)):
        if whole.ndim == 0 and bool((first + second - whole).abs() <= 1e-5 * whole.abs() + 1e-7):
            return alignment
    return WHOLE_LOSS


# -- Counters of TRL's trainers ----------------------------------------------------------------------------------------


def count_generations(trainer: Any) -> None:
    """Set how many completions are generated at once: TRL's configuration has counted each rank of a sequence."""
    args = trainer.args
    if getattr(args, "generation_batch_size", None) is None:
        return
    samples = args.world_size // trainer.get_cp_size()
    args.generation_batch_size = args.per_device_train_batch_size * samples * args.steps_per_generation
    num_evaluated = None
    if args.eval_strategy != "no":
        num_evaluated = getattr(args, "num_generations_eval", None) or args.num_generations
    for name, rows, group in (
        ("generation_batch_size", args.generation_batch_size, args.num_generations),
        ("the batch of an evaluation", args.per_device_eval_batch_size * samples, num_evaluated),
    ):
        if group and rows % group:
            raise BatchError(
                f"{name} is {rows}: ranks of one sequence have the same samples, so {args.world_size} ranks count as"
                f" {samples}. That cannot be cut into groups of num_generations = {group}. Make the batch per device a"
                f" multiple, or use fewer ranks for one sequence."
            )


# -- Packed documents of hybrid models on one process ------------------------------------------------------------------
# transformers alone lets convolutions and recurrences run on from one document to the next. So a packed batch of such a
# model is sharded over a group of one rank, as over ranks: the only part is the whole batch, in order, and labels stay.


KEPT = (*LABELS, "num_items_in_batch")
"""Arguments of the loss, which on a group of one is the model's own."""


class Separator:
    """Turn packed batches of hybrid models into arguments with which documents do not see each other."""

    def __init__(self) -> None:
        self._has_warned = False

    def apply(self, model: Any, batch: Mapping[str, Any], settings: dict[str, Any]) -> Mapping[str, Any]:
        """Return the model's arguments: `batch` itself if there is nothing to separate."""
        inner = text_model(model)
        if inner is None or all(batch.get(name) is None for name in ("position_ids", *PACKED)):
            return batch
        if not adapter_of(inner).is_hybrid:
            return batch
        kept = {name: value for name, value in batch.items() if name in KEPT}
        tokens = {name: value for name, value in batch.items() if name not in KEPT}
        try:
            if read_batch(tokens).documents is None:
                return batch
            part = shard_inputs(model, tokens, OnlyRank(), layout="contiguous", logits=True, **settings)  # type: ignore[arg-type]
        except BatchError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"documents of packed batches are not kept apart on one process: convolutions and recurrences of"
                    f" {type(inner).__name__} run on from one document to the next, as they do in transformers. Over"
                    f" ranks they do not, and losses differ. The reason: {error}",
                    stacklevel=2,
                )
            return batch
        part[NAME].arguments |= kept.keys()
        return {**part, **kept}


# -- The trainer -------------------------------------------------------------------------------------------------------


if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class ContextParallelTrainer(TrlMethods, _Base):
    """A mixin for `transformers.Trainer` and its subclasses, TRL's trainers among them; name it first among the bases.

    `cp_size` neighbouring ranks hold parts of each sequence, the others other samples; the default is all ranks.
    `layout`, `scheme` and `trust_model` are those of `huggingface.shard_inputs`. Losses, gradients, evaluation and
    predictions are those of one process with the same batches. On one process it is the plain trainer, but packed
    documents of hybrid models are kept apart, as they are over ranks.

    `batches={"tokens_per_rank": ..., "tokens_per_step": ...}` are arguments of `longspan.batches`, which packs the
    documents of the training set: a step of the optimizer is a step of it, with losses weighted by labels.
    """

    own_loss_takes_shards = False
    """Set True in a class whose `compute_loss` takes this rank's part of the batch, with labels already shifted, and
    divides by `num_items_in_batch`."""
    _kind = "plain"
    _wants_logits = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        check_bases(cls, ContextParallelTrainer)

    def __init__(
        self,
        *args: Any,
        cp_size: int | None = None,
        layout: str | Layout = "balanced",
        scheme: str = "auto",
        trust_model: bool = False,
        batches: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._batches, self._steps = batches, None
        self._cp_size, self._sharding = cp_size, {"layout": layout, "scheme": scheme, "trust_model": trust_model}
        self._ranks: Ranks | None = None
        self._sequence: Any = None
        self._layout: Layout | None = None
        self._labels: PartLabels | None = None
        self._unchecked = True
        self._num_micro_batches = 0
        self._noise: Any = None
        self._separator = Separator()
        super().__init__(*args, **kwargs)
        if self._ranks is not None:
            check_arguments(self)
            if self.model is not None:  # else model_init makes it later, and it is checked with the first batch
                check_model(self.model, {})
            self._join_ranks()
            if self._kind == "parts":
                self.accelerator = PartsAccelerator(self.accelerator, self._ranks)
            if self.label_smoother is not None:
                self.label_smoother = PartSmoother(self.label_smoother, lambda: self._labels)
            if self.compute_loss_func is not None:
                self.compute_loss_func = PartLoss(self.compute_loss_func, lambda: self._labels)
        if batches is not None:
            check_settings(self, batches)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self._ranks = split_sequences(self.accelerator, self._cp_size)
        if self._ranks is not None:
            self._kind = kind_of(type(self))
            count_generations(self)

    def get_cp_size(self) -> int:
        return 1 if self._ranks is None else self._ranks.cp.size()

    def _prepare_context_parallel_inputs(self, model: nn.Module, inputs: Any) -> tuple[Any, Any]:  # noqa: ARG002
        """Return the inputs unchanged: they are sharded in `compute_loss`, which all trainers call."""
        return contextlib.nullcontext, inputs

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self._ranks is not None:
            check_sharded(self, model)
        if self._ranks is None or self._kind in WHOLE or huggingface.NAME in inputs:
            inputs = self._separate_documents(model, inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if num_items_in_batch is None:
            if torch.is_grad_enabled():
                raise BatchError(
                    f"every batch must have 'labels', not shifted, but got {', '.join(inputs)}: the Trainer counted no"
                    f" labels, so each rank would take the mean of its own part."
                )
            # TRL evaluates without counting: it takes the mean of each process and multiplies it by all ranks.
            labels = shifted_labels(inputs)
            num_items_in_batch = None if labels is None else (labels != IGNORE).sum() * self._ranks.num_samples
        part = self._part(model, {**inputs, "num_items_in_batch": num_items_in_batch})
        before = getattr(self, "_total_train_tokens", 0)
        self._labels = PartLabels(inputs, self._sequence, num_items_in_batch)
        try:
            loss = super().compute_loss(model, part, return_outputs, num_items_in_batch)
        finally:
            self._labels = None
        if not torch.is_grad_enabled() and num_items_in_batch is not None:
            # As on one device: an evaluation leaves batches without labels out.
            value, *rest = loss if isinstance(loss, tuple) else (loss,)
            value = torch.where(torch.as_tensor(num_items_in_batch).to(value.device) == 0, torch.nan, value)
            loss = (value, *rest) if isinstance(loss, tuple) else value
        if self._kind == "parts" and model.training:
            # TRL's SFTTrainer counted tokens of each rank's part, and all rows as one.
            mask = inputs.get("attention_mask")
            num_tokens = inputs["input_ids"].shape[1] if mask is None else mask.sum()
            counts = self.accelerator.gather(torch.as_tensor(num_tokens, device=self.args.device))
            trainer: Any = self
            trainer._total_train_tokens = before + int(drop_cp_duplicates(counts, self._ranks).sum())
            trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]
        return loss

    def train(self, *args: Any, **kwargs: Any) -> Any:
        is_trusted = self._ranks is None or self._sharding["trust_model"]
        if self.args.use_liger_kernel and self._kind in WHOLE and not is_trusted:
            raise BatchError(
                "use_liger_kernel must be False for a trainer that makes its sequences itself, but got True. Leave it"
                " out: TRL's fused head needs no logits."
            )
        try:
            return super().train(*args, **kwargs)
        finally:
            if self._steps is not None:
                self._steps.close()
                self._steps = None

    def get_train_dataloader(self) -> Any:
        if self._batches is None or self.train_dataset is None:
            return super().get_train_dataloader()
        self._steps = StepLoader(self, self._batches)
        return self._steps.loader

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Any:
        # The Trainer makes its NEFTune hook when training begins, and removes whatever hook is there when it ends.
        hook: Any = getattr(self, "neftune_hook_handle", None)
        if self._ranks is not None and self.neftune_noise_alpha is not None and hook not in (None, self._noise):
            inner: Any = self.accelerator.unwrap_model(self.model)
            hook.remove()
            embeddings = (text_model(inner) or inner).get_input_embeddings()
            self.neftune_hook_handle = self._noise = embeddings.register_forward_hook(add_noise)
        if self._steps is None or STEP not in inputs:
            return super().training_step(model, inputs, num_items_in_batch)
        number, loss = inputs[STEP], 0.0
        self.current_gradient_accumulation_steps = num_left = len(self._steps.plan[number])
        is_synced = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        for part in self._steps.parts(number):
            num_left -= 1
            span = slice(part.start, part.start + part.layout.seq_len)
            micro = {name: value[:, span] for name, value in inputs.items() if name != STEP}
            defers = num_left > 0 and not is_synced  # gradients are reduced once, after the last micro-batch
            self._layout = part.layout
            try:
                with self.accelerator.no_sync(model) if defers else contextlib.nullcontext():
                    loss = loss + super().training_step(model, micro, num_items_in_batch)
            finally:
                self._layout = None
        return loss

    def _part(self, model: nn.Module, inputs: Any) -> dict[str, Any]:
        """Return this rank's part of a batch that all ranks of the sequence have whole."""
        assert self._ranks is not None
        if self._unchecked:
            try:
                check_same(inputs, self._ranks.cp)
            except BatchError as error:
                raise BatchError(
                    f"{error} With the Trainer: leave data loaders to it (get_train_dataloader prepares them), and give"
                    f" accelerator_config={{'dispatch_batches': False}} for iterable datasets."
                ) from error
            check_liger_loss(model)
            self._unchecked = False
        own_loss = self.label_smoother is not None or self.compute_loss_func is not None
        part = huggingface.shard_inputs(
            self.accelerator.unwrap_model(model),
            inputs,
            self._ranks.cp,
            logits=self._wants_logits or self._kind == "parts" or own_loss,
            dropout_seed=self._dropout_seed(model.training),
            **(self._sharding if self._layout is None else {**self._sharding, "layout": self._layout}),
        )
        part.pop("num_items_in_batch", None)  # the Trainer passes it to models that take it
        self._sequence = part[huggingface.NAME]
        if own_loss:
            self._sequence.labels = None  # the model's loss is not used
        return part

    def _separate_documents(self, model: nn.Module, inputs: Any) -> Any:
        """Return the batch, with documents of a hybrid model kept apart if it runs on one process."""
        if self._ranks is not None or not isinstance(inputs, Mapping) or huggingface.NAME in inputs:
            return inputs
        settings = {"trust_model": self._sharding["trust_model"], "dropout_seed": self._dropout_seed(model.training)}
        return self._separator.apply(self.accelerator.unwrap_model(model), inputs, settings)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Any:
        counted = super()._get_num_items_in_batch(*args, **kwargs)
        return labels_of_sequences(counted, self.accelerator, self.get_cp_size())

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        self._num_micro_batches = 0  # the Trainer gets all micro-batches of a step at once
        return super().get_batch_samples(*args, **kwargs)

    def _dropout_seed(self, training: bool) -> int:
        """Return a new seed for every batch, the same for all parts of it. It follows from the step and the place in it
        alone, so that a run that is resumed, or evaluates in between, drops the same pairs."""
        self._num_micro_batches += int(training)
        place = 0 if self._ranks is None or self._ranks.dp is None else self._ranks.dp.get_local_rank()
        numbers = f"{self.args.seed} {self.state.global_step} {self._num_micro_batches} {place}"
        return int.from_bytes(hashlib.sha256(numbers.encode()).digest()[:7], "big")

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        if self._ranks is None or self._kind in WHOLE:
            inputs = self._separate_documents(model, inputs)
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
        return loss, None if logits is None else map_tensors(self._gather_tokens, logits), labels

    def _gather_tokens(self, output: Any) -> Any:
        """Return an output of all tokens in global order, on every rank of the sequence."""
        assert self._ranks is not None
        layout = self._sequence.layout
        slots = len(layout.positions(self._ranks.cp.get_local_rank()))
        if not isinstance(output, Tensor) or output.ndim < 2 or output.shape[1] != slots:
            raise BatchError(
                f"outputs of the model must have one row per token in dim 1 ({slots} on this rank) to be gathered, but"
                f" got {type(output).__name__} of shape {tuple(getattr(output, 'shape', ()))}. Name it in ignore_keys."
            )
        return gather_outputs(output, layout, self._ranks.cp, 1)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self._ranks is not None:
            self._unchecked = True  # another data loader
            self.gather_function = self._gather_samples
        return super().evaluation_loop(*args, **kwargs)

    def _gather_samples(self, data: Any) -> Any:
        """Return every sample once, in order: ranks of one sequence all have it, and the last batch may repeat some."""
        assert self._ranks is not None
        state, group = self.accelerator.gradient_state, self._ranks.dp
        last = state.remainder if state.end_of_dataloader and state.remainder > 0 else None

        def gather(item: Tensor) -> Tensor:
            if group is not None:
                parts = [torch.empty_like(item) for _ in range(group.size())]
                dist.all_gather(parts, item.contiguous(), group=group.get_group())
                item = torch.cat([part[None] if part.ndim == 0 else part for part in parts])
            return item if last is None else item[:last]

        return map_tensors(gather, data)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)
        times = 1 if self._kind in WHOLE else self.get_cp_size()
        self.state.num_input_tokens_seen = before + (self.state.num_input_tokens_seen - before) // times

    def floating_point_ops(self, inputs: Any) -> int:
        return super().floating_point_ops(inputs) // self.get_cp_size()
