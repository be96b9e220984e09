"""The last checks: a restart, the rate, equivocation; then what the whole play has shown."""

from __future__ import annotations

from collections.abc import Callable

import trio

from . import stand_witness as seen
from .demo_clients import HOME
from .live_check import VOLUNTEER, Checks, Failed, Untested
from .stand_checks_join import (
    FALSE_BASE,
    GARBAGE,
    NOT_MINE,
    OTHER_RUN,
    STRANGERS_HEAD,
    UNSIGNED_HEAD,
    UNSIGNED_RUN,
)
from .stand_client import FLOOD_BYTES
from .stand_scene import Flow, Scene
from .stand_witness import Worst

END: Checks[Scene] = Checks()
SEEN: Checks[Scene] = Checks()
TOWARDS = (VOLUNTEER,)

BACK_S = 60.0
"""For a client that was killed to start again and to dial."""
REPEAT_S = 40.0
"""From then on until its groups without a receipt have come again."""
RATE_S = 40.0
"""For a client to use up what it may send at once; some never do, and keep to the rate from the beginning."""
SPENT = 0.15
"""Share of that which is left when it is used up: clients keep a little."""
OVER_S = 10.0
"""At the limit of its rate, to see that it stays there."""
NEAR = 0.8
"""Share of the rate from which on it is the rate that holds a client back."""
HALT_S = 4.0
"""After the proof that the trainer signed two checkpoints of one version: what was on its way arrives."""
HALTED_S = 4.0
GOSSIP_FAULTS = ("gossip-bad-signature", "gossip-garbage", "gossip-bad-frame")


@END("restart", "REP-4", "IDN-1", towards=TOWARDS, seconds=BACK_S + 20)
async def comes_back(scene: Scene) -> str:
    client = scene.client
    if client is None or scene.nursery is None:
        raise Untested("It was started by hand; it cannot be killed and started again.")
    if not client.keeps_home:
        raise Untested(f"Its command holds no {HOME}, so it keeps nothing over a restart.")
    await scene.next_group()
    scene.flow = Flow.NONE
    await client.kill()
    with trio.move_on_after(10.0):
        while scene.connected("trainer"):  # noqa: ASYNC110
            await trio.sleep(0.1)
    scene.restarted = trio.current_time()
    await client.run(scene.nursery)
    await scene.until(lambda: scene.connected("trainer"), BACK_S, "come back with the key that it had")
    return ""


@END("restart-repeats", "RCP-4", "TSK-8", towards=TOWARDS, seconds=REPEAT_S + 5)
async def repeats(scene: Scene) -> str:
    since, scene.flow = _restarted(scene), Flow.NONE
    waiting = [one for one in scene.witness.unsettled() if one.heard < since]
    before = {one.digest: len(one.ids) for one in waiting}
    await scene.until(
        lambda: all(len(one.ids) > before[one.digest] for one in waiting),
        REPEAT_S,
        f"repeat {len(waiting)} groups that had no receipt",
    )
    return f"{len(waiting)} groups."


@END("restart-chunks", "CKP-11", towards=TOWARDS, seconds=60)
async def keeps_chunks(scene: Scene) -> str:
    since = _restarted(scene)
    await scene.next_group(50.0)
    had = frozenset(scene.run.blobs) - {one.head.hash for one in scene.run.versions}
    again = [one for one in scene.desk.asked_for(had & _newest(scene)) if one.at > since]
    if again:
        raise Failed(f"It asked again for {len(again)} chunks of a version that it had made groups of.")
    return ""


def _newest(scene: Scene) -> frozenset[bytes]:
    manifest = scene.run.newest.head.manifest
    return frozenset(digest for entry in manifest.files for digest in entry.hashes())


def _restarted(scene: Scene) -> float:
    if scene.restarted is None:
        raise Untested("It was not started again.")
    return scene.restarted


@END("restart-version", "CKP-9", towards=TOWARDS, seconds=45)
async def follows(scene: Scene) -> str:
    _restarted(scene)
    version = scene.run.make()
    await scene.publish(version)
    await scene.followed(version, 40.0)
    return ""


@END(seen.RATE, "GOS-6", towards=TOWARDS, seconds=RATE_S + OVER_S + 10)
async def rate(scene: Scene) -> str:
    """Receipts come at once, so that nothing but its rate holds a client back."""
    scene.flow = Flow.PROMPT
    with trio.move_on_after(RATE_S):
        await scene.until(lambda: scene.witness.allowance() < SPENT, 2 * RATE_S, "come near its rate")
    before = scene.witness.messages
    await scene.pause(OVER_S)
    a_second = (scene.witness.messages - before) / OVER_S
    verdict = scene.witness.verdict(seen.RATE)
    if verdict.bad:
        raise Failed(f"{verdict.bad} messages were beyond its rate: {verdict.note}")
    limit = scene.run.manifest.limits.groups_per_second
    note = f"{a_second:.1f} messages a second, where {limit:g} are allowed."
    held_back = scene.witness.allowance() < SPENT or NEAR * limit <= a_second <= limit
    if not held_back:
        raise Untested(f"Its rate held nothing back: {note}")
    return note


@END("equivocation", "CKP-17", towards=TOWARDS, seconds=30)
async def halts(scene: Scene) -> str:
    await scene.next_group()
    scene.may_end = True
    await scene.say(scene.topics.checkpoints, scene.run.rival())
    await scene.pause(HALT_S)
    since = trio.current_time()
    await scene.pause(HALTED_S)
    made = [one for one in scene.witness.groups.values() if one.heard > since]
    if made:
        raise Failed(f"{len(made)} groups came {HALT_S:g} s and more after the proof.")
    ended = scene.client is not None and scene.client.exit_code is not None
    return "It ended." if ended else "It runs, and publishes nothing."


# --- what the whole play has shown -----------------------------------------------------------------


def _shown(name: str, *requires: str, note: Callable[[Scene], str] = lambda scene: "") -> None:
    async def judge(scene: Scene) -> str:
        verdict = scene.witness.verdict(name)
        if verdict.bad:
            raise Failed(f"{verdict.bad} times: {verdict.note}")
        if not verdict.good:
            raise Untested("Nothing came that could show it.")
        return note(scene)

    SEEN(name, *requires, towards=TOWARDS)(judge)


def _mad(scene: Scene) -> str:
    worst, bound = scene.witness.worst, scene.run.manifest.thresholds.logprobs
    return f"{worst.groups:,} groups, mad at most {worst.mad:.2g}; the limit is {bound.limit:.2g}."


def _distances(scene: Scene) -> str:
    worst: Worst = scene.witness.worst
    thresholds = scene.run.manifest.thresholds
    return (
        f"Mean distance at most {worst.distance:.2g} (limit {thresholds.distances.limit:.2g}), of one token "
        f"{worst.largest:.2g} (limit {thresholds.distance_max:.2g})."
    )


def _false_head(name: str, *requires: str) -> None:
    async def judge(scene: Scene) -> str:
        if name not in scene.desk.told:
            raise Untested("It did not ask often enough to be told this one.")
        trap = scene.traps.get(name)
        if trap is not None and (what := scene.sprung(trap)):
            raise Failed(f"After a false head {what}.")
        if not scene.witness.worst.groups:
            raise Untested("No right group came, so nothing shows that it went on.")
        return ""

    SEEN(name, *requires, towards=TOWARDS)(judge)


_false_head(GARBAGE, "STR-2")
_false_head(NOT_MINE, "STR-2")
_false_head(OTHER_RUN, "RUN-1")
_false_head(UNSIGNED_RUN, "RUN-2", "ENV-5")
_false_head(UNSIGNED_HEAD, "CKP-1", "ENV-5")
_false_head(STRANGERS_HEAD, "CKP-1")
_false_head(FALSE_BASE, "CKP-2")
_shown(seen.ENVELOPES, "ENV-1", "ENV-2", "ENV-5", "ENV-8")
_shown(seen.TIMES, "ENV-7")
_shown(seen.SHARD, "GOS-4")
_shown(seen.KEY, "IDN-1")
_shown(seen.SEQUENCE, "ENV-9", "GOS-5")
_shown(seen.HELLO, "HEL-1")
_shown(seen.ANSWER, "HEL-2")
_shown(seen.COUNTS, "TSK-6", "HEL-2")
_shown(seen.FRESH, "GOS-7")
_shown(seen.COUNTERS, "TSK-5", "TSK-7", "TSK-8")
_shown(seen.ONCE, "TSK-5")
_shown(seen.SEALED_ANEW, "GOS-12")
_shown(seen.SETTLED, "RCP-4")
_shown(seen.STRUCTURE, "VER-1", "ROL-2", "ROL-3", "ROL-4", "ROL-5", "ROL-6", "ROL-8", "ROL-13")
_shown(seen.TASKS, "TSK-1", "TSK-2", "TSK-3", "VER-2", "VER-3")
_shown(seen.REWARDS, "VER-3")
_shown(seen.LOGPROBS, "SMP-3", "VER-4", note=_mad)
_shown(seen.DRAWN, "TSK-4", "SMP-1", "SMP-2", "SMP-3", "SMP-5", "VER-5", note=_distances)


@SEEN("pubsub-signed", "NET-5", towards=TOWARDS)
async def pubsub(scene: Scene) -> str:
    faults = sum(one.network.stats.faults[name] for one in scene.peers.values() for name in GOSSIP_FAULTS)
    if faults:
        raise Failed(f"{faults} of its messages were not signed as StrictSign wants it, or no RPC.")
    counted = [scene.trainer.stats.topic(_topic(scene, shard)) for shard in range(scene.run.manifest.shards)]
    twice = sum(one.duplicates for one in counted)
    if twice:
        raise Failed(f"{twice} messages came with a seqno that it had used.")
    if not scene.witness.messages:
        raise Untested("It published nothing.")
    return f"{scene.witness.messages:,} messages."


def _topic(scene: Scene, shard: int) -> str:
    return scene.topics.rollouts(shard)


@SEEN("requests", "STR-1", towards=TOWARDS)
async def requests(scene: Scene) -> str:
    if scene.desk.faults:
        raise Failed(f"{len(scene.desk.faults)} requests were wrong: {scene.desk.faults[0]}.")
    asked = len(scene.desk.asked) + len(scene.desk.heads) + scene.desk.haves
    if not asked:
        raise Untested("It asked for nothing.")
    return f"{asked:,} requests, {scene.desk.haves} of them with bitmaps."


@SEEN("traps", "CKP-1", "GOS-1", towards=TOWARDS)
async def traps(scene: Scene) -> str:
    for name, trap in scene.traps.items():
        if what := scene.sprung(trap):
            raise Failed(f"{name}: {what}.")
    if not scene.traps:
        raise Untested("Nothing wrong was told.")
    return f"{len(scene.traps)} false manifests."


@SEEN("output", towards=TOWARDS)
async def output(scene: Scene) -> str:
    if scene.client is None:
        raise Untested("It was started by hand.")
    if scene.client.output.flooded:
        raise Failed(f"It printed more than {FLOOD_BYTES >> 20} MiB and was ended.")
    return f"{scene.client.output.total:,} bytes."
