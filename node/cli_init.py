"""`nous-node init`: a run from flags over a TOML file."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Thresholds

from .cli_commands import access_of, home_hint, home_path
from .create import create_run
from .home import Home
from .plan import RunPlan, read_plan, with_environments
from .wording import printable

ALLOWED = {
    "group": "a whole number from 2 to 1,024",
    "max_tokens": "a whole number from 1 on",
    "temperature": "a number above 0, 10 at most",
    "dtype": "float32 or bfloat16",
    "staleness": "a whole number from 0 to 8",
}
"""The rules of `RunPlan` in words, for the flags."""

FEW = 0.05
"""Bound on honest groups refused from which on a person is told to calibrate on more."""

MAX_NOTE = 1_024
"""Characters of a note about the model, some of whose words are its author's."""

_NAMED = re.compile(r"`\$\.(\w+)`")
"""The field that an error of msgspec is about."""


def make_run(
    name: str,
    config: Path | None,
    flags: Mapping[str, object],
    env: list[str],
    home: Path | None,
    trusted: list[str] | None = None,
    *,
    as_json: bool,
) -> str:
    """`nous-node init`: what to print."""
    plan = with_environments(over(read_plan(config), flags), env)
    opened = Home.open(home_path(home))
    notes: list[str] = []
    run = create_run(
        opened.runs / name,
        name,
        opened.identity(),
        plan,
        time.time_ns() // 1_000_000,
        access_of(opened, trusted),
        notes.append,
    )
    if as_json:
        facts = {"name": name, "run": run.run.hex(), "folder": str(run.path)}
        return msgspec.json.encode(facts).decode()
    manifest = run.manifest
    environments = ", ".join(entry.id for entry in manifest.environments)
    said = "".join(f"{printable(note, MAX_NOTE)}\n" for note in notes)
    return (
        f"Made the run {name} ({run.run.hex()[:16]}) in {run.path}: "
        f"{manifest.model.parameters:,} parameters, {environments}.\n"
        f"{_calibrated(manifest.thresholds)}\n"
        f"{said}"
        f"Train it with: nous-node train {name}{home_hint(home)}"
    )


def _calibrated(thresholds: Thresholds) -> str:
    """How far the verification thresholds can be relied on."""
    if not thresholds.groups:
        return "Nobody calibrated its thresholds: honest groups may be refused and false ones accepted."
    bound = f"at most {100 * thresholds.false_refusals:.2g} % of honest groups are refused (95 %)"
    more = (
        "; calibrate again with more --rollouts for a smaller bound"
        if thresholds.false_refusals > FEW
        else ""
    )
    return f"Verification thresholds of {thresholds.groups:,} honest groups: {bound}{more}."


def over(plan: RunPlan, flags: Mapping[str, object]) -> RunPlan:
    """The plan with the flags that were given over it, checked like the file. Raises LocalError."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert({**msgspec.to_builtins(plan), **given}, RunPlan)
    except msgspec.ValidationError as error:
        named = _NAMED.search(str(error))
        name = named[1] if named else ""
        if name not in ALLOWED:
            raise LocalError(f"These flags make no run: {error}. See `nous-node init --help`.") from error
        raise LocalError(
            f"--{name.replace('_', '-')} cannot be {given[name]}: it takes {ALLOWED[name]}. "
            "See `nous-node init --help`."
        ) from error
