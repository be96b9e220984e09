"""`--config 'KEY=VALUE'` of commands about environments: settings as they stand in a run's TOML file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Setting


class _One(msgspec.Struct, forbid_unknown_fields=True):
    value: Setting


def read_config(flags: Sequence[str]) -> dict[str, Setting]:
    """What the flags say. A value is read as TOML (true, 3, 0.5, "text", [1, 2]); what is none is a text.

    Raises LocalError for a flag without a key, or a key that comes twice.
    """
    config: dict[str, Setting] = {}
    for flag in flags:
        key, equals, value = flag.partition("=")
        key = key.strip()
        if not equals or not key or key in config:
            raise LocalError(f"--config {flag!r} is no setting: write KEY=VALUE, each key once.")
        config[key] = _value(value.strip())
    return config


def _value(text: str) -> Setting:
    try:
        return msgspec.toml.decode(f"value = {text}", type=_One).value
    except (msgspec.DecodeError, msgspec.ValidationError):
        return text
