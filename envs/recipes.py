"""What the ecosystems need: for each adapter that ships with us, the releases it is written for.

    nous-node env install NAME      a virtual environment with exactly these, `<home>/envs/NAME`

Other releases give other tasks or rewards, and some ecosystems clash with each other or with this package:
hence a place of its own for each. `pins/NAME.txt` beside this module holds the release of every distribution
that such an environment had when the adapter was written, dependencies of dependencies included: pip's
constraints, so that two nodes get the same ones and agree on an environment's version. It is what
`pip install --dry-run --report` resolves without it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Final

HOST: Final = ("cryptography", "msgpack", "msgspec", "zstandard")
"""What our side of the pipe imports in an interpreter that is not ours: the protocol's encoding and keys."""

PINS: Final = Path(__file__).with_name("pins")


@dataclass(frozen=True, slots=True)
class Recipe:
    """One ecosystem."""

    name: str
    """Of the recipe, of its folder and of its family of environments."""
    requirements: tuple[str, ...]
    """Distributions with exact releases, as pip reads them: what the adapter was written for."""
    imports: tuple[str, ...]
    """Top-level modules that are there where the recipe is."""
    note: str
    """One sentence for people: what one gets."""
    bare: tuple[str, ...] = ()
    """Installed without what they depend on, most of which their environments never import."""
    sources: tuple[str, ...] = ()
    """Distributions that come as source only: their own code builds them during the install."""
    needs: tuple[str, ...] = HOST
    """What the host process imports beside it."""
    folder: Path = PINS
    """Where its pins are."""

    @property
    def pins(self) -> Path:
        """pip's constraints for everything that comes with it."""
        return self.folder / f"{self.name}.txt"

    @property
    def is_here(self) -> bool:
        """Whether this very interpreter has the recipe's releases; imports nothing."""
        return all(_has(requirement) for requirement in (*self.bare, *self.requirements))


_ALL: Final = (
    Recipe(
        "reasoning-gym",
        ("reasoning-gym==0.1.25",),
        ("reasoning_gym",),
        "105 kinds of generated puzzles with a grader each; some 380 MB.",
        sources=("cellpylib", "pycosat", "zss"),
    ),
    Recipe(
        "textarena",
        ("textarena==0.7.4",),
        ("textarena",),
        "Text games for one player or more, played against oneself; some 230 MB.",
        sources=("chess",),
        needs=(*HOST, "numpy"),  # Sokoban draws from it, and textarena does not ask for it
    ),
    Recipe(
        "gymnasium",
        ("gymnasium==1.4.0",),
        ("gymnasium",),
        "The toy_text games of Gymnasium, told in words; some 140 MB.",
    ),
    Recipe(
        "verifiers-v0",
        ("verifiers==0.1.14",),
        ("verifiers",),
        "Packages with a load_environment() of their own, added with --with; some 710 MB.",
        sources=("wget",),
    ),
    Recipe(
        "verifiers",
        ("verifiers==0.4.0",),
        ("verifiers",),
        "Tasksets of the v1 interface, added with --with; some 570 MB.",
    ),
    Recipe(
        "openenv",
        ("openenv==0.10.0",),
        ("openenv",),
        "A client for OpenEnv servers, named with --env-server; some 480 MB.",
    ),
    Recipe(
        "atropos",
        (
            "aiohttp==3.14.5",
            "jinja2==3.1.6",
            "jsonlines==4.0.0",
            "markdown==3.11.3",
            "math-verify==0.9.0",
            "numpy==2.4.6",
            "openai==3.57.0",
            "pydantic==2.14.4",
            "pydantic-cli==10.0.0",
            "pyyaml==6.0.4",
            "requests==2.34.2",
            "rich==15.0.0",
            "tenacity==9.2.1",
            "transformers==4.57.6",  # below 5: there apply_chat_template returns no list, and masks go wrong
            "wandb==0.31.0",  # imported by BaseEnv, never used here
        ),
        ("atroposlib",),
        "Environments written for Atropos, added with --with; some 520 MB, without torch.",
        bare=("atroposlib==0.4.0",),
    ),
)

RECIPES: Final[Mapping[str, Recipe]] = MappingProxyType({recipe.name: recipe for recipe in _ALL})
"""By name, in the order of this file."""


@functools.cache
def _has(requirement: str) -> bool:
    name, _, wanted = requirement.partition("==")
    try:
        return version(name) == wanted
    except PackageNotFoundError:
        return False
