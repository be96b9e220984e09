"""The table of error rates, as Markdown and as one JSON line."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path

import msgspec
from errors_figures import Case, case, cases, chunks_of
from errors_table import PEER, Alarms, Row, decide, false_alarms, groups_of, interval

from nous_node.node.calibrate_figures import BFLOAT16, FLOAT32, thresholds
from nous_node.protocol.errors import Code
from nous_node.protocol.runs import Thresholds

TITLES = {
    "embedded": "Embedded default, generated and verified in float32",
    "smollm2": "SmolLM2-135M-Instruct, generated in bfloat16, verified in float32",
}

PEERS, LONG = 20, 1000
"""Honest peers that are drawn from the evaluation set, and the groups of each, for sums over time."""

PROOFS = "toploc.json"
"""What errors_toploc.py writes into the root."""

SLOW = (Code.DRIFT.value, Code.WRONG_CHECKPOINT.value)
"""What only the sums over a peer's groups find."""

Proofs = dict[str, dict[str, dict[str, int]]]
"""label -> "own", "re-made" or both -> groups refused and judged."""

HEAD = (
    "rollouts",
    "groups",
    "refused",
    "95 %",
    "codes",
    f"refused within {PEER} groups of a peer",
    "groups of the same tokens as honest ones",
    "`toploc`, own proof",
    "`toploc`, proof re-made",
)


def print_table(root: Path) -> None:
    """Of all models that have been collected."""
    file = root / PROOFS
    proofs: Proofs = json.loads(file.read_text())["rows"] if file.exists() else {}
    told: dict[str, object] = {"bench": "errors"}
    for model in TITLES:
        if chunks_of(root, model, "calibration", "base"):
            told[model] = _model(root, model, proofs if model == "smollm2" else {})
    print(json.dumps(told))


def _model(root: Path, model: str, proofs: Proofs) -> object:
    limits = calibrated(root, model)
    print(f"### {TITLES[model]}\n\nThresholds of {limits.groups} groups: {limits.calibrated}.\n")
    columns = HEAD if proofs else HEAD[:-2]
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    rows = []
    for one in cases(root, model):
        row = decide(one.label, groups_of(one, _version_before(root, model, one)), limits)
        rows.append(row.told())
        cells = [*_cells(row), *(_proof_cells(proofs.get(row.label, {})) if proofs else ())]
        print(f"| {' | '.join(cells)} |")
    alarms = _long_peers(root, model, limits)
    print(
        f"\nOf {PEERS} honest peers with {LONG} groups each, drawn with replacement, {alarms.tripped} ",
        end="",
    )
    print(f"trip a sum; the largest sums: {alarms.drift:.1f} of {limits.drift_limit:g} (drift), ", end="")
    print(f"{alarms.evidence:.1f} (version before).\n")
    return {
        "thresholds": msgspec.to_builtins(limits),
        "rows": rows,
        "long_peers": dataclasses.asdict(alarms),
    }


def calibrated(root: Path, model: str) -> Thresholds:
    """As `nous-node calibrate` makes them: of the calibration set under all verifiers in float32."""
    kinds = {chunk.name.split(".")[1] for chunk in (root / model / "calibration").glob("*.*.npz")}
    verifiers = sorted(kind for kind in kinds if kind.split()[0] in ("base", "single"))
    seen = []
    for verifier in verifiers:
        one = case(root, model, "calibration", verifier)
        assert one is not None
        seen += [msgspec.structs.replace(g.observation, kernel=verifier) for g in groups_of(one)]
    strange = case(root, model, "calibration", strange=True, chunks=[0])
    others = [] if strange is None else [group.observation for group in groups_of(strange)]
    groups = sum(one.kernel == "base" for one in seen)
    margins = FLOAT32 if model == "embedded" else BFLOAT16
    said = f"verified as {', '.join(verifiers)}"
    return thresholds(seen, others, groups, margins, said)


def _version_before(root: Path, model: str, one: Case) -> Case | None:
    """Where a case names a later version than it was made with: the same tokens under the true one."""
    if one.label != "stale checkpoint":
        return None
    return case(root, model, "evaluation", chunks=chunks_of(root, model, "evaluation", "next"))


def _cells(row: Row) -> list[str]:
    low, high = interval(row.refused, row.groups)
    slow = Counter({code: n for code, n in row.peer_codes.items() if code in SLOW})
    return [
        row.label,
        str(row.groups),
        f"{row.refused} ({row.refused / max(1, row.groups):.1%})",
        f"{low:.1%} to {high:.1%}",
        _counted(row.codes),
        f"{row.refused_peers} of {row.peers} {_counted(slow)}".strip(),
        str(row.same),
    ]


def _counted(codes: Counter[str]) -> str:
    return ", ".join(f"`{code}` {number}" for code, number in codes.most_common())


def _proof_cells(found: dict[str, dict[str, int]]) -> list[str]:
    cells = []
    for column in ("own", "re-made"):
        those = found.get(column) or found.get("own and re-made")
        cells.append(f"{those['refused']} of {those['groups']}" if those else "")
    return cells


def _long_peers(root: Path, model: str, limits: Thresholds) -> Alarms:
    """Honest groups beside the version after theirs, which stands for the one before: as far away."""
    chunks = chunks_of(root, model, "evaluation", "next")
    honest = case(root, model, "evaluation", chunks=chunks or None)
    if honest is None:
        return Alarms(0, 0.0, 0.0)
    other = case(root, model, "evaluation", "next", chunks=chunks) if chunks else None
    return false_alarms(groups_of(honest, other), limits, LONG, PEERS)
