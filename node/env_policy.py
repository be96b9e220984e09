"""A policy to try environments with: a model folder as a run would use it, on this machine alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from nous_node.envs.chat import ModelChat, load_chat, recommend
from nous_node.envs.chat_tokens import template_source
from nous_node.envs.environment import PolicySettings
from nous_node.protocol.errors import LocalError
from nous_node.trainer.model_folder import check_folder, model_facts, read_config
from nous_node.trainer.tokenizer import load_tokenizer

from .create import BaseModel, stop_ids
from .model_source import model_folder
from .plan import DEFAULT_MAX_TOKENS, DEFAULT_MODEL, EMBEDDED_MAX_TOKENS, RunPlan

if TYPE_CHECKING:
    from nous_node.trainer.policy import Policy

CREATED: Final = 1_750_000_000_000
"""The time that templates see: the same whenever something is tried."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A model folder with what a run of it would fix."""

    base: BaseModel
    settings: PolicySettings
    note: str
    """Why it has no conversation format; empty where it has one, or is the embedded default."""

    def policy(self) -> Policy:
        """With its weights. Imports torch. Raises ModelError."""
        from nous_node.trainer.policy import Policy

        return Policy.load(self.base.source, self.base.dtype)


def trial(model: str | None, group: int, max_tokens: int | None = None) -> Trial:
    """Reads a folder, or the embedded default's, without its weights. Raises LocalError, ModelError."""
    source = model_folder(model) if model else DEFAULT_MODEL
    check_folder(source)
    base = BaseModel.of(source, RunPlan())
    facts = model_facts(source)
    most = max_tokens or (EMBEDDED_MAX_TOKENS if base.embedded else DEFAULT_MAX_TOKENS)
    if most > facts.context:
        raise LocalError(f"--max-tokens is at most the model's context of {facts.context:,}, not {most:,}.")
    chat, note = _chat(source)
    tokenizer = load_tokenizer(source, read_config(source))
    settings = PolicySettings(
        tokenizer,
        group,
        most,
        facts.context,
        frozenset(stop_ids(source, chat)),
        chat=chat,
        vocabulary=facts.vocab_size,
    )
    return Trial(base, settings, note)


def _chat(source: Path) -> tuple[ModelChat | None, str]:
    """The format that a run of this model would have, or why it would have none."""
    if not template_source(source):
        return None, ""
    form, why = recommend(source, CREATED)
    return (load_chat(source, form, CREATED), "") if form else (None, why)
