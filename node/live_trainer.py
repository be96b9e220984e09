"""Live checks of a trainer: hellos and groups are answered. Spec: `specs/10-reputation-and-receipts.md`.

The kit's pupil says hello, hands in groups that are wrong in one way each, and ends in quarantine: what its
key does falls on nobody else.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Known, Receipt, Receipts, Standing, open_receipts
from nous_node.protocol.rollouts import RolloutGroup

from .following import now_ms
from .live_check import TRAINER, Checks, Failed, Untested
from .live_forgery import Member, new_identity
from .live_target import Target

first: Checks[Target] = Checks()
"""Made early: the version that its answer leads to comes while others are made."""
check: Checks[Target] = Checks()

T = TypeVar("T")

ANSWER_S = 15.0
"""A trainer gathers receipts for 0.1 s; one that is busy with an update may take longer."""
MAX_QUARANTINE_S = 60.0
"""Of a first quarantine. [REP-2]"""
SKEW_S = 30.0
VERSION_S = 45.0
"""For a version that counts for the pupil: a renewal waits for a pause of some seconds, then longer."""
JUDGED_S = 120.0
"""For a verdict: a learner may be in the middle of an update."""


class Pupil:
    """A key of the kit's towards one trainer; without an identity one that nobody has heard of."""

    def __init__(self, target: Target, identity: Identity | None = None) -> None:
        self.target = target
        self.member = Member(target.run, target.manifest, identity or new_identity())

    async def sends(self, *messages: bytes) -> None:
        await self.target.listener.publish(self.member.topic, *messages)

    async def told(self, pick: Callable[[Receipts], T | None], seconds: float, what: str) -> T:
        """Waits for something in the trainer's receipts envelopes. Raises Failed."""
        found: list[T] = []
        seen = 0

        def look() -> bool:
            nonlocal seen
            for one in self.target.listener.kept:
                if one.number > seen and one.topic == self.target.topics.receipts:
                    found.extend(item for item in [pick(self._read(one.data))] if item is not None)
            seen = self.target.listener.total
            return bool(found)

        if not await self.target.listener.until(look, seconds):
            raise Failed(f"{what} within {seconds:g} s.")
        return found[0]

    def _read(self, data: bytes) -> Receipts:
        try:
            return open_receipts(unseal(data), self.target.run, self.target.manifest)
        except RemoteError as error:
            raise Failed(f"What it published as receipts is none: {error}") from error

    async def answered(self, envelope: bytes, seconds: float = ANSWER_S) -> Receipt:
        """Sends an envelope and waits for its receipt."""
        await self.sends(envelope)
        wanted = unseal(envelope).id

        def pick(receipts: Receipts) -> Receipt | None:
            return next((one for one in receipts.items if one.rollout == wanted), None)

        receipt = await self.told(pick, seconds, "A group that passed gossip has no receipt")
        if receipt.peer != self.member.identity.key:
            raise Failed("A receipt names another key than the sender's.")
        return receipt

    async def refused(self, envelope: bytes, code: Code, seconds: float = ANSWER_S) -> Receipt:
        receipt = await self.answered(envelope, seconds)
        if (receipt.verdict, receipt.code, receipt.credit) != ("refused", code.value, 0):
            raise Failed(
                f"A group is answered with {receipt.verdict} {receipt.code!r} and credit {receipt.credit} "
                f"instead of refused {code.value!r}."
            )
        return receipt

    async def hello(self) -> Known:
        await self.sends(self.member.hello())

        def pick(receipts: Receipts) -> Known | None:
            return next((one for one in receipts.known if one.peer == self.member.identity.key), None)

        return await self.told(pick, ANSWER_S, "A hello is not answered")


def _newest(target: Target) -> tuple[bytes, int]:
    """Hash and version."""
    if target.head is None:
        raise Untested("It told no checkpoint.")
    return target.head[0], target.head[1].version


@first("hello-answered", "HEL-2", "RCP-1", "RCP-2", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def hello_answered(target: Target) -> str:
    """With the version that the trainer knew, and again with the same."""
    pupil = Pupil(target, target.pupil)
    before = target.head
    told = await pupil.hello()
    await target.refresh()
    if told.version > _newest(target)[1]:
        raise Failed(f"It answers with version {told.version}; the newest is {_newest(target)[1]}.")
    again = await pupil.hello()
    if again.version != told.version:
        raise Failed(f"To a second hello it answers version {again.version} instead of {told.version}.")
    target.known = max(told.version, (await Pupil(target, target.second).hello()).version)
    if before is not None and before[1].version <= told.version:
        receipt = await pupil.refused(pupil.member.rollout(before[0]), Code.KEY_TOO_NEW)
        if (receipt.measured, receipt.threshold) != (before[1].version, told.version + 1):
            raise Failed(f"key-too-new brings the figures {receipt.measured} and {receipt.threshold}.")
    return f"version {told.version}"


@check("group-of-a-stranger", "TSK-6", "RCP-3", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def group_of_a_stranger(target: Target) -> str:
    """Of a key that has said no hello."""
    pupil = Pupil(target)
    receipt = await pupil.refused(pupil.member.rollout(_newest(target)[0]), Code.KEY_TOO_NEW)
    if (receipt.measured, receipt.threshold) != (None, None):
        raise Failed("key-too-new for a key without a hello has two nils for figures.")
    return "key-too-new"


@check("group-checkpoint-unknown", "RCP-3", "GOS-7", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def group_checkpoint_unknown(target: Target) -> str:
    pupil = Pupil(target)
    await pupil.refused(pupil.member.rollout(os.urandom(32)), Code.UNKNOWN_CHECKPOINT)
    return "unknown-checkpoint, though gossip ignores it"


@check("version-for-newcomers", "TSK-6", towards=(TRAINER,), seconds=VERSION_S + ANSWER_S)
async def version_for_newcomers(target: Target) -> str:
    """A later version comes for a key that waits for one, though nobody else brings groups."""
    if target.known is None:
        raise Untested("The kit's hello was not answered.")
    if not await target.newer_than(target.known, VERSION_S):
        raise Untested(f"No version came within {VERSION_S:g} s: renewals have a pause that grows.")
    target.lesson = _newest(target)[0]
    return f"version {_newest(target)[1]}"


def _lesson(target: Target) -> tuple[Pupil, bytes]:
    """The pupil, and a checkpoint that counts for its key."""
    if target.lesson is None:
        raise Untested("No checkpoint counts for the kit's key.")
    return Pupil(target, target.pupil), target.lesson


@check("counter-gap", "TSK-5", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def counter_gap(target: Target) -> str:
    pupil, checkpoint = _lesson(target)
    receipt = await pupil.refused(pupil.member.rollout(checkpoint, MAX_COUNTER_GAP + 1), Code.COUNTER_GAP)
    if (receipt.measured, receipt.threshold) != (MAX_COUNTER_GAP + 1, MAX_COUNTER_GAP):
        raise Failed(f"counter-gap brings the figures {receipt.measured} and {receipt.threshold}.")
    return "counter-gap, with its figures"


@check("group-size", "ROL-1", "VER-1", "VER-6", towards=(TRAINER,), seconds=JUDGED_S + ANSWER_S)
async def group_size(target: Target) -> str:
    """A sample too few; the same content in a new envelope gets the same verdict."""
    pupil, checkpoint = _lesson(target)
    few = _few(pupil, checkpoint)
    await pupil.refused(pupil.member.seal(Kind.ROLLOUT, few), Code.GROUP_SIZE, JUDGED_S)
    return "group-size"


def _few(pupil: Pupil, checkpoint: bytes) -> bytes:
    whole = RolloutGroup.from_bytes(pupil.member.group(checkpoint, 0)).trajectories
    return pupil.member.group(checkpoint, 0, trajectories=whole[:-1])


@check("group-sealed-again", "GOS-12", "RCP-3", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def group_sealed_again(target: Target) -> str:
    pupil, checkpoint = _lesson(target)
    again = pupil.member.seal(Kind.ROLLOUT, _few(pupil, checkpoint))
    await pupil.refused(again, Code.GROUP_SIZE)
    return "the verdict of the first envelope"


@check("counter-reused", "TSK-5", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def counter_reused(target: Target) -> str:
    pupil, checkpoint = _lesson(target)
    receipt = await pupil.refused(pupil.member.rollout(checkpoint, 0), Code.COUNTER_REUSED)
    if (receipt.measured, receipt.threshold) != (0, 1):
        raise Failed(f"counter-reused brings the figures {receipt.measured} and {receipt.threshold}.")
    return "counter-reused, with its figures"


@check("group-environment", "VER-2", "TSK-3", towards=(TRAINER,), seconds=JUDGED_S + ANSWER_S)
async def group_environment(target: Target) -> str:
    pupil, checkpoint = _lesson(target)
    other = pupil.member.group(checkpoint, 1, env="an-environment-of-no-run")
    await pupil.refused(pupil.member.seal(Kind.ROLLOUT, other), Code.WRONG_ENVIRONMENT, JUDGED_S)
    return "wrong-environment"


@check("group-by-reference", "ROL-16", "ROL-17", "VER-2", towards=(TRAINER,), seconds=2 * JUDGED_S)
async def group_by_reference(target: Target) -> str:
    """The trainer fetches it from whoever passed the reference on, and compares it with what is named."""
    _, checkpoint = _lesson(target)
    pupil = Pupil(target, target.second)
    right = pupil.member.group(checkpoint, 0, env="an-environment-of-no-run")
    false = pupil.member.group(checkpoint, 1)
    named, chunks = pupil.member.reference(checkpoint, right)
    misnamed, others = pupil.member.reference(checkpoint, false, hash=os.urandom(32))
    target.listener.serve_blobs({**chunks, **others})
    await pupil.refused(named, Code.WRONG_ENVIRONMENT, JUDGED_S)
    await pupil.refused(misnamed, Code.HASH_MISMATCH, JUDGED_S)
    return "fetched: wrong-environment, hash-mismatch"


@check("quarantine", "REP-1", "REP-2", "RCP-6", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def quarantine(target: Target) -> str:
    """Four faults in a row, each of weight 1: the score is 4."""
    pupil, _ = _lesson(target)
    key = pupil.member.identity.key

    def pick(receipts: Receipts) -> Standing | None:
        return next(
            (one for one in receipts.standings if one.peer == key and one.state == "quarantine"), None
        )

    standing = await pupil.told(
        pick, ANSWER_S, "After four faults no standing says that the key is in quarantine"
    )
    left = (standing.until - now_ms()) / 1000
    if not 0 < left <= MAX_QUARANTINE_S + SKEW_S:
        raise Failed(f"A first quarantine of {left:.0f} s; it has {MAX_QUARANTINE_S:g}.")
    return f"{standing.refused} refused, {left:.0f} s left"


@check("group-in-quarantine", "RCP-7", "GOS-10", towards=(TRAINER,), seconds=3 * ANSWER_S)
async def group_in_quarantine(target: Target) -> str:
    pupil, checkpoint = _lesson(target)
    receipt = await pupil.refused(pupil.member.rollout(checkpoint, 2), Code.QUARANTINED)
    if receipt.measured is None or receipt.threshold is None or receipt.threshold <= receipt.measured:
        raise Failed(f"quarantined brings the figures {receipt.measured} and {receipt.threshold}.")
    return f"quarantined for {(receipt.threshold - receipt.measured) / 1000:.0f} s more"
