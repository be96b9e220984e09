"""A node's home: the folder with its identity and all its state.

identity.pem    the private key, mode 0600; made on first start
settings.toml   settings, if the person wrote any
last_run        the invite at which a run was last found
lock            held while a node runs
runs/           runs that this node trains
joined/         runs that this node takes part in
envs/           interpreters with ecosystems of environments, made by `nous-node env install`

NousError
└── LocalError
    └── StorageError         the disk refuses, or what stands on it cannot be used
        ├── DiskFullError
        ├── DamagedError     a file of ours is not what we wrote
        └── HomeBusyError    another process uses this home
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from nous_node.protocol.constants import MAX_INVITE
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity

HOME_VARIABLE: Final = "NOUS_NODE_HOME"
MAX_PEM: Final = 4_096
"""Bytes of an identity file; an Ed25519 key in PEM has 119."""

UNDER_WAY: Final = ".part"
"""How the name of a folder ends in which something is put together; renamed when it is complete."""

_PRIVATE_FOLDER: Final = 0o700
_PRIVATE_FILE: Final = 0o600
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})


class StorageError(LocalError):
    """The disk refuses, or what stands on it cannot be used."""


class DiskFullError(StorageError):
    """There is no room left. What was written before is intact."""


class DamagedError(StorageError):
    """A file of ours is not what we wrote."""


class HomeBusyError(StorageError):
    """Another process uses this home."""


@dataclass(frozen=True, slots=True)
class Home:
    """A home that exists and can be written."""

    path: Path

    @classmethod
    def open(cls, path: Path) -> Home:
        """Makes the folder where there is none. Raises StorageError."""
        with disk_errors(path):
            path.mkdir(mode=_PRIVATE_FOLDER, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=path):
                pass
        return cls(path)

    @property
    def identity_file(self) -> Path:
        return self.path / "identity.pem"

    @property
    def runs(self) -> Path:
        return self.path / "runs"

    @property
    def joined(self) -> Path:
        return self.path / "joined"

    def identity(self) -> Identity:
        """This node's identity, made now if there is none. Raises StorageError and LocalError."""
        if not self.identity_file.exists():
            self._make_identity()
        with disk_errors(self.identity_file), self.identity_file.open("rb") as file:
            _check_private(self.identity_file, os.fstat(file.fileno()))
            pem = file.read(MAX_PEM + 1)
        return self._parsed(pem)

    def replace_identity(self, identity: Identity) -> None:
        """Makes `identity` this node's; the one before is gone. The caller has asked."""
        write_atomic(self.identity_file, identity.pem())

    def last_run(self) -> str | None:
        """The invite at which a run was last found, or None."""
        with disk_errors(self.path / "last_run"):
            try:
                with (self.path / "last_run").open("rb") as file:
                    text = file.read(MAX_INVITE + 1).decode("ascii", "replace").strip()
            except FileNotFoundError:
                return None
        return text or None

    def remember_run(self, invite: str) -> None:
        write_atomic(self.path / "last_run", invite.encode() + b"\n")

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Held while a node runs. Raises HomeBusyError where another process holds it.

        The kernel lets go of it when the process ends, however it ends.
        """
        path = self.path / "lock"
        with disk_errors(path):
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE_FILE)
        try:
            _take(handle, self.path)
            yield
        finally:
            os.close(handle)

    def _make_identity(self) -> None:
        """Two processes that start at once agree on one: the first that links its file wins."""
        identity = Identity.from_seed(os.urandom(32))
        with disk_errors(self.identity_file):
            draft = _drafted(self.identity_file, identity.pem(), _PRIVATE_FILE)
            try:
                os.link(draft, self.identity_file)
            except FileExistsError:
                pass
            except OSError:  # a file system without hard links
                os.replace(draft, self.identity_file)
                return
            draft.unlink(missing_ok=True)
            _sync_folder(self.path)

    def _parsed(self, pem: bytes) -> Identity:
        try:
            if len(pem) > MAX_PEM:
                raise LocalError("It is too large for a key.")
            return Identity.from_pem(pem)
        except LocalError as error:
            raise DamagedError(
                f"The identity {self.identity_file} is damaged: {error} Restore it from your backup with "
                "`nous-node identity import FILE`, or move it away to get a new identity."
            ) from error


def default_home(environ: Mapping[str, str]) -> Path:
    """$NOUS_NODE_HOME, or ~/.nous-node."""
    named = environ.get(HOME_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".nous-node"


def write_atomic(path: Path, data: bytes, mode: int = _PRIVATE_FILE) -> None:
    """Replaces `path` by `data`, on the disk before this returns: after a crash it is the old or the new.

    Raises StorageError; the old content is intact then.
    """
    with disk_errors(path):
        draft = _drafted(path, data, mode)
        try:
            os.replace(draft, path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what the disk refuses under `path` into a StorageError with the next step in it."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"The disk is full: {path} could not be written. What was stored before is intact. Make room "
                "(older runs and checkpoints under the home may go) and start again."
            ) from error
        raise StorageError(
            f"{error.filename or path} cannot be used: {error.strerror or error}. Give a folder that this "
            "user may write with --home, or mend its permissions."
        ) from error


def _drafted(path: Path, data: bytes, mode: int) -> Path:
    """`data` in a new file beside `path`, synced."""
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".draft", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # a person knows nothing of drafts
        raise
    draft = Path(name)
    try:
        with open(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return draft


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _check_private(path: Path, facts: os.stat_result) -> None:
    if facts.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StorageError(
            f"The identity {path} can be read by other users of this machine: run `chmod 600 {path}`. If "
            "somebody may have copied it, move it away to get a new identity."
        )


def _take(handle: int, home: Path) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.pread(handle, 32, 0).decode("ascii", "replace").strip()
        who = f"process {holder}" if holder.isdigit() else "another process"
        raise HomeBusyError(
            f"The home {home} is in use by {who}. Stop that node first, or give this one a home of its own "
            "with --home FOLDER."
        ) from error
    except OSError as error:
        raise StorageError(
            f"The home {home} cannot be locked ({error.strerror}): its file system has no locks. Give a "
            "folder on a local disk with --home."
        ) from error
    with disk_errors(home):
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
