"""Live checks of what a client published by itself while all others were made."""

from __future__ import annotations

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import GossipView, Judgement, judge_checkpoint, judge_receipts, judge_rollout
from nous_node.protocol.identity import key_of
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import shard_of
from nous_node.protocol.structure import check_structure

from .live_check import Checks, Failed, Untested
from .live_peer import Heard
from .live_target import Target

check: Checks[Target] = Checks()

OF_TIME = frozenset({Code.STALE, Code.UNKNOWN_CHECKPOINT})
"""Which checkpoints the client knew, only it can say."""


@check("published-signatures", "NET-5", "NET-6")
async def published_signatures(target: Target) -> str:
    """Of pubsub, also those that it forwarded."""
    heard = target.listener
    if heard.flooded:
        raise Failed(f"It sent more than {heard.total} messages: more than any run has.")
    if heard.garbled:
        raise Failed(f"What it wrote on a pubsub stream is no RPC of at most 1 MiB: {heard.garbled}")
    if heard.unsigned:
        raise Failed(f"It sent {heard.unsigned} pubsub messages whose signature does not hold.")
    if not heard.own:
        raise Untested("It published nothing while the others were played.")
    return f"{heard.own} messages of its own and {heard.total - heard.own} that it forwarded"


@check("published-envelopes", "ENV-5", "ENV-7", "ENV-9", "GOS-3", "GOS-12", "RCP-2", "ROL-1")
async def published_envelopes(target: Target) -> str:
    """Each is what every node forwards, no number of a key is used twice, and groups have the right form."""
    own = [one for one in target.listener.kept if one.own]
    if not own:
        raise Untested("It published nothing while the others were played.")
    view = GossipView(target.run, target.manifest)
    for one in own:
        judgement = _judged(target, view, one)
        error = judgement.error
        if error is None or error.code in OF_TIME:
            error = _structure(target, judgement)
        if error is not None:
            raise Failed(f"A message of its own on {one.topic} is refused with {error.code.value}: {error}")
    return f"{len(own)} messages"


def _judged(target: Target, view: GossipView, message: Heard) -> Judgement:
    if message.topic == target.topics.checkpoints:
        return judge_checkpoint(view, message.data, message.now)
    if message.topic == target.topics.receipts:
        return judge_receipts(view, message.data, message.now)
    shard = shard_of(key_of(target.place.peer), target.manifest.shards)
    return judge_rollout(view, shard, message.data, message.now)


def _structure(target: Target, judgement: Judgement) -> RemoteError | None:
    if isinstance(judgement.body, RolloutGroup):
        try:
            check_structure(judgement.body, target.manifest)
        except RemoteError as error:
            return error
    return None
