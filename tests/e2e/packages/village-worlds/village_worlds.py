"""Environments of a third party: one that works, and one for each way in which others do not."""

from __future__ import annotations

import os
import sys

import msgspec

from nous_node.envs.environment import EnvironmentInfo, Message, Task
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.rollouts import Role


class Good:
    """Asks for as many bytes as it can get."""

    name = "good"
    levels = 0

    def __init__(self, config):
        self.info = about(self.name)

    def task(self, seed, level):
        return Task(seed, level, seed[:2].hex())

    def question(self, task):
        return f"say {task.payload}:"

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode(self.question(task)), Role.RAW)
        made = await sample_all(policy, sessions)
        rewards = [len(set(one.tokens)) / policy.max_tokens for one in made]
        return self.told([session.finish(reward) for session, reward in zip(sessions, rewards, strict=True)])

    def told(self, trajectories):
        return trajectories


class Chatty(Good):
    """The same in a conversation."""

    name = "chatty"

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.converse([Message("system", "be brief"), Message("user", task.payload)])
        said = [policy.chat.parse(made.tokens) for made in await sample_all(policy, sessions)]
        return [session.finish(len(one.content) / 100) for session, one in zip(sessions, said, strict=True)]


class Noisy(Good):
    """Says things where it should not, and is right all the same."""

    name = "noisy"

    def told(self, trajectories):
        print("\x1b[2J\x00garbage" * 1000, flush=True)
        print("more of it", file=sys.stderr)
        sys.__stdout__.write("and more\n")
        os.write(1, b"\xff" * 4096)
        return trajectories


class Raises(Good):
    name = "raises"

    def told(self, trajectories):
        raise ZeroDivisionError("a bug in the scorer")


class Hangs(Good):
    name = "hangs"

    def told(self, trajectories):
        while True:
            pass


class Dies(Good):
    name = "dies"

    def told(self, trajectories):
        os._exit(3)


class Nan(Good):
    name = "nan"

    def told(self, trajectories):
        return [msgspec.structs.replace(one, reward=float("nan")) for one in trajectories]


class Few(Good):
    name = "few"

    def told(self, trajectories):
        return trajectories[1:]


class Forged(Good):
    name = "forged"

    def told(self, trajectories):
        return [msgspec.structs.replace(one, tokens=bytes(len(one.tokens))) for one in trajectories]


class Texts(Good):
    name = "texts"

    def told(self, trajectories):
        return ["the answer is 7"] * len(trajectories)


class Hungry(Good):
    name = "hungry"

    def told(self, trajectories):
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))


class Fickle(Good):
    """Another question each time."""

    name = "fickle"

    def question(self, task):
        return f"say {os.urandom(2).hex()}:"


class Late(Good):
    """Another question each time, but only when it has been asked often."""

    name = "late"
    asked = 0

    def question(self, task):
        Late.asked += 1
        return super().question(task) if Late.asked <= OFTEN else f"say {os.urandom(2).hex()}:"


OFTEN = 100
"""More than the first groups of a node, made by batches, and those made again."""


class Moody(Good):
    """Another reward each time."""

    name = "moody"

    def told(self, trajectories):
        return [msgspec.structs.replace(one, reward=os.urandom(1)[0] / 256) for one in trajectories]


TRAPPED = True


class Trap(Good):
    """Hangs over every third task or so; another copy says that it is the same, and does not."""

    name = "trap"

    def told(self, trajectories):
        while TRAPPED and trajectories[0].tokens[16] % 3 == 0:
            pass
        return trajectories


ALL = (Good, Chatty, Noisy, Raises, Hangs, Dies, Nan, Few, Forged, Texts, Hungry, Fickle, Late, Moody, Trap)


def about(name):
    return EnvironmentInfo(f"village/{name}", "1", "exact", "pure", False, 1, 1)


class Village:
    """A family: its members share one process."""

    recipe = ""

    @classmethod
    def members(cls):
        return sorted(one.name for one in ALL)

    @classmethod
    def facts(cls, member):
        return about(member)

    @classmethod
    def make(cls, member, config):
        return {one.name: one for one in ALL}[member](config)
