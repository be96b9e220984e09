"""`nous-node identity`: show, back up and restore the key that this node is known by."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

from .home import MAX_PEM, DiskFullError, Home, StorageError, default_home, write_atomic

WHAT_IT_IS = (
    "An identity is one Ed25519 key: the name of this node in the network, which signs its rollouts and to "
    "which credit is given. Whoever has the file is this node."
)


def show(home: Path | None, *, as_json: bool) -> str:
    """Key and peer id; makes an identity where there is none."""
    opened = _home(home)
    identity = opened.identity()
    if as_json:
        return _json(identity, opened.identity_file)
    return (
        f"peer id  {identity.peer_id}\nkey      {identity.key.hex()}\nfile     {opened.identity_file}\n"
        f"{WHAT_IT_IS}"
    )


def export(home: Path | None, file: Path, *, force: bool, as_json: bool) -> str:
    """Writes the private key, mode 0600. LocalError where the file exists, unless forced."""
    identity = _home(home).identity()
    if file.exists() and not force:
        raise LocalError(f"{file} exists and was not replaced; choose another name or add --force.")
    try:
        write_atomic(file, identity.pem())
    except DiskFullError:
        raise
    except StorageError as error:
        reason = error.__cause__.strerror if isinstance(error.__cause__, OSError) else str(error)
        raise LocalError(
            f"The key cannot be written to {file} ({reason}); name a file in a folder that you may write."
        ) from error
    if as_json:
        return _json(identity, file)
    where = f"The private key of {identity.peer_id} is in {file}."
    return f"{where} {WHAT_IT_IS} Keep it where nobody else reads it."


def bring(home: Path | None, file: Path, *, force: bool, as_json: bool) -> str:
    """Takes the key in `file` as this node's. LocalError where that would replace one, unless forced."""
    opened = _home(home)
    try:
        with file.open("rb") as stream:
            pem = stream.read(MAX_PEM + 1)
    except OSError as error:
        raise LocalError(
            f"{file} cannot be read ({error.strerror}); give the file that `nous-node identity export` wrote."
        ) from error
    if len(pem) > MAX_PEM:
        raise LocalError(f"{file} is too large for a key; give the file that `identity export` wrote.")
    identity = _parsed(file, pem)
    with opened.lock():  # not under a node that runs with the other key
        if opened.identity_file.exists() and not force:
            raise LocalError(
                f"{opened.path} has an identity already, which was not replaced. Export it first, then add "
                "--force: its credit stays with the old key."
            )
        opened.replace_identity(identity)
    if as_json:
        return _json(identity, opened.identity_file)
    return f"This node is now {identity.peer_id}. {WHAT_IT_IS} Run it on one machine at a time."


def _json(identity: Identity, file: Path) -> str:
    facts = {"key": identity.key.hex(), "peer_id": identity.peer_id, "file": str(file)}
    return msgspec.json.encode(facts).decode()


def _parsed(file: Path, pem: bytes) -> Identity:
    try:
        return Identity.from_pem(pem)
    except LocalError as error:
        raise LocalError(f"{file} holds no key that can be used: {error}") from error


def _home(path: Path | None) -> Home:
    return Home.open(path.expanduser() if path is not None else default_home(os.environ))
