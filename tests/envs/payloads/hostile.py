"""A child that does what it is told, and is told the worst. Each order is a function here.

What an order returns, or the error that it raises, is the answer; many do not come to that.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from nous_node.envs.framing import ParentPipe


class Order(msgspec.Struct, tag=True):
    name: str
    argument: str = ""


class Said(msgspec.Struct, tag=True):
    text: str


class Other(msgspec.Struct, tag=True):
    """What the parent does not expect."""

    text: str


MEBIBYTE = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)


# --- what looks around ---


def echo(text: str) -> str:
    return text


def read(path: str) -> str:
    return Path(path).read_text()


def write(path: str) -> str:
    descriptor = os.open(path, os.O_WRONLY | (0 if os.path.exists(path) else os.O_CREAT))
    os.close(descriptor)
    return "opened"


def folder(path: str) -> str:
    return " ".join(os.listdir(path))


def variables(_: str) -> str:
    return " ".join(f"{name}={value}" for name, value in os.environ.items())


def processes(_: str) -> str:
    return "\n".join(
        Path("/proc", name, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        for name in os.listdir("/proc")
        if name.isdigit()
    )


def capabilities(_: str) -> str:
    return Path("/proc/self/status").read_text()


def connect(port: str) -> str:
    with socket.create_connection(("127.0.0.1", int(port)), timeout=1) as connection:
        connection.sendall(b"got out")
    return "connected"


def datagram(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outside:
        return str(outside.sendto(b"got out", (address, 53)))


def resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, 80)[0][4])


def family(number: str) -> str:
    socket.socket(int(number), socket.SOCK_STREAM).close()
    return "made"


def call(numbers: str) -> str:
    """A system call: its number and arguments."""
    words = [ctypes.c_long(int(word)) for word in numbers.split()]
    result = libc.syscall(*words)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return str(result)


def imports(module: str) -> str:
    return str(__import__(module))


# --- what would harm the machine ---


def fork(_: str) -> str:
    return refusals(os.fork)


def run(_: str) -> str:
    return refusals(lambda: subprocess.run(["/usr/bin/true"], check=False).returncode)


def double_fork(_: str) -> str:
    """As a daemon does, to outlive its parent."""
    if (pid := os.fork()) == 0:
        if os.fork() == 0:
            time.sleep(60)
        os._exit(0)
    return f"left {pid} behind"


def refusals(start: Any, wanted: int = 200) -> str:
    refused = 0
    for _ in range(wanted):
        try:
            start()
        except OSError:
            refused += 1
    return f"{refused} of {wanted} refused"


def threads(wanted: str) -> str:
    """With stacks so small that memory is no limit."""
    threading.stack_size(32768)
    forever = threading.Event()
    try:
        for _ in range(int(wanted)):
            threading.Thread(target=forever.wait, daemon=True).start()
    except RuntimeError:
        return str(threading.active_count())
    return loop("")


def memory(how: str) -> str:
    """Takes memory until there is none; answers how many MiB it got."""
    kept: list[Any] = []
    take = {
        "at once": lambda: bytearray(1 << 40),
        "slowly": lambda: bytearray(MEBIBYTE),
        "shared": lambda: mmap.mmap(-1, MEBIBYTE),
    }[how]
    try:
        while True:
            kept.append(take())
    except (MemoryError, OSError):
        count = len(kept)
        kept.clear()
    return str(count)


def memory_of_threads(_: str) -> str:
    counts: list[int] = []
    takers = [threading.Thread(target=lambda: counts.append(int(memory("slowly")))) for _ in range(4)]
    for taker in takers:
        taker.start()
    for taker in takers:
        taker.join()
    return str(max(counts))


def uncaught_memory(_: str) -> str:
    return str(len(bytearray(1 << 40)))


def disk(where: str) -> str:
    """Fills a folder with files; answers how many MiB fitted."""
    written = 0
    try:
        for number in range(1024):
            with Path(where, f"bomb-{number}").open("wb", buffering=0) as file:
                written += file.write(bytes(MEBIBYTE))
    except OSError:
        for one in Path(where).glob("bomb-*"):
            one.unlink()
    return str(written // MEBIBYTE)


def large_file(where: str) -> str:
    """One file as long as it gets, with a hole in it."""
    with Path(where, "large").open("wb") as file:
        file.truncate(1 << 40)
    return "made"


def descriptors(_: str) -> str:
    opened = []
    try:
        while len(opened) < 100_000:
            opened.append(os.dup(0))
    except OSError:
        for one in opened:
            os.close(one)
    return str(len(opened))


# --- what would hold the parent up, or confuse it ---


def loop(_: str) -> str:
    while True:
        pass


def power(_: str) -> str:
    """In C, with the interpreter's lock held."""
    return str(eval("9**9**9**9"))


def deaf(_: str) -> str:
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    return loop("")


def leave(code: str) -> str:
    os._exit(int(code))


def die(number: str) -> str:
    os.kill(os.getpid(), int(number))
    return "still here"


def fail(text: str) -> str:
    raise SystemExit(text)


def chatter(text: str) -> str:
    """As a library that prints does."""
    print(text)
    os.write(1, b"\xff\x00garbage\n")
    sys.stdout.flush()
    return sys.stdin.read() + "printed"


def everywhere(_: str) -> str:
    """Garbage into every descriptor that there is."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            os.write(int(name), b"\xff" * 64)
    return loop("")


def complain(count: str) -> str:
    for _ in range(int(count)):
        os.write(2, b"\x1b[2J\x1b]0;owned\x07\xe2\x80\xae" + b"x" * 65000 + b" the end\n")
    return "complained"


def close(_: str) -> str:
    """Closes all descriptors but stderr and lives on."""
    os.closerange(0, 2)
    os.closerange(3, 100)
    return loop("")


def announce(length: str) -> str:
    pipe._writer.write(struct.pack(">I", int(length)))
    return loop("")


def half(_: str) -> str:
    pipe._writer.write(struct.pack(">I", 100) + b"half of it")
    return loop("")


def other(_: str) -> str:
    talker: Any = pipe
    talker.send(Other("nobody asked"))
    return loop("")


def flood(_: str) -> str:
    while True:
        pipe.send(Said("flood"))


def twice(text: str) -> str:
    pipe.send(Said(text))
    return text


def idle(_: str) -> str:
    """Reads nothing any more."""
    time.sleep(3600)
    return ""


if __name__ == "__main__":
    pipe: ParentPipe[Said, Order] = ParentPipe.take_over(Order)
    while (order := pipe.receive()) is not None:
        try:
            said = globals()[order.name](order.argument)
        except (OSError, ImportError) as error:
            said = f"{type(error).__name__}: {error}"
        pipe.send(Said(said))
