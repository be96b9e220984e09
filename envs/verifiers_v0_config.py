"""The adapter's own settings of verifiers packages (v0)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from nous_node.protocol.runs import Setting

from .errors import BadConfig

PREFIX: Final = "nous."
"""Of settings that are not the package's: no argument of a Python function has a dot."""

_KNOWN: Final[Mapping[str, tuple[str, ...]]] = {
    "format": ("", "chat", "plain"),
    "split": ("", "train", "eval"),
    "credit": ("", "step"),
}


@dataclass(frozen=True, slots=True)
class Choices:
    """[VFR-1]"""

    format: str = ""
    """`chat`, `plain`, or empty: text for a base model and for prompts that are text."""
    split: str = ""
    """Which dataset: `train`, `eval`, or empty for the first that there is."""
    credit: str = ""
    """`step`: the tokens of a turn get the advantage that the environment gave it."""


def read_choices(config: Mapping[str, Setting]) -> tuple[Choices, dict[str, Setting]]:
    """Our settings, and the arguments of `load_environment`. Raises BadConfig."""
    chosen: dict[str, str] = {}
    for key, value in config.items():
        if key.startswith(PREFIX):
            name = key.removeprefix(PREFIX)
            known = _KNOWN.get(name)
            if known is None:
                told = ", ".join(f"`{PREFIX}{one}`" for one in _KNOWN)
                raise BadConfig(f"There is no setting {key!r}; ours are {told}.")
            if not isinstance(value, str) or value not in known:
                raise BadConfig(f"`{key}` is one of {', '.join(repr(one) for one in known)}, not {value!r}.")
            chosen[name] = value
    return Choices(**chosen), {key: value for key, value in config.items() if not key.startswith(PREFIX)}
