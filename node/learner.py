"""The trainer's learner process: verification and learning, and nothing else.

    candidates -> the examiner's verdicts
    accepted groups -> one update as soon as there are enough -> a checkpoint folder -> Updated

It reads the run's folder and writes new checkpoint folders into it; it has no keys, no network and no
database. What it holds in memory can be rebuilt from the journal and the last published checkpoint.

    python -m nous_node.node.learner
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.protocol.errors import NousError
from nous_node.trainer.advantage import Baseline
from nous_node.trainer.checkpoint import save_checkpoint, save_private, tensor_hash
from nous_node.trainer.errors import CheckpointError
from nous_node.trainer.optim import Optimizer
from nous_node.trainer.policy import Policy
from nous_node.trainer.step import Group, Trajectory, UpdateReport, update

from .create import folder_entries
from .curriculum import Curriculum
from .evaluation import held_out_accuracy
from .examiner import Examiner
from .learner_messages import (
    Broken,
    Candidate,
    FromLearner,
    Judged,
    Open,
    Opened,
    Published,
    Rested,
    ToLearner,
    Updated,
    Verdicts,
    Verify,
)
from .learning import Learning, read_learning
from .pipe import ParentPipe
from .runfolder import RunFolder
from .verification import CheckedGroup, Verifier
from .versions import Versions

DURABLE_SECONDS = 5.0
"""Versions between two that are flushed to the disk may be lost to a power failure; the trainer then goes
on from an older one. With many versions a second the flushes would take a tenth of the learner's time."""


@dataclass(slots=True)
class Learner:
    """A policy in training, and the accepted groups that wait for the next update."""

    folder: RunFolder
    learning: Learning
    policy: Policy
    optimizer: Optimizer
    examiner: Examiner
    environments: list[Environment]
    curriculum: Curriculum
    version: int
    held: deque[CheckedGroup]
    aged: list[bytes]
    """Groups that became too old to train on; the next checkpoint says that they are done with."""
    baseline: Baseline
    note: str
    """What the trainer has to be told about how it was opened; empty where all was well."""
    flushed: float
    """When a checkpoint was last made safe against a power failure, in seconds of the monotonic clock."""

    @classmethod
    def open(cls, message: Open) -> Learner:
        """Loads the published checkpoint and the optimizer state beside it, where there is one."""
        folder = RunFolder.open(Path(message.folder))
        manifest = folder.manifest
        learning = read_learning(folder.learning)
        model = Path(message.checkpoint)
        policy = Policy.load(model, manifest.model.dtype, message.device, message.threads)
        policy.folder = folder.checkpoint(0)  # tokenizer and config come from where nothing is ever deleted
        config = learning.update_config(manifest.sampling.temperature, manifest.sampling.max_tokens)
        verifier = Policy.load(model, manifest.thresholds.verifier, message.device)  # [VER-4]
        optimizer = Optimizer(policy, config.optimizer)
        fresh = _resumed(optimizer, folder.optimizer_of(model))
        environments = [make_entry(entry) for entry in manifest.environments]
        highest = {
            entry.id: environment.levels
            for entry, environment in zip(manifest.environments, environments, strict=True)
        }
        return cls(
            folder=folder,
            learning=learning,
            policy=policy,
            optimizer=optimizer,
            examiner=Examiner(
                Verifier(folder.run, manifest, environments),
                Versions(policy, verifier, message.version, message.folders, manifest.staleness + 2),
                PolicySettings.of(manifest, policy.tokenizer),
            ),
            environments=environments,
            curriculum=Curriculum(dict(message.levels), highest, learning.raise_level_at),
            version=message.version,
            held=deque(),
            aged=[],
            baseline=Baseline(message.baseline),
            note=fresh,
            flushed=-DURABLE_SECONDS,
        )

    def evaluate(self) -> float | None:
        rules = self.folder.manifest.sampling
        return held_out_accuracy(self.policy, self.environments, rules, self.learning.evaluate_tasks)

    # --- verification ----------------------------------------------------------------------------

    def verify(self, candidates: Sequence[Candidate]) -> list[Judged]:
        """A verdict for each; accepted groups are held for the next update."""
        examined = self.examiner.verify(candidates)
        self.aged += examined.aged
        for group in examined.accepted:
            self.held.append(group)
            self.curriculum.note(group.environment, group.level, float(np.mean(group.rewards)))
        self.drop(examined.distrusted)
        return examined.judged

    def drop(self, keys: Collection[bytes]) -> None:
        """Groups of these keys that were accepted without an audit and are not yet used are not trained on.
        [VER-13]"""
        for group in [held for held in self.held if held.candidate.key in keys and not held.candidate.audit]:
            self.held.remove(group)
            self.aged.append(group.candidate.id)

    # --- learning --------------------------------------------------------------------------------

    def step(self) -> Updated | None:
        """One update, if there are enough groups that are fresh enough: the new checkpoint's folder."""
        self._drop_aged()
        if len(self.held) < self.learning.groups:
            return None
        groups = [self.held.popleft() for _ in range(self.learning.groups)]
        rules = self.folder.manifest.sampling
        config = self.learning.update_config(rules.temperature, rules.max_tokens)
        made = [_group(group) for group in groups]
        report = update(self.policy, self.optimizer, made, config, self.baseline)
        self.baseline = report.baseline
        staleness = float(np.mean([self.version - group.candidate.version for group in groups]))
        self.version += 1
        return self._saved(groups, report, staleness)

    def _drop_aged(self) -> None:
        """Groups that are too old to train on leave; their rewards still feed the baseline."""
        oldest = self.version - self.folder.manifest.staleness
        for group in [held for held in self.held if held.candidate.version < oldest]:
            self.held.remove(group)
            self.aged.append(group.candidate.id)
            self.baseline = self.baseline.after(np.asarray(group.rewards))

    def _saved(
        self,
        groups: Sequence[CheckedGroup],
        report: UpdateReport,
        staleness: float,
    ) -> Updated:
        target = self.folder.checkpoint(self.version)
        durable = time.monotonic() - self.flushed >= DURABLE_SECONDS
        save_checkpoint(self.policy, target, durable=durable)
        save_private(self.optimizer, self.folder.optimizer(self.version), durable=durable)
        if durable:
            self.flushed = time.monotonic()
        self.examiner.versions.remember(self.version, target)
        before = dict(self.curriculum.levels)
        levels = self.curriculum.advance()
        if levels != before:
            self.optimizer.refresh()
        every = self.learning.evaluate_every
        greedy = self.evaluate() if every and self.version % every == 0 else None
        aged, self.aged = self.aged, []
        correct = [value for group in groups for value in group.correct]
        return Updated(
            version=self.version,
            folder=str(target),
            used=[*(group.candidate.id for group in groups), *aged],
            aged=len(aged),
            files=folder_entries(target),
            tensors={name: tensor_hash(tensor) for name, tensor in self.policy.tensors().items()},
            levels=levels,
            stats={
                "reward": report.reward,
                "correct": float(np.mean(correct)),
                "loss": report.loss,
                "kl": report.kl,
                "entropy": report.entropy,
                "grad_norm": report.gradient_norm,
                "clipped": report.clipped_high + report.clipped_low,
                "groups": float(report.groups),
                "zero_variance": float(report.zero_variance),
                "tokens": float(report.tokens),
                "staleness": staleness,
                **({} if self.baseline.value is None else {"baseline": self.baseline.value}),
            },
            eval={} if greedy is None else {"greedy": greedy},
        )

    def published(self, message: Published) -> None:
        """A version that was published without an update is the present weights under another number."""
        if message.version > self.version:
            self.examiner.versions.alias(message.version, self.version)
            self.version = message.version


def _resumed(optimizer: Optimizer, state: Path) -> str:
    """Takes up the optimizer's state where there is one; otherwise why it begins afresh."""
    try:
        if state.is_dir():
            optimizer.load(state)
        return ""
    except CheckpointError as error:
        return f"{error} It begins afresh, which costs some steps."


def _group(group: CheckedGroup) -> Group:
    return Group(
        [Trajectory(one.tokens, one.trained, one.logprobs, one.advantages) for one in group.trajectories],
        group.rewards,
        group.candidate.version,
    )


def serve(pipe: ParentPipe[FromLearner, ToLearner]) -> None:
    """Until the node closes the pipe."""
    learner: Learner | None = None
    while (message := pipe.receive()) is not None:
        match message:
            case Open():
                learner = Learner.open(message)
                pipe.send(Opened(learner.evaluate() if message.evaluate else None, learner.note))
            case Verify(groups) if learner is not None:
                pipe.send(Verdicts(learner.verify(groups)))
                while (updated := learner.step()) is not None:
                    pipe.send(updated)
                pipe.send(Rested(len(learner.held)))
            case Published() if learner is not None:
                learner.published(message)
            case _:
                pipe.send(Broken("The learner was given work before a checkpoint."))


def main() -> None:
    received = cast("type[ToLearner]", ToLearner)
    pipe: ParentPipe[FromLearner, ToLearner] = ParentPipe.take_over(received)
    try:
        serve(pipe)
    except NousError as error:
        pipe.send(Broken(str(error), storage=isinstance(error, CheckpointError)))


if __name__ == "__main__":
    main()
