"""What an OpenEnv server understands and says, in words: answers as actions, observations as text.

field = action_field(schema, "")          the field of an action that takes the answer
action = action_of("left", field)         None: the answer is none
text = words(observation, ())
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from .errors import BrokenEnvironment, EnvironmentFailed

BESIDE: Final = frozenset({"metadata", "done", "reward"})
"""Fields that every action or observation has."""

MAX_WORDS: Final = 1 << 17
"""Characters of an observation: more than any context holds; pictures have more."""


class Field(NamedTuple):
    """Of an action."""

    name: str
    """Empty: the answer is the whole action, as a JSON object."""
    kinds: frozenset[str]
    """JSON types that it takes; none: any text."""

    @property
    def takes_text(self) -> bool:
        return bool(self.name) and (not self.kinds or "string" in self.kinds)


def action_field(schema: Mapping[str, Any], named: str) -> Field:
    """The field that takes an answer: the one that is named, the only one, the only required one, else none.
    Raises BrokenEnvironment where there is no such field. [OPE-3]"""
    properties = schema.get("properties")
    own = {
        name: one
        for name, one in (properties if isinstance(properties, dict) else {}).items()
        if name not in BESIDE
    }
    required = [name for name in schema.get("required", ()) if name in own]
    if named and own and named not in own:
        raise BrokenEnvironment(
            f"The server's actions have no field {named!r}; they have {', '.join(sorted(own))}. Choose "
            "another `action`."
        )
    name = named or _only(list(own)) or _only(required)
    return Field(name, _kinds(own.get(name, {})))


def action_of(answer: str, field: Field) -> dict[str, Any] | None:
    """The action of an answer; None where it cannot be one."""
    if not field.name:
        whole = _json(answer)
        return whole if isinstance(whole, dict) else None
    if field.takes_text:
        return {field.name: answer}
    value = _json(answer)
    return None if value is None else {field.name: value}


def words(observation: object, shown: Sequence[str]) -> str:
    """An observation as text: the fields `shown`, a line each; else the only text there is, or all fields as
    JSON. Raises EnvironmentFailed. [OPE-4]"""
    if not isinstance(observation, dict):
        raise EnvironmentFailed("The server answered without an observation.")
    if missing := [name for name in shown if name not in observation]:
        raise EnvironmentFailed(
            f"The server's observation has no field {missing[0]!r}; it has "
            f"{', '.join(map(str, observation))}. Choose another `observation`."
        )
    own = {name: one for name, one in observation.items() if name not in BESIDE}
    if shown:
        text = "\n".join(_word(observation[name]) for name in shown)
    else:
        text = _word(next(iter(own.values())) if len(own) == 1 else own)
    if len(text) > MAX_WORDS:
        raise EnvironmentFailed(
            f"The server's observation has {len(text):,} characters: choose fields of text by `observation`."
        )
    return text


def _word(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _only(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ""


def _kinds(schema: Any) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    found: set[str] = set()
    for one in (schema, *(part for part in schema.get("anyOf", ()) if isinstance(part, dict))):
        kind = one.get("type")
        found |= set(kind) if isinstance(kind, list) else {kind} if isinstance(kind, str) else set()
    return frozenset(found - {"null"})


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
