"""A trainer is killed right after it has published: who has the new version gives it to the others."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from nous_node.node.events import VolunteerStatus
from nous_node.protocol.checkpoints import checkpoint_hash, read_manifest

PEERS = 2
"""Of each volunteer: the trainer and the other one, to whom it was introduced."""

UPDATE = 256
"""Groups: versions are seconds apart."""


def held(home: Path) -> dict[int, bytes]:
    """Hash of the weights of each version that a volunteer holds complete. Files may go while they are looked
    at."""
    found = {}
    for file in home.glob("joined/*/checkpoints/*.manifest"):
        with suppress(FileNotFoundError):
            data = file.read_bytes()
            version = read_manifest(data, checkpoint_hash(data)).version
            found[version] = sha256((file.with_suffix("") / "model.safetensors").read_bytes()).digest()
    return found


def test_volunteers_complete_a_version_among_themselves(village: Any, make_run: Any) -> None:
    """One is stopped while it is published: when it goes on, only the other is there to have it from."""
    make_run(village.home("trainer"), groups=UPDATE)
    trainer = village.train()
    invite = trainer.invite()
    first, second = (village.join(name, invite) for name in ("first", "second"))
    for node in (first, second):
        node.wait(VolunteerStatus, lambda status: status.accepted and status.peers == PEERS)
    os.kill(second.process.pid, signal.SIGSTOP)
    known = set(held(village.home("second")).values())
    first.until(lambda: set(held(village.home("first")).values()) - known)
    trainer.kill()
    version, weights = max(held(village.home("first")).items())
    assert weights not in known
    os.kill(second.process.pid, signal.SIGCONT)
    second.until(lambda: held(village.home("second")).get(version) == weights)
