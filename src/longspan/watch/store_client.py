"""A client of the job's store (PyTorch's TCPStore) that is plain Python, so that no thread is inside of PyTorch.

PyTorch's own client can wait for ever in C++ once the store's host has stopped, and a thread that is in C++ cannot end
while the interpreter does. Here every wait is one on a socket: it has a deadline if it is given one, and `close` ends
it. Only the standard library is used: the watcher process (`watcher.py`) runs this file, too.

On the wire: a byte that names the question, then keys and values, each as a length of 8 bytes and the bytes.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress

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
