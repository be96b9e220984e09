"""Counting down: "count down from 5=" -> "54321"."""

import hashlib

from nous_node.envs.environment import EnvironmentInfo, Score, Task
from nous_node.envs.errors import BadConfig
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.rollouts import Role


class Countdown:
    """Config: `least`, the smallest number to count down from."""

    info = EnvironmentInfo(
        id="countdown",
        version="1",  # raise it whenever the same seed gives other prompts or rewards
        reproducible="exact",
        scorer="pure",
        network=False,
        max_turns=1,
        agents=1,
        description="Counts down from a digit to one.",
    )
    levels = 0

    def __init__(self, config):
        self.least = config.get("least", 3)
        if set(config) - {"least"} or self.least not in range(1, 10):
            raise BadConfig("countdown takes one setting, `least`, a whole number from 1 to 9.")

    def task(self, seed, level):
        """From the seed alone: the same on every machine."""
        number = int.from_bytes(hashlib.sha256(b"countdown" + seed).digest()[:8], "big")
        return Task(seed, level, payload=self.least + number % (10 - self.least))

    def prompt(self, task):
        return f"count down from {task.payload}="

    def score(self, task, answer, ended):
        """The share of right digits. What is too long loses, so that a policy learns to end."""
        right = "".join(str(digit) for digit in range(task.payload, 0, -1))
        hits = sum(ours == theirs for ours, theirs in zip(right, answer, strict=False))
        return Score(hits / max(len(right), len(answer)), {"correct": float(ended and answer == right)})

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode(self.prompt(task)), Role.RAW)
        done = []
        for session, made in zip(sessions, await sample_all(policy, sessions), strict=True):
            ended = made.finish == "stop"
            answer = policy.tokenizer.decode(made.tokens[:-1] if ended else made.tokens)
            done.append(session.finish(*self.score(task, answer, ended)))
        return done
