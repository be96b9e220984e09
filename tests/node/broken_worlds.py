"""A third party's distribution of environments, each broken in one way, and what `env check` says of it."""

from __future__ import annotations

from pathlib import Path

MODULE = '''
import random
import socket
import subprocess
import time

from nous_node.envs.environment import EnvironmentInfo, Score, Task
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.rollouts import Role


class Good:
    """Pays for the digit that it asks for. The others change one thing."""

    levels = 0
    turns = 1

    def __init__(self, config):
        self.count = 0

    def __init_subclass__(cls):
        name = "broken-" + cls.__name__.lower()
        cls.info = EnvironmentInfo(name, "1", "exact", "pure", False, cls.turns, 1, (), "Says a digit.")

    def task(self, seed, level):
        return Task(seed, level, seed[0] % 10)

    def question(self, task):
        return f"say {task.payload}:"

    def worth(self, task, answer):
        return float(answer == str(task.payload))

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        prompt = policy.tokenizer.encode(self.question(task))
        for session in sessions:
            session.append(prompt, Role.USER)
        made = await sample_all(policy, sessions)
        said = [policy.tokenizer.decode(one.tokens[:-1]) for one in made]
        return [s.finish(self.worth(task, answer)) for s, answer in zip(sessions, said)]


class Works(Good):
    pass


class Raises(Good):
    def question(self, task):
        raise KeyError("no such question")


class Hangs(Good):
    def question(self, task):
        time.sleep(1000)


class Hashes(Good):
    def question(self, task):
        return " ".join({"apples", "pears", "plums", "figs", "dates", str(task.payload)})


class Clock(Good):
    def question(self, task):
        return f"it is {time.time_ns()}, say {task.payload}:"


class Chance(Good):
    def question(self, task):
        return f"say {random.random()}:"


class Counts(Good):
    def question(self, task):
        self.count += 1
        return f"{self.count}. say {task.payload}:"


class Moods(Good):
    def worth(self, task, answer):
        return random.random() / 100


class Generous(Good):
    def worth(self, task, answer):
        return 1.0


class Kind(Good):
    def worth(self, task, answer):
        return 0.1


class Fragile(Good):
    def worth(self, task, answer):
        return float(answer.encode("ascii") == b"7")


class Infinite(Good):
    def worth(self, task, answer):
        return float("nan")


class Online(Good):
    def question(self, task):
        socket.create_connection(("192.0.2.1", 80), timeout=1)


class Prints(Good):
    def question(self, task):
        print("\\x1b[31mloud\\x1b[0m")
        return super().question(task)


class Writes(Good):
    def question(self, task):
        with open("/tmp/cache", "w") as file:
            file.write("x")
        return super().question(task)


class Forks(Good):
    child = None

    def question(self, task):
        if Forks.child is None:
            Forks.child = subprocess.Popen(["sleep", "1000"])
        return super().question(task)


class Texts(Good):
    async def collect_trajectories(self, task, policy):
        return ["a text"]


class Same(Good):
    def question(self, task):
        return "say something:"


class Talks(Good):
    """Two turns."""

    turns = 2

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode(self.question(task)), Role.USER)
        await sample_all(policy, sessions)
        for session in sessions:
            session.append(policy.tokenizer.encode(" again:"), Role.USER)
        await sample_all(policy, [session for session in sessions if session.room])
        return [session.finish(0.0) for session in sessions]


class Converses(Good):
    """Needs a chat model."""

    async def collect_trajectories(self, task, policy):
        session = Session(policy, 0)
        session.converse([])
        return []


class Hostile(Good):
    """Writes what a terminal or a browser would obey."""

    def question(self, task):
        return "<script>alert(1)</script>\\x1b]0;owned\\x07\\x1b[2J\\u202e&'\\"\\nline two:"
'''

FAMILY = '''


class Pair:
    """A family of one that works and one that pays for anything."""

    recipe = ""
    kinds = {"good": Works, "bad": Generous}

    @classmethod
    def members(cls):
        return sorted(cls.kinds)

    @classmethod
    def facts(cls, member):
        return EnvironmentInfo("broken-pair/" + member, "1", "exact", "pure", False, 1, 1, (), "One of two.")

    @classmethod
    def make(cls, member, config):
        made = cls.kinds[member](config)
        made.info = cls.facts(member)
        return made
'''

NAMES = [line.split()[1].split("(")[0] for line in MODULE.splitlines() if line.startswith("class ")][1:]

VERDICTS = {
    "works": ("sandbox", "ok", "No network"),
    "raises": ("runs", "FAILED", "no such question"),
    "hangs": ("runs", "FAILED", "did not end within 1 s"),
    "hashes": ("hash seed", "warning", "PYTHONHASHSEED"),
    "clock": ("tasks", "FAILED", "Texts of task 0 differ in another process"),
    "chance": ("tasks", "FAILED", "random numbers"),
    "counts": ("tasks", "FAILED", "kept from task to task"),
    "moods": ("tasks", "FAILED", "Rewards of task 0 differ for equal answers"),
    "generous": ("nonsense", "FAILED", "are paid 1.000 on average"),
    "kind": ("nonsense", "warning", "are paid 0.100 on average"),
    "fragile": ("nonsense", "FAILED", "UnicodeEncodeError"),
    "infinite": ("runs", "FAILED", "The reward nan"),
    "online": ("runs", "FAILED", "unreachable"),
    "prints": ("sandbox", "ok", "loud"),
    "writes": ("sandbox", "ok", "1 file in its own folder"),
    "forks": ("runs", "FAILED", "The sandbox has no network, starts no processes"),
    "texts": ("runs", "FAILED", "not trajectories"),
    "same": ("tasks", "warning", "give the same task"),
    "talks": ("turns", "ok", "each behind the very tokens before it"),
    "converses": ("runs", "FAILED", "--model FOLDER"),
    "hostile": ("tasks", "warning", "give the same task"),
}
"""Name -> the row that tells, its verdict, and words of its sentence."""


def install_broken(folder: Path) -> None:
    """Puts the distribution there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "broken_worlds.py").write_text(MODULE + FAMILY)
    facts = folder / "broken_worlds-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-worlds\nVersion: 1.0\n")
    points = [f"broken-{name.lower()} = broken_worlds:{name}" for name in [*NAMES, "Pair"]]
    (facts / "entry_points.txt").write_text("\n".join(["[nous.envs]", *points, ""]))
