"""Verdicts of a batch: in order of arrival, over a key's groups, with and without audits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.envs.environment import PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.envs.replay import replay
from nous_node.node import copies
from nous_node.node.examiner import Examined, Examiner
from nous_node.node.journal_intake import MAX_FAILED
from nous_node.node.learner_messages import Candidate
from nous_node.node.runfolder import RunFolder
from nous_node.node.statistics import MAX_EVIDENCE, Drift
from nous_node.node.verification import Verifier
from nous_node.node.versions import Versions
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup, pack_floats, pack_tokens, unpack_floats, unpack_tokens
from nous_node.protocol.runs import Bound, RunManifest, Thresholds
from nous_node.protocol.tasks import assign, task_seed
from nous_node.trainer.policy import Policy

COUNT = 6
ALICE, BOB = b"a" * 32, b"b" * 32
TIGHT = Thresholds(
    logprobs=Bound(1e-5, 1e-5, 1e-4),
    distances=Bound(1e-6, 1e-6, 1e-5),
    distance_max=1e-3,
    tokens=1,
    drift_slack=2.0,
    drift_limit=20.0,
    stop_probability=1e-9,
    reward=1e-6,
    verifier="float32",
    calibrated="for these tests",
)
LOOSE = msgspec.structs.replace(
    TIGHT, logprobs=Bound(1e-3, 10.0, 9.0), distances=Bound(0.5, 0.5, 1.0), distance_max=1.0
)


class Bench:
    """Examiners of a run with two versions, and honest groups of the first by two keys."""

    def __init__(self, folder: RunFolder, other: Path, alice: list[Candidate], bob: list[Candidate]) -> None:
        self.folder, self.alice, self.bob = folder, alice, bob
        self.policy = Policy.load(folder.checkpoint(0), "float32")
        self.folders = {0: str(folder.checkpoint(0)), 1: str(other)}
        self.settings = PolicySettings.of(folder.manifest, self.policy.tokenizer)
        self.environments = [make_entry(entry) for entry in folder.manifest.environments]

    def manifest(self, thresholds: Thresholds = TIGHT, dtype: str = "float32") -> RunManifest:
        facts = msgspec.structs.replace(self.folder.manifest.model, dtype=dtype)
        return msgspec.structs.replace(self.folder.manifest, thresholds=thresholds, model=facts)

    def examiner(
        self,
        thresholds: Thresholds = TIGHT,
        dtype: str = "float32",
        draw: Callable[[], float] = lambda: 0.99,
        mode: str = "seeded",
    ) -> Examiner:
        self.policy.load_tensors(Policy.load(self.folder.checkpoint(0), "float32").tensors())
        manifest = self.manifest(thresholds, dtype)
        sampling = msgspec.structs.replace(manifest.sampling, mode=mode)
        manifest = msgspec.structs.replace(manifest, sampling=sampling)
        verifier = Verifier(self.folder.run, manifest, self.environments)
        versions = Versions(self.policy, self.policy, 0, self.folders, 6)
        return Examiner(verifier, versions, self.settings, draw)

    def copied(self, candidate: Candidate, source: Candidate) -> Candidate:
        """A group of the candidate's task with the sampled tokens of another, and unlikely log-probs."""
        group, other = RolloutGroup.from_bytes(candidate.body), RolloutGroup.from_bytes(source.body)
        trajectories = []
        for one, theirs in zip(group.trajectories, other.trajectories, strict=True):
            prompt, answer = one.segments[0], theirs.segments[-1]
            ids = unpack_tokens(one.tokens)[: prompt.length] + unpack_tokens(theirs.tokens)[-answer.length :]
            trajectories.append(
                msgspec.structs.replace(
                    one,
                    tokens=pack_tokens(ids),
                    segments=[prompt, answer],
                    logprobs=pack_floats([-30.0] * answer.length),
                    finish=theirs.finish,
                )
            )
        draft = msgspec.structs.replace(group, trajectories=trajectories)
        seed = task_seed(
            self.folder.run, candidate.checkpoint, candidate.beacon, candidate.key, group.counter
        )
        assignment = assign(seed, self.folder.manifest.weights)
        environment = self.environments[assignment.environment]
        task = environment.task(assignment.task_seed, candidate.levels.get(group.env, 0))
        made = replay(environment, task, draft, self.settings, 2.0)  # for the rewards of these answers
        body = msgspec.structs.replace(draft, trajectories=made).to_bytes()
        return msgspec.structs.replace(candidate, body=body)


@pytest.fixture(scope="module")
def bench(base_run: RunFolder, other_weights: Path, volunteers: Any) -> Bench:
    made = [volunteers.candidates(base_run, COUNT, key=key) for key in (ALICE, BOB)]
    for candidate in made[1]:
        candidate.id = b"bob" + candidate.id[3:]
    return Bench(base_run, other_weights, *made)


def shifted(candidate: Candidate, by: float) -> Candidate:
    """All log-probs lower by `by`."""
    group = RolloutGroup.from_bytes(candidate.body)
    made = [
        msgspec.structs.replace(
            one, logprobs=pack_floats([value - by for value in unpack_floats(one.logprobs)])
        )
        for one in group.trajectories
    ]
    body = msgspec.structs.replace(group, trajectories=made).to_bytes()
    return msgspec.structs.replace(candidate, body=body)


def codes(examined: Examined) -> list[str]:
    return [one.receipt.code or one.receipt.verdict for one in examined.judged]


def ids(examined: Examined) -> list[bytes]:
    return [group.candidate.id for group in examined.accepted]


def changed(candidate: Candidate, **changes: Any) -> Candidate:
    return msgspec.structs.replace(candidate, **changes)


# --- order ---------------------------------------------------------------------------------------


def test_accepted_groups_come_in_the_order_of_the_candidates(bench: Bench) -> None:
    batch = [bench.alice[0], bench.bob[0], shifted(bench.alice[1], 0.5), bench.bob[1]]
    examined = bench.examiner().verify(batch)
    assert codes(examined) == ["accepted", "accepted", Code.LOGPROB_MISMATCH, "accepted"]
    assert ids(examined) == [batch[0].id, batch[1].id, batch[3].id]


def test_a_copy_of_an_earlier_group_is_refused_in_the_same_batch_and_later(bench: Bench) -> None:
    copy = bench.copied(bench.bob[0], bench.alice[0])
    assert codes(bench.examiner().verify([bench.alice[0], copy])) == ["accepted", Code.COPIED]
    examiner = bench.examiner()
    assert codes(examiner.verify([bench.alice[0]])) == ["accepted"]
    assert codes(examiner.verify([copy])) == [Code.COPIED]


def test_who_copies_a_group_that_comes_later_takes_nothing_from_it(bench: Bench) -> None:
    """The copy is refused for another reason, and what is refused is nobody's."""
    copy = bench.copied(bench.bob[0], bench.alice[0])
    examined = bench.examiner().verify([copy, bench.alice[0]])
    assert codes(examined) == [Code.LOGPROB_MISMATCH, "accepted"]


def test_copies_are_found_without_an_audit(bench: Bench) -> None:
    copy = changed(bench.copied(bench.bob[0], bench.alice[0]), audit=False)
    examined = bench.examiner().verify([changed(bench.alice[0], audit=False), copy])
    assert codes(examined) == ["accepted", Code.COPIED]


@pytest.mark.parametrize("audit", [True, False])
def test_who_was_copied_by_somebody_faster_is_accepted_where_the_draw_shows_it(
    audit: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy of a trusted key is not audited; answers of the embedded default are short."""
    monkeypatch.setattr(copies, "MAX_SURPRISAL", 5.0)
    copy = changed(bench.copied(bench.bob[0], bench.alice[0]), audit=False, state="active")
    examined = bench.examiner().verify([copy, changed(bench.alice[0], audit=audit)])
    assert codes(examined) == ["accepted", "accepted"]
    again = changed(bench.copied(bench.bob[1], bench.alice[0]), audit=audit)
    assert codes(bench.examiner().verify([bench.alice[0], again])) == ["accepted", Code.COPIED]


def test_in_a_free_run_the_later_one_is_refused_and_nobody_is_blamed(bench: Bench) -> None:
    copy = bench.copied(bench.bob[0], bench.alice[0])
    examined = bench.examiner(mode="free").verify([bench.alice[0], copy])
    assert codes(examined) == ["accepted", Code.COPIED]
    receipt = examined.judged[1].receipt
    assert (receipt.measured, receipt.threshold) == (None, None)


def test_groups_accepted_before_are_known_and_never_copies_themselves(bench: Bench) -> None:
    copy = bench.copied(bench.bob[0], bench.alice[0])
    fed = [changed(bench.alice[0], accepted=True), changed(copy, accepted=True)]
    examiner = bench.examiner()
    assert codes(examiner.verify(fed)) == ["accepted", "accepted"]
    assert codes(examiner.verify([bench.copied(bench.bob[1], bench.alice[0])])) == [Code.COPIED]


# --- audits --------------------------------------------------------------------------------------


def test_a_group_without_an_audit_is_replayed_and_no_more(bench: Bench) -> None:
    false = changed(shifted(bench.alice[0], 0.5), audit=False)
    garbage = changed(bench.alice[1], audit=False, body=b"\xc1")
    examined = bench.examiner().verify([false, garbage, bench.alice[2]])
    assert codes(examined) == ["accepted", Code.MALFORMED, "accepted"]
    assert [one.drift is None for one in examined.judged] == [True, True, False]
    assert not examined.distrusted


def test_a_key_whose_audit_fails_is_named(bench: Bench) -> None:
    failed = shifted(bench.alice[0], 0.5)
    examined = bench.examiner().verify([failed, bench.bob[0], changed(bench.bob[1], body=b"\xc1")])
    assert examined.distrusted == {ALICE}


def test_ends_are_compared_with_the_least_probability(bench: Bench) -> None:
    """No honest group of the embedded default ends where that is certain."""
    sure = msgspec.structs.replace(TIGHT, stop_probability=1.0)
    assert set(codes(bench.examiner(sure).verify(bench.alice))) == {Code.FINISH}


# --- a key over time -----------------------------------------------------------------------------


def test_small_differences_add_up_to_a_drift(bench: Bench) -> None:
    """Each group is within the limit of 1e-4; four deviations above the mean, twice the slack."""
    near = [shifted(candidate, 4e-5) for candidate in bench.alice]
    first = changed(near[0], drift=Drift(14.5))
    examined = bench.examiner().verify([first, *near[1:], bench.bob[0]])
    assert codes(examined) == ["accepted", "accepted", Code.DRIFT, *["accepted"] * 4]
    sums = [one.drift.logprob for one in examined.judged if one.drift is not None]
    assert sums == pytest.approx([16.5, 18.5, 0, 2, 4, 6, 0], abs=0.2)  # it begins anew
    assert examined.judged[2].receipt.threshold == 20
    assert examined.distrusted == {ALICE}


def test_sums_go_on_from_batch_to_batch_and_fall_with_honest_groups(bench: Bench) -> None:
    examiner = bench.examiner()
    (first,) = examiner.verify([changed(shifted(bench.alice[0], 4e-5), drift=Drift(3.0))]).judged
    (second,) = examiner.verify([shifted(bench.alice[1], 4e-5)]).judged
    assert first.drift is not None
    assert second.drift is not None
    assert (first.drift.logprob, second.drift.logprob) == pytest.approx((5.0, 7.0), abs=0.2)
    later = examiner.verify(bench.alice[2:6]).judged
    assert [one.drift and round(one.drift.logprob) for one in later] == [4, 1, 0, 0]


def test_a_refused_group_leaves_the_sums_alone(bench: Bench) -> None:
    examined = bench.examiner().verify([shifted(bench.alice[0], 0.5), shifted(bench.alice[1], 4e-5)])
    assert examined.judged[0].drift is None
    assert examined.judged[1].drift is not None
    assert examined.judged[1].drift.logprob == pytest.approx(2.0, abs=0.2)


def test_who_samples_with_the_version_before_is_found(bench: Bench) -> None:
    """The limits are too wide for two versions that are close."""
    stale = [changed(one, version=1) for one in bench.alice]
    examined = bench.examiner(LOOSE).verify(stale)
    assert Code.WRONG_CHECKPOINT in codes(examined)
    found = examined.judged[codes(examined).index(Code.WRONG_CHECKPOINT)].receipt
    assert found.threshold == MAX_EVIDENCE
    assert found.measured is not None
    assert found.measured > MAX_EVIDENCE


def test_who_samples_with_the_named_version_is_not(
    bench: Bench, volunteers: Any, other_weights: Path
) -> None:
    fresh = volunteers.candidates(bench.folder, COUNT, version=1, weights=other_weights, key=BOB)
    examined = bench.examiner(LOOSE).verify([*fresh, *bench.alice])
    assert codes(examined) == ["accepted"] * 2 * COUNT
    assert {one.drift.previous for one in examined.judged if one.drift is not None} == {0.0}


def test_versions_that_differ_by_less_than_honest_engines_tell_nothing(bench: Bench) -> None:
    close = msgspec.structs.replace(LOOSE, logprobs=Bound(5.0, 10.0, 9.0))
    examined = bench.examiner(close).verify([changed(one, version=1) for one in bench.alice])
    assert codes(examined) == ["accepted"] * COUNT


@pytest.mark.parametrize("limit", [1e-4, 9.0])
def test_one_group_of_a_version_finds_out_whether_the_others_are_compared(bench: Bench, limit: float) -> None:
    """Where every group is refused by itself, as under narrow limits, none has to be."""
    thresholds = msgspec.structs.replace(LOOSE, logprobs=Bound(1e-5, 10.0, limit))
    examiner, drawn = bench.examiner(thresholds), []
    examiner._draw = lambda: drawn.append(0) or 0.99
    examiner.verify([changed(one, state="active") for one in bench.bob])  # nothing before version 0
    examiner.verify([changed(bench.alice[0], version=1, state="active")])
    examiner.verify([changed(one, version=1, state="active") for one in bench.alice[1:]])
    assert bool(drawn) == (limit > 1)


def test_the_version_before_is_one_with_other_weights(bench: Bench, tmp_path: Path) -> None:
    versions = bench.examiner().versions
    versions.alias(2, 1)
    assert (versions.before(0), versions.before(1), versions.before(2)) == (None, 0, 0)
    shutil.copytree(bench.folders[1], tmp_path / "weights")
    versions.remember(3, tmp_path / "weights")
    assert versions.before(3) == 2


# --- checkpoints ---------------------------------------------------------------------------------


def test_groups_of_versions_that_are_gone_are_stale_or_done(bench: Bench) -> None:
    gone = changed(bench.alice[0], version=-3)
    examined = bench.examiner().verify([gone, changed(gone, accepted=True)])
    assert codes(examined) == [Code.STALE, "accepted"]
    assert examined.judged[0].receipt.measured == 4
    assert examined.aged == [gone.id]
    assert not examined.accepted


def test_nothing_is_no_work(bench: Bench) -> None:
    assert bench.examiner().verify([]) == Examined()


def test_no_more_groups_of_a_key_are_run_than_an_environment_may_fail_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one batch too: each may take a minute. Those of others are run, and those accepted before."""
    runs = 0

    async def fails(self: Any, task: Any, policy: Any) -> Any:
        nonlocal runs
        runs += 1
        raise ValueError("what is that?")

    monkeypatch.setattr(type(bench.environments[0]), "collect_trajectories", fails)
    alice = [*bench.alice[: MAX_FAILED + 2], changed(bench.alice[-1], accepted=True)]
    examined = bench.examiner().verify([*alice, *bench.bob[:2]])
    assert set(codes(examined)) == {Code.ENVIRONMENT_FAILED}
    assert runs == MAX_FAILED + 1 + 2
