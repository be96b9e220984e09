"""`nous-node audit`: recorded rollout groups verified again, from the record alone.

    record -> groups of one checkpoint -> signature, structure, assignment, replay -> a prefill -> lines

Everything that needs nothing but the record and the checkpoint is done as the trainer does it. What rests on
the trainer's memory (copies, drift, what came too late) cannot be repeated, and the line says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from nous_node.envs.access import NONE, Access
from nous_node.envs.registry import make_entry
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.envelope import Envelope, Kind, unseal
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.runs import RunManifest, open_manifest
from nous_node.protocol.structure import check_structure

from .audit_report import Finding, Outcome, Reporter, tell
from .envelope_file import FileRecords, first_envelope
from .learner_messages import Candidate
from .recorded import Claim, Entry, JournalRecords, Lot, Records, Said
from .recorded_checkpoints import Found, RecordedCheckpoints
from .stored_groups import envelope_of, group_of
from .verification import CheckedGroup, Measured, Verifier
from .wording import printable

BATCH = 64
"""Groups of one prefill, as a trainer verifies them."""

BATCH_BYTES = 4 << 20
"""Of their envelopes: bodies may be eight times larger."""

SQLITE = b"SQLite format 3\0"

JOURNAL = "journal.sqlite"
MANIFEST = "run.envelope"

BEYOND_RECORDS = frozenset(
    {
        Code.STALE,
        Code.UNKNOWN_CHECKPOINT,
        Code.KEY_TOO_NEW,
        Code.COUNTER_REUSED,
        Code.COUNTER_GAP,
        Code.WITHHELD,
        Code.UNAVAILABLE,
        Code.QUARANTINED,
        Code.BANNED,
        Code.COPIED,
        Code.DRIFT,
        Code.WRONG_CHECKPOINT,
        Code.ENVIRONMENT_FAILED,
    }
)
"""Refusals for what the trainer knew or what its machine did at that time."""


def run_audit(
    recorded: Path, checkpoint: Path | None, manifest: Path | None, access: Access = NONE, *, json: bool
) -> int:
    """Prints a line a group and a last sentence; the exit code: 1 where a recorded verdict does not hold.

    Raises NousError where `recorded`, `manifest` or `checkpoint` cannot be used at all.
    """
    say = partial(tell, json=json)
    path = recorded.expanduser()
    if path.is_dir():
        path /= JOURNAL
    if not path.is_file():
        raise LocalError(f"There is no {path}. Name a run's folder, its {JOURNAL} or a file of envelopes.")
    if checkpoint is not None and not checkpoint.is_dir():
        raise LocalError(f"There is no folder {checkpoint}; --checkpoint takes a checkpoint's folder.")
    run = _run_of(path, None if manifest is None else manifest.expanduser())
    with ExitStack() as stack:
        opened = list(_records(path, run, stack, say))
        published = [one.published for one in opened]
        checkpoints = RecordedCheckpoints(run.id, run.manifest, run.root, checkpoint, published, say)
        auditor = Auditor(run.id, run.manifest, checkpoints, access)
        records = opened[0]
        lots = records.lots()
        reporter = Reporter(sum(lot.groups for lot in lots), json=json)
        for lot in lots:
            for finding in auditor.audit(lot, records.entries(lot)):
                reporter.found(finding)
        return reporter.finish().value


@dataclass(frozen=True, slots=True)
class _Run:
    """The run of a record."""

    id: bytes
    manifest: RunManifest
    root: Path
    """Folder below which its checkpoints may lie."""


def _run_of(path: Path, given: Path | None) -> _Run:
    """By the manifest given, the one beside the record, or the one that the record begins with."""
    file = given if given is not None else path.parent / MANIFEST
    root = path.parent if _is_journal(path) else file.parent
    try:
        if given is not None or file.is_file():
            with file.open("rb") as opened:
                data = opened.read(MAX_MANIFEST + 1)
        else:
            file, data = path, _first_manifest(path)
        envelope = unseal(data, MAX_MANIFEST)
        return _Run(envelope.head.run, open_manifest(envelope, envelope.head.run), root)
    except OSError as error:
        raise LocalError(f"The manifest {file} cannot be read ({error.strerror}).") from error
    except RemoteError as error:
        raise LocalError(
            f"{file} holds no manifest of a run ({error}) Give the run's {MANIFEST} with --manifest FILE."
        ) from error


def _first_manifest(path: Path) -> bytes:
    """What a file of envelopes begins with, where that may be a run's manifest."""
    first = None if _is_journal(path) else first_envelope(path)
    if first is None or unseal(first, MAX_MANIFEST).head.kind != Kind.RUN:
        raise LocalError(
            f"There is no {MANIFEST} beside {path}, so nothing says which run it is of. Give the run's "
            f"{MANIFEST} with --manifest FILE: it lies in the folder of whoever trains or has joined the run."
        )
    return first


def _is_journal(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(SQLITE)) == SQLITE


def _records(path: Path, run: _Run, stack: ExitStack, say: Callable[[str], None]) -> Iterator[Records]:
    """The record, and behind it the journal in the run's folder, which may know more of its checkpoints."""
    if _is_journal(path):
        yield stack.enter_context(JournalRecords(path))
        return
    yield stack.enter_context(FileRecords(path, run.id, run.manifest, say))
    if (run.root / JOURNAL).is_file():
        yield stack.enter_context(JournalRecords(run.root / JOURNAL))


@dataclass(slots=True)
class _Judged:
    """A group on its way to a finding."""

    entry: Entry
    found: Found
    peer: bytes = b""
    counter: int | None = None
    checked: CheckedGroup | None = None
    """Where everything that needs no model holds."""
    error: RemoteError | None = None
    """Why it is refused."""
    measured: Measured | None = None


class Auditor:
    """Verifies recorded groups of one run."""

    def __init__(
        self, run: bytes, manifest: RunManifest, checkpoints: RecordedCheckpoints, access: Access
    ) -> None:
        self._run, self._manifest, self._checkpoints = run, manifest, checkpoints
        environments = [make_entry(entry, access) for entry in manifest.environments]
        self._verifier = Verifier(run, manifest, environments)

    def audit(self, lot: Lot, entries: Iterable[Entry]) -> Iterator[Finding]:
        """A finding for each, in their order."""
        if lot.checkpoint:
            found = self._checkpoints.find(lot.checkpoint)
        else:
            found = Found(None, None, None, "nothing says which checkpoint it is of")
        for batch in _batches(entries):
            yield from map(self._finding, self._judged(found, batch))

    def _judged(self, found: Found, batch: Sequence[Entry]) -> list[_Judged]:
        judged = [self._opened(entry, found) for entry in batch]
        if found.policy is not None:
            groups = [one.checked for one in judged if one.checked is not None]
            recomputed = iter(self._verifier.recompute(found.policy, groups))
            for one in judged:
                if one.checked is not None:
                    one.measured = self._verifier.measure(one.checked, next(recomputed))
                    one.error = one.measured.error
        return judged

    def _opened(self, entry: Entry, found: Found) -> _Judged:
        """All that needs no model."""
        judged = _Judged(entry, found)
        try:
            envelope = self._envelope(entry)
            judged.peer = envelope.head.sender
            body, group = group_of(entry.envelope, self._manifest)
            judged.counter = group.counter
            if entry.claim is not None:
                _check_claim(entry.claim, envelope, group, found)
            judged.checked = self._checked(envelope, body, group, found)
        except RemoteError as error:
            judged.error = error
        return judged

    def _envelope(self, entry: Entry) -> Envelope:
        """What the gossip path asks of one, but for the clock."""
        if not entry.envelope:
            raise RemoteError(Code.MALFORMED, entry.fault or "The record holds no envelope of this group.")
        envelope = envelope_of(entry.envelope, self._manifest)
        if envelope.head.run != self._run:
            raise RemoteError(Code.WRONG_RUN, "The message belongs to another run.")
        if envelope.head.kind not in (Kind.ROLLOUT, Kind.REFERENCE):
            raise RemoteError(Code.WRONG_KIND, f"A {envelope.head.kind} is no rollout group.")
        envelope.check_time(envelope.head.ts)
        envelope.verify_signature()
        return envelope

    def _checked(
        self, envelope: Envelope, body: bytes, group: RolloutGroup, found: Found
    ) -> CheckedGroup | None:
        """None where too little is left of its checkpoint for a replay, and its structure is right."""
        if found.manifest is None or found.settings is None:
            check_structure(group, self._manifest)
            return None
        candidate = Candidate(
            id=envelope.id,
            body=body,
            key=envelope.head.sender,
            version=found.manifest.version,
            checkpoint=group.checkpoint,
            beacon=found.manifest.beacon,
            levels=dict(found.manifest.levels),
            accepted=False,
        )
        checked = self._verifier.check(candidate, found.settings)
        self._verifier.check_sampled(checked)
        return checked

    def _finding(self, judged: _Judged) -> Finding:
        entry, error = judged.entry, judged.error
        outcome, text = compared(judged)
        measured, threshold = self._figures(judged)
        said, figures = entry.said, None if judged.measured is None else judged.measured.figures
        return Finding(
            rollout=entry.id.hex(),
            peer=judged.peer.hex(),
            version=_version(judged),
            counter=judged.counter,
            recorded="none" if said is None else said.verdict,
            recorded_code=(said.code or "") if said is not None else "",
            verdict=_verdict(judged),
            code="" if error is None else error.code.value,
            measured=_finite(measured),
            threshold=_finite(threshold),
            tokens=None if figures is None else _finite(figures.tokens),
            distance=None if figures is None else _finite(figures.distance),
            largest=None if figures is None else _finite(figures.largest),
            outcome=outcome,
            text=printable(text),
        )

    def _figures(self, judged: _Judged) -> tuple[float | None, float | None]:
        if judged.error is not None:
            return judged.error.measured, judged.error.threshold
        if judged.measured is None:
            return None, None
        figures, thresholds = judged.measured.figures, self._manifest.thresholds
        return figures.logprob, thresholds.logprobs.at(figures.tokens, thresholds.tokens)


def _batches(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry.envelope)
        if len(batch) == BATCH or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _check_claim(claim: Claim, envelope: Envelope, group: RolloutGroup, found: Found) -> None:
    """RemoteError(HASH_MISMATCH) where the record calls a group something that it is not."""
    names: dict[str, tuple[object, object]] = {
        "id": (claim.id, envelope.id),
        "key": (claim.key, envelope.head.sender),
        "checkpoint": (claim.checkpoint, group.checkpoint),
        "counter": (claim.counter, group.counter),
    }
    if found.manifest is not None:
        names["version"] = (claim.version, found.manifest.version)
    for name, (recorded, real) in names.items():
        if recorded != real:
            raise RemoteError(
                Code.HASH_MISMATCH, f"The journal's row says another {name} than the signed envelope."
            )


def _verdict(judged: _Judged) -> Literal["accepted", "refused", "unverifiable"]:
    if judged.error is not None and judged.error.code != Code.UNAVAILABLE:
        return "refused"
    return "unverifiable" if judged.measured is None else "accepted"


def _version(judged: _Judged) -> int | None:
    if judged.found.manifest is not None:
        return judged.found.manifest.version
    return None if judged.entry.claim is None else judged.entry.claim.version


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return float(value) if value is not None and math.isfinite(value) else None


def compared(judged: _Judged) -> tuple[Outcome, str]:
    """How the recorded verdict stands, and what there is to say of it."""
    entry, said, error = judged.entry, judged.entry.said, judged.error
    why = "It passes every check." if error is None else str(error)
    if entry.fault:
        return Outcome.DIFFERS, entry.fault
    if error is not None and error.code == Code.UNAVAILABLE:
        return Outcome.UNVERIFIABLE, why
    if said is not None and said.code in BEYOND_RECORDS:
        return (
            Outcome.UNVERIFIABLE,
            f"{said.code} rests on what the trainer knew at that time. {why if error else ''}".rstrip(),
        )
    if error is None and judged.measured is None:
        return Outcome.UNVERIFIABLE, judged.found.lack
    if said is None:
        return Outcome.UNJUDGED, why
    if error is None:
        return _confirmed(judged, said) if said.verdict == "accepted" else (Outcome.DIFFERS, why)
    if said.verdict == "refused" and said.code in (None, error.code.value):
        return Outcome.CONFIRMED, why
    if not said.audited:
        return Outcome.DIFFERS, f"{why} It was accepted without an audit."
    return Outcome.DIFFERS, why


def _confirmed(judged: _Judged, said: Said) -> tuple[Outcome, str]:
    """Of an accepted group that passes, if its credit is right, too."""
    assert judged.checked is not None
    if said.credit not in (None, judged.checked.credit):
        return (
            Outcome.DIFFERS,
            f"{said.credit} trained tokens were credited, and it has {judged.checked.credit}.",
        )
    return Outcome.CONFIRMED, ""
