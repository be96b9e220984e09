"""The process that verifies the rollouts of a calibration: as a trainer would, but it tells what it measures.

Its vector instructions and threads are set by the environment that it is started with.

    python -m nous_node.node.calibrate_judge
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np

from nous_node.envs.registry import make_entry
from nous_node.protocol.errors import NousError
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recomputed

from .calibrate_figures import Observation
from .calibrate_messages import Begin, Begun, FromJudge, Judge, Seen, ToJudge, Unfit
from .pipe import ParentPipe
from .policy_settings import policy_settings
from .runfolder import RunFolder
from .statistics import Figures
from .verification import CheckedGroup, Verifier


class Bench:
    """A run's verifier and the policy that it computes with."""

    def __init__(self, begin: Begin) -> None:
        folder = RunFolder.open(Path(begin.folder))
        manifest = folder.manifest
        self._policy = Policy.load(begin.checkpoint, manifest.thresholds.verifier, threads=begin.threads)
        environments = [make_entry(one, begin.access) for one in manifest.environments]
        self._verifier = Verifier(folder.run, manifest, environments)
        self._settings = policy_settings(manifest, self._policy.tokenizer, folder.checkpoint(0))

    def judge(self, message: Judge) -> list[Observation]:
        """Raises RemoteError where an honest group does not pass its replay."""
        groups = [self._verifier.check(one, self._settings) for one in message.groups]
        if message.strange:
            groups = [_strange(group) for group in groups]
        found = self._singly(groups) if message.single else self._verifier.recompute(self._policy, groups)
        stop = self._verifier.manifest.sampling.stop
        return [_observed(group, one, stop) for group, one in zip(groups, found, strict=True)]

    def _singly(self, groups: Sequence[CheckedGroup]) -> list[list[Recomputed]]:
        return [
            [
                self._verifier.recompute(self._policy, [replace(group, trajectories=[one])])[0][0]
                for one in group.trajectories
            ]
            for group in groups
        ]


def _strange(group: CheckedGroup) -> CheckedGroup:
    """The same tokens under other sampler keys."""
    others = [replace(one, key=hashlib.sha256(one.key).digest()) for one in group.trajectories]
    return replace(group, trajectories=others)


def _observed(group: CheckedGroup, recomputed: Sequence[Recomputed], stop: Sequence[int]) -> Observation:
    pairs = list(zip(group.trajectories, recomputed, strict=True))
    parts = [Figures.of(one.logprobs, found.logprobs, found.distances) for one, found in pairs]
    ends = [
        math.exp(float(found.logprobs[place]))
        for one, found in pairs
        for place in np.flatnonzero(np.isin(one.sampled, stop))
    ]
    return Observation("", Figures.together(parts), parts, min(ends, default=None))


def serve(pipe: ParentPipe[FromJudge, ToJudge]) -> None:
    """Until the parent closes the pipe."""
    bench: Bench | None = None
    while (message := pipe.receive()) is not None:
        try:
            match message:
                case Begin():
                    bench = Bench(message)
                    pipe.send(Begun())
                case Judge() if bench is not None:
                    pipe.send(Seen(bench.judge(message)))
                case Judge():
                    pipe.send(Unfit("The judging process was given groups before a run."))
        except NousError as error:
            pipe.send(Unfit(str(error)))


def main() -> None:
    received = cast("type[ToJudge]", ToJudge)
    pipe: ParentPipe[FromJudge, ToJudge] = ParentPipe.take_over(received)
    serve(pipe)


if __name__ == "__main__":
    main()
