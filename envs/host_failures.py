"""What went wrong with a host process or an environment in it, in the words of the node."""

from __future__ import annotations

from .errors import BadConfig, BrokenEnvironment, CannotStart, EnvError, EnvironmentFailed, UnknownEnvironment


def failure(name: str, cause: object) -> EnvironmentFailed:
    """Of a group of the environment `name`."""
    return EnvironmentFailed(f"The environment {name} failed: {cause}")


def cannot_start(why: str) -> CannotStart:
    """Nobody's fault but this machine's."""
    return CannotStart(f"The process for environments cannot be started here: {why}")


def refusal(name: str, text: str, kind: str) -> EnvError:
    """What a host refused with this kind; `name` says what was asked about."""
    match kind:
        case "config":
            return BadConfig(text)
        case "unknown":
            return UnknownEnvironment(text)
        case "failed":
            return EnvironmentFailed(f"The {name} failed: {text}")
        case _:
            return BrokenEnvironment(f"The {name} cannot be used: {text}")
