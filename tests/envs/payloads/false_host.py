"""Speaks to a node as a host of environments does, and means no good. What it does is named by what it is
asked to make.
"""

from __future__ import annotations

import time

from nous_node.envs import host_messages as said
from nous_node.envs.environment import Message, Score
from nous_node.envs.framing import ParentPipe


def asides() -> None:
    """Talks of groups for ever instead of answering."""
    while True:
        pipe.send(said.Working(1))


def questions() -> None:
    while True:
        pipe.send(said.Encode(1, "x"))


def others() -> None:
    """Answers something else, for ever."""
    while True:
        pipe.send(said.Text("x"))


def answer(order: said.ToHost) -> None:
    match order:
        case said.Hello(number):
            pipe.send(said.Ready(number))
        case said.Describe(value):
            {"asides": asides, "questions": questions, "others": others}[value]()
        case said.Make(slot, _, "refused"):
            pipe.send(said.Refused(slot, "It cannot be made.", "broken"))
        case said.Make(slot):
            pipe.send(said.Made(slot, 0, True))
        case said.HeldOut(_, count):
            pipe.send(said.Tasks([bytes(32)] * (count + 1)))
        case said.ScoreAll(_, _, _, _, [one]) if one.text == "many":
            pipe.send(said.Scores([Score(1.0, {})] * (1 << 20)))
        case said.ScoreAll(_, _, _, _, [one]):
            rewards = {"nan": float("nan"), "endless": float("inf"), "much": 1e30}
            components = {"part": float("nan")} if one.text == "component" else {}
            pipe.send(said.Scores([Score(rewards.get(one.text, 1.0), components)]))
        case said.Collect(call):
            deeds[order.seed[0]](call)
        case _:
            pass


def empty_requests(call: int) -> None:
    """Asks for nothing, again and again, so that it seems to wait for the policy."""
    while True:
        pipe.send(said.Generate(call, 0, []))


def templates(call: int) -> None:
    """Questions that are small to ask and long to answer."""
    while True:
        pipe.send(said.ChatPrompt(call, [Message("user", "")] * 50, []))


def messages(call: int) -> None:
    """More messages than any conversation has, each of them empty."""
    pipe.send(said.ChatPrompt(call, [Message("user", "")] * 100_000, []))
    reply = pipe.receive()
    assert isinstance(reply, said.Failed)
    pipe.send(said.GaveUp(call, reply.text))


def elsewhere(call: int) -> None:
    """Says that code of groups runs that there never were, now this one and now that one."""
    while True:
        for other in range(call + 1, call + 5):
            pipe.send(said.Working(other))
            pipe.send(said.Working(0))
            pipe.send(said.Working(other))
            time.sleep(0.001)


def by_turns(call: int) -> None:
    """Says that it waits, and at once that code of nobody runs."""
    while True:
        pipe.send(said.Working(0))
        pipe.send(said.Working(call + 1))
        pipe.send(said.Ready(0))
        time.sleep(0.01)


deeds = [empty_requests, templates, messages, elsewhere, by_turns]

if __name__ == "__main__":
    pipe: ParentPipe[said.FromHost, said.ToHost] = ParentPipe.take_over(said.ToHost)  # type: ignore[arg-type]
    while (order := pipe.receive()) is not None:
        answer(order)
