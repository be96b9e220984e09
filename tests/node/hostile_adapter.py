"""An adapter that does one thing that none should do, named by the first argument. Standard library only."""

from __future__ import annotations

import os
import subprocess
import sys
import time

FIRST = b'{"ok": {"name": "hostile", "version": "1"}}\n'
NAMELESS = {
    "echo": b'{"op":"client"}\n',
    "nobody": b'{"ok": {}}\n',
    "unversioned": b'{"ok": {"name": "hostile"}}\n',
    "blank": b'{"ok": {"name": " ", "version": "1"}}\n',
    "unsupported": b'{"unsupported": true}\n',
    "refusing": b'{"error": "malformed"}\n',
}
PASSED = b'{"unsupported": true}\n'
FOREVER = 1000.0


def hang(_: bytes) -> None:
    time.sleep(FOREVER)


def exit_early(_: bytes) -> None:
    os.write(2, b"first \x1b[2J words\nlast words")
    sys.exit(3)


def flood(_: bytes) -> None:
    while True:
        os.write(1, b"x" * 65_536)


def flood_lines(_: bytes) -> None:
    while True:
        os.write(1, PASSED * 1000)


def flood_stderr(_: bytes) -> None:
    os.write(2, b"y" * (1 << 22))
    os.write(1, PASSED)


def trickle(_: bytes) -> None:
    while True:
        os.write(1, b"x")
        time.sleep(0.01)


def answer(data: bytes) -> None:
    os.write(1, data)


def leave_child(_: bytes) -> None:
    child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"])
    with open(sys.argv[2], "w") as file:
        file.write(str(child.pid))
    os.write(1, PASSED)


def hold_output(_: bytes) -> None:
    """It ends; a child of its own keeps its output open."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({FOREVER})"], stderr=subprocess.DEVNULL)
    sys.exit(4)


def late(_: bytes) -> None:
    """An answer behind the answer, when the next question has come already."""
    os.write(1, PASSED)
    sys.stdin.buffer.peek(1)
    os.write(1, b'{"error": "malformed"}\n')


FAULTS = {
    "hang": hang,
    "exit": exit_early,
    "kill": lambda _: os.kill(os.getpid(), 9),
    "flood": flood,
    "lines": flood_lines,
    "stderr": flood_stderr,
    "trickle": trickle,
    "child": leave_child,
    "held": hold_output,
    "garbage": lambda _: answer(b"\x1b]0;owned\x07 \xff\n"),
    "deep": lambda _: answer(b"[" * 100_000 + b"\n"),
    "nested": lambda _: answer(b'{"ok": ' + b"[" * 500 + b"]" * 500 + b"}\n"),
    "other": lambda _: answer(b'{"ok": [1]}\n'),
    "twice": lambda _: answer(PASSED * 2),
    "same": lambda _: answer(FIRST),
    "late": late,
    "mute": lambda _: os.close(1),
    "stay": lambda _: answer(PASSED),
    "lacking": lambda _: answer(PASSED),
    "code": lambda _: answer(PASSED),
    "last": lambda _: answer(PASSED),
}


def main(name: str) -> None:
    if name == "banner":
        os.write(1, b"Server is ready.\n")
    for line in sys.stdin.buffer:
        if line == b'{"op":"client"}\n':
            os.write(1, NAMELESS.get(name, FIRST))
        else:
            FAULTS[name](line)
    match name:
        case "mute" | "stay":
            time.sleep(FOREVER)
        case "code":
            sys.exit(7)
        case "last":
            os.write(1, b"Good bye.\n")


if __name__ == "__main__":
    main(sys.argv[1])
