"""Checks of what a client does while it has no receipts, when others than a trainer give them, and after."""

from __future__ import annotations

import trio

from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Receipt, Receipts, Standing

from .following import now_ms
from .live_check import VOLUNTEER, Checks, Failed, Untested
from .stand_run import unsigned
from .stand_scene import Flow, Scene
from .stand_witness import Group

RECEIPTS: Checks[Scene] = Checks()
TOWARDS = (VOLUNTEER,)

QUIET_S = 6.0
"""Without a new group: then the client waits for receipts, and does not only verify its first ones."""
FILL_S = 60.0
"""For a slow client to fill its window."""
MOST_WAITING = 150
"""Groups without a receipt, fewer than a client may send at once: one that has made so many, and goes on, has
no bound that shows."""
REPEAT_S = 10.0
"""After which a group without a receipt is repeated, the first time."""
EARLY_S = 8.0
"""A repeat that comes sooner than this after the first time is too early; lines may have been slow."""
PATIENCE_S = 30.0
"""For repeats: clients look now and then."""
CROSSING_S = 1.0
"""In which groups arrive that were on their way when a receipt was."""
TOLD = 8
"""Groups that get a receipt of somebody who is no trainer."""


@RECEIPTS("window", "RCP-5", towards=TOWARDS, seconds=FILL_S + 5)
async def bounds(scene: Scene) -> str:
    scene.flow = Flow.NONE
    with trio.move_on_after(FILL_S):
        while True:
            before = len(scene.witness.groups)
            await scene.pause(QUIET_S)
            if len(scene.witness.groups) == before:
                return f"It waits with {before} groups."
            if before > MOST_WAITING:
                raise Failed(f"{before} groups have no receipt, and it makes more.")
    raise Untested(
        f"It had made {len(scene.witness.groups)} groups after {FILL_S:g} s and was at work still."
    )


@RECEIPTS("receipts-of-strangers", "RCP-1", "GOS-8", towards=TOWARDS, seconds=PATIENCE_S + 10)
async def strangers(scene: Scene) -> str:
    """Receipts of a stranger, and of the trainer with a wrong signature and a wrong run: for some groups,
    which have to be repeated nevertheless."""
    scene.flow = Flow.NONE
    some = [one for one in scene.witness.groups.values() if one.figures][:TOLD]
    if not some:
        raise Untested("There is no group to give a receipt for.")
    topic = scene.topics.receipts
    await scene.whisper(topic, scene.receipts(some, by=scene.run.stranger))
    await scene.whisper(topic, unsigned(scene.receipts(some)))
    await scene.whisper(topic, scene.receipts(some, run=bytes(32)))
    await scene.whisper(topic, scene.receipts(some, ts=now_ms() - 700_000, exp=now_ms() - 100_000))
    try:
        await scene.until(lambda: all(_repeated(one) for one in some), PATIENCE_S, "repeat them")
    except Failed as failure:
        scene.alive()
        others = [one for one in scene.witness.groups.values() if one not in some and _repeated(one)]
        if not others:
            raise Untested("It repeats no group at all, so nothing shows.") from failure
        raise Failed(f"{TOLD} groups that a stranger gave receipts for were not repeated.") from failure
    return ""


@RECEIPTS(
    "group-repeated",
    "RCP-4",
    "GOS-12",
    towards=TOWARDS,
    seconds=PATIENCE_S + 10,
)
async def repeats(scene: Scene) -> str:
    scene.flow = Flow.NONE
    waiting = scene.witness.unsettled()
    await scene.until(
        lambda: all(_repeated(one) for one in waiting),
        PATIENCE_S,
        f"repeat {len(waiting)} groups without receipt",
    )
    soonest = min((one.sent[1] - one.sent[0]) / 1000 for one in waiting)
    if soonest < EARLY_S:
        raise Failed(f"A group was repeated after {soonest:.1f} s; {REPEAT_S:g} s are to pass.")
    return f"{len(waiting)} groups, the first after {soonest:.1f} s."


@RECEIPTS("receipts", "RCP-3", "RCP-5", "VER-6", towards=TOWARDS, seconds=45)
async def goes_on(scene: Scene) -> str:
    await scene.next_group(30.0)
    return ""


@RECEIPTS("obeys-quarantine", "RCP-6", "RCP-7", towards=TOWARDS, seconds=40)
async def quarantine(scene: Scene) -> str:
    """Six seconds of it: what comes after the first two is made in spite of it."""
    until = now_ms() + 6_000
    await _stand(scene, "quarantine", until)
    await scene.pause(2.0)
    since = trio.current_time()
    await scene.pause(3.0)
    made = [one for one in scene.witness.groups.values() if one.heard > since]
    await _stand(scene, "active", 0)
    await scene.next_group(25.0)
    if made:
        raise Untested(f"{len(made)} groups came meanwhile. A client SHOULD stop, and this one does not.")
    return ""


@RECEIPTS("hello-forgotten", "HEL-1", "HEL-2", "TSK-6", towards=TOWARDS, seconds=75)
async def forgotten(scene: Scene) -> str:
    """A trainer that lost its journal refuses a group so. It hears the new hello, and only versions after it
    count."""
    group = await scene.next_group()
    scene.answers, scene.flow = False, Flow.NONE
    before = len(scene.witness.hellos)
    refusal = Receipt(
        group.ids[0], scene.witness.key or b"", "refused", Code.KEY_TOO_NEW.value, None, None, 0
    )
    data = scene.run.seal(Kind.RECEIPTS, Receipts([refusal]).to_bytes())
    try:
        await scene.say(scene.topics.receipts, data)
        await scene.until(lambda: len(scene.witness.hellos) > before, 15.0, "say hello again")
        await scene.pause(CROSSING_S)
        scene.witness.counts_from = scene.run.newest.number
    finally:
        scene.answers, scene.flow = True, Flow.LATE
    await scene.pause(CROSSING_S)
    version = scene.run.make()
    await scene.publish(version)
    await scene.followed(version, 30.0)
    return ""


async def _stand(scene: Scene, state: str, until: int) -> None:
    standing = Standing(scene.witness.key or b"", state, 20, 0, 500, 0, 1, 1, until)  # type: ignore[arg-type]
    await scene.say(scene.topics.receipts, scene.run.seal(Kind.RECEIPTS, Receipts([], [standing]).to_bytes()))


def _repeated(group: Group) -> bool:
    return len(group.ids) > 1
