"""Lets two processes use each other's objects: one runs test code, the other the program under test.

Values of plain types are sent as copies; if the other side changes an argument that is a list, set or
dictionary, the change is applied here too. Any other object stays in its process, and the other side gets a
`Remote` for it. Operators and comparisons cannot combine a `Remote` with a value, so that an object of the
program cannot claim to equal a value of the tests.

Standard library only. Messages are pickles that can only load the types in `_PLAIN`.
"""

from __future__ import annotations

import builtins
import importlib
import io
import operator
import os
import pickle
import pickletools
import struct
from collections.abc import Callable
from typing import Any

MAX_MESSAGE_BYTES = 16 << 20
#: Module → types that are sent as copies; those of `builtins` also for their subclasses.
_PLAIN = {
    "builtins": "bool int float complex str bytes bytearray tuple list dict set frozenset range slice",
    "collections": "OrderedDict Counter deque defaultdict",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
_BASES = (str, bytes, bool, int, float, complex, tuple, list, dict, set, frozenset)
#: Methods of `Remote`; those of `_TWO_SIDED` do not combine a `Remote` with a value.
_ONE_SIDED = "call getitem setitem delitem contains neg pos abs len iter next bool str repr"
_TWO_SIDED = "add sub mul truediv floordiv mod pow matmul and or xor eq ne lt le gt ge"
#: All that the other side can ask for.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    one.__name__: one for one in (getattr, setattr, isinstance, len, iter, next, bool, str, repr)
}
for _name in f"{_ONE_SIDED} {_TWO_SIDED}".split():
    if _name not in _FUNCTIONS:
        _FUNCTIONS[_name] = getattr(operator, f"__{_name}__")
#: Pickle opcodes that set attributes of objects or instantiate classes.
_FORBIDDEN = {"BUILD", "INST", "OBJ"}


class PeerGone(BaseException):
    """The other process has ended, or sent an invalid message."""


class Peer:
    """One end of the connection.

    Attributes:
        is_lost: the other side has ended, or sent an invalid message.
    """

    def __init__(self, fd: int, *, guards_names: bool) -> None:
        """`fd` is a socket. With `guards_names` the other side cannot use attributes of Python's own."""
        self._fd = fd
        self._guards_names = guards_names
        self._shared: list[Any] = []  # objects for which the other side has a `Remote`
        self._numbers: dict[int, int] = {}  # id of such an object → its index in `_shared`
        self._errors: dict[str, type] = {}  # exception classes of the other side, by name
        self.is_lost = False

    def ask(self, function: str, *args: Any, **more: Any) -> Any:
        """Calls one of `_FUNCTIONS` or of `operator` on the other side; raises the exceptions of the call.

        Raises:
            PeerGone: the other side has ended.
        """
        self.send(("ask", function, args, more))
        while True:
            kind, *content = self.receive()
            if kind == "ask":
                self._answer(*content)
            elif kind == "raise":
                raise content[0]
            else:
                result, changed = content
                for ours, theirs in zip(args, changed, strict=True):
                    if theirs is result:
                        result = ours
                    _copy_into(ours, theirs)
                return result

    def serve(self) -> None:
        """Serves requests until the other side ends, then raises `PeerGone`."""
        while True:
            self._answer(*self.receive()[1:])

    def _answer(self, function: str, args: tuple[Any, ...], more: dict[str, Any]) -> None:
        try:
            if self._guards_names and function in {"getattr", "setattr"}:
                # `str.format`, an attribute of a copy, and frames of generators give access to all objects.
                owner, name = args[:2]
                if _is_plain(owner) or _is_plain(type(owner)) or name.startswith(("_", "gi_", "cr_", "ag_")):
                    raise AttributeError(name)
            self.send(("done", _FUNCTIONS[function](*args, **more), args))
        except PeerGone:
            raise
        except BaseException as error:
            self.send(("raise", error))

    def send(self, message: Any) -> None:
        """Sends a message; raises `PeerGone`."""
        buffer = io.BytesIO()
        _Pickler(self, buffer).dump(message)
        data = struct.pack("=I", buffer.tell()) + buffer.getvalue()
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self.is_lost = True
            raise PeerGone from None

    def receive(self) -> Any:
        """Returns the next message; raises `PeerGone`."""
        try:
            (length,) = struct.unpack("=I", self._read(4))
            if length > MAX_MESSAGE_BYTES:
                raise EOFError
            data = self._read(length)
            if self._guards_names and any(code.name in _FORBIDDEN for code, _, _ in pickletools.genops(data)):
                raise EOFError
            return _Unpickler(self, io.BytesIO(data)).load()
        except Exception:
            self.is_lost = True
            raise PeerGone from None

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = os.read(self._fd, min(count - len(data), 1 << 20))
            if not part:
                raise EOFError
            data += part
        return data

    def id_of(self, obj: Any) -> tuple[Any, ...] | None:
        """Returns the name of an object in messages; None if the object is sent as a copy."""
        kind = type(obj)
        if kind is Remote:
            return ("yours", object.__getattribute__(obj, "_number"))
        if isinstance(obj, BaseException):
            return ("error", kind.__name__, kind.__module__ == "builtins", str(obj))
        if isinstance(obj, type) and issubclass(obj, BaseException):
            return ("error class", obj.__name__, obj.__module__ == "builtins")
        if obj is None or _is_plain(kind) or _is_plain(obj) or isinstance(obj, _BASES) or _is_scalar(obj):
            return None
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self._shared)
            self._shared.append(obj)
        return ("mine", self._numbers[id(obj)])

    def object_of(self, name: tuple[Any, ...]) -> Any:
        """Returns the object for a name in a message, see `id_of`."""
        match name:
            case ("yours", int(number)) if 0 <= number < len(self._shared):
                return self._shared[number]
            case ("mine", int(number)):
                remote = object.__new__(Remote)
                object.__setattr__(remote, "_peer", self)
                object.__setattr__(remote, "_number", number)
                return remote
            case ("error class", str(kind), bool(is_builtin)):
                return self._error_class(kind, is_builtin)
            case ("error", str(kind), bool(is_builtin), str(text)):
                try:
                    return self._error_class(kind, is_builtin)(text)
                except TypeError:  # UnicodeDecodeError takes five arguments
                    return ValueError(text)
        raise pickle.UnpicklingError(str(name)[:80])

    def _error_class(self, name: str, is_builtin: bool) -> type:
        known = getattr(builtins, name, None) if is_builtin else None
        if isinstance(known, type) and issubclass(known, BaseException):
            return known
        return self._errors.setdefault(name, type(name, (Exception,), {}))


class Remote:
    """Proxy for an object of the other side."""

    def __getattr__(self, name: str) -> Any:
        return _ask(self, "getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask(self, "setattr", self, name, value)

    def __instancecheck__(self, obj: Any) -> bool:
        return isinstance(obj, Remote) and bool(_ask(self, "isinstance", obj, self))

    def __hash__(self) -> int:
        return int(object.__getattribute__(self, "_number"))


def _ask(remote: Remote, function: str, *args: Any, **more: Any) -> Any:
    return object.__getattribute__(remote, "_peer").ask(function, *args, **more)


def _define(name: str, *, mixes: bool) -> None:
    def method(self: Remote, *args: Any, **more: Any) -> Any:
        if mixes or isinstance(args[0], Remote):
            return _ask(self, name, self, *args, **more)
        return NotImplemented

    setattr(Remote, f"__{name}__", method)


for _name in _ONE_SIDED.split():
    _define(_name, mixes=True)
for _name in _TWO_SIDED.split():
    _define(_name, mixes=False)


class _Pickler(pickle.Pickler):
    def __init__(self, peer: Peer, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=4)
        self._peer = peer

    def persistent_id(self, obj: Any) -> Any:
        """See `Peer.id_of`."""
        return self._peer.id_of(obj)

    def reducer_override(self, obj: Any) -> Any:
        """Sends instances of subclasses of plain types, and scalars of NumPy, as the plain type."""
        value = obj.item() if _is_scalar(obj) else obj
        base: Any = next((base for base in _BASES if isinstance(value, base)), None)
        is_copied = base is None or type(obj) is base or type(obj).__module__ == "collections"
        return NotImplemented if is_copied else (base, (base(value),))


class _Unpickler(pickle.Unpickler):
    def __init__(self, peer: Peer, buffer: io.BytesIO) -> None:
        super().__init__(buffer)
        self._peer = peer

    def persistent_load(self, pid: Any) -> Any:
        """See `Peer.object_of`."""
        return self._peer.object_of(pid)

    def find_class(self, module: str, name: str) -> Any:
        """Returns a type in `_PLAIN`; refuses any other."""
        if name not in _PLAIN.get(module, "").split():
            raise pickle.UnpicklingError(f"{module}.{name}")
        return getattr(importlib.import_module(module), name)


def _is_plain(kind: Any) -> bool:
    """Whether `kind` is a type with instances that are sent as copies."""
    return isinstance(kind, type) and kind.__qualname__ in _PLAIN.get(kind.__module__, "").split()


def _is_scalar(obj: Any) -> bool:
    """Whether `obj` is a scalar of NumPy or a similar library."""
    return not isinstance(obj, type) and getattr(obj, "ndim", None) == 0 and hasattr(obj, "item")


def _copy_into(ours: Any, theirs: Any) -> None:
    """Applies the changes that the other side made to its copy of a list, set or dictionary."""
    if isinstance(ours, list | bytearray) and isinstance(theirs, list | bytearray):
        ours[:] = theirs
    elif isinstance(ours, dict | set) and isinstance(theirs, type(ours)):
        ours.clear()
        ours.update(theirs)
