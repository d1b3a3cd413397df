"""The proof when a model is first used: once for a model, a configuration, a kind of batch and these versions.

What was found is kept in this process, and on disk for the next one where all code of the model is released. Rank 0
looks or proves; the others are told.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from longspan.huggingface.adapter import ModelAdapter, adapter_of
from longspan.huggingface.batches import Reading
from longspan.huggingface.hooks import towers
from longspan.huggingface.mixers import mixes, text_part
from longspan.huggingface.released import release_of
from longspan.huggingface.structure import Rules, Snapshot, classes_of, num_layers, put_in
from longspan.huggingface.trial import Form, form_of
from longspan.huggingface.user_hooks import check_hooks
from longspan.training import BatchError
from longspan.training.groups import message_device
from longspan.versions import VERSION

_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class Known:
    """What has been found out about a model, and what it was made of when it was last accepted."""

    def __init__(self) -> None:
        self.rules: dict[tuple[Form, str, bool], Rules] = {}
        self.names: set[str] = set()
        """Classes of modules, and hooks, that were checked or do no harm."""
        self.adapter: Callable[[], ModelAdapter | None] | None = None
        """The adapter when the model was last accepted; another one belongs to a model that has changed."""
        self.code: Snapshot | None = None

    def accept(self, model: Any, names: Iterable[str] = ()) -> None:
        self.names |= {*names, *classes_of(model)}
        check_hooks(model, self.names, towers(model))
        adapter = adapter_of(model)
        self.adapter, self.code = ref(adapter), Snapshot({type(module) for module in model.modules()})

    def check(self, model: Any) -> None:
        """Raise if the model has other modules or code since. In every step, and without messages to other ranks, which
        may have been changed or not."""
        assert self.adapter is not None
        assert self.code is not None
        replaced = self.code.find_replaced()
        if replaced is not None:
            raise BatchError(
                f"{type(model).__name__} cannot be used over ranks any more: {replaced} was replaced after the model"
                f" was checked. Replace it before the model is first used, or compare the model with one device"
                f" (longspan.verification.verify_model) and pass trust_model=True if it is right."
            )
        if self.adapter() is adapter_of(model):
            return
        other = put_in(model, self.names, towers(model))
        if other is not None:
            raise BatchError(f"{type(model).__name__} cannot be used over ranks any more: {_unproved(other)}")
        self.accept(model)


def rules_of(model: Any, read: Reading, group: Any, trust_model: bool) -> Rules:
    """How the model is to be treated, after its proof; a model that would be wrong is refused on all ranks."""
    config = model.config
    form = form_of(read, config.get_text_config())
    known = _KNOWN.get(model)
    if known is None:
        known = _KNOWN[model] = Known()
    key = form, getattr(group, "group_name", ""), trust_model  # every group tells its own ranks
    if trust_model:
        if key not in known.rules:
            known.rules[key] = _trusted(model)
    else:
        if known.adapter is not None:  # also before a new form: what was replaced is replaced for the others too
            known.check(model)
        if key not in known.rules:
            answer = _agreed(model, form, group)
            known.rules[key] = Rules.of_json(answer["rules"])
            known.accept(model, answer["classes"])
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


def _agreed(model: Any, form: Form, group: Any) -> dict[str, Any]:
    """What rank 0 finds, on every rank."""
    message = b""
    if group.rank() == 0:
        message = json.dumps(_answered(model, form)).encode()
    answer = json.loads(told(message, group))
    if not answer["ok"]:
        raise BatchError(f"{type(model).__name__} cannot be used over ranks: {answer['reason']}")
    return answer


def _answered(model: Any, form: Form) -> dict[str, Any]:
    """The answer about this very model. Whatever goes wrong is an answer too: the other ranks wait for one."""
    try:
        answer = found(type(model), model.config, form, model)
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


def found(kind: type, config: Any, form: Form, model: Any = None) -> dict[str, Any]:
    """The proof's answer, from disk where it is there; else it is made, and kept if all of its code is released.

    `model` is one of this class and configuration; without it a model without weights is made to look at its code.
    """
    from longspan.huggingface.check import prove

    release = _release(kind, config, model)
    place = None if release is None else _place(kind, config, form, release)
    kept = None if place is None else _read(place)
    if kept is not None:
        return kept
    proof = prove(kind, config, form)
    answer = {
        "ok": proof.ok, "model": proof.model, "form": proof.form, "reason": proof.reason, "error": f"{proof.error:.1e}",
        "seconds": round(proof.seconds, 2), "rules": proof.rules.as_json(), "classes": list(proof.classes),
    }  # fmt: skip
    if place is not None and proof.was_compared:
        _remember(place, answer)
    return answer


def _release(kind: type, config: Any, model: Any) -> str | None:
    from longspan.huggingface.check import without_weights

    return release_of(without_weights(kind, config) if model is None else model, config)


def _read(place: Path) -> dict[str, Any] | None:
    """Return an answer that was kept, or None if there is none or the file is not as it was written."""
    try:
        kept = json.loads(place.read_text())
        return kept["answer"] if kept["digest"] == _digest(kept["answer"]) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _digest(answer: Any) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def _remember(place: Path, answer: dict[str, Any]) -> None:
    draft = place.with_suffix(f".{secrets.token_hex(8)}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"answer": answer, "digest": _digest(answer)}, indent=1))
        if place.is_dir():
            place.rmdir()
        draft.replace(place)
    except OSError:  # a disk that cannot be written to costs the next process some seconds
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def remembered_at(kind: type, config: Any, form: Form) -> Path:
    """The file of a proof. Its name is a digest of all that the proof depends on."""
    return _place(kind, config, form, _release(kind, config, None) or "not released")


def _place(kind: type, config: Any, form: Form, release: str) -> Path:
    said = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        said.pop(name, None)
    versions = [VERSION, str(torch.__version__), version("transformers"), release, own_code()]
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
