"""Access to the job's store, through which its ranks found each other, for the few records that Longspan writes there.

A client in plain Python talks to PyTorch's TCPStore. Any other store (files, a user's own) is accessed through PyTorch.
"""

from __future__ import annotations

import secrets
import time
from typing import Any, Protocol

import torch.distributed as dist

from longspan._torch import default_store
from longspan.errors import RankError
from longspan.watch.store_client import LostError, StoreClient

# -- Stores ------------------------------------------------------------------------------------------------------------


ROOT = "longspan"
PAUSE = 0.01
"""Seconds between questions to a store of PyTorch's for something that is not there yet."""


class Store(Protocol):
    """What is asked of a store."""

    def part(self, prefix: str) -> Store: ...
    def again(self, deadline: float | None) -> Store: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def add(self, key: str, number: int) -> int: ...
    def claim(self, key: str, value: bytes) -> bytes: ...
    def wait(self, key: str) -> None: ...
    def delete(self, key: str) -> None: ...
    def close(self) -> None: ...


class TorchStore:
    """A store that is asked through PyTorch."""

    def __init__(self, store: Any, prefix: str) -> None:
        self._inner, self._prefix = store, prefix
        self._store: Any = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def part(self, prefix: str) -> TorchStore:
        """The part of it whose keys begin with the prefix."""
        return TorchStore(self._inner, f"{self._prefix}/{prefix}")

    def again(self, deadline: float | None) -> TorchStore:  # noqa: ARG002
        """The same store again; PyTorch's clients know no deadline."""
        return TorchStore(self._inner, self._prefix)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes | None:
        """What is there; None if there is nothing."""
        return self._store.get(key) if self._store.check([key]) else None

    def add(self, key: str, number: int) -> int:
        return self._store.add(key, number)

    def claim(self, key: str, value: bytes) -> bytes:
        """Writes the value if nobody has; returns what is there then. (`compare_set` takes texts only, no bytes.)
        Whoever came first may not have written yet, and is given a second for it."""
        if self.add(f"{key}/claims", 1) == 1:
            self.set(key, value)
            return value
        for _ in range(int(1 / PAUSE)):
            if (found := self.get(key)) is not None:
                return found
            time.sleep(PAUSE)
        return b""

    def wait(self, key: str) -> None:
        """Returns when something is there. Asked again and again: a wait inside of PyTorch cannot be ended."""
        while (store := self._store) is not None and not store.check([key]):
            time.sleep(PAUSE)
        if store is None:
            raise LostError("the connection was closed")

    def delete(self, key: str) -> None:
        self._store.delete_key(key)

    def close(self) -> None:
        """Lets go of PyTorch's client."""
        self._store = self._inner = None


def job_store(group: dist.ProcessGroup) -> Store | None:
    """A new connection to the job's store, to a part that its ranks share with nobody; None where there is no store.

    Several jobs may use one store under prefixes of their own, which cannot be asked for: so the job's ranks agree on
    a name, under their prefix, and this part has that name.
    """
    if "fake" in str(dist.get_backend_config(group)):
        return None
    store: Any = default_store()
    name = store.compare_set(f"{ROOT}/name", "", secrets.token_hex(16)).decode(errors="replace")
    if len(name) != 32 or not name.isalnum():
        raise RankError(
            f"the job's store holds {len(name)} characters where the name of this job should be. Another version or"
            f" another program writes there: run one version on all ranks, on a network of your own."
        )
    inner: Any = _innermost(store)
    prefix = f"{ROOT}/{name}"
    client = _client(inner, prefix) if isinstance(inner, dist.TCPStore) else None  # type: ignore[attr-defined]
    return client or _through_torch(inner, prefix)


def _innermost(store: Any) -> Any:
    """The store itself, without the prefixes around it."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return store


def _through_torch(store: Any, prefix: str) -> TorchStore:
    return TorchStore(store.clone(), prefix)


def _client(store: Any, prefix: str) -> StoreClient | None:
    """A client in plain Python, if it reads what PyTorch's wrote, and vice versa."""
    proof, key = secrets.token_hex(16), f"proof/{secrets.token_hex(16)}"
    client = None
    try:
        client = StoreClient((store.host, store.port), prefix, deadline=30.0)
        store.set(f"{prefix}/{key}", proof)
        store.get(f"{prefix}/{key}")  # nobody is told when a value is set: what is asked next comes after it
        if client.get(key) == proof.encode():
            client.set(key, proof[::-1].encode())
            client.get(key)
            if store.get(f"{prefix}/{key}") == proof[::-1].encode():
                return client.again(None)
    except LostError:
        pass
    finally:
        if client is not None:
            client.close()
        store.delete_key(f"{prefix}/{key}")
    return None
