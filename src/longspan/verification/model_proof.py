"""Compare a training step over simulated ranks with one device, without a process group or launcher.

Every rank has a copy of the model with the same parameters, in float64, and all ranks share one autograd graph: one
backward pass of the sum of their losses gives the sum of their gradients. Two ranks whose shares of a loss w * x are
w * 2 and w * 3 give w the gradient 5, which is what one device gives for both tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from longspan import layouts
from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.run.simulated import SimulatedRank, simulate
from longspan.testing.modules import FAR, SeenModules, first_different, shared_copy, titled
from longspan.verification.model import compare, explain, finding_of, truth_of
from longspan.verification.model_step import (
    TOKENS,
    Each,
    ModelStep,
    Result,
    Truth,
    copy_in_float64,
    run_whole,
    split_result,
)
from longspan.verification.ranks import RankView
from longspan.verification.reference import unit
from longspan.verification.report import UNKNOWN, Check, Finding, Report

NAMES = ("zigzag", "contiguous", "striped")
MODULE = "a module computes something else over ranks"
MODULE_ADVICE = (
    "It misses tokens of other ranks, or counts from 0 on each. Give it global positions (layout.positions(rank)), and"
    " a plan and the group to what looks at several tokens: longspan.attention, causal_conv1d, the recurrences. A mean"
    " over tokens is a sum over all ranks, divided once."
)
MASK_ADVICE = "Pass mask=, too: more mistakes of labels and masks are recognised with it."
AFTERWARDS = "Every module's output is one device's: the loss makes the difference, or the backward pass."
RankResult = tuple[Tensor, Tensor | None]


def layouts_asked(asked: Sequence[Any], batch: Mapping[str, Any], ranks: int) -> list[Layout]:
    """Layouts of the batch's sequence, by name or as they are."""
    if isinstance(asked, str | Layout) or not asked:
        raise PlanError(f"layouts = {asked!r} was asked for. Give a list of layouts, as {NAMES}.")
    if not all(isinstance(one, Layout) or one in NAMES for one in asked):
        raise PlanError(
            f"layouts = {asked!r} was asked for. Each is one of {', '.join(NAMES)}, or a layout, as"
            f" longspan.layouts.balanced(mask, world_size=2)."
        )
    return [one if isinstance(one, Layout) else getattr(layouts, one)(_length(batch), ranks) for one in asked]


def _length(batch: Mapping[str, Any]) -> int:
    for name, dim in (("input_ids", -1), ("inputs_embeds", 1), ("labels", -1), ("shift_labels", -1)):
        if isinstance(batch.get(name), Tensor):
            return int(batch[name].shape[dim])
    raise PlanError(
        f"how many tokens does the batch have? It holds {', '.join(batch) or 'nothing'}, and neither input_ids nor"
        f" inputs_embeds nor labels. Pass layouts made for it, as layouts=[longspan.layouts.zigzag(64, 2)]."
    )


def prove_step(step: ModelStep, wanted: Sequence[Layout], factor: float) -> Report:
    """See `longspan.verification.prove_model`; `step.local` takes layout and group, too."""
    _check_plain(step)
    with _undisturbed(step.model):
        before: Exception | None = None
        for trial in _trials(step):
            try:
                ran = [(layout, trial.split(layout)) for layout in wanted]
            except Exception as error:  # whatever the user's code raises
                if not trial.is_wide or trial.is_own:
                    raise error from before
                before = error
                continue
            if before is not None:
                trial.notes.append(f"local does not run in float64 ({_line(before)}); it ran in the model's dtype")
            return trial.judged(ran, factor)
    raise AssertionError("the last trial returns or raises")


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:120]}"


def _check_plain(step: ModelStep) -> None:
    if step.gradients == "done":
        raise PlanError(
            "gradients = 'done' was asked for, but simulated ranks are one process, and nothing reduces gradients"
            " there. Say what you do with them after backward: 'sum' or 'average'."
        )
    if isinstance(step.model, DistributedDataParallel) or any(isinstance(p, DTensor) for p in step.model.parameters()):
        raise PlanError(
            f"prove_model takes a plain module, but {type(step.model).__name__} is wrapped by DDP or sharded. Prove the"
            f" model before it is wrapped; verify_model takes it as it is, over its group."
        )


@contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """Whatever the caller is in the middle of: no gradients wanted, autocast, random numbers. What was compiled runs
    eagerly: a compiler does not follow ranks in threads."""
    devices = {p.device.type for p in model.parameters()} | {"cpu"}
    first, second = ([*devices] * 2)[:2]
    with (
        torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad(),
        torch.autocast(first, enabled=False), torch.autocast(second, enabled=False),
        torch.compiler.set_stance("force_eager"),
    ):  # fmt: skip
        yield


def _trials(step: ModelStep) -> Iterator[_Trial]:
    """The step in float64, if one device can do that, and in the model's own precision."""
    _, doubled, note = copy_in_float64(step.model, step.batch, lambda m, b: run_whole(step.whole, m, b, step.mask))
    try:
        if not note:
            yield _Trial(step, copy.deepcopy(step.model).double(), doubled, is_wide=True)
        unused = copy.deepcopy(step.model)
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise PlanError(
            f"every simulated rank needs a copy of the model, and {type(step.model).__name__} cannot be copied"
            f" ({_line(error)}). Mend that, or use verify_model over a group."
        ) from error
    yield _Trial(step, unused, step.batch, is_wide=False)


@dataclass(eq=False)
class _Trial:
    """The step in one precision. `unused` never runs: what modules remember from a run is not copied."""

    step: ModelStep
    unused: nn.Module
    batch: dict[str, Any]
    is_wide: bool
    """Whether it is in float64."""
    notes: list[str] = field(default_factory=list)

    @property
    def is_own(self) -> bool:
        """Whether this is the model's own precision."""
        return all(p.dtype == torch.float64 for p in self.step.model.parameters())

    def split(self, layout: Layout, traces: Sequence[SeenModules] = ()) -> list[RankResult]:
        """What every rank of a layout returned."""
        copies = [shared_copy(self.unused) for _ in range(layout.world_size)]
        for trace, model in zip(traces, copies, strict=False):
            trace.attach(model)

        def work(rank: SimulatedRank) -> RankResult:
            batch = {name: v.clone() if isinstance(v, Tensor) else v for name, v in self.batch.items()}
            return split_result(self.step.local(copies[rank.rank()], batch, layout, rank))

        try:
            return simulate(layout.world_size, work)
        except Exception as error:
            error.add_note(f"raised in local(model, batch, layout, group), with {layout} on simulated ranks")
            raise

    def joined(self, found: list[RankResult], layout: Layout) -> tuple[Any, Each]:
        """What the ranks gave together; a Finding in place of results of another shape."""
        losses = [float(loss.detach()) for loss, _ in found]
        problem = self._shapes([logits for _, logits in found], layout)
        if problem is not None:
            return problem, Each(losses, {}, {}, {})
        result: Result = {}
        if found[0][1] is not None:
            parts = [logits.detach().double().cpu() for _, logits in found if logits is not None]
            result["logits"] = layout.unshard(parts, TOKENS)
        grads, missing = self._gradients(sum(loss for loss, _ in found), layout.world_size)
        return {**result, **grads}, Each(losses, grads, {}, missing)

    def _gradients(self, total: Any, size: int) -> tuple[Result, dict[str, tuple[int, ...]]]:
        """Added up or averaged over the ranks, and those that nothing reached."""
        named = {f"gradient of {n}": p for n, p in self.unused.named_parameters() if p.requires_grad}
        found = [None] * len(named)
        if total.requires_grad:
            found = torch.autograd.grad(total, list(named.values()), allow_unused=True)
        parts = size if self.step.gradients == "average" else 1
        grads: Result = {}
        for (name, p), grad in zip(named.items(), found, strict=True):
            grads[name] = (torch.zeros_like(p) if grad is None else grad).detach().double().cpu() / parts
        missing = {name: tuple(range(size)) for name, grad in zip(named, found, strict=True) if grad is None}
        return grads, missing

    def _shapes(self, logits: list[Tensor | None], layout: Layout) -> Finding | None:
        have = [rank for rank, part in enumerate(logits) if part is not None]
        if have and len(have) < len(logits):
            raise PlanError(
                f"logits were returned by ranks {have} of {len(logits)} only, so they cannot be compared. Return (loss,"
                f" logits) on every rank, or the loss alone on all."
            )
        wrong = [
            (rank, tuple(part.shape)) for rank, part in enumerate(logits)
            if part is not None and (part.ndim != 3 or part.shape[TOKENS] != layout.num_slots(rank))
        ]  # fmt: skip
        if not wrong:
            return None
        rank, shape = wrong[0]
        return Finding(
            "logits", f"have shape {shape} on rank {rank}, which holds {layout.num_slots(rank)} tokens", math.inf, 0.0,
            tuple(rank for rank, _ in wrong), (), None, "logits of another shape", "No number was compared.",
            "Return the logits of this rank's tokens, (batch, local tokens, vocabulary).",
        )  # fmt: skip

    def judged(self, ran: Sequence[tuple[Layout, list[RankResult]]], factor: float) -> Report:
        """The worst of all layouts, or what is wrong in the first that is wrong."""
        names = ", ".join(layout.name for layout, _ in ran)
        subject, size = f"{type(self.unused).__name__} over {names}", max(layout.world_size for layout, _ in ran)
        worst: dict[str, Check] = {}
        truth: Truth | None = None
        for layout, returned in ran:
            found, each = self.joined(returned, layout)
            if isinstance(found, Finding):
                return Report(subject, size, (), (found,), tuple(self.notes))
            step = replace(self.step, model=shared_copy(self.unused), batch=self.batch, layout=layout)
            if truth is None:
                truth = truth_of(step, factor, unit(torch.float32) if self.is_wide else None)
                _check_logits("logits" in found, "logits" in truth.result)
                self.notes += [truth.note] if truth.note else []
            checks, wrong = compare(truth, found, each, step)
            if wrong:
                findings = self._findings(step, truth, found, each, wrong)
                return Report(subject, size, tuple(checks), findings, (*self.notes, f"found with {layout}"))
            for check in checks:
                worst[check.tensor] = max(check, worst.get(check.tensor, check), key=lambda c: c.ratio)
        return Report(subject, size, tuple(worst.values()), (), tuple(self.notes))

    def _findings(
        self, step: ModelStep, truth: Truth, found: Result, each: Each, wrong: list[Check]
    ) -> tuple[Finding, ...]:
        """What is wrong, with its likely cause and the first module that differs."""
        causes = explain(step, truth, RankView.of(step.layout, None), found, each, [check.tensor for check in wrong])
        module = self._first_module(step.layout)
        findings: list[Finding] = []
        for check in wrong:
            cause, evidence, advice = causes[check.tensor]
            seen = AFTERWARDS if module is None else f"The first module whose output differs is {module}."
            if cause == UNKNOWN and module is not None:
                cause, evidence, advice = MODULE, "", MODULE_ADVICE
            elif cause == UNKNOWN and step.mask is None:
                advice = f"{advice} {MASK_ADVICE}".strip()
            finding = finding_of(check, truth, found, each, step, (cause, f"{evidence} {seen}".strip(), advice))
            findings.append(finding if module is None else replace(finding, what=f"{finding.what}, first in {module}"))
        return tuple(findings)

    def _first_module(self, layout: Layout) -> str | None:
        whole, parts = SeenModules(), [SeenModules() for _ in range(layout.world_size)]
        model = shared_copy(self.unused)
        whole.attach(model)
        self.step.whole(model, self.batch, self.step.mask)
        with suppress(Exception):  # what was seen until then is compared
            self.split(layout, parts)
        narrow = max((unit(p.dtype) for p in model.parameters() if p.is_floating_point()), default=0.0)
        first = first_different(whole, parts, layout, max(FAR, 64 * narrow))
        return None if first is None else titled(model, first)


def _check_logits(local: bool, whole: bool) -> None:
    if local != whole:
        raise PlanError(
            f"logits were returned by {'local' if local else 'whole'} only, so they cannot be compared. Return (loss,"
            f" logits) from local and whole, or the loss alone from both."
        )
