"""Checks of a client that joins: connections, false heads, its hello, the first version that counts."""

from __future__ import annotations

import msgspec

from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind
from nous_node.protocol.errors import Code
from nous_node.protocol.runs import run_id
from nous_node.protocol.streams import HeadReply

from .live_check import VOLUNTEER, Checks, Failed
from .stand_desk import NAMES, FalseHead
from .stand_run import unsigned
from .stand_scene import Scene

JOIN: Checks[Scene] = Checks()
TOWARDS = (VOLUNTEER,)

CONNECT_S = 60.0
"""For an interpreter to start, to load its libraries, and to dial."""
FIRST_GROUP_S = 60.0
"""From the version that counts to a group of it: a model is loaded, and a careful client verifies its own
first groups."""
HELLO_S = 20.0
UNANSWERED_S = 1.5
"""After the second hello, which comes 2 s after the first: no group may come, since nobody has answered."""
HEADS_S = 20.0
"""For the false heads to be told: who is refused one asks the next peer, or again after a second."""

GARBAGE = "head-garbage"
NOT_MINE = "head-elsewhere"
OTHER_RUN = "manifest-other-run"
UNSIGNED_RUN = "manifest-unsigned"
UNSIGNED_HEAD = "head-unsigned"
STRANGERS_HEAD = "head-of-stranger"
FALSE_BASE = "head-false-base"


@JOIN("joins-noise-yamux", "NET-1", "NET-2", "NET-3", "IDN-1", "INV-1", towards=TOWARDS, seconds=70)
async def connects(scene: Scene) -> str:
    try:
        await scene.until(lambda: scene.peer, CONNECT_S, "connect to the trainer of its invite")
    except Failed as failure:
        scene.lost = True
        words = (
            "" if scene.client is None or scene.client.exit_code is not None else scene.client.output.words()
        )
        raise Failed(f"{failure}{words}") from failure
    return f"It connected by Noise and Yamux over TCP as {scene.peer}."


@JOIN("dials-invite", "INV-3", towards=TOWARDS, seconds=30)
async def dials(scene: Scene) -> str:
    def everywhere() -> bool:
        return all(scene.connected(name) for name in NAMES)

    await scene.until(everywhere, 20.0, f"connect to all {len(NAMES)} peers of its invite")
    return ""


def false_heads(scene: Scene) -> list[FalseHead]:
    """What is told to the first who ask, in this order."""
    run = scene.run
    other = msgspec.structs.replace(run.manifest, name="another run").to_bytes()
    envelope = run.folder.envelope
    bad, strange, base = run.trap(), run.trap(by=run.stranger), run.false_base()
    scene.head_traps |= {UNSIGNED_HEAD: bad, STRANGERS_HEAD: strange, FALSE_BASE: base}
    told = (
        (GARBAGE, b"\xc1" * 40),
        (NOT_MINE, encode(HeadReply(error=Code.WRONG_RUN.value))),
        (OTHER_RUN, encode(HeadReply(run=run.seal(Kind.RUN, other, run=run_id(other))))),
        (UNSIGNED_RUN, encode(HeadReply(run=unsigned(envelope)))),
        (UNSIGNED_HEAD, encode(HeadReply(run=envelope, checkpoint=unsigned(bad.envelope)))),
        (STRANGERS_HEAD, encode(HeadReply(run=envelope, checkpoint=strange.envelope))),
        (FALSE_BASE, encode(HeadReply(run=envelope, checkpoint=base.envelope))),
    )
    return [FalseHead(name, frame) for name, frame in told]


@JOIN("asks-head", "STR-1", "STR-2", towards=TOWARDS, seconds=45)
async def asks_head(scene: Scene) -> str:
    """The first answers are false; who has refused them gets a true one."""
    await scene.until(lambda: scene.desk.heads, 20.0, "ask for the head")
    try:
        await scene.until(lambda: not scene.desk.false_heads, HEADS_S, "ask again")
    except Failed:
        scene.alive()
    left = [one.name for one in scene.desk.false_heads]
    scene.desk.false_heads.clear()
    scene.traps |= {name: trap for name, trap in scene.head_traps.items() if name in scene.desk.told}
    if scene.desk.faults:
        raise Failed(f"A request of it was wrong: {scene.desk.faults[0]}.")
    return f"{len(scene.desk.told)} false answers were told, {len(left)} were not asked for."


@JOIN("subscribes", "NET-5", "NET-7", towards=TOWARDS, seconds=30)
async def subscribes(scene: Scene) -> str:
    wanted = {scene.topics.checkpoints, scene.topics.receipts}

    def reads() -> set[str]:
        found = scene.connected("trainer")
        return set() if found is None else set(found.topics)

    await scene.until(lambda: reads() >= wanted, 25.0, "subscribe to the topics of checkpoints and receipts")
    more = reads() - wanted
    if more:
        raise Failed(
            f"A volunteer reads those two topics and no other; this one reads {sorted(more)[0]}, too."
        )
    return ""


@JOIN("hello", "HEL-1", towards=TOWARDS, seconds=HELLO_S + 5)
async def says_hello(scene: Scene) -> str:
    await scene.until(lambda: scene.witness.hellos, HELLO_S, "say hello")
    return f"It calls itself {scene.witness.hellos[0][1].agent!r}."


@JOIN("hello-repeated", "HEL-1", towards=TOWARDS, seconds=20)
async def repeats_hello(scene: Scene) -> str:
    await scene.until(lambda: len(scene.witness.hellos) > 1, 10.0, "say hello again, unanswered for 2 s")
    await scene.pause(UNANSWERED_S)
    return ""


@JOIN("hello-unanswered", "HEL-2", towards=TOWARDS, seconds=10)
async def waits_for_answer(scene: Scene) -> str:
    early = len(scene.witness.groups)
    scene.answers = True
    await scene.until(lambda: scene.witness.answered, 5.0, "read the receipts topic")
    if early:
        raise Failed(f"{early} groups came before its hello was answered.")
    await scene.pause(1.0)
    if scene.witness.groups:
        raise Failed("It made groups of version 0, which does not count for its key.")
    return ""


@JOIN(
    "first-version",
    "HEL-2",
    "CKP-9",
    towards=TOWARDS,
    seconds=FIRST_GROUP_S + 5,
)
async def first_version(scene: Scene) -> str:
    version = scene.run.make()
    await scene.publish(version)
    try:
        group = await scene.followed(version, FIRST_GROUP_S)
    except Failed as failure:
        scene.lost = True
        bad = next((one.note for one in scene.witness.verdicts.values() if one.bad), "")
        raise Failed(f"{failure} {bad}".strip()) from failure
    return f"Counter {group.counter} was the first."
