"""Defects that the stand-in device showed, made again in the shipped code for a run: each must show again.

The table says which text of which function takes the place of which, and what looks at it.
"""

import contextlib
from dataclasses import dataclass
from unittest import mock

from longspan.huggingface import masks as hf_masks
from longspan.huggingface import sharding
from longspan.kernels import panels
from longspan.layouts import layout
from longspan.run import transports
from longspan.training import loss
from longspan.training import loss_without_logits as head
from longspan.verification import compare, reference
from tests.device import attention_work, gpu_suite_work, training_work
from tests.simulation.streams_mistakes import rewritten


def failing(test):
    _, found = gpu_suite_work.on_device(test)
    return [text for outcome, text in found.values() if outcome == "failed"]


def attention_waits(name, kernel="reference"):
    return attention_work.warm_waits((name,), ("ring",), kernel=kernel)


def huggingface_waits(family, kind):
    return training_work.huggingface_step(family, kind, "late messages", False)[1]


def sharding_waits(family, kind):
    return training_work.huggingface_step(family, kind, "late messages", False)[2]


def traffic_not_counted():
    return [row for row in attention_work.traffic(("ring",)) if row[1] != row[2]]


@dataclass(frozen=True)
class Mend:
    function: object
    text: str
    undone: str
    looks: tuple
    """The function that looks, and its arguments. It finds nothing if all is well."""
    form: str = "standin"

    @contextlib.contextmanager
    def left_out(self):
        """In the function itself, which others may have imported by name, and under its file's name, which waits are
        counted by."""
        before = self.function.__code__
        undone = rewritten(self.function, self.text, self.undone).__code__
        self.function.__code__ = undone.replace(co_filename=before.co_filename)
        try:
            yield
        finally:
            self.function.__code__ = before


@dataclass(frozen=True)
class OtherFunction:
    """A function of a module that is replaced in this module alone."""

    module: object
    name: str
    value: object
    looks: tuple
    form: str = "standin"

    def left_out(self):
        return mock.patch.object(self.module, self.name, self.value)


PINNED = "table.pin_memory().to(device, non_blocking=True)"
SINKS, SCORE = ((failing, f"exact::test_scores[{kind}]") for kind in ("sinks", "score"))
PLAIN, PACKED = (huggingface_waits, "mistral", "plain"), (huggingface_waits, "llama", "packed")

MENDS = {
    "the reference has sinks on the CPU": Mend(
        reference.reference_result,
        "meaning.sinks.detach().cpu().double()", "meaning.sinks.detach().double()", SINKS, "cuda",
    ),
    "the reference's gradients are on the CPU": Mend(
        reference.reference_result, "else g).cpu() for g, t", "else g) for g, t", SCORE, "cuda"
    ),
    "score functions of the reference run where their tensors are": Mend(
        reference._apply_score, "scores.to(like.device)", "scores", SCORE, "cuda"
    ),
    "score functions are tried where their tensors are": Mend(
        compare._Work.meaning, "self.tensors[0]", "self.inputs[0]", SCORE, "cuda"
    ),
    "rows that a mask function leaves blind are not counted": Mend(
        panels._Biases._answers, 'blind.device.type != "cpu" or', "", (attention_waits, "mask_function", "auto"), "cuda"
    ),
    "labels are copied to the host before the loss": OtherFunction(sharding, "start_copy", lambda labels: None, PLAIN),
    "the loss takes the copy of labels": Mend(
        head.call_of, "labels_on_host(labels)", "labels.cpu().flatten()", PLAIN
    ),
    "places of labels go to the device without a wait": Mend(
        layout.to_device, PINNED, "table.to(device)", PLAIN
    ),
    "positions and rows of a batch go to the device without a wait": Mend(
        layout.to_device, PINNED, "table.to(device)", (sharding_waits, "mistral", "plain")
    ),
    "what mask functions allow goes to the device without a wait": Mend(
        layout.to_device, PINNED, "table.to(device)", (attention_waits, "mask_function")
    ),
    "the number of labels is not read": Mend(
        loss._check, 'num_tokens.device.type not in host', 'False and num_tokens.device.type not in host', PLAIN
    ),
    "tables of transformers' masks are read when they are used": Mend(
        hf_masks.Snapshot.__init__, "tensor.detach().clone()", "tensor.detach().cpu()", PACKED
    ),
    "transformers' masks are compared once": Mend(
        hf_masks._check_reading, "if about in _checked:", "if False:", PACKED
    ),
    "traffic of backward in autograd's thread is counted": Mend(
        transports.count,
        'threading.current_thread().name.startswith("Dummy-")', "False", (traffic_not_counted,),
    ),
}  # fmt: skip


def found(name, is_undone):
    """What is found on this rank, with the mend and without it."""
    mend = MENDS[name]
    look, *arguments = mend.looks
    with mend.left_out() if is_undone else contextlib.nullcontext():
        try:
            return look(*arguments)
        except (RuntimeError, AssertionError) as error:
            return str(error).splitlines()[0]
