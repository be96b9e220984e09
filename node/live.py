"""`nous-node conformance peer INVITE|ADDR`: plays live transcripts against a running client, wrong ones too.

The client may be anybody's and anywhere: it is dialled by peers of the kit with fresh keys. What a check does
stays below what the specification lets a client ban others for, unless that is what is checked, and then it
falls on a key that is thrown away. After each check somebody who did nothing wrong has to get an answer.
Spec: `specs/live-checks.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import trio

from nous_node.protocol.constants import INVITE_PREFIX
from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Invite

from . import (
    live_chunks,
    live_envelopes,
    live_gossip,
    live_heard,
    live_http,
    live_streams,
    live_trainer,
    live_transport,
)
from .conformance_table import Outcome, Row, Sheet
from .live_check import ANY, Check, make
from .live_target import Target, reached
from .network import parse_address

CHECKS: tuple[Check[Target], ...] = (
    *live_transport.check,
    *live_streams.check,
    *live_chunks.check,
    *live_http.check,
    *live_trainer.first,
    *live_gossip.check,
    *live_envelopes.check,
    *live_trainer.check,
    *live_heard.check,
)
"""In the order of play: those of a trainer come late, since they wait for a version."""

RUN_CHARACTERS = 64
PLAY_S = 1_800.0
"""Of all checks together: several times what a slow trainer takes."""

Tell = Callable[[Row], None]
"""Takes each row as soon as it is known."""


def play(target: str, run: str | None, only: Collection[str], tell: Tell) -> Sheet:
    """All checks of a client, by its invite or address. `run`: hexadecimal, where an address alone does not
    say it; `only`: names of checks, or requirement ids.

    Raises RemoteError or LocalError for what is no invite, address or run id, and UnreachableError where
    nobody answers.
    """
    addresses, chosen = _target(target, run)
    _refuse_unknown(only)
    return trio.run(played, addresses, chosen, only, tell)


def _target(target: str, run: str | None) -> tuple[list[str], bytes | None]:
    given = None if run is None else _run_id(run)
    if target.strip().startswith(INVITE_PREFIX):
        invite = Invite.from_text(target)
        if given not in (None, invite.run):
            raise LocalError("The invite is of another run than --run says. Leave --run out with an invite.")
        return list(invite.addresses), invite.run
    parse_address(target)
    return [target], given


def _run_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(text) != RUN_CHARACTERS or len(found) != RUN_CHARACTERS // 2:
        raise LocalError(
            f"A run id has {RUN_CHARACTERS} hexadecimal digits; --run has {len(text)} characters. "
            "`nous-node status` and an invite name it."
        )
    return found


def _refuse_unknown(only: Collection[str]) -> None:
    known = {one.name for one in CHECKS} | {rule for one in CHECKS for rule in one.requires}
    for name in sorted(set(only) - known):
        raise LocalError(
            f"No live check is called {name!r}, and none serves such a requirement; specs/live-checks.md "
            "lists all."
        )


async def played(
    addresses: Sequence[str],
    run: bytes | None,
    only: Collection[str] = (),
    tell: Tell = lambda row: None,
    checks: Sequence[Check[Target]] = CHECKS,
) -> Sheet:
    """The same, inside trio."""
    rows: list[Row] = []

    def done(row: Row) -> None:
        rows.append(row)
        tell(row)

    async with reached(addresses, run) as target:
        chosen = [one for one in checks if _applies(one, target.role) and _wanted(one, only)]
        async with trio.open_nursery() as nursery:
            for one in chosen:
                if one.aside:
                    nursery.start_soon(_aside, one, target, done)
            await _in_turn([one for one in chosen if not one.aside], target, done)
    return Sheet(_name(target), "peer", tuple(rows))


def _wanted(check: Check[Target], only: Collection[str]) -> bool:
    return not only or check.name in only or any(rule in only for rule in check.requires)


def _applies(check: Check[Target], role: str) -> bool:
    return role in check.towards or check.towards == ANY


def _name(target: Target) -> str:
    return f"{target.role or 'client'} at {target.address}"


async def _aside(check: Check[Target], target: Target, done: Tell) -> None:
    done(await make(check, target))


async def _in_turn(checks: Sequence[Check[Target]], target: Target, done: Tell) -> None:
    """Until the client has stopped answering, also when asked a second time."""
    alive, end = True, trio.current_time() + PLAY_S
    for number, check in enumerate(checks):
        stopped = "" if alive or await target.answers() else "The client had stopped answering."
        if trio.current_time() > end:
            stopped = f"The checks before it took {PLAY_S:g} s; --only plays it alone."
        if stopped:
            for left in checks[number:]:
                done(Row(left.name, left.requires, Outcome.UNTESTED, stopped))
            return
        row = await make(check, target)
        alive = await target.answers()
        done(row if alive else _harmed(row))


def _harmed(row: Row) -> Row:
    note = f"After it, the client did not answer to somebody who did nothing wrong. {row.note}"
    return Row(row.check, row.requires, Outcome.FAIL, note.strip())
