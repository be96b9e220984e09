"""A run whose groups are too large for gossip: trainer, relay and volunteers as real processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from nous_node.node.create import create_run
from nous_node.node.events import RelayStatus, VolunteerStatus
from nous_node.node.home import Home
from nous_node.node.plan import EnvironmentPlan, LimitsPlan, RunPlan

CREATED = 1_750_000_000_000
INLINE = 1_024
"""Bytes of an envelope: as few as a run may allow, and fewer than a group of GROUP samples has."""
GROUP = 48
VERSIONS = 3


@dataclass
class Net:
    journal: Any
    trainer: Any
    relay: Any
    near: Any
    """A volunteer that knows the trainer."""
    behind: Any
    """One that knows the relay and nobody else."""


@pytest.fixture(scope="module")
def net(make_village: Any, journal: Any) -> Iterator[Net]:
    with make_village() as village:
        home = Home.open(village.home("trainer"))
        plan = RunPlan(
            environments={"sort-digits": EnvironmentPlan()},
            group=GROUP,
            limits=LimitsPlan(inline_bytes=INLINE),
            learning={
                "groups": 24,
                "evaluate_every": 0,
                "evaluate_tasks": 1,
            },  # a fetch is no longer than a version
        )
        folder = create_run(home.runs / "run", "run", home.identity(), plan, CREATED)
        trainer = village.train()
        relay = village.relay("relay", trainer.invite())
        alone = village.folder / "alone.toml"
        alone.write_text("neighbours = 0\n")  # nobody leads it around the relay
        near = village.join("near", trainer.invite())
        behind = village.join("behind", relay.invite(), "--config", str(alone))
        yield Net(journal(folder), trainer, relay, near, behind)


def faults(status: Any) -> set[str]:
    return {code for code in status.refused if code != "stale"}


def test_a_run_learns_from_groups_by_reference(net: Net) -> None:
    net.near.accepted(8)
    net.trainer.version(VERSIONS)
    assert not faults(net.near.statuses()[-1])
    stored = [data for (data,) in net.journal.rows("SELECT data FROM envelopes")]
    assert stored
    for data in stored:
        assert len(data) > INLINE
        assert b"reference" in data[:400]
    net.journal.assert_sound()
    used = [state for state, _ in net.journal.groups().values() if state == "used"]
    assert used


def test_a_volunteer_behind_a_relay_brings_its_groups_through_it(net: Net) -> None:
    net.behind.accepted(4)
    status = net.behind.wait(VolunteerStatus, since=net.behind.mark)
    assert status.peers == 1
    assert not faults(status)
    passed = net.relay.wait(RelayStatus, since=net.relay.mark)
    assert not faults(passed)
    assert passed.forwarded >= status.accepted
