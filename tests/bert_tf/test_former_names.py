"""Former names: old flags are aliases, and old keys on disk are read under their new names."""

import dataclasses
import json
import pathlib

import pytest
from absl import flags

from bert_tf.config import BertConfig
from bert_tf.errors import UserError
from bert_tf.inspect_shards import InspectShardsSettings
from bert_tf.pretraining.settings import PretrainSettings
from bert_tf.runs.former_names import RENAMED_KEYS
from bert_tf.runs.run import Run
from bert_tf.system import command
from bert_tf.text.vocabulary import SPECIALS, Vocabulary
from tasks.finetuning.settings import FinetuneSettings


@dataclasses.dataclass(frozen=True)
class Settings:
    size: int = command.flag("a size", 3, former_name="width")
    kind: str | None = command.flag("a kind", None, choices=("a", "b"), former_name="sort")
    really: bool = command.flag("whether", False, former_name="truly")
    words: tuple[str, ...] = command.flag("words", (), former_name="terms")
    needed: str = command.flag("what there has to be", "x", former_name="demanded")


def test_former_flags_are_accepted():
    assert command.parse(Settings, ["x"])[0] == Settings()
    former = ["x", "--width=4", "--sort=b", "--truly", "--terms=a,b", "--demanded=y"]
    new = ["x", "--size=4", "--kind=b", "--really", "--words=a,b", "--needed=y"]
    expected = Settings(4, "b", True, ("a", "b"), "y")
    assert command.parse(Settings, former)[0] == command.parse(Settings, new)[0] == expected
    assert command.parse(Settings, ["x", "--really", "--notruly"])[0] == Settings()


@pytest.mark.parametrize("argument", ["--width=many", "--sort=c", "--truly=perhaps"])
def test_errors_and_help_name_the_new_flag_only(argument):
    former = argument.removeprefix("--").partition("=")[0]
    field = {"width": "size", "sort": "kind", "truly": "really"}[former]
    with pytest.raises(flags.Error) as raised:
        command.parse(Settings, ["x", argument])
    assert f"--{field}=" in str(raised.value) and former not in str(raised.value)
    shown = command._help(Settings, "")
    assert f"--{field}  " in shown and f"--{former}" not in shown


def test_a_required_flag_may_have_a_former_name():
    @dataclasses.dataclass(frozen=True)
    class Required:
        path: str = command.flag("a path", former_name="file")

    assert command.parse(Required, ["x", "--file=f"])[0] == Required("f")
    with pytest.raises(UserError, match="--path is required: a path"):
        command.parse(Required, ["x"])


def test_every_former_flag_of_bert_tf_is_an_alias():
    arguments = ["x", "--shards=s", "--output_dir=o"]
    former = command.parse(PretrainSettings, [*arguments, "--preset=tiny", "--steps_per_call=5"])[0]
    assert (former.model_size, former.steps_per_execution) == ("tiny", 5)
    with pytest.raises(UserError, match="--model_size, --config, --init_from: "):
        command.parse(PretrainSettings, arguments)
    settings = command.parse(InspectShardsSettings, ["x", "--shards=s", "--vocab=v", "--adopt"])[0]
    assert settings.write_manifest


@pytest.mark.parametrize("settings_class", [PretrainSettings, FinetuneSettings])
def test_former_flags_recorded_in_runs_are_read_under_their_new_name(settings_class):
    for field in dataclasses.fields(settings_class):
        former = field.metadata["former_name"]
        if former is not None:
            assert RENAMED_KEYS[former] == field.name


def test_no_key_is_renamed_twice():
    assert not set(RENAMED_KEYS) & set(RENAMED_KEYS.values())


def test_a_run_of_an_earlier_version_is_read_with_the_new_keys(tmp_path, monkeypatch):
    path = tmp_path / "run"
    monkeypatch.setitem(RENAMED_KEYS, "former_field", "field")
    monkeypatch.setitem(RENAMED_KEYS, "former_prefix_", "prefix_")
    settings = {"preset": "tiny", "steps_per_call": 5, "seed": 1}
    train = {
        "settings": settings,
        "origin": "new weights",
        "changes": [{"step": 2, "steps_per_call": [1, 5], "num_train_steps": [3, 4]}],
    }
    config = BertConfig(vocab_size=5, hidden_size=2, num_attention_heads=1, intermediate_size=2)
    with Run.writing(path):
        Run.create(path, config, Vocabulary(SPECIALS), train, {"kind": "a", "former_field": 1})
    (path / "metrics.jsonl").write_text('{"step": 1, "former_prefix_f1": 0.5, "f1": 0.25}\n')

    run = Run.open(path)
    assert run.train["settings"] == {"model_size": "tiny", "steps_per_execution": 5, "seed": 1}
    assert run.train["changes"] == [
        {"step": 2, "steps_per_execution": [1, 5], "num_train_steps": [3, 4]}
    ]
    assert run.task == {"kind": "a", "field": 1}
    assert run.metrics() == [{"step": 1, "prefix_f1": 0.5, "f1": 0.25}]

    now = {"model_size": "tiny", "steps_per_execution": 5, "seed": 1}
    run.check_resumable(now, {"kind": "a", "field": 1})
    with pytest.raises(UserError, match="--model_size: was 'tiny' when"):
        run.check_settings({**now, "model_size": "base"}, "a")
    # Reading does not change the files.
    written = json.loads(pathlib.Path(run.file("train.json")).read_text())
    assert written["settings"] == settings


def test_malformed_change_records_are_reported(tmp_path):
    config = BertConfig(vocab_size=5, hidden_size=2, num_attention_heads=1, intermediate_size=2)
    path = tmp_path / "run"
    with Run.writing(path):
        Run.create(path, config, Vocabulary(SPECIALS), {"settings": {}, "changes": {"step": 2}})
    with pytest.raises(UserError, match=r'train.json: "changes" is'):
        Run.open(path)


def test_a_saved_loss_of_an_earlier_version_is_read():
    from bert_tf.train import losses

    for former, new in (
        ("entry_cross_entropy", "vocab_cross_entropy"),
        ("given_error", "identity_loss"),
    ):
        loss = losses.WeightedMean.from_config({"loss": former, "name": former})
        assert loss.function is getattr(losses, new)
        assert loss.get_config() == {"loss": new, "name": former}
