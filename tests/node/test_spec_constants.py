"""What the specification tells of timers and limits outside `protocol` is what the code does."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

SPECS = Path(__file__).parents[2] / "specs"
CONFIG = {
    f"{folder}.{name}": table
    for folder, tables in tomllib.loads((SPECS / "config" / "node.toml").read_text()).items()
    for name, table in tables.items()
}


def plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", CONFIG)
def test_constants_are_those_of_the_config_file(name: str) -> None:
    module = importlib.import_module(f"nous_node.{name}")
    for key, value in CONFIG[name].items():
        assert plain(getattr(module, key.upper())) == value, key


CHAPTER_OF = {
    "03-transport.md": (
        "node.hardening node.muxer node.muxer_stream node.gossip node.gossip_memory node.mesh node.offences "
        "node.network node.relay node.requests node.liveness node.neighbours protocol.introductions "
        "node.following node.holdings node.uploads node.http_server node.http_wire node.http_source "
        "node.blob_turns node.shares node.swarm node.swarm_download"
    ),
    "06-tasks-and-sampling.md": "node.renewals node.journal_counters",
    "07-rollouts.md": "node.bodies node.body_chunks node.passing",
    "08-verification.md": (
        "node.statistics node.copies node.token_checks node.examiner node.selection node.canary "
        "node.worker_messages"
    ),
    "09-checkpoints.md": "node.fetch_plan node.small_blobs node.chain_manifests",
    "10-reputation-and-receipts.md": (
        "node.hellos node.sending node.trainer node.pacing node.reputation node.standings node.proof_file"
    ),
}
"""Chapters whose text has the numbers of these tables."""

IN_OTHER_WORDS = {
    "node.gossip_memory.patience_refill": "a tenth of the time",
    "node.liveness.jitter": "30 %",
    "node.renewals.idle_seconds": "",  # chapter 06: "about a second later"
    "node.statistics.noise_floor": "1e-14",  # its square
    "node.examiner.compared": "a quarter",
    "node.journal_counters.max_waiting_bytes": "256 MiB",
    "node.reputation.trusted_below": "`s < 1`",
    "node.reputation.return_score": "`s = 1`",
    "node.reputation.quarantine_growth": "4^k",
    "node.canary.min_errors": "three standard errors",
    "node.standings.told_ms": "every 2 s",
    "node.standings.answer_ms": "once a second",
    "node.proof_file.domain": "nous/proof/1",
    "node.pacing.rate_share": "",  # chapter 04
    "node.pacing.growth": "+0.1",
    "node.pacing.decay": "-0.2",
    "node.pacing.stale_decay": "`stale`, -1",
    "node.holdings.retry_seconds": "",  # chapter 09
    "node.fetch_plan.nearly": "three quarters",
    "node.bodies.body_bytes": "256 MiB",
    "node.bodies.strangers": "half of both",
    "node.bodies.own_bytes": "64 MiB",
    "node.bodies.queued_bytes": "32 MiB",
    "node.body_chunks.retry_seconds": "every second",
    "node.bodies.body_rate": "512 KiB",
    "node.body_chunks.chunk_rate": "32 KiB",
    "node.passing.passed_bytes": "64 MiB",
    "node.hardening.ping_protocol": "/ipfs/ping/1.0.0",
}


@pytest.mark.parametrize("chapter", CHAPTER_OF)
def test_the_chapter_tells_the_numbers_of_the_config_file(chapter: str) -> None:
    text = (SPECS / chapter).read_text()
    for name in CHAPTER_OF[chapter].split():
        for key, value in CONFIG[name].items():
            told = str(value) if isinstance(value, str) else f"{value:,.10g}"
            words = IN_OTHER_WORDS.get(f"{name}.{key}", told)
            assert re.search(rf"(?<![\d,.]){re.escape(words)}(?![\d]|,\d)", text), f"{name}.{key}: {words}"
