"""Access to the job's store, through which its ranks found each other, for the few records that Longspan writes there.

A client in plain Python talks to PyTorch's TCPStore. Any other store (files, a user's own) is accessed through PyTorch.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import Any, Protocol

import torch.distributed as dist

from longspan._torch import default_store
from longspan.errors import RankError

# -- A client of PyTorch's TCPStore in plain Python --------------------------------------------------------------------
# PyTorch's own client can wait forever in C++ once the store's host has stopped, and a thread in C++ cannot end while
# the interpreter shuts down. Here every wait is on a socket: it can have a deadline, and `close` ends it. Only the
# standard library is used: the watcher process (`watcher.py`) runs this file, too.
#
# On the wire: a byte that names the request, then keys and values, each as a length of 8 bytes and the bytes.


MAX_VALUE = 1 << 20
"""Bytes of an answer; whatever claims to be longer is no record of ours."""
_SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _DELETE = 1, 2, 3, 4, 5, 6, 8
_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)


class LostError(Exception):
    """The store cannot be reached any more, or gave an answer that makes no sense."""


class StoreClient:
    """One connection to the store, for one thread. Keys have the client's prefix in front."""

    def __init__(self, address: tuple[str, int], prefix: str, deadline: float | None = None) -> None:
        self.address, self.prefix, self.deadline = address, prefix, deadline
        self._closed = False
        self._socket = self._connect()

    def part(self, prefix: str) -> StoreClient:
        """A connection of its own to the part whose keys begin with the prefix."""
        return StoreClient(self.address, f"{self.prefix}/{prefix}", self.deadline)

    def again(self, deadline: float | None) -> StoreClient:
        """Another connection to the same part, which gives up after this number of seconds."""
        return StoreClient(self.address, self.prefix, deadline)

    def set(self, key: str, value: bytes) -> None:
        self._ask(_SET, self._key(key) + _text(value))

    def set_raw(self, key: bytes, value: bytes) -> None:
        """Under a whole key, with nothing in front."""
        self._ask(_SET, _text(key) + _text(value))

    def whole_key(self, key: str) -> bytes:
        """The key with all that is in front of it."""
        return f"/{self.prefix}/{key}".encode()

    def get(self, key: str) -> bytes | None:
        """What is there; None if there is nothing."""
        if self._ask(_CHECK, struct.pack("<Q", 1) + self._key(key), 1) != b"\0":
            return None
        return self._value(_GET, self._key(key))

    def add(self, key: str, number: int) -> int:
        return struct.unpack("<q", self._ask(_ADD, self._key(key) + struct.pack("<q", number), 8))[0]

    def claim(self, key: str, value: bytes) -> bytes:
        """Writes the value if nothing is there; returns what is there then."""
        return self._value(_COMPARE_SET, self._key(key) + _text(b"") + _text(value))

    def wait(self, key: str) -> None:
        """Returns when something is there."""
        if self._ask(_WAIT, struct.pack("<Q", 1) + self._key(key), 1) != b"\0":
            raise LostError("the store has given up a wait")

    def delete(self, key: str) -> None:
        self._ask(_DELETE, self._key(key), 8)

    def close(self) -> None:
        """Ends the connection; a thread that waits for an answer gets a `LostError`."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_local(self) -> bool:
        """Whether the store's host is this one: both ends have the same address."""
        try:
            return self._socket.getpeername()[0] == self._socket.getsockname()[0]
        except OSError:
            return False

    def _connect(self) -> socket.socket:
        try:
            connection = socket.create_connection(self.address, 5.0 if self.deadline is None else self.deadline)
            connection.settimeout(self.deadline)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(_HELLO)
        except OSError as error:
            raise LostError(f"no connection to {self.address[0]}:{self.address[1]}: {error}") from None
        return connection

    def _key(self, key: str) -> bytes:
        return _text(self.whole_key(key))

    def _ask(self, kind: int, body: bytes, size: int = 0) -> bytes:
        """An answer of this many bytes. A broken connection is made anew once: a store that lives answers then."""
        for last in (False, True):
            try:
                self._socket.sendall(bytes((kind,)) + body)
                return self._read(size)
            except TimeoutError:
                self._socket.close()  # an answer that comes later must not be taken for the next one's
                raise LostError(f"no answer within {self.deadline} s") from None
            except OSError as error:
                if last or self._closed or kind in (_ADD, _COMPARE_SET):  # what may have been done is not done again
                    raise LostError(str(error)) from None
                self._socket.close()
                self._socket = self._connect()
        raise AssertionError("the second try has returned or raised")

    def _value(self, kind: int, body: bytes) -> bytes:
        size = struct.unpack("<Q", self._ask(kind, body, 8))[0]
        if size > MAX_VALUE:
            self.close()
            raise LostError(f"an answer of {size} bytes, where a record was expected")
        try:
            return self._read(size)
        except OSError as error:
            raise LostError(str(error)) from None

    def _read(self, size: int) -> bytes:
        answer = b""
        while len(answer) < size:
            more = self._socket.recv(size - len(answer))
            if not more:
                raise ConnectionResetError("the store closed the connection")
            answer += more
        return answer


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


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
