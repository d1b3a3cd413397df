"""The rules of a model when it is first used: those that ship with the package, or else those of a proof in this
process. Rank 0 looks them up or runs the proof, and broadcasts the result to the others."""

from __future__ import annotations

import json
import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist

from longspan.huggingface.adapter import adapter_of
from longspan.huggingface.batches import BatchInfo
from longspan.huggingface.hooks import vision_encoders
from longspan.huggingface.mixers import mixes, text_part
from longspan.huggingface.rules import Entry, Form, Rules, detect_form, find_entry
from longspan.huggingface.structure import find_unverified_module, modules_of, own_class
from longspan.training import BatchError
from longspan.training.groups import message_device

_COMPARE = "(longspan.verification.verify_model), and pass trust_model=True if it is right."
_LOG = logging.getLogger("longspan")


def get_rules(model: Any, info: BatchInfo, group: Any, trust_model: bool) -> Rules:
    """Return the rules by which to shard the model; all ranks refuse a model that would be wrong."""
    adapter = adapter_of(model)
    known, form = adapter.rules, detect_form(info, adapter.text_config)
    key = form, getattr(group, "group_name", ""), trust_model  # every group broadcasts to its own ranks
    if key in known:
        return known[key]
    if trust_model:
        warnings.warn(
            f"trust_model=True: {type(model).__name__} is not compared with one device. Layers that mix tokens by other"
            f" means than attention, or count positions themselves, would silently be wrong.",
            stacklevel=3,
        )
        attending = sum("ALL_ATTENTION_FUNCTIONS" in mixes(type(part)) for part in modules_of(text_part(model)))
        is_all = attending >= adapter.num_layers
        known[key] = Rules(layers="all" if is_all else "some")
    else:
        answer = json.loads(
            broadcast_bytes(json.dumps(_answer(model, form)).encode() if group.rank() == 0 else b"", group)
        )
        if answer["reason"]:
            raise BatchError(f"{type(model).__name__} cannot be used over ranks: {answer['reason']}")
        known[key] = Rules.of_json(answer["rules"])
    return known[key]


def _answer(model: Any, form: Form) -> dict[str, Any]:
    """Return the rules of this model, or the reason why there are none. Errors are returned too, so that other ranks do
    not wait."""
    try:
        entry = find_entry(own_class(model), model.config, form) or _prove(model, form)
        if isinstance(entry, str):
            return {"reason": entry}
        other = find_unverified_module(model, entry.classes, vision_encoders(model))
    except Exception as error:
        return {"reason": f"its proof failed ({type(error).__name__}: {error})."}
    if other is None:
        return {"reason": "", "rules": entry.rules.as_json()}
    return {
        "reason": f"it has {other}, which a model of this class and configuration has not. Compare it with one device"
        f" {_COMPARE}"
    }


def _prove(model: Any, form: Form) -> Entry | str:
    """Return what a proof in this process finds, or the reason why the model is refused."""
    from longspan.huggingface.prove.check import prove

    kind = own_class(model)
    add = "`longspan prove CONFIG --add`, CONFIG being a folder with its config.json, adds it to the installed rules"
    if any("liger_kernel" in (_package(type(part)), _package(vars(part).get("forward"))) for part in modules_of(model)):
        return f"its rules are not known for batches that are {form}, and its proof cannot run Liger's kernels. {add}."
    proof = prove(kind, model.config, form)
    if not proof.ok:
        return proof.reason
    _LOG.warning(
        "%s is not in rules.json for batches that are %s; it was proved in %.1f s, for this process. %s.",
        kind.__name__, form, proof.seconds, add,
    )  # fmt: skip
    return Entry(proof.rules, proof.classes)


def _package(code: Any) -> str:
    return (getattr(code, "__module__", None) or "").partition(".")[0]


def broadcast_bytes(message: bytes, group: Any) -> bytes:
    """Broadcast bytes from group rank 0."""
    if group.size() == 1:
        return message
    device = message_device(group)
    size = torch.tensor([len(message)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    text = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if message:
        text.copy_(torch.frombuffer(bytearray(message), dtype=torch.uint8))
    dist.broadcast(text, group=group, group_src=0)
    return text.cpu().numpy().tobytes()
