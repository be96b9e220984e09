"""The vectors of chapter 08, and of what a trainer keeps of a key, driven through the installed package."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from nous_node.node.copies import Copies
from nous_node.node.journal_counters import Counters, withheld
from nous_node.node.journal_keys import Ledger
from nous_node.node.journal_tables import SCHEMA
from nous_node.node.proof_file import ProofError, open_proofs
from nous_node.node.reputation import Reputation
from nous_node.node.statistics import Drift, Evidence, Figures, check_figures
from nous_node.node.verification import check_ends, check_repetition
from nous_node.protocol.encoding import read
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.runs import Bound, RunManifest

VECTORS = Path(__file__).parents[2] / "specs" / "vectors"
Case = dict[str, Any]

NAMES = [
    "copies",
    "drift",
    "ends",
    "evidence",
    "holes",
    "limits",
    "proofs",
    "repetition",
    "states",
    "verification",
]
FILES = {name: json.loads((VECTORS / f"{name}.json").read_text()) for name in NAMES}
MANIFEST = read(bytes.fromhex(FILES["limits"]["manifest"]), RunManifest, 1 << 20)
THRESHOLDS = MANIFEST.thresholds


def numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def singles(values: list[float | None]) -> NDArray[np.float32]:
    return np.array(numbers(values), dtype=np.float32)


def near(value: float | None, expected: float | None, case: Case) -> bool:
    """Null: no number."""
    if expected is None:
        return value is None or not math.isfinite(value)
    return value is not None and abs(value - expected) <= case["tolerance"]


def drive_limit(case: Case) -> None:
    bound = Bound(case["mean"], 1.0, case["limit"])
    assert near(bound.at(case["tokens"], case["reference"]), case["at"], case)


def figures_of(piece: dict[str, Any]) -> Figures:
    distances = np.array(numbers(piece["distances"])) if "distances" in piece else None
    return Figures.of(singles(piece["reported"]), singles(piece["recomputed"]), distances)


def drive_verification(case: Case) -> None:
    pieces = [figures_of(piece) for piece in case["trajectories"]]
    whole = Figures.together(pieces)
    check_figures(whole, THRESHOLDS, "group")
    for piece in pieces:
        check_figures(piece, THRESHOLDS, "trajectory")
    assert near(whole.logprob, case["mad"], case)
    assert near(whole.distance, case["distance"], case)
    assert near(whole.largest, case["largest"], case)


def drive_drift(case: Case) -> None:
    drift = Drift()
    for group in case["groups"]:
        figures = Figures(group["tokens"], group["mad"], group["distance"], 0.0)
        drift.check(THRESHOLDS)
        drift = drift.after(figures, None, THRESHOLDS)
        assert near(drift.logprob, group["sums"][0], case)
        assert near(drift.distance, group["sums"][1], case)
    drift.check(THRESHOLDS)


def drive_evidence(case: Case) -> None:
    drift, usual = Drift(), Figures(40, 0.0, 0.0, 0.0)
    for group in case["groups"]:
        evidence = Evidence.of(singles(group["reported"]), singles(group["named"]), singles(group["other"]))
        assert near(evidence.ratio, group["ratio"], case)
        drift.check(THRESHOLDS)
        drift = drift.after(usual, evidence, THRESHOLDS)
        assert near(drift.previous, group["sum"], case)
    drift.check(THRESHOLDS)


def drive_copies(case: Case) -> None:
    copies = Copies(free=case.get("mode") == "free")
    for group in case["groups"]:
        owner = (bytes.fromhex(group["key"]), bytes.fromhex(group["checkpoint"]), group["counter"])
        tokens = [np.array(one["tokens"], np.int64) for one in group["trajectories"]]
        logprobs = [singles(one["logprobs"]) for one in group["trajectories"]]
        copies.check(owner, list(zip(tokens, logprobs, strict=True)))
        if not group["refused"]:
            copies.add(owner, tokens)


def drive_repetition(case: Case) -> None:
    check_repetition(np.array(case["tokens"], np.int64), case["stop"])


def drive_end(case: Case) -> None:
    tokens, recomputed = np.array(case["tokens"], np.int64), singles(case["recomputed"])
    check_ends(tokens, recomputed, case["stop"], case["stop_probability"])


def drive_states(case: Case) -> None:
    key = Reputation()
    for step in case["steps"]:
        now = step["now"]
        key = key.at(now)
        for _ in range(step["times"]):
            if step["verdict"] == "accepted":
                key = key.accepted(step["version"], now)
            elif step["verdict"] == "refused":
                key = key.refused(step["code"], step.get("measured"), step.get("threshold"), now)
        assert (key.state, key.until_ms) == (step["state"], step["until"])
        assert near(key.score, step["score"], case)


def drive_holes(case: Case) -> None:
    environments = case["environments"]
    weights = tuple(1 for _ in set(environments))
    counters, waits = Counters(), False
    for step in case["steps"]:
        counters.take(step["counter"], environments.__getitem__, weights)
        waits = counters.held_up
        assert (counters.holes, waits) == (step["holes"], step["waits"])
    assert debited(counters.holes, case["accepted"], case["credit"]) == case["debit"]
    if waits:
        raise withheld(counters, counters.holes)


def debited(holes: int, accepted: int, credit: int) -> int:
    """What a key owes for so many holes."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA.tables)
        connection.execute(
            "INSERT INTO keys(key, heard_ms, heard_version, seen_ms, agent, accepted, credit) "
            "VALUES(x'00', 0, 0, 0, '', ?, ?)",
            (accepted, credit),
        )
        ledger = Ledger(connection, 0)
        ledger.owe(b"\0", holes)
        record = ledger.record(b"\0")
        assert record is not None
        return record.debit


def drive_proof(case: Case) -> None:
    try:
        proof = open_proofs(bytes.fromhex(case["file"]))
    except ProofError as error:
        cause = error.__cause__
        raise cause if isinstance(cause, RemoteError) else RemoteError(Code.DUPLICATE, str(error)) from None
    assert (proof.run, proof.name, proof.key) == (FILES["proofs"]["run"], MANIFEST.name, case["key"])
    assert round(proof.made * 1000) == case["made"]
    assert (proof.messages, proof.accepted, proof.refused) == tuple(
        case[name] for name in ("messages", "accepted", "refused")
    )
    said = proof.statement
    if case["standing"] is None:
        assert said is None
        return
    assert said is not None
    figures = [said.accepted, said.refused, said.credit, said.debit, said.rank, said.of]
    assert [proof.key, said.state, *figures] == case["standing"][:8]


DRIVERS: dict[str, Callable[[Case], None]] = {
    "proofs": drive_proof,
    "holes": drive_holes,
    "states": drive_states,
    "copies": drive_copies,
    "ends": drive_end,
    "repetition": drive_repetition,
    "drift": drive_drift,
    "evidence": drive_evidence,
    "limits": drive_limit,
    "verification": drive_verification,
}

ALL = [
    pytest.param(name, case, id=f"{name}-{number}-{case['comment'][:40]}")
    for name, content in FILES.items()
    for number, case in enumerate(content["cases"])
]


@pytest.mark.parametrize(("name", "case"), ALL)
def test_verification_vector(name: str, case: Case) -> None:
    code = case.get("code")
    if code is None:
        DRIVERS[name](case)
        return
    with pytest.raises(RemoteError) as caught:
        DRIVERS[name](case)
    assert caught.value.code.value == code
    assert near(caught.value.measured, case.get("measured"), case)
    assert near(caught.value.threshold, case.get("threshold"), case)
