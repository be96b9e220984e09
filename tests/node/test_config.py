"""Settings from a file, the environment and flags."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.envs.access import Access
from nous_node.node.config import (
    Settings,
    _value,
    default_memory,
    default_threads,
    load_settings,
    parse_rate,
    parse_size,
    unknown_variables,
)
from nous_node.node.home import Home, StorageError
from nous_node.protocol.errors import LocalError


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home.open(tmp_path / "home")


def written(home: Home, text: str) -> Path:
    path = home.path / "settings.toml"
    path.write_text(text)
    return path


def test_nobody_has_to_look_for_neighbours(home: Home) -> None:
    assert load_settings(home, None, {}, {}).neighbours == 8
    assert load_settings(home, written(home, "neighbours = 0"), {}, {}).neighbours == 0
    with pytest.raises(LocalError, match="a whole number from 0 to 32"):
        load_settings(home, None, {"NOUS_NODE_NEIGHBOURS": "33"}, {})


def test_defaults_leave_the_machine_usable(home: Home) -> None:
    loaded = load_settings(home, None, {}, {})
    assert 1 <= loaded.threads <= max(1, (os.cpu_count() or 1) // 2)
    assert loaded.nice == 10
    assert loaded.memory == default_memory()
    assert (loaded.device, loaded.upload, loaded.env) == ("cpu", None, ())


def test_flags_go_over_the_environment_and_that_over_the_file(home: Home) -> None:
    written(home, 'threads = 3\nnice = 1\nmemory = "1GiB"\nupload = "500KB/s"\n')
    environ = {"NOUS_NODE_NICE": "2", "NOUS_NODE_MEMORY": "2GiB", "HOME": "/nowhere"}
    loaded = load_settings(home, None, environ, {"memory": "3GiB", "threads": None})
    assert (loaded.threads, loaded.nice) == (3, 2)
    assert loaded.memory == 3 << 30
    assert loaded.upload == 500_000


def test_a_file_that_is_named_is_read_instead_of_the_homes(home: Home, tmp_path: Path) -> None:
    written(home, "threads = 3\n")
    other = tmp_path / "other.toml"
    other.write_text("nice = 5\n")
    loaded = load_settings(home, other, {}, {"threads": 1})
    assert (loaded.threads, loaded.nice) == (1, 5)


def test_lists_come_from_every_source(home: Home) -> None:
    written(home, 'listen = ["/ip4/127.0.0.1/tcp/1", "/ip6/::/tcp/2"]\n')
    loaded = load_settings(home, None, {"NOUS_NODE_ENV": "sort-digits, other"}, {})
    assert loaded.listen == ("/ip4/127.0.0.1/tcp/1", "/ip6/::/tcp/2")
    assert loaded.env == ("sort-digits", "other")
    assert load_settings(home, None, {}, {"env": ["one"]}).env == ("one",)


def test_a_run_is_told_to_the_local_network_unless_that_is_turned_off(home: Home) -> None:
    assert load_settings(home, None, {}, {"mdns": None}).mdns
    assert not load_settings(home, None, {"NOUS_NODE_MDNS": "false"}, {}).mdns
    assert load_settings(home, None, {"NOUS_NODE_MDNS": "0"}, {"mdns": True}).mdns


def test_addresses_are_announced_as_they_are(home: Home) -> None:
    places = ["/dns4/node.example.org/tcp/4001", "/ip6/2001:db8::7/tcp/4001"]
    assert load_settings(home, None, {}, {"announce": places}).announce == tuple(places)


def test_a_port_that_was_asked_for_is_the_one_even_if_it_is_any(home: Home) -> None:
    fixed, free = ("/ip4/0.0.0.0/tcp/4001",), "/ip4/0.0.0.0/tcp/0"
    assert load_settings(home, None, {}, {"listen": None}, listen=fixed).listen == fixed
    assert load_settings(home, None, {}, {"listen": [free]}, listen=fixed).listen == (free,)
    assert load_settings(home, None, {"NOUS_NODE_LISTEN": free}, {}, listen=fixed).listen == (free,)
    assert load_settings(home, None, {}, {}).listen == (free,)


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (123, 123),
        ("123", 123),
        ("123 B", 123),
        ("2GiB", 2 << 30),
        ("2gib", 2 << 30),
        ("2Gi", 2 << 30),
        ("1.5 MiB", 3 << 19),
        ("500MB", 500_000_000),
        ("500k", 500_000),
        ("1TB", 10**12),
    ],
)
def test_sizes_are_read_in_powers_of_1000_or_1024(raw: object, size: int) -> None:
    assert parse_size(raw) == size


@pytest.mark.parametrize(
    "raw", [0, -1, True, 1.5, None, "", "GiB", "1e9", "-1GB", "1XB", "1GB/s", "0", "0.1", "∞"]
)
def test_what_is_no_size_is_refused(raw: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_size(raw)


def test_rates_may_name_the_second_or_be_none() -> None:
    assert parse_rate("1MB/s") == parse_rate("1MB") == parse_rate(1_000_000) == 1_000_000
    assert parse_rate("none") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("thread = 3", ["settings.toml", "'thread'", "Did you mean 'threads'?", "memory"]),
        ("threads = 0", ["settings.toml", "threads cannot be 0", "from 1 to"]),
        ("threads = true", ["threads cannot be True"]),
        ('threads = "many"', ["threads cannot be 'many'"]),
        ("threads = 1.5", ["threads cannot be 1.5"]),
        ("nice = 20", ["from 0 to 19"]),
        ('memory = "much"', ["memory cannot be 'much'", "4GiB"]),
        ('device = "gpu"', ["device cannot be 'gpu'", "cuda:N"]),
        ('listen = ["localhost:80"]', ["listen", "/ip4/0.0.0.0/tcp/4001"]),
        ('announce = ["/ip4/192.0.2.7/udp/1"]', ["announce cannot be", "/dns4/node.example.org/tcp/4001"]),
        ("mdns = 3", ["mdns cannot be 3", "true or false"]),
        ("listen = 80", ["listen cannot be 80"]),
        ('env = [""]', ["env", "names of environments"]),
        ("trust_env = 1", ["trust_env cannot be 1", "names of environments or families"]),
        ('env_server = ["openenv/echo"]', ["env_server cannot be", "NAME=URL"]),
        ('env_server = ["openenv/echo=localhost:80"]', ["env_server cannot be"]),
        ('env_server = ["a=http://x", "a=http://y"]', ["env_server cannot be", "once for each"]),
        ('env_server = ["=http://x"]', ["env_server cannot be"]),
        ("upload = 0", ["upload cannot be 0", "none"]),
        ("[table]\na = 1", ["no setting 'table'"]),
        ("threads = 1\nnice = x", ["no TOML", "line 2"]),
    ],
)
def test_a_wrong_setting_is_told_with_what_is_allowed(home: Home, text: str, words: list[str]) -> None:
    written(home, text)
    with pytest.raises(LocalError) as caught:
        load_settings(home, None, {}, {})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_what_environments_may_do_is_of_the_home_and_its_owner(home: Home) -> None:
    access = load_settings(home, None, {}, {}).access
    assert access == Access(folder=str(home.path / "envs"), hidden=(str(home.path),))
    flags = {"trust_env": ["coins", "cards"], "env_server": ["openenv/echo=http://127.0.0.1:8000/?a=b"]}
    access = load_settings(home, None, {}, flags).access
    assert access.trusts("coins")
    assert access.trusts("cards/whist")
    assert not access.trusts("cardsharp")
    assert access.servers == {"openenv/echo": "http://127.0.0.1:8000/?a=b"}


def test_bounds_of_environments_are_settings_without_a_flag(home: Home) -> None:
    environ = {"NOUS_NODE_ENV_MEMORY": "512MiB", "NOUS_NODE_ENV_SECONDS": "5"}
    access = load_settings(home, written(home, "env_seconds = 9"), environ, {}).access
    assert (access.memory, access.seconds) == (512 << 20, 5)
    with pytest.raises(LocalError, match="env_seconds cannot be"):
        load_settings(home, None, {"NOUS_NODE_ENV_SECONDS": "0"}, {})


def test_what_environments_may_do_is_no_setting_by_itself(home: Home) -> None:
    with pytest.raises(LocalError, match="no setting 'access'"):
        load_settings(home, written(home, "access = 1"), {}, {})


def test_a_wrong_variable_or_flag_is_told_by_its_name(home: Home) -> None:
    with pytest.raises(LocalError, match=r"NOUS_NODE_THREADS: threads cannot be 'x'"):
        load_settings(home, None, {"NOUS_NODE_THREADS": "x"}, {})
    with pytest.raises(LocalError, match=r"--device: device cannot be 'tpu'"):
        load_settings(home, None, {}, {"device": "tpu"})
    with pytest.raises(LocalError, match=r"--env-server: env_server cannot be"):
        load_settings(home, None, {}, {"env_server": ["x"]})


def test_variables_that_are_no_settings_are_let_be(home: Home) -> None:
    environ = {"NOUS_NODE_HOME": "/x", "NOUS_NODE_WORKER_NICE": "3"}
    assert isinstance(load_settings(home, None, environ, {}), Settings)


def test_a_variable_that_is_no_setting_is_told_and_ignored(home: Home) -> None:
    environ = {"NOUS_NODE_TREADS": "1", "NOUS_NODE_HOME": "/x", "NOUS_NODE_NICE": "3", "NODE_ENV": "x"}
    assert load_settings(home, None, environ, {}).nice == 3
    (told,) = unknown_variables(environ)
    assert "NOUS_NODE_TREADS is no setting" in told
    assert "Did you mean 'threads'?" in told


def test_a_named_file_that_is_not_there_is_told(home: Home, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"none\.toml"):
        load_settings(home, tmp_path / "none.toml", {}, {})


@pytest.mark.parametrize("data", [b"\xff\xfe", b"#" * 70_000])
def test_a_file_of_something_else_is_told(home: Home, data: bytes) -> None:
    written(home, "").write_bytes(data)
    with pytest.raises(LocalError, match=r"settings\.toml"):
        load_settings(home, None, {}, {})


def test_a_container_counts_as_the_machine(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    limit.write_text(f"{1 << 20}\n")
    assert default_memory(limit) == 1 << 19
    limit.write_text("max\n")
    assert default_memory(limit) == default_memory(tmp_path / "none")
    assert default_threads() >= 1


raw_values = st.one_of(
    st.text(max_size=12), st.integers(), st.floats(), st.booleans(), st.lists(st.text(max_size=3))
)


@settings(max_examples=50)
@given(raw_values, st.sampled_from(Settings.__struct_fields__))
def test_no_value_crashes_a_reader(raw: object, name: str) -> None:
    with contextlib.suppress(LocalError):
        _value("here", name, raw)
