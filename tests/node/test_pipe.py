"""Frames to a child process and back, and what is said of a child that goes away."""

from __future__ import annotations

import io
import os
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.pipe import MAX_FRAME, ChildDied, ChildPipe, ParentPipe, end_child, start_child


class Said(msgspec.Struct, tag=True):
    text: str
    data: bytes = b""


CHILD = """
import os, signal, subprocess, sys, time
import msgspec
from nous_node.node.pipe import ParentPipe

class Said(msgspec.Struct, tag=True):
    text: str
    data: bytes = b""

pipe = ParentPipe.take_over(Said)
def raw(data):
    while data:
        data = data[pipe._writer.write(data):]

while (message := pipe.receive()) is not None:
    match message.text.split():
        case ["print"]:
            print("printed by Python", flush=True)
            os.write(1, b"written to descriptor 1")
            subprocess.run(["echo", "said by a grandchild"], check=True)
            pipe.send(Said("stdin holds " + repr(sys.stdin.read())))
        case ["echo"]:
            pipe.send(message)
        case ["raw"]:
            raw(message.data)
        case ["exit", code]:
            sys.exit(int(code))
        case ["signal", number]:
            os.kill(os.getpid(), int(number))
        case ["raise"]:
            raise ValueError("wrong")
        case ["close"]:
            pipe._writer.close()
            time.sleep(1000)
        case ["group"]:
            pipe.send(Said(f"{os.getpgid(0)} {os.getpid()} {os.environ['GIVEN']}"))
        case ["leave", "behind"]:
            left = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL)
            pipe.send(Said(str(left.pid)))
        case ["stay"]:
            pipe.send(Said("staying"))
            time.sleep(1000)
pipe.send(Said("bye"))
"""

Start = Callable[[], AbstractAsyncContextManager[ChildPipe[Said, Said]]]


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """A child that does as it is told."""
    (tmp_path / "talking_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    @asynccontextmanager
    async def start() -> AsyncIterator[ChildPipe[Said, Said]]:
        with (tmp_path / "log").open("ab") as log:
            pipe: ChildPipe[Said, Said] = await start_child(
                "talking_child", Said, log.fileno(), {"GIVEN": "in the environment"}
            )
        try:
            yield pipe
        finally:
            await end_child(pipe.process)

    return start


async def told(pipe: ChildPipe[Said, Said], text: str, data: bytes = b"") -> Said:
    await pipe.send(Said(text, data))
    return await pipe.receive()


# --- a child that works --------------------------------------------------------------------------


async def test_messages_of_every_size_come_back_in_their_order(child: Start) -> None:
    sizes = [0, 1, 65_535, 65_536, 3 << 20]
    async with child() as pipe, trio.open_nursery() as nursery:

        async def send() -> None:
            for size in sizes:
                await pipe.send(Said("echo", os.urandom(1) * size))

        nursery.start_soon(send)
        assert [len((await pipe.receive()).data) for _ in sizes] == sizes


async def test_prints_go_to_the_log_and_break_no_frame(child: Start, tmp_path: Path) -> None:
    async with child() as pipe:
        assert (await told(pipe, "print")).text == "stdin holds ''"
        assert (await told(pipe, "echo", b"still in step")).data == b"still in step"
    log = (tmp_path / "log").read_text()
    for text in ("printed by Python", "written to descriptor 1", "said by a grandchild"):
        assert text in log


async def test_senders_do_not_cut_into_each_others_frames(child: Start) -> None:
    async with child() as pipe, trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(pipe.send, Said("echo", bytes([number]) * 200_000))
        for _ in range(8):
            data = (await pipe.receive()).data
            assert data == data[:1] * 200_000


async def test_a_child_leads_a_group_of_its_own_and_has_the_environment_given(child: Start) -> None:
    async with child() as pipe:
        group, process, given_ = (await told(pipe, "group")).text.split(" ", 2)
        assert group == process == str(pipe.process.pid)
        assert given_ == "in the environment"


async def test_a_child_ends_by_itself_when_its_pipe_is_closed(child: Start) -> None:
    async with child() as pipe:
        await told(pipe, "echo")
        assert pipe.process.stdin is not None
        await pipe.process.stdin.aclose()
        assert (await pipe.receive()).text == "bye"
        assert await pipe.process.wait() == 0


async def test_a_child_that_does_not_end_is_killed(child: Start) -> None:
    async with child() as pipe:
        assert (await told(pipe, "stay")).text == "staying"
        await end_child(pipe.process, grace=0.05)
        assert pipe.process.returncode == -9
        assert not psutil.pid_exists(pipe.process.pid)


async def test_what_a_child_left_behind_is_ended_with_it(child: Start) -> None:
    async with child() as pipe:
        left = psutil.Process(int((await told(pipe, "leave behind")).text))
        await end_child(pipe.process)
        assert pipe.process.returncode == 0
        with trio.fail_after(5), suppress(psutil.NoSuchProcess):
            while left.status() != psutil.STATUS_ZOMBIE:  # noqa: ASYNC110
                await trio.sleep(0.01)


async def test_a_child_is_ended_although_everything_is_being_cancelled(child: Start) -> None:
    async with child() as pipe:
        with trio.CancelScope() as scope:
            scope.cancel()
            await end_child(pipe.process, grace=0.0)
        assert pipe.process.returncode is not None


# --- a child that goes away ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("order", "sentence"),
    [
        ("exit 0", "The child process ended with exit code 0."),
        ("exit 3", "The child process ended with exit code 3."),
        ("raise", "The child process ended with exit code 1."),
        ("signal 11", "The child process ended with signal 11."),
        ("signal 9", "The child process was killed (signal 9): most likely the machine ran out of memory."),
    ],
)
async def test_how_a_child_ended_is_told_in_words(child: Start, order: str, sentence: str) -> None:
    async with child() as pipe:
        with pytest.raises(ChildDied) as error:
            await told(pipe, order)
        assert str(error.value) == sentence
        with pytest.raises(ChildDied) as error:
            await pipe.receive()
        assert str(error.value) == sentence
        with pytest.raises(ChildDied) as error:
            await pipe.send(Said("anybody there?"))
        assert str(error.value) == sentence


async def test_what_a_child_said_before_it_died_is_heard(child: Start) -> None:
    async with child() as pipe:
        await pipe.send(Said("echo", b"last words"))
        await pipe.send(Said("exit 3"))
        await pipe.process.wait()
        assert (await pipe.receive()).data == b"last words"
        with pytest.raises(ChildDied, match="exit code 3"):
            await pipe.receive()


async def test_a_child_that_closes_its_pipe_and_lives_on_is_told(
    child: Start, autojump_clock: object
) -> None:
    async with child() as pipe:
        with pytest.raises(ChildDied, match="closed its pipe"):
            await told(pipe, "close")


def frame(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (struct.pack(">I", MAX_FRAME + 1), f"announced a frame of {MAX_FRAME + 1} bytes"),
        (b"\xff\xff\xff\xff", "announced a frame of 4294967295 bytes"),
        (frame(b"\xc1"), "no message"),
        (frame(b""), "no message"),
        (frame(msgspec.msgpack.encode({"type": "Other", "text": "x"})), "no message"),
        (frame(msgspec.msgpack.encode({"type": "Said", "text": 5})), "no message"),
    ],
)
async def test_what_is_no_frame_ends_the_conversation(child: Start, data: bytes, sentence: str) -> None:
    async with child() as pipe:
        with pytest.raises(ChildDied, match=sentence):
            await told(pipe, "raw", data)


async def test_a_frame_may_come_byte_by_byte(child: Start) -> None:
    async with child() as pipe:
        message = frame(msgspec.msgpack.encode(Said("slowly", bytes(20))))
        for byte in message[:-1]:
            await pipe.send(Said("raw", bytes([byte])))
        assert (await told(pipe, "raw", message[-1:])) == Said("slowly", bytes(20))


async def test_a_module_that_does_not_exist_is_a_child_that_died(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        pipe: ChildPipe[Said, Said] = await start_child("no_such_module", Said, log.fileno())
    with pytest.raises(ChildDied, match="exit code 1"):
        await pipe.receive()
    await end_child(pipe.process)
    assert "no_such_module" in (tmp_path / "log").read_text()


# --- the child's end -----------------------------------------------------------------------------


def ends(data: bytes) -> tuple[ParentPipe[Said, Said], io.BytesIO]:
    back = io.BytesIO()
    return ParentPipe(io.BytesIO(data), back, Said), back


@given(st.lists(st.builds(Said, st.text(), st.binary()), max_size=5))
def test_what_one_end_sends_the_other_receives(messages: list[Said]) -> None:
    pipe, sent = ends(b"")
    for message in messages:
        pipe.send(message)
    other, _ = ends(sent.getvalue())
    assert list(iter(other.receive, None)) == messages


def test_a_pipe_that_ends_anywhere_is_a_closed_one() -> None:
    whole = frame(msgspec.msgpack.encode(Said("whole")))
    for length in range(len(whole)):
        pipe, _ = ends(whole + whole[:length])
        assert pipe.receive() == Said("whole")
        assert pipe.receive() is None


class Narrow(io.BytesIO):
    """Takes three bytes at a time."""

    def write(self, data: Any) -> int:
        return super().write(data[:3])


def test_a_pipe_that_takes_little_at_a_time_gets_all() -> None:
    narrow = Narrow()
    pipe: ParentPipe[Said, Said] = ParentPipe(io.BytesIO(), narrow, Said)
    pipe.send(Said("a longer text"))
    other, _ = ends(narrow.getvalue())
    assert other.receive() == Said("a longer text")
