"""`nous-node env check`: whether an environment can be relied on, one row for each thing that goes wrong.

    rows = check(place, config, settings, hosts, tasks)

It is made in several processes and played by policies without weights. What a trainer would find out later,
group by group, comes out here: tasks that differ between processes, rewards that a replay does not give
again, nonsense that is paid, answers that make it raise or hang.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import msgspec

from nous_node.envs.batcher import Outcome
from nous_node.envs.environment import Environment, HeldOut, PolicySettings
from nous_node.envs.errors import EnvError, EnvironmentFailed
from nous_node.envs.registry import Place
from nous_node.envs.remote import RemoteEnvironment, RemoteHeldOut
from nous_node.envs.replay import replay
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.rollouts import Engine, RolloutGroup, Trajectory
from nous_node.protocol.runs import Setting

from .env_garbage import FORMS, NONSENSE, Babbler, Dreamer
from .env_hosts import FIRST, HASHED, SECOND, Hosts, Spot, played
from .wording import plural, size

Verdict = Literal["ok", "warning", "FAILED", "skipped"]

DOMAIN_CHECK: Final = b"nous/env-check/1\x00"
"""Seeds of tasks that are checked: no run assigns them."""

GROUP: Final = 4
TURN_TOKENS: Final = 512
CONTEXT: Final = 32_768
"""Of the policies that check: room for long rules, and for a few turns."""
LONG_TOKENS: Final = 12_288
"""Sampled tokens of an answer of nonsense: the longest one fits at a token a byte."""

PAID_WARN: Final = 0.05
PAID_FAIL: Final = 0.2
"""Mean rewards of nonsense: graders pay a little for the right form, and by accident."""

SLOW_S: Final = 1.0
"""Seconds of one task: a laptop generates a short group in that time."""

ANSWERS: Final = 64
"""Answers that are scored at once to see how long that takes."""

REWARD: Final = 1e-6
"""Difference of rewards that a replay may show: as runs allow."""

SPACE: Final = 0.75
"""Share of its address space beyond which there is little left."""

_HOLDS: Final = ("ok", "warning")

_DENIED: Final = (
    "Operation not permitted",
    "Permission denied",
    "Network is unreachable",
    "name resolution",
    "Read-only file system",
    "Connection refused",
)


class Row(msgspec.Struct, frozen=True):
    """One thing that was looked at. With `--json` these are the keys."""

    name: str
    verdict: Verdict
    text: str


class Checked(msgspec.Struct, frozen=True):
    """All rows of one environment."""

    environment: str
    verdict: Verdict
    exact: bool
    """Whether it says that it is exact, and was."""
    seconds: float
    rows: list[Row]


ROWS: Final = (
    "loads",
    "facts",
    "runs",
    "tasks",
    "hash seed",
    "replay",
    "nonsense",
    "speed",
    "turns",
    "sandbox",
    "memory",
)
"""In the order in which they are looked at."""


@dataclass
class Check:
    """One environment under way."""

    place: Place
    config: Mapping[str, Setting]
    settings: PolicySettings
    hosts: Hosts
    seeds: Sequence[bytes]
    rows: list[Row] = field(default_factory=list)
    spots: list[Spot] = field(default_factory=list)
    """The tasks: of the lowest and the highest level in turns."""
    heard: str = ""
    """What stood in the output of the process before."""

    def run(self) -> Checked:
        """Never raises what an environment does wrong."""
        began = time.monotonic()
        try:
            self._steps()
        except EnvError as error:
            self._say(ROWS[len(self.rows)], "FAILED", f"{error}{_step(str(error))}")
        for name in ROWS[len(self.rows) :]:
            self._say(name, "skipped", "What comes before it failed.")
        verdicts = [row.verdict for row in self.rows]
        worst: Verdict = "FAILED" if "FAILED" in verdicts else "warning" if "warning" in verdicts else "ok"
        same = all(row.verdict in _HOLDS for row in self.rows if row.name in ("tasks", "replay"))
        exact = same and self.place.info.reproducible == "exact"
        return Checked(self.place.info.id, worst, exact, time.monotonic() - began, self.rows)

    def _steps(self) -> None:
        began = time.monotonic()
        self.heard = self.hosts.output(self.place)
        first = self.hosts.make(self.place, self.config, FIRST)
        where = "a sandboxed process" if self.place.launch.sandboxed else "a process without a sandbox"
        self._say("loads", "ok", f"Made in {where} in {time.monotonic() - began:.1f} s.")
        self._facts(first)
        self.spots = [Spot(seed, first.levels * (i % 2)) for i, seed in enumerate(self.seeds)]
        began = time.monotonic()
        self._known(played(first, self.settings, Dreamer(self.settings), self.spots[:1]))
        self._say("runs", "ok", f"A group of {GROUP} in {time.monotonic() - began:.2f} s.")
        dreamer = Dreamer(self.settings)
        began = time.monotonic()
        groups = self._known(played(first, self.settings, dreamer, self.spots))
        took = (time.monotonic() - began) / len(self.spots)
        self._tasks(groups)
        self._hashed(groups)
        self._replay(groups)
        self._nonsense(first)
        self._speed(first, took)
        self._turns(groups, dreamer)
        self._traces()

    def _say(self, name: str, verdict: Verdict, text: str) -> None:
        self.rows.append(Row(name, verdict, text))

    def _known(self, outcomes: Sequence[Outcome]) -> list[list[Trajectory]]:
        """Raises the first failure."""
        groups = []
        for outcome in outcomes:
            if isinstance(outcome, EnvironmentFailed):
                raise outcome
            groups.append(outcome)
        return groups

    # --- rows --------------------------------------------------------------------------------------

    def _facts(self, environment: Environment) -> None:
        info, wrong = self.place.info, []
        if not info.verifiable:
            wrong.append("no trainer can check it, so `init` refuses it")
        if info.network:
            wrong.append("it needs a network, so whoever joins has to allow it")
        if not info.description:
            wrong.append("it has no description; give its `info` one sentence")
        if info.max_turns < 1 or info.agents < 1 or not info.version:
            self._say(
                "facts", "FAILED", "`max_turns`, `agents` and `version` of its `info` cannot be empty or 0."
            )
            return
        told = f"{info.reproducible}, scorer {info.scorer}, levels 0 to {environment.levels}"
        self._say("facts", "warning" if wrong else "ok", f"{told}{'; ' + '; '.join(wrong) if wrong else ''}.")

    def _tasks(self, groups: Sequence[list[Trajectory]]) -> None:
        """The same tasks in another process, one by one, in the other order."""
        second = self.hosts.make(self.place, self.config, SECOND)
        again = self._elsewhere(second)
        found = _difference(groups, again)
        if self.place.info.reproducible == "none":
            said = found or "nothing differed"
            self._say("tasks", "skipped", f"It does not claim to repeat itself ({said}).")
        elif found:
            self._say("tasks", "FAILED", f"{found} in another process and order: look for {_SOURCES}.")
        elif len(self.seeds) > 1 and len({_texts(group) for group in groups}) == 1:
            self._say(
                "tasks", "warning", f"All {len(groups)} seeds give the same task: derive it from the seed."
            )
        else:
            self._say(
                "tasks", "ok", f"{plural(len(groups), 'task')} equal in two processes, in either order."
            )

    def _elsewhere(self, environment: Environment) -> list[list[Trajectory]]:
        outcomes = [
            played(environment, self.settings, Dreamer(self.settings), [spot])[0]
            for spot in reversed(self.spots)
        ]
        return self._known(outcomes[::-1])

    def _hashed(self, groups: Sequence[list[Trajectory]]) -> None:
        if self.place.info.reproducible == "none":
            self._say("hash seed", "skipped", "It does not claim to repeat itself.")
            return
        found = _difference(groups, self._elsewhere(self.hosts.make(self.place, self.config, HASHED)))
        if found:
            text = f"{found} with another PYTHONHASHSEED. Nodes set it to 0; better sort sets before use."
            self._say("hash seed", "warning", text)
        else:
            self._say("hash seed", "ok", "Equal with another PYTHONHASHSEED.")

    def _replay(self, groups: Sequence[list[Trajectory]]) -> None:
        """As a trainer verifies, in the other process."""
        if self.place.info.reproducible == "none":
            self._say("replay", "skipped", "It does not claim to repeat itself.")
            return
        second = self.hosts.make(self.place, self.config, SECOND)
        engine = Engine("check", "1", "float32", "cpu")
        for spot, group in zip(self.spots, groups, strict=True):
            record = RolloutGroup(bytes(32), 0, self.place.info.id, engine, group)
            try:
                replay(second, second.task(*spot), record, self.settings, REWARD)
            except RemoteError as error:
                self._say("replay", "FAILED", f"A trainer would refuse honest groups of it: {error}")
                return
        self._say("replay", "ok", f"{plural(len(groups), 'group')} replayed from tokens give the same.")

    def _nonsense(self, environment: RemoteEnvironment) -> None:
        most = LONG_TOKENS if self.place.info.max_turns == 1 else TURN_TOKENS
        settings = replace(self.settings, group=len(NONSENSE), max_tokens=most)
        paid: dict[str, list[list[float]]] = {}
        for form in FORMS:
            texts = [form.format(text) for text in NONSENSE]
            outcomes = played(environment, settings, Babbler(settings, texts), self.spots[:4])
            for outcome in outcomes:
                if isinstance(outcome, EnvironmentFailed):
                    text = self._culprit(environment, settings, texts)
                    self._say("nonsense", "FAILED", f"An answer makes it fail{text}: {outcome}")
                    return
            paid[form] = [[one.reward for one in group] for group in self._known(outcomes)]
        self._paid(paid)

    def _culprit(self, environment: RemoteEnvironment, settings: PolicySettings, texts: Sequence[str]) -> str:
        """Which of the texts is not taken."""
        alone = replace(settings, group=1)
        for text in texts:
            (outcome,) = played(environment, alone, Babbler(alone, [text]), self.spots[:1])
            if isinstance(outcome, EnvironmentFailed):
                return f" ({text[:40]!r})"
        return ""

    def _paid(self, paid: Mapping[str, Sequence[Sequence[float]]]) -> None:
        means = {
            form: _mean([reward for group in groups for reward in group]) for form, groups in paid.items()
        }
        form, mean = max(means.items(), key=lambda pair: pair[1])
        told = f"{len(NONSENSE)} texts that answer nothing are paid {mean:.3f} on average"
        if form != FORMS[0]:
            told += f" in the form {form.format('...')}"
        if mean > PAID_FAIL:
            self._say(
                "nonsense", "FAILED", f"{told}: a policy learns to say them. Pay for right answers only."
            )
        elif mean > PAID_WARN:
            self._say("nonsense", "warning", f"{told}; look at what its scorer pays for.")
        else:
            self._say("nonsense", "ok", f"{told}; all rewards are finite.")

    def _speed(self, environment: RemoteEnvironment, took: float) -> None:
        told = f"{1 / max(took, 1e-6):,.0f} tasks/s" if took < SLOW_S else f"{took:.1f} s a task"
        if isinstance(environment, RemoteHeldOut) and isinstance(environment, HeldOut):
            (task, *_) = environment.held_out(1)
            began = time.monotonic()
            environment.score_all(task, [(text, True) for text in (NONSENSE * ANSWERS)[:ANSWERS]])
            told += f", {ANSWERS / max(time.monotonic() - began, 1e-6):,.0f} scores/s"
        if took > SLOW_S:
            self._say("speed", "warning", f"{told}: nodes wait for it; make tasks and scores cheaper.")
        else:
            self._say("speed", "ok", f"{told}, in one process, groups of {GROUP}.")

    def _turns(self, groups: Sequence[list[Trajectory]], dreamer: Dreamer) -> None:
        """Tokens of earlier turns stay: each turn begins with all that came before it."""
        if self.place.info.max_turns == 1:
            self._say("turns", "skipped", "It has one turn.")
            return
        if any(one.parents is not None for group in groups for one in group):
            self._say("turns", "ok", "Its trajectories branch; the replay has compared their paths.")
            return
        logs = dreamer.asked.values()
        changed = any(
            asked[: len(said)] != said
            for log in logs
            for said, asked in zip(log[1::2], log[2::2], strict=False)
        )
        if changed:
            self._say(
                "turns", "FAILED", "A turn does not begin with the tokens of the turn before; use Session."
            )
            return
        turns = sum(len(log) // 2 for log in logs)
        form = "the model's conversation format" if self.settings.chat is not None else "plain text"
        self._say("turns", "ok", f"{plural(turns, 'turn')} in {form}, each behind the very tokens before it.")

    def _traces(self) -> None:
        traces = self.hosts.traces(self.place)
        said = traces.stderr.removeprefix(self.heard)
        wrong, launch = [], self.place.launch
        if not launch.sandboxed:
            wrong.append("it runs without the sandbox, with all that you can read and reach")
        if launch.network:
            wrong.append("it has this machine's network")
        if traces.processes:
            wrong.append(
                f"it left {plural(len(traces.processes), 'process')} running ({traces.processes[0]})"
            )
        if any(word in said for word in _DENIED):
            wrong.append("something was refused to it")
        notes = [*wrong]
        if traces.files > 0:
            notes.append(f"{plural(traces.files, 'file')} in its own folder /tmp")
        if said:
            notes.append(f"it wrote to its output: {said[-160:]}")
        told = "; ".join(notes) or "no network, no files, no processes of its own"
        self._say("sandbox", "warning" if wrong else "ok", f"{told[0].upper()}{told[1:]}.")
        used = f"{size(traces.resident)} in use, {size(traces.space)} of {size(launch.memory)} address space"
        tight = traces.space > SPACE * launch.memory
        self._say("memory", "warning" if tight else "ok", f"{used}{': little is left' if tight else ''}.")


_SOURCES: Final = "random numbers that the seed does not decide, clocks, and what is kept from task to task"


def seeds(count: int) -> list[bytes]:
    """SHA-256(DOMAIN_CHECK || u64le(i))."""
    return [hashlib.sha256(DOMAIN_CHECK + i.to_bytes(8, "little")).digest() for i in range(count)]


def _step(text: str) -> str:
    """What to do about a failure, where its sentence does not say so."""
    if "no conversation format" in text:
        return " Name a chat model with --model FOLDER."
    if any(word in text for word in _DENIED):
        return (
            " The sandbox has no network, starts no processes, and has no files but its own: do without, or "
            "trust the environment with --trust-env NAME."
        )
    return ""


def _texts(group: Sequence[Trajectory]) -> tuple[bytes, ...]:
    """All that a group says: answers follow from what was asked, so equal ones are of equal tasks."""
    return tuple(one.tokens for one in group)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _difference(here: Sequence[list[Trajectory]], there: Sequence[list[Trajectory]]) -> str:
    """What differs first between groups of the same seeds; empty: nothing."""
    for number, (ours, theirs) in enumerate(zip(here, there, strict=True)):
        if ours == theirs:
            continue
        if len(ours) != len(theirs):
            return f"Task {number} has {len(ours)} trajectories here and {len(theirs)}"
        for one, other in zip(ours, theirs, strict=True):
            if one.tokens != other.tokens or one.segments != other.segments:
                return f"Texts of task {number} differ"
            if one.reward != other.reward:
                return (
                    f"Rewards of task {number} differ for equal answers ({one.reward:g} and {other.reward:g})"
                )
        return f"Components, ends or advantages of task {number} differ"
    return ""
