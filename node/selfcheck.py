"""A volunteer's check of its own first groups, before anything of them is published.

    made by the engine -> what a trainer does with a group, on the CPU in the run's `thresholds.verifier`
                       -> published, or the node stops with a sentence

An engine that is merely different (another dtype, a kernel or BLAS with an error, an environment that does
not repeat itself) would otherwise be told so by refusals, one after the other. What recomputes shares with
what generated as little as it can: no cache, no batch, another device, a copy of the weights where the dtype
differs. Spec: `specs/08-verification.md`, "How a client tests itself".
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.protocol.errors import Code, LocalError, NousError, RemoteError
from nous_node.protocol.runs import RunManifest, Thresholds
from nous_node.protocol.tasks import assign
from nous_node.trainer.generate import uniforms
from nous_node.trainer.policy import DTYPES, Policy
from nous_node.trainer.prefill import Recomputed, Recorded, prefill

from .advice import advice
from .learner_messages import Candidate
from .statistics import Figures
from .verification import CheckedGroup, Verifier
from .versions import folder_tensors
from .wording import plural, size
from .worker_messages import Checked, FirstGroups, Group, Order

CHECK_SECONDS = 60.0
"""For the recomputing, after which what is left of it is left out: a large model is slow on a CPU."""

COPY_SHARE = 1.6
"""What loading a copy takes at its peak, by the bytes of its weights: the file is mapped meanwhile. Measured:
1.57 for 135 million parameters stored in bfloat16 and loaded in float32."""

ENGINE_CODES = (Code.LOGPROB_MISMATCH, Code.SAMPLING_MISMATCH, Code.FINISH, Code.NOT_FINITE)
"""Refusals that mean that the engine computes other numbers."""


class UnfitError(NousError):
    """Groups made here would be refused; nothing of them may be published."""


class SelfCheck:
    """Of the first groups that one loaded policy makes; `left` counts those still to be checked.

    `memory`: bytes that the process may take, 0 for no limit.
    """

    def __init__(
        self,
        first: FirstGroups,
        manifest: RunManifest,
        settings: PolicySettings,
        environment: Callable[[int], Environment],
        memory: int,
    ) -> None:
        self.left = first.groups
        self._first, self._manifest, self._settings = first, manifest, settings
        self._environment, self._memory = environment, memory
        self._copy: Policy | None = None
        self._copied = Path()
        self._figures: list[Figures] = []
        self._groups = 0
        self._deadline = 0.0

    def renew(self, first: FirstGroups) -> None:
        """Another checkpoint was loaded: what is left to check is of that."""
        self._first = first

    def check(
        self, policy: Policy, folder: Path, checkpoint: bytes, orders: Sequence[Order], made: Sequence[Group]
    ) -> Checked | None:
        """Verifies the first of what `policy`, from `folder`, made of these orders. What there is to tell a
        person, once all is checked or where nothing can be.

        Raises UnfitError where a group would be refused.
        """
        by_counter = {order.counter: order for order in orders}
        pairs = [(by_counter[group.counter], group) for group in made if group.body][: self.left]
        if not pairs:
            return None
        try:
            verifier = self._verifier(policy, folder)
        except NousError as error:
            self.left = 0
            return Checked(f"The first groups are published unchecked: {error}", good=False)
        self._deadline = time.monotonic() + CHECK_SECONDS
        for order, group in pairs:
            self._check(verifier, checkpoint, order, group, policy)
        self.left -= len(pairs)
        if self.left and time.monotonic() < self._deadline:
            return None
        self.left, self._copy = 0, None
        gc.collect()  # modules refer to each other, and a copy of the weights is large
        return self._passed(policy)

    def _verifier(self, policy: Policy, folder: Path) -> Policy:
        """The weights on the CPU, in the dtype that the trainer recomputes in. Raises NousError where there
        is no room for them, or no such dtype here."""
        wanted = self._manifest.thresholds.verifier
        if policy.device.type == "cpu" and policy.dtype == DTYPES.get(wanted):
            return policy
        if self._copy is None:
            self._refuse_copy(policy, wanted)
            self._copy = Policy.load(folder, wanted, "cpu")
        elif self._copied != folder:
            self._copy.load_tensors(folder_tensors(folder))
        self._copied = folder
        return self._copy

    def _refuse_copy(self, policy: Policy, dtype: str) -> None:
        width = 4 if dtype == "float32" else 2
        needed = int(sum(weight.numel() for weight in policy.parameters()) * width * COPY_SHARE)
        used = psutil.Process().memory_info().rss
        if self._memory and used + needed > self._memory:
            raise LocalError(
                f"a copy of the model in {dtype} needs {size(needed)} beside {size(used)}, and --memory "
                f"allows {size(self._memory)}. `nous-node doctor` checks this machine with a small model."
            )

    def _check(self, verifier: Policy, checkpoint: bytes, order: Order, group: Group, policy: Policy) -> None:
        first, manifest = self._first, self._manifest
        candidate = Candidate(
            bytes(32), group.body, first.key, 0, checkpoint, first.beacon, dict(order.levels), False
        )
        assigned = assign(order.seed, manifest.weights, 1).environment
        environments = [self._environment(assigned)] * len(manifest.environments)  # others need not be here
        judge = Verifier(first.run, manifest, environments)
        try:
            checked = judge.check(candidate, self._settings)
            judge.check_sampled(checked)
            recomputed = self._recomputed(verifier, checked)
            told = replace(checked, trajectories=checked.trajectories[: len(recomputed)])
            measured = judge.measure(told, recomputed)
            if measured.error is not None:
                raise measured.error
        except RemoteError as error:
            raise UnfitError(_unfit(error, policy, manifest)) from error
        self._figures.append(measured.figures)
        self._groups += 1

    def _recomputed(self, verifier: Policy, group: CheckedGroup) -> list[Recomputed]:
        """Of each trajectory, one after the other; of the first only, once the time is over."""
        found: list[Recomputed] = []
        for one in group.trajectories:
            if found and time.monotonic() > self._deadline:
                break
            drawn = uniforms(one.key, 0, len(one.logprobs))
            recorded = Recorded(one.tokens, one.trained, drawn, one.tree)
            found += prefill(verifier, [recorded], self._manifest.sampling.temperature)
        return found

    def _passed(self, policy: Policy) -> Checked:
        """Groups that pass one by one may still lie above the honest mean, which ends in a drift. [VER-11]"""
        figures, limits = Figures.together(self._figures), self._manifest.thresholds
        draws = ""
        if self._manifest.sampling.mode == "seeded":
            draws = f", draws by {figures.distance:.1e} ({limits.distances.limit:.2g})"
        many = "group" if self._groups == 1 else plural(self._groups, "group")
        text = (
            f"The first {many}, made in {_engine(policy)}, would be accepted: "
            f"recomputed on the CPU in {limits.verifier}, log-probs differ by {figures.logprob:.1e} on "
            f"average (limit {limits.logprobs.limit:.2g}){draws}."
        )
        away = _above(self._figures, limits)
        if away <= limits.drift_slack:
            return Checked(text, good=True)
        return Checked(
            f"{text} But they lie {away:.1f} deviations above honest ones, where {limits.drift_slack:g} are "
            f"allowed in the long run: expect refusals with drift. {_other_engine(policy)}",
            good=False,
        )


def _above(figures: Sequence[Figures], limits: Thresholds) -> float:
    """How many standard deviations groups lie above honest ones on average, by the larger of both figures."""
    tokens = limits.tokens
    logprobs = [limits.logprobs.deviations(one.logprob, one.tokens, tokens) for one in figures]
    distances = [limits.distances.deviations(one.distance, one.tokens, tokens) for one in figures]
    return max(sum(logprobs), sum(distances)) / len(figures)


def _engine(policy: Policy) -> str:
    """`float32 on cpu`"""
    return f"{str(policy.dtype).removeprefix('torch.')} on {policy.device}"


def _other_engine(policy: Policy) -> str:
    other = "" if policy.device.type == "cpu" else "start again with --device cpu, or "
    return f"What to try: {other}run `nous-node doctor`, or install another build of torch."


def _unfit(error: RemoteError, policy: Policy, manifest: RunManifest) -> str:
    """What failed, by how much, and what to try."""
    figures = ""
    if error.measured is not None and error.threshold is not None:
        figures = f": measured {error.measured:.4g}, limit {error.threshold:.4g}"
    step = advice(error.code)
    if error.code in ENGINE_CODES:
        step = _other_engine(policy)
    return (
        f"The first groups made here would be refused, so nothing was published: {error.code.value}{figures} "
        f"({str(error).rstrip('.')}; made in {_engine(policy)}, recomputed on the CPU in "
        f"{manifest.thresholds.verifier}). {step}"
    )
