"""Hugging Face's Trainer over sharded sequences: `class MyTrainer(ContextParallelTrainer, Trainer)`.

It overrides the accelerator (which ranks get the same batch), the loss (sharded inputs), predictions (whole sequences,
each sample once), and counters that would count a token once per rank. The Trainer itself counts labels over all ranks
and DDP or FSDP2 average over them, which together is one mean. `trl.py` has what TRL's trainers need in addition.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from longspan import huggingface
from longspan.errors import renamed
from longspan.huggingface.accelerate import (
    PARTS,
    PLAIN,
    WHOLE,
    PartsAccelerator,
    Ranks,
    each_once,
    kind_of,
    split_sequences,
)
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, LABELS, PACKED, read_batch, shifted_labels
from longspan.huggingface.first_use import rules_of
from longspan.huggingface.head import replaced
from longspan.huggingface.inputs import shard_inputs
from longspan.huggingface.masks import current
from longspan.huggingface.mixers import is_hybrid
from longspan.huggingface.sharding import check_model
from longspan.huggingface.structure import labels_of_sequences, text_model
from longspan.huggingface.trl import Distilled, WholeScores
from longspan.layouts import Layout
from longspan.run.simulated import OnlyRank
from longspan.tile import wide
from longspan.training import BatchError, check_same, gather_outputs, gather_tokens
from longspan.training.groups import message_device, process_group
from longspan.training.loss import Reported

# What `ContextParallelTrainer` refuses, each with what to do instead: what would be computed on a rank's part as if it
# were the whole sequence, and ways to run it in which samples are counted once per rank.


def check_bases(kind: type, mixin: type) -> bool:
    """Whether the class is a trainer; one that names the mixin behind a trainer, whose methods would then be called
    instead, is refused."""
    order = list(kind.__mro__)
    trainer = next((b for b in order if (b.__module__, b.__name__) == ("transformers.trainer", "Trainer")), None)
    if trainer is not None and order.index(trainer) < order.index(mixin):
        first = next(base.__name__ for base in kind.__bases__ if issubclass(base, trainer))
        raise BatchError(
            f"class {kind.__name__} names {mixin.__name__} behind {first}, whose methods would be called instead:"
            f" nothing would be split. Name the mixin first: class {kind.__name__}({mixin.__name__}, {first})."
        )
    return trainer is not None


def check_attention(model: Any) -> None:
    """Refuses a model whose attention is not Longspan's, which the trainer has registered by now."""
    config = getattr(text_model(model) or model, "config", None)
    name = NAME if config is None else config.get_text_config()._attn_implementation
    if name != NAME:
        raise BatchError(
            f"the model's attention is {name!r}, which knows nothing of other ranks. Load it with from_pretrained(...,"
            f" attn_implementation={NAME!r}), or call model.set_attn_implementation({NAME!r}) before it is given to the"
            f" trainer (which has called register() already)."
        )


def check_arguments(trainer: Any) -> None:
    """Refuses what would be computed on a rank's part as if it were the whole sequence."""
    losses = [] if trainer._kind in WHOLE else _refused_losses(trainer)
    for asked, applies, advice in (*losses, *_refused_setups(trainer)):
        if applies:
            raise BatchError(
                f"{asked} was asked for, with sequences split over {trainer.get_cp_size()} ranks. {advice}"
            )


def _refused_losses(trainer: Any) -> list[tuple[str, bool, str]]:
    """(what was asked, whether it was, what to do) of losses that parts of sequences would change."""
    args = trainer.args
    own = _own_loss(type(trainer))
    return [
        (
            f"compute_loss of {own}",
            own is not None and not trainer.own_loss_takes_shards,
            "It gets a rank's part: shift_labels instead of labels to shift, and num_items_in_batch labels in all."
            " If it handles these as it should, set own_loss_takes_shards = True in the class.",
        ),
        (
            "average_tokens_across_devices = False",
            not args.average_tokens_across_devices,
            "Ranks hold different numbers of labels, so their means must be weighted by these. Leave it at True.",
        ),
        (
            f"a model of class {type(trainer.model).__name__}, which takes no loss arguments,",
            trainer.model is not None and not trainer.model_accepts_loss_kwargs,
            "Its loss would be the mean of a rank's own labels. Use a model whose forward takes num_items_in_batch.",
        ),
    ]


def _refused_setups(trainer: Any) -> list[tuple[str, bool, str]]:
    """The same for ways to run it."""
    args = trainer.args
    return [
        (
            "eval_use_gather_object = True",
            args.eval_use_gather_object,
            "Objects are gathered from all ranks, so each sample would count once per rank. Leave it out.",
        ),
        ("DeepSpeed", trainer.is_deepspeed_enabled, "It is not supported here: use DDP or FSDP2."),
        (
            "tensor parallelism",
            trainer.get_tp_size() > 1,
            "Use longspan.training.make_mesh in a loop of your own, which has the recipe.",
        ),
        (
            "a collator that packs without position_ids",
            getattr(trainer.data_collator, "return_position_ids", True) is False
            and type(trainer.data_collator).__name__ == "DataCollatorWithFlattening",
            "Documents could not be told apart. Use DataCollatorWithFlattening(return_position_ids=True).",
        ),
    ]


def check_sharded(trainer: Any, model: nn.Module) -> None:
    """Refuse a model that is not sharded although FSDP was requested: on CPUs accelerate wraps it in DDP instead."""
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


def _own_loss(kind: type) -> str | None:
    """The class, neither of this package nor of transformers or TRL, that says how the loss is computed."""
    for base in kind.__mro__:
        if "compute_loss" in vars(base) and base.__module__.split(".")[0] not in ("longspan", "transformers", "trl"):
            return base.__name__
    return None


# NEFTune over ranks: noise of embeddings is that of whole sequences, and a rank adds the rows of its own tokens.
# The scale is that of the whole sequence's length. Noise is drawn for all tokens, by every rank: where the ranks'
# generators agree (no dropout), it is what one process would have drawn; where they do not, rows of different ranks are
# independent.


DRAWN_AT_ONCE = 2**26
"""Numbers. More are drawn piece by piece, so that no rank holds noise of the whole sequence: on CPUs these are the same
numbers, on GPUs others of the same kind."""


def spread_noise(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """A forward hook in place of transformers' `neftune_post_forward_hook`, which knows this rank's tokens alone."""
    if not module.training:
        return output
    sequence = current()
    alpha: Any = module.neftune_noise_alpha
    if sequence is None or not sequence.is_cut:  # the module was given whole sequences
        bound = _bound(alpha, output.shape[1], output.shape[2])
        return output + torch.zeros_like(output).uniform_(-bound, bound)
    return output + own_noise(output, alpha, sequence.layout, sequence.rank)


def own_noise(like: Tensor, alpha: float, layout: Layout, rank: int) -> Tensor:
    """This rank's rows of noise that is drawn for whole sequences, in the order in which transformers draws it."""
    rows, width, seq_len = like.shape[0], like.shape[2], layout.seq_len
    bound = _bound(alpha, seq_len, width)
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


def _bound(alpha: float, seq_len: int, width: int) -> float:
    return float(alpha / torch.sqrt(torch.tensor(seq_len * width)))  # rounded as transformers rounds it


def replace_noise(trainer: Any, known: Any) -> Any:
    """The handle of the hook that adds noise, after the Trainer's own was replaced. That one is made when training
    begins; when it ends, the Trainer removes whatever is there."""
    made = getattr(trainer, "neftune_hook_handle", None)
    if trainer.neftune_noise_alpha is None or made is None or made is known:
        return known
    model = trainer.accelerator.unwrap_model(trainer.model)
    embeddings = (text_model(model) or model).get_input_embeddings()
    made.remove()
    trainer.neftune_hook_handle = embeddings.register_forward_hook(spread_noise)
    return trainer.neftune_hook_handle


# Liger's kernels on a rank's part: layers that take every token by itself, and a loss that takes shifted labels. The
# Trainer puts them into the model when training begins, and some into the modeling file, for all models. A tiny copy of
# the model could not be proved on a CPU after that, so models are proved before: with the first batch, and with what a
# later one may have instead (no padding, one document).


def prove_before(trainer: Any) -> None:
    """Proves the model, which Liger has not changed yet, with batches like those to come."""
    if trainer._sharding["trust_model"]:
        return
    if trainer._kind in WHOLE:
        raise BatchError(
            "use_liger_kernel = True was asked for, with a trainer that makes its sequences itself: the model would be"
            " proved after Liger has changed it, which its tiny copy on a CPU cannot follow. Leave it out (TRL's fused"
            " head needs no logits), or compare with one process and pass trust_model=True."
        )
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    batch = next(iter(trainer.get_train_dataloader()))
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    model = text_model(trainer.model)
    for form in forms(batch):
        rules_of(model, read_batch(form), process_group(trainer._ranks.cp, "use_liger_kernel"), False)


def forms(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The batch, and what later ones of its kind may look like.

    >>> [each["attention_mask"][0].tolist() for each in forms({"attention_mask": np.array([[1, 1, 0]])})]
    [[1, 1, 0], [1, 1, 1]]
    """
    yield dict(batch)
    mask, places = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        yield {**batch, "attention_mask": mask * 0 + 1}
    if isinstance(mask, Tensor) and bool(mask.all()):
        padded = mask.clone()
        padded[0, -1] = 0
        yield {**batch, "attention_mask": padded}
    if isinstance(places, Tensor) and mask is None:
        yield {**batch, "position_ids": torch.arange(places.shape[-1], device=places.device).expand_as(places)}


def check_patched(model: nn.Module) -> None:
    """Refuses a loss of Liger's that would shift a rank's own labels."""
    inner = text_model(model)
    forward = vars(inner).get("forward") if inner is not None else None
    function = getattr(forward, "__func__", forward)
    if function is None or not (getattr(function, "__module__", None) or "").startswith("liger"):
        return
    if "shift_labels" not in inspect.getsource(function):
        raise BatchError(
            f"use_liger_kernel = True was asked for, and Liger's forward of {type(inner).__name__} takes no"
            f" shift_labels: it would shift a rank's own labels. Pass"
            f" liger_kernel_config={{'fused_linear_cross_entropy': False}}: Longspan computes the loss without logits,"
            f" too."
        )


# Losses that the Trainer computes from logits itself: smoothed labels, and a function of the user's. A rank has the
# logits of its own tokens, and the token after its last one is on another rank. So labels are shifted while the
# sequence is whole. A function that shifts labels by itself is handed rows in which its own shift is right: logits with
# one more row, and labels that begin one place later. With tokens 3 to 5 of a sequence, whose next tokens are d, e, f:
#
#     logits  l3  l4  l5   0        what it compares: l3 with d, l4 with e, l5 with f
#     labels -100  d   e   f


SHIFTS, IN_PLACE, WHOLE_LOSS = range(3)
TRIED = ([0, 1, 2, 9, 10, 11], [3, 4, 5, 6, 7, 8])
"""Two parts of the twelve tokens that a user's function is tried on."""


@dataclass(frozen=True)
class PartLabels:
    """Labels of the batch whose loss is being computed, and how many there are in all batches of the step."""

    batch: Mapping[str, Any]
    sequence: Any
    num_items: Any

    def of_part(self, shift: bool) -> Tensor:
        """This rank's labels: of the token after each one, or in place."""
        labels = shifted_labels(self.batch) if shift else self.batch.get("labels")
        if labels is None:
            raise BatchError(
                f"labels are needed in their places, but the batch has {', '.join(self.batch)}. Give 'labels', not"
                f" shifted."
            )
        return self.sequence.layout.shard(labels, self.sequence.rank, 1, IGNORE)


class PartSmoother:
    """The Trainer's label smoother, for a rank's part: shares add up to what it would say of whole sequences."""

    def __init__(self, smoother: Any, labels: Callable[[], PartLabels | None]) -> None:
        self.smoother, self.labels = smoother, labels

    def __call__(self, outputs: Any, labels: Any, shift_labels: bool = False, **given: Any) -> Tensor:
        now = self.labels()
        if now is None:  # whole sequences: the trainer was called with a batch that is no part
            return self.smoother(outputs, labels, shift_labels=shift_labels, **given)
        logits = outputs["logits"] if isinstance(outputs, dict) else outputs[0]
        share = torch.nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).to(wide(logits.dtype)),
            now.of_part(shift_labels).reshape(-1).to(logits.device),
            ignore_index=self.smoother.ignore_index,
            label_smoothing=self.smoother.epsilon,
            reduction="sum",
        )
        return share / torch.as_tensor(now.num_items, device=share.device).clamp(min=1)


class PartLoss:
    """A user's `compute_loss_func`, for a rank's part.

    It is tried once, on random logits of twelve tokens: what it says of two parts must add up to what it says of the
    whole, with its own shift of labels or without one. A function that does not add up (or that fails there, because it
    reads more than logits) is given whole sequences, which every rank then has to hold.
    """

    def __init__(self, function: Callable[..., Any], labels: Callable[[], PartLabels | None]) -> None:
        self.function, self.labels = function, labels
        self.way: int | None = None

    def __call__(self, outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        now = self.labels()
        if now is None:
            return self.function(outputs, labels, num_items_in_batch=num_items_in_batch)
        if self.way is None:
            self.way = _agreed(_way(self.function, outputs, num_items_in_batch), now.sequence.group)
        if self.way == WHOLE_LOSS:
            return self._of_whole(outputs, now, num_items_in_batch)
        logits, mine = outputs["logits"], now.of_part(self.way == SHIFTS)
        if self.way == SHIFTS:
            logits, mine = _one_later(logits, mine)
        return self.function(replaced(outputs, logits=logits), mine, num_items_in_batch=num_items_in_batch)

    def _of_whole(self, outputs: Any, now: PartLabels, num_items: Any) -> Tensor:
        """The loss of whole sequences as this rank's share: one part in as many of its value, and the gradient of this
        rank's tokens."""
        sequence = now.sequence
        slots = sequence.layout.num_slots(sequence.rank)
        whole = {name: _joined(value, slots, sequence) for name, value in outputs.items()}
        loss = self.function(type(outputs)(**whole), now.batch["labels"], num_items_in_batch=num_items)
        return Reported.apply(loss, loss.detach() / sequence.group.size())  # type: ignore[return-value]


def _joined(value: Any, slots: int, sequence: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(_joined(item, slots, sequence) for item in value)
    if isinstance(value, Tensor) and value.ndim >= 2 and value.shape[1] == slots:
        return gather_tokens(value, sequence.layout, sequence.group, 1, gradients="sum")
    return value


def _one_later(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in which logits[:, :-1] against labels[:, 1:] is each token against its label.

    >>> logits, labels = _one_later(torch.zeros(1, 3, 5), torch.tensor([[7, 8, 9]]))
    >>> tuple(logits.shape), labels.tolist()
    ((1, 4, 5), [[-100, 7, 8, 9]])
    """
    row = torch.zeros_like(logits[:, :1])
    return torch.cat((logits, row), dim=1), torch.nn.functional.pad(labels, (1, 0), value=IGNORE)


@torch.no_grad()
def _way(function: Callable[..., Any], outputs: Any, num_items: Any) -> int:
    """How a function may be given parts: with rows for its own shift, in place, or not at all."""
    logits, labels = _drawn(outputs["logits"])
    count = torch.full_like(num_items, 17) if isinstance(num_items, Tensor) else 17
    later = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE)

    def said(rows: Tensor, marks: Tensor) -> Tensor:
        return torch.as_tensor(function(type(outputs)(logits=rows), marks, num_items_in_batch=count)).double().cpu()

    try:
        whole = said(logits, labels)
        shifted = [said(*_one_later(logits[:, part], later[:, part])) for part in TRIED]
        in_place = [said(logits[:, part], labels[:, part]) for part in TRIED]
    except Exception:  # it reads what is not there: it may read it in whole sequences
        return WHOLE_LOSS
    for way, (first, second) in ((SHIFTS, shifted), (IN_PLACE, in_place)):
        if whole.ndim == 0 and bool((first + second - whole).abs() <= 1e-5 * whole.abs() + 1e-7):
            return way
    return WHOLE_LOSS


def _drawn(like: Tensor) -> tuple[Tensor, Tensor]:
    """Random logits of twelve tokens in two rows, and labels, of which a few are ignored."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 12, like.shape[-1], generator=draw)
    labels = torch.randint(0, like.shape[-1], (2, 12), generator=draw)
    labels[0, 4] = labels[1, 9] = IGNORE
    return logits.to(like.device), labels.to(like.device)


def _agreed(way: int, group: Any) -> int:
    """The way that all ranks found; whole sequences where they found different ones, since these need every rank."""
    ways = torch.tensor([way, -way], device=message_device(group))
    dist.all_reduce(ways, dist.ReduceOp.MAX, group=group)
    return way if int(ways[0]) == -int(ways[1]) else WHOLE_LOSS


# Numbers that TRL's trainers count over all ranks, where ranks of one sequence have the same samples.


def count_generations(trainer: Any) -> None:
    """Sets how many completions are generated at once: TRL's configuration has counted each rank of a sequence."""
    args = trainer.args
    if getattr(args, "generation_batch_size", None) is None:
        return
    samples = args.world_size // trainer.get_cp_size()
    args.generation_batch_size = args.per_device_train_batch_size * samples * args.steps_per_generation
    for name, rows, group in (
        ("generation_batch_size", args.generation_batch_size, args.num_generations),
        ("the batch of an evaluation", args.per_device_eval_batch_size * samples, _evaluated(args)),
    ):
        if group and rows % group:
            raise BatchError(
                f"{name} is {rows}: ranks of one sequence have the same samples, so {args.world_size} ranks count as"
                f" {samples}. That cannot be cut into groups of num_generations = {group}. Make the batch per device a"
                f" multiple, or use fewer ranks for one sequence."
            )


def _evaluated(args: Any) -> int | None:
    return None if args.eval_strategy == "no" else getattr(args, "num_generations_eval", None) or args.num_generations


def count_evaluated(inputs: Any, ranks: Ranks) -> Any:
    """Labels of a batch that TRL evaluates: each process takes the mean of its own batch, and what is divided by this
    number is multiplied by all ranks."""
    labels = shifted_labels(inputs)
    if labels is None:
        return None
    return (labels != IGNORE).sum() * (1 if ranks.dp is None else ranks.dp.size())


def count_tokens(trainer: Any, inputs: Any, before: int) -> None:
    """Sets how many tokens TRL's SFTTrainer has seen: it counted those of each rank's part, and rows as one."""
    seen = inputs["attention_mask"].sum() if inputs.get("attention_mask") is not None else inputs["input_ids"].shape[1]
    counts = trainer.accelerator.gather(torch.as_tensor(seen, device=trainer.args.device))
    trainer._total_train_tokens = before + int(each_once(counts, trainer._ranks).sum())
    trainer._metrics["train"]["num_tokens"] = [trainer._total_train_tokens]


# -- Packed documents of hybrid models on one process: kept apart there as they are over ranks -------------------------
# transformers alone lets convolutions and recurrences run on from one document to the next. So a packed batch of such a
# model is sharded over a group of one rank: the only part is the whole batch, in order, and labels stay what they were.


KEPT = (*LABELS, "num_items_in_batch")
"""Arguments of the loss, which on a group of one is the model's own."""


class Separator:
    """Turn packed batches of hybrid models into arguments with which documents do not see each other."""

    def __init__(self) -> None:
        self._is_hybrid: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._has_warned = False

    def apply(self, model: Any, batch: Mapping[str, Any], settings: dict[str, Any]) -> Mapping[str, Any]:
        """Return the model's arguments: `batch` itself where there is nothing to keep apart."""
        inner = text_model(model)
        if inner is None or all(batch.get(name) is None for name in ("position_ids", *PACKED)):
            return batch
        if inner not in self._is_hybrid:
            self._is_hybrid[inner] = is_hybrid(inner)
        if not self._is_hybrid[inner]:
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
