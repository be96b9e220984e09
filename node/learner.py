"""The trainer's learner process: verification and learning, and nothing else.

    candidates -> the examiner's verdicts -> the trainer's word whose groups are out
    accepted groups -> one update as soon as there are enough -> is it well? -> a checkpoint folder -> Updated

It reads the run's folder and writes new checkpoint folders into it; it has no keys, no network and no
database. What it holds in memory can be rebuilt from the journal and the last published checkpoint.

    python -m nous_node.node.learner
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.protocol.errors import Code, NousError
from nous_node.trainer.advantage import Baseline, baselines_of, means_of
from nous_node.trainer.checkpoint import save_checkpoint, save_private, tensor_hash
from nous_node.trainer.errors import CheckpointError, TensorError
from nous_node.trainer.optim import Optimizer
from nous_node.trainer.policy import Policy
from nous_node.trainer.step import Group, Trajectory, UpdateReport, update

from .canary import CANARY_FILE, Canary, Good, Health, Measure
from .create import folder_entries
from .curriculum import Curriculum
from .delta_writer import DeltaWriter
from .evaluation import Accuracy, held_out_accuracy
from .examiner import Examined, Examiner
from .learner_messages import (
    BASELINE,
    Broken,
    Candidate,
    FromLearner,
    Judged,
    Open,
    Opened,
    Proceed,
    Published,
    Rested,
    ToLearner,
    Updated,
    Verdicts,
    Verify,
)
from .learning import Learning, read_learning
from .pipe import ParentPipe
from .policy_settings import policy_settings
from .runfolder import RunFolder
from .selection import Participants, Shares, Waiting
from .verification import CheckedGroup, CheckedTrajectory, Verifier
from .versions import Versions, folder_tensors

DURABLE_SECONDS = 5.0
"""Versions between two that are flushed to the disk may be lost to a power failure; the trainer then goes
on from an older one. With many versions a second the flushes would take a tenth of the learner's time."""

OUT = ("quarantine", "banned")
"""States of keys from whose groups nothing is learnt any more, also from those accepted before."""


@dataclass(slots=True)
class Learner:
    """A policy in training, and the accepted groups that wait for the next update."""

    folder: RunFolder
    learning: Learning
    policy: Policy
    optimizer: Optimizer
    examiner: Examiner
    environments: list[Environment]
    settings: PolicySettings
    curriculum: Curriculum
    version: int
    held: list[CheckedGroup]
    """In order of arrival."""
    aged: list[bytes]
    """Groups that are not trained on (too old, over a share, distrusted); the next checkpoint says that they
    are done with."""
    participants: Participants
    canary: Canary
    deltas: DeltaWriter
    baselines: dict[str, Baseline]
    """By environment: their rewards are on scales of their own."""
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
        environments = [make_entry(entry, message.access) for entry in manifest.environments]
        settings = policy_settings(manifest, policy.tokenizer, policy.folder)
        highest = {
            entry.id: environment.levels
            for entry, environment in zip(manifest.environments, environments, strict=True)
        }
        learner = cls(
            folder=folder,
            learning=learning,
            policy=policy,
            optimizer=optimizer,
            examiner=Examiner(
                Verifier(folder.run, manifest, environments),
                Versions(policy, verifier, message.version, message.folders, manifest.staleness + 2),
                settings,
            ),
            environments=environments,
            settings=settings,
            curriculum=Curriculum(dict(message.levels), highest, learning.raise_level_at),
            version=message.version,
            held=[],
            aged=[],
            participants=Participants(
                time.monotonic, Shares(learning.groups, learning.peer_share, learning.probation_share)
            ),
            canary=Canary.beside(folder, model),
            deltas=DeltaWriter(folder),
            baselines=baselines_of(message.baselines),
            note=fresh,
            flushed=-DURABLE_SECONDS,
        )
        learner._set_rate()
        return learner

    def evaluate(self) -> Accuracy | None:
        tasks = self.learning.evaluate_tasks
        return held_out_accuracy(self.policy, self.environments, self.settings, tasks)

    def opened(self, message: Open) -> Opened:
        """The answer: where it is to be measured, the canary's first mark is this version's."""
        accuracy = self.evaluate() if message.evaluate else None
        if accuracy is not None and self.canary.good is None:
            version = int(Path(message.checkpoint).name)
            self._passed(version, Measure.of_answers(accuracy.right, accuracy.asked))
        return Opened(None if accuracy is None else accuracy.share, self.note)

    # --- verification ----------------------------------------------------------------------------

    def verify(self, candidates: Sequence[Candidate]) -> list[Judged]:
        """A verdict for each; accepted groups are held for the next update."""
        examined = self.examiner.verify(candidates)
        self.aged += examined.aged
        for candidate in candidates:
            self.participants.stands(candidate.key, candidate.state)
        for group in examined.accepted:
            candidate = group.candidate
            self.participants.accepted(candidate.key, group.credit, candidate.state)
            self.held.append(group)
            # What was not audited may be of somebody's own policy, and no share bounds what it says here.
            if candidate.audit and candidate.version >= self.canary.oldest:
                self.curriculum.note(group.environment, group.level, float(np.mean(group.rewards)))
        out = {c.key for c in candidates if c.state in OUT} | _proven(examined.judged)
        self._leave(lambda one: one.candidate.key in out or _distrusted(one.candidate, examined))
        return examined.judged

    def drop(self, keys: Collection[bytes]) -> None:
        """Groups of these keys that wait are not trained on; what comes later begins anew. [REP-2]"""
        self.examiner.forget(keys)
        self._leave(lambda one: one.candidate.key in keys)

    def _leave(self, leaves: Callable[[CheckedGroup], bool]) -> list[CheckedGroup]:
        """Groups that are not to be trained on are done with. [VER-13]"""
        leaving = [group for group in self.held if leaves(group)]
        if leaving:
            self.aged += [group.candidate.id for group in leaving]
            self.held = [group for group in self.held if not leaves(group)]
        return leaving

    # --- learning --------------------------------------------------------------------------------

    def step(self) -> Updated | None:
        """One update, if there are enough groups that are fresh enough and keep the shares: the new
        checkpoint's folder. Where the policy collapsed it has the weights of the best version."""
        self._drop_aged()
        groups = self._selected()
        if not groups:
            return None
        self.participants.updated()
        rules = self.folder.manifest.sampling
        config = self.learning.update_config(rules.temperature, rules.max_tokens)
        made = [_group(group) for group in groups]
        report = update(self.policy, self.optimizer, made, config, self.baselines)
        self.baselines = report.baselines
        staleness = float(np.mean([self.version - group.candidate.version for group in groups]))
        self.version += 1
        before = dict(self.curriculum.levels)
        if self.curriculum.advance() != before:
            self.optimizer.refresh()
        health = self._examined(report.reward)
        return self._saved(groups, report, staleness, health)

    def _drop_aged(self) -> None:
        """Groups that are too old to train on leave; their rewards still feed the baselines."""
        oldest = max(self.version - self.folder.manifest.staleness, self.canary.oldest)
        for group in self._leave(lambda one: one.candidate.version < oldest):
            known = self.baselines.get(group.environment, Baseline())
            self.baselines[group.environment] = known.after(np.asarray(group.rewards))

    def _selected(self) -> list[CheckedGroup]:
        """The groups of the next update, none if it has to wait. [VER-14]"""
        held = [Waiting(one.candidate.key, one.credit) for one in self.held]
        selection = self.participants.select(held)
        surplus = {id(self.held[place]) for place in selection.surplus}
        self._leave(lambda one: id(one) in surplus)
        chosen = set(selection.chosen)
        groups = [self.held[place] for place in selection.chosen]
        if groups:
            self.held = [group for place, group in enumerate(self.held) if place not in chosen]
        return groups

    # --- whether the policy is well [VER-15] -----------------------------------------------------

    def _examined(self, reward: float) -> Health:
        """Measures the version that was just made, where it is its turn; rolls it back where it collapsed."""
        levels, every = self.curriculum.levels, self.learning.evaluate_every
        self.canary.trained(reward, levels)
        if not every or self.version % every:
            return Health()
        accuracy = self.evaluate()
        if accuracy is None:
            measure = self.canary.measured_by_rewards()
        else:
            measure = Measure.of_answers(accuracy.right, accuracy.asked)
        greedy = None if accuracy is None else accuracy.share
        if measure is None:
            return Health(greedy)
        if not self.canary.collapsed(measure, levels, self.learning.collapse):
            self._passed(self.version, measure)
            return Health(greedy)
        good = self._roll_back()
        return Health(None if greedy is None else good.measure.value, good, measure.value)

    def _passed(self, version: int, measure: Measure) -> None:
        self.canary.passed(version, measure, self.curriculum.levels, means_of(self.baselines))
        self._set_rate()

    def _set_rate(self) -> None:
        config = self.optimizer.config
        self.optimizer.config = replace(config, rate=self.learning.rate * self.canary.rate)

    def _roll_back(self) -> Good:
        """The policy, optimizer, levels and baselines of the best version; groups that the collapsed weights
        made are not trained on. From the disk, since memory may not hold a large model once more."""
        good = self.canary.roll_back(self.version)
        folder = self.folder.checkpoint(good.version)
        try:
            self.policy.load_tensors(folder_tensors(folder))
        except (CheckpointError, TensorError) as error:
            raise CheckpointError(
                f"The policy collapsed, and version {good.version} cannot be taken up again ({error}) Put "
                f"{folder} back from a backup and start again."
            ) from error
        state = self.folder.optimizer(good.version)  # the base has none
        if not state.is_dir() or _resumed(self.optimizer, state):
            self.optimizer.reset()
        self._set_rate()
        self.curriculum.go_back(good.levels)
        self.baselines = baselines_of(good.baselines)
        self._leave(lambda one: True)
        return good

    def _saved(
        self,
        groups: Sequence[CheckedGroup],
        report: UpdateReport,
        staleness: float,
        health: Health,
    ) -> Updated:
        target = self.folder.checkpoint(self.version)
        durable = time.monotonic() - self.flushed >= DURABLE_SECONDS
        save_checkpoint(self.policy, target, durable=durable)
        beside = {CANARY_FILE: self.canary.to_bytes()}
        save_private(self.optimizer, self.folder.optimizer(self.version), beside, durable=durable)
        if durable:
            self.flushed = time.monotonic()
        files = folder_entries(target)
        before = self.examiner.versions.folder(self.version - 1)
        written = self.deltas.write(self.version, before, target, files, durable=durable)
        self.examiner.versions.remember(self.version, target)
        aged, self.aged = self.aged, []
        correct = [value for group in groups for value in group.correct]
        return Updated(
            version=self.version,
            folder=str(target),
            used=[*(group.candidate.id for group in groups), *aged],
            aged=len(aged),
            files=files,
            tensors={name: tensor_hash(tensor) for name, tensor in self.policy.tensors().items()},
            levels=dict(self.curriculum.levels),
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
                **{BASELINE + name: value for name, value in means_of(self.baselines).items()},
                **health.stats(self.canary.rate),
            },
            eval={} if health.greedy is None else {"greedy": health.greedy},
            good=self.version if self.canary.good is None else self.canary.good.version,
            rolled_back=None if health.good is None else health.good.version,
            deltas=written.deltas,
            note=written.note,
        )

    def published(self, message: Published) -> None:
        """A version that was published without an update is the present weights under another number."""
        if message.version > self.version:
            self.examiner.versions.alias(message.version, self.version)
            self.version = message.version


def _distrusted(candidate: Candidate, examined: Examined) -> bool:
    return candidate.key in examined.distrusted and not candidate.audit


def _proven(judged: Sequence[Judged]) -> set[bytes]:
    """Keys that are put into quarantine for what one verdict says. [REP-2]"""
    return {one.receipt.peer for one in judged if one.receipt.code in (Code.DRIFT, Code.WRONG_CHECKPOINT)}


def _resumed(optimizer: Optimizer, state: Path) -> str:
    """Takes up the optimizer's state where there is one; otherwise why it begins afresh."""
    try:
        if state.is_dir():
            optimizer.load(state)
        return ""
    except CheckpointError as error:
        return f"{error} It begins afresh, which costs some steps."


def _group(group: CheckedGroup) -> Group:
    learnt = [_learnt(one) for one in group.trajectories]
    return Group(learnt, group.rewards, group.candidate.version, group.environment)


def _learnt(one: CheckedTrajectory) -> Trajectory:
    return Trajectory(
        one.tokens, one.trained, one.logprobs, one.advantages, one.advantage, one.agent, one.tree
    )


def serve(pipe: ParentPipe[FromLearner, ToLearner]) -> None:
    """Until the node closes the pipe."""
    learner: Learner | None = None
    while (message := pipe.receive()) is not None:
        match message:
            case Open():
                learner = Learner.open(message)
                pipe.send(learner.opened(message))
            case Verify(groups) if learner is not None:
                pipe.send(Verdicts(learner.verify(groups)))
            case Proceed(distrusted) if learner is not None:
                learner.drop(distrusted)
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
