"""Ops of conversations, in a model folder that is made of each question: prompts, extensions, whole ones."""

from __future__ import annotations

import asyncio
import functools
import json
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from nous_node.envs import transcripts
from nous_node.envs.conversation import Conversations, Player
from nous_node.envs.environment import Chat, Message, Tool
from nous_node.protocol.rollouts import Trajectory, unpack_tokens

from .adapter_policy import Replies
from .adapter_question import Answer, Ask, Ops, check_releases

BYTES: Final = 256
"""Ids below it are bytes; then come the control tokens."""


class Model(Ask, frozen=True, kw_only=True):
    template: str
    controls: list[str]
    """The close first, the beginning of a text second."""
    special: list[str]
    created: int
    form: str = "template"
    """`format` of a run's model. [CHT-2]"""
    releases: dict[str, str] = {}  # noqa: RUF012 (msgspec copies it)
    """Of the library that the form names."""

    def opened(self) -> Chat:
        """Its conversation format. Raises BadChat where it is refused, ImportError where it needs a library
        that is not there."""
        check_releases(self.releases)
        model = (self.template, tuple(self.controls), frozenset(self.special), self.created)
        return _opened(*model, self.form)


class Conversation(Model, frozen=True, kw_only=True):
    messages: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()
    last: int | None = None


def chat(ask: Conversation) -> Answer:
    model = ask.opened()
    if ask.last is None:
        pieces = model.prompt(ask.messages, ask.tools)
    else:
        pieces = model.extend([ask.last], ask.messages, ask.tools)
    return {"pieces": [[int(role), tokens] for role, tokens in pieces]}


class Spoken(Model, frozen=True, kw_only=True):
    tokens: list[int]


def parsed(ask: Spoken) -> Answer:
    return {"message": msgspec.to_builtins(ask.opened().parse(ask.tokens))}


class Asked(Ask, frozen=True):
    """One question to the policy."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    count: int = 1
    agent: str = ""


class Played(Model, frozen=True, kw_only=True):
    max_tokens: int
    context: int
    samples: list[list[list[Asked]]]
    """What each sample asks, step by step; what is asked in one step does not wait for anything between."""
    replies: list[list[str]]
    """Of each trajectory; the last one for ever."""


def played(ask: Played) -> Answer:
    policy = Replies(ask.replies, len(ask.samples), ask.max_tokens, ask.context, ask.opened(), BYTES)
    trajectories = asyncio.run(_conversed(policy, ask.samples))
    return {"calls": policy.calls, "trajectories": [_segmented(one) for one in trajectories]}


async def _conversed(policy: Replies, samples: list[list[list[Asked]]]) -> list[Trajectory]:
    conversations = Conversations(policy)

    async def episode(player: Player) -> float:
        for step in samples[player.sample]:
            await asyncio.gather(*(player.ask(_asked(one)) for one in step))
        return 0.0

    return conversations.finish(await conversations.play(episode))


def _asked(one: Asked) -> transcripts.Ask:
    return transcripts.Ask(one.messages, True, one.tools, one.count, None, (), one.agent)


def _segmented(trajectory: Trajectory) -> Answer:
    """Agent and segments, each with its role, whether it was sampled, and its tokens."""
    tokens, position, segments = unpack_tokens(trajectory.tokens), 0, []
    for segment in trajectory.segments:
        piece = tokens[position : position + segment.length]
        segments.append([int(segment.role), segment.trained, piece])
        position += segment.length
    return {"agent": trajectory.agent, "segments": segments}


@functools.lru_cache(maxsize=64)
def _opened(
    template: str, controls: tuple[str, ...], special: frozenset[str], created: int, form: str
) -> Chat:
    from nous_node.envs.chat import load_chat

    with tempfile.TemporaryDirectory() as where:
        folder = Path(where)
        _write_tokenizer(folder / "tokenizer.json", controls, special)
        names = {"eos_token": controls[0], "bos_token": controls[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(names))
        (folder / "chat_template.jinja").write_text(template)
        return load_chat(folder, form, created)


def _write_tokenizer(path: Path, controls: tuple[str, ...], special: frozenset[str]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte for byte, letter in enumerate(_letters())}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(one, special=one in special, normalized=False) for one in controls])
    made.save(str(path))


def _letters() -> list[str]:
    """The characters by which byte-level tokenizers write bytes."""
    shown = {*range(33, 127), *range(161, 173), *range(174, BYTES)}
    hidden = iter(range(BYTES, 2 * BYTES))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(BYTES)]


OPS: Final[Ops] = {"chat": chat, "chat-parsed": parsed, "chat-rendered": chat, "conversations": played}
