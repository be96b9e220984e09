"""Receipts of a journal: one for each envelope of a group, all of them with its one verdict. [RCP-3]"""

from __future__ import annotations

import sqlite3
from typing import Final

import msgspec

from nous_node.protocol.receipts import Receipt

from .journal_keys import Ledger, cut_off
from .journal_tables import StoredGroup

SAME_GROUP: Final = (
    "SELECT id, state FROM groups WHERE key = ? AND checkpoint = ? AND counter = ? AND digest = ?"
)


def place(group: StoredGroup) -> tuple[bytes, bytes, int, bytes]:
    """What makes a group the same one: values for SAME_GROUP. [GOS-12]"""
    return group.key, group.checkpoint, group.counter, group.digest


def repeated(connection: sqlite3.Connection, group: StoredGroup) -> bool:
    """Whether the group is here already. Its receipt is to be sent under the id of this envelope: now where
    it was decided, else with the verdict. Nothing is counted again."""
    if connection.execute("UPDATE receipts SET sent = 0 WHERE id = ?", (group.id,)).rowcount:
        return True
    row: tuple[bytes, str] | None = connection.execute(SAME_GROUP, place(group)).fetchone()
    if row is None:
        return False
    first, state = row
    if state not in ("pending", "waiting"):
        connection.execute(
            "INSERT INTO receipts(id, peer, verdict, code, measured, threshold, credit) "
            "SELECT ?, peer, verdict, code, measured, threshold, credit FROM receipts WHERE id = ?",
            (group.id, first),
        )
    elif group.id != first:
        connection.execute("INSERT OR IGNORE INTO repeats VALUES(?, ?)", (group.id, first))
    return True


def queue_receipt(connection: sqlite3.Connection, receipt: Receipt) -> None:
    connection.execute(
        "INSERT INTO receipts(id, peer, verdict, code, measured, threshold, credit) "
        "VALUES(?, ?, ?, ?, ?, ?, ?)",
        msgspec.structs.astuple(receipt),
    )


def answer(
    ledger: Ledger, receipt: Receipt, *, version: int = -1, audited: bool = True, again: bool = False
) -> None:
    """The verdict on a group in the journal: counted, and queued for it and for its repeats. For the rest see
    `Ledger.count`."""
    queue_receipt(ledger.connection, receipt)
    ledger.count(receipt, version, audited=audited, again=again)
    for (repeat,) in ledger.connection.execute(
        "DELETE FROM repeats WHERE first = ? RETURNING id", (receipt.rollout,)
    ).fetchall():
        queue_receipt(ledger.connection, msgspec.structs.replace(receipt, rollout=repeat))


def settle(ledger: Ledger) -> None:
    """The end of a transaction: what waits of keys that lost their standing is answered; all is written."""
    for receipt in cut_off(ledger):
        answer(ledger, receipt)
    ledger.write()
