"""This node's own adapter: it answers the questions of the conformance kit, one JSON object a line.

    {"op": "decode", ...}   ->   {"ok": {...}}, {"error": CODE}, both, or {"unsupported": true}

Every line is answered, whatever it holds. What is answered is computed by the code that a node runs with; the
kit compares. Spec: `specs/14-conformance.md`; what each op takes and gives: `specs/vectors/ops.toml`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, BinaryIO, Final

import msgspec

from nous_node.envs.errors import BrokenEnvironment, EnvError
from nous_node.protocol.errors import LocalError, RemoteError

from . import (
    adapter_chat,
    adapter_checkpoints,
    adapter_environments,
    adapter_forward,
    adapter_games,
    adapter_greetings,
    adapter_local,
    adapter_messages,
    adapter_model,
    adapter_rollouts,
    adapter_verification,
)
from .adapter_question import Answer, Ask, BadQuestion, Ops, Refused, asked, figure, taken

NAME: Final = "nous-node"

MAX_LINE: Final = 1 << 24
"""Bytes of a question; the longest of the vectors has half a million."""

BAD_QUESTION: Final = "bad-question"
"""Answered where a line is no question. No code of the protocol."""

FAILED: Final = "adapter-failed"
"""Answered where an op fails in a way that it should not: a bug of this node. No code of the protocol."""

REFUSED: Final = "refused"
"""Answered where an environment refuses what it was given: such refusals have no code."""


def client(_: Ask) -> Answer:
    """Who answers."""
    return {"name": NAME, "version": version(NAME)}


OPS: Final[Ops] = {
    "client": client,
    **adapter_messages.OPS,
    **adapter_rollouts.OPS,
    **adapter_verification.OPS,
    **adapter_checkpoints.OPS,
    **adapter_environments.OPS,
    **adapter_chat.OPS,
    **adapter_games.OPS,
    **adapter_model.OPS,
    **adapter_forward.OPS,
    **adapter_local.OPS,
    **adapter_greetings.OPS,
}


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the questions end, or nobody reads the answers any more."""
    while line := questions.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE and not line.endswith(b"\n"):
            _skip(questions)
            answer = _bad(f"The question has more than {MAX_LINE} bytes.")
        else:
            answer = answered(line)
        try:
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()
        except BrokenPipeError:
            return


def answered(line: bytes) -> dict[str, Any]:
    """The answer to one line. Nothing is raised."""
    try:
        question = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return _bad(f"The question is no JSON: {error}.")
    match question:
        case {"op": str() as name}:
            return _answered(name, question)
    return _bad("A question is an object with the name of an `op`.")


def _answered(name: str, question: object) -> dict[str, Any]:
    op = OPS.get(name)
    if op is None:
        return {"unsupported": True}
    try:
        return {"ok": op(asked(question, taken(op)))}
    except BadQuestion as error:
        return _bad(str(error))
    except Refused as refused:
        return {"ok": refused.before, **_error(refused.error)}
    except RemoteError as error:
        return _error(error)
    except (ImportError, BrokenEnvironment) as error:  # a library that this machine lacks
        return {"unsupported": True, "note": str(error)}
    except EnvError as error:
        return {"error": REFUSED, "note": str(error)}
    except LocalError as error:  # a seed of 31 bytes, say: nothing that a peer could send
        return _bad(str(error))
    except Exception as error:  # the kit has to hear of a bug, and of all other questions
        return {"error": FAILED, "note": f"{type(error).__name__}: {error}"}


def _error(error: RemoteError) -> dict[str, Any]:
    measured, threshold = figure(error.measured), figure(error.threshold)
    return {"error": error.code.value, "measured": measured, "threshold": threshold, "note": str(error)}


def _bad(note: str) -> dict[str, Any]:
    return {"error": BAD_QUESTION, "note": note}


def _skip(questions: BinaryIO) -> None:
    """The rest of a line."""
    while (piece := questions.readline(1 << 16)) and not piece.endswith(b"\n"):
        continue
