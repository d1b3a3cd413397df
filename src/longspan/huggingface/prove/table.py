"""Make `rules.json`: proofs of all families, as a table, and what is different in another one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from longspan.huggingface.prove.check import prove
from longspan.huggingface.prove.families import FORMS, cases, class_of, config_of, variants
from longspan.huggingface.rules import Entry, Form, Rules, config_key, digest_of_file, full_name, read_table

_DEFAULTS = Rules().as_json()
_MIXING = "Conv1d", "RNN", "LSTM", "GRU", "BatchNorm1d", "MultiheadAttention"
"""Classes of torch that `find_unverified_module` does not accept by themselves."""


class Table:
    """A table of rules to which entries are added."""

    def __init__(self) -> None:
        self.rules: dict[str, int] = {}
        self.files: dict[str, str] = {}
        self.modules: dict[str, int] = {}
        self.models: dict[str, dict[str, tuple[int, dict[str, int]]]] = {}

    def add(self, kind: type, config: Any, form: Form, entry: Entry) -> None:
        """Add what a proof found; torch's own classes are known by `find_unverified_module`, except for some."""
        homes: dict[str, list[str]] = {}
        for name in entry.classes:
            home, _, own = name.rpartition(".")
            if home.startswith("torch.") and not own.startswith(_MIXING):
                continue
            homes.setdefault(home, []).append(own)
            if home.startswith("transformers.models."):
                self.files[home] = digest_of_file(home)
        rules = {name: value for name, value in entry.rules.as_json().items() if value != _DEFAULTS[name]}
        modules = json.dumps({home: " ".join(sorted(names)) for home, names in sorted(homes.items())})
        number = self.modules.setdefault(modules, len(self.modules))
        configs = self.models.setdefault(full_name(kind), {})
        forms = configs.setdefault(config_key(config), (number, {}))[1]
        forms[str(form)] = self.rules.setdefault(json.dumps(rules), len(self.rules))

    def read(self, table: dict[str, Any]) -> Table:
        """Add all entries of a table."""
        self.files.update(table["files"])
        self.rules = {json.dumps(rules): number for number, rules in enumerate(table["rules"])}
        self.modules = {json.dumps(homes): number for number, homes in enumerate(table["modules"])}
        self.models = {
            name: {key: (number, dict(forms)) for key, (number, forms) in configs.items()}
            for name, configs in table["models"].items()
        }
        return self

    def as_dict(self) -> dict[str, Any]:
        return {
            "rules": [json.loads(rules) for rules in self.rules], "files": self.files,
            "modules": [json.loads(homes) for homes in self.modules], "models": self.models,
        }  # fmt: skip

    def write(self, path: Path) -> None:
        """Write the table, a line for each of its values."""

        def block(values: Iterable[str], ends: str) -> str:
            return f"{ends[0]}\n" + ",\n".join(values) + f"\n{ends[1]}"

        parts = {
            "rules": block(self.rules, "[]"),
            "files": block((f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.files.items())), "{}"),
            "modules": block(self.modules, "[]"),
            "models": block((f"{json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(self.models.items())), "{}"),
        }
        path.write_text(block((f"{json.dumps(name)}: {text}" for name, text in parts.items()), "{}") + "\n")
        read_table.cache_clear()


def prove_all(advance: Callable[[str], None]) -> Table:
    """Return a table of all families, configurations and forms that are exact over ranks."""
    table = Table()
    for case in cases():
        advance(str(case))
        try:
            config = config_of(case)
        except Exception as error:  # transformers refuses its own default values
            advance(f"{case}: {error}")
            continue
        for number, each in enumerate(variants(case, config)):
            for name, form in FORMS.items():
                if number and name not in ("plain", "padded", "packed"):
                    continue
                proof = prove(class_of(case), each, form)
                if proof.ok:
                    table.add(class_of(case), each, form, Entry(proof.rules, proof.classes))
                elif name == "plain":
                    break
    return table


def differences(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return what two tables say differently, in lines."""

    def rows(table: dict[str, Any]) -> dict[str, str]:
        found = {f"file of {module}": digest for module, digest in table["files"].items()}
        for model, configs in table["models"].items():
            for key, (number, forms) in configs.items():
                for form, rules in forms.items():
                    text = json.dumps([table["rules"][rules], table["modules"][number]])
                    found[f"{model.rpartition('.')[2]} {key}, {form}"] = text
        return found

    a, b = rows(mine), rows(other)
    return [f"{name}: {a.get(name)}, not {b.get(name)}" for name in sorted(a | b) if a.get(name) != b.get(name)]
