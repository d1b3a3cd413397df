"""Check a model when it is first used: once for a model, a configuration, a form of batches and these versions.

The result is cached in this process, and on disk for the next one if all code of the model is released. Rank 0 reads or
computes it, and broadcasts it to the others.
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

from longspan.huggingface import check
from longspan.huggingface.adapter import ModelAdapter, adapter_of
from longspan.huggingface.batches import BatchInfo
from longspan.huggingface.check import Form, detect_form, without_weights
from longspan.huggingface.hooks import vision_encoders
from longspan.huggingface.mixers import mixes, text_part
from longspan.huggingface.released import release_of
from longspan.huggingface.structure import Rules, Snapshot, classes_of, find_unverified_module, num_layers
from longspan.huggingface.user_hooks import check_hooks
from longspan.training import BatchError
from longspan.training.groups import message_device
from longspan.versions import VERSION

_COMPARE = "(longspan.verification.verify_model), and pass trust_model=True if it is right."
_KNOWN: WeakKeyDictionary[Any, Known] = WeakKeyDictionary()


class Known:
    """Rules of a model by form and group, and its modules, hooks and code when it was last accepted."""

    def __init__(self) -> None:
        self.rules: dict[tuple[Form, str, bool], Rules] = {}
        self.names: set[str] = set()
        """Classes of modules, and hooks, that were checked or are harmless."""
        self.adapter: Callable[[], ModelAdapter | None] | None = None
        """The adapter when the model was last accepted; a changed model has another one."""
        self.code: Snapshot | None = None

    def accept(self, model: Any, names: Iterable[str] = ()) -> None:
        self.names |= {*names, *classes_of(model)}
        check_hooks(model, self.names, vision_encoders(model))
        adapter = adapter_of(model)
        self.adapter, self.code = ref(adapter), Snapshot({type(module) for module in model.modules()})

    def check(self, model: Any) -> None:
        """Raise if modules or code of the model changed since it was accepted.

        Runs in every step. Each rank checks for itself, without messages, since the model may have been changed on one
        rank only.
        """
        assert self.adapter is not None
        assert self.code is not None
        replaced = self.code.find_replaced()
        if replaced is not None:
            raise BatchError(
                f"{type(model).__name__} cannot be used over ranks any more: {replaced} was replaced after the model"
                f" was checked. Replace it before the model is first used, or compare the model with one device"
                f" {_COMPARE}"
            )
        if self.adapter() is adapter_of(model):
            return
        other = find_unverified_module(model, self.names, vision_encoders(model))
        if other is not None:
            raise BatchError(f"{type(model).__name__} cannot be used over ranks any more: {_describe_unchecked(other)}")
        self.accept(model)


def _describe_unchecked(module: str) -> str:
    return (
        f"it has {module}, which a model of this class and configuration has not, so it was not checked. Compare it"
        f" with one device {_COMPARE}"
    )


def get_rules(model: Any, info: BatchInfo, group: Any, trust_model: bool) -> Rules:
    """Return the rules by which to shard the model, after its check; all ranks refuse a model that would be wrong."""
    form = detect_form(info, model.config.get_text_config())
    known = _KNOWN.get(model)
    if known is None:
        known = _KNOWN[model] = Known()
    key = form, getattr(group, "group_name", ""), trust_model  # every group broadcasts to its own ranks
    if not trust_model and known.adapter is not None:  # also before a new form: replaced code is replaced for all
        known.check(model)
    if key in known.rules:
        return known.rules[key]
    if trust_model:
        warnings.warn(
            f"trust_model=True: {type(model).__name__} is not compared with one device. Layers that mix tokens by other"
            f" means than attention, or count positions themselves, would silently be wrong.",
            stacklevel=3,
        )
        attending = sum("ALL_ATTENTION_FUNCTIONS" in mixes(type(part)) for part in text_part(model).modules())
        is_all = attending >= num_layers(model, model.config.get_text_config())
        known.rules[key] = Rules(layers="all" if is_all else "some")
    else:
        answer = json.loads(
            broadcast_bytes(json.dumps(_answer(model, form)).encode() if group.rank() == 0 else b"", group)
        )
        if not answer["ok"]:
            raise BatchError(f"{type(model).__name__} cannot be used over ranks: {answer['reason']}")
        known.rules[key] = Rules.of_json(answer["rules"])
        known.accept(model, answer["classes"])
    return known.rules[key]


def _answer(model: Any, form: Form) -> dict[str, Any]:
    """Return the result of the check for this model. Errors are returned too, so that other ranks do not hang."""
    try:
        answer = load_or_run_check(type(model), model.config, form, model)
        other = find_unverified_module(model, answer["classes"], vision_encoders(model)) if answer["ok"] else None
    except Exception as error:
        return {"ok": False, "reason": f"its check failed ({type(error).__name__}: {error})."}
    return answer if other is None else {"ok": False, "reason": _describe_unchecked(other)}


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


def load_or_run_check(kind: type, config: Any, form: Form, model: Any = None) -> dict[str, Any]:
    """Return the result of a check, from disk if it is there; else compute it, and save it if all code is released.

    `model` is one of this class and configuration; without it a model without weights is built to look at its code.
    """
    release = _release(kind, config, model)
    path = None if release is None else _path(kind, config, form, release)
    if path is not None:
        try:
            saved = json.loads(path.read_text())
            if saved["digest"] == _digest(saved["answer"]):
                return saved["answer"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # no such file, or not as it was written
    proof = check.prove(kind, config, form)
    answer = {
        "ok": proof.ok, "model": proof.model, "form": proof.form, "reason": proof.reason, "error": f"{proof.error:.1e}",
        "seconds": round(proof.seconds, 2), "rules": proof.rules.as_json(), "classes": list(proof.classes),
    }  # fmt: skip
    if path is not None and proof.was_compared:
        _save(path, answer)
    return answer


def _release(kind: type, config: Any, model: Any) -> str | None:
    return release_of(without_weights(kind, config) if model is None else model, config)


def _digest(answer: Any) -> str:
    return hashlib.sha256(json.dumps(answer, sort_keys=True).encode()).hexdigest()


def _save(path: Path, answer: dict[str, Any]) -> None:
    draft = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps({"answer": answer, "digest": _digest(answer)}, indent=1))
        if path.is_dir():
            path.rmdir()
        draft.replace(path)
    except OSError:  # a disk that cannot be written to costs the next process some seconds
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def check_path(kind: type, config: Any, form: Form) -> Path:
    """Return the file of a check. Its name is a digest of everything that the result depends on."""
    return _path(kind, config, form, _release(kind, config, None) or "not released")


def _path(kind: type, config: Any, form: Form, release: str) -> Path:
    settings = config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "architectures"):
        settings.pop(name, None)
    versions = [VERSION, str(torch.__version__), version("transformers"), release, own_code()]
    key = [kind.__module__, kind.__qualname__, settings, form.as_json(), versions]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / f"{kind.__name__}-{digest[:24]}.json"


@lru_cache(maxsize=1)
def own_code() -> str:
    """Return a digest of Longspan's code, which changes between releases, too."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def cache_folder() -> Path:
    """Return the folder of saved checks."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "longspan" / "proofs"
