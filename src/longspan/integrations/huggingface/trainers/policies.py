"""TRL's trainers that score whole sequences (DPO, GRPO, RLOO): methods of `ContextParallelTrainer` that only they call.

Generation stays what the trainer does. All ranks of a sequence are given the same prompts and the same random numbers,
and then what the first of them generated: they would hold parts of different sequences otherwise.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from longspan.integrations.huggingface.accelerate import Ranks
from longspan.integrations.huggingface.proving.first_use import told
from longspan.integrations.huggingface.trainers.accelerators import SequenceAccelerator, each_once
from longspan.integrations.huggingface.trainers.kinds import DISTILLS, PLAIN, WHOLE
from longspan.integrations.huggingface.trainers.token_scores import score_over_ranks
from longspan.training import BatchError
from longspan.training.groups import message_device

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object

GATHERING = ("gather", "gather_object")
TEXTS = "prompt_ids, completion_ids, masks of tools, completions, log-probabilities and further fields of a rollout"


class WholeScores(_Base):
    """What differs for a trainer that computes its loss from numbers of all tokens, on every rank alike."""

    _ranks: Ranks | None
    _kind: str

    def _join_ranks(self: Any) -> None:
        """Ranks of one sequence are one process to the trainer from now on, and models score tokens over them."""
        from accelerate.utils import set_seed

        if self._ranks is None or self._kind == PLAIN:
            return
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None and self._kind != DISTILLS:
                score_over_ranks(model, self._ranks.cp, self._shard_settings)
        if self._kind in WHOLE and not isinstance(self.accelerator, SequenceAccelerator):
            self.accelerator = SequenceAccelerator(self.accelerator, self._ranks)
            if any("_generate" in vars(base) for base in type(self).__mro__ if base.__module__.startswith("trl.")):
                set_seed(self.args.seed + self.accelerator.process_index)  # TRL has given every rank one of its own

    def _shard_settings(self: Any, training: bool) -> dict[str, Any]:
        return {**self._sharding, "dropout_seed": self._dropout_seed(training)}

    def _precompute_ref_logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._join_ranks()  # DPO asks for them before it is ready
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def _generate(self: Any, prompts: list[Any]) -> Any:
        found = super()._generate(prompts)  # type: ignore[misc]
        return found if self._ranks is None else _shared(found, self._ranks.cp.get_group())

    def _generate_and_score_completions(self: Any, inputs: list[Any]) -> Any:
        if self._ranks is None:
            return super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        with _each_sequence_once(type(self), self._ranks):
            found = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        _share_random_numbers(self._ranks.cp.get_group())  # samples are shuffled next
        return found


def _shared(found: tuple[Any, ...], group: dist.ProcessGroup) -> tuple[Any, ...]:
    """What the first rank generated. Images are each rank's own: they come with the prompts."""
    texts = [None if _is_images(item) else item for item in found]
    try:
        message = json.dumps(texts).encode()
    except TypeError as error:
        raise BatchError(
            f"ranks of one sequence must train on the same completions, and these cannot be sent ({error}): {TEXTS}"
            f" must be lists, dicts, texts and numbers."
        ) from error
    first = json.loads(told(message, group))
    return tuple(own if new is None else new for own, new in zip(found, first, strict=True))


def _is_images(item: Any) -> bool:
    """Whether it is a list of images, or of lists of images."""
    if isinstance(item, list):
        return any(_is_images(part) for part in item)
    return hasattr(item, "getbbox")  # of PIL


@contextlib.contextmanager
def _each_sequence_once(kind: type, ranks: Ranks) -> Iterator[None]:
    """Rewards, and texts for logs, from one rank of each sequence: TRL gathers them by functions of accelerate, which
    are names in its modules."""
    modules = [sys.modules[base.__module__] for base in kind.__mro__ if base.__module__.startswith("trl.")]
    found = [(module, name, vars(module)[name]) for module in modules for name in GATHERING if name in vars(module)]
    for module, name, original in found:
        setattr(module, name, lambda data, original=original: each_once(original(data), ranks))
    try:
        yield
    finally:
        for module, name, original in reversed(found):
            setattr(module, name, original)


def _share_random_numbers(group: dist.ProcessGroup) -> None:
    """The first rank's generator of CPUs on all ranks of a sequence; dropout may have used it differently on each."""
    state = torch.get_rng_state().to(message_device(group))
    dist.broadcast(state, group=group, group_src=0)
    torch.set_rng_state(state.cpu())
