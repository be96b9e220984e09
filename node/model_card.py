"""The model card of an exported checkpoint: README.md, with the front matter that model hubs read.

Whatever a trainer wrote (names, figures) is foreign text: it is escaped for terminals, Markdown and YAML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version as release

from nous_node.protocol.checkpoints import CheckpointManifest
from nous_node.protocol.runs import RunManifest

from .wording import printable, size

CARD_FILE = "README.md"

_HUB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}\Z")
"""`owner/model`, as hubs name models."""

_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>()#|~&$@:])")
_TAG = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}\Z")

_TITLES = {
    "greedy": "held-out accuracy, greedy",
    "sampled": "held-out accuracy, sampled",
}
"""Figures of `eval` that people have a name for."""


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What a card is made of."""

    run: bytes
    manifest: RunManifest
    version: int
    checkpoint: str
    """Hash in hexadecimal; empty for a base that nobody published."""
    weights: bytes
    """Weights hash. [CKP-12]"""
    files: Mapping[str, tuple[int, str]]
    """Path -> bytes, SHA-256 in hexadecimal."""
    published: CheckpointManifest | None
    signed_by: str
    """Key of the trainer in hexadecimal; empty where the signed manifest was not at hand."""
    base_model: str
    """As the model's configuration names it; empty where it does not."""


def base_model(config: Mapping[str, object]) -> str:
    """The name on a model hub that a config.json says it comes from; empty where that is no such name."""
    name = config.get("_name_or_path")
    return name if isinstance(name, str) and _HUB_NAME.match(name) else ""


def model_card(facts: CardFacts) -> str:
    """The whole text."""
    name = plain(facts.manifest.name)
    parts = [
        _front_matter(facts),
        f"# {name}, version {facts.version}",
        f"A checkpoint of the run **{name}**: reinforcement learning of a language model whose rollouts "
        "volunteers generated over a peer-to-peer network (nous-node). The trainer verified the rollouts and "
        f"learned from them. {_environments(facts.manifest)}",
        _table("Checkpoint", _identity(facts)),
        _figures("Evaluation", facts.published.eval if facts.published else {}, "It was not measured."),
        _figures("Training", facts.published.stats if facts.published else {}, ""),
        _use(facts),
        _verification(facts),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def plain(text: str) -> str:
    """Foreign text that neither Markdown nor HTML takes for anything but text."""
    return _MARKDOWN.sub(r"\\\1", printable(text, 256))


def _front_matter(facts: CardFacts) -> str:
    """Strings are written as JSON, which is YAML."""
    tags = ["nous-node", "reinforcement-learning"]
    tags += [entry.id for entry in facts.manifest.environments if _TAG.match(entry.id)][:16]
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if facts.base_model:
        lines.append(f"base_model: {json.dumps(facts.base_model)}")
    lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in dict.fromkeys(tags)), "---"]
    return "\n".join(lines)


def _environments(manifest: RunManifest) -> str:
    named = ", ".join(f"{plain(entry.id)} {plain(entry.version)}" for entry in manifest.environments[:16])
    more = ", and others" if len(manifest.environments) > 16 else ""
    return f"Environments: {named}{more}."


def _identity(facts: CardFacts) -> list[tuple[str, str]]:
    published, model = facts.published, facts.manifest.model
    rows = [
        ("run id", _code(facts.run.hex())),
        ("version", str(facts.version)),
        ("checkpoint hash", _code(facts.checkpoint) if facts.checkpoint else "not published yet"),
        ("weights hash", _code(facts.weights.hex())),
    ]
    if published is not None and published.parent is not None:
        rows.append(("parent", _code(published.parent.hex())))
    if facts.signed_by:
        rows.append(("signed by", _code(facts.signed_by)))
    rows += [
        ("model", f"{plain(model.family)}, {model.parameters:,} parameters, {plain(model.dtype)}"),
        ("made with", f"nous-node {release('nous-node')}"),
    ]
    return rows


def _figures(title: str, figures: Mapping[str, float], otherwise: str) -> str:
    rows = [(plain(_TITLES.get(name, name)), _number(value)) for name, value in sorted(figures.items())[:64]]
    if not rows:
        return f"## {title}\n\n{otherwise}" if otherwise else ""
    return _table(title, rows)


def _use(facts: CardFacts) -> str:
    return (
        "## Use\n\n```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'model = AutoModelForCausalLM.from_pretrained("PATH OF THIS FOLDER")\n'
        'tokenizer = AutoTokenizer.from_pretrained("PATH OF THIS FOLDER")\n```'
    )


def _verification(facts: CardFacts) -> str:
    sums = "\n".join(f"{digest}  {path}" for path, (_, digest) in sorted(facts.files.items()))
    total = size(sum(length for length, _ in facts.files.values()))
    return (
        "## How to verify\n\n"
        f"The files ({total}) are byte for byte those that the checkpoint's manifest names. In this folder, "
        "`sha256sum -c` with these lines says whether they still are:\n\n"
        f"```\n{sums}\n```\n\n"
        "A card can be rewritten together with the files. Whoever takes part in the run, or trains it, has "
        "the signed manifest: there `nous-node checkpoints show` prints the checkpoint hash and the weights "
        "hash of a version, and `nous-node checkpoints verify` compares every chunk and every tensor with "
        "it. The "
        'weights hash is the SHA-256 of `"nous/weights/1\\0"` and the canonical msgpack of a map from each '
        "tensor's name to the SHA-256 of its bytes, in whatever files they lie."
    )


def _table(title: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"| {key} | {value} |" for key, value in rows]
    return "\n".join([f"## {title}", "", "| | |", "| --- | --- |", *lines])


def _code(text: str) -> str:
    return f"`{text}`"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
