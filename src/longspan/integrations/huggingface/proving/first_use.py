"""The proof when a model is first used: once for a model, a configuration, a kind of batch and these versions.

What was found is kept in this process, and on disk for the next one. Rank 0 looks or proves; the others are told.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from longspan.integrations.huggingface.batches import Reading
from longspan.integrations.huggingface.hooks.body import towers
from longspan.integrations.huggingface.hooks.mixers import mixes, text_part
from longspan.integrations.huggingface.proving.forms import Form, form_of
from longspan.integrations.huggingface.rules import Rules
from longspan.integrations.huggingface.structure import classes_of, code_of, num_layers, put_in
from longspan.training import BatchError
from longspan.training.groups import message_device
from longspan.version import VERSION

_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class Known:
    """What has been found out about a model, and what it was made of when it was last accepted."""

    def __init__(self) -> None:
        self.rules: dict[tuple[Form, str, bool], Rules] = {}
        self.classes: tuple[str, ...] = ()
        self.parts: list[tuple[type, int]] = []

    def accept(self, model: Any) -> None:
        self.classes, self.parts = tuple(classes_of(model)), _parts(model)

    def check(self, model: Any) -> None:
        """Refuses what somebody has put into the model since. Looked at in every step, half a millisecond for 400
        modules; on this rank alone, since only one may have been changed, and nobody would answer it."""
        parts = _parts(model)
        if parts == self.parts:
            return
        other = put_in(model, self.classes, towers(model))
        if other is not None:
            raise BatchError(f"{type(model).__name__} cannot be used over ranks any more: {_unproved(other)}")
        self.accept(model)


def _parts(model: Any) -> list[tuple[type, int]]:
    """Classes, and what was put in place of a forward, by its address: a method would keep the model alive."""
    return [(type(module), id(vars(module).get("forward"))) for module in model.modules()]


def rules_of(model: Any, read: Reading, group: Any, trust_model: bool) -> Rules:
    """How the model is to be treated, after its proof; a model that would be wrong is refused on all ranks."""
    config = model.config
    form = form_of(read, config.get_text_config())
    known = _KNOWN.setdefault(model, Known())
    key = form, getattr(group, "group_name", ""), trust_model  # every group tells its own ranks
    if key in known.rules:
        if not trust_model:
            known.check(model)
        return known.rules[key]
    known.rules[key] = _trusted(model) if trust_model else _agreed(model, form, group)
    if not trust_model:
        known.accept(model)
    return known.rules[key]


def _trusted(model: Any) -> Rules:
    warnings.warn(
        f"trust_model=True: whether {type(model).__name__} computes over ranks what it computes on one device is not"
        f" looked at. Layers that mix tokens by other means than attention, or count positions themselves, would be"
        f" wrong without a word.",
        stacklevel=4,
    )
    asking = sum("ALL_ATTENTION_FUNCTIONS" in mixes(type(part)) for part in text_part(model).modules())
    return Rules(layers="all" if asking >= num_layers(model, model.config.get_text_config()) else "some")


def _agreed(model: Any, form: Form, group: Any) -> Rules:
    """What rank 0 finds, on every rank."""
    message = b""
    if group.rank() == 0:
        message = json.dumps(_answered(model, form)).encode()
    answer = json.loads(told(message, group))
    if not answer["ok"]:
        raise BatchError(f"{type(model).__name__} cannot be used over ranks: {answer['reason']}")
    return Rules.of_json(answer["rules"])


def _answered(model: Any, form: Form) -> dict[str, Any]:
    """The answer about this very model. Whatever goes wrong is an answer too: the other ranks wait for one."""
    try:
        answer = found(type(model), model.config, form, code_of(model))
        other = put_in(model, answer["classes"], towers(model)) if answer["ok"] else None
    except Exception as error:
        return {"ok": False, "reason": f"its proof failed ({type(error).__name__}: {error})."}
    if other is None:
        return answer
    return {"ok": False, "reason": _unproved(other)}


def _unproved(other: str) -> str:
    return (
        f"it has {other}, which a model of this class and configuration has not, so its proof does not speak of it."
        f" Compare it with one device (longspan.verification.verify_model), and pass trust_model=True if it is right."
    )


def told(message: bytes, group: Any) -> bytes:
    """The bytes of group rank 0, on every rank."""
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


def found(kind: type, config: Any, form: Form, code: str | None = None) -> dict[str, Any]:
    """The proof's answer, from disk where it is there; else it is made, and remembered. `code` is that of the model's
    classes; without it a model without weights is made to look."""
    from longspan.integrations.huggingface.proving.proof import prove, without_weights

    if code is None:
        made = without_weights(kind, config)
        code = "" if made is None else code_of(made)
    place = remembered_at(kind, config, form, code)
    try:
        return json.loads(place.read_text())
    except (OSError, ValueError):
        pass
    proof = prove(kind, config, form)
    answer = {
        "ok": proof.ok, "model": proof.model, "form": proof.form, "reason": proof.reason, "error": f"{proof.error:.1e}",
        "seconds": round(proof.seconds, 2), "rules": proof.rules.as_json(), "classes": list(proof.classes),
    }  # fmt: skip
    if proof.was_compared:
        _remember(place, answer)
    return answer


def _remember(place: Path, answer: dict[str, Any]) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_suffix(f".{secrets.token_hex(8)}")
        draft.write_text(json.dumps(answer, indent=1))
        draft.replace(place)
    except OSError:  # a disk that cannot be written to costs the next process some seconds
        pass


def remembered_at(kind: type, config: Any, form: Form, code: str = "") -> Path:
    """The file of a proof. Its name is a digest of all that the proof depends on."""
    said = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        said.pop(name, None)
    versions = [VERSION, str(torch.__version__), version("transformers"), code, own_code()]
    text = json.dumps([kind.__module__, kind.__qualname__, said, form.as_json(), versions], sort_keys=True, default=str)
    return cache_folder() / f"{kind.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


@lru_cache(maxsize=1)
def own_code() -> str:
    """A digest of what treats models here: between releases it changes, too."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cache_folder() -> Path:
    """Where proofs are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "longspan" / "proofs"
