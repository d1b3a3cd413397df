"""Check that a tiny copy of a model computes over simulated ranks what it computes on one device: loss and gradients.

For Llama and 43 tokens the copy has 2 layers and 32 features. It runs whole, then zigzag on 2 ranks, contiguous on 3
and striped on 2. The largest difference of any gradient is about 1e-16 of that gradient's largest entry.

`Rules` record how a model has to be treated. For example, RoBERTa counts positions from padding_idx + 1: with positions
from 0 its output differs, so positions are passed with that offset, and the result is compared again.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from longspan import layouts
from longspan.errors import LongspanError
from longspan.huggingface.attention import NAME
from longspan.huggingface.batches import IGNORE, SEEN, counted_without_padding, read_batch, shifted_labels
from longspan.huggingface.head import LOGITS, LOSS, scale_of
from longspan.huggingface.hooks import takes, towers
from longspan.huggingface.mixers import check_mixers, is_hybrid, mixes, text_part
from longspan.huggingface.sharding import register
from longspan.huggingface.structure import (
    AFTER_PADDING,
    COUNT,
    IN_PLACE,
    KEYWORDS,
    MASK,
    NO_LOSS,
    NO_POSITIONS,
    OWN,
    POOLED,
    REAL,
    SHIFTED,
    Rules,
    check_structure,
    classes_of,
    num_layers,
    padding_id,
    put_in,
)
from longspan.huggingface.tiny import CannotShrinkError, build, tiny_config
from longspan.huggingface.trial import (
    FIRST,
    LAYOUTS,
    TOKENS,
    Form,
    Ran,
    Trial,
    drawn,
    implementation,
    result,
    with_labels,
)
from longspan.huggingface.user_hooks import hook_names, without_global_hooks
from longspan.testing.modules import SeenModules, first_different, titled

# Which module is the first that computes something else over ranks: every module's outputs and inputs, both ways.


def first_module(trial: Trial, rules: Rules, name: str, world_size: int) -> str | None:
    """The name and class of the module, or None where all that can be compared is the same."""
    whole, parts = SeenModules(), [SeenModules() for _ in range(world_size)]
    handles = whole.attach(trial.model)
    try:
        trial.forward()
    finally:
        for handle in handles:
            handle.remove()
    with suppress(Exception):  # it may be the reason for asking: what was seen until then is compared
        trial.split(rules, name, world_size, lambda model, rank: parts[rank].attach(model))
    layout = getattr(layouts, name)(trial.length, world_size)
    first = first_different(whole, parts, layout)
    return None if first is None else titled(trial.model, first)


# How a model wants to be treated over ranks, found by running its tiny copy on one device in several ways.


CLOSE = 1e-6


class UnknownRuleError(ValueError):
    """The model does something in a way of its own; `what` is one word for it."""

    def __init__(self, what: str, message: str) -> None:
        self.what = what
        super().__init__(message)


def rules_found(trial: Trial) -> Rules:
    """The rules under which a model is to be split; they are tried afterwards."""
    loss = _loss(trial)
    rules = Rules(positions=_positions(trial), loss=loss, obeys_count=_obeys_count(trial, loss))
    body, joined = _body(trial, rules.loss)
    if body is None:
        return rules
    return replace(rules, body=body, joined=joined, cuts=_cuts(trial, body))


def is_close(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same but for rounding."""
    return a.shape == b.shape and bool((a - b).abs().max() <= CLOSE * max(float(b.abs().max()), 1e-30))


# -- positions ---------------------------------------------------------------------------------------------------------


def _positions(trial: Trial) -> str:
    """How the model counts where nobody tells it."""
    names = [inspect.signature(part.forward).parameters for part in (trial.model, trial.model.base_model)]
    if not any("position_ids" in parameters for parameters in names) or not takes(type(trial.model), "position_ids"):
        return NO_POSITIONS
    if trial.batch.get("position_ids") is not None or _has_images(trial):
        return COUNT  # with images, positions are the model's own, and reach the layers' door whole
    read = read_batch(trial.batch)
    truth = result(trial.forward())
    ways = {COUNT: torch.arange(read.seq_len).expand(read.rows, -1)}
    for rule in (AFTER_PADDING, REAL):
        ways[rule] = counted_without_padding(read, rule, padding_id(trial.model))
    outputs: dict[str, Tensor] = {}
    for rule, position_ids in ways.items():
        try:
            outputs[rule] = result(trial.forward(position_ids=position_ids))
        except (IndexError, RuntimeError):  # positions beyond the model's table
            continue
        if is_close(outputs[rule], truth):
            return rule
    real = None if read.padding is None else torch.from_numpy(read.padding)
    for rule, out in outputs.items():  # no rule is right at padding, but one may be at all real tokens
        if real is not None and is_close(_by_token(out, real), _by_token(truth, real)):
            return rule
    raise UnknownRuleError(
        "positions",
        "without position_ids the model counts positions in a way of its own. Put position_ids (batch, tokens) into the"
        " batch, as the model makes them of whole sequences",
    )


def _by_token(out: Tensor, real: Tensor) -> Tensor:
    return out[real] if out.ndim == 3 and out.shape[:2] == real.shape else out


# -- losses ------------------------------------------------------------------------------------------------------------


def _loss(trial: Trial) -> str:
    """How the model's loss comes from its logits and labels."""
    labels = trial.batch.get("labels")
    output = trial.forward()
    out = result(output)
    if out.ndim != 3 or out.shape[1] != TOKENS or hasattr(output, "start_logits"):
        return POOLED
    loss = getattr(output, "loss", None)
    if labels is None or loss is None:
        return NO_LOSS if loss is None else OWN
    shifted = shifted_labels(trial.batch)
    assert shifted is not None
    if _takes_shifted(trial, shifted, loss):
        return OWN
    for rule, wanted in ((SHIFTED, shifted), (IN_PLACE, labels)):
        mean = torch.nn.functional.cross_entropy(out.reshape(-1, out.shape[-1]), wanted.reshape(-1))
        if is_close(mean.double(), loss.double()):
            return rule
    raise UnknownRuleError(
        "loss",
        "the model's loss is neither the cross-entropy of labels one place earlier nor of labels in place, divided by"
        " the number of labels. Take labels out of the batch, and compute your loss of this rank's logits with"
        " longspan.training.token_loss",
    )


def _takes_shifted(trial: Trial, shifted: Tensor, loss: Tensor) -> bool:
    """Whether the model's own loss takes labels that are shifted already, and is divided by the number it is given."""
    if not (takes(type(trial.model), "shift_labels") and takes(type(trial.model), "num_items_in_batch")):
        return False
    count, given = (shifted != IGNORE).sum(), {"labels": shifted[:, :0], "shift_labels": shifted}
    try:
        own, half = (trial.forward(**given, num_items_in_batch=number).loss for number in (count, 2 * count))
        plain = trial.forward(num_items_in_batch=2 * count).loss
    except (RuntimeError, ValueError, IndexError):  # a loss that shifts itself finds no labels
        return False
    return is_close(own, loss) and is_close(half, plain) and not is_close(half, own)


def _obeys_count(trial: Trial, loss: str) -> bool:
    """Whether the loss is divided by num_items_in_batch where that is passed. Many models take and ignore it (BERT)."""
    if loss not in (SHIFTED, IN_PLACE) or not takes(type(trial.model), "num_items_in_batch"):
        return loss == OWN
    return not is_close(trial.forward(num_items_in_batch=10**6).loss, trial.forward().loss)


# -- the head ----------------------------------------------------------------------------------------------------------


def with_head(trial: Trial, rules: Rules) -> Rules:
    """The rules, with the head whose logits need not be computed and what the model does to these, or with the reason
    why they are needed."""
    if rules.loss not in (OWN, SHIFTED, IN_PLACE) or rules.joined is not None:
        return replace(rules, head_reason="its loss is not one of tokens")
    head = trial.model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return replace(rules, head_reason="its head is no plain linear layer")
    seen: list[Any] = []
    handle = head.register_forward_hook(lambda _module, _args, output: seen.append(output))  # type: ignore[arg-type]
    try:
        logits = result(trial.forward())
    finally:
        handle.remove()
    if len(seen) == 1:
        for scale, cap in _known_ends(trial.model.config.get_text_config()):
            if is_close(_end_of(seen[0], trial.model.config.get_text_config(), scale, cap), logits):
                return replace(rules, head=_name_of(trial.model, head), scale=scale, soft_cap=cap)
    return replace(rules, head_reason="it does something else to logits than to scale and to cap them")


def _known_ends(config: Any) -> Iterator[tuple[str, str]]:
    """(scale, cap) by values of the configuration that have to do with logits. Others may depend on a model's size,
    and then a tiny copy has another."""
    numbers = {n: v for n, v in vars(config).items() if isinstance(v, int | float) and not isinstance(v, bool) and v}
    named = [name for name in numbers if "logit" in name or "head_multiplier" in name]
    caps = ["", *(name for name in named if "cap" in name)]
    scales = ["", *(how + name for name in named if "cap" not in name for how in ("", "1 / "))]
    yield from itertools.product(scales, caps)


def _end_of(logits: Tensor, config: Any, scale: str, cap: str) -> Tensor:
    logits = logits * scale_of(config, scale)
    return logits if not cap else getattr(config, cap) * torch.tanh(logits / getattr(config, cap))


# -- where the model is cut --------------------------------------------------------------------------------------------


def _body(trial: Trial, loss: str) -> tuple[str | None, str | None]:
    """The names of the modules at which whole tensors are cut and put together again."""
    model = trial.model
    images = _has_images(trial)
    pooled = loss == POOLED or getattr(model.base_model, "pooler", None) is not None
    if not (pooled or images):
        return None, None
    part = text_part(model)
    text = part if images and part is not model else model.base_model
    body = _name_of(model, text)
    if not pooled:
        return body, None
    pooler = getattr(text, "pooler", None)
    if pooler is None:
        return body, body
    encoder = getattr(text, "encoder", None)
    return body, _name_of(model, encoder if isinstance(encoder, nn.Module) else pooler)


def _has_images(trial: Trial) -> bool:
    return any(trial.batch.get(name) is not None for name in SEEN)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _cuts(trial: Trial, body: str) -> tuple[tuple[str, int, int], ...]:
    """Where the tokens are in what reaches the body's door."""
    found: dict[tuple[str, int], int] = {}
    module = trial.model.get_submodule(body)
    names = list(inspect.signature(module.forward).parameters)

    def look(_: nn.Module, args: Any, kwargs: Any) -> None:
        for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
            dims = [d for d, size in enumerate(getattr(value, "shape", ())) if size == TOKENS]
            if isinstance(value, Tensor) and dims:
                found[name, value.ndim] = dims[0]

    handle = module.register_forward_pre_hook(look, with_kwargs=True)
    try:
        trial.forward()
    finally:
        handle.remove()
    return tuple(sorted((name, ndim, dim) for (name, ndim), dim in found.items()))


# -- The check ---------------------------------------------------------------------------------------------------------


LIMIT = 1e-9
"""How far loss, outputs and gradients may be off, of their largest entry."""
ROUNDINGS, MOST = 16, 1e-4
"""For models that do not run in float64 all through: a run with parameters that are off by a rounding of float32 shows
what that does. So many times as much is allowed, but never more than `MOST`."""


@dataclass(frozen=True)
class Proof:
    """What came of it."""

    model: str
    form: str
    ok: bool
    error: float
    """The largest difference, of a tensor's own largest entry."""
    reason: str = ""
    """Why not, where it is not ok: what differs first, and what to do."""
    rules: Rules = field(default_factory=Rules)
    seconds: float = 0.0
    """Processor time that it took."""
    classes: tuple[str, ...] = ()
    """Full names of the classes of all modules that were tried, and their hooks in the words of `hook_names`."""
    was_compared: bool = True
    """Whether the answer is that of a comparison, or of a refusal by name. It is not where something failed."""

    def __str__(self) -> str:
        if self.ok:
            ways = ", ".join(f"{name} on {size}" for name, size in LAYOUTS)
            return f"{self.model}, {self.form}: exact, {self.error:.0e} ({ways} simulated ranks; {self.seconds:.1f} s)"
        return f"{self.model}, {self.form}: refused: {self.reason}"


_ONE_ANSWER = (
    "its head takes one answer from a row, and this row has several documents, which its recurrences do not tell apart"
    " on one device. Give every document a row."
)


class _RefusedError(Exception):
    """Not exact, or not to be had; the message says why."""


class _FailedError(_RefusedError):
    """Nothing was compared: another time, or on another machine, it may be."""


def prove(kind: type, config: Any, form: Form = Form()) -> Proof:  # noqa: B008  (frozen)
    """Whether models of this class and configuration compute over ranks what they compute on one device, on batches of
    this form. Takes seconds, on the CPU, and needs no weights."""
    began = time.process_time()
    register()
    error, reason, rules, classes, was_compared = float("inf"), "", Rules(), (), True
    try:
        with _undisturbed():
            trial = _trial(kind, config, form)
            classes = tuple(sorted({*classes_of(trial.model), *hook_names(trial.model)}))
            error, rules = _compared(trial, form)
            _check_classes(kind, config, classes)
    except _RefusedError as refusal:
        reason, was_compared = str(refusal), not isinstance(refusal, _FailedError)
    took = time.process_time() - began
    return Proof(kind.__name__, str(form), not reason, error, reason, rules, took, classes, was_compared)


def without_weights(kind: type, config: Any) -> Any:
    """The model as it is configured, on no device, or None where that cannot be had."""
    try:
        with _undisturbed(), torch.device("meta"):
            return kind(copy.deepcopy(config))
    except Exception:
        return None


def _check_classes(kind: type, config: Any, classes: tuple[str, ...]) -> None:
    """Modules that only larger models have are not in the copy."""
    made = without_weights(kind, config)
    other = None if made is None else put_in(made, classes, towers(made))
    if other is not None:
        raise _RefusedError(f"as it is configured it has {other}, which its tiny copy has not. {_ADVICE}.")


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Whatever the caller is in the middle of: no gradients wanted, autocast, another device or generator, hooks."""
    with (
        warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(),
        torch.autocast("cpu", enabled=False), torch.device("cpu"), without_global_hooks(),
    ):  # fmt: skip
        warnings.simplefilter("ignore")
        yield


def _trial(kind: type, config: Any, form: Form) -> Trial:
    """The tiny copy, with a batch on which it runs."""
    try:
        model: Any = build(kind, tiny_config(config))
        model.set_attn_implementation(NAME)
    except (CannotShrinkError, ValueError, KeyError) as error:
        raise _FailedError(f"no tiny copy of it could be made ({_line(error)}). {_ADVICE}.") from error
    if model.config.get_text_config()._attn_implementation != NAME or not takes_attention(model):
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
    """The output, in float64 all through and of two rows where that can be had."""
    rows = (1,) if form.packed.startswith("cu_seq_lens") else (2,) if form.padding else (2, 1)
    tries = [(wide, number) for wide in (True, False) for number in rows]
    for number, (trial.is_wide, num_rows) in enumerate(tries):
        trial.batch = drawn(form, trial.model, num_rows)
        try:
            return trial.forward()
        except Exception as error:
            if isinstance(error, LongspanError) or number == len(tries) - 1:
                raise
    return None


def _logits(output: Any) -> Tensor | None:
    try:
        found = result(output)
    except ValueError:
        return None
    return None if getattr(output, "logits", None) is None else found


def _compared(trial: Trial, form: Form) -> tuple[float, Rules]:
    """The largest difference, and the rules by which the model was split."""
    try:
        rules = rules_found(trial)
        if form.packed and rules.joined is not None and is_hybrid(trial.model):
            raise _RefusedError(_ONE_ANSWER)
        truth, again = _truth(trial, form), _truth(trial, form)
    except UnknownRuleError as unknown:
        raise _RefusedError(f"{unknown.what}: {unknown}.") from unknown
    except LongspanError as error:
        raise _RefusedError(_line(error)) from error
    if not form.packed and form.padding in (
        "",
        "right",
    ):  # rows that see nothing make NaN of eager attention in float64
        _check_eager(trial, truth)
    if not _difference(again, truth)[0] <= LIMIT:
        raise _FailedError(
            "on one device already, it gives other numbers when it runs again, so nothing can be compared: it remembers"
            " something from one run to the next, or draws random numbers."
        )
    worst = 0.0
    for name, world_size in LAYOUTS:
        ran, rules = _split(trial, rules, name, world_size)
        error, where = _difference(ran, truth)
        if not _is_right(trial, error):
            raise _RefusedError(_found(trial, rules, where, error, (name, world_size)))
        worst = max(worst, error)
        wanted = num_layers(trial.model, trial.model.config.get_text_config())
        rules = replace(rules, layers="all" if ran.calls >= wanted else "some" if ran.calls else "none")
    rules = replace(_without_logits(trial, rules, form), exact_at_padding=_is_exact_at_padding(trial, rules))
    _check_evaluation(trial, rules, form)
    return worst, rules


def _without_logits(trial: Trial, rules: Rules, form: Form) -> Rules:
    """The rules, with the head whose logits need not be computed: loss and gradients are the same without."""
    found = with_head(trial, rules)
    if found.head is None:
        return found
    try:
        ran = trial.split(found, *LAYOUTS[0], wants=LOSS)
    except Exception as error:
        return replace(rules, head_reason=f"the model's code fails without them ({_line(error)})")
    error, where = _difference(ran, _truth(trial, form, LOSS))
    return found if _is_right(trial, error) else replace(rules, head_reason=f"without them {where} is another one")


def _is_exact_at_padding(trial: Trial, rules: Rules) -> bool:
    """Whether outputs at padding, and a loss with labels there, are the same over ranks. Collators put -100 at padding
    alone, so that the last padding token before a text predicts its first token."""
    if "attention_mask" not in trial.batch or rules.loss not in (OWN, SHIFTED, IN_PLACE) or is_hybrid(trial.model):
        return True
    seen = copy.copy(trial)
    seen.batch, seen.hides_padding = with_labels(trial.batch, _logits(trial.forward()), at_padding=True), False
    try:
        ran = seen.split(rules, *LAYOUTS[0])
    except Exception:
        return False
    return _is_right(seen, _difference(ran, seen.whole())[0])


def _check_evaluation(trial: Trial, rules: Rules, form: Form) -> None:
    """The same once more in evaluation: layers may do something else there."""
    name, world_size = LAYOUTS[0]
    for model in (trial.model, trial.unused):
        model.eval()
    ran, _ = _split(trial, rules, name, world_size)
    error, where = _difference(ran, _truth(trial, form))
    if not _is_right(trial, error):
        raise _RefusedError(f"in evaluation, {_found(trial, rules, where, error, (name, world_size))}")


def _truth(trial: Trial, form: Form, wants: str = LOGITS) -> Ran:
    """What one device gives, with documents apart."""
    if form.packed and is_hybrid(trial.model):
        return trial.apart([0, FIRST, TOKENS], wants)
    return trial.whole(wants)


def _is_right(trial: Trial, error: float) -> bool:
    if error <= LIMIT or trial.is_wide:
        return error <= LIMIT
    return error <= min(MOST, ROUNDINGS * _difference(trial.rounded(), trial.whole())[0])


def _split(trial: Trial, rules: Rules, name: str, world_size: int) -> tuple[Ran, Rules]:
    """The run over ranks; a model that cannot take the keyword gets to know by its masks."""
    rules = replace(rules, layers="some")
    try:
        return trial.split(rules, name, world_size), rules
    except TypeError as error:
        if NAME not in str(error) or rules.handed != KEYWORDS:
            raise _FailedError(_failed(trial, rules, name, world_size, error)) from error
        rules = replace(rules, handed=MASK)
        return _split(trial, rules, name, world_size)
    except LongspanError as error:
        raise _RefusedError(_line(error)) from error
    except Exception as error:
        raise _FailedError(_failed(trial, rules, name, world_size, error)) from error


def takes_attention(model: Any) -> bool:
    """Whether any layer asks transformers for its attention, or it is a model of recurrences that Longspan knows."""
    return is_hybrid(model) or any("ALL_ATTENTION_FUNCTIONS" in mixes(type(part)) for part in model.modules())


def _check_eager(trial: Trial, truth: Ran) -> None:
    """Attention by Longspan on one device is what transformers computes."""
    try:
        with implementation(trial.model, "eager"):
            eager = trial.whole()
    except Exception:  # some have no eager attention, and then there is nothing to compare
        return
    error, where = _difference(truth, eager)
    if not error <= (LIMIT if trial.is_wide else MOST):
        raise _RefusedError(
            f"on one device already, {where} with attn_implementation='longspan' is off by {error:.1e} from 'eager':"
            f" its attention layers ask for something that does not reach Longspan. Use another attn_implementation."
        )


def _difference(found: Ran, truth: Ran) -> tuple[float, str]:
    """The largest difference, of a tensor's own largest entry, and where it is."""
    pairs = {}
    if found.out is not None and truth.out is not None:
        pairs["its output"] = found.out, truth.out
    if truth.loss is not None:
        if found.loss is None:
            return float("inf"), "its loss, which is missing,"
        pairs["its loss"] = torch.tensor(found.loss), torch.tensor(truth.loss)
    pairs |= {f"the gradient of {name}": (found.grads[name], grad) for name, grad in truth.grads.items()}
    largest = max(float(grad.abs().max()) for grad in truth.grads.values())
    worst, where = 0.0, ""
    for what, (mine, right) in pairs.items():
        if mine.shape != right.shape:
            return float("inf"), f"{what}, of shape {tuple(mine.shape)} instead of {tuple(right.shape)},"
        scale = max(float(right.abs().max()), 1e-6 * largest if "gradient" in what else 0.0, 1e-30)
        error = float((mine.double() - right.double()).abs().max()) / scale
        if not error <= worst:
            worst, where = error, what
    return worst, where


_ADVICE = (
    "Compare it with one device yourself (longspan.verification.verify_model), and pass trust_model=True if it is right"
)


def _found(trial: Trial, rules: Rules, where: str, error: float, how: tuple[str, int]) -> str:
    name, world_size = how
    first = first_module(trial, rules, name, world_size)
    said = f"over {world_size} ranks ({name}), {where} is off by {error:.1e} from one device."
    if first is None:
        return (
            f"{said} All modules compute the same in forward: it is the loss, what code around modules does with"
            f" tokens, or a backward pass of the model's own."
        )
    return (
        f"{said} The first that computes something else is {first}: tokens meet there, or are counted, in a way that"
        f" Longspan does not see. Use one device, or longspan.training.relayout around that layer."
    )


def _failed(trial: Trial, rules: Rules, name: str, world_size: int, error: Exception) -> str:
    first = first_module(trial, rules, name, world_size)
    where = "" if first is None else f" The first module that computes something else is {first}."
    return f"its code fails on a part of a sequence ({_line(error)}).{where} Use one device."


def _line(error: BaseException) -> str:
    if isinstance(error, LongspanError):
        return str(error)
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
