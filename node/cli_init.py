"""`nous-node init`: a run from flags over a TOML file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError

from .cli_commands import home_hint, home_path
from .create import create_run
from .home import Home
from .plan import RunPlan, read_plan, with_environments


def make_run(
    name: str, config: Path | None, flags: Mapping[str, object], env: list[str], home: Path | None
) -> str:
    """`nous-node init`: the sentence to print."""
    plan = with_environments(over(read_plan(config), flags), env)
    opened = Home.open(home_path(home))
    run = create_run(opened.runs / name, name, opened.identity(), plan, time.time_ns() // 1_000_000)
    manifest = run.manifest
    environments = ", ".join(entry.id for entry in manifest.environments)
    return (
        f"Made the run {name} ({run.run.hex()[:16]}) in {run.path}: "
        f"{manifest.model.parameters:,} parameters, {environments}.\n"
        f"Train it with: nous-node train {name}{home_hint(home)}"
    )


def over(plan: RunPlan, flags: Mapping[str, object]) -> RunPlan:
    """The plan with the flags that were given over it, checked like the file. Raises LocalError."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return msgspec.convert({**msgspec.to_builtins(plan), **given}, RunPlan)
    except msgspec.ValidationError as error:
        raise LocalError(f"These flags make no run: {error}. See `nous-node init --help`.") from error
