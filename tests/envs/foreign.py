"""A third party's distribution: environments that work, and environments that do all that they should not.

Installed by a folder with its `dist-info` on the path, as an editable install is.
"""

from __future__ import annotations

from pathlib import Path

MODULE = '''
import asyncio
import os
import time

from nous_node.envs.environment import EnvironmentInfo, GenerateRequest, Message, Score, Task, Tool
from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.rollouts import Role, Trajectory


def info(name, turns=1, agents=1, **more):
    return EnvironmentInfo(name, "3", "exact", "pure", False, turns, agents, **more)


class Toy:
    levels = 4

    def __init__(self, config):
        if set(config) - {"bias"}:
            raise BadConfig("`bias` is the only setting.")
        self.bias = config.get("bias", 0)

    def task(self, seed, level):
        return Task(seed, level, seed[0] % 10)


class Guess(Toy):
    """Three turns: whether the last digit was too low or too high."""

    info = info("toy-guess", turns=3)

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        found = {}
        for session in sessions:
            session.append(policy.tokenizer.encode("guess a digit:"), Role.USER)
        going = sessions
        for turn in range(3):
            after = []
            for session, made in zip(going, await sample_all(policy, going)):
                guess = made.tokens[0] - 48
                found[session.trajectory] = found.get(session.trajectory, False) or guess == task.payload
                if guess != task.payload and session.room and turn < 2:
                    hint = "low" if guess < task.payload else "high"
                    session.append(policy.tokenizer.encode(f" {hint};"), Role.TOOL)
                    if session.room:
                        after.append(session)
            going = after
        return [s.finish(float(found[s.trajectory]) + self.bias, {"found": 1.0}) for s in sessions]

    def held_out(self, count, level=0):
        return [self.task(bytes([index]) * 32, level) for index in range(count)]

    def prompt(self, task):
        return f"which digit is {task.payload}?"

    def score(self, task, answer, ended):
        if answer == "hang":
            time.sleep(1000)
        right = float(ended and answer == str(task.payload))
        return Score(right, {"correct": right})


class Duel(Toy):
    """Two agents a sample, each sample a task of its own, each in a request of its own."""

    info = info("toy-duel", turns=2, agents=2)

    async def collect_trajectories(self, task, policy):
        pairs = await asyncio.gather(*[self.play(policy, index) for index in range(policy.group)])
        return [trajectory for pair in pairs for trajectory in pair]

    async def play(self, policy, sample):
        left, right = Session(policy, 2 * sample, "left"), Session(policy, 2 * sample + 1, "right")
        left.append(policy.tokenizer.encode("say:"), Role.USER)
        said = (await left.sample()).tokens
        right.append([*policy.tokenizer.encode("they said:"), *said[:-1]], Role.USER)
        answered = (await right.sample()).tokens
        won = len(answered) > len(said)
        return [left.finish(float(not won)), right.finish(float(won))]


class Tree(Toy):
    """One trajectory: a prompt, and an answer in each of its branches."""

    info = info("toy-tree", turns=2)

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode("two ways:"), Role.USER)
        await sample_all(policy, sessions, 3)
        for session in sessions:
            session.branch(0)
            session.append(policy.tokenizer.encode("or:"), Role.USER)
        await sample_all(policy, sessions)
        return [session.finish(1.0) for session in sessions]


class Chatty(Toy):
    """A conversation of two turns, the second about what stood in the first."""

    info = info("toy-chatty", turns=2)

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.converse([Message("system", "be brief"), Message("user", f"{task.payload}?")], TOOLS)
        said = [policy.chat.parse(made.tokens) for made in await sample_all(policy, sessions, 4)]
        for session, message in zip(sessions, said):
            session.converse([Message("tool", message.content[::-1], tool_call_id="1", name="turn")], TOOLS)
        await sample_all(policy, sessions)
        return [session.finish(float(len(message.content))) for session, message in zip(sessions, said)]


TOOLS = [Tool("turn", "turns a text around", "{}")]


class Brittle(Toy):
    """Dies before it asks for anything, while others wait for the policy; lives where its seed says so."""

    info = info("toy-brittle")

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode("go:"), Role.USER)
        if task.seed[0]:
            await asyncio.sleep(0.05)
            os._exit(4)
        await sample_all(policy, sessions)
        return [session.finish(0.5) for session in sessions]


class Leaky(Toy):
    """Executes what it is told, so that one group changes what later ones are paid."""

    info = EnvironmentInfo("toy-leaky", "1", "exact", "sandbox", False, 1, 1)
    paid = 0.0

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode("go:"), Role.USER)
        await sample_all(policy, sessions)
        Leaky.paid += task.seed[0]
        if Leaky.paid > 2:
            raise RuntimeError("too much")
        return [session.finish(Leaky.paid) for session in sessions]


class Bad(Toy):
    """Does what its task's first byte says, before or after its first turn."""

    info = info("toy-bad")

    async def collect_trajectories(self, task, policy):
        deed = DEEDS[task.seed[0]]
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode("go:"), Role.USER)
        await sample_all(policy, sessions)
        return await deed(policy, sessions, [session.finish(0.5) for session in sessions])


async def well(policy, sessions, made):
    return made


async def raises(policy, sessions, made):
    raise ZeroDivisionError("a bug in the scorer")


async def leaves(policy, sessions, made):
    raise SystemExit(0)


async def dies(policy, sessions, made):
    os._exit(3)


async def hangs(policy, sessions, made):
    while True:
        pass


async def waits(policy, sessions, made):
    await asyncio.get_running_loop().create_future()


async def text(policy, sessions, made):
    return "the answer is 7"


async def texts(policy, sessions, made):
    return ["the answer is 7"]


async def nan(policy, sessions, made):
    return [changed(made[0], reward=float("nan")), *made[1:]]


async def wordy(policy, sessions, made):
    return [changed(made[0], reward="good"), *made[1:]]


async def component(policy, sessions, made):
    return [changed(made[0], components={"a": float("inf")}), *made[1:]]


async def many(policy, sessions, made):
    return made * 1000


async def few(policy, sessions, made):
    return made[1:]


async def forged(policy, sessions, made):
    return [changed(made[0], tokens=made[0].tokens[:3] + b"9" + made[0].tokens[4:]), *made[1:]]


async def swapped(policy, sessions, made):
    return made[::-1]


async def boasts(policy, sessions, made):
    return [changed(made[0], logprobs=bytes(len(made[0].logprobs))), *made[1:]]


async def trains(policy, sessions, made):
    segments = [(s.length, s.role, True) for s in made[0].segments]
    return [changed(made[0], segments=[type(made[0].segments[0])(*s) for s in segments]), *made[1:]]


async def floods(policy, sessions, made):
    while True:
        await policy.generate([GenerateRequest([1], index, 0, 1) for index in range(1000)])


async def again(policy, sessions, made):
    return await policy.generate([GenerateRequest([1, 2], 0, 0, 4)])


async def greedy(policy, sessions, made):
    return await policy.generate([GenerateRequest([1, 2], 63, 0, 4), GenerateRequest([1] * 10, 62, 0, 10**9)])


async def huge(policy, sessions, made):
    return policy.tokenizer.encode("x" * 10**7)


async def negative(policy, sessions, made):
    return policy.tokenizer.decode([-1])


async def garbage(policy, sessions, made):
    for number in range(3, 20):
        try:
            os.write(number, b"\\x00\\x00\\x00\\x04junk")
        except OSError:
            pass
    return made


async def long_frame(policy, sessions, made):
    for number in range(3, 20):
        try:
            os.write(number, b"\\xff\\xff\\xff\\xff")
        except OSError:
            pass
    return made


def changed(trajectory, **fields):
    values = {name: getattr(trajectory, name) for name in trajectory.__struct_fields__}
    return Trajectory(**{**values, **fields})


async def beyond(policy, sessions, made):
    return await policy.generate([GenerateRequest([1, 2], 64, 0, 4)])


DEEDS = [well, raises, leaves, dies, hangs, waits, text, texts, nan, wordy, component, many, few, forged,
         swapped, boasts, trains, floods, again, greedy, beyond, huge, negative, garbage, long_frame]


class Pair:
    """A family of two."""

    recipe = ""

    @classmethod
    def members(cls):
        return ["one", "two"]

    @classmethod
    def facts(cls, member):
        if member not in cls.members():
            raise UnknownEnvironment(f"toy-pair has no {member!r}.")
        return info(f"toy-pair/{member}", turns=3)

    @classmethod
    def make(cls, member, config):
        made = Guess(config)
        made.info = cls.facts(member)
        return made


class Far(Toy):
    info = EnvironmentInfo("toy-far", "1", "none", "judge", True, 1, 1)


class Misnamed(Toy):
    info = info("toy-other")
'''

DEEDS = [
    name
    for line in MODULE.split("DEEDS = [")[1].split("]")[0].splitlines()
    for name in line.replace(" ", "").split(",")
    if name
]
"""Names of what `toy-bad` does, in the order of the first bytes of its seeds."""

POINTS = {
    "toy-guess": "Guess",
    "toy-duel": "Duel",
    "toy-tree": "Tree",
    "toy-chatty": "Chatty",
    "toy-brittle": "Brittle",
    "toy-leaky": "Leaky",
    "toy-bad": "Bad",
    "toy-pair": "Pair",
    "toy-far": "Far",
    "toy-misnamed": "Misnamed",
    "toy-empty": "info",
    "toy-missing": "Missing",
}


def install_worlds(folder: Path, release: str = "1.2", module: str = "toy_worlds") -> None:
    """Puts the distribution `toy-worlds` there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{module}.py").write_text(MODULE)
    facts = folder / f"toy_worlds-{release}.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Toy_Worlds\nVersion: {release}\n")
    points = [f"{name} = {module}:{attribute}" for name, attribute in POINTS.items()]
    (facts / "entry_points.txt").write_text("\n".join(["[nous.envs]", *points, ""]))
