"""The outcome of a demo: measured on base and final checkpoint, written as JSON, told in a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from nous_node.protocol.errors import LocalError

from .demo_clients import ClientFigures, table
from .events import TrainerStatus, VersionReport, VolunteerStatus
from .wording import count, duration, plural, refusals, share

if TYPE_CHECKING:
    from nous_node.envs.access import Access

    from .runfolder import RunFolder

TASKS = 512
"""Held-out tasks of a measurement: its standard error is at most .022. A quarter of it for other models than
the embedded one, which take a second a task on a core: at most .044."""


SMALL = 1_000_000
"""Parameters of a model that answers hundreds of tasks a second."""


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
    judged: Literal["greedy", "sampled"]
    """Which accuracy has to rise: greedy answers of the embedded policy, since training sharpens sampled ones
    in any case; sampled ones of other models, whose most probable answer may be right from the beginning."""
    model: str
    """Family and parameters."""
    environments: str
    tasks: int
    """Held-out tasks of each measurement."""
    environment_share: float
    """Of the volunteers' time with a batch in work: what environments took, sandbox and scoring included, and
    the engine did not."""
    checkpoint: CheckpointFacts
    versions: list[CurvePoint]
    clients: list[ClientFigures] = []
    """Of each key, where other implementations took part."""

    @property
    def rise(self) -> float:
        """Of the accuracy that is judged."""
        if self.judged == "greedy":
            return self.greedy_after - self.greedy_before
        return self.sampled_after - self.sampled_before


def held_out_count(run: RunFolder) -> int:
    """Tasks of one measurement of a run's checkpoints."""
    return TASKS if run.manifest.model.parameters < SMALL else TASKS // 4


def measure(folder: Path, run: RunFolder, access: Access) -> Measured:
    """Held-out accuracy of a checkpoint of the run, on its first environment. Imports torch."""
    from nous_node.envs.registry import make_entry
    from nous_node.trainer.policy import Policy

    from .evaluation import held_out_accuracy
    from .policy_settings import policy_settings

    entry, rules = run.manifest.environments[0], run.manifest.sampling
    environment, policy = make_entry(entry, access), Policy.load(folder, run.manifest.model.dtype)
    settings, tasks = policy_settings(run.manifest, policy.tokenizer, folder), held_out_count(run)
    greedy = held_out_accuracy(policy, [environment], settings, tasks)
    sampled = held_out_accuracy(policy, [environment], settings, tasks, rules.temperature)
    if greedy is None or sampled is None:
        raise LocalError(f"The environment {entry.id!r} has no held-out tasks; the demo needs one that has.")
    return Measured(greedy=greedy.share, sampled=sampled.share)


def make_report(
    *,
    run: RunFolder,
    before: Measured,
    after: Measured,
    trainer: TrainerStatus,
    volunteers: Sequence[VolunteerStatus],
    versions: Sequence[VersionReport],
    seconds: float,
    asked: int,
    left: int,
    seed: int,
    judged: Literal["greedy", "sampled"],
    checkpoint: Path,
    clients: Sequence[ClientFigures] = (),
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
        judged=judged,
        model=f"{run.manifest.model.family}, {count(run.manifest.model.parameters)} parameters",
        environments=", ".join(entry.id for entry in run.manifest.environments),
        tasks=held_out_count(run),
        environment_share=environment_share(volunteers),
        checkpoint=CheckpointFacts(str(checkpoint), newest.checkpoint if newest else trainer.checkpoint),
        versions=[CurvePoint(v.seconds, v.version, v.reward, v.correct, v.greedy) for v in versions],
        clients=list(clients),
    )


def environment_share(volunteers: Sequence[VolunteerStatus]) -> float:
    """Of all volunteers together."""
    working = sum(one.working_seconds for one in volunteers)
    return round(sum(one.environment_seconds for one in volunteers) / working, 4) if working else 0.0


def told(report: DemoReport, required_rise: float) -> str:
    """The outcome for a person."""
    ok = (
        "learned"
        if report.rise >= required_rise
        else f"did not learn (a rise of {required_rise} was asked for)"
    )
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
            f"  environments took           {100 * report.environment_share:.1f} % of the volunteers' work",
            f"  on the wire                 {report.bytes_per_trained_token:.1f} bytes per trained token",
            f"  last checkpoint             {report.checkpoint.path}",
            f"  its hash                    {report.checkpoint.hash}",
            *table(report.clients),
        )
    )
