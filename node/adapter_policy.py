"""A policy that says what a question says, with the tokenizer of nous-default: one id a byte. [MDL-1]"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final

from nous_node.envs.environment import Chat, Completion, GenerateRequest
from nous_node.protocol.rollouts import Segment, Trajectory, unpack_floats, unpack_tokens
from nous_node.trainer.tokenizer import Tokenizer

from .adapter_question import Answer, BadQuestion

STOP: Final = 258
PADDING: Final = 256
VOCABULARY: Final = 259
LOGPROB: Final = -0.5
"""Of each token: no op looks at it."""


@functools.cache
def default_tokenizer() -> Tokenizer:
    return Tokenizer(Path(str(files("nous_node.trainer"))) / "default", STOP, PADDING, VOCABULARY)


class Replies:
    """Says the replies of each trajectory in their order, the last one for ever, and a stop token behind each
    that has room for one."""

    logprob_format: Final = "f32"

    def __init__(
        self,
        replies: Sequence[Sequence[str]],
        group: int,
        max_tokens: int,
        context: int,
        chat: Chat | None = None,
        stop: int = STOP,
    ) -> None:
        self.tokenizer = default_tokenizer()
        self.chat = chat
        self.group, self.max_tokens, self.context = group, max_tokens, context
        self.calls: list[list[int]] = []
        """The trajectories of each call."""
        self._replies = replies
        self._turns = [0] * len(replies)
        self._stop = stop

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.calls.append([one.trajectory for one in requests])
        return [self._next(one) for one in requests]

    def _next(self, request: GenerateRequest) -> Completion:
        number = request.trajectory
        if number >= len(self._replies) or not self._replies[number]:
            raise BadQuestion(f"The question has no replies of trajectory {number}.")
        replies, turn = self._replies[number], self._turns[number]
        self._turns[number] += 1
        tokens = [*replies[min(turn, len(replies) - 1)].encode(), self._stop]
        cut = tokens[: request.max_tokens]
        return Completion(cut, [LOGPROB] * len(cut), "stop" if cut == tokens else "length")


def told(trajectory: Trajectory) -> Answer:
    """A trajectory as text: what the policy read before each of its turns and behind the last one, how many
    tokens each turn has, and what it earned."""
    tokens, decode = unpack_tokens(trajectory.tokens), default_tokenizer().decode
    turns = [segment.length for segment in trajectory.segments if segment.trained]
    return {
        "agent": trajectory.agent,
        "prompts": [decode(piece) for piece in _between(tokens, trajectory.segments)],
        "turns": turns,
        "finish": trajectory.finish,
        "reward": trajectory.reward,
        "components": trajectory.components,
        "advantages": None if trajectory.advantages is None else unpack_floats(trajectory.advantages),
    }


def _between(tokens: list[int], segments: Sequence[Segment]) -> list[list[int]]:
    """What stands before each trained segment, and what is left behind the last."""
    found: list[list[int]] = [[]]
    position = 0
    for segment in segments:
        piece = tokens[position : position + segment.length]
        position += segment.length
        if segment.trained:
            found.append([])
        else:
            found[-1] += piece
    return found if found[-1] else found[:-1]
