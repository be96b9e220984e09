"""What questions to an adapter are made of: bytes, tagged values, and the answer to one. Spec: chapter 14.

An op is a function from a question, a struct with the fields that `specs/vectors/ops.toml` names, to an
answer. It raises RemoteError where what it was given is refused.
"""

from __future__ import annotations

import functools
import math
import typing
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import msgspec

from nous_node.protocol.encoding import Value, read
from nous_node.protocol.errors import NousError, RemoteError
from nous_node.protocol.runs import RunManifest

ROOM: Final = 1 << 24
"""Most bytes of a message that an op decodes where the question does not say: more than any message has."""

MAX_UNFOLDED: Final = 1 << 28
"""Bytes that `[[hex, count], ...]` may unfold to; the largest of the vectors has 17 million."""

Answer = Mapping[str, object]
"""What `ok` holds."""

Ops = Mapping[str, Callable[[Any], Answer]]
"""Name -> function of one struct."""


class Raw(bytes):
    """Bytes of a question: hex, or `[[hex, count], ...]`, each piece repeated."""


class BadQuestion(NousError):
    """A question that cannot be answered: the text says what is wrong with it."""


class Refused(NousError):
    """What was given is refused, with results from before that."""

    def __init__(self, before: Answer, error: RemoteError) -> None:
        super().__init__(str(error))
        self.before = before
        self.error = error


class Ask(msgspec.Struct, frozen=True):
    """A question; fields that an op does not know are ignored."""


def asked(question: object, kind: type[Any]) -> Any:
    """The question as the struct that an op takes. Raises BadQuestion."""
    try:
        return msgspec.convert(question, kind, dec_hook=_hook)
    except (msgspec.ValidationError, ValueError, OverflowError) as error:
        raise BadQuestion(f"The question has a wrong field: {error}.") from error


@functools.cache
def taken(op: Callable[[Any], Answer]) -> type[Any]:
    """The struct that an op takes."""
    hints = typing.get_type_hints(op)
    hints.pop("return")
    (kind,) = hints.values()
    return kind  # type: ignore[no-any-return]


def _hook(kind: type, value: object) -> object:
    if kind is Raw:
        return Raw(unfolded(value))
    raise NotImplementedError(kind)


def unfolded(data: object) -> bytes:
    """The bytes that a vector writes as hex or as pieces. Raises ValueError."""
    match data:
        case str():
            return _hex(data)
        case list():
            pieces = [_piece(one) for one in data]
            if sum(len(piece) * count for piece, count in pieces) > MAX_UNFOLDED:
                raise ValueError(f"more than {MAX_UNFOLDED} bytes")
            return b"".join(piece * count for piece, count in pieces)
    raise ValueError("bytes are hex, or a list of [hex, count]")


def _piece(data: object) -> tuple[bytes, int]:
    match data:
        case [str() as digits, int() as count] if count >= 0:
            return _hex(digits), count
    raise ValueError("a piece of bytes is [hex, count]")


def _hex(digits: str) -> bytes:
    if any(char.isspace() for char in digits):  # which `fromhex` skips
        raise ValueError("hex has no white space")
    return bytes.fromhex(digits)


def tagged(value: Value) -> object:
    """A value as JSON that says its type. [chapter 00]"""
    match value:
        case None | bool():
            return value
        case int():
            return {"int": str(value)}
        case float():
            return {"float": repr(value)}
        case str():
            return {"text": value}
        case bytes():
            return {"bin": value.hex()}
        case list():
            return {"array": [tagged(item) for item in value]}
        case dict():
            return {"map": [[key, tagged(item)] for key, item in value.items()]}


def figure(value: float | None) -> float | None:
    """A number for JSON, which has none for infinity and for what is no number."""
    return value if value is not None and math.isfinite(value) else None


def check_releases(releases: Mapping[str, str]) -> None:
    """Raises ImportError where this machine has not these: another release may do something else."""
    for name, release in releases.items():
        try:
            found = version(name)
        except PackageNotFoundError as error:
            raise ImportError(f"{name} is not installed; the question is about {release}.") from error
        if found != release:
            raise ImportError(f"{name} {found} is installed; the question is about {release}.")


@functools.lru_cache(maxsize=4)
def run_manifest(data: bytes) -> RunManifest:
    """The manifest of a file of vectors. Raises BadQuestion: it is no part of what is tested."""
    try:
        return read(data, RunManifest, ROOM)
    except RemoteError as error:
        raise BadQuestion(f"The question's `manifest` is no run manifest: {error}") from error
