"""Optional keys are left out, never nil. Spec: `specs/01-encoding.md`.

msgspec takes nil for every field of type `X | None`. Here such a field is a key that may be absent, so nil is
refused, except where the field says `NIL_IS_ABSENT`; a field without a default is a value that may be nil.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from msgspec import Meta
from msgspec.inspect import CollectionType, Field, Metadata, StructType, Type, UnionType, type_info

from .errors import Code, RemoteError
from .reader import Value

NIL_IS_ABSENT = Meta(extra={"nil": "absent"})
"""For the keys that may be nil as well."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where to look for nil in the map of one structure."""

    keys: tuple[str, ...]
    """Optional keys."""
    inner: tuple[tuple[str, _Plan], ...]
    """Keys with a structure, or an array of structures, that has optional keys."""


def check_absence(value: Value, struct: type[Any]) -> None:
    """Raises RemoteError(WRONG_TYPE) where an optional key of `struct`, whose shape `value` has, is nil."""
    plan = _plan_of(struct)
    if plan is not None:
        _check(value, plan)


def _check(value: Value, plan: _Plan) -> None:
    if not isinstance(value, dict):
        return
    for key in plan.keys:
        if key in value and value[key] is None:  # [ENC-12]
            raise RemoteError(Code.WRONG_TYPE, f"The key {key} is nil; what is absent is left out.")
    for key, inner in plan.inner:
        for item in _items(value.get(key)):
            _check(item, inner)


def _items(value: Value) -> Iterable[Value]:
    """The structures that stand at a key: one, or those of an array."""
    return value if isinstance(value, list) else (value,)


_plans: dict[type[Any], _Plan | None] = {}
"""Of the structures that were read; there are some thirty."""


def _plan_of(struct: type[Any]) -> _Plan | None:
    """None where nothing has to be looked at."""
    if struct not in _plans:
        _plans[struct] = _planned(struct)
    return _plans[struct]


def _planned(struct: type[Any]) -> _Plan | None:
    info = type_info(struct)
    assert isinstance(info, StructType)
    if info.array_like:
        return None
    keys = tuple(field.encode_name for field in info.fields if _optional(field))
    inner = tuple(
        (field.encode_name, plan)
        for field in info.fields
        for inside in _structs(field.type)
        if (plan := _plan_of(inside)) is not None
    )
    return _Plan(keys, inner) if keys or inner else None


def _optional(field: Field) -> bool:
    kind = field.type
    if isinstance(kind, Metadata):
        if kind.extra == NIL_IS_ABSENT.extra:
            return False
        kind = kind.type
    return not field.required and isinstance(kind, UnionType) and kind.includes_none


def _structs(kind: Type) -> Iterator[type[Any]]:
    """The structures that a field of this type holds, itself or as elements of an array."""
    match kind:
        case Metadata():
            yield from _structs(kind.type)
        case StructType():
            yield kind.cls
        case CollectionType():
            yield from _structs(kind.item_type)
        case UnionType():
            for one in kind.types:
                yield from _structs(one)
        case _:
            return
