"""A tokenizer as Atropos environments know it (that of transformers), in front of the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from .atropos_speech import Speech
from .errors import EnvironmentFailed
from .openai_messages import read_messages, read_tools


class PolicyTokenizer:
    """What environments use of `PreTrainedTokenizer`. Only for a group under way: `speech` is its speech."""

    padding_side = "left"
    bos_token = bos_token_id = None

    def __init__(self, speech: Speech) -> None:
        self.speech = speech

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    @property
    def eos_token_id(self) -> int:
        return self.speech.policy.tokenizer.eos_id

    @property
    def eos_token(self) -> str:
        return self.speech.policy.tokenizer.decode([self.eos_token_id])

    pad_token_id = eos_token_id
    pad_token = eos_token

    @property
    def chat_template(self) -> str | None:
        """Whether there is one is all that can be told."""
        return None if self.speech.policy.chat is None else "the run's own"

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        return_tensors: str | None = None,
        **_: Any,
    ) -> Any:
        """Tokens of a conversation, or its text. Raises EnvironmentFailed."""
        if return_tensors is not None:
            raise EnvironmentFailed("The environment wants tensors of a tokenizer; lists are what there is.")
        answer = add_generation_prompt
        made = self.speech.render(read_messages(conversation), read_tools(tools), answer=answer)
        if not tokenize:
            return made.text
        return self._batch(made.tokens) if return_dict else made.tokens

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        return self.speech.encoded(text)

    def __call__(self, text: str, *_: Any, **__: Any) -> dict[str, list[int]]:
        if not isinstance(text, str):
            raise EnvironmentFailed("The environment tokenises several texts at once; one is what there is.")
        return self._batch(self.speech.encoded(text))

    def decode(self, ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Text of ids. Without special tokens: the stop token at the end of an answer is left out."""
        tokens = [int(ids)] if isinstance(ids, int) else [int(one) for one in ids]
        if skip_special_tokens:
            content = self.speech.content(tokens)
            if content is not None:
                return content
            tokens = [one for one in tokens if one != self.eos_token_id]
        return self.speech.policy.tokenizer.decode(tokens)

    def batch_decode(self, sequences: Sequence[Any], **options: Any) -> list[str]:
        return [self.decode(one, **options) for one in sequences]

    def _batch(self, tokens: list[int]) -> dict[str, list[int]]:
        return {"input_ids": tokens, "attention_mask": [1] * len(tokens)}
