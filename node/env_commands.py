"""The commands about environments, behind their flags: `env try`, `env check` and `eval`.

Torch is imported by those that need a policy.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from nous_node.envs import registry
from nous_node.envs.access import Access
from nous_node.envs.errors import EnvironmentFailed

from .cli_commands import access_of, home_path
from .cli_exit import Exit
from .env_check import CONTEXT, GROUP, TURN_TOKENS
from .env_config import read_config
from .env_policy import trial
from .env_survey import Survey, print_checked, survey_family
from .home import Home
from .step_view import steps
from .wording import printable

if TYPE_CHECKING:
    from .eval_model import EvalOptions

MAX_CAUSE = 2_000
"""Characters of what went wrong with an environment."""


@dataclass(frozen=True, slots=True)
class TryOptions:
    """What the command line of `env try` says."""

    model: str | None
    seed: int
    config: list[str]
    level: int
    group: int
    max_tokens: int | None
    temperature: float
    html: Path | None
    tokens: bool


def allowed(home: Path | None, trusted: list[str] | None, servers: list[str] | None) -> Access:
    """What environments may do, by flags over the home's settings."""
    return access_of(Home.open(home_path(home)), trusted, servers)


def run_try(
    name: str,
    options: TryOptions,
    home: Path | None,
    trusted: list[str] | None,
    servers: list[str] | None,
    *,
    json: bool,
) -> int:
    """Plays a group and shows it; the exit code. Raises LocalError, ModelError, an EnvError."""
    from .env_colours import print_tried
    from .env_page import write_page
    from .env_try import try_once

    access, config = allowed(home, trusted, servers), read_config(options.config)
    environment = registry.make(name, config, access)
    tried_with = trial(options.model, options.group, options.max_tokens)
    version = registry.version(name, config, access)
    try:
        tried = try_once(tried_with, environment, version, options.seed, options.level, options.temperature)
    except EnvironmentFailed as error:
        print(_failed(str(error), chat=tried_with.settings.chat is not None), file=sys.stderr)
        return Exit.FAILED
    if options.html is not None:
        write_page(options.html, tried)
    if json:
        print(msgspec.json.encode(tried).decode())
        return Exit.OK
    print_tried(tried, Console(highlight=False, markup=False), tokens=options.tokens)
    if options.html is not None:
        print(f"Written to {options.html}.")
    return Exit.OK


def _failed(text: str, *, chat: bool) -> str:
    step = "" if chat or "conversation format" not in text else " Name a chat model with --model FOLDER."
    return printable(f"The group was given up. {text}{step}", MAX_CAUSE)


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What the command line of `env check` says."""

    model: str | None
    config: list[str]
    tasks: int
    jobs: int
    deadline: float | None


def run_check(
    name: str,
    options: CheckOptions,
    home: Path | None,
    trusted: list[str] | None,
    servers: list[str] | None,
    *,
    json: bool,
) -> int:
    """Checks an environment, or all members of a family; the exit code. Raises LocalError, an EnvError."""
    access, config = allowed(home, trusted, servers), read_config(options.config)
    base = trial(options.model, GROUP).settings
    settings = replace(base, max_tokens=TURN_TOKENS, context=CONTEXT)
    survey = Survey(access, config, settings, options.tasks, options.deadline)
    family = name in registry.entries() and registry.offer(name, access).members is not None
    if family:
        return survey_family(survey, name, options.jobs, json=json)
    checked = survey.check(name)
    if json:
        print(msgspec.json.encode(checked).decode())
    else:
        print_checked(checked, Console(highlight=False, markup=False))
    return Exit.FAILED if checked.verdict == "FAILED" else Exit.OK


def run_eval(
    options: EvalOptions,
    home: Path | None,
    trusted: list[str] | None,
    servers: list[str] | None,
    *,
    json: bool,
) -> int:
    """Plays held-out tasks of each environment. Raises LocalError, ModelError, an EnvError."""
    from .eval_model import evaluate, score_lines

    access = allowed(home, trusted, servers)
    with steps(as_json=json) as told:
        scores = evaluate(options, access, told)
    for line in [msgspec.json.encode(one).decode() for one in scores] if json else score_lines(scores):
        print(line)
    return Exit.FAILED if all(one.failed == one.tasks for one in scores) else Exit.OK
