"""verifiers, the v0 interface: any package with `load_environment()`. Spec: `specs/envs/verifiers.md`.

    row = dataset[u64le(seed[0:8]) mod its length]
    samples = `policy.group` times `environment.rollout(row, client)`, with a client of ours for each
    reward = what the rubric gives the sample, all samples scored together

The package runs as it is. Its messages become tokens by `conversation`, so that what was sampled is never
tokenised again. Nothing of the library is imported before an environment is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from nous_node.protocol.runs import Setting

from .environment import Environment, EnvironmentInfo
from .errors import UnknownEnvironment

NAME: Final = "verifiers-v0"

VERSION: Final = "1"
"""Raised whenever the adapter gives other prompts or rewards for the same seed and tokens."""

UNBOUNDED: Final = 65_536
"""`max_turns` of what has no bound of its own before it is made: every turn has a token, and the context of
a run ends it."""

PACKAGE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""Names of distributions that are also module names once `-` is `_`."""

DISTRIBUTIONS: Final = ("verifiers", "datasets", "math-verify")
"""Whose releases decide texts, the order of rows and scores, beside the package itself."""


def row_of(seed: bytes, rows: int) -> int:
    """Which of so many rows is the task of a seed. [VFR-2]"""
    return int.from_bytes(seed[:8], "little") % rows


class VerifiersV0:
    """Family `verifiers-v0/PACKAGE`. Config: the arguments of its `load_environment`, and `nous.format`,
    `nous.split` and `nous.credit`."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        """Any installed package may be one."""
        return ()

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if PACKAGE.fullmatch(member) is None:
            raise UnknownEnvironment(
                f"{member[:100]!r} is no name of a package: {NAME}/NAME takes what `pip install` takes."
            )
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="seeded",
            scorer="sandbox",
            network=False,
            max_turns=UNBOUNDED,
            agents=1,
            distributions=(*DISTRIBUTIONS, member),
            description=f"The verifiers package {member}, by its load_environment().",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        from .verifiers_v0_play import Played

        return Played(cls.facts(member), member, config)
