"""kill -9 of everything, one after the other, in one run that goes on through all of it."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import pytest

from nous_node.node.events import TrainerStatus, VolunteerStatus

Groups = dict[bytes, tuple[str, int | None]]


@dataclass
class Run:
    """A trainer on a fixed port and a volunteer, both at work."""

    village: Any
    journal: Any
    port: int
    invite: str
    trainer: Any
    volunteer: Any

    def restart_trainer(self) -> Any:
        self.trainer = self.village.train(port=self.port)
        assert self.trainer.invite() == self.invite
        return self.trainer

    def goes_on(self) -> None:
        """Groups of the volunteer are taken, and versions made of them."""
        version = self.journal.version
        self.volunteer.accepted(8)
        self.trainer.version(version + 1)
        self.journal.assert_sound()


@pytest.fixture(scope="module")
def run(make_village: Any, make_run: Any, journal: Any) -> Iterator[Run]:
    with make_village() as village, closing(socket.socket()) as probe:
        folder = make_run(village.home("trainer"))
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        trainer = village.train(port=port)
        invite = trainer.invite()
        yield Run(village, journal(folder), port, invite, trainer, village.join("volunteer", invite))


def test_volunteer_outlives_its_worker(run) -> None:
    run.volunteer.accepted()
    mark = run.volunteer.mark
    run.volunteer.child().kill()
    run.volunteer.note("The groups in work are made again", since=mark)
    run.goes_on()


def test_trainer_outlives_its_learner_and_nothing_is_used_twice(run) -> None:
    run.goes_on()
    before = run.journal.groups()
    mark = run.trainer.mark
    run.trainer.child().kill()
    run.trainer.note("It is started again at version", since=mark)
    run.goes_on()
    assert_kept(before, run.journal.groups())


@pytest.mark.parametrize("moment", range(2))
def test_killed_trainer_resumes_where_it_was(run, moment: int) -> None:
    run.goes_on()
    mark = run.trainer.mark
    run.trainer.wait(TrainerStatus, since=mark)
    learner = run.trainer.child()
    time.sleep(random.Random(moment).uniform(0, 0.5))  # not to wait for anything: this is the moment
    run.trainer.kill()
    learner.wait(15)  # it sees that its pipe is closed
    before, version = run.journal.groups(), run.journal.version
    run.journal.assert_sound()
    mark = run.volunteer.mark
    run.restart_trainer()
    assert run.trainer.version(0) >= version
    run.volunteer.wait(VolunteerStatus, lambda status: status.peers == 1, since=mark, seconds=20)
    run.goes_on()
    assert_kept(before, run.journal.groups())


def assert_kept(before: Groups, after: Groups) -> None:
    """No journalled group was lost, and none changed the version that used it. (Groups that were used long
    ago are forgotten.)"""
    for rollout, (state, used) in before.items():
        if state in ("pending", "accepted"):
            assert rollout in after
        else:
            assert after.get(rollout, (state, used)) == (state, used)


def test_killed_volunteers_groups_get_their_receipts_when_it_is_back(run) -> None:
    """Groups that nobody could take are in its outbox; after its own end it sends them again."""
    run.volunteer.accepted()
    os.kill(run.trainer.process.pid, signal.SIGSTOP)
    waiting = run.volunteer.wait(
        VolunteerStatus, lambda status: status.groups_waiting >= 4, since=run.volunteer.mark
    )
    run.volunteer.kill()
    assert waiting.groups_waiting
    os.kill(run.trainer.process.pid, signal.SIGCONT)
    outbox = run.village.outbox("volunteer")
    left = outbox.waiting()
    run.volunteer = run.village.join("volunteer")  # the run that it was in last
    run.volunteer.accepted()
    run.volunteer.until(lambda: not left & outbox.waiting())
    assert outbox.accepted() & left
    run.goes_on()


def test_run_goes_on_without_a_killed_volunteer(run) -> None:
    other = run.village.join("other", run.invite)
    other.accepted()
    other.kill()
    run.goes_on()


def test_ctrl_c_ends_volunteer_and_trainer_with_a_summary(run) -> None:
    run.volunteer.accepted()
    for node in (run.volunteer, run.trainer):
        node.interrupt()
        assert node.exit_code() == 0
    assert "accepted rollout groups" in run.volunteer.summary().text
    assert "verified rollout groups" in run.trainer.summary().text
    assert run.volunteer.sentence() == run.trainer.sentence() == ""
    assert run.journal.rows("SELECT count(*) FROM groups WHERE state = 'pending'")[0][0] < 64
