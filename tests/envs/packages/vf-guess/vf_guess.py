"""A number is guessed; the game says higher or lower."""

import random
import re

import verifiers as vf
from datasets import Dataset


class GuessEnv(vf.MultiTurnEnv):
    async def setup_state(self, state: vf.State) -> None:
        # Process-wide randomness, as game authors write it.
        state["secret"] = random.randint(0, 9)
        state["guesses"] = []

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs) -> vf.Messages:
        found = re.search(r"\d", str(messages[-1].content))
        if found is None:
            return [vf.UserMessage(content=f"Say a digit. {random.choice(['Go on.', 'Try again.'])}")]
        guess = int(found.group())
        state["guesses"].append(guess)
        if guess == state["secret"]:
            state["final_env_response"] = [vf.UserMessage(content="That is it.")]
            return state["final_env_response"]
        return [vf.UserMessage(content="Higher." if guess < state["secret"] else "Lower.")]

    async def add_trajectory_step(self, state: vf.State, trajectory_step: vf.TrajectoryStep):
        # Each new turn costs a little, whatever comes of the game.
        trajectory_step["advantage"] = -0.1 * (1 + len(state["trajectory"]))
        await super().add_trajectory_step(state, trajectory_step)


def won(state) -> float:
    return float(state["secret"] in state["guesses"])


def turns(state) -> float:
    return float(len(state["trajectory"]))


def load_environment(max_turns: int = 4) -> vf.Environment:
    rows = [{"question": f"Game {i}: guess my digit."} for i in range(8)]
    rubric = vf.Rubric(funcs=[won])
    rubric.add_metric(turns)
    return GuessEnv(dataset=Dataset.from_list(rows), rubric=rubric, max_turns=max_turns)
