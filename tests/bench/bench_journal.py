"""What a trainer's journal costs a group, with few keys and with many, and at worst; one JSON line.

    python tests/bench/bench_journal.py [--keys 100000]

`add` and `decide`: microseconds of CPU a group, in batches of 32 and 64, of ten keys and of a thousand among
`--keys`. `standings`: milliseconds for 1,024 keys, the first time and later. `jump`, `promote`, `close`:
milliseconds for the largest jump of a counter, for the message that lets 3,500 groups go which waited for it,
and for a publication that refuses 8,000. `trim` and `trim_keys`: milliseconds of a publication for what is
forgotten beside 20,000 groups that are kept and 20,000 repeats, and where keys are counted and a sixteenth
of them goes. Disk time is not in it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path

from nous_node.node.journal_trim import KEPT_KEYS, trim
from nous_node.node.store import Journal, RunRules, StoredCheckpoint, StoredGroup
from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.receipts import accepted

NOW = 1_800_000_000_000
BODY = bytes(2_000)
RULES = RunRules(bytes(32), (1,), 0)


def milliseconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def key(number: int) -> bytes:
    return sha256(b"key %d" % number).digest()


def group(sender: bytes, counter: int, version: int = 0) -> StoredGroup:
    digest = sha256(b"%d %d" % (counter, version) + sender).digest()
    return StoredGroup(digest, sender, bytes([version]) * 32, version, counter, digest, NOW, BODY)


def publish(journal: Journal, version: int) -> None:
    journal.publish(StoredCheckpoint(version, bytes([version]) * 32, b"", "", NOW, {}, {}), [])


def intake(journal: Journal, groups: Sequence[StoredGroup]) -> tuple[float, float]:
    """Microseconds a group: journalled, and judged."""

    def add() -> None:
        for start in range(0, len(groups), 32):
            assert not any(journal.add_many(groups[start : start + 32]))

    def decide() -> None:
        for start in range(0, len(groups), 64):
            journal.decide([accepted(one.id, one.key, 10) for one in groups[start : start + 64]], NOW)

    return 1000 * milliseconds(add) / len(groups), 1000 * milliseconds(decide) / len(groups)


def ordinary(journal: Journal, keys: int) -> dict[str, float]:
    with journal._database.transaction() as connection:
        connection.executemany(
            "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent, accepted, credit) "
            "VALUES(?, 1, -1, 1, 'bench', 1, ?)",
            [(key(number), number) for number in range(keys)],
        )
    first = milliseconds(lambda: journal.standings([key(number) for number in range(1_024)]))
    later = milliseconds(lambda: journal.standings([key(number) for number in range(1_024)]))
    few = intake(journal, [group(key(number % 10), number // 10) for number in range(1_000)])
    many = intake(journal, [group(key(number), 0) for number in range(1_000, 2_000)])
    return {
        "add_us": few[0],
        "decide_us": few[1],
        "add_many_keys_us": many[0],
        "decide_many_keys_us": many[1],
        "standings_first_ms": first,
        "standings_ms": later,
        "states_ms": milliseconds(journal.states),
    }


def worst(journal: Journal) -> dict[str, float]:
    """One key jumps and fills the holes from above; then eight keys leave all that they may waiting."""
    liar, others = key(0), [key(number) for number in range(1, 9)]
    for sender in (liar, *others):
        journal.hear(sender, "bench", NOW, -1)
    publish(journal, 0)
    journal.add(group(liar, 0))
    jump = milliseconds(lambda: journal.add(group(liar, MAX_COUNTER_GAP)))
    last = 3 + (MAX_COUNTER_GAP + 1) // 8
    for start in range(MAX_COUNTER_GAP - 1, last, -32):
        journal.add_many([group(liar, counter) for counter in range(start, max(start - 32, last), -1)])
    waiting = "SELECT count(*) FROM groups WHERE state = 'waiting'"
    promote = 0.0
    while journal._database.number(waiting):
        promote = milliseconds(lambda counter=last: journal.add(group(liar, counter)))  # type: ignore[misc]
        last -= 1
    for sender in others:
        journal.add_many([group(sender, counter) for counter in range(1_000, 2_020)])
    close = milliseconds(lambda: publish(journal, 1))
    return {"jump_ms": jump, "promote_ms": promote, "close_ms": close}


def forgetting(journal: Journal) -> dict[str, float]:
    """As many keys as are kept and some more, as many groups as an audit may ask for."""
    kept = 20_000
    with journal._database.transaction() as connection:
        connection.executemany(
            "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent) VALUES(?, 1, -1, 1, 'bench')",
            [(key(number),) for number in range(KEPT_KEYS + 100)],
        )
        connection.executemany(
            "INSERT INTO groups(id, key, checkpoint, version, counter, digest, received_ms, bytes, state) "
            "VALUES(?, ?, x'00', 1, ?, x'00', 1, 2000, 'used')",
            [(key(number), key(number % 100), number) for number in range(kept)],
        )
        connection.executemany(
            "INSERT INTO repeats VALUES(?, ?)", [(key(kept + number), key(number)) for number in range(kept)]
        )
    with journal._database.transaction() as connection:
        keys = milliseconds(lambda: trim(connection, 256))  # of version 0
    publish(journal, 0)
    publish(journal, 1)
    with journal._database.transaction() as connection:
        return {"trim_ms": milliseconds(lambda: trim(connection, 256)), "trim_keys_ms": keys}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--keys", type=int, default=100_000)
    keys = parser.parse_args().keys
    with tempfile.TemporaryDirectory() as folder:
        with Journal.open(Path(folder) / "ordinary.sqlite", RULES) as journal:
            figures = ordinary(journal, keys)
        with Journal.open(Path(folder) / "worst.sqlite", RULES) as journal:
            figures |= worst(journal)
        with Journal.open(Path(folder) / "forgetting.sqlite", RULES) as journal:
            figures |= forgetting(journal)
    print(json.dumps({"bench": "journal", "keys": keys, **{k: round(v, 2) for k, v in figures.items()}}))


if __name__ == "__main__":
    main()
