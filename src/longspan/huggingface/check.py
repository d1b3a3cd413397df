"""Check that a tiny copy of a model computes over simulated ranks what it computes on one device: loss and gradients.

For Llama and 43 tokens the copy has 2 layers and 32 features. It runs whole, then zigzag on 2 ranks, contiguous on 3
and striped on 2. The largest difference of any gradient is about 1e-16 of that gradient's largest entry.

`Rules` record how a model has to be treated. For example, RoBERTa counts positions from padding_idx + 1: with positions
from 0 its output differs, so positions are passed with that offset, and the result is compared again. A model that
differs with all rules is not supported: `first_use.py` refuses it, with the reason.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longspan import layouts
from longspan.errors import LongspanError
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import (
    BY_TOKEN,
    IGNORE,
    IMAGE_INPUTS,
    PACKED,
    BatchInfo,
    count_without_padding,
    is_between,
    read_batch,
    shifted_labels,
)
from longspan.huggingface.head import OutputKind, scale_of
from longspan.huggingface.hooks import accepts_kwarg, vision_encoders
from longspan.huggingface.mixers import check_mixers, is_hybrid, text_part, uses_attention
from longspan.huggingface.sharding import Sharding, build_arguments, register
from longspan.huggingface.structure import (
    Rules,
    check_structure,
    classes_of,
    find_unverified_module,
    num_layers,
    padding_id,
)
from longspan.huggingface.tiny import CannotShrinkError, build, special_tokens, tiny_config
from longspan.huggingface.user_hooks import hook_names, without_global_hooks
from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank
from longspan.verification.prover import (
    find_first_different,
    gradients,
    isolate_torch_state,
    perturb_parameters,
    run_on_ranks,
    shared_copy,
)


class Float64Mode(TorchFunctionMode):
    """Use float64 wherever code asks for float32, except in Longspan's own code.

    Models compute norms, softmax, rotary embeddings, losses and recurrences in float32 whatever their dtype. In float64
    errors are far above rounding.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if sys._getframe(1).f_globals.get("__name__", "").startswith("longspan."):
            return func(*args, **kwargs)
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)


# -- Forms of batches, and a small random batch of a form --------------------------------------------------------------


TOKENS = 43
"""A prime, longer than windows and chunks of a tiny copy, and no other size in it: a dim of this length is tokens."""
FIRST = 19
"""The first document of a packed row, or where padding begins or ends."""
LOSS_FLAGS = ("output_router_logits",)
SPAN_LABELS = ("start_positions", "end_positions")


@dataclass(frozen=True)
class Form:
    """The properties of a batch that matter, without its values."""

    padding: str = ""
    """"", "right", "left" where any row has padding in front, or "between" where any has it between real tokens."""
    packed: str = ""
    """"", or the argument that tells where documents begin: "position_ids", "cu_seq_lens_q", "seq_idx"."""
    positions: bool = False
    """Whether there are position_ids."""
    labels: bool = True
    embeds: bool = False
    others: tuple[str, ...] = ()
    """Further arguments of tokens, and flags that are set."""

    def __str__(self) -> str:
        kinds = [f"padded ({self.padding})"] * bool(self.padding) + ["packed"] * bool(self.packed)
        return ", ".join([*(kinds or ["plain"]), *self.others, *(["without labels"] * (not self.labels))])

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "others": list(self.others)}


def detect_form(info: BatchInfo, config: Any) -> Form:
    """Return the form of a user's batch."""
    batch = info.batch
    stated = next((name for name in PACKED if batch.get(name) is not None), "")
    flags = [n for n in LOSS_FLAGS if (getattr(config, n, False) if batch.get(n) is None else batch.get(n))]
    others = sorted([name for name in (*BY_TOKEN, *SPAN_LABELS, *IMAGE_INPUTS) if batch.get(name) is not None] + flags)
    return Form(
        padding=_padding(info.padding),
        packed=(stated or "position_ids") if info.documents is not None else "",
        positions=batch.get("position_ids") is not None,
        labels=any(batch.get(name) is not None for name in ("labels", "shift_labels")),
        embeds=batch.get("input_ids") is None,
        others=tuple(others),
    )


def _padding(real: NDArray[np.bool_] | None) -> str:
    """Return where rows have padding.

    >>> [_padding(np.array([row], dtype=bool)) for row in ([1, 1], [1, 0], [0, 1, 0], [0, 0], [1, 0, 1])]
    ['', 'right', 'left', 'left', 'between']
    """
    if real is None or real.all():
        return ""
    return "between" if is_between(real) else "right" if bool(real[:, 0].all()) else "left"


def random_batch(form: Form, model: Any, rows: int = 2) -> dict[str, Any]:
    """Return a random batch of this form."""
    draw = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    table = model.get_input_embeddings()
    sizes = [int(getattr(config, "vocab_size", 0) or 0), int(getattr(table, "num_embeddings", 0) or 0)]
    vocabulary = min((size for size in sizes if size), default=2)
    special = special_tokens(model.config)
    allowed = torch.tensor([n for n in range(vocabulary) if n not in special])
    ids = allowed[torch.randint(0, len(allowed), (rows, TOKENS), generator=draw)]
    padding_id = getattr(config, "pad_token_id", None)
    places = iter((7, FIRST + 4, 12, FIRST + 9))
    for name in ("eos_token_id", "bos_token_id"):  # twice each: a model may look for them
        value = getattr(config, name, None)
        number = value[0] if isinstance(value, list) and value else value
        if isinstance(number, int) and 0 <= number <= int(allowed.max()) and number != padding_id:
            ids[:, next(places)] = ids[:, next(places)] = number
    batch: dict[str, Any] = {"input_ids": ids}
    if form.embeds:
        batch = {"inputs_embeds": torch.randn(rows, TOKENS, table.weight.shape[1], generator=draw, dtype=torch.float64)}
    if form.padding:
        _pad(batch, form.padding, padding_id)
    # Documents and positions.
    if form.packed.startswith("cu_seq_lens"):
        ends = torch.tensor([0, FIRST, TOKENS], dtype=torch.int32)
        batch.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=TOKENS - FIRST, max_length_k=TOKENS - FIRST)
    if form.packed == "seq_idx":
        batch["seq_idx"] = (torch.arange(TOKENS) >= FIRST).int().expand(rows, -1)
    if form.packed or form.positions:
        inside = torch.cat((torch.arange(FIRST), torch.arange(TOKENS - FIRST)))
        batch["position_ids"] = (inside if form.packed else torch.arange(TOKENS)).expand(rows, -1).clone()
    if "pixel_values" in form.others:
        _draw_images(batch, form, model, draw)
    for name in form.others:
        if name in batch or name in IMAGE_INPUTS:
            continue
        if name in BY_TOKEN:
            kinds = max(1, int(getattr(config, "type_vocab_size", 2) or 2))
            batch[name] = torch.randint(0, min(2, kinds), (rows, TOKENS), generator=draw)
        else:
            batch[name] = torch.randint(0, FIRST, (rows,), generator=draw) if name in SPAN_LABELS else True
    return batch


def _draw_images(batch: dict[str, Any], form: Form, model: Any, draw: torch.Generator) -> None:
    """Put one image into the first row: 4 x 4 patches, or as many as the configuration has."""
    vision, place = model.config.vision_config, model.config.image_token_id
    patch = int(vision.patch_size)
    if "image_grid_thw" in form.others:
        depth = int(getattr(vision, "temporal_patch_size", 1)) * int(getattr(vision, "in_channels", 3)) * patch * patch
        batch["pixel_values"] = torch.randn(16, depth, generator=draw, dtype=torch.float64)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 4]])
        count = 16 // int(getattr(vision, "spatial_merge_size", 1)) ** 2
    else:
        side = int(getattr(vision, "image_size", 4 * patch))
        batch["pixel_values"] = torch.randn(1, 3, side, side, generator=draw, dtype=torch.float64)
        count = int(getattr(model.config, "mm_tokens_per_image", (side // patch) ** 2))
    batch["input_ids"][0, FIRST : FIRST + count] = place
    for name in BY_TOKEN:
        if name in form.others:
            batch[name] = (batch["input_ids"] == place).long()


def _pad(batch: dict[str, Any], where: str, padding_id: Any) -> None:
    rows = next(iter(batch.values())).shape[0]
    mask = torch.ones(rows, TOKENS, dtype=torch.long)
    mask[0, FIRST + 11 :] = 0  # one row has none
    if where != "right":
        mask = mask.flip(1)
        mask[0, -4:] = 0  # rows with padding in front may have it at the end, too
    if where == "between":
        mask[0, FIRST : FIRST + 5] = 0
    batch["attention_mask"] = mask
    if "input_ids" in batch and isinstance(padding_id, int) and padding_id >= 0:
        batch["input_ids"] = torch.where(mask.bool(), batch["input_ids"], padding_id)


def with_labels(
    batch: dict[str, Any], logits: Tensor | None, seed: int = 1, at_padding: bool = False
) -> dict[str, Any]:
    """Return the batch with labels for logits of this shape: one per token (also at padding, if set), or per row."""
    if logits is None or not logits.is_floating_point():
        return batch
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, logits.shape[-1], logits.shape[:-1], generator=draw)
    if logits.ndim == 2 and logits.shape[-1] == 1:
        return {**batch, "labels": torch.randn(logits.shape[0], generator=draw, dtype=logits.dtype)}
    if logits.ndim == 3:
        labels[torch.rand(labels.shape, generator=draw) < 0.2] = IGNORE
        mask = batch.get("attention_mask")
        if mask is not None and not at_padding:
            before = torch.cat((mask[:, :1] * 0, mask[:, :-1]), dim=1)
            labels = labels.masked_fill((mask == 0) | (before == 0), IGNORE)
    return {**batch, "labels": labels}


# -- Trials ------------------------------------------------------------------------------------------------------------


LAYOUTS: tuple[tuple[str, int], ...] = (("zigzag", 2), ("contiguous", 3), ("striped", 2))
"""Layouts that a model is checked with, by name and number of ranks."""


@dataclass(frozen=True, eq=False)
class RunResult:
    """The loss, logits or hidden states of all tokens (unless only the loss was computed), and gradients by name."""

    loss: float | None
    out: Tensor | None
    grads: dict[str, Tensor]
    calls: int = 0
    """How often attention was called over ranks, on rank 0."""


@dataclass(eq=False)
class Trial:
    """A model in float64, and a batch for it."""

    model: Any
    batch: dict[str, Any]
    is_wide: bool = True
    """Whether parts that the model computes in float32 are computed in float64 too."""
    hides_padding: bool = True
    """Whether outputs at padding are left out of comparisons."""

    def __post_init__(self) -> None:
        self.template = shared_copy(self.model)
        """A copy that never runs; see `run_on_ranks`."""

    @property
    def length(self) -> int:
        tokens = self.batch.get("input_ids")
        return int((self.batch["inputs_embeds"] if tokens is None else tokens).shape[1])

    def precision(self) -> AbstractContextManager[Any]:
        return Float64Mode() if self.is_wide else nullcontext()

    def one_device_batch(self) -> dict[str, Any]:
        """Return the batch for a run on one device.

        Recurrences of transformers raise an error if they get `cu_seq_lens` or `seq_idx` without the packages that
        they are for. Over ranks they never get them, and `run_documents` runs documents one by one.
        """
        left_out = PACKED if is_hybrid(self.model) else ()
        return {name: value for name, value in self.batch.items() if name not in left_out}

    @torch.no_grad()
    def forward(self, **changes: Any) -> Any:
        """Return the output on one device."""
        with self.precision():
            return self.model(**{**self.one_device_batch(), **changes})

    def run_whole(self, output_kind: OutputKind = "logits") -> RunResult:
        """Run on one device, with gradients."""
        with self.precision():
            output = self.model(**self.one_device_batch())
        return self._result(getattr(output, "loss", None), output_tensor(output) if output_kind == "logits" else None)

    def run_documents(self, edges: list[int], output_kind: OutputKind = "logits") -> RunResult:
        """Run on one device, one document after another.

        For models with recurrences: transformers lets these continue from one document to the next, Longspan does not.
        """
        by_token = {
            name: value
            for name, value in self.one_device_batch().items()
            if isinstance(value, Tensor) and value.shape[1:2] == (self.length,) and name != "labels"
        }
        with self.precision():
            parts = [
                output_tensor(self.model(**{name: value[:, start:stop] for name, value in by_token.items()}))
                for start, stop in itertools.pairwise(edges)
            ]
        out, labels = torch.cat(parts, dim=1), shifted_labels(self.batch)
        if labels is None:
            return self._result(None, out)
        loss = torch.nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
        return self._result(loss, out if output_kind == "logits" else None)

    def on_rank(
        self, rules: Rules, layout: Layout, output_kind: OutputKind = "logits"
    ) -> Callable[[Any, SimulatedRank], Any]:
        """Return the step of one rank: loss, output, and the number of attention calls."""

        def run(model: Any, rank: SimulatedRank) -> tuple[Any, Any, int]:
            part = build_arguments(
                model, read_batch(self.batch), rank, rules, Sharding(layout, output_kind=output_kind)
            )
            with self.precision():
                output = model(**part)
            out = output_tensor(output) if output_kind == "logits" else None
            return getattr(output, "loss", None), out, part[NAME].calls

        return run

    def run_split(self, rules: Rules, name: str, world_size: int, output_kind: OutputKind = "logits") -> RunResult:
        """Run over simulated ranks."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        results = run_on_ranks(self.template, layout, self.on_rank(rules, layout, output_kind))
        losses, outs, calls = zip(*results, strict=True)
        loss: Any = None if losses[0] is None else sum(losses)
        out: Any = None
        if output_kind == "logits":  # after a gather every rank has the whole output
            out = layout.unshard(outs, 1) if rules.joined is None else sum(outs) / world_size
        return self._result(loss, out, calls[0])

    def first_different(self, rules: Rules, name: str, world_size: int) -> str | None:
        """Return name and class of the first module that computes something else over ranks, if one can be named."""
        layout: Layout = getattr(layouts, name)(self.length, world_size)
        return find_first_different(self.model, self.template, layout, self.forward, self.on_rank(rules, layout))

    def _result(self, loss: Tensor | None, out: Tensor | None, calls: int = 0) -> RunResult:
        """Return the result with gradients of the loss and of a random projection of the output."""
        total = loss
        if out is not None:
            real = self.batch.get("attention_mask")
            if self.hides_padding and real is not None and out.ndim == 3 and out.shape[1] == self.length:
                out = torch.where(real.bool()[:, :, None], out, 0)
            weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
            total = (out.double() * weights / weights.norm()).sum() + (0 if loss is None else loss)
            out = out.detach()
        assert total is not None
        return RunResult(None if loss is None else float(loss.detach()), out, gradients(self.model, total)[0], calls)


def output_tensor(output: Any) -> Tensor:
    """Return a model's logits, or hidden states."""
    for name in ("logits", "last_hidden_state", "start_logits", "prediction_logits"):
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise ValueError(f"{type(output).__name__} has neither logits nor last_hidden_state")


@contextmanager
def attention_implementation(model: Any, name: str) -> Iterator[None]:
    """Use another attention inside."""
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


# -- The result of a check ---------------------------------------------------------------------------------------------


LIMIT = 1e-9
"""How far loss, outputs and gradients may be off, relative to their largest entry."""
ROUNDINGS, MOST = 16, 1e-4
"""For models that do not run in float64 throughout: this many times the effect of one rounding of the parameters to
float32 is allowed, but never more than `MOST`."""
CLOSE = 1e-6
"""Relative difference below which two outputs are the same when rules are detected."""
_ADVICE = (
    "Compare it with one device yourself (longspan.verification.verify_model), and pass trust_model=True if it is right"
)


@dataclass(frozen=True)
class Proof:
    """The result of a check."""

    model: str
    form: str
    ok: bool
    error: float
    """The largest difference, relative to a tensor's own largest entry."""
    reason: str = ""
    """Why it is not ok: what differs first, and what to do."""
    rules: Rules = field(default_factory=Rules)
    seconds: float = 0.0
    """Processor time of the check."""
    classes: tuple[str, ...] = ()
    """Full names of the classes of all modules that were checked, and their hooks as in `hook_names`."""
    was_compared: bool = True
    """Whether the result is that of a comparison or of a refusal by name; False where something failed."""

    def __str__(self) -> str:
        if self.ok:
            runs = ", ".join(f"{name} on {size}" for name, size in LAYOUTS)
            return f"{self.model}, {self.form}: exact, {self.error:.0e} ({runs} simulated ranks; {self.seconds:.1f} s)"
        return f"{self.model}, {self.form}: refused: {self.reason}"


class _RefusedError(Exception):
    """The model is not exact, or not supported; the message is the reason."""


class _FailedError(_RefusedError):
    """Nothing could be compared; it may work at another time or on another machine."""


def prove(kind: type, config: Any, form: Form = Form()) -> Proof:
    """Check models of this class and configuration on batches of this form. Takes seconds on the CPU, no weights."""
    began = time.process_time()
    register()
    error, reason, rules, classes, was_compared = float("inf"), "", Rules(), (), True
    try:
        with _default_state():
            trial = _start(kind, config, form)
            classes = tuple(sorted({*classes_of(trial.model), *hook_names(trial.model)}))
            error, rules = _compare(trial, form)
            # Modules that only larger models have are not in the copy.
            full = without_weights(kind, config)
            other = None if full is None else find_unverified_module(full, classes, vision_encoders(full))
            if other is not None:
                raise _RefusedError(f"as it is configured it has {other}, which its tiny copy has not. {_ADVICE}.")
    except _RefusedError as refusal:
        reason, was_compared = str(refusal), not isinstance(refusal, _FailedError)
    seconds = time.process_time() - began
    return Proof(kind.__name__, str(form), not reason, error, reason, rules, seconds, classes, was_compared)


def without_weights(kind: type, config: Any) -> Any:
    """Return the model as it is configured, on the meta device, or None if it cannot be built there."""
    try:
        with _default_state(), torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception:
        return None


@contextmanager
def _default_state() -> Iterator[None]:
    """Ignore the caller's grad mode, autocast, default device, random state, warnings and global hooks."""
    with warnings.catch_warnings(), isolate_torch_state("cpu"), torch.device("cpu"), without_global_hooks():
        warnings.simplefilter("ignore")
        yield


def _start(kind: type, config: Any, form: Form) -> Trial:
    """Return the tiny copy, with a batch on which it runs."""
    try:
        model: Any = build(kind, tiny_config(config))
        model.set_attn_implementation(NAME)
    except (CannotShrinkError, ValueError, KeyError) as error:
        raise _FailedError(f"no tiny copy of it could be built ({_line(error)}). {_ADVICE}.") from error
    mixes_tokens = is_hybrid(model) or uses_attention(model)
    if model.config.get_text_config()._attn_implementation != NAME or not mixes_tokens:
        raise _RefusedError(
            "it computes attention in code of its own, where transformers lets no other attention in. Use one device."
        )
    model.config.use_cache = False
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):  # heads have some that no configuration names
            module.p = 0.0
    trial = Trial(model, {})
    try:
        check_mixers(model)
        check_structure(model, model.config.get_text_config())
        output = _first_run(trial, form)
        if form.labels:
            trial.batch = with_labels(trial.batch, _logits(output))
            trial.forward()
    except LongspanError as error:
        raise _RefusedError(_line(error)) from error
    except Exception as error:
        raise _FailedError(f"its tiny copy does not run on one device ({_line(error)}). {_ADVICE}.") from error
    return trial


def _first_run(trial: Trial, form: Form) -> Any:
    """Return the output, in float64 throughout and of two rows where that is possible."""
    rows = (1,) if form.packed.startswith("cu_seq_lens") else (2,) if form.padding else (2, 1)
    attempts = list(itertools.product((True, False), rows))
    for attempt in attempts:
        trial.is_wide, num_rows = attempt
        trial.batch = random_batch(form, trial.model, num_rows)
        try:
            return trial.forward()
        except Exception as error:
            if isinstance(error, LongspanError) or attempt == attempts[-1]:
                raise
    return None


def _logits(output: Any) -> Tensor | None:
    logits = getattr(output, "logits", None)
    return logits if isinstance(logits, Tensor) else None


def _line(error: BaseException) -> str:
    if isinstance(error, LongspanError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"


# -- The comparison ----------------------------------------------------------------------------------------------------


def _compare(trial: Trial, form: Form) -> tuple[float, Rules]:
    """Return the largest difference, and the rules by which the model was sharded."""
    try:
        rules = detect_rules(trial)
        if form.packed and rules.joined is not None and is_hybrid(trial.model):
            raise _RefusedError(
                "its head takes one answer from a row, and this row has several documents, which its recurrences do not"
                " separate on one device. Give every document a row."
            )
        truth, again = _truth(trial, form), _truth(trial, form)
    except LongspanError as error:
        raise _RefusedError(_line(error)) from error
    if not form.packed and form.padding in ("", "right"):  # rows that see nothing make NaN of eager attention
        _check_eager(trial, truth)
    if not _difference(again, truth)[0] <= LIMIT:
        raise _FailedError(
            "on one device already, it gives other numbers when it runs again, so nothing can be compared: it keeps"
            " state from one run to the next, or draws random numbers."
        )
    worst = 0.0
    for name, world_size in LAYOUTS:
        error, calls, rules = _check_split(trial, truth, rules, name, world_size)
        worst = max(worst, error)
        wanted = num_layers(trial.model, trial.model.config.get_text_config())
        rules = replace(rules, layers="all" if calls >= wanted else "some" if calls else "none")
    exact_at_padding = _is_exact_at_padding(trial, rules)
    rules = replace(_without_logits(trial, rules, form), exact_at_padding=exact_at_padding)
    for model in (trial.model, trial.template):  # layers may do something else in evaluation
        model.eval()
    _check_split(trial, _truth(trial, form), rules, *LAYOUTS[0], prefix="in evaluation, ")
    return worst, rules


def _check_split(
    trial: Trial, truth: RunResult, rules: Rules, name: str, world_size: int, prefix: str = ""
) -> tuple[float, int, Rules]:
    """Run over ranks and return the difference, the number of attention calls, and the rules that worked."""
    rules = replace(rules, layers="some")
    try:
        result = trial.run_split(rules, name, world_size)
    except LongspanError as error:
        raise _RefusedError(_line(error)) from error
    except Exception as error:
        if isinstance(error, TypeError) and NAME in str(error) and rules.handed == "keywords":
            # The model cannot take the keyword, so its masks carry the sequence.
            return _check_split(trial, truth, replace(rules, handed="mask"), name, world_size, prefix)
        first = trial.first_different(rules, name, world_size)
        where = "" if first is None else f" The first module that computes something else is {first}."
        raise _FailedError(
            f"its code fails on a part of a sequence ({_line(error)}).{where} Use one device."
        ) from error
    error, where = _difference(result, truth)
    if _is_right(trial, error):
        return error, result.calls, rules
    text = f"over {world_size} ranks ({name}), {where} is off by {error:.1e} from one device."
    first = trial.first_different(rules, name, world_size)
    if first is None:
        raise _RefusedError(
            f"{prefix}{text} All modules compute the same in forward: the difference comes from the loss, from code"
            f" around modules, or from a backward pass of the model's own."
        )
    raise _RefusedError(
        f"{prefix}{text} The first that computes something else is {first}: it mixes or counts tokens in a way that"
        f" Longspan does not see. Use one device, or longspan.training.relayout around that layer."
    )


def _truth(trial: Trial, form: Form, output_kind: OutputKind = "logits") -> RunResult:
    """Run on one device, documents separately."""
    if form.packed and is_hybrid(trial.model):
        return trial.run_documents([0, FIRST, TOKENS], output_kind)
    return trial.run_whole(output_kind)


def _is_right(trial: Trial, error: float) -> bool:
    if error <= LIMIT or trial.is_wide:
        return error <= LIMIT
    with perturb_parameters(trial.model, 2.0**-24, 3):  # models compute parts in float32
        rounded = trial.run_whole()
    return error <= min(MOST, ROUNDINGS * _difference(rounded, trial.run_whole())[0])


def _difference(result: RunResult, truth: RunResult) -> tuple[float, str]:
    """Return the largest difference, relative to a tensor's own largest entry, and where it is."""
    pairs = {}
    if result.out is not None and truth.out is not None:
        pairs["its output"] = result.out, truth.out
    if truth.loss is not None:
        if result.loss is None:
            return float("inf"), "its loss, which is missing,"
        pairs["its loss"] = torch.tensor(result.loss), torch.tensor(truth.loss)
    pairs |= {f"the gradient of {name}": (result.grads[name], grad) for name, grad in truth.grads.items()}
    largest = max(float(grad.abs().max()) for grad in truth.grads.values())
    worst, where = 0.0, ""
    for name, (mine, right) in pairs.items():
        if mine.shape != right.shape:
            return float("inf"), f"{name}, of shape {tuple(mine.shape)} instead of {tuple(right.shape)},"
        scale = max(float(right.abs().max()), 1e-6 * largest if "gradient" in name else 0.0, 1e-30)
        error = float((mine.double() - right.double()).abs().max()) / scale
        if not error <= worst:
            worst, where = error, name
    return worst, where


def _check_eager(trial: Trial, truth: RunResult) -> None:
    """Compare attention by Longspan on one device with that of transformers."""
    try:
        with attention_implementation(trial.model, "eager"):
            eager = trial.run_whole()
    except Exception:  # some have no eager attention
        return
    error, where = _difference(truth, eager)
    if not error <= (LIMIT if trial.is_wide else MOST):
        raise _RefusedError(
            f"on one device already, {where} with attn_implementation='longspan' is off by {error:.1e} from 'eager':"
            f" its attention layers use an option that does not reach Longspan. Use another attn_implementation."
        )


def _is_exact_at_padding(trial: Trial, rules: Rules) -> bool:
    """Whether outputs at padding, and a loss with labels there, are the same over ranks.

    Collators put -100 at padding alone, so that the last padding token before a text predicts its first token.
    """
    if (
        "attention_mask" not in trial.batch
        or rules.loss not in ("own", "shifted", "in place")
        or is_hybrid(trial.model)
    ):
        return True
    padded = copy.copy(trial)
    padded.batch, padded.hides_padding = with_labels(trial.batch, _logits(trial.forward()), at_padding=True), False
    try:
        result = padded.run_split(rules, *LAYOUTS[0])
    except Exception:
        return False
    return _is_right(padded, _difference(result, padded.run_whole())[0])


# -- Rules, detected by running the tiny copy on one device in several ways --------------------------------------------


def detect_rules(trial: Trial) -> Rules:
    """Return the rules by which to shard a model; they are checked afterwards."""
    model, loss = trial.model, _detect_loss(trial)
    obeys_count = loss == "own"
    if loss in ("shifted", "in place") and accepts_kwarg(
        type(model), "num_items_in_batch"
    ):  # BERT takes and ignores it
        obeys_count = not is_close(trial.forward(num_items_in_batch=10**6).loss, trial.forward().loss)
    rules = Rules(positions=_detect_positions(trial), loss=loss, obeys_count=obeys_count)
    # Modules at which whole tensors are sharded and gathered again.
    has_images, is_pooled = (
        _has_images(trial),
        loss == "pooled" or getattr(model.base_model, "pooler", None) is not None,
    )
    if not (is_pooled or has_images):
        return rules
    part = text_part(model)
    text = part if has_images and part is not model else model.base_model
    body = joined = _name_of(model, text)
    pooler, encoder = getattr(text, "pooler", None), getattr(text, "encoder", None)
    if pooler is not None:
        joined = _name_of(model, encoder if isinstance(encoder, nn.Module) else pooler)
    return replace(rules, body=body, joined=joined if is_pooled else None, cuts=_find_cuts(trial, body))


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same up to rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))


def _has_images(trial: Trial) -> bool:
    return any(trial.batch.get(name) is not None for name in IMAGE_INPUTS)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _detect_positions(trial: Trial) -> Any:
    """Return how the model counts positions without position_ids."""
    names = [inspect.signature(part.forward).parameters for part in (trial.model, trial.model.base_model)]
    if not any("position_ids" in parameters for parameters in names) or not accepts_kwarg(
        type(trial.model), "position_ids"
    ):
        return "none"
    if trial.batch.get("position_ids") is not None or _has_images(trial):
        return "count"  # with images, positions are the model's own, and reach the backbone whole
    info = read_batch(trial.batch)
    truth = output_tensor(trial.forward())
    positions = {"count": torch.arange(info.seq_len).expand(info.rows, -1)}
    for rule in ("after padding", "real tokens"):
        positions[rule] = count_without_padding(info, rule, padding_id(trial.model))
    outputs: dict[str, Tensor] = {}
    for rule, position_ids in positions.items():
        try:
            outputs[rule] = output_tensor(trial.forward(position_ids=position_ids))
        except (IndexError, RuntimeError):  # positions beyond the model's table
            continue
        if is_close(outputs[rule], truth):
            return rule
    if info.padding is not None:  # no rule is right at padding, but one may be at all real tokens
        real = torch.from_numpy(info.padding)
        is_by_token = truth.ndim == 3 and truth.shape[:2] == real.shape
        for rule, out in outputs.items():
            if is_by_token and out.shape == truth.shape and is_close(out[real], truth[real]):
                return rule
    raise _RefusedError(
        "positions: without position_ids the model counts positions in a way of its own. Put position_ids (batch,"
        " tokens) into the batch, as the model makes them of whole sequences."
    )


def _detect_loss(trial: Trial) -> Any:
    """Return how the model's loss comes from its logits and labels."""
    labels, output = trial.batch.get("labels"), trial.forward()
    out, loss = output_tensor(output), getattr(output, "loss", None)
    if out.ndim != 3 or out.shape[1] != TOKENS or hasattr(output, "start_logits"):
        return "pooled"
    if labels is None or loss is None:
        return "none" if loss is None else "own"
    shifted = shifted_labels(trial.batch)
    assert shifted is not None
    if _takes_shifted(trial, shifted, loss):
        return "own"
    for rule, wanted in (("shifted", shifted), ("in place", labels)):
        mean = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), wanted.reshape(-1))
        if is_close(mean.double(), loss.double()):
            return rule
    raise _RefusedError(
        "loss: the model's loss is neither the cross-entropy of labels one place earlier nor of labels in place,"
        " divided by the number of labels. Take labels out of the batch, and compute your loss of this rank's logits"
        " with longspan.training.token_loss."
    )


def _takes_shifted(trial: Trial, shifted: Tensor, loss: Tensor) -> bool:
    """Whether the model's loss takes labels that are shifted already, and divides by num_items_in_batch."""
    if not (
        accepts_kwarg(type(trial.model), "shift_labels") and accepts_kwarg(type(trial.model), "num_items_in_batch")
    ):
        return False
    count, inputs = (shifted != IGNORE).sum(), {"labels": shifted[:, :0], "shift_labels": shifted}
    try:
        own, half = (trial.forward(**inputs, num_items_in_batch=number).loss for number in (count, 2 * count))
        plain = trial.forward(num_items_in_batch=2 * count).loss
    except (RuntimeError, ValueError, IndexError):  # a loss that shifts itself finds no labels
        return False
    return is_close(own, loss) and is_close(half, plain) and not is_close(half, own)


def _find_cuts(trial: Trial, body: str) -> tuple[tuple[str, int, int], ...]:
    """Return the token dimension of every input of the backbone."""
    cuts: dict[tuple[str, int], int] = {}
    module = trial.model.get_submodule(body)
    names = list(inspect.signature(module.forward).parameters)

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            dims = [d for d, size in enumerate(getattr(value, "shape", ())) if size == TOKENS]
            if isinstance(value, Tensor) and dims:
                cuts[name, value.ndim] = dims[0]

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trial.forward()
    finally:
        handle.remove()
    return tuple(sorted((name, ndim, dim) for (name, ndim), dim in cuts.items()))


def _without_logits(trial: Trial, rules: Rules, form: Form) -> Rules:
    """Add the head whose logits need not be computed if loss and gradients are the same without, or the reason why not.

    The model may scale and cap logits after the head, by values of its configuration.
    """
    if rules.loss not in ("own", "shifted", "in place") or rules.joined is not None:
        return replace(rules, head_reason="its loss is not one of tokens")
    head, config = trial.model.get_output_embeddings(), trial.model.config.get_text_config()
    if type(head) is not nn.Linear:
        return replace(rules, head_reason="its head is no plain linear layer")
    outputs: list[Any] = []
    handle = head.register_forward_hook(lambda _module, _args, output: outputs.append(output))  # type: ignore[arg-type]
    try:
        logits = output_tensor(trial.forward())
    finally:
        handle.remove()
    # Values that have to do with logits. Others may depend on a model's size, and then a tiny copy has another.
    numbers = {n: v for n, v in vars(config).items() if isinstance(v, int | float) and not isinstance(v, bool) and v}
    named = [name for name in numbers if "logit" in name or "head_multiplier" in name]
    caps = ["", *(name for name in named if "cap" in name)]
    scales = ["", *(how + name for name in named if "cap" not in name for how in ("", "1 / "))]
    for scale, cap in itertools.product(scales, caps) if len(outputs) == 1 else ():
        scaled = outputs[0] * scale_of(config, scale)
        scaled = scaled if not cap else getattr(config, cap) * torch.tanh(scaled / getattr(config, cap))
        if is_close(scaled, logits):
            with_head = replace(rules, head=_name_of(trial.model, head), scale=scale, soft_cap=cap)
            break
    else:
        return replace(rules, head_reason="it does something else to logits than to scale and to cap them")
    try:
        result = trial.run_split(with_head, *LAYOUTS[0], output_kind="loss")
    except Exception as error:
        return replace(rules, head_reason=f"the model's code fails without them ({_line(error)})")
    error, where = _difference(result, _truth(trial, form, "loss"))
    return with_head if _is_right(trial, error) else replace(rules, head_reason=f"without them {where} is another one")
