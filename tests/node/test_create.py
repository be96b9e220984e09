"""Runs are made whole and checked, or refused with a sentence and nothing left behind."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import msgspec
import pytest

from nous_node.envs.environment import Message
from nous_node.envs.errors import BadChat, EnvError
from nous_node.node.calibration import embedded_thresholds
from nous_node.node.create import create_run, folder_entries, stop_ids
from nous_node.node.env_policy import trial
from nous_node.node.learning import EXPLAINED, Learning, learning_text, read_learning
from nous_node.node.plan import (
    DEFAULT_MODEL,
    DEFAULT_MODEL_HASH,
    LOOSE_BF16,
    EnvironmentPlan,
    RunPlan,
    read_plan,
    with_environments,
)
from nous_node.node.policy_settings import policy_settings
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.checkpoints import files_hash
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import run_id
from nous_node.trainer.errors import ModelError
from nous_node.trainer.policy import Policy

ROOT = Identity.from_seed(bytes(32))
NOW = 1_700_000_000_000
PLAN = with_environments(RunPlan(), [])


def model_without(folder: Path, *missing: str) -> RunPlan:
    """The embedded default copied to `folder` without some files, as a plan's model."""
    shutil.copytree(DEFAULT_MODEL, folder, ignore=shutil.ignore_patterns(*missing))
    return msgspec.structs.replace(PLAN, model=str(folder), uncalibrated=True)


def test_run_of_the_embedded_default_is_complete_and_opens_again(tmp_path: Path) -> None:
    made = create_run(tmp_path / "first", "first", ROOT, PLAN, NOW)
    opened = RunFolder.open(tmp_path / "first")
    manifest = opened.manifest
    assert opened == made
    assert opened.run == run_id(manifest.to_bytes())
    assert (manifest.name, manifest.root, manifest.trainers) == ("first", ROOT.key, [ROOT.key])
    assert manifest.base == files_hash(folder_entries(opened.checkpoint(0)))
    assert manifest.thresholds == embedded_thresholds()
    assert (manifest.sampling.mode, manifest.sampling.stop, manifest.sampling.logprobs) == (
        "seeded",
        [258],
        "f32",
    )
    assert manifest.model.dtype == "float32"
    assert manifest.model.bytes == 4 * manifest.model.parameters
    assert [entry.id for entry in manifest.environments] == ["sort-digits"]
    assert read_learning(opened.learning) == Learning()


def test_base_checkpoint_holds_the_weights_in_the_dtype_of_the_run(tmp_path: Path) -> None:
    from nous_node.trainer.checkpoint import read_tensors

    run = create_run(tmp_path / "run", "run", ROOT, PLAN, NOW)
    stored = read_tensors(run.checkpoint(0) / "model.safetensors")
    source = read_tensors(DEFAULT_MODEL / "model.safetensors")
    assert {str(tensor.dtype) for tensor in stored.values()} == {"torch.float32"}
    assert all((stored[name] == source[name].float()).all() for name in stored)
    assert json.loads((run.checkpoint(0) / "config.json").read_text())["dtype"] == "float32"


def test_same_plan_and_time_make_the_same_run(tmp_path: Path) -> None:
    first = create_run(tmp_path / "a", "run", ROOT, PLAN, NOW)
    assert create_run(tmp_path / "b", "run", ROOT, PLAN, NOW).run == first.run
    assert create_run(tmp_path / "c", "run", ROOT, PLAN, NOW + 1).run != first.run


def test_embedded_default_is_the_released_one() -> None:
    # If trainer/default was made anew on purpose, put the new hash into node/plan.py.
    assert files_hash(folder_entries(DEFAULT_MODEL)).hex() == DEFAULT_MODEL_HASH


def test_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    create_run(tmp_path / "run", "run", ROOT, PLAN, NOW)
    with pytest.raises(LocalError, match="already holds a run; give the new one another name"):
        create_run(tmp_path / "run", "run", ROOT, PLAN, NOW)


def test_interrupted_init_may_be_repeated(tmp_path: Path) -> None:
    leftover = tmp_path / "run" / "checkpoints" / "000000"
    leftover.mkdir(parents=True)
    (leftover / "half.safetensors").write_bytes(b"half")
    run = create_run(tmp_path / "run", "run", ROOT, PLAN, NOW)
    assert not (run.checkpoint(0) / "half.safetensors").exists()


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "-flag", "a" * 65, "a\nb"])
def test_run_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(LocalError, match="cannot be called"):
        create_run(tmp_path / "run", name, ROOT, PLAN, NOW)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("tokenizer.json", "has no tokenizer.json"),
        ("config.json", "has no config.json"),
        ("*.safetensors", "has no weights"),
    ],
)
def test_incomplete_model_folder_is_refused(tmp_path: Path, missing: str, sentence: str) -> None:
    plan = model_without(tmp_path / "model", missing)
    with pytest.raises(ModelError, match=sentence):
        create_run(tmp_path / "run", "run", ROOT, plan, NOW)
    assert not (tmp_path / "run").exists()


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    plan = model_without(tmp_path / "model", "*.safetensors")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match="pickle file, which can run code"):
        create_run(tmp_path / "run", "run", ROOT, plan, NOW)


def test_other_model_needs_a_word_about_its_thresholds(tmp_path: Path) -> None:
    plan = model_without(tmp_path / "model")
    home, strict = tmp_path / "home", msgspec.structs.replace(plan, uncalibrated=False, max_tokens=32)
    step = f"model --dtype bfloat16 --env sort-digits --max-tokens 32 --home {home}` first, or add --uncal"
    with pytest.raises(LocalError, match=re.escape(step)):
        create_run(home / "runs" / "a", "a", ROOT, strict, NOW)
    manifest = create_run(tmp_path / "b", "b", ROOT, plan, NOW).manifest
    assert manifest.thresholds == LOOSE_BF16
    assert (manifest.model.dtype, manifest.sampling.logprobs) == ("bfloat16", "f16")


def test_unknown_environment_names_those_that_exist(tmp_path: Path) -> None:
    plan = with_environments(RunPlan(), ["chess"])
    with pytest.raises(EnvError, match=r"no environment 'chess'.*sort-digits"):
        create_run(tmp_path / "run", "run", ROOT, plan, NOW)


def test_answers_that_do_not_fit_the_context_are_refused(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(PLAN, max_tokens=1024)
    with pytest.raises(LocalError, match="do not fit the model's context of 1024"):
        create_run(tmp_path / "run", "run", ROOT, plan, NOW)


def test_flags_choose_environments_and_the_file_keeps_their_config() -> None:
    plan = RunPlan(environments={"a": EnvironmentPlan(2, {"length": 5}), "b": EnvironmentPlan()})
    assert with_environments(plan, []).environments == plan.environments
    assert with_environments(plan, ["a=7", "c"]).environments == {
        "a": EnvironmentPlan(7, {"length": 5}),
        "c": EnvironmentPlan(),
    }


@pytest.mark.parametrize("weight", ["0", "-1", "x", "1.5", "1000001", "²"])
def test_weight_that_is_no_small_whole_number_is_refused(weight: str) -> None:
    with pytest.raises(LocalError, match="whole number from 1 to 1,000,000"):
        with_environments(RunPlan(), [f"a={weight}"])


def test_plan_is_read_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(
        "group = 4\nmax_tokens = 9\n[limits]\ngroups_per_second = 3.5\n"
        "[environments.sort-digits]\nweight = 2\n[environments.sort-digits.config]\nlength = 5\n"
        '[learning]\nrate = 0.01\nadvantage = "rloo"\n'
    )
    run = create_run(tmp_path / "run", "run", ROOT, read_plan(file), NOW)
    manifest = run.manifest
    assert (manifest.group, manifest.sampling.max_tokens, manifest.limits.groups_per_second) == (4, 9, 3.5)
    assert manifest.environments[0].config == {"length": 5}
    learning = read_learning(run.learning)
    assert (learning.rate, learning.advantage) == (0.01, "rloo")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("group = 1", "group"),
        ("grup = 8", "grup"),
        ("group = 8\ngroup = 9", "not right"),
        ("\x00", "not right"),
        ("temperature = 0.0", "temperature"),
    ],
)
def test_plan_with_a_mistake_says_which(tmp_path: Path, text: str, sentence: str) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(LocalError, match=sentence):
        read_plan(file)


def test_missing_plan_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be read"):
        read_plan(tmp_path / "none.toml")


def test_learning_settings_are_explained_and_read_back(tmp_path: Path) -> None:
    assert set(EXPLAINED) == {field.name for field in msgspec.structs.fields(Learning)}
    file = tmp_path / "learning.toml"
    file.write_text(learning_text({"rate": 1e-5, "count_flat": True}, embedded=True))
    assert read_learning(file) == Learning(rate=1e-5, count_flat=True)
    assert Learning().update_config(1.0, 16).optimizer.rate == 1e-3


@pytest.mark.parametrize("overrides", [{"rat": 1}, {"rate": 2.0}, {"groups": 0}, {"advantage": "best"}])
def test_learning_settings_out_of_range_are_refused(overrides: dict[str, object]) -> None:
    with pytest.raises(LocalError, match="are not right"):
        learning_text(overrides, embedded=True)


def test_stop_ids_come_from_both_configs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert stop_ids(tmp_path) == [2, 7]
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(LocalError, match="not a JSON object"):
        stop_ids(tmp_path)


# --- conversation formats ------------------------------------------------------------------------


def templated(folder: Path, template: str) -> Path:
    """The embedded default with a chat template."""
    shutil.copytree(DEFAULT_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


EXTENDS = (
    "{% for one in messages %}[{{ one.role }}]{{ one.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Each message closed by the token that ends an answer."""


def test_the_models_own_format_is_named_where_it_can_be_extended(tmp_path: Path) -> None:
    told: list[str] = []
    folder = templated(tmp_path / "model", EXTENDS)
    plan = msgspec.structs.replace(PLAN, uncalibrated=True, model=str(folder))
    run = create_run(tmp_path / "run", "run", ROOT, plan, NOW, tell=told.append)
    assert (run.manifest.chat, told) == ("template", [])
    settings = policy_settings(run.manifest, Policy.load(run.checkpoint(0)).tokenizer, run.checkpoint(0))
    assert settings.chat is not None
    assert settings.chat.prompt([Message("user", "hi")])


@pytest.mark.parametrize("wanted", [None, "template"])
@pytest.mark.parametrize(("close", "stop"), [("<eos>", [258]), ("<bos>", [257, 258])])
def test_what_closes_an_answer_is_a_stop_token(
    tmp_path: Path, close: str, stop: list[int], wanted: str | None
) -> None:
    folder = templated(tmp_path / "model", EXTENDS.replace("<eos>", close))
    plan = msgspec.structs.replace(PLAN, uncalibrated=True, model=str(folder), chat=wanted)
    assert create_run(tmp_path / "run", "run", ROOT, plan, NOW).manifest.sampling.stop == stop
    assert trial(str(folder), group=1).settings.stop == frozenset(stop)


def test_a_run_without_a_format_stops_where_the_model_says(tmp_path: Path) -> None:
    folder = templated(tmp_path / "model", EXTENDS.replace("<eos>", "<bos>"))
    plan = msgspec.structs.replace(PLAN, uncalibrated=True, model=str(folder), chat="")
    assert create_run(tmp_path / "run", "run", ROOT, plan, NOW).manifest.sampling.stop == [258]


def test_a_format_that_cannot_be_extended_is_told_and_left_out(tmp_path: Path) -> None:
    told: list[str] = []
    folder = templated(tmp_path / "model", "{{ messages | length }} messages")
    plan = msgspec.structs.replace(PLAN, uncalibrated=True, model=str(folder))
    assert create_run(tmp_path / "run", "run", ROOT, plan, NOW, tell=told.append).manifest.chat == ""
    assert "There is no conversation format: " in told[0]
    wanted = msgspec.structs.replace(plan, chat="template")
    with pytest.raises(BadChat):
        create_run(tmp_path / "other", "run", ROOT, wanted, NOW)


def test_a_plan_may_do_without_the_models_format(tmp_path: Path) -> None:
    folder = templated(tmp_path / "model", EXTENDS)
    plan = msgspec.structs.replace(PLAN, uncalibrated=True, model=str(folder), chat="")
    assert create_run(tmp_path / "run", "run", ROOT, plan, NOW).manifest.chat == ""
