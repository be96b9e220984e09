"""Checks of what a client does with gossip that it has to refuse: it takes nothing of it, and works on.

Each message comes from a peer of the run that is no trainer, as it would from anybody who is connected. What
names a checkpoint is a trap: whoever asks for its chunks has taken it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from nous_node.protocol.checkpoints import file_entry
from nous_node.protocol.constants import MAX_ENVELOPE
from nous_node.protocol.envelope import Kind
from nous_node.protocol.receipts import Receipts

from .following import now_ms
from .live_check import VOLUNTEER, Checks, Failed
from .stand_run import PIECE, Trap, unsigned
from .stand_scene import Scene

GOSSIP: Checks[Scene] = Checks()
TOWARDS = (VOLUNTEER,)

AFTER_S = 0.5
"""Within which a client asks for the chunks of a head that it has taken from gossip."""
OVERSIZE = MAX_ENVELOPE + 40_000
"""Within what pubsub carries, beyond what an envelope may have."""
AGO_MS = 700_000
"""Longer than an envelope lives."""

Wrong = Callable[[Scene], tuple[bytes, Trap | None]]


def _refused(name: str, *requires: str) -> Callable[[Wrong], Wrong]:
    """Enters a check that publishes what the function below makes on the checkpoints topic."""

    def enter(wrong: Wrong) -> Wrong:
        async def play(scene: Scene) -> str:
            data, trap = wrong(scene)
            await scene.whisper(scene.topics.checkpoints, data)
            await scene.pause(AFTER_S)
            if trap is not None:
                scene.traps[name] = trap
                if what := scene.sprung(trap):
                    raise Failed(f"By gossip {what}.")
            group = await scene.next_group()
            if group.version < scene.run.newest.number:
                raise Failed(f"It went back to version {group.version} of {scene.run.newest.number}.")
            return ""

        GOSSIP(name, *requires, towards=TOWARDS, seconds=30)(play)
        return wrong

    return enter


def _trapped(trap: Trap, data: bytes | None = None) -> tuple[bytes, Trap]:
    return data or trap.envelope, trap


@_refused("gossip-unsigned", "ENV-5", "GOS-1", "CKP-1")
def _unsigned(scene: Scene) -> tuple[bytes, Trap | None]:
    trap = scene.run.trap()
    return _trapped(trap, unsigned(trap.envelope))


@_refused("gossip-other-run", "GOS-3")
def _other_run(scene: Scene) -> tuple[bytes, Trap | None]:
    return _trapped(scene.run.trap(changes={"run": os.urandom(32)}))


@_refused("gossip-of-stranger", "GOS-8", "CKP-1")
def _stranger(scene: Scene) -> tuple[bytes, Trap | None]:
    return _trapped(scene.run.trap(by=scene.run.stranger))


@_refused("gossip-expired", "ENV-7")
def _expired(scene: Scene) -> tuple[bytes, Trap | None]:
    now = now_ms()
    return _trapped(scene.run.trap(changes={"ts": now - AGO_MS, "exp": now - AGO_MS + 60_000}))


@_refused("gossip-future", "ENV-7")
def _future(scene: Scene) -> tuple[bytes, Trap | None]:
    now = now_ms()
    return _trapped(scene.run.trap(changes={"ts": now + AGO_MS, "exp": now + AGO_MS + 60_000}))


@_refused("gossip-lifetime", "ENV-7")
def _immortal(scene: Scene) -> tuple[bytes, Trap | None]:
    return _trapped(scene.run.trap(changes={"exp": now_ms() + 10 * AGO_MS}))


@_refused("gossip-version", "ENV-3")
def _later(scene: Scene) -> tuple[bytes, Trap | None]:
    return _trapped(scene.run.trap(changes={"v": 2}))


@_refused("gossip-kind", "ENV-4")
def _unknown(scene: Scene) -> tuple[bytes, Trap | None]:
    return scene.run.seal("weather", b"\x80"), None


@_refused("gossip-kind-of-topic", "GOS-3")
def _elsewhere(scene: Scene) -> tuple[bytes, Trap | None]:
    return scene.run.seal(Kind.RECEIPTS, Receipts([]).to_bytes()), None


@_refused("gossip-oversize", "ENV-9")
def _oversize(scene: Scene) -> tuple[bytes, Trap | None]:
    return scene.run.seal(Kind.CHECKPOINT, bytes(OVERSIZE)), None


@_refused("gossip-malformed", "ENV-1")
def _garbage(scene: Scene) -> tuple[bytes, Trap | None]:
    return os.urandom(500), None


@_refused("gossip-compression", "ENV-8")
def _folded(scene: Scene) -> tuple[bytes, Trap | None]:
    return scene.run.seal(Kind.CHECKPOINT, os.urandom(300), enc="zstd", size=5_000), None


@_refused("checkpoint-kind", "CKP-6")
def _kind(scene: Scene) -> tuple[bytes, Trap | None]:
    return _trapped(scene.run.trap_with(kind="sparse"))


@_refused("checkpoint-path", "CKP-3")
def _path(scene: Scene) -> tuple[bytes, Trap | None]:
    out = file_entry("config.json", [os.urandom(64)], PIECE)
    entry = type(out)("../" + out.path, out.size, out.chunk, out.chunks)
    return _trapped(scene.run.trap_with(files=[entry]))


@_refused("checkpoint-sizes", "CKP-5")
def _sizes(scene: Scene) -> tuple[bytes, Trap | None]:
    entry = file_entry("config.json", [os.urandom(64)], PIECE)
    return _trapped(
        scene.run.trap_with(files=[type(entry)(entry.path, 5 * PIECE, entry.chunk, entry.chunks)])
    )


@_refused("checkpoint-older", "CKP-9")
def _older(scene: Scene) -> tuple[bytes, Trap | None]:
    return scene.run.resealed(scene.run.versions[0]), None
