"""Answers to what a host asks of a policy's tokenizer and conversation format."""

from __future__ import annotations

from typing import Final

from .environment import Policy
from .errors import EnvError
from .host_messages import (
    ChatExtend,
    ChatParse,
    ChatPrompt,
    Decode,
    Encode,
    Failed,
    Ids,
    Pieces,
    Question,
    Reply,
    Said,
    Text,
)

CHARACTERS: Final = 64
"""Characters of a text for each token of the context: no text with more can fit, and long texts take long."""
LEAST_EACH: Final = 64
"""What a message, a call or a tool counts even where it is empty: a template has work with it."""
LEAST: Final = 65_536
"""Characters that are taken in any case."""


def answered(question: Question, policy: Policy) -> Reply:
    """The answer; Failed where there is none. Never raises: what is asked may be anything."""
    try:
        return _answered(question, policy)
    except EnvError as error:
        return Failed(str(error))
    except Exception as error:  # tokenizers raise whatever they like
        return Failed(f"The policy cannot answer {type(question).__name__}: {type(error).__name__}: {error}")


def _answered(question: Question, policy: Policy) -> Reply:
    most = max(LEAST, CHARACTERS * policy.context)
    size = _size(question)
    if size > most:
        return Failed(f"{type(question).__name__} was asked about {size} characters; {most} are taken.")
    match question:
        case Encode(_, text):
            return Ids(policy.tokenizer.encode(text))
        case Decode(_, ids):
            return Text(policy.tokenizer.decode(ids))
        case _ if policy.chat is None:
            return Failed("The run's model has no conversation format.")
        case ChatPrompt(_, messages, tools):
            return Pieces(policy.chat.prompt(messages, tools))
        case ChatExtend(_, tokens, messages, tools):
            return Pieces(policy.chat.extend(tokens, messages, tools))
        case ChatParse(_, tokens):
            return Said(policy.chat.parse(tokens))


def _size(question: Question) -> int:
    """Characters, or tokens, that it is about."""
    match question:
        case Encode(_, text):
            return len(text)
        case Decode(_, tokens) | ChatParse(_, tokens):
            return len(tokens)
        case ChatPrompt(_, messages, tools):
            spoken = 0
        case ChatExtend(_, tokens, messages, tools):
            spoken = len(tokens)
    calls = [call for one in messages for call in one.tool_calls]
    spoken += sum(_length(one.content, one.reasoning, one.tool_call_id, one.name) for one in messages)
    spoken += sum(_length(call.id, call.name, call.arguments) for call in calls)
    return spoken + sum(_length(tool.name, tool.description, tool.parameters) for tool in tools)


def _length(*texts: str) -> int:
    return LEAST_EACH + sum(map(len, texts))
