"""`nous-node receipts export` and `verify`: a node's portable proof of contribution (`proof_file.py`)."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from string import hexdigits
from typing import Final

import msgspec

from nous_node.protocol.constants import INVITE_PREFIX, MAX_MANIFEST
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.runs import Invite, open_manifest

from .cli_commands import home_path
from .home import DiskFullError, Home, StorageError, disk_errors, write_atomic
from .outbox import Outbox
from .proof_file import MAX_FILE, Proof, ProofError, open_proofs, pack
from .wording import plural, printable

_LEAST_ID: Final = 4
"""Digits of a run id that name a run."""

_RUN_DIGITS: Final = 64
"""Of a whole run id, which nobody can imitate."""

_MODE: Final = 0o644
"""It is made to be given away."""


def export_proofs(file: Path, run: str | None, home: Path | None, *, as_json: bool) -> str:
    """Writes what trainers signed about this node's key in a run (name or id; the only one by default).

    Raises LocalError where there is no such run or nothing was signed yet, StorageError.
    """
    opened = Home.open(home_path(home))
    folder = _joined(opened, run)
    if not opened.identity_file.exists():
        raise LocalError(f"{opened.path} has no identity: nothing was signed about it. Join a run first.")
    identity = opened.identity()
    _refuse_other(file)
    with disk_errors(folder):
        envelope = (folder / "run.envelope").read_bytes()
    if not (folder / "outbox.sqlite").is_file():
        raise LocalError("This node has made no group for this run yet, so nothing was signed about it.")
    with Outbox.read(folder / "outbox.sqlite") as outbox:
        word, messages = outbox.word, outbox.proofs()
    standing = word.proof if word is not None and word.standing.peer == identity.key else None
    data = pack(identity, envelope, standing, messages, time.time_ns() // 1_000_000)
    proof = open_proofs(data)
    if proof.statement is None and not proof.messages:
        raise LocalError(
            f"Trainers have signed nothing about {identity.peer_id} in this run yet. Receipts name the key "
            "that made the groups: if that was another one, bring it back with `nous-node identity import`."
        )
    _write(file, data)
    if as_json:
        return msgspec.json.encode({"file": str(file), "bytes": len(data), "run": proof.run}).decode()
    word_of = "with a trainer's word of its standing" if proof.statement else "without a standing yet"
    return (
        f"{file}: {plural(proof.messages, 'signed message')} about {proof.peer_id} in the run "
        f"{printable(proof.name)} ({proof.run[:16]}), {word_of}. Anybody can check it: `nous-node receipts "
        "verify`."
    )


def verify_proofs(file: Path, run: str | None = None, *, as_json: bool) -> str:
    """What a file proves. `run`: of which run it has to be (see `run_meant`). Raises ProofError, which says
    what is wrong with it, and LocalError."""
    meant = None if run is None else run_meant(run)
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE + 1)
    except OSError as error:
        raise LocalError(
            f"{file} cannot be read ({error.strerror}); give the file that `nous-node receipts export` wrote."
        ) from error
    try:
        proof = open_proofs(data)
    except ProofError as error:
        raise ProofError(f"{file} proves nothing: {error}") from error
    if meant is not None and proof.run != meant.hex():
        raise ProofError(
            f"{file} is of another run: {printable(proof.name)} ({proof.run}), not {meant.hex()}."
        )
    return msgspec.json.encode(proof).decode() if as_json else "\n".join(lines(proof, meant is not None))


def run_meant(text: str) -> bytes:
    """The id of a run by an invite, the id itself, or the file of its manifest. Raises LocalError."""
    if text.startswith(INVITE_PREFIX):
        return Invite.from_text(text).run
    if len(text) == _RUN_DIGITS and set(text.lower()) <= set(hexdigits):
        return bytes.fromhex(text)
    try:
        with Path(text).expanduser().open("rb") as stream:
            envelope = unseal(stream.read(MAX_MANIFEST + 1), MAX_MANIFEST)
        open_manifest(envelope, envelope.head.run)
    except (OSError, RemoteError) as error:
        raise LocalError(
            f"{printable(text, 128)} is no invite, no run id of {_RUN_DIGITS} digits and no file with a "
            f"run's manifest ({error}); give --run one of these."
        ) from error
    return envelope.head.run


def lines(proof: Proof, of_run_meant: bool = False) -> list[str]:
    """For a person: what is proven, and what is not. `of_run_meant`: it was compared with a run id."""
    told = [
        f"run         {printable(proof.name)}",
        f"run id      {proof.run}",
        f"key         {proof.key}",
        f"peer id     {proof.peer_id}",
    ]
    if (word := proof.statement) is not None:
        rank = f"rank {word.rank:,} of {word.of:,}" if word.rank else "no rank"
        told += [
            f"said        at {_when(word.at)} by the trainer {word.trainer[:16]}: {word.state}, {rank}",
            f"accepted    {plural(word.accepted, 'group')}, {word.refused:,} refused",
            f"credit      {word.credit:,} trained tokens, {word.debit:,} of them taken off: "
            f"{max(0, word.credit - word.debit):,}",
        ]
    else:
        told.append("said        nothing: the file has no standing, and so no credit")
    codes = ", ".join(f"{printable(code, 64)} {number:,}" for code, number in proof.refused.items())
    told.append(
        f"receipts    {proof.accepted:,} accepted, {sum(proof.refused.values()):,} refused"
        f"{f' ({codes})' if codes else ''}, in {plural(proof.messages, 'signed message')}{_span(proof)}"
    )
    told.append(f"made        {_when(proof.made)}, by the clock of the key's owner")
    heading = "All signatures hold, and the run is the one that was given. The file cannot prove:"
    return [*told, *((heading,) if of_run_meant else UNCOMPARED), *NOT_PROVEN]


UNCOMPARED = (
    "All signatures hold. The file cannot prove:",
    "  - that this is the run that you mean: compare the run id with one you trust (or by --run);",
)
NOT_PROVEN = (
    "  - that the trainer was honest: credit and rank are its word;",
    "  - how things stand now: a later word replaces this one, and the owner chose what is in the file;",
    "  - a sum over the receipts: repeats of a group have receipts of their own, and old ones are left out.",
)
"""What a reader might take for proven."""


def _joined(home: Home, named: str | None) -> Path:
    """The folder of the run that is meant. Raises LocalError where that is none or several."""
    runs: dict[Path, tuple[str, str]] = {}
    for folder in sorted(home.joined.glob("*/")):
        with suppress(OSError, RemoteError):
            envelope = unseal((folder / "run.envelope").read_bytes(), MAX_MANIFEST)
            manifest = open_manifest(envelope, envelope.head.run)
            runs[folder] = manifest.name, envelope.head.run.hex()
    fits = [
        folder
        for folder, (name, run) in runs.items()
        if named is None or name == named or (len(named) >= _LEAST_ID and run.startswith(named.lower()))
    ]
    if len(fits) == 1:
        return fits[0]
    known = ", ".join(f"{printable(name, 64)} ({run[:16]})" for name, run in runs.values())
    if not runs:
        raise LocalError(
            f"This node takes part in no run: {home.path} has none. Name another home with --home."
        )
    wanted = "Several runs fit" if fits else f"No run here is called {printable(named or '', 64)}"
    raise LocalError(f"{wanted}; name one with --run: {known}.")


def _write(file: Path, data: bytes) -> None:
    """Raises DiskFullError, and LocalError where the file cannot be there."""
    try:
        write_atomic(file, data, _MODE)
    except DiskFullError:
        raise
    except StorageError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise LocalError(
            f"The proof cannot be written to {file} ({reason}); name a file in a folder that you may write."
        ) from error


def _refuse_other(file: Path) -> None:
    """Raises LocalError where a file of something else would be replaced."""
    if not file.exists():
        return
    with suppress(ProofError, OSError):
        open_proofs(file.read_bytes() if file.stat().st_size <= MAX_FILE else b"")
        return
    raise LocalError(f"{file} exists and is no such proof; it was not replaced. Choose another name.")


def _span(proof: Proof) -> str:
    if proof.first is None or proof.last is None:
        return ""
    return f" from {_when(proof.first)} to {_when(proof.last)}"


def _when(seconds: float) -> str:
    """In UTC: the file is read anywhere."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return f"{seconds:.0f} s after 1970"
