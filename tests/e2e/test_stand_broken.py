"""Volunteers that break one rule each, as real processes: the kit's checks find them, and no others fail."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from nous_node.node.cli_exit import Exit

from .processes import LOOPBACK
from .test_stand import PLAY_S, played

START = """
import runpy, sys
{fault}
sys.argv[0] = "nous-node"
runpy.run_module("nous_node.node.cli", run_name="__main__")
"""

BESIDE = "tasks,drawn,structure,counters,own-shard"
"""Checks that hold in any case."""


@dataclass(frozen=True)
class Fault:
    """What is broken, the checks that are made for it, and those that fail."""

    name: str
    patch: str
    only: str
    fails: frozenset[str]
    may: frozenset[str]
    """Checks that may fail with them, as luck will have it."""


def fault(name: str, patch: str, *fails: str, may: tuple[str, ...] = ()) -> Fault:
    return Fault(name, patch, ",".join([*fails, *may, BESIDE]), frozenset(fails), frozenset(may))


FAULTS = (
    fault(
        "no signature of an envelope is verified",
        "from nous_node.protocol.envelope import Envelope; Envelope.verify_signature = lambda self: None",
        "head-unsigned",
        "traps",
    ),
    fault(
        "times are not looked at",
        "from nous_node.protocol.envelope import Envelope; Envelope.check_time = lambda self, now: None",
        "gossip-expired",
        "traps",
    ),
    fault(
        "any number of groups may wait for receipts",
        "from nous_node.node.pacing import Pacing; Pacing.batch = lambda self, wanted, waiting: wanted",
        "window",
    ),
    fault(
        "groups without a receipt are not repeated",
        "import nous_node.node.sending as sending; sending.RESEND_SECONDS = 1e6",
        "group-repeated",
    ),
    fault(
        "the rate is not kept",
        "from nous_node.node.pacing import OwnRate; OwnRate.delay = lambda self, now, cost=1.0: 0.0",
        "rate",
    ),
    fault(
        "sequence numbers begin anew with each start",
        "import itertools; from nous_node.node.outbox import Outbox; numbers = itertools.count(1); "
        "Outbox.next_seq = lambda self: next(numbers)",
        "seq-once",
        may=("restart", "restart-repeats"),
    ),
    fault(
        "a wrong chunk costs its source nothing",
        "from nous_node.node.network import Network\nasync def pass_over(self, peer, fault): pass\n"
        "Network.refuse = pass_over",
        "chunk-wrong",
    ),
    fault(
        "two checkpoints of one version prove nothing",
        "from nous_node.protocol.equivocation import Ledger; Ledger.note = lambda *facts: None",
        "equivocation",
    ),
)


@pytest.mark.slow
@pytest.mark.timeout(PLAY_S)
@pytest.mark.parametrize("broken", FAULTS, ids=lambda broken: broken.name)
def test_what_is_broken_is_found(tmp_path: Path, broken: Fault) -> None:
    program = START.format(fault=broken.patch)
    flags = ("--home", "{home}", "--threads", "1", "--listen", LOOPBACK, "--json")
    client = (sys.executable, "-P", "-c", program, "join", "{invite}", *flags)
    code, sheet = played(tmp_path, *client, only=broken.only)
    notes = {row["check"]: row["note"] for row in sheet["rows"] if row["outcome"] == "fail"}
    assert broken.fails <= set(notes) <= broken.fails | broken.may, notes
    assert code == Exit.FAILED
