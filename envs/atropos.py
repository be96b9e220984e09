"""Atropos: an environment class written for it, unchanged. Spec: `specs/envs/atropos.md`.

    atropos/MODULE:CLASS      a subclass of `atroposlib.envs.base.BaseEnv` in a package that was installed
                              with `nous-node env install atropos --with PACKAGE`

    group: a copy of the environment as its `setup` left it, with random streams of the task's seed
    item = get_next_item()            with the counter that it steps set to the seed, where it has one
    scored = collect_trajectories(item)

Its server and its tokenizer are ours: they speak in the policy's own tokens. Masks, scores, advantages and
overrides of what it returns become rewards and advantages. Nothing of the library is imported before an
environment is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from nous_node.protocol.runs import Setting

from .environment import Environment, EnvironmentInfo
from .errors import UnknownEnvironment

NAME: Final = "atropos"

VERSION: Final = "1"
"""Raised whenever the adapter gives other prompts or rewards for the same seed and tokens."""

UNBOUNDED: Final = 65_536
"""`max_turns`: an environment has no bound that could be told before it plays; the context ends it."""

MEMBER: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*")
MAX_MEMBER: Final = 200
"""Characters; a run's names have 256."""

DISTRIBUTIONS: Final = ("atroposlib", "math-verify")
"""Whose releases decide scores, beside the package itself."""


class Atropos:
    """Family `atropos/MODULE:CLASS`. Config: fields of its env config, and `nous.counter`, `nous.items`."""

    recipe: ClassVar[str] = NAME

    @classmethod
    def members(cls) -> Sequence[str]:
        """Any class of an installed package may be one."""
        return ()

    @classmethod
    def facts(cls, member: str) -> EnvironmentInfo:
        if MEMBER.fullmatch(member) is None or len(member) > MAX_MEMBER:
            raise UnknownEnvironment(
                f"{member[:100]!r} is no class: write {NAME}/MODULE:CLASS, such as {NAME}/maths.server:GSM8k."
            )
        package = member.partition(":")[0].partition(".")[0]
        return EnvironmentInfo(
            id=f"{NAME}/{member}",
            version=VERSION,
            reproducible="seeded",
            scorer="sandbox",
            network=False,
            max_turns=UNBOUNDED,
            agents=1,
            distributions=(*DISTRIBUTIONS, package.replace("_", "-")),
            description=f"The Atropos environment {member.partition(':')[2]} of the package {package}.",
        )

    @classmethod
    def make(cls, member: str, config: Mapping[str, Setting]) -> Environment:
        from .atropos_play import Played

        return Played(cls.facts(member), member, config)
