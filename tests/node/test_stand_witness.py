"""Volunteers that are broken on purpose fail the checks that they break, and no others."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import msgspec
import pytest

from nous_node.node import stand_witness as seen
from nous_node.node.following import now_ms
from nous_node.node.stand_run import StandRun, unsigned
from nous_node.node.stand_witness import Witness
from nous_node.protocol.envelope import Kind
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import shard_of
from nous_node.trainer.policy import Policy

from .stand_player import Player, edited, shifted

GROUPS = 3
IDENTITY = Identity.from_seed(sha256(b"player").digest())


@pytest.fixture(scope="module")
def stand_run(tmp_path_factory: pytest.TempPathFactory) -> StandRun:
    """With version 1."""
    run = StandRun(tmp_path_factory.mktemp("stand"))
    run.make()
    return run


@pytest.fixture(scope="module")
def policies(stand_run: StandRun) -> list[Policy]:
    return [Policy.load(version.folder, "float32") for version in stand_run.versions]


@pytest.fixture
def player(stand_run: StandRun, policies: list[Policy]) -> Player:
    witness = Witness(stand_run)
    for version in stand_run.versions:
        witness.published(version)
    return Player(stand_run, witness, IDENTITY, policies[1], policies[0])


def failing(player: Player) -> set[str]:
    player.witness.count()
    return {name for name, verdict in player.witness.verdicts.items() if verdict.bad}


def works(player: Player, first: int = 0, count: int = GROUPS) -> None:
    version = player.run.newest
    player.publish(*(player.group(version, counter) for counter in range(first, first + count)))


def test_an_honest_volunteer_fails_nothing_and_its_figures_are_small(player: Player) -> None:
    player.enter()
    works(player)
    assert failing(player) == set()
    shown = {name for name, verdict in player.witness.verdicts.items() if verdict.good}
    assert shown >= {*seen.GOSSIPED, *seen.VERIFIED, seen.HELLO, seen.ANSWER, seen.COUNTS, seen.COUNTERS}
    thresholds = player.run.manifest.thresholds
    assert player.witness.worst.groups == GROUPS
    assert player.witness.worst.mad < thresholds.logprobs.limit
    assert player.witness.worst.distance < thresholds.distances.limit


def no_hello(player: Player) -> None:
    works(player)


def unanswered(player: Player) -> None:
    player.hello()
    works(player)


def wrong_first_counter(player: Player) -> None:
    player.enter()
    works(player, first=7)


def two_contents(player: Player) -> None:
    player.enter()
    group = player.group(player.run.newest, 0)
    other = msgspec.structs.replace(group, engine=msgspec.structs.replace(group.engine, name="other"))
    player.publish(group, other)


def old_version(player: Player) -> None:
    player.enter()
    group = player.group(player.run.versions[0], 0, lambda asked: player.sample(asked, player.base))
    player.publish(group)


def old_weights(player: Player) -> None:
    player.enter()
    group = player.group(player.run.newest, 0, lambda asked: player.sample(asked, player.base))
    player.publish(group)


def edited_token(player: Player) -> None:
    player.enter()
    player.publish(player.group(player.run.newest, 0, player.edit))


def other_logprobs(player: Player) -> None:
    player.enter()
    player.publish(shifted(player.group(player.run.newest, 0), 0.01))


def other_reward(player: Player) -> None:
    player.enter()
    group = player.group(player.run.newest, 0)
    player.publish(edited(group, reward=group.trajectories[0].reward + 0.25))


def other_task(player: Player) -> None:
    player.enter()
    player.publish(player.group(player.run.newest, 0, task=1))


def other_level(player: Player) -> None:
    player.enter()
    for counter in range(
        40
    ):  # until the level makes a difference: at the next one half of the tasks stay as short
        group = player.group(player.run.newest, counter, level=0)
        player.publish(group)
        if group.trajectories[0].tokens != player.group(player.run.newest, counter).trajectories[0].tokens:
            break


def samples_exchanged(player: Player) -> None:
    player.enter()
    for counter in range(20):  # until two samples differ
        group = player.group(player.run.newest, counter)
        first, second, third = group.trajectories
        changed = second.tokens != first.tokens
        player.publish(
            msgspec.structs.replace(group, trajectories=[second, first, third]) if changed else group
        )
        if changed:
            return


def too_few_samples(player: Player) -> None:
    player.enter()
    group = player.group(player.run.newest, 0)
    player.publish(msgspec.structs.replace(group, trajectories=group.trajectories[:2]))


def unknown_checkpoint(player: Player) -> None:
    player.enter()
    player.publish(msgspec.structs.replace(player.group(player.run.newest, 0), checkpoint=bytes(32)))


def reused_seq(player: Player) -> None:
    player.enter()
    works(player)
    player.publish(player.group(player.run.newest, GROUPS), seq=player.seq)


def the_same_envelope(player: Player) -> None:
    player.enter()
    works(player)
    player.repeat(player.sent[-1])


def behind_its_receipt(player: Player) -> None:
    player.enter()
    group = player.group(player.run.newest, 0)
    player.publish(group)
    (known,) = player.witness.groups.values()
    player.witness.settle(known, now_ms() - 10_000)
    player.publish(group)


def other_shard(player: Player) -> None:
    player.enter()
    works(player)
    player.hello(shard=(shard_of(IDENTITY.key, player.run.manifest.shards) + 1) % player.run.manifest.shards)


def other_key(player: Player) -> None:
    player.enter()
    works(player)
    seeds = (sha256(bytes([number])).digest() for number in range(100))
    keys = (Identity.from_seed(seed) for seed in seeds)
    shards = player.run.manifest.shards
    player.hello(by=next(one for one in keys if shard_of(one.key, shards) == shard_of(IDENTITY.key, shards)))


def expired(player: Player) -> None:
    player.enter()
    works(player)
    player.hello(ts=now_ms() - 60_000, exp=now_ms() - 1_000)


def not_signed(player: Player) -> None:
    player.enter()
    works(player)
    player.repeat(unsigned(player.run.seal(Kind.HELLO, b"\x80", IDENTITY)))


def too_many_hellos(player: Player) -> None:
    player.enter()
    works(player)
    for _ in range(6):
        player.hello()


BROKEN: dict[Callable[[Player], None], set[str]] = {
    no_hello: {seen.HELLO, seen.ANSWER},
    unanswered: {seen.ANSWER},
    wrong_first_counter: {seen.COUNTERS},
    two_contents: {seen.ONCE},
    old_version: {seen.COUNTS},
    old_weights: {seen.LOGPROBS},
    edited_token: {seen.DRAWN},
    other_logprobs: {seen.LOGPROBS},
    other_reward: {seen.REWARDS},
    other_task: {seen.TASKS},
    other_level: {seen.TASKS},
    samples_exchanged: {seen.DRAWN},
    too_few_samples: {seen.STRUCTURE},
    unknown_checkpoint: {seen.FRESH},
    reused_seq: {seen.SEQUENCE},
    the_same_envelope: {seen.SEALED_ANEW},
    behind_its_receipt: {seen.SETTLED},
    other_shard: {seen.SHARD},
    other_key: {seen.KEY},
    expired: {seen.TIMES},
    not_signed: {seen.ENVELOPES},
    too_many_hellos: {seen.RATE},
}


@pytest.mark.parametrize("fault", BROKEN, ids=lambda fault: fault.__name__)
def test_a_broken_volunteer_fails_the_checks_that_it_breaks(
    player: Player, fault: Callable[[Player], None]
) -> None:
    fault(player)
    assert failing(player) == BROKEN[fault]


def test_a_broken_delta_has_the_chunks_that_its_manifest_names(stand_run: StandRun) -> None:
    stand_run.make()
    whole, broken = stand_run.make(delta=True), stand_run.make(delta=True, broken=True)
    for version in (whole, broken):
        data = [
            stand_run.blobs[digest] for entry in version.head.manifest.deltas for digest in entry.hashes()
        ]
        assert {sha256(piece).digest() for piece in data} == version.deltas
    assert whole.deltas != broken.deltas
