"""The chapters, their CDDL, constants, assigned names and vectors agree with each other and with the code."""

from __future__ import annotations

import importlib
import json
import re
import struct
import tomllib
from pathlib import Path
from typing import Any

import pycddl
import pytest

from nous_node.envs.template_functions import FILTERS, METHODS, TESTS
from nous_node.protocol import constants
from nous_node.protocol.encoding import decode
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.gossip import IGNORED

TREE = Path(__file__).parents[2]
SPECS = TREE / "specs"
CHAPTERS = sorted(SPECS.glob("[0-9][0-9]-*.md"))
FURTHER = [*sorted(SPECS.glob("envs/*.md")), *sorted(SPECS.glob("models/*.md"))]
TEXTS = {path.name: path.read_text() for path in [*CHAPTERS, *FURTHER]}
CONFIGS = sorted(SPECS.glob("config/*.toml"))
VECTORS = {path.stem: json.loads(path.read_text()) for path in sorted(SPECS.glob("vectors/*.json"))}
ID = r"[A-Z]{3}-[0-9]+"


def defined() -> dict[str, str]:
    """Requirement id -> chapter: those that begin an item in bold, or stand in brackets at its end."""
    found: dict[str, str] = {}
    for name, text in TEXTS.items():
        for match in re.finditer(rf"\*\*\[({ID})\]\*\*", text):
            assert match[1] not in found, f"{match[1]} is defined twice"
            found[match[1]] = name
    found["CNV-1"] = "00-conventions.md"
    return found


def rows(text: str, heading: str) -> list[list[str]]:
    """Cells of the table below a heading, without its head."""
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


ASSIGNED = (SPECS / "assigned.md").read_text()


def test_error_codes_are_those_assigned() -> None:
    assert [row[0] for row in rows(ASSIGNED, "Error codes")] == [code.value for code in Code]


def test_ignored_codes_are_soft() -> None:
    soft = {row[0] for row in rows(ASSIGNED, "Error codes") if row[1] == "yes"}
    assert {code.value for code in IGNORED} <= soft
    others = {"key-too-new", "withheld", "repetition", "not-found", "unavailable"}
    assert soft - {code.value for code in IGNORED} == others


def test_the_gossip_chapter_lists_the_ignored_codes() -> None:
    line = next(line for line in TEXTS["04-gossip.md"].splitlines() if "`expired` `future-dated`" in line)
    assert set(re.findall(r"`([a-z-]+)`", line)) == {code.value for code in IGNORED}


def test_kinds_and_domains_are_those_assigned() -> None:
    assert {row[0] for row in rows(ASSIGNED, "Kinds")} == {kind.value for kind in Kind}
    domains = {row[0] for row in rows(ASSIGNED, "Domains")}
    ours = {value for name, value in vars(constants).items() if name.startswith("DOMAIN_")}
    assert {domain.rstrip(b"\0").decode() for domain in ours} == {
        domain
        for domain in domains
        if not domain.startswith(
            ("nous/sort-digits", "nous/proof", "nous/env/", "nous/held-out", "nous/streams")
        )
    }


def test_every_error_code_is_named_in_a_chapter() -> None:
    text = "\n".join(TEXTS.values())
    assert {code.value for code in Code if f"`{code.value}`" not in text} == set()


def plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode() if value.startswith(b"nous") else value.hex()
    return list(value) if isinstance(value, tuple) else value


CONFIG = tomllib.loads((SPECS / "config" / "protocol.toml").read_text())


@pytest.mark.parametrize("name", CONFIG)
def test_constants_are_those_of_the_config_file(name: str) -> None:
    module = importlib.import_module(f"nous_node.protocol.{name}")
    for key, value in CONFIG[name].items():
        assert plain(getattr(module, key.upper())) == value, key


def test_no_constant_is_missing_in_the_config_file() -> None:
    names = {name.lower() for name in vars(constants) if re.fullmatch("[A-Z][A-Z0-9_]*", name)}
    assert names == set(CONFIG["constants"])


def test_limits_in_chapters_are_those_of_the_config_files() -> None:
    known: dict[str, Any] = {}
    for path in CONFIGS:
        for table in tomllib.loads(path.read_text()).values():
            known |= table
    told = 0
    for name, text in TEXTS.items():
        if "\n## Limits\n" in text and "| constant | value |" in text:
            for constant, value, *_ in rows(text, "Limits"):
                assert float(value.split()[0].replace(",", "")) == known[constant], f"{name}: {constant}"
                told += 1
    assert told >= 9


LEAST_COVERED = 0.9
"""Share of the requirements that a vector or a live check serves."""


def live() -> set[str]:
    """The requirements that the live checks name."""
    lines = (SPECS / "live-checks.md").read_text().splitlines()
    return {rule for line in lines if line.startswith("| ") for rule in re.findall(ID, line.split("|")[2])}


def test_every_requirement_has_a_vector_a_live_check_or_a_reason() -> None:
    served = {rule for file in VECTORS.values() for case in file["cases"] for rule in case["requires"]}
    excused = set(re.findall(rf"^\| ({ID}) \|", (SPECS / "untestable.md").read_text(), re.MULTILINE))
    required, covered = set(defined()), served | live()
    assert covered - required == set(), "vectors or live checks name requirements that no chapter defines"
    assert required - covered - excused == set(), "requirements without a vector, live check or reason"
    assert excused & covered == set(), "requirements that need no excuse"
    assert excused - required == set()
    assert len(covered) >= LEAST_COVERED * len(required)


def test_the_table_of_ops_is_that_of_the_adapters() -> None:
    ops = tomllib.loads((SPECS / "vectors" / "ops.toml").read_text())
    told = (
        TEXTS["14-conformance.md"].split("<!-- ops: vectors/ops.toml -->")[1].split("<!-- end of ops -->")[0]
    )
    rows = [line.strip("|").split("|") for line in told.strip().splitlines()[2:]]
    columns = {"in": 2, "also": 3, "out": 4}
    assert [row[0].strip(" `") for row in rows] == list(ops)
    for row, op in zip(rows, ops.values(), strict=True):
        assert {name: re.findall("`([^`]+)`", row[at]) for name, at in columns.items()} == {
            name: op.get(name, []) for name in columns
        }


def test_the_chapter_of_conversations_names_what_templates_may_use() -> None:
    lines = [line for line in TEXTS["chat.md"].splitlines() if line.startswith("| ")]
    told = {line.split("|")[1].strip(): re.findall("`([^`]+)`", line.split("|")[2]) for line in lines}
    assert told["filters"] == sorted(FILTERS)
    assert told["tests"] == sorted(TESTS)
    methods = ("a text", "a map", "a list", "`loop`")
    for owner, (_, names) in zip(methods, METHODS, strict=True):
        assert told[f"methods of {owner}"] == sorted(names)


def test_every_file_is_asked_of_some_client() -> None:
    part = TEXTS["14-conformance.md"].split("\n## What a client has to pass\n")[1].split("\n## ")[0]
    named = {
        name for line in part.splitlines() if line.startswith("|") for name in re.findall("`([^`]+)`", line)
    }
    assert named == set(VECTORS)


def test_requirements_that_chapters_mention_exist() -> None:
    families = {rule[:4] for rule in defined()}
    for name, text in TEXTS.items():
        for rule in re.findall(rf"\b({ID})\b", text):
            assert rule in defined() or rule[:4] not in families, f"{name} mentions {rule}"


def test_requirements_that_the_code_cites_exist() -> None:
    known = set(defined())
    for folder in ("protocol", "envs", "trainer", "node"):
        for path in (TREE / folder).glob("*.py"):
            for rule in re.findall(rf"\[({ID})\]", path.read_text()):
                assert rule in known, f"{folder}/{path.name} cites {rule}"


def test_chapters_have_their_parts() -> None:
    for name, text in TEXTS.items():
        assert re.search(r"^\| Stage \| \d", text, re.MULTILINE), name
        assert re.search(r"^\| Revision \| r\d", text, re.MULTILINE), name
        for part in ("Overview", "Rationale", "Vectors"):
            if name != "00-conventions.md" or part != "Overview":
                assert f"\n## {part}\n" in text, f"{name} has no {part}"


def test_the_index_names_stage_and_revision_of_each_chapter() -> None:
    index = (SPECS / "README.md").read_text()
    for path in [*CHAPTERS, *FURTHER]:
        text = TEXTS[path.name]
        stage = re.search(r"^\| Stage \| (\d)", text, re.MULTILINE)
        revision = re.search(r"^\| Revision \| (r\d+)", text, re.MULTILINE)
        assert stage is not None
        assert revision is not None
        target = re.escape(path.relative_to(SPECS).as_posix())
        assert re.search(rf"\({target}\) \| [^|]+ \| {stage[1]} \| {revision[1]} \|", index), path.name
        if "\n## Revisions\n" in text:
            assert f"{revision[1]}: " in text.split("\n## Revisions\n")[1], path.name


def test_links_lead_somewhere() -> None:
    for path in SPECS.rglob("*.md"):
        for target in re.findall(r"[\w`]\]\(([^)#*]+)\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.name} links to {target}"


BLOCK = re.compile(r"^```cddl\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CDDL = {path.stem: path.read_text() for path in sorted(SPECS.glob("cddl/*.cddl"))}


def test_cddl_files_are_cut_from_the_chapters() -> None:
    made = {}
    for path in CHAPTERS:
        blocks = BLOCK.findall(TEXTS[path.name])
        if blocks:
            made[path.stem] = f"; {path.name}\n\n" + "\n".join(blocks)
    assert made == CDDL, "run `make vectors`"


def cbor(value: Any) -> bytes:
    """The value in CBOR, which is what CDDL tools read."""
    match value:
        case None | bool():
            return {None: b"\xf6", False: b"\xf4", True: b"\xf5"}[value]
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case float():
            return b"\xfb" + struct.pack(">d", value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            return _head(3, len(value.encode())) + value.encode()
        case list():
            return _head(4, len(value)) + b"".join(map(cbor, value))
        case _:
            pairs = b"".join(cbor(key) + cbor(item) for key, item in value.items())
            return _head(5, len(value)) + pairs


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    return bytes([major << 5 | 27]) + number.to_bytes(8, "big")


def accepts(rule: str, value: Any) -> bool:
    schema = pycddl.Schema(f"start = {rule}\n" + "\n".join(CDDL.values()))
    try:
        schema.validate_cbor(cbor(value))
    except pycddl.ValidationError:
        return False
    return True


def content(envelope: str) -> Any:
    return decode(unseal(bytes.fromhex(envelope)).content(), 1 << 24, 1 << 18)


BEYOND_CDDL = {
    "enc and size as nil mean absent",
    "a further element is ignored",
    "a further element of an answer is ignored",
}
"""Positive cases that the chapters allow in words."""


def samples() -> list[tuple[str, Any]]:
    """Rule and value of every positive vector that has a structure."""
    found: list[tuple[str, Any]] = []
    for name, rule, field in (
        ("rollouts", "rollout-group", "body"),
        ("references", "reference", "body"),
        ("runs", "run-manifest", "manifest"),
        ("checkpoints", "checkpoint-manifest", "manifest"),
        ("receipts", "receipts", "body"),
        ("hellos", "hello", "body"),
        ("envelopes", "envelope", "envelope"),
        ("envelopes", "signed", "signed"),
    ):
        for case in VECTORS[name]["cases"]:
            if "code" not in case and case["comment"] not in BEYOND_CDDL:
                found.append((rule, decode(bytes.fromhex(case[field]), 1 << 24, 1 << 18)))
    for case in VECTORS["proofs"]["cases"]:
        if "code" not in case:
            outer: Any = decode(bytes.fromhex(case["file"]), 1 << 24)
            found += [("proof", outer), ("proof-signed", decode(outer["signed"], 1 << 24))]
    for case in VECTORS["streams"]["cases"]:
        if "code" not in case:
            found.append((case["message"], decode(bytes.fromhex(case["frame"])[4:], 1 << 24)))
    return found


def test_cddl_accepts_the_positive_vectors() -> None:
    for rule, value in samples():
        assert accepts(rule, value), (rule, value)


def test_cddl_refuses_what_is_of_another_shape() -> None:
    for rule, value in samples():
        assert not accepts(rule, [value]), rule
        if rule not in ("head-reply", "blob-reply", "have-reply"):  # whose keys are all optional
            needed = "run" if rule == "have-request" else next(iter(value))
            rest = {key: one for key, one in value.items() if key != needed}
            rest = {**value, "kind": 1} if "kind" in value else rest
            assert not accepts(rule, rest), rule


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """The part of JSON Schema that our schemas use."""
    if "anyOf" in schema:
        return any(conforms(value, one) for one in schema["anyOf"])
    match schema.get("type"):
        case "object":
            if not isinstance(value, dict):
                return False
            known = schema.get("properties", {})
            complete = all(name in value for name in schema.get("required", []))
            closed = schema.get("additionalProperties", True) or set(value) <= set(known)
            return (
                complete
                and closed
                and all(conforms(value[name], known[name]) for name in value if name in known)
            )
        case "array":
            return isinstance(value, list) and all(conforms(item, schema.get("items", {})) for item in value)
        case "string":
            return isinstance(value, str) and bool(re.search(schema.get("pattern", ""), value))
        case "integer":
            return isinstance(value, int) and not isinstance(value, bool)
        case "number":
            return isinstance(value, int | float) and not isinstance(value, bool)
        case "boolean":
            return isinstance(value, bool)
        case _:
            return True


@pytest.mark.parametrize("name", VECTORS)
def test_vectors_conform_to_their_schema(name: str) -> None:
    schema = json.loads((SPECS / "vectors" / VECTORS[name]["schema"]).read_text())
    assert conforms(VECTORS[name], schema)
    assert not conforms({**VECTORS[name], "more": 1}, schema)
    assert not conforms({**VECTORS[name], "cases": [{"comment": 1}]}, schema)


def test_generators_and_chapters_are_in_the_index() -> None:
    index = (SPECS / "README.md").read_text()
    for path in [*CHAPTERS, *FURTHER]:
        assert f"({path.relative_to(SPECS).as_posix()})" in index
    for name in VECTORS:
        assert f"`{name}`" in index, f"no step is tested with {name}"
