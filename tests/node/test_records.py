"""What is remembered of sources: rates that are not too high, pauses that end."""

from __future__ import annotations

from nous_node.node.records import MAX_RECORDS, STALE_S, Record, Records

MIB = 1 << 20


def test_pauses_grow_and_are_bounded() -> None:
    record = Record()
    pauses = []
    for _ in range(12):
        record.failed(100.0)
        pauses.append(record.until - 100.0)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == 60.0
    record.delivered(MIB, 101.0, idle=True)
    assert (record.failures, record.until) == (0, 0.0)


def test_a_rate_is_what_came_while_something_was_asked_for() -> None:
    record = Record()
    record.begins(0.0)
    for number in range(1, 9):
        record.delivered(MIB, number * 0.25, idle=False)
    assert abs(record.rate / (4 * MIB) - 1) < 0.01
    record.begins(50.0)  # a pause in between does not count
    record.delivered(MIB, 50.25, idle=True)
    assert abs(record.rate / (4 * MIB) - 1) < 0.01


def test_chunks_that_come_together_do_not_make_a_rate_of_their_own() -> None:
    record = Record()
    record.begins(0.0)
    for moment in (1.0, 1.001, 1.002, 1.003):
        record.delivered(MIB, moment, idle=False)
    assert record.rate <= 4 * MIB


def test_an_old_rate_is_forgotten_and_so_are_sources() -> None:
    found = Records()
    found.of("source", 0.0).rate = 5.0
    assert found.of("source", STALE_S).rate == 5.0
    assert found.of("source", STALE_S + 1).rate == 0.0
    for number in range(MAX_RECORDS + 5):
        found.of(str(number), 0.0)
    assert len(found._known) == MAX_RECORDS
