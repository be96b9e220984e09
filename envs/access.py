"""What this machine's owner allows environments that are not ours. A run never decides any of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

DEFAULT_MEMORY: Final = 2 << 30
"""Bytes of a child's address space: sympy, numpy and the word lists of text games take a quarter of it."""


DEFAULT_SECONDS: Final = 60
"""Of one call: no prompt and no scorer takes a minute."""


class Access(msgspec.Struct, frozen=True):
    """Set by flags and settings; the default allows what needs no permission."""

    trusted: tuple[str, ...] = ()
    """Environments or families that run without the sandbox, with all that this user can read."""
    folder: str = ""
    """Where the interpreters of recipes are, `<home>/envs`; empty: only our own is used."""
    servers: dict[str, str] = {}
    """Environment id -> URL of the server that it may talk to."""
    memory: int = DEFAULT_MEMORY
    """Bytes of address space of one host process."""
    seconds: float = DEFAULT_SECONDS
    """That an environment may take for one call."""
    hidden: tuple[str, ...] = ()
    """Folders that no environment sees: the home, with its keys."""

    @classmethod
    def of(
        cls,
        home: Path,
        trusted: tuple[str, ...] = (),
        servers: Mapping[str, str] | None = None,
        memory: int = DEFAULT_MEMORY,
        seconds: float = DEFAULT_SECONDS,
    ) -> Access:
        """Of a node with this home."""
        folder = str(home / "envs")
        return cls(trusted, folder, dict(servers or {}), memory, seconds, hidden=(str(home),))

    def trusts(self, name: str) -> bool:
        """Whether an environment runs without the sandbox: it or its family was named."""
        return any(name == one or name.startswith(f"{one}/") for one in self.trusted)


NONE: Final = Access()
"""Nothing is trusted, nothing is installed apart, no server may be talked to."""
