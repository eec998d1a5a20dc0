"""The pages with figures: they show the results of the benchmarks, and nothing else."""

import importlib
import json
import re
import sys

import pytest

from tests.conftest import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def report():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("report")
    finally:
        sys.path.remove(str(BENCHMARKS))


def figure(program, median, unit="texts/s", workload="short texts, 16 per request", **changes):
    values = {"repetitions": 3, "min": 0.9 * median, "median": median, "max": 1.1 * median}
    row = {"table": "Serving, float32", "workload": workload, "program": program, "unit": unit}
    return {**row, **values, **changes}


def record(*figures, benchmark="serving", kind="avx2", card=None):
    return {
        "benchmark": benchmark,
        "machine": {
            "kind": kind,
            "processor": "a processor",
            "cores": 2,
            "memory_gb": 24.0,
            "read_gb_per_s": {"median": 26.0},
            "card": card,
        },
        "versions": {"tensorflow": "2.21.0"},
        "mode": "complete",
        "commit": "0123456",
        "date": "2026-11-27",
        "command": f"python benchmarks/{benchmark}.py",
        "left_out": {},
        "figures": list(figures),
    }


def test_pages_show_the_results(report):
    records = report.load(report.RESULTS)
    for path, text in report.written(records).items():
        is_equal = path.read_text(encoding="utf-8") == text
        assert is_equal, f"{path.name} is out of date; run python benchmarks/report.py"
    drawn = {report.ROOT / report.PLOTTED.format(name) for name in report.plots(records)}
    kept = {*(ROOT / "docs" / "images").glob(report.PLOTTED.split("/")[-1].format("*"))}
    assert kept == drawn


def test_the_page_is_short(report):
    assert len(report.PAGE.read_text(encoding="utf-8").splitlines()) <= report.MAX_LINES


def test_result_files_have_the_common_form(report):
    fields = {"table", "workload", "program", "unit", "repetitions", "min", "median", "max"}
    for path in report.RESULTS.iterdir():
        found = json.loads(path.read_text(encoding="utf-8"))
        assert path.name == f"{found['benchmark']}_{found['machine']['kind']}.json"
        assert {*record()} <= {*found} and {*record()["machine"]} <= {*found["machine"]}
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
        rows = [(of["table"], of["workload"], of["unit"], of["program"]) for of in found["figures"]]
        assert rows and len(rows) == len({*rows}), path.name
        for of in found["figures"]:
            assert {*of} == fields and of["unit"] in report.UNITS
            assert of["min"] is None or of["min"] <= of["median"] <= of["max"]


@pytest.mark.parametrize(
    ("unit", "ours", "other", "ratio", "is_best"),
    [
        ("texts/s", 30, 20, "1.50", True),
        ("texts/s", 10, 20, "0.50", False),
        ("ms", 10, 20, "2.00", True),
        ("ms", 40, 20, "0.50", False),
    ],
)
def test_the_best_and_the_ratio(report, unit, ours, other, ratio, is_best):
    slow = other / 2 if unit == "texts/s" else other * 2
    figures = [figure(report.OURS, ours, unit), figure("fast", other, unit)]
    rows = report.rows_of(record(*figures, figure("slow", slow, unit)))
    line = report.table(rows)[-1]
    assert f"| **{ratio}** |" in line if is_best else f"| {ratio} |" in line
    assert f"| **{ours}.0** {unit} (" in line if is_best else f"| **{other}.0** |" in line
    assert line.count("**") == (4 if is_best else 2)


def test_an_estimate_does_not_compete(report):
    rows = report.rows_of(record(figure(report.OURS, 10), figure(report.ESTIMATE, 20)))
    assert not re.search(r"\*\*|ratio", "\n".join(report.table(rows)))


def test_pages_have_what_was_measured(report):
    ours, other = figure(report.OURS, 123.4), figure("other", 77.0)
    records = {"avx2": {"serving": record(ours, other)}}
    blocks = (report.readme_block(records), report.table_block(records, "Serving.*"))
    for text in (report.page(records), *blocks):
        assert "**123**" in text and "77.0" in text and "AVX2: a processor" in text
    assert "(111 to 136)" in report.page(records)
    assert "123  bert_tf" in report.plots(records)["serving"]
    litert = figure(f"{report.OURS}, LiteRT", 222.0)
    block = report.readme_block({"avx2": {"serving": record(ours, litert, other)}})
    assert "| 123 texts/s; **222** (LiteRT) | 77.0 (other) | **1.60** |" in block
    empty = report.page({})
    assert "##" not in empty and "images" not in empty
    assert report.readme_block({}) == f"{report.BEGIN}\n\n{report.END}"
    assert report.NO_RUN in report.table_block(records, "Learning.*")


def test_units_of_a_workload_share_a_row(report):
    figures = [figure(report.OURS, 10), figure("other", 20)]
    figures += [figure(report.OURS, 300, "MB"), figure("other", 400, "MB")]
    lines = report.table(report.rows_of(record(*figures)))
    ours, other = "10.0 texts/s (9.00 to 11.0); **300** MB (270 to 330)", "**20.0**; 400"
    assert lines[2:] == [f"| short texts, 16 per request | {ours} | {other} | 0.50; **1.33** |"]


def test_a_gpu_comes_last_and_a_further_processor_is_short(report):
    data = record(figure(report.OURS, 5.0, "MB/s"), benchmark="data")
    more = record(*data["figures"], figure(report.OURS, 6.0, "s", "one more"), benchmark="data")
    machines = {kind: record(figure(report.OURS, 1.0), kind=kind) for kind in ("avx2", "amx")}
    records = {
        "avx2": {"serving": machines["avx2"], "data": data},
        "amx": {"serving": machines["amx"], "data": more},
    }
    text = report.page(records)
    assert text.count("### Serving") == text.count("### Text and shards") == 2
    assert text.count("| 5.00 MB/s") == text.count("| 6.00 s") == 1
    for of_kind in records.values():
        of_kind["serving"]["figures"].append(figure("other", 2.0))
    assert "AVX2" in report.readme_block(records) and "AMX" not in report.readme_block(records)
    command = "python benchmarks/data.py --data=DIR --only=text, in two runs"
    assert report.sources_of([{**data, "command": command}]).startswith("`data.py --only=text`: ")


def test_values_are_summarized(report):
    results = importlib.import_module("results")
    found = results.summary([3, 1, 2.00004])
    assert found == {"repetitions": 3, "min": 1, "median": 2.0, "max": 3}


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=str)
def test_results_of_all_benchmarks_are_printed(report, path, tmp_path, monkeypatch, capsys):
    (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(sys, "argv", ["report.py", f"--print={tmp_path}"])
    report.main()
    assert report.TITLES[json.loads(path.read_text())["benchmark"]] in capsys.readouterr().out
