"""A Hugging Face configuration, read strictly: every size is there, whole and positive, or the refusal names it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.errors import PlanError

MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The keys of a `config.json`.

    >>> ConfigReader({"model_type": "llama", "hidden_size": 64}).size("hidden_size")
    64
    >>> ConfigReader({"model_type": "llama"}).size("vocab_size")
    Traceback (most recent call last):
    longspan.errors.PlanError: the configuration of a llama has no vocab_size. Give the whole config.json of the model.
    """

    keys: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.keys["model_type"])

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0, under the first of these names that is there."""
        found = self.optional_size(*names)
        if found is not None:
            return found
        if default is not None:
            return default
        raise PlanError(
            f"the configuration of a {self.model_type} has no {' or '.join(names)}. Give the whole config.json of the"
            f" model."
        )

    def optional_size(self, *names: str) -> int | None:
        """The same, or None where it is missing or null."""
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
                raise PlanError(f"{name} of the configuration is {value!r:.40}. A whole number above 0 is expected.")
            return value
        return None

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number that may be 0."""
        given = next((self.keys[name] for name in names if self.keys.get(name) is not None), default)
        return 0 if given == 0 and not isinstance(given, bool) else self.size(*names, default=default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.keys.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"{name} of the configuration is {value!r:.40}. True or false is expected.")
        return value

    def indices(self, name: str) -> list[int] | None:
        """Numbers of layers, or None."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise PlanError(f"{name} of the configuration is {value!r:.60}. A list of whole numbers is expected.")
        return list(value)

    def words(self, name: str, length: int, known: tuple[str, ...]) -> list[str] | None:
        """One known word for each layer, or None where the key is missing."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length:
            raise PlanError(
                f"{name} of the configuration is {value!r:.60}. A word for each of {length} layers is expected."
            )
        for word in value:
            if word not in known:
                raise PlanError(
                    f"{name} of the configuration names a layer {word!r:.40}. Known of a {self.model_type}:"
                    f" {', '.join(known)}."
                )
        return [str(word) for word in value]
