"""Output shards: the same bytes from any workers; formats, bad rows, and what a rerun does."""

import contextlib
import errno
import gzip
import itertools
import json
import pathlib

import numpy as np
import pytest

from bert_tf import UserError
from bert_tf.data import jobs, sharded_output
from bert_tf.system import environment, progress
from tasks.prediction import outputs
from tasks.prediction.outputs import OutputSettings, spans, write_output_shards
from tasks.prediction.vector_files import Vectors, index_path
from tests import hub as hubs
from tests.corpus import run_here
from tests.tasks import text_lengths
from tests.tasks.text_lengths import LengthJob, VectorJob

TEXTS = [f"{'a' * number} b" for number in range(1, 12)]


@pytest.fixture
def texts(tmp_path):
    """Write 11 texts in two files and a model, and return the directory."""
    (tmp_path / "a.csv").write_text("\n".join(["text", *TEXTS[:4]]) + "\n")
    lines = [json.dumps({"text": text}) for text in TEXTS[4:]]
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "model").write_text("weights")
    return tmp_path


def write(texts, output="out", pattern="[ab].*", job=(), recorded=(), log=list, **settings):
    settings = OutputSettings(output_dir=str(texts / output), **{"num_shards": 3, **settings})
    job = LengthJob(**{"model": str(texts / "model"), **dict(job)})
    return write_output_shards(job, settings, str(texts / pattern), dict(recorded), log)


@pytest.fixture
def in_process(monkeypatch):
    """Replace worker processes by this one, and return the numbers of the shards it writes."""
    numbers = []

    @contextlib.contextmanager
    def run(*arguments):
        with run_here(*arguments) as make:
            yield lambda tasks, on_entry: make(counted(tasks), on_entry)

    def counted(tasks):
        for task in tasks:
            numbers.append(task[0])
            yield task

    monkeypatch.setattr(jobs, "run", run)
    return numbers


def contents(directory):
    return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def lines(directory):
    paths = sorted(pathlib.Path(directory).glob("lengths-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.parametrize("counts", [[7], [3, 0, 4], [1] * 7])
@pytest.mark.parametrize("num_shards", [1, 2, 3, 7])
def test_shards_contain_each_row_once_in_order_and_differ_by_one_row(counts, num_shards):
    files = [(str(number), count) for number, count in enumerate(counts)]
    shards = [spans(files, number, num_shards) for number in range(num_shards)]
    rows = [[(path, first + i) for path, first, n in shard for i in range(n)] for shard in shards]
    assert list(itertools.chain(*rows)) == [
        (path, row) for path, count in files for row in range(count)
    ]
    assert {len(shard) for shard in rows} <= {7 // num_shards, -(-7 // num_shards)}


def test_by_default_workers_do_not_share_a_gpu(monkeypatch):
    monkeypatch.setattr(jobs, "count_processors", lambda: 7)
    monkeypatch.setattr(environment, "_DRIVER_FILES", ("/",))
    for visible, workers in (("0", 1), ("-1", 7)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert OutputSettings().workers == workers
        assert OutputSettings(num_workers=3).workers == 3
        assert jobs.RunnerSettings().workers == 7


@pytest.mark.medium
def test_two_workers_beam_and_this_process_write_the_same_bytes(texts, in_process, monkeypatch):
    assert write(texts) == (11, 0)
    expected = contents(texts / "out")
    monkeypatch.undo()
    for number, changes in enumerate(({"num_workers": 2}, {"num_workers": 1}, {"runner": "beam"})):
        if "runner" in changes:
            pytest.importorskip("apache_beam", reason="apache-beam is not installed")
        assert write(texts, f"out{number}", **changes) == (11, 0)
        assert contents(texts / f"out{number}") == expected
    assert sorted(expected) == [
        *(f"lengths-0000{number}-of-00003.jsonl" for number in range(3)),
        "manifest.json",
    ]


@pytest.mark.medium
@pytest.mark.parametrize("runner", ["local", "beam"])
def test_progress_counts_the_rows_of_each_shard_once(texts, monkeypatch, runner):
    if runner == "beam":
        pytest.importorskip("apache_beam", reason="apache-beam is not installed")
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    logged = []
    write(texts, log=logged.append, runner=runner)
    counted = [int(line.split("/11 rows")[0]) for line in logged if "/11 rows  " in line]
    assert len(counted) == 3 and counted[-1] == 11
    assert {3, 4} >= set(np.diff([0, *counted]))


@pytest.mark.parametrize("signal_error", [KeyboardInterrupt(), SystemExit(143)])
def test_a_signal_that_beam_wraps_ends_the_command_as_elsewhere(texts, monkeypatch, signal_error):
    pytest.importorskip("apache_beam", reason="apache-beam is not installed")

    @contextlib.contextmanager
    def pipeline(**options):
        raise RuntimeError("bundle failed") from signal_error
        yield

    monkeypatch.setattr("apache_beam.Pipeline", pipeline)
    with pytest.raises(type(signal_error)):
        write(texts, runner="beam")


def test_rows_have_their_file_and_line_and_stay_in_order(texts, in_process):
    write(texts)
    found = lines(texts / "out")
    keys = [f"{texts}/a.csv:{line}" for line in range(2, 6)]
    keys += [f"{texts}/b.jsonl:{line}" for line in range(1, 8)]
    assert [row["row"] for row in found] == keys
    assert [row["length"] for row in found] == [len(text) for text in TEXTS]
    sizes = [len(data.splitlines()) for name, data in sorted(contents(texts / "out").items())[:3]]
    assert sizes == [3, 4, 4]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "csv.gz", "jsonl.gz", "parquet"])
def test_rows_of_all_formats_give_the_same_outputs(texts, in_process, suffix):
    path = texts / f"c.{suffix}"
    plain = "\n".join(["text", *TEXTS]) + "\n"
    if "jsonl" in suffix:
        plain = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    if suffix == "parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
        parquet.write_table(pyarrow.table({"text": TEXTS}), path)
    else:
        path.write_bytes(
            gzip.compress(plain.encode()) if suffix.endswith(".gz") else plain.encode()
        )
    assert write(texts, pattern=path.name) == (11, 0)
    assert [row["length"] for row in lines(texts / "out")] == [len(text) for text in TEXTS]


def test_parquet_shards_have_one_schema_also_with_bad_rows_and_empty_lists(texts, in_process):
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    rows = ['{"text": ""}', "not JSON", '{"text": "a b"}', '{"text": "c"}']
    (texts / "b.jsonl").write_text("\n".join(rows))
    job = {"file_format": "parquet"}
    assert write(texts, pattern="b.jsonl", job=job, num_shards=4) == (4, 1)
    assert len(list((texts / "out").glob("lengths-*-of-00004.parquet"))) == 4
    # All are read with the schema of the first one, whose only list is empty.
    found = parquet.read_table(sorted((texts / "out").glob("*.parquet"))).to_pylist()
    assert [row["words"] for row in found] == [[], None, ["a", "b"], ["c"]]
    assert [row["length"] for row in found] == [0, None, 3, 1]
    assert [bool(row["error"]) for row in found] == [False, True, False, False]
    assert found[1]["row"] == f"{texts}/b.jsonl:2"


def write_vectors(texts, num_shards=3):
    settings = OutputSettings(output_dir=str(texts / "out"), num_shards=num_shards)
    job = VectorJob(model=str(texts / "model"))
    return write_output_shards(job, settings, str(texts / "[ab].*"), {}, list)


def test_shards_of_vectors_are_arrays_in_order_that_a_rerun_completes(texts, in_process):
    assert write_vectors(texts) == (11, 0)
    expected = [[len(text), 2] for text in TEXTS]
    paths = sorted((texts / "out").glob("vectors-*.npy"))
    shards = [np.load(path, mmap_mode="r") for path in paths]
    assert [len(shard) for shard in shards] == [3, 4, 4]
    assert {shard.dtype for shard in shards} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.concatenate(shards), expected)
    manifest = json.loads((texts / "out" / "manifest.json").read_text())
    assert [shard["rows"] for shard in manifest["shards"]] == [3, 4, 4]
    before = contents(texts / "out")
    paths[1].unlink()
    del in_process[:]
    write_vectors(texts)
    assert in_process == [1] and contents(texts / "out") == before
    vectors = Vectors(str(texts / "out"))
    np.testing.assert_array_equal(np.concatenate(list(vectors.blocks())), expected)
    some = np.array([10, 0, 3])
    np.testing.assert_array_equal(vectors.take(some), np.array(expected)[some])
    assert index_path(str(texts / "out")) == str(texts / "out" / "vectors.usearch")


def test_an_array_has_no_bad_rows(texts, in_process):
    (texts / "b.jsonl").write_text('{"text": "a b"}\n{"txt": 1}\n')
    with pytest.raises(UserError, match=r"b\.jsonl:2: no column 'text'"):
        write_vectors(texts)
    assert not [path for path in (texts / "out").iterdir() if "00002-of" in path.name]
    with pytest.raises(UserError, match="out: shards are missing; rerun bert-tf extract"):
        Vectors(str(texts / "out"))
    with pytest.raises(UserError, match=r"--vectors=.*: no manifest\.json"):
        Vectors(str(texts))


def test_shards_of_lines_are_no_vectors(texts, in_process):
    write(texts)
    with pytest.raises(UserError, match=r"--file_format=npy or parquet, received .*\.jsonl"):
        Vectors(str(texts / "out"))
    (texts / "out" / "manifest.json").write_text('{"complete": true}')
    with pytest.raises(UserError, match='out: expected .* of bert-tf extract; .*no "plan"$'):
        Vectors(str(texts / "out"))


def test_a_bad_row_is_an_error_in_its_place_and_is_counted(texts, in_process):
    (texts / "b.jsonl").write_text('{"text": "a b"}\n{"txt": 1}\nnot JSON\n{"text": "c"}\n')
    assert write(texts, pattern="b.jsonl") == (4, 2)
    good, missing, no_json, last = lines(texts / "out")
    assert (good["length"], last["length"]) == (3, 1)
    assert missing == {
        "row": f"{texts}/b.jsonl:2",
        "error": "no column 'text'; the columns are 'txt'",
    }
    assert no_json["error"].startswith("not JSON")
    manifest = json.loads((texts / "out" / "manifest.json").read_text())
    assert (manifest["rows"], manifest["bad_rows"], manifest["complete"]) == (4, 2, True)


def test_a_rerun_writes_missing_and_truncated_shards_only(texts, in_process):
    write(texts)
    before = contents(texts / "out")
    del in_process[:]
    assert write(texts) == (11, 0) and in_process == []
    (texts / "out" / "lengths-00001-of-00003.jsonl").unlink()
    path = texts / "out" / "lengths-00002-of-00003.jsonl"
    path.write_bytes(path.read_bytes()[:-1])
    (texts / "out" / ".writing-lengths-00001-of-00003.jsonl").write_text("of a killed process")
    logged = []
    assert write(texts, log=logged.append) == (11, 0)
    assert in_process == [1, 2] and contents(texts / "out") == before
    assert f"{texts}/out: resuming: 1/3 shards complete" in logged


def test_a_rerun_takes_no_shard_for_a_row_or_for_a_part_of_the_model(
    texts, in_process, monkeypatch
):
    """The output is below the directory of the model, and the glob matches its files too."""

    def everything(job):
        return sorted(str(path) for path in texts.rglob("*") if path.is_file())

    monkeypatch.setattr(LengthJob, "model_files", property(everything))
    assert write(texts, pattern="**/*.jsonl") == (7, 0)
    before = contents(texts / "out")
    (texts / "out" / "lengths-00001-of-00003.jsonl").unlink()
    del in_process[:]
    assert write(texts, pattern="**/*.jsonl") == (7, 0)
    assert in_process == [1] and contents(texts / "out") == before
    with pytest.raises(UserError, match="no such file other than those in .*/out"):
        write(texts, pattern="out/*.jsonl")


def test_a_directory_that_begins_like_a_checkpoint_is_no_file_of_it(tmp_path):
    names = [
        *("bert_config.json", "model.ckpt.data-00000-of-00001", "model.ckpt.index", "vocab.txt")
    ]
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "model.ckpt_vectors").mkdir()
    job = outputs.VectorJob(model=f"{tmp_path}/model.ckpt", batch_size=1, file_format="npy")
    assert job.model_files == [f"{tmp_path}/{name}" for name in names]


def test_linked_directories_are_a_part_of_a_model_and_hidden_ones_are_not(tmp_path):
    model = tmp_path / "model"
    for path in ("model/.cache/lock", "model/.gitignore", "model/a.json", "other/b.bin"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (model / "0_Transformer").symlink_to(tmp_path / "other")
    job = outputs.VectorJob(model=str(model), batch_size=1, file_format="npy")
    assert job.model_files == [f"{model}/0_Transformer/b.bin", f"{model}/a.json"]


@pytest.mark.parametrize("name", ["org/first", "bert_first"])
def test_shards_of_a_model_without_a_directory_are_not_mixed_with_those_of_another(
    texts, in_process, monkeypatch, name
):
    """The model is in the cache of the hub, or keras-hub downloads it."""
    hubs.use(monkeypatch, "http://127.0.0.1:9", texts / "hub")  # Nothing listens there.
    for model in ("org/first", "org/second"):
        directory = texts / "hub" / f"models--{model.replace('/', '--')}"
        snapshot = directory / "snapshots" / hubs.COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "model.safetensors").write_text(model)
        (directory / "refs").mkdir()
        (directory / "refs" / "main").write_text(hubs.COMMIT)

    def files_of(job):
        return outputs.VectorJob(model=job.model, batch_size=1, file_format="jsonl").model_files

    monkeypatch.setattr(LengthJob, "model_files", property(files_of))
    write(texts, job={"model": name})
    write(texts, job={"model": name})
    with pytest.raises(UserError, match="the model: not the same"):
        write(texts, job={"model": name.replace("first", "second")})


def test_an_interrupted_command_keeps_what_is_complete(texts, in_process, monkeypatch):
    write(texts, "expected")
    save = sharded_output.save_entry

    def fail_at_the_third(directory, entry, plan_sha256):
        if "00002-of" in entry["file"]:
            raise OSError("killed")
        save(directory, entry, plan_sha256)

    monkeypatch.setattr(sharded_output, "save_entry", fail_at_the_third)
    with pytest.raises(OSError, match="killed"):
        write(texts)
    left = contents(texts / "out")
    assert json.loads(left["manifest.json"])["complete"] is False
    entries = sorted(name for name in left if name[0] == "." and name.endswith(".json"))
    assert entries == [f".lengths-0000{number}-of-00003.json" for number in (0, 1)]
    monkeypatch.setattr(sharded_output, "save_entry", save)
    del in_process[:]
    write(texts)
    assert in_process == [2]
    assert contents(texts / "out") == contents(texts / "expected")


def test_no_shard_has_its_name_before_it_is_complete(texts, in_process, monkeypatch):
    def fail(rows):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr(text_lengths, "_outputs", fail)
    with pytest.raises(OSError, match="disk full"):
        write(texts)
    assert sorted(contents(texts / "out")) == ["manifest.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recorded": {"batch_size": 3}}, "--batch_size: was None when .*/out was created, is now"),
        ({"num_shards": 4}, "--num_shards: was 3 when"),
        ({"pattern": "a.csv"}, "--input: the rows: not the same as when"),
        ({"model": "other weights"}, "the model: not the same as when"),
        ({"num_shards": 12}, "--num_shards=12: more than the 11 rows; use --num_shards=11 or less"),
    ],
)
def test_other_settings_rows_or_models_are_rejected_in_one_line(
    texts, in_process, changes, message
):
    write(texts)
    before = contents(texts / "out")
    if "model" in changes:
        (texts / "model").write_text(changes["model"])
        changes = {}
    with pytest.raises(UserError, match=message) as caught:
        write(texts, **changes)
    assert len(str(caught.value).splitlines()) == 1
    assert contents(texts / "out") == before


def test_a_changed_row_is_rejected(texts, in_process):
    write(texts)
    (texts / "a.csv").write_text((texts / "a.csv").read_text().replace("aaa b", "aab b"))
    with pytest.raises(UserError, match="--input: the rows: not the same"):
        write(texts)


def test_other_versions_are_accepted_for_complete_shards_only(texts, in_process):
    write(texts)
    path = texts / "out" / "manifest.json"
    values = json.loads(path.read_text())
    values["plan"]["versions"]["tensorflow"] = "2.0.0"
    path.write_text(json.dumps(values))
    assert write(texts) == (11, 0)
    (texts / "out" / "lengths-00001-of-00003.jsonl").unlink()
    path.write_text(json.dumps(values))
    with pytest.raises(UserError, match="created with tensorflow 2.0.0, now"):
        write(texts)


@pytest.mark.parametrize("damage", ["{", "{}", '{"plan": {"settings": 1}}'])
def test_a_damaged_manifest_and_files_of_others_are_reported(texts, in_process, damage):
    write(texts)
    (texts / "out" / "manifest.json").write_text(damage)
    with pytest.raises(UserError, match="manifest.json: .*; name a new --output_dir"):
        write(texts)
    (texts / "out" / "manifest.json").unlink()
    with pytest.raises(UserError, match="contains other files"):
        write(texts)


def test_nothing_is_left_in_a_directory_of_others(texts):
    (texts / "out").mkdir()
    (texts / "out" / "notes.txt").write_text("theirs")
    said = []
    with pytest.raises(UserError, match="contains other files"):
        write(texts, log=said.append)
    assert said == []  # Rows are not counted before.
    assert [path.name for path in (texts / "out").iterdir()] == ["notes.txt"]


def test_rows_that_change_meanwhile_are_detected(texts, in_process, monkeypatch):
    outputs = text_lengths._outputs

    def change(rows):
        with open(texts / "a.csv", "a") as file:
            file.write("more\n")
        return outputs(rows)

    monkeypatch.setattr(text_lengths, "_outputs", change)
    with pytest.raises(UserError, match="a.csv: was changed while it was read"):
        write(texts)
    assert json.loads((texts / "out" / "manifest.json").read_text())["complete"] is False


def test_a_runner_that_loses_its_workers_is_reported(texts, monkeypatch):
    def make(tasks, on_entry):
        pass

    monkeypatch.setattr(jobs, "run", lambda *arguments: contextlib.nullcontext(make))
    with pytest.raises(UserError, match="out: 0/3 shards complete, but the workers were lost"):
        write(texts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_workers": 0}, "--num_workers=0: expected an integer >= 1"),
        ({"beam_args": "--x"}, "--beam_args=--x: requires --runner=beam"),
    ],
)
def test_flags_of_runners_are_checked(settings, message):
    with pytest.raises(UserError, match=message):
        OutputSettings(**settings)


def test_a_glob_without_files_and_wrong_combinations_of_outputs_are_reported(texts):
    for settings, arguments, message in (
        ({"output_dir": "d"}, ("nothing-*.csv", None), "--input=nothing-.*: no such file"),
        ({"output_dir": "d"}, ("a.csv", "o"), "expected --output or --output_dir"),
        ({}, ("a.csv", None), "expected --output or --output_dir"),
        ({"num_workers": 2}, ("a.csv", "o.jsonl"), "--num_workers: requires --output_dir"),
        ({"output_dir": "d", "num_shards": 0}, ("a.csv", None), "--num_shards=0: expected"),
    ):
        with pytest.raises(UserError, match=message):
            OutputSettings(**settings).check_output(*arguments, "model", False)
