"""`nous-node conformance peer` against our trainer, relay and volunteer: whole processes of a run at work."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.events import RunReady
from nous_node.node.home import Home
from nous_node.node.live import CHECKS

from .processes import PROGRAM

PLAY_S = 240.0

pytestmark = pytest.mark.timeout(400)

JAVASCRIPT = Path(__file__).parents[1] / "clients" / "js" / "volunteer.js"

NOT_MADE = {
    "shard",  # the run has one
    "checkpoint-stale",  # its envelope lives for ten minutes
    "version-for-newcomers",  # and what follows from it, where other volunteers keep the trainer busy
}

WHILE_IT_WORKS = {
    "http-chunk",  # it serves none
    "http-refusals",
    "checkpoint-stale",
    "blob-unread",  # on an idle machine versions follow each other faster than these two look
    "have-bitmap-wrong",
}


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def played(folder: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and sheet of a play."""
    sheet, junit = folder / "sheet.json", folder / "sheet.xml"
    command = [*PROGRAM, "conformance", "peer", *arguments, "--json", str(sheet), "--junit", str(junit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PLAY_S, cwd=folder)
    assert sheet.exists(), done.stderr
    told = json.loads(sheet.read_text())
    assert len(ET.parse(junit).getroot()) == len(told["rows"])
    return done.returncode, told


def by_outcome(sheet: dict[str, Any], outcome: str) -> dict[str, str]:
    return {row["check"]: row["note"] for row in sheet["rows"] if row["outcome"] == outcome}


@pytest.mark.conformance
@pytest.mark.slow
def test_our_trainer_passes(village: Any, make_run: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("NOUS_NODE_HTTP", str(free_port()))
    make_run(village.home("trainer"))
    code, sheet = played(village.folder, village.train().invite())
    assert by_outcome(sheet, "fail") == {}
    assert by_outcome(sheet, "untested").keys() <= NOT_MADE
    assert code == Exit.OK
    assert {row["check"] for row in sheet["rows"]} == {one.name for one in CHECKS if "trainer" in one.towards}


@pytest.mark.conformance
@pytest.mark.slow
def test_our_relay_passes(village: Any, make_run: Any, monkeypatch: Any) -> None:
    make_run(village.home("trainer"))
    invite = village.train().invite()
    monkeypatch.setenv("NOUS_NODE_HTTP", str(free_port()))
    relay = village.relay("relay", invite)
    (address, *_) = relay.wait(RunReady).addresses
    code, sheet = played(village.folder, address)
    assert by_outcome(sheet, "fail") == {}
    assert by_outcome(sheet, "untested").keys() <= NOT_MADE | {"published-signatures", "published-envelopes"}
    assert code == Exit.OK


@pytest.mark.conformance
@pytest.mark.slow
def test_our_volunteer_passes_while_it_works(village: Any, make_run: Any) -> None:
    make_run(village.home("trainer"))
    port = free_port()
    invite = village.train().invite()
    volunteer = village.start(
        "volunteer", "join", invite, "--json", "--threads", "1", "--listen", f"/ip4/127.0.0.1/tcp/{port}"
    )
    volunteer.accepted(4)
    peer = Home.open(village.home("volunteer")).identity().peer_id
    code, sheet = played(village.folder, f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}")
    assert by_outcome(sheet, "fail") == {}
    untested = by_outcome(sheet, "untested").keys()
    assert untested <= WHILE_IT_WORKS
    assert code == Exit.OK
    volunteer.accepted(1)


@contextmanager
def javascript(village: Any, invite: str) -> Iterator[str]:
    """Address of a JavaScript volunteer whose first group was accepted."""
    command = ["node", str(JAVASCRIPT), invite, "--json", "--home", str(village.home("js"))]
    with (village.folder / "js.stderr").open("wb") as stderr:
        process = subprocess.Popen(
            [*command, "--listen", "/ip4/127.0.0.1/tcp/0"], stdout=subprocess.PIPE, stderr=stderr
        )
    try:
        assert process.stdout is not None
        address = ""
        for line in process.stdout:
            told = json.loads(line)
            address = told.get("address", address)
            if told["event"] == "receipt" and told["verdict"] == "accepted":
                break
        drain = threading.Thread(target=lambda: list(process.stdout or ()), daemon=True)
        drain.start()
        yield address
    finally:
        process.kill()
        process.wait()
    drain.join(5)
    process.stdout.close()


@pytest.mark.conformance
def test_the_javascript_volunteer_passes_while_it_works(village: Any, make_run: Any) -> None:
    make_run(village.home("trainer"))
    with javascript(village, village.train().invite()) as address:
        code, sheet = played(village.folder, address)
    assert by_outcome(sheet, "fail") == {}
    assert code == Exit.OK


@pytest.mark.slow
def test_nobody_there_is_a_sentence_and_an_exit_code(village: Any) -> None:
    nobody = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWMbbPVGsZYh3ChQjue712NHHGNybRRXwnuSpezYjGbCDS"
    done = subprocess.run(
        [*PROGRAM, "conformance", "peer", nobody],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=village.folder,
    )
    assert done.returncode == Exit.NETWORK
    assert "Cannot reach" in done.stderr
