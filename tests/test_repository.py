"""Files that hosted services and release tools read: they agree with the Makefile and setup.py."""

import re

import pytest
import yaml

from tests.conftest import ROOT

YAML_FILES = (
    ".github/ISSUE_TEMPLATE/bug_report.yml",
    ".github/workflows/ci.yml",
    ".pre-commit-config.yaml",
    "CITATION.cff",
)


def parsed(name):
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def version():
    (found,) = re.findall(r'^    version="(.+)",$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    return found


@pytest.mark.parametrize("name", YAML_FILES)
def test_yaml_files_are_mappings(name):
    assert isinstance(parsed(name), dict)


def test_the_workflow_runs_the_script_with_a_supported_python():
    steps = parsed(".github/workflows/ci.yml")["jobs"]["ci"]["steps"]
    assert [step["run"] for step in steps if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    (python,) = (step["with"]["python-version"] for step in steps if "setup-python" in str(step))
    assert f"PYTHON ?= python{python}\n" in (ROOT / "Makefile").read_text()


def test_hooks_run_the_programs_of_make_lint():
    recipe = re.search(r"^lint:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    programs = [line.strip() for line in recipe[1].splitlines() if "$(BIN)" in line]
    (repository,) = parsed(".pre-commit-config.yaml")["repos"]
    assert [hook["entry"] for hook in repository["hooks"]] == [
        program.replace("$(BIN)", ".venv/bin") for program in programs
    ]


def test_every_question_of_the_form_has_a_label():
    fields = parsed(".github/ISSUE_TEMPLATE/bug_report.yml")["body"]
    asked = [field for field in fields if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in asked)
    assert len({field["id"] for field in asked}) == len(asked)


def test_the_citation_is_of_this_version_and_names_the_paper():
    citation = parsed("CITATION.cff")
    assert citation["version"] == version()
    assert citation["authors"] == [{"name": "The bert_tf authors"}]
    (paper,) = citation["references"]
    assert paper["authors"][0]["family-names"] == "Devlin"
    assert paper["year"] == 2019


def test_the_changelog_has_the_sections_of_keep_a_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert releases[0] == "[Unreleased]"
    for release in releases[1:]:
        assert re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", release)
    for release in re.split(r"^## .*$", text, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.*)$", release, re.MULTILINE)
        known = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]
        assert sections == [name for name in known if name in sections]
