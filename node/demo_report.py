"""The outcome of a demo: measured on base and final checkpoint, written as JSON, told in a few lines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nous_node.protocol.errors import LocalError

from .events import TrainerStatus, VersionReport, VolunteerStatus
from .wording import count, duration, plural, refusals, share

if TYPE_CHECKING:
    from nous_node.envs.environment import HeldOut
    from nous_node.trainer.policy import Policy

    from .runfolder import RunFolder

TASKS = 512
"""Held-out tasks of a measurement: its standard error is at most .022."""
GREEDY = 1e-4
"""A temperature at which a logit that is larger by .004 has all the probability that a double can show."""


class CurvePoint(msgspec.Struct, frozen=True):
    """One published version."""

    seconds: float
    version: int
    reward: float
    correct: float
    greedy: float | None


class CheckpointFacts(msgspec.Struct, frozen=True):
    """The last published checkpoint: its folder, and its hash in hex."""

    path: str
    hash: str


class Measured(msgspec.Struct, frozen=True):
    """Share of held-out tasks that are answered rightly."""

    greedy: float
    sampled: float


class DemoReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `demo --report` writes."""

    greedy_before: float
    greedy_after: float
    sampled_before: float
    sampled_after: float
    seconds: float
    """From the start of the processes until they were asked to stop."""
    checkpoints: int
    """Versions published, the base included."""
    groups_accepted: int
    groups_refused: dict[str, int]
    bytes_per_trained_token: float
    """Bytes of rollout envelopes that reached the trainer, for each sampled token that it verified."""
    generated_tokens_per_second: float
    """Of all volunteers together, over `seconds`."""
    volunteers: int
    volunteers_left: int
    """Of them, those that still ran at the end."""
    seed: int
    checkpoint: CheckpointFacts
    versions: list[CurvePoint]


def measure(folder: Path, run: RunFolder) -> Measured:
    """Held-out accuracy of a checkpoint of the run, on its first environment. Imports torch."""
    from nous_node.envs import environment as environments
    from nous_node.envs.registry import make
    from nous_node.trainer.policy import Policy

    entry = run.manifest.environments[0]
    environment = make(entry.id, entry.config)
    if not isinstance(environment, environments.HeldOut):
        raise LocalError(f"The environment {entry.id!r} has no held-out tasks; the demo needs one that has.")
    policy = Policy.load(folder, run.manifest.model.dtype)
    return Measured(
        greedy=_accuracy(policy, environment, run, GREEDY),
        sampled=_accuracy(policy, environment, run, run.manifest.sampling.temperature),
    )


def _accuracy(policy: Policy, environment: HeldOut, run: RunFolder, temperature: float) -> float:
    from nous_node.trainer.generate import Request, generate

    rules = run.manifest.sampling
    tasks = environment.held_out(TASKS)
    requests = [
        Request(
            policy.tokenizer.encode(environment.prompt(task)),
            hashlib.sha256(task.seed).digest(),
            0,
            rules.max_tokens,
        )
        for task in tasks
    ]
    right = 0
    for task, made in zip(tasks, generate(policy, requests, temperature, rules.stop), strict=True):
        ended = made.finish == "stop"
        answer = policy.tokenizer.decode(made.tokens[:-1] if ended else made.tokens)
        right += environment.score(task, answer, ended).reward >= 1.0
    return right / len(tasks)


def make_report(
    *,
    before: Measured,
    after: Measured,
    trainer: TrainerStatus,
    volunteers: Sequence[VolunteerStatus],
    versions: Sequence[VersionReport],
    seconds: float,
    asked: int,
    left: int,
    seed: int,
    checkpoint: Path,
) -> DemoReport:
    """Puts together what was measured and what the processes reported last."""
    newest = max(versions, key=lambda report: report.version, default=None)
    return DemoReport(
        greedy_before=before.greedy,
        greedy_after=after.greedy,
        sampled_before=before.sampled,
        sampled_after=after.sampled,
        seconds=round(seconds, 1),
        checkpoints=1 + max(trainer.version, newest.version if newest else 0),
        groups_accepted=trainer.accepted,
        groups_refused=dict(trainer.refused),
        bytes_per_trained_token=round(trainer.wire_bytes / max(1, trainer.tokens_verified), 2),
        generated_tokens_per_second=round(sum(v.generated_tokens for v in volunteers) / seconds, 1),
        volunteers=asked,
        volunteers_left=left,
        seed=seed,
        checkpoint=CheckpointFacts(str(checkpoint), newest.checkpoint if newest else trainer.checkpoint),
        versions=[CurvePoint(v.seconds, v.version, v.reward, v.correct, v.greedy) for v in versions],
    )


def told(report: DemoReport, required_rise: float) -> str:
    """The outcome for a person."""
    rise = report.greedy_after - report.greedy_before
    ok = "learned" if rise >= required_rise else f"did not learn (a rise of {required_rise} was asked for)"
    return "\n".join(
        (
            f"The policy {ok}:",
            f"  held-out accuracy, greedy   {share(report.greedy_before)} -> {share(report.greedy_after)}",
            f"  held-out accuracy, sampled  {share(report.sampled_before)} -> {share(report.sampled_after)}",
            f"  time                        {duration(report.seconds)}, "
            f"{plural(report.checkpoints, 'checkpoint')}, {plural(report.volunteers, 'volunteer')}",
            f"  rollout groups              {report.groups_accepted:,} accepted, "
            f"{refusals(report.groups_refused)}",
            f"  generated                   {count(report.generated_tokens_per_second)} tokens/s",
            f"  on the wire                 {report.bytes_per_trained_token:.1f} bytes per trained token",
            f"  last checkpoint             {report.checkpoint.path}",
            f"  its hash                    {report.checkpoint.hash}",
        )
    )
