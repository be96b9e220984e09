"""Deltas as files: those of the vectors again, random tensors, damaged bytes, what is left on the disk."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nous_node.node.delta_files import apply_delta, write_delta
from nous_node.protocol.deltas import EXPONENTS, SEGMENT
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.layout import MAX_BRACKETS, WIDTHS, read_layout

CASES = json.loads((Path(__file__).parents[2] / "specs" / "vectors" / "deltas.json").read_text())["cases"]
WHOLE = [case for case in CASES if "delta" in case and "code" not in case]
REFUSED = [case for case in CASES if "code" in case]
MOST = 1 << 40
Case = dict[str, Any]
Tensors = Mapping[str, tuple[str, bytes]]
"""Name -> data type and bytes."""


def raw(data: str | list[list[Any]]) -> bytes:
    """Hex, or runs of it: [hex, count]."""
    if isinstance(data, str):
        return bytes.fromhex(data)
    return b"".join(bytes.fromhex(piece) * count for piece, count in data)


def safetensors(tensors: Tensors) -> bytes:
    header, at = {}, 0
    for name, (dtype, data) in tensors.items():
        shape = [len(data) // WIDTHS[dtype]]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, data in tensors.values())


def hashes(tensors: Tensors) -> dict[str, bytes]:
    return {name: hashlib.sha256(data).digest() for name, (_, data) in tensors.items()}


class Folder:
    """Files of one test, by content."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def file(self, name: str, data: bytes) -> Path:
        (self.path / name).write_bytes(data)
        return self.path / name

    def delta(self, old: bytes, new: bytes, most: int = MOST) -> bytes | None:
        """What `write_delta` writes; nothing else may be left."""
        out = self.path / "delta"
        out.unlink(missing_ok=True)
        size = write_delta(self.file("old", old), self.file("new", new), out, most=most)
        assert {path.name for path in self.path.iterdir()} <= {"old", "new", "delta", "result"}
        if size is None:
            assert not out.exists()
            return None
        assert out.stat().st_size == size
        return out.read_bytes()

    def result(self, old: bytes, delta: bytes, tensors: Mapping[str, bytes]) -> bytes:
        """What `apply_delta` writes; nothing is left of a refused one, and the parent stays."""
        parent, out = self.file("old", old), self.path / "result"
        out.unlink(missing_ok=True)
        try:
            apply_delta(parent, self.file("delta", delta), out, tensors)
        except RemoteError:
            assert not out.exists()
            raise
        finally:
            assert parent.read_bytes() == old
        return out.read_bytes()


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def wanted(case: Case) -> dict[str, bytes]:
    return {name: bytes.fromhex(digest) for name, digest in case["tensors"].items()}


@pytest.mark.parametrize("case", WHOLE, ids=lambda case: case["comment"][:60])
def test_a_delta_that_is_written_for_the_files_of_a_vector_leads_there(case: Case, folder: Folder) -> None:
    parent, result = raw(case["parent"]), raw(case["result"])
    ours = folder.delta(parent, result)
    assert ours is not None
    assert folder.result(parent, ours, wanted(case)) == result


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["comment"][:60])
def test_nothing_is_left_of_a_refused_delta(case: Case, folder: Folder) -> None:
    with pytest.raises(RemoteError):
        folder.result(raw(case["parent"]), raw(case["delta"]), wanted(case))


def test_at_least_half_of_the_vectors_are_negative() -> None:
    assert sum("code" in case for case in CASES) * 2 >= len(CASES)


def patterns(dtype: str) -> st.SearchStrategy[int]:
    """Bit patterns, with many of those that are special as floats."""
    bits = 8 * WIDTHS[dtype]
    half = 1 << (bits - 1)
    special = [0, 1, half - 1, half, half + 1, 2 * half - 1]
    special += {"BF16": [0x7F80, 0xFF80, 0x7FC0], "F16": [0x7C00, 0xFC00, 0x7E00]}.get(dtype, [])
    return st.one_of(st.sampled_from(special), st.integers(0, 2 * half - 1))


@st.composite
def changed(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """The tensors of a file before and after: some, all or none of their elements are others."""
    old, new = {}, {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(sorted(WIDTHS)))
        width, runs = WIDTHS[dtype], draw(st.lists(st.integers(0, 600), max_size=6))
        before, after = [], []
        for run in runs:
            before += [draw(patterns(dtype))] * run + [draw(patterns(dtype))]
            after += [*before[len(after) : -1], draw(patterns(dtype))]
        name = draw(st.sampled_from("abcdé")) + str(number)
        old[name], new[name] = (
            (dtype, b"".join(one.to_bytes(width, "little") for one in side)) for side in (before, after)
        )
    return old, new


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed())
def test_a_delta_makes_the_new_file_of_the_old_one(folder: Folder, files: tuple[Tensors, Tensors]) -> None:
    old, new = files
    delta = folder.delta(safetensors(old), safetensors(new))
    assert delta is not None
    assert folder.result(safetensors(old), delta, hashes(new)) == safetensors(new)


DENSITIES = [0.001, 0.05, 0.3, 1.0]


@pytest.mark.parametrize(
    ("dtype", "share"),
    [
        *((dtype, 0.2) for dtype in sorted(WIDTHS)),
        *((dtype, share) for dtype in EXPONENTS for share in DENSITIES),
    ],
)
def test_segments_of_all_types_and_densities(dtype: str, share: float, folder: Folder) -> None:
    rng = np.random.default_rng(7)
    count = SEGMENT + 3
    before = rng.integers(0, 1 << (8 * WIDTHS[dtype]), count, f"<u{WIDTHS[dtype]}")
    after = before + (rng.random(count) < share).astype(before.dtype)
    old = {"b": (dtype, before.tobytes()), "a": (dtype, b"")}
    new = {"b": (dtype, after.tobytes()), "a": (dtype, b"")}
    delta = folder.delta(safetensors(old), safetensors(new))
    assert delta is not None
    assert folder.result(safetensors(old), delta, hashes(new)) == safetensors(new)
    if dtype in EXPONENTS:
        bits = {0.001: 0.02, 0.05: 0.5, 0.2: 1.3, 0.3: 1.8, 1.0: 1.8}[share]  # gaps, and steps up or down
        assert 8 * len(delta) < bits * count


def test_changes_that_follow_from_the_size_of_weights_cost_few_bits(folder: Folder) -> None:
    """As Adam makes them: each weight moves by the rate, and bf16 shows it where the weight is small."""
    rng = np.random.default_rng(7)
    before = (rng.normal(0, 0.02, SEGMENT).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    weights = (before.astype(np.uint32) << 16).view(np.float32)
    moved = weights + np.float32(1e-5) * rng.choice([-1, 1], SEGMENT).astype(np.float32)
    after = ((moved.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)
    old, new = {"w": ("BF16", before.tobytes())}, {"w": ("BF16", after.tobytes())}
    changes = np.count_nonzero(before != after)
    assert 0.1 * SEGMENT < changes < 0.2 * SEGMENT
    delta = folder.delta(safetensors(old), safetensors(new))
    assert delta is not None
    assert 8 * len(delta) < 6 * changes
    assert folder.result(safetensors(old), delta, hashes(new)) == safetensors(new)


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_pattern_becomes_every_other_by_a_gap(dtype: str, folder: Folder) -> None:
    every = np.arange(1 << 16, dtype="<u2")
    for shift in (1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        old, new = {"w": (dtype, every.tobytes())}, {"w": (dtype, (every + np.uint16(shift)).tobytes())}
        delta = folder.delta(safetensors(old), safetensors(new))
        assert delta is not None
        assert folder.result(safetensors(old), delta, hashes(new)) == safetensors(new)


def test_a_delta_that_would_be_too_long_is_not_written(folder: Folder) -> None:
    rng = np.random.default_rng(7)
    old = safetensors({"w": ("U8", rng.bytes(100_000))})
    new = safetensors({"w": ("U8", rng.bytes(100_000))})
    whole = folder.delta(old, new)
    assert whole is not None
    assert folder.delta(old, new, most=len(whole)) == whole
    assert folder.delta(old, new, most=len(whole) - 1) is None
    assert folder.delta(old, new, most=0) is None
    assert folder.delta(old, old, most=len(whole)) is not None


def test_no_delta_of_a_file_that_is_damaged(folder: Folder) -> None:
    good = safetensors({"w": ("U8", b"1234")})
    for damaged in (b"", good[:5], good[:-1], good + b"0", bytes(100)):
        assert folder.delta(good, damaged) is None
        assert folder.delta(damaged, good) is None
        assert folder.delta(damaged, damaged) is None


def test_a_parent_that_has_changed_on_disk_is_found(folder: Folder) -> None:
    """Also where the damage lies in a tensor that the delta does not touch."""
    old, new = {"a": ("U8", b"1234"), "b": ("U8", b"1")}, {"a": ("U8", b"1234"), "b": ("U8", b"2")}
    delta = folder.delta(safetensors(old), safetensors(new))
    assert delta is not None
    damaged = {"a": ("U8", b"1235"), "b": ("U8", b"1")}
    with pytest.raises(RemoteError) as caught:
        folder.result(safetensors(damaged), delta, hashes(new))
    assert caught.value.code == Code.HASH_MISMATCH


def test_a_missing_file_is_an_error_of_the_disk(folder: Folder) -> None:
    good = folder.file("old", safetensors({"w": ("U8", b"1")}))
    missing, out = folder.path / "missing", folder.path / "result"
    with pytest.raises(FileNotFoundError):
        apply_delta(good, missing, out, {})
    with pytest.raises(FileNotFoundError):
        write_delta(good, missing, out, most=MOST)
    with pytest.raises(FileNotFoundError):
        write_delta(good, good, missing / "delta", most=MOST)
    assert not out.exists()


def test_a_header_with_one_bracket_too_many_is_refused() -> None:
    def header(brackets: int) -> bytes:
        return ('{"__metadata__":{"x":"' + "[" * (brackets - 2) + '"}}').encode()

    most = header(MAX_BRACKETS)
    assert read_layout(most, 8 + len(most)) == []
    with pytest.raises(RemoteError) as caught:
        read_layout(header(MAX_BRACKETS + 1), 9 + len(most))
    assert caught.value.code == Code.OUT_OF_RANGE


def test_a_shape_of_a_million_lengths_costs_no_time() -> None:
    """Their product would have eight megabytes and take minutes."""
    shape = ",".join(["9223372036854775807"] * 100_000)
    header = f'{{"w":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}'.encode()
    with pytest.raises(RemoteError) as caught:
        read_layout(header, 9 + len(header))
    assert caught.value.code == Code.SIZE_MISMATCH


MUTATIONS = 1_000


def mutated(data: bytes, entropy: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(entropy.randint(1, 3)):
        at = entropy.randrange(len(found) + 1)
        match entropy.randrange(4):
            case 0:
                found[at : at + 1] = entropy.randbytes(1)
            case 1:
                del found[at : at + entropy.randint(1, 9)]
            case 2:
                found[at:at] = entropy.randbytes(entropy.randint(1, 4))
            case _:
                found[at : at + 1] = bytes([entropy.choice([0, 1, 0x7F, 0x80, 0xFE, 0xFF])])
    return bytes(found)


def test_damaged_deltas_and_parents_are_refused_or_lead_to_the_right_file(folder: Folder) -> None:
    entropy = random.Random(11)
    good = [
        case for case in CASES if "result" in case and "delta" in case and isinstance(case["parent"], str)
    ]
    refused = 0
    for number in range(MUTATIONS):
        case = entropy.choice(good)
        parent, delta = raw(case["parent"]), raw(case["delta"])
        if number % 4 == 0:
            parent = mutated(parent, entropy)
        else:
            delta = mutated(delta, entropy)
        tensors = {name: bytes.fromhex(digest) for name, digest in case["tensors"].items()}
        try:
            result = folder.result(parent, delta, tensors)
        except RemoteError:
            refused += 1
        else:
            found = {
                place.name: hashlib.sha256(
                    result[place.offset : place.offset + place.elements * place.width]
                ).digest()
                for place in read_layout(result[8 : 8 + int.from_bytes(result[:8], "little")], len(result))
            }
            assert found.items() <= tensors.items()
    assert refused > 0.8 * MUTATIONS


def test_it_works_without_torch() -> None:
    program = (
        "import sys, nous_node.node.delta_files; print(sorted({'torch', 'safetensors'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
