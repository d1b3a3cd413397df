"""Rules by which a model runs over ranks: plain values, which ship as data for the models that `longspan prove --all`
proved (`rules.json`).

An entry holds for exactly what was proved: the class of the model, every value of its configuration that is not a size,
the files that its modules' classes are in, and the form of batches.

    LlamaForCausalLM, 2 layers or 32, any rope_theta        -> one entry
    EsmForMaskedLM with rotary, with absolute positions     -> two entries
    a modeling_llama.py that was edited                     -> none
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from longspan.huggingface.batches import BY_TOKEN, IMAGE_INPUTS, PACKED, BatchInfo, is_between

PATH = Path(__file__).parent / "rules.json"


@dataclass(frozen=True)
class Rules:
    """How one model runs over ranks, as its proof found."""

    positions: Literal["count", "after padding", "real tokens", "none"] = "count"
    """If a batch has no position_ids: tokens are counted from 0 ("count"), from padding_idx + 1 without padding
    ("after padding", RoBERTa), from 0 without padding, which is at -1 ("real tokens", OPT), or the model takes none
    ("none")."""
    loss: Literal["own", "shifted", "in place", "pooled", "none"] = "own"
    """The model's own loss takes shift_labels ("own"); cross-entropy of labels one place earlier ("shifted") or in
    place ("in place"), divided by all labels; a loss of whole sequences, the same on all ranks ("pooled"); or none."""
    handed: Literal["keywords", "mask"] = "keywords"
    """Whether layers receive the sequence by the keyword `longspan`, or by their mask alone."""
    body: str | None = None
    """The name of the backbone whose inputs are sharded; None if they are sharded before the model."""
    joined: str | None = None
    """The name of the module after which tokens of all ranks are gathered; None if they stay sharded."""
    cuts: tuple[tuple[str, int, int], ...] = ()
    """(argument of the backbone, its number of dims, the dim of tokens)."""
    head: str | None = None
    """The name of the head whose logits need not be computed; None if they are, for `head_reason`."""
    head_reason: str = ""
    scale: str = ""
    soft_cap: str = ""
    """The factor ("logit_scale", or "1 / logits_scaling") and the cap of logits, as names of values of the
    configuration; "" for none."""
    obeys_count: bool = True
    """Whether the model's loss on one device is divided by `num_items_in_batch` if the batch has it."""
    exact_at_padding: bool = True
    """Whether the model computes at padding what it computes there on one device, so that labels there are exact."""
    layers: str = "all"
    """Whether "all" layers of the configuration have attention, "some" of them, or "none"."""

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "cuts": [list(cut) for cut in self.cuts]}

    @staticmethod
    def of_json(values: dict[str, Any]) -> Rules:
        """
        >>> Rules.of_json(Rules(cuts=(("x", 3, 1),)).as_json()) == Rules(cuts=(("x", 3, 1),))
        True
        """
        return Rules(**{**values, "cuts": tuple((str(n), int(a), int(b)) for n, a, b in values["cuts"])})


# -- Forms of batches --------------------------------------------------------------------------------------------------


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
        """
        >>> str(Form()), str(Form(padding="left", labels=False)), str(Form(packed="position_ids", positions=True))
        ('plain', 'padded (left), without labels', 'packed (position_ids)')
        """
        kinds = [f"padded ({self.padding})"] * bool(self.padding) + [f"packed ({self.packed})"] * bool(self.packed)
        kinds = kinds or ["plain"]
        kinds += ["position_ids"] * (self.positions and self.packed != "position_ids")
        kinds += ["inputs_embeds"] * self.embeds
        return ", ".join([*kinds, *self.others, *(["without labels"] * (not self.labels))])


PLAIN = Form()


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


# -- What an entry is for ----------------------------------------------------------------------------------------------


_LEFT_OUT = re.compile(
    r"^_|^(name_or_path|model_type|transformers_version|dtype|torch_dtype|architectures|id2label|label2id|use_cache|attribute_map"
    r"|quantization_config|task_specific_params|tokenizer_class|prefix|finetuning_task)$"
    r"|dropout|pdrop|drop_path|jitter|mask_time|mask_feature|initializer|init_std"
    r"|(token_id|token_ids|token_index|token_indices|_start_id|_end_id|_newline_id|_patch_id)$"
)
"""Values that a proof sets itself, that only weights depend on, or that name things; numbers of special tokens."""
_ROPE = "rope_type", "partial_rotary_factor"
_OF_LOGITS = re.compile(r"logit|multiplier|scal")


def config_key(config: Any) -> str:
    """Return a digest of every value of a configuration that is not a size.

    Names, flags and None count. Of a number it counts whether it is 0, 1, negative or another; of a list, which kinds
    of elements it has; of lists with an entry per layer, which combinations; of rotary embeddings, their types. Numbers
    that scale logits count as equal or different, since rules name them.
    """
    return hashlib.sha256(repr(_describe(config, {})).encode()).hexdigest()[:16]


def _describe(config: Any, scales: dict[float, int]) -> list[Any]:
    kind, values = type(config), vars(config)
    count = values.get("num_hidden_layers")
    by_layer = [value for name, value in sorted(values.items()) if type(value) is list and len(value) == count != 1]
    described: list[Any] = [f"{kind.__module__}.{kind.__qualname__}", len(values.get("id2label") or "ab") > 1]
    described.append(values.get("pad_token_id") is None)
    described.append(sorted({repr([_kind(x, scales) for x in layer]) for layer in zip(*by_layer, strict=True)}))
    for name, value in sorted(values.items()):
        if _LEFT_OUT.search(name):
            continue
        if type(value) in (int, float) and _OF_LOGITS.search(name):
            described.append((name, value if value in (0, 1) else scales.setdefault(value, -len(scales) - 1)))
        elif name == "rope_parameters" and isinstance(value, dict):
            kinds = [part for part in value.values() if isinstance(part, dict)] or [value]
            described.append((name, sorted({repr([part.get(key) for key in _ROPE]) for part in kinds})))
        else:
            described.append((name, _kind(value, scales)))
    spec = values.get("_heterogeneity_spec")
    if spec is not None:
        described.append(sorted({repr(_kind(values, scales)) for values in spec.per_layer_overrides.values()}))
    return described


def _kind(value: Any, scales: dict[float, int]) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):
        return int(value) if value in (0, 1) else "-" if value < 0 else "+"
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return [(name, _kind(x, scales)) for name, x in sorted(value.items())]
    if isinstance(value, list | tuple | set | dict):
        values = value.values() if isinstance(value, dict) else value
        return sorted({"+" if type(x) in (int, float) and x >= 0 else repr(_kind(x, scales)) for x in values})
    return _describe(value, scales) if hasattr(value, "get_text_config") else type(value).__name__


# -- The table ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """What is known of a model: its rules, and the full names of the classes of all modules that were proved."""

    rules: Rules
    classes: tuple[str, ...]


@cache
def read_table() -> dict[str, Any]:
    """Return the table that ships with the package.

    - `rules`: different rules, without default values.
    - `files`: the sha256 of modeling files, by module.
    - `modules`: classes of modules, as names by module, of one or more models.
    - `models`: by class and `config_key`, the number in `modules`, and by form of batches the number in `rules`.
    """
    return json.loads(PATH.read_text()) if PATH.exists() else {"rules": [], "files": {}, "modules": [], "models": {}}


def find_entry(kind: type, config: Any, form: Form) -> Entry | None:
    """Return the entry for a class, a configuration and a form of batches, or None."""
    table = read_table()
    configs = table["models"].get(full_name(kind))
    modules, forms = configs.get(config_key(config), (None, {})) if configs else (None, {})
    number = forms.get(str(form))
    if number is None:
        return None
    homes = table["modules"][modules]
    if any(table["files"].get(home) not in (None, digest_of_file(home)) for home in homes):
        return None
    classes = tuple(f"{home}.{name}" for home, names in homes.items() for name in names.split())
    return Entry(Rules.of_json({**_DEFAULTS, **table["rules"][number]}), classes)


_DEFAULTS = Rules().as_json()


def full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def digest_of_file(module: str) -> str:
    """Return the sha256 of the file of a module, "" if it has none."""
    path = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""
