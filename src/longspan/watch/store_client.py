"""A client of the job's store (PyTorch's TCPStore) in plain Python, so that no thread waits inside of PyTorch.

PyTorch's own client can wait forever in C++ once the store's host has stopped, and a thread in C++ cannot end while the
interpreter does. Here every wait is one on a socket: it may have a deadline, and `close` ends it. Only the standard
library is imported: the watcher process (`processes.py`) uses this file, too.

On the wire: a byte for the kind of request, then keys and values, each as a length of 8 bytes and the bytes.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from typing import Protocol

MAX_VALUE = 1 << 20
"""Bytes of an answer; longer ones are no records of Longspan."""
_SET, _COMPARE_SET, _GET, _ADD, _CHECK, _WAIT, _DELETE = 1, 2, 3, 4, 5, 6, 8
_HELLO = struct.pack("<BI", 0, 0x3C85F7CE)


class LostError(Exception):
    """The store cannot be reached any more, or its answer is invalid."""


class Store(Protocol):
    """The operations of a store that Longspan uses."""

    def part(self, prefix: str) -> Store: ...
    def again(self, deadline: float | None) -> Store: ...
    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes | None: ...
    def add(self, key: str, number: int) -> int: ...
    def claim(self, key: str, value: bytes) -> bytes: ...
    def wait(self, key: str) -> None: ...
    def delete(self, key: str) -> None: ...
    def close(self) -> None: ...


class StoreClient:
    """One connection to the store, for one thread. Every key is prefixed."""

    def __init__(self, address: tuple[str, int], prefix: str, deadline: float | None = None) -> None:
        self.address, self.prefix, self.deadline = address, prefix, deadline
        self._closed = False
        self._socket = self._connect()

    def part(self, prefix: str) -> StoreClient:
        """Return a new connection whose keys have one more prefix."""
        return StoreClient(self.address, f"{self.prefix}/{prefix}", self.deadline)

    def again(self, deadline: float | None) -> StoreClient:
        """Return a new connection with this deadline in seconds."""
        return StoreClient(self.address, self.prefix, deadline)

    def set(self, key: str, value: bytes) -> None:
        self.set_raw(self.full_key(key), value)

    def set_raw(self, key: bytes, value: bytes) -> None:
        """Set a full key, without adding the prefix."""
        self._request(_SET, _with_size(key) + _with_size(value))

    def full_key(self, key: str) -> bytes:
        return f"/{self.prefix}/{key}".encode()

    def get(self, key: str) -> bytes | None:
        """Return the value, or None if there is none."""
        if self._request(_CHECK, struct.pack("<Q", 1) + self._key(key), 1) != b"\0":
            return None
        return self._request_value(_GET, self._key(key))

    def add(self, key: str, number: int) -> int:
        return struct.unpack("<q", self._request(_ADD, self._key(key) + struct.pack("<q", number), 8))[0]

    def claim(self, key: str, value: bytes) -> bytes:
        """Set the value if there is none; return the value that is there then."""
        return self._request_value(_COMPARE_SET, self._key(key) + _with_size(b"") + _with_size(value))

    def wait(self, key: str) -> None:
        """Return when the key has a value."""
        if self._request(_WAIT, struct.pack("<Q", 1) + self._key(key), 1) != b"\0":
            raise LostError("the store has given up a wait")

    def delete(self, key: str) -> None:
        self._request(_DELETE, self._key(key), 8)

    def close(self) -> None:
        """Close the connection; a thread that waits for an answer gets a `LostError`."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def is_local(self) -> bool:
        """Whether the store runs on this host: both ends have the same address."""
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
        return _with_size(self.full_key(key))

    def _request(self, kind: int, body: bytes, size: int = 0) -> bytes:
        """Return an answer of this many bytes. A broken connection is reopened once: a store that is alive answers
        then."""
        for is_retry in (False, True):
            try:
                self._socket.sendall(bytes((kind,)) + body)
                return self._read(size)
            except TimeoutError:
                self._socket.close()  # an answer that arrives later must not be taken for the next one
                raise LostError(f"no answer within {self.deadline} s") from None
            except OSError as error:
                if is_retry or self._closed or kind in (_ADD, _COMPARE_SET):  # these may have been executed
                    raise LostError(str(error)) from None
                self._socket.close()
                self._socket = self._connect()
        raise AssertionError("the second attempt has returned or raised")

    def _request_value(self, kind: int, body: bytes) -> bytes:
        size = struct.unpack("<Q", self._request(kind, body, 8))[0]
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
            chunk = self._socket.recv(size - len(answer))
            if not chunk:
                raise ConnectionResetError("the store closed the connection")
            answer += chunk
        return answer


def _with_size(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
