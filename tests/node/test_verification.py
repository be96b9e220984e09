"""The checks of a rollout group apart from the trainer around them; `attacks` has every edit through it."""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from nous_node.envs.environment import PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.node.learner_messages import Candidate
from nous_node.node.runfolder import RunFolder
from nous_node.node.token_checks import check_ends, check_repetition
from nous_node.node.verification import CheckedGroup, Verifier, deadline
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import RolloutGroup, pack_floats, trained_tokens, unpack_floats
from nous_node.trainer.policy import Policy

COUNT = 6
STOP = 7_777


class Bench:
    """A verifier of a run, and honest groups of its base."""

    def __init__(self, folder: RunFolder, policy: Policy, candidates: list[Candidate]) -> None:
        self.folder, self.policy, self.candidates = folder, policy, candidates
        self.settings = PolicySettings.of(folder.manifest, policy.tokenizer)
        self.verifier = self.of_run()

    def of_run(self, **rules: Any) -> Verifier:
        manifest = self.folder.manifest
        sampling = msgspec.structs.replace(manifest.sampling, **rules)
        environments = [make_entry(entry) for entry in manifest.environments]
        return Verifier(self.folder.run, msgspec.structs.replace(manifest, sampling=sampling), environments)

    def check(self, candidate: Candidate) -> CheckedGroup:
        return self.verifier.check(candidate, self.settings)

    def errors(
        self,
        groups: list[CheckedGroup],
        policy: Policy | None = None,
        verifier: Verifier | None = None,
    ) -> list[RemoteError | None]:
        """For each group None, or why it is refused, by one prefill."""
        used = verifier or self.verifier
        found = used.recompute(policy or self.policy, groups)
        return [used.measure(group, one).error for group, one in zip(groups, found, strict=True)]

    def judged(self, candidates: list[Candidate], verifier: Verifier | None = None) -> list[Code | None]:
        outcomes = self.errors([self.check(one) for one in candidates], verifier=verifier)
        return [None if outcome is None else outcome.code for outcome in outcomes]


@pytest.fixture(scope="module")
def bench(base_run: RunFolder, base_policy: Policy, volunteers: Any) -> Bench:
    return Bench(base_run, base_policy, volunteers.candidates(base_run, COUNT))


def edited(candidate: Candidate, change: Callable[[RolloutGroup], RolloutGroup]) -> Candidate:
    body = change(RolloutGroup.from_bytes(candidate.body)).to_bytes()
    return msgspec.structs.replace(candidate, body=body)


def first(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    one, *others = group.trajectories
    return msgspec.structs.replace(group, trajectories=[msgspec.structs.replace(one, **changes), *others])


def shifted(group: RolloutGroup, by: float) -> RolloutGroup:
    """All log-probs of the group lower by `by`."""
    made = [
        msgspec.structs.replace(
            one, logprobs=pack_floats([value - by for value in unpack_floats(one.logprobs)])
        )
        for one in group.trajectories
    ]
    return msgspec.structs.replace(group, trajectories=made)


def test_honest_groups_pass_with_what_the_trainer_computed_itself(bench: Bench) -> None:
    assert bench.judged(bench.candidates) == [None] * COUNT
    for candidate in bench.candidates:
        checked, said = bench.check(candidate), RolloutGroup.from_bytes(candidate.body)
        assert checked.credit == sum(map(trained_tokens, said.trajectories))
        assert (checked.environment, checked.level) == ("sort-digits", 0)
        assert checked.rewards == [one.reward for one in said.trajectories]
        assert checked.correct == [float(reward == 1) for reward in checked.rewards]
        for ours in checked.trajectories:
            assert len(ours.tokens) == len(ours.trained)
            assert ours.trained.sum() == len(ours.logprobs)
            assert ours.advantages is None
            assert ours.logprobs.dtype == np.float32


def test_a_reward_within_the_threshold_passes_and_is_replaced_by_our_own(bench: Bench) -> None:
    honest = bench.candidates[0]
    true = RolloutGroup.from_bytes(honest.body).trajectories[0].reward
    near = edited(honest, lambda group: first(group, reward=true + 5e-7))
    assert bench.check(near).rewards[0] == true


def test_structure_is_looked_at_before_anything_else(bench: Bench) -> None:
    """A group with several faults is refused for the cheapest."""
    body = bench.candidates[0]
    bad = edited(body, lambda group: first(group, logprobs=pack_floats([math.nan]), reward=9.0))
    with pytest.raises(RemoteError) as error:
        bench.check(bad)
    assert error.value.code == Code.LOGPROBS


def test_rewards_are_looked_at_before_the_model(bench: Bench) -> None:
    bad = edited(bench.candidates[0], lambda group: first(shifted(group, 0.5), reward=0.125))
    with pytest.raises(RemoteError) as error:
        bench.check(bad)
    assert error.value.code == Code.REWARD_MISMATCH


def test_a_body_that_is_no_group_is_refused(bench: Bench) -> None:
    for body in (b"", b"\xc1", bench.candidates[0].body[:-1], bench.candidates[0].body + b"\x00"):
        with pytest.raises(RemoteError):
            bench.check(msgspec.structs.replace(bench.candidates[0], body=body))


@pytest.mark.parametrize(
    "changes",
    [{"key": b"w" * 32}, {"beacon": bytes(32)}, {"checkpoint": b"x" * 32}, {"levels": {"sort-digits": 8}}],
    ids=["key", "beacon", "checkpoint", "level"],
)
def test_the_task_follows_from_what_the_journal_says_of_a_group(bench: Bench, changes: Any) -> None:
    moved = [msgspec.structs.replace(candidate, **changes) for candidate in bench.candidates]
    for candidate in moved if "levels" not in changes else moved[:0]:
        with pytest.raises(RemoteError) as error:
            bench.check(candidate)
        assert error.value.code == Code.PROMPT_MISMATCH
    if "levels" in changes:  # a mixed level holds tasks of the lower ones too
        assert Code.PROMPT_MISMATCH in [_code(bench, candidate) for candidate in moved]


def _code(bench: Bench, candidate: Candidate) -> Code | None:
    try:
        bench.check(candidate)
    except RemoteError as error:
        return error.code
    return None


def test_one_bad_group_of_a_batch_is_refused_alone(bench: Bench) -> None:
    for place in range(3):
        batch = bench.candidates[:3]
        batch[place] = edited(batch[place], lambda group: shifted(group, 0.01))
        expected: list[Code | None] = [None] * 3
        expected[place] = Code.LOGPROB_MISMATCH
        assert bench.judged(batch) == expected


def test_a_verdict_does_not_depend_on_the_company(bench: Bench) -> None:
    alone = [bench.judged([candidate]) for candidate in bench.candidates]
    assert [verdict for (verdict,) in alone] == bench.judged(bench.candidates)


def test_measure_and_threshold_are_told(bench: Bench) -> None:
    bad = edited(bench.candidates[0], lambda group: shifted(group, 0.25))
    (error,) = bench.errors([bench.check(bad)])
    assert error is not None
    assert 0.25 < error.measured < 2.5  # as many tokens as there are, but sure ones count a tenth
    assert error.threshold >= bench.folder.manifest.thresholds.logprobs.limit


def test_samples_that_are_exchanged_are_not_what_their_keys_draw(bench: Bench) -> None:
    swapped = [
        edited(
            candidate,
            lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[::-1]),
        )
        for candidate in bench.candidates
    ]
    assert Code.SAMPLING_MISMATCH in bench.judged(swapped)
    assert set(bench.judged(swapped)) <= {None, Code.SAMPLING_MISMATCH}


def test_a_run_with_free_sampling_checks_logprobs_and_no_draw(bench: Bench) -> None:
    free = bench.of_run(mode="free")
    swapped = [
        edited(
            candidate,
            lambda group: msgspec.structs.replace(group, trajectories=group.trajectories[::-1]),
        )
        for candidate in bench.candidates
    ]
    assert bench.judged(swapped, free) == [None] * COUNT
    false = edited(bench.candidates[0], lambda group: shifted(group, 0.25))
    assert bench.judged([false], free) == [Code.LOGPROB_MISMATCH]


def test_another_temperature_than_the_runs_is_seen_in_the_logprobs(bench: Bench) -> None:
    warmer = bench.of_run(temperature=1.1)
    assert set(bench.judged(bench.candidates, warmer)) == {Code.LOGPROB_MISMATCH}


def test_other_weights_are_seen(bench: Bench, other_weights: Any) -> None:
    policy = Policy.load(other_weights, "float32")
    groups = [bench.check(candidate) for candidate in bench.candidates]
    outcomes = bench.errors(groups, policy)
    assert {outcome and outcome.code for outcome in outcomes} == {Code.LOGPROB_MISMATCH}


def test_weights_that_are_broken_refuse_and_do_not_pass(bench: Bench) -> None:
    """A comparison with NaN is false: it must not read as `within the threshold`."""
    nan = bench.check(bench.candidates[0])
    broken = [one.logprobs * np.float32("nan") for one in nan.trajectories]
    for one, values in zip(nan.trajectories, broken, strict=True):
        one.logprobs[:] = values
    (outcome,) = bench.errors([nan])
    assert outcome is not None
    assert outcome.code == Code.LOGPROB_MISMATCH


def looped(period: int, repeated: int, before: int = 0) -> NDArray[np.int64]:
    """`before` different tokens, then `repeated` of a piece of `period`."""
    return np.concatenate([np.arange(100, 100 + before), np.arange(repeated) % period])


@pytest.mark.parametrize(
    ("tokens", "measured"),
    [
        (looped(1, 64), 64),
        (looped(16, 80), 80),
        (looped(3, 70, before=70), 70),
        (np.append(looped(3, 70), STOP), 70),  # a loop that ends is one
        (looped(1, 63), None),
        (looped(17, 80), None),
        (looped(3, 70, before=72), None),  # less than half
        (np.append(looped(3, 70), [5, 6]), None),
        (np.arange(200), None),
        (np.arange(0), None),
        (np.arange(1), None),
    ],
)
def test_tokens_that_end_in_a_loop_are_a_repetition(tokens: NDArray[np.int64], measured: int | None) -> None:
    if measured is None:
        check_repetition(tokens, [STOP])
        return
    with pytest.raises(RemoteError) as error:
        check_repetition(tokens, [STOP])
    assert (error.value.code, error.value.measured, error.value.threshold) == (Code.REPETITION, measured, 64)


def test_loops_are_looked_for_in_free_runs_only(bench: Bench) -> None:
    group = bench.check(bench.candidates[0])
    count = 70
    stuck = dataclasses.replace(
        group.trajectories[0],
        tokens=np.full(count, 65, np.int64),
        trained=np.ones(count, np.bool_),
        logprobs=np.zeros(count, np.float32),
    )
    group = dataclasses.replace(group, trajectories=[stuck])
    bench.verifier.check_sampled(group)
    with pytest.raises(RemoteError) as error:
        bench.of_run(mode="free").check_sampled(group)
    assert error.value.code == Code.REPETITION


def test_every_stop_token_has_to_be_likely_enough() -> None:
    tokens = np.array([5, STOP, 6, STOP])
    logprobs = np.log(np.array([1e-30, 0.5, 1e-30, 1e-4], np.float32))
    check_ends(tokens, logprobs, [STOP], 0.9e-4)
    with pytest.raises(RemoteError) as error:
        check_ends(tokens, logprobs, [STOP], 1.1e-4)
    assert error.value.code == Code.FINISH
    assert error.value.measured == pytest.approx(1e-4)
    for missing in (float("nan"), float("-inf")):
        with pytest.raises(RemoteError):
            check_ends(tokens[:2], np.array([0, missing], np.float32), [STOP], 1e-9)


def test_no_groups_are_no_work(bench: Bench) -> None:
    assert bench.errors([]) == []


def hang(seconds: float) -> None:
    with deadline(seconds):
        began = time.monotonic()
        while time.monotonic() - began < 30:
            pass


def test_a_scorer_that_hangs_is_interrupted():
    with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s"):
        hang(0.05)


def test_a_deadline_that_was_kept_leaves_no_alarm_behind():
    before = signal.getsignal(signal.SIGALRM)
    with deadline(30):
        pass
    assert signal.getsignal(signal.SIGALRM) is before
