"""Writes a CycloneDX list of what Longspan needs to run, as installed here: `python .ci/sbom.py sbom.json`.

Made from package metadata alone; no time and no random number is in it, so equal environments give equal files.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = "longspan"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def needed(name: str) -> list[str]:
    """What a package needs to run, by name, as far as it is installed; extras are left out."""
    found: list[str] = []
    for line in distribution(name).requires or []:
        requirement, _, marker = line.partition(";")
        match = _NAME.match(requirement.strip())
        if match and "extra" not in marker and installed(match[0]):
            found.append(normal(match[0]))
    return sorted(set(found))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def reference(name: str) -> str:
    return f"pkg:pypi/{name}@{distribution(name).version}"


def component(name: str) -> dict[str, object]:
    data = distribution(name).metadata
    made: dict[str, object] = {
        "type": "library",
        "bom-ref": reference(name),
        "name": name,
        "version": distribution(name).version,
        "purl": reference(name),
    }
    licence = data.get("License-Expression") or (data.get("License") or "").strip().split("\n")[0][:80]
    if licence:
        made["licenses"] = [{"license": {"name": licence}}]
    return made


def sbom() -> dict[str, object]:
    """The whole list: the package, and all that it needs, in alphabetical order."""
    names, todo = set[str](), [ROOT]
    while todo:
        name = todo.pop()
        if name not in names:
            names.add(name)
            todo += needed(name)
    ordered = sorted(names)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": component(ROOT)},
        "components": [component(name) for name in ordered if name != ROOT],
        "dependencies": [
            {"ref": reference(name), "dependsOn": [reference(other) for other in needed(name)]} for name in ordered
        ],
    }


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(sbom(), indent=1) + "\n")
