"""Who can reach whom: a line that is cut and mended, a relay in between, nobody at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.events import RelayStatus, VolunteerStatus
from nous_node.protocol.runs import Invite

from .proxy import Proxy

STALENESS = 4


@dataclass
class Net:
    """A trainer, and volunteers that reach it in different ways."""

    village: Any
    journal: Any
    trainer: Any
    line: Proxy
    """Between the trainer and the volunteer `cut`."""
    relay: Any = None
    """The only one that the volunteer `behind` knows."""
    volunteers: dict[str, Any] = field(default_factory=dict)

    def join(self, name: str, *arguments: str) -> Any:
        self.volunteers[name] = self.village.join(name, *arguments)
        return self.volunteers[name]

    @property
    def invite(self) -> str:
        return str(self.trainer.invite())

    def invite_at(self, port: int) -> str:
        """The trainer's, as if it were to be found at another port."""
        invite = Invite.from_text(self.invite)
        there = [
            address.replace(f"/tcp/{self.trainer.port()}/", f"/tcp/{port}/") for address in invite.addresses
        ]
        return msgspec.structs.replace(invite, addresses=there).to_text()


@pytest.fixture(scope="module")
def net(make_village: Any, make_run: Any, journal: Any) -> Iterator[Net]:
    """All nodes start at once: most of their time goes into importing torch."""
    with make_village() as village:
        folder = make_run(village.home("trainer"))
        trainer = village.train()
        net = Net(village, journal(folder), trainer, Proxy(trainer.port()))
        net.join("nowhere", net.invite_at(1))
        net.relay = village.relay("relay", net.invite)
        alone = village.folder / "alone.toml"
        alone.write_text("neighbours = 0\n")  # nobody leads them around what they know
        net.join("behind", net.relay.invite(), "--config", str(alone))
        net.join("cut", net.invite_at(net.line.port), "--config", str(alone))
        net.join("some", net.invite, "--rollouts", "5")
        net.join("while", net.invite, "--minutes", "0.05")
        yield net
        net.line.close()


def test_volunteer_that_knows_only_a_relay_takes_part(net) -> None:
    """Its rollouts reach the trainer, receipts come back, and chunks come from the relay."""
    behind = net.volunteers["behind"]
    behind.accepted(4)
    first = behind.statuses()[-1]
    assert first.peers == 1
    later = behind.wait(VolunteerStatus, lambda status: status.version > first.version, since=behind.mark)
    assert later.peers == 1
    assert not {code for code in later.refused if code != "stale"}
    passed = net.relay.wait(RelayStatus, since=net.relay.mark)
    assert passed.forwarded >= later.accepted
    assert passed.chunks
    assert not {code for code in passed.refused if code != "stale"}


def test_volunteer_stops_by_itself_after_as_many_rollouts(net) -> None:
    volunteer = net.volunteers["some"]
    assert volunteer.exit_code(60) == Exit.OK
    summary = volunteer.summary()
    assert summary.status.accepted + sum(summary.status.refused.values()) == 5
    assert summary.status.groups_waiting == 0
    assert summary.text.startswith(f"Contributed {summary.status.accepted} accepted rollout groups")


def test_volunteer_stops_by_itself_after_some_minutes(net) -> None:
    volunteer = net.volunteers["while"]
    assert volunteer.exit_code(60) == Exit.OK
    assert volunteer.summary().status.seconds >= 3


def test_volunteer_that_was_cut_off_catches_up(net) -> None:
    line, volunteer = net.line, net.volunteers["cut"]
    volunteer.accepted()
    line.cut()
    volunteer.wait(VolunteerStatus, lambda status: status.peers == 0, since=volunteer.mark)
    mark, version = volunteer.mark, net.journal.version
    net.trainer.version(version + 2 * STALENESS, since=net.trainer.mark)  # the others go on without it
    missed = net.journal.version
    line.heal()
    volunteer.wait(VolunteerStatus, lambda status: status.peers == 1, since=mark)
    volunteer.wait(VolunteerStatus, lambda status: status.version >= missed, since=mark)
    volunteer.accepted(4)
    volunteer.interrupt()
    assert volunteer.exit_code() == Exit.OK


def test_no_first_group_comes_before_its_key_counts(net) -> None:
    """All keys are new here, and many versions come while their hellos are on the way."""
    newcomers = net.journal.rows("SELECT 1 FROM keys WHERE accepted > 0")
    assert len(newcomers) >= 3
    assert not net.journal.rows("SELECT groups FROM totals WHERE code = 'key-too-new'")


def test_environments_that_the_run_does_not_have_are_named(net) -> None:
    volunteer = net.village.join("choosy", net.invite, "--env", "chess")
    assert volunteer.exit_code() == Exit.INPUT
    assert "chess" in volunteer.sentence()
    assert "sort-digits" in volunteer.sentence()


def test_model_too_large_for_the_memory_allowed_is_refused_before_it_is_fetched(net) -> None:
    volunteer = net.village.join("small", net.invite, "--memory", "100MiB")
    assert volunteer.exit_code() == Exit.INPUT
    assert "0.4 GiB" in volunteer.sentence()
    assert "0.1 GiB" in volunteer.sentence()
    assert not list(net.village.home("small").glob("joined/*/checkpoints/*"))


def test_damaged_outbox_is_named_and_left_alone(net) -> None:
    (outbox,) = net.village.home("some").glob("joined/*/outbox.sqlite")
    damaged = b"not what it was" + outbox.read_bytes()[15:]
    outbox.write_bytes(damaged)
    volunteer = net.village.join("some")
    assert volunteer.exit_code() == Exit.STORAGE
    assert str(outbox) in volunteer.sentence()
    assert outbox.read_bytes() == damaged


def test_nobody_at_the_address_is_said_with_the_address(net) -> None:
    nowhere = net.volunteers["nowhere"]
    assert nowhere.exit_code(45) == Exit.NETWORK
    sentence = nowhere.sentence()
    assert "/ip4/127.0.0.1/tcp/1/p2p/" in sentence
    assert "ask for a new invite" in sentence
    home = net.village.home("nowhere")
    assert not (home / "last_run").exists()
    assert not list(home.glob("joined/*"))
