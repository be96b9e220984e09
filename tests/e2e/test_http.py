"""`--http`: chunks at a port of one's own, beside libp2p."""

from __future__ import annotations

import hashlib
import socket
import urllib.error
import urllib.request
from contextlib import closing
from typing import Any

import pytest

from nous_node.node.cli_exit import Exit
from nous_node.node.create import folder_entries
from nous_node.node.events import RelayStatus, RunReady


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def chunk(port: int, digest: bytes) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/blob/{digest.hex()}", timeout=10) as answer:
        return bytes(answer.read())


def test_whoever_is_asked_to_serves_chunks_over_http(village: Any, make_run: Any, monkeypatch: Any) -> None:
    run = make_run(village.home("trainer"))
    ports = {name: free_port() for name in ("trainer", "relay")}
    monkeypatch.setenv("NOUS_NODE_HTTP", str(ports["trainer"]))
    trainer = village.train()
    invite = trainer.invite()
    monkeypatch.setenv("NOUS_NODE_HTTP", str(ports["relay"]))
    relay = village.relay("relay", invite)
    relay.wait(RunReady)
    digests = {digest for entry in folder_entries(run.checkpoint(0)) for digest in entry.hashes()}
    relay.wait(RelayStatus, lambda status: status.chunks >= len(digests))
    for port in ports.values():
        for digest in digests:
            assert hashlib.sha256(chunk(port, digest)).digest() == digest
        with pytest.raises(urllib.error.HTTPError, match="404"):
            chunk(port, bytes(32))


def test_a_port_that_is_taken_ends_the_node_with_a_sentence(
    village: Any, make_run: Any, monkeypatch: Any
) -> None:
    make_run(village.home("trainer"))
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("NOUS_NODE_HTTP", str(port))
        node = village.train()
        assert node.exit_code() == Exit.NETWORK
        sentence = node.sentence()
        assert f"port {port}" in sentence
        assert "--http" in sentence
        assert len(sentence.splitlines()) == 1
