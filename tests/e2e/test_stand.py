"""The kit around our own volunteer, and around one that connects and then does nothing, as real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.cli_exit import Exit

from .processes import LOOPBACK, PROGRAM

PLAY_S = 600.0
"""A play takes two to three minutes; the machine may be busy."""

SILENT = """
import os, sys, trio
from nous_node.node.network import NetworkConfig, open_network
from nous_node.protocol.runs import Invite

async def main():
    async with open_network(os.urandom(32), NetworkConfig(listen=())) as network:
        for address in Invite.from_text(sys.argv[1]).addresses:
            await network.connect(address)
        await trio.sleep_forever()

trio.run(main)
"""


def played(folder: Path, *client: str, only: str = "") -> tuple[int, dict[str, Any]]:
    """Exit code, and the sheet as JSON; the JUnit file is there as well. `only`: checks, not all of them."""
    sheet, junit = folder / "sheet.json", folder / "junit.xml"
    flags = ["--json", str(sheet), "--junit", str(junit), *(["--only", only] if only else [])]
    command = [*PROGRAM, "conformance", "peer", *flags, "--", *client]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PLAY_S, check=False)
    assert junit.is_file(), done.stderr
    return done.returncode, json.loads(sheet.read_text())


@pytest.mark.slow
@pytest.mark.timeout(PLAY_S + 60)
def test_our_own_volunteer_passes(tmp_path: Path) -> None:
    flags = ("--home", "{home}", "--threads", "1", "--listen", LOOPBACK, "--json")
    code, sheet = played(tmp_path, *PROGRAM, "join", "{invite}", *flags)
    other = {row["check"]: row["note"] for row in sheet["rows"] if row["outcome"] != "pass"}
    assert set(other) <= {"rate"}, other  # a machine that does much else makes too few groups for it
    assert (code, sheet["failed"], sheet["kind"]) == (Exit.OK, False, "peer")


@pytest.mark.slow
@pytest.mark.timeout(PLAY_S + 60)
def test_a_client_that_only_connects_is_given_up(tmp_path: Path) -> None:
    code, sheet = played(tmp_path, sys.executable, "-P", "-c", SILENT, "{invite}")
    outcomes = {row["check"]: row["outcome"] for row in sheet["rows"]}
    assert code == Exit.FAILED
    assert outcomes["joins-noise-yamux"] == "pass"
    assert {outcomes[name] for name in ("asks-head", "subscribes", "hello", "hello-repeated")} == {"fail"}
    assert {outcomes[name] for name in ("first-version", "tasks", "rate", "equivocation")} == {"untested"}
