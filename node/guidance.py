"""What the operator of a volunteer should do next: one sentence, from all that is known of its node in a run.

    banned | in quarantine -> wait, and what to mend
    recent refusals        -> what the most telling one asks for
    otherwise              -> nothing, and why

`advice.py` knows a step for each code; here the figures, the engine and the run's manifest make it concrete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

from nous_node.envs import registry
from nous_node.envs.access import NONE, Access
from nous_node.envs.errors import EnvError
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Standing
from nous_node.protocol.rollouts import Engine
from nous_node.protocol.runs import EnvironmentEntry, RunManifest

from .advice import advice
from .outbox import SentGroup
from .reputation import NEAR, PASSED, SOFT
from .wording import duration, moment, plural, printable

RECENT = 100
"""Last groups with a receipt that are looked at: what was mended before them is history."""

USUAL_SHARE = 0.5
"""Of recent groups that may be refused with soft codes before the node is told: bursts are usual."""

_WRONG: Mapping[str, str] = {Code.FUTURE_DATED: "before their own time", Code.EXPIRED: "after their end"}
_ENGINE = frozenset({Code.LOGPROB_MISMATCH, Code.SAMPLING_MISMATCH, Code.DRIFT})
_ENVIRONMENT = frozenset({Code.PROMPT_MISMATCH, Code.REWARD_MISMATCH, Code.ADVANTAGES, Code.GROUP_SIZE})


def installed_version(entry: EnvironmentEntry, access: Access = NONE) -> str:
    """Version here of an environment with a run's config; empty where it is not installed or is broken."""
    try:
        return registry.version(entry.id, entry.config, access)
    except EnvError:
        return ""


@dataclass(frozen=True, slots=True)
class Guidance:
    """What is known of a volunteer in one run."""

    manifest: RunManifest
    engine: Engine | None
    """What made its last groups."""
    standing: Standing | None
    """A trainer's last word of its key."""
    history: Sequence[SentGroup]
    """Its groups, newest first."""
    installed: Callable[[EnvironmentEntry], str] = installed_version

    def next_step(self, now: float) -> str:
        """`now`: Unix milliseconds."""
        telling = self._telling()
        mend = None if telling is None else self._step(telling)
        match None if self.standing is None else self.standing.state:
            case "banned":
                return advice(Code.BANNED)
            case "quarantine" if self.standing is not None and self.standing.until > now:
                left = duration((self.standing.until - now) / 1000)
                return (
                    f"Wait until {moment(self.standing.until)} (for {left}): no group of this key is taken "
                    f"before.{'' if mend is None else f' Meanwhile: {_lower(mend)}'}"
                )
        return mend or self._nothing()

    def state(self, now: float) -> str:
        """How a trainer treats the key, in words."""
        standing = self.standing
        if standing is None:
            return "unknown: the trainer has not said yet"
        match standing.state:
            case "probation" if standing.accepted < PASSED:
                return f"on probation: {standing.accepted} of {plural(PASSED, 'group')}"
            case "probation":
                return (
                    f"on probation, until {PASSED} groups of two versions were accepted in it without faults"
                )
            case "throttled":
                return "throttled: an eighth of the run's rate, all groups audited, until more are accepted"
            case "quarantine" if standing.until > now:
                left = duration((standing.until - now) / 1000)
                return f"in quarantine until {moment(standing.until)} (in {left})"
            case "quarantine":
                return "quarantine is over; probation begins with the next group"
            case state:
                return printable(state, 32)

    def _recent(self) -> list[SentGroup]:
        return [group for group in self.history if group.state in ("accepted", "refused")][:RECENT]

    def _telling(self) -> SentGroup | None:
        """The last group of the refusal that says most: faults before what happens to honest nodes, and among
        those the most frequent."""
        recent = self._recent()
        refused = [group for group in recent if group.state == "refused" and group.code != Code.QUARANTINED]
        faults = [group for group in refused if group.code not in SOFT]
        if not faults and len(refused) <= USUAL_SHARE * len(recent):
            return None
        (code, _), *_ = Counter(group.code for group in faults or refused).most_common(1)
        return next(group for group in refused if group.code == code)

    def _nothing(self) -> str:
        recent = self._recent()
        if not recent and any(group.state == "waiting" for group in self.history):
            return "Nothing yet: the first receipts come once the trainer has judged the first groups."
        if not recent:
            return "Let the node run: it has made no group that was judged."
        accepted = sum(group.state == "accepted" for group in recent)
        return f"Nothing: {accepted} of the last {plural(len(recent), 'group')} were accepted."

    def _step(self, group: SentGroup) -> str:
        if group.code in _ENGINE:
            return self._engine_step(group)
        if group.code in _ENVIRONMENT:
            return self._environment_step(group)
        measured, threshold = group.measured, group.threshold
        match group.code:
            case Code.FUTURE_DATED | Code.EXPIRED if measured is not None:
                wrong = f"Messages arrive {measured / 1000:.0f} s {_WRONG[group.code]}"
                return f"{wrong}: {_lower(advice(group.code))}"
            case Code.STALE if measured is not None and threshold is not None:
                return (
                    f"Groups are {measured:.0f} versions old when they arrive, {threshold:.0f} are allowed: "
                    "this machine is slow for the run. Allow more --threads, or use a faster --device."
                )
            case Code.RATE:
                rate = self.manifest.limits.groups_per_second
                return f"Slow down: the run takes {rate:g} groups a second of one key; run one node with it."
            case Code.WITHHELD if measured is not None:
                return (
                    f"Of the tasks of this key {measured:.0f} never arrived: let the node end by itself "
                    "(Ctrl-C once), keep its home, and look for lost connections."
                )
        return advice(group.code)

    def _engine_step(self, group: SentGroup) -> str:
        """Another dtype, device or release than the run was calibrated for, else another build of torch."""
        engine, model = self.engine, self.manifest.model
        if engine is not None and engine.dtype and engine.dtype != model.dtype:
            return (
                f"Your dtype is {engine.dtype} but the run is calibrated for {model.dtype}: start again with "
                f"--device cpu, or with a client that computes in {model.dtype}."
            )
        figures = _figures(group)
        if engine is not None and engine.device not in ("", "cpu"):
            return (
                f"Groups made on {engine.device} are not what the run computes{figures}: start again with "
                f"--device cpu, or see `nous-node doctor --device {printable(engine.device, 32)}`."
            )
        ours = metadata.version("nous-node")
        if engine is not None and engine.version != ours:
            made = printable(engine.version, 64)
            return f"The groups were made by nous-node {made}; start again with {ours}, which is installed."
        if group.code != Code.DRIFT and (group.measured or 0.0) >= NEAR * (group.threshold or 1.0):
            return (
                f"Groups made here are far from what the run computes{figures}: stop the node, remove the "
                "folder `checkpoints` of this run in the home and start again; if it stays, run "
                "`nous-node doctor`."
            )
        return (
            f"The engine here computes slightly other numbers{figures}: run `nous-node doctor`, and install "
            "another build of torch if it agrees."
        )

    def _environment_step(self, group: SentGroup) -> str:
        """The environment whose version differs from the run's, where there is one."""
        for entry in self.manifest.environments:
            here = self.installed(entry)
            if here and here != entry.version:
                return (
                    f"{printable(entry.id, 64)} {printable(here, 64)} is installed here and the run uses "
                    f"{printable(entry.version, 64)}: install that version, and start again."
                )
        return advice(group.code)


def _figures(group: SentGroup) -> str:
    if group.measured is None or group.threshold is None:
        return ""
    return f" (measured {group.measured:.4g}, limit {group.threshold:.4g})"


def _lower(sentence: str) -> str:
    """To follow a colon; names such as `Ctrl-C` stay."""
    return sentence[:1].lower() + sentence[1:]
