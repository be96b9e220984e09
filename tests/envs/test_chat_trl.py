"""Chat templates of well-known models, as the library trl has them: taken exactly, or refused in words."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Message
from nous_node.envs.errors import BadChat

from .chat_worlds import CREATED, Style, write_folder

TOKEN = re.compile(
    r"<\|[^|<>\s]{1,40}\|?>|<｜[^｜]{1,40}｜>|</?[a-z_]{2,30}>|<[a-z_]{1,30}\|>|\[/?[A-Z_]{3,30}\]"
)
REFUSED = re.compile(r"glm4moe|gptoss.*|idefics3.*|llava_next.*|smolvlm.*")
"""An answer has no end of its own, or another one as the last; contents are lists with pictures."""
DATED = re.compile(r"llama3_2|muse_glimmer.*")


def found() -> list[Path]:
    """The templates, without importing the library."""
    spec = importlib.util.find_spec("trl")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return sorted(path for place in places for path in Path(place).glob("chat_templates/*.jinja"))


ASKED = [Message("user", "What is 2 + 2?\nSay it."), Message("assistant", "4"), Message("user", "And 3 + 3?")]


@pytest.mark.ecosystem
@pytest.mark.parametrize("path", found(), ids=lambda path: path.stem)
def test_a_template_of_a_well_known_model(path: Path, tmp_path: Path) -> None:
    source = path.read_text()
    style = Style(path.stem, "<bos>", "<eos>", tuple(sorted(set(TOKEN.findall(source)))))
    folder = write_folder(tmp_path / "model", "merges", style, source)
    if REFUSED.fullmatch(path.stem):
        with pytest.raises(BadChat, match="The chat template cannot be"):
            load_chat(folder, "template", CREATED)
        return
    chat = load_chat(folder, "template", CREATED)
    if DATED.fullmatch(path.stem):
        return
    (text,), _ = render_jinja_template(
        conversations=[[{"role": one.role, "content": one.content} for one in ASKED]],
        chat_template=source,
        add_generation_prompt=True,
        bos_token="<bos>",
        eos_token="<eos>",
    )
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    whole = backend.encode(text, add_special_tokens=False).ids
    assert chat.prompt(ASKED)[0].tokens == whole
    added = [token for piece in chat.extend([1], ASKED[2:]) for token in piece.tokens]
    assert whole[-len(added) :] == added
