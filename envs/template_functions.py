"""What a chat template may call, and the meter that counts what it does.

Nothing here is random, reads a clock or depends on where objects lie in memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any, Final

import jinja2.filters
import jinja2.tests
from jinja2 import pass_environment
from jinja2.runtime import LoopContext, Undefined
from jinja2.utils import Namespace

MAX_STEPS: Final = 200_000
"""Rounds of loops, calls and list items of one render: fifty a message in a conversation of 4,000."""

MAX_CHARACTERS: Final = 1 << 20
"""Characters that one render makes, those in between included. Contents are not among them."""

MAX_SECONDS: Final = 5.0
"""Processor time of one render. MAX_STEPS take a tenth of it on a slow machine."""

MAX_INTEGER: Final = 1 << 63
"""Larger numbers could double their length in each round of a loop."""

_LOOK_AT_CLOCK: Final = 256
"""Steps between two looks at the clock, which cost as much as a step."""


class TemplateRefused(Exception):
    """A template refused its messages, failed on them, or went out of bounds; the text is half a sentence."""


class Meter:
    """What one render has used up. Every method raises TemplateRefused beyond a limit."""

    __slots__ = ("_characters", "_deadline", "_steps", "_unseen")

    def __init__(self) -> None:
        self._steps = MAX_STEPS
        self._characters = MAX_CHARACTERS
        self._deadline = time.thread_time() + MAX_SECONDS
        self._unseen = _LOOK_AT_CLOCK

    def step(self, count: int) -> None:
        self._steps -= count
        self._unseen -= 1
        if self._steps < 0:
            raise TemplateRefused(f"it takes more than {MAX_STEPS} steps")
        if self._unseen < 0:
            self._unseen = _LOOK_AT_CLOCK
            if time.thread_time() > self._deadline:
                raise TemplateRefused(f"it takes more than {MAX_SECONDS:g} seconds")

    def make(self, characters: int) -> None:
        self.check_room(characters)
        self._characters -= characters

    def check_room(self, characters: int) -> None:
        if characters > self._characters:
            raise TemplateRefused(f"it makes more than {MAX_CHARACTERS} characters")

    def counted(self, values: Any) -> list[Any]:
        """The values of a loop, as a list."""
        made = list(islice(values, self._steps + 1))
        self.step(1 + len(made))
        return made

    def emitted(self, parts: tuple[Any, ...]) -> str:
        """The text of what is printed."""
        self.step(1)
        text = "".join([part if type(part) is str else self.text(part) for part in parts])
        self.make(len(text))
        return text

    def text(self, value: Any) -> str:
        """A value as jinja2 prints it."""
        self.weigh(value)
        if isinstance(value, (str, int, float, list, tuple, dict, Undefined)) or value is None:
            return str(value)
        raise TemplateRefused(f"it prints a {type(value).__name__}, which is no text")

    def sized(self, value: Any) -> Any:
        """A value that was just made."""
        if isinstance(value, str):
            self.make(len(value))
        elif isinstance(value, (list, tuple, dict, range)):
            self.step(len(value))
        elif isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise TemplateRefused(f"it makes a number above {MAX_INTEGER}")
        return value

    def weigh(self, value: Any) -> None:
        """Counts what lies in a nested value, as often as it lies there."""
        waiting = [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, str):
                self.check_room(len(one))
            elif isinstance(one, dict):
                self.step(len(one))
                waiting.extend(one.keys())
                waiting.extend(one.values())
            elif isinstance(one, (list, tuple)):
                self.step(len(one))
                waiting.extend(one)

    def check_operands(self, operator: str, left: Any, right: Any) -> None:
        """Before an operator makes something large."""
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            self.check_room(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            raise TemplateRefused("it formats text with %")
        elif operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    self.check_room(len(one) * max(0, other))
        elif operator == "**" and not (abs(left) <= MAX_INTEGER and abs(right) < 64):
            raise TemplateRefused("it takes a power that is too large")

    def check_growth(self, owner: str, method: str, values: tuple[Any, ...]) -> None:
        """Before a method of text makes a longer one."""
        if method == "replace":
            old, new = values[0], values[1]
            self.check_room(len(owner) + owner.count(old) * len(new))
        elif method == "join":
            parts = values[0]
            self.check_room(sum(map(len, parts)) + len(owner) * len(parts))


class Names(Namespace):
    """jinja2's namespace, without names that begin with an underscore."""

    def __init__(self, *values: Any, **named: Any) -> None:
        for name in dict(*values, **named):
            _check_name(name)
        super().__init__(*values, **named)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise TemplateRefused("it uses a name that begins with an underscore")


def dictionary(*values: Mapping[str, Any], **named: Any) -> dict[str, Any]:
    return dict(*values, **named)


ESCAPED: Final = "\ue103"
"""Stands behind the end of a placeholder once for each time that it was written as JSON: see `skeletons`."""

PLACEHOLDER_END: Final = "\ue102"

_MAX_INDENT: Final = 8


@pass_environment
def _tojson(
    environment: Any,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON, as transformers writes it for templates: not escaped for HTML."""
    environment.meter.weigh(value)
    if (indent or 0) > _MAX_INDENT or any(len(one) > _MAX_INDENT for one in separators or ()):
        raise TemplateRefused(f"it writes JSON with more than {_MAX_INDENT} characters between two values")
    made = json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=separators,
        sort_keys=bool(sort_keys),
    )
    return made.replace(PLACEHOLDER_END, PLACEHOLDER_END + ESCAPED)


@pass_environment
def _join(environment: Any, values: Any, between: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        values = map(jinja2.filters.make_attrgetter(environment, attribute), values)
    parts = [environment.meter.text(one) for one in environment.meter.counted(values)]
    environment.meter.check_growth(str(between), "join", (parts,))
    return str(between).join(parts)


@pass_environment
def _replace(environment: Any, text: Any, old: str, new: str, count: int = -1) -> str:
    owner = environment.meter.text(text)
    environment.meter.check_growth(owner, "replace", (old, new))
    return str(owner.replace(old, new, count))


@pass_environment
def _string(environment: Any, value: Any) -> str:
    return str(environment.meter.text(value))


@pass_environment
def _list(environment: Any, values: Any) -> list[Any]:
    return list(environment.meter.counted(values))


@pass_environment
def _dictsort(environment: Any, value: dict[Any, Any]) -> list[Any]:
    environment.meter.weigh(value)
    return sorted(value.items(), key=lambda item: (str(item[0]).lower(), str(item[0])))


def _text(function: Callable[[str], str]) -> Callable[..., str]:
    """A filter of text that never lengthens it by more than half."""

    @pass_environment
    def filtered(environment: Any, value: Any) -> str:
        return function(environment.meter.text(value))

    return filtered


@pass_environment
def _trim(environment: Any, value: Any, characters: str | None = None) -> str:
    return str(environment.meter.text(value)).strip(characters)


_ours: Final = jinja2.filters.FILTERS

FILTERS: Final[dict[str, Callable[..., Any]]] = {
    **{name: _ours[name] for name in ("abs", "count", "d", "default", "first", "float", "int", "items")},
    **{name: _ours[name] for name in ("last", "length", "map", "reject", "rejectattr", "round", "select")},
    "selectattr": _ours["selectattr"],
    "capitalize": _text(str.capitalize),
    "dictsort": _dictsort,
    "join": _join,
    "list": _list,
    "lower": _text(str.lower),
    "replace": _replace,
    "safe": _string,
    "string": _string,
    "title": _text(str.title),
    "tojson": _tojson,
    "trim": _trim,
    "upper": _text(str.upper),
}
"""Those that templates of well-known models use."""


def _compared(function: Callable[[Any, Any], bool]) -> Callable[..., bool]:
    @pass_environment
    def test(environment: Any, left: Any, right: Any) -> bool:
        environment.meter.weigh(left)
        environment.meter.weigh(right)
        return function(left, right)

    return test


_tests: Final[dict[str, Any]] = dict(jinja2.tests.TESTS)
_PLAIN: Final = (
    *("boolean", "defined", "divisibleby", "even", "false", "float", "integer", "iterable", "mapping"),
    *("none", "number", "odd", "sequence", "string", "true", "undefined"),
)
_PAIRS: Final = ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ge", "gt", "in", "le", "lt", "ne")

TESTS: Final[dict[str, Callable[..., bool]]] = {
    **{name: _tests[name] for name in _PLAIN},
    **{name: _compared(_tests[name]) for name in _PAIRS},
}

_OF_TEXT: Final = (
    *("capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdigit", "islower"),
    *(
        "isspace",
        "isupper",
        "join",
        "lower",
        "lstrip",
        "partition",
        "removeprefix",
        "removesuffix",
        "replace",
    ),
    *(
        "rfind",
        "rpartition",
        "rsplit",
        "rstrip",
        "split",
        "splitlines",
        "startswith",
        "strip",
        "title",
        "upper",
    ),
)

METHODS: Final[tuple[tuple[type, frozenset[str]], ...]] = (
    (str, frozenset(_OF_TEXT)),
    (dict, frozenset({"get", "items", "keys", "values"})),
    (list, frozenset({"count", "index"})),
    (LoopContext, frozenset({"changed", "cycle"})),
)
"""Methods that templates may call, by the kind of their owner."""

_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS: Final = (
    *("January", "February", "March", "April", "May", "June", "July", "August"),
    *("September", "October", "November", "December"),
)


def strftime(form: str, created: int) -> str:
    """A time in ms since 1970 as UTC, in English on every machine."""
    then = time.gmtime(created // 1000)
    day, month = _DAYS[then.tm_wday], _MONTHS[then.tm_mon - 1]
    known = {"%": "%", "A": day, "a": day[:3], "B": month, "b": month[:3], "Z": "UTC", "z": "+0000"}
    known |= {"d": f"{then.tm_mday:02}", "-d": f"{then.tm_mday}", "e": f"{then.tm_mday:2}"}
    known |= {"m": f"{then.tm_mon:02}", "-m": f"{then.tm_mon}", "j": f"{then.tm_yday:03}"}
    known |= {"Y": f"{then.tm_year}", "y": f"{then.tm_year % 100:02}", "M": f"{then.tm_min:02}"}
    known |= {"H": f"{then.tm_hour:02}", "I": f"{then.tm_hour % 12 or 12:02}", "S": f"{then.tm_sec:02}"}
    known |= {"p": "AM" if then.tm_hour < 12 else "PM"}
    made, rest = "", str(form)
    while rest:
        before, mark, rest = rest.partition("%")
        made += before
        if mark:
            name = rest[: 2 if rest.startswith("-") else 1]
            if name not in known:
                raise TemplateRefused(f"it asks for the time as %{name}")
            made, rest = made + known[name], rest[len(name) :]
    return made
