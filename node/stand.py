"""`nous-node conformance peer -- CMD... {invite}`: a client in a run of the kit's own, which is its trainer.

    run, peers -> the client is started -> it joins -> receipts -> gossip -> chunks -> restart, rate, the end

The order of play: each check builds on those before it. Where the client does not join, or fails one check
after the other, the rest is not played: the kit ends, whatever the client does.
"""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import trio

from nous_node.protocol.errors import LocalError

from .conformance_table import Outcome, Row, Sheet
from .live_check import Check, make
from .stand_checks_chunks import CHUNKS
from .stand_checks_end import END, SEEN
from .stand_checks_gossip import GOSSIP
from .stand_checks_join import JOIN, false_heads
from .stand_checks_receipts import RECEIPTS
from .stand_client import Client
from .stand_desk import Desk, open_peers
from .stand_run import StandRun
from .stand_scene import Flow, Scene
from .stand_witness import Witness
from .swarm_download import first_of

PLAY_S = 900.0
"""Of all checks together: several times what a slow client takes."""
MOST_FAILED = 4
"""Checks in a row that fail before the rest is given up: the client hangs, or does nothing right."""

PLAYED: tuple[Check[Scene], ...] = (*JOIN, *RECEIPTS, *GOSSIP, *CHUNKS, *END)
"""In their order."""
CHECKS: tuple[Check[Scene], ...] = (*PLAYED, *SEEN)

Tell = Callable[[Row], None]


def stand(
    command: Sequence[str] | None, names: frozenset[str], tell: Tell, say: Callable[[str], None]
) -> Sheet:
    """Plays with the client that `command` starts; with None, with one that a person starts with the invite
    that `say` is told. `names`: of checks or requirements, if not all are wanted. Raises LocalError where the
    command cannot be started, or a name is none of a check or requirement here."""
    known = {check.name for check in CHECKS}.union(*(check.requires for check in CHECKS))
    if unknown := names - known:
        raise LocalError(
            f"No check here is called {min(unknown)!r} or serves it. Leave --only out to see all."
        )
    with tempfile.TemporaryDirectory(prefix="nous-node-conformance-") as folder:
        try:
            return trio.run(_stand, command, names, tell, say, Path(folder))
        except* LocalError as group:
            raise first_of(group) from None


async def _stand(
    command: Sequence[str] | None,
    names: frozenset[str],
    tell: Tell,
    say: Callable[[str], None],
    folder: Path,
) -> Sheet:
    run = await trio.to_thread.run_sync(StandRun, folder)
    witness = Witness(run)
    witness.published(run.newest)
    changed: list[Callable[[], None]] = []
    desk = Desk(run, lambda: changed[0]())
    sheet: Sheet | None = None
    async with open_peers(run, desk) as peers, trio.open_nursery() as nursery:
        scene = Scene(run, desk, peers, witness)
        changed.append(scene.change)
        desk.false_heads.extend(false_heads(scene))
        await nursery.start(scene.run_loops)
        sheet = await _with_client(scene, command, names, tell, say, folder)
        nursery.cancel_scope.cancel()
    assert sheet is not None
    return sheet


async def _with_client(
    scene: Scene,
    command: Sequence[str] | None,
    names: frozenset[str],
    tell: Tell,
    say: Callable[[str], None],
    folder: Path,
) -> Sheet:
    if command is None:
        say(scene.invite)
        rows = await _play(scene, names, tell)
        return Sheet(_called(scene, "client"), "peer", tuple(rows))
    scene.client = client = Client(command, scene.invite, folder, scene.change)
    async with trio.open_nursery() as nursery:
        scene.nursery = nursery
        try:
            await client.run(nursery)
        except OSError as error:
            raise LocalError(f"Cannot start {shlex.join(command)!r}: {error.strerror}.") from error
        try:
            rows = await _play(scene, names, tell)
        finally:
            await client.kill()
        nursery.cancel_scope.cancel()
    return Sheet(_called(scene, command[0]), "peer", tuple(rows))


def _called(scene: Scene, otherwise: str) -> str:
    return scene.witness.hellos[0][1].agent if scene.witness.hellos else otherwise


async def _play(scene: Scene, names: frozenset[str], tell: Tell) -> list[Row]:
    rows: list[Row] = []
    end, failed = trio.current_time() + PLAY_S, 0
    for check in PLAYED:
        wanted = _wanted(check, names)
        joining = check in JOIN
        if not wanted and not joining:
            continue
        if not joining:
            scene.flow = Flow.LATE  # unless the check wants it otherwise
        scene.lost |= failed >= MOST_FAILED or trio.current_time() > end
        row = _unplayed(check) if scene.lost else await make(check, scene)
        failed = failed + 1 if row.outcome is Outcome.FAIL else 0
        if wanted or (row.outcome is Outcome.FAIL and scene.lost):  # why all the rest is not played
            rows.append(row)
            tell(row)
    scene.witness.count()
    for check in SEEN:
        if _wanted(check, names):
            rows.append(row := await make(check, scene))
            tell(row)
    return rows


def _wanted(check: Check[Scene], names: frozenset[str]) -> bool:
    return not names or check.name in names or not names.isdisjoint(check.requires)


def _unplayed(check: Check[Scene]) -> Row:
    why = "It was not played: the client had ended, did not join, or had failed too many checks in a row."
    return Row(check.name, check.requires, Outcome.UNTESTED, why)
