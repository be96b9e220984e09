"""The host's end of the pipe, in an event loop that is about to read it."""

from __future__ import annotations

import os
import threading

import msgspec

from nous_node.envs.framing import framed
from nous_node.envs.host_line import CallLoop, Line
from nous_node.envs.host_messages import Encode, Ids, Reply, ToHost


def test_what_a_question_has_read_is_not_waited_for_by_the_loop() -> None:
    """The loop knows that there is something to read, and before it reads a question takes it away."""
    theirs, ours = os.pipe(), os.pipe()
    answers: list[Reply] = []
    heard: list[ToHost] = []

    def host() -> None:
        line, loop = Line(theirs[0], ours[1]), CallLoop()
        line.serve(loop, heard.append)
        loop.call_soon(lambda: answers.append(line.ask(Encode(1, "text"))))
        loop.call_soon(loop.stop)  # after one round, in which the loop reads last
        loop.run_forever()
        loop.close()

    os.write(theirs[1], framed(msgspec.msgpack.encode(Ids([1, 2]))))
    running = threading.Thread(target=host, daemon=True)
    running.start()
    running.join(20)
    stuck = running.is_alive()
    os.close(theirs[1])  # whoever still reads goes on
    running.join(20)
    for end in (theirs[0], *ours):
        os.close(end)
    assert not stuck
    assert answers == [Ids([1, 2])]
    assert heard == []
