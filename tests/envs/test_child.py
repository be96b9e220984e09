"""One pipe to a child, in a loop and outside of one, whatever comes out of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nous_node.envs.child import LAST_WORDS, MAX_CHILD_FRAME, TAIL, Child, ChildEnded
from nous_node.envs.framing import framed
from nous_node.envs.sandbox import Launch

from .captive import Captive, Order, Said, captive, launch

ANSWER_S = 30.0
MEBIBYTE = 1 << 20


@pytest.fixture
def child() -> Iterator[Captive]:
    """Plain, since the pipe is the same."""
    with captive(launch(sandboxed=False)) as started:
        yield started


@pytest.fixture
def script(tmp_path: Path) -> Callable[[bytes], Launch]:
    """A child that writes some bytes, says something and ends: the fastest there is."""

    def made(data: bytes, then: str = "") -> Launch:
        (tmp_path / "data").write_bytes(data)
        program = tmp_path / "python"
        program.write_text(f"#!/bin/sh\ncat {tmp_path}/data\n{then}\n")
        program.chmod(0o755)
        return launch(sandboxed=False, python=program)

    return made


def sentence(child: Captive, name: str, argument: str = "", seconds: float = ANSWER_S) -> str:
    with pytest.raises(ChildEnded) as error:
        child.ask(Order(name, argument), seconds)
    return str(error.value)


@pytest.mark.parametrize("fixed", ["PYTHONHASHSEED=0", "TZ=UTC", "LANG=C.UTF-8"])
def test_without_a_sandbox_too_nothing_depends_on_what_the_machine_is_set_to(
    child: Captive, fixed: str
) -> None:
    assert fixed in child.ask(Order("variables", ""), ANSWER_S).text


# --- asking ---


def test_questions_are_answered_in_turn(child: Captive) -> None:
    assert [child.ask(Order("echo", str(n)), ANSWER_S).text for n in range(100)] == [
        str(n) for n in range(100)
    ]


@pytest.mark.parametrize("size", [0, 1, 65_536, 5 * MEBIBYTE])
def test_long_messages_pass_both_ways(child: Captive, size: int) -> None:
    assert child.ask(Order("echo", "x" * size), ANSWER_S).text == "x" * size


def test_prints_and_reads_of_a_child_do_not_touch_the_pipe(child: Captive) -> None:
    assert child.ask(Order("chatter", "a line"), ANSWER_S).text == "printed"
    assert child.ask(Order("echo", "still well"), ANSWER_S).text == "still well"
    assert "a line" in child.tail


def test_a_flood_on_stderr_is_read_and_only_its_printable_end_kept(child: Captive) -> None:
    assert child.ask(Order("complain", "100"), ANSWER_S).text == "complained"
    child.ask(Order("echo"), ANSWER_S)
    assert child.tail.endswith("the end")
    assert child.tail.isprintable()
    assert len(child.tail) <= TAIL


# --- what breaks the rules ---


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("everywhere", "", "announced a frame of 4294967295 bytes"),
        ("announce", "4294967295", "announced a frame of 4294967295 bytes"),
        ("announce", str(MAX_CHILD_FRAME + 1), f"announced a frame of {MAX_CHILD_FRAME + 1} bytes"),
        ("announce", "0", "sent something that is no message"),
        ("other", "", "sent something that is no message"),
        ("close", "", "closed its end of the pipe"),
        ("fail", "a sentence", "ended with exit code 1. Its last words: a sentence"),
        ("die", "9", "was killed (signal 9)"),
        ("uncaught_memory", "", "ran out of memory"),
    ],
)
def test_what_breaks_the_rules_ends_the_child(child: Captive, name: str, argument: str, said: str) -> None:
    assert said in sentence(child, name, argument)
    assert not child.alive
    with pytest.raises(ChildEnded, match="environment's process"):
        child.ask(Order("echo"), ANSWER_S)


def test_half_a_frame_is_waited_for_until_the_deadline(child: Captive) -> None:
    assert "did not answer within 0." in sentence(child, "half", seconds=0.3)


def test_a_child_whose_pipe_is_full_is_ended_at_the_deadline(child: Captive) -> None:
    child.ask(Order("echo"), ANSWER_S)
    child.send(Order("idle"))
    assert "did not answer" in sentence(child, "echo", "x" * MEBIBYTE, seconds=0.3)


def test_a_child_that_does_not_read_has_no_endless_queue(child: Captive) -> None:
    def fill() -> None:
        for _ in range(5):
            child.send(Order("echo", "x" * (30 * MEBIBYTE)))

    child.send(Order("idle"))
    with pytest.raises(ChildEnded, match="did not read what it was sent"):
        fill()


def test_last_words_are_printable_and_short(child: Captive) -> None:
    said = sentence(child, "fail", "\x1b[31m" + "word " * 1000 + "\u202eend")
    assert said.isprintable()
    assert len(said) < LAST_WORDS + 200


def test_an_interpreter_that_does_nothing_is_a_child_that_ended(script: Callable[..., Launch]) -> None:
    with captive(script(b"", "exit 3")) as one, pytest.raises(ChildEnded, match="exit code 3"):
        one.ask(Order("echo"), ANSWER_S)


class Anything(msgspec.Struct, tag="Said"):
    """A message whose type lets everything in."""

    text: Any


FRAMES = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(framed),
    st.lists(st.binary(max_size=40).map(framed), max_size=4).map(b"".join),
    st.integers(0, 100_000).map(lambda depth: framed(b"\x91" * depth)),
    st.integers(1, 100_000).map(
        lambda depth: framed(b"\x82\xa4type\xa4Said\xa4text" + b"\x91" * depth + b"\xc0")
    ),
    st.integers(0, 0xFFFFFFFF).map(lambda length: struct.pack(">I", length)),
    st.text(max_size=20).map(lambda text: framed(msgspec.msgpack.encode(Said(text)))),
)


@given(data=FRAMES, received=st.sampled_from([Said, Anything]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_comes_is_a_message_or_the_end(
    script: Callable[[bytes], Launch], data: bytes, received: type[Said | Anything]
) -> None:
    with Child[Order, Any](script(data), received) as one:
        for _ in range(10):
            try:
                assert isinstance(one.ask(Order("echo"), ANSWER_S), received)
            except ChildEnded:
                break
        else:
            raise AssertionError("A child that ended goes on to answer.")


def test_a_child_whose_end_somebody_else_took_note_of_has_ended(child: Captive) -> None:
    child.send(Order("leave", "0"))
    os.waitpid(child.pid, 0)
    assert not child.alive
    assert "ended" in sentence(child, "echo")


# --- in a loop ---


class Listener:
    """Hears a child until `wanted` messages came or it ended."""

    def __init__(self, child: Captive, wanted: int) -> None:
        self.child = child
        self.wanted = wanted
        self.heard: list[str] = []
        self.ends: list[ChildEnded] = []
        self.done = asyncio.Event()

    def hear(self, said: Said) -> None:
        self.heard.append(said.text)
        if len(self.heard) == self.wanted:
            self.child.detach()
            self.done.set()

    def end(self, error: ChildEnded) -> None:
        self.ends.append(error)
        self.done.set()


def converse(child: Captive, orders: list[Order], wanted: int | None = None) -> Listener:
    """In a loop of its own."""

    async def main() -> Listener:
        listener = Listener(child, len(orders) if wanted is None else wanted)
        child.attach(listener.hear, listener.end)
        for order in orders:
            child.send(order)
        async with asyncio.timeout(ANSWER_S):
            await listener.done.wait()
        await asyncio.sleep(0)  # nothing is told twice
        return listener

    return asyncio.run(main())


def test_a_child_outlives_the_loops_that_it_is_attached_to(child: Captive) -> None:
    for batch in range(3):
        orders = [Order("echo", f"{batch} {n}") for n in range(50)]
        assert converse(child, orders).heard == [order.argument for order in orders]
    assert child.ask(Order("echo", "outside"), ANSWER_S).text == "outside"


def test_what_comes_between_two_loops_is_heard_in_the_second(child: Captive) -> None:
    assert converse(child, [Order("twice", "a"), Order("twice", "b")], wanted=1).heard == ["a"]
    assert converse(child, [Order("echo", "c")], wanted=4).heard == ["a", "b", "b", "c"]


def test_long_messages_pass_in_a_loop(child: Captive) -> None:
    orders = [Order("echo", letter * MEBIBYTE) for letter in "abcde"]
    assert converse(child, orders).heard == [order.argument for order in orders]


@pytest.mark.parametrize(
    ("order", "said"),
    [
        (Order("leave", "7"), "exit code 7"),
        (Order("die", "9"), "signal 9"),
        (Order("fail", "in words"), "Its last words: in words"),
        (Order("close"), "closed its end of the pipe"),
        (Order("everywhere"), "announced a frame"),
        (Order("other"), "no message"),
    ],
)
def test_the_end_is_told_once_in_a_loop(child: Captive, order: Order, said: str) -> None:
    listener = converse(child, [Order("echo", "before"), order], wanted=5)
    assert listener.heard == ["before"]
    assert len(listener.ends) == 1
    assert said in str(listener.ends[0])
    with pytest.raises(ChildEnded, match="environment's process"):
        child.send(Order("echo"))


def test_a_flood_of_messages_leaves_the_loop_its_time(child: Captive) -> None:
    async def main() -> tuple[int, int]:
        heard: list[Said] = []
        first = asyncio.Event()
        child.attach(lambda said: (heard.append(said), first.set())[0], lambda _: None)
        child.send(Order("flood"))
        await first.wait()
        for _ in range(20):
            await asyncio.sleep(0.001)
        child.detach()
        before = len(heard)
        await asyncio.sleep(0.01)
        return before, len(heard)

    began = time.monotonic()
    before, after = asyncio.run(main())
    assert time.monotonic() - began < ANSWER_S
    assert before == after > 0


def test_a_killed_child_tells_nobody(child: Captive) -> None:
    async def main() -> Listener:
        listener = Listener(child, 1)
        child.attach(listener.hear, listener.end)
        child.kill()
        await asyncio.sleep(0.05)
        return listener

    listener = asyncio.run(main())
    assert listener.heard == []
    assert listener.ends == []
    assert not child.alive


@pytest.mark.parametrize("leave", [Captive.kill, Captive.detach])
def test_who_leaves_between_the_end_and_its_telling_is_not_told(
    child: Captive, leave: Callable[[Captive], None]
) -> None:
    async def main() -> Listener:
        listener = Listener(child, 1)
        child.attach(listener.hear, listener.end)
        child.send(Order("idle"))
        with contextlib.suppress(ChildEnded):
            for _ in range(5):
                child.send(Order("echo", "x" * (30 * MEBIBYTE)))
        leave(child)
        await asyncio.sleep(0.01)
        return listener

    assert asyncio.run(main()).ends == []
    assert not child.alive


def test_an_end_between_two_calls_is_noticed(child: Captive) -> None:
    child.send(Order("leave", "5"))
    deadline = time.monotonic() + ANSWER_S
    while child.alive and time.monotonic() < deadline:
        pass
    assert not child.alive
    assert "exit code 5" in sentence(child, "echo")
