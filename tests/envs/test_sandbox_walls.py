"""What a child in the sandbox can see and reach: each attempt is made for real, inside."""

from __future__ import annotations

import errno
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nous_node.envs.sandbox import unfiltered

from .captive import Captive, Order, captive, launch, needs_sandbox

pytestmark = needs_sandbox
needs_filter = pytest.mark.skipif(unfiltered() is not None, reason=str(unfiltered()))

Ask = Callable[[str, str], str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A readable folder with a node's home in it."""
    place = tmp_path_factory.mktemp("readable")
    (place / "shown.txt").write_text("shown")
    (place / "home").mkdir()
    (place / "home" / "identity.pem").write_text("the secret key")
    (place / "alias").symlink_to(place / "home")
    return place


@pytest.fixture(scope="module")
def inside(folder: Path) -> Iterator[Captive]:
    """A child that only looks around, for all tests that let it live."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NOUS_SECRET", "of the parent")
        with captive(launch(readable=(folder,), hidden=(folder / "home",))) as child:
            yield child


@pytest.fixture(scope="module")
def online() -> Iterator[Captive]:
    with captive(launch(network=True)) as child:
        yield child


@pytest.fixture
def ask(inside: Captive) -> Ask:
    return asker(inside)


def asker(child: Captive) -> Ask:
    return lambda name, argument="": child.ask(Order(name, argument), 20).text


# --- files ---


def test_what_is_readable_is_read(ask: Ask, folder: Path) -> None:
    assert ask("read", str(folder / "shown.txt")) == "shown"


@pytest.mark.parametrize("name", ["home", "alias"])
def test_a_hidden_home_under_a_readable_folder_is_empty(ask: Ask, folder: Path, name: str) -> None:
    assert ask("folder", str(folder / name)) == ""
    assert "FileNotFoundError" in ask("read", str(folder / name / "identity.pem"))


@pytest.mark.parametrize(
    "path",
    [
        "/etc/shadow",
        "/etc/passwd",
        "/etc/hostname",
        "/etc/ssh/ssh_host_ed25519_key",
        "/var/log",
        "/run",
        "/sys/kernel",
        __file__,
        str(Path.home() / ".ssh" / "id_ed25519"),
        str(Path.home() / ".bash_history"),
    ],
)
def test_a_secret_of_the_machine_or_its_user_is_not_there(ask: Ask, path: str) -> None:
    assert "FileNotFoundError" in ask("read", path)


def test_the_users_home_shows_at_most_the_way_to_what_is_readable(ask: Ask, folder: Path) -> None:
    seen = ask("folder", str(Path.home()))
    ways = {Path(sys.base_prefix), Path(sys.prefix), Path(__file__), folder}
    homes = {way.relative_to(Path.home()).parts[0] for way in ways if way.is_relative_to(Path.home())}
    assert "FileNotFoundError" in seen or set(seen.split()) <= homes


@pytest.mark.parametrize(
    "path",
    [
        "/new",
        "/etc/new",
        "/usr/new",
        "/dev/new",
        "/nous/new",
        "/nous/nous_node/envs/child.py",
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/self/mem",
        f"{sys.prefix}/bin/new",
        f"{Path(os.__file__)}",
        "FOLDER/new",
        "FOLDER/shown.txt",
        "FOLDER/home/new",
    ],
)
def test_nothing_can_be_written_but_what_is_in_memory(ask: Ask, folder: Path, path: str) -> None:
    said = ask("write", path.replace("FOLDER", str(folder)))
    refusals = (errno.EROFS, errno.EACCES, errno.ENOENT)  # not every kernel has every file of /proc
    assert any(f"[Errno {number}]" in said for number in refusals)


@pytest.mark.parametrize("place", ["/tmp/new", "/dev/shm/new"])
def test_what_is_written_to_memory_is_not_on_the_machine(ask: Ask, place: str) -> None:
    assert ask("write", place) == "opened"
    assert not Path(place).exists()


@pytest.mark.parametrize("module", ["nous_node.node", "nous_node.trainer"])
def test_the_node_itself_is_not_there_to_import(ask: Ask, module: str) -> None:
    assert "ModuleNotFoundError" in ask("imports", module)


# --- the network ---


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


def test_a_server_of_this_machine_cannot_be_reached(ask: Ask, listener: socket.socket) -> None:
    assert "ConnectionRefusedError" in ask("connect", str(listener.getsockname()[1]))
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_with_the_network_it_can(online: Captive, listener: socket.socket) -> None:
    assert asker(online)("connect", str(listener.getsockname()[1])) == "connected"
    connection, _ = listener.accept()
    with connection:
        assert connection.recv(100) == b"got out"


@pytest.mark.parametrize("address", ["192.0.2.1", "8.8.8.8", "255.255.255.255", "224.0.0.251"])
def test_no_packet_leaves(ask: Ask, address: str) -> None:
    assert "Error" in ask("datagram", address)


@pytest.mark.parametrize("host", ["localhost", "example.org"])
def test_names_are_not_resolved(ask: Ask, host: str) -> None:
    assert "gaierror" in ask("resolve", host)


def test_with_the_network_names_are_resolved(online: Captive) -> None:
    assert "127.0.0.1" in asker(online)("resolve", "localhost") or "::1" in asker(online)(
        "resolve", "localhost"
    )


def test_with_the_network_no_more_is_readable_than_names_and_certificates(online: Captive) -> None:
    for path in ("/etc/shadow", "/etc/passwd", "/etc/ssl/private", "/run", "/var/log", __file__):
        assert "FileNotFoundError" in asker(online)("folder", path)


# --- processes ---


def test_variables_of_the_parent_are_not_there(ask: Ask) -> None:
    seen = ask("variables", "")
    assert "NOUS_SECRET" not in seen
    assert "of the parent" not in seen
    for fixed in ("PYTHONHASHSEED=0", "TZ=UTC", "LANG=C.UTF-8"):  # [EVM-5]
        assert fixed in seen


def test_no_other_process_is_seen(ask: Ask) -> None:
    seen = ask("processes", "").splitlines()
    assert len(seen) == 2
    assert all("hostile" in line for line in seen)


def test_it_has_no_capability(ask: Ask) -> None:
    lines = dict(line.split(":\t") for line in ask("capabilities", "").splitlines() if ":\t" in line)
    assert {int(lines[name], 16) for name in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
    assert lines["NoNewPrivs"] == "1"


def test_open_files_are_few(ask: Ask) -> None:
    assert int(ask("descriptors", "")) < 256


@needs_filter
@pytest.mark.parametrize("way", ["fork", "run"])
def test_a_fork_bomb_does_not_go_off(ask: Ask, way: str) -> None:
    assert ask(way, "") == "200 of 200 refused"


@needs_filter
def test_a_child_cannot_leave_a_daemon_behind(ask: Ask) -> None:
    assert f"Errno {errno.EPERM}" in ask("double_fork", "")


CALLS = {
    "x86_64": {
        "fork": 57,
        "vfork": 58,
        "ptrace": 101,
        "mount": 165,
        "umount": 166,
        "pivot_root": 155,
        "chroot": 161,
        "unshare": 272,
        "setns": 308,
        "bpf": 321,
        "perf_event_open": 298,
        "add_key": 248,
        "keyctl": 250,
        "io_uring_setup": 425,
        "userfaultfd": 323,
        "memfd_create": 319,
        "shmget": 29,
        "process_vm_readv": 310,
        "init_module": 175,
        "kexec_load": 246,
        "fsopen": 430,
    },
    "aarch64": {
        "ptrace": 117,
        "mount": 40,
        "umount": 39,
        "pivot_root": 41,
        "chroot": 51,
        "unshare": 97,
        "setns": 268,
        "bpf": 280,
        "perf_event_open": 241,
        "add_key": 217,
        "keyctl": 219,
        "io_uring_setup": 425,
        "userfaultfd": 282,
        "memfd_create": 279,
        "shmget": 194,
        "process_vm_readv": 270,
        "init_module": 105,
        "kexec_load": 104,
        "fsopen": 430,
    },
}.get(platform.machine(), {})
CLONE = {"x86_64": 56, "aarch64": 220}.get(platform.machine(), 0)
NEW_USER = 0x10000000


@needs_filter
@pytest.mark.parametrize("number", CALLS.values(), ids=CALLS)
def test_a_call_that_it_has_no_use_for_is_refused(ask: Ask, number: int) -> None:
    assert f"PermissionError: [Errno {errno.EPERM}]" in ask("call", f"{number} 0 0 0 0 0")


@needs_filter
@pytest.mark.parametrize("flags", [0, 17, NEW_USER, NEW_USER | 17, 0x00010000 | NEW_USER])
def test_clone_makes_threads_only(ask: Ask, flags: int) -> None:
    assert f"Errno {errno.EPERM}" in ask("call", f"{CLONE} {flags} 0 0 0 0")


@needs_filter
def test_the_clone_whose_flags_a_filter_cannot_read_is_not_there(ask: Ask) -> None:
    assert f"Errno {errno.ENOSYS}" in ask("call", "435 0 0")


@needs_filter
@pytest.mark.parametrize("number", [16, 17, 38, 40], ids=["netlink", "packet", "ciphers", "vsock"])
def test_families_of_sockets_that_lead_out_are_not_there(ask: Ask, number: int) -> None:
    assert f"Errno {errno.EAFNOSUPPORT}" in ask("family", str(number))


@needs_filter
@pytest.mark.parametrize("number", [1, 17, 38, 40], ids=["unix", "packet", "ciphers", "vsock"])
def test_with_the_network_neither_are_those_to_services_of_this_machine(online: Captive, number: int) -> None:
    assert f"Errno {errno.EAFNOSUPPORT}" in asker(online)("family", str(number))
