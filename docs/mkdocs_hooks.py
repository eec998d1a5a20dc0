"""Hooks of MkDocs: build the site from the files as they are in the repository.

The site has the directories of the repository, so that relative links work in both. README.md is
its first page; NAVIGATION lists the others.
"""

import pathlib
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages, and files that pages show or link to.
PATTERNS = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/images/*",
    "docs/site.css",
    "benchmarks/*.md",
    "tests/*.md",
    "examples/*.md",
    "examples/*.ipynb",
    "examples/*.py",
    "examples/serving/*.py",
)

# Pages of the site by section, in order. A test finds pages of docs/ that are missing.
NAVIGATION = {
    "Start": [
        "docs/installation.md",
        "docs/jobs.md",
        "docs/demo.md",
        "docs/how-it-works.md",
        "examples/README.md",
        "docs/troubleshooting.md",
    ],
    "Come from": [
        "docs/from-google-research.md",
        "docs/from-transformers.md",
        "docs/from-keras-hub.md",
        "docs/from-sentence-transformers.md",
    ],
    "Fine-tune": [
        "docs/fine-tuning.md",
        "docs/data-formats.md",
        "docs/few-rows.md",
        "docs/sweeps.md",
        "docs/distillation.md",
        "docs/results.md",
    ],
    "Tasks": [
        "docs/tasks/README.md",
        "docs/tasks/classification.md",
        "docs/tasks/class-imbalance.md",
        "docs/tasks/regression.md",
        "docs/tasks/tagging.md",
        "docs/tasks/question-answering.md",
        "docs/tasks/multiple-choice.md",
        "docs/tasks/similarity.md",
        "docs/tasks/ranking.md",
        "docs/tasks/anomaly-detection.md",
        "docs/tasks/masked-lm.md",
        "docs/tasks/glue.md",
    ],
    "Python": [
        "docs/python.md",
        "docs/labels.md",
        "docs/keras.md",
        "docs/fit-or-train.md",
        "docs/large-data.md",
        "docs/own-head.md",
        "docs/python-compared.md",
    ],
    "Pretrain": [
        "docs/pretraining-data.md",
        "docs/planning.md",
        "docs/pretraining.md",
        "docs/pretraining-example.md",
        "docs/domain-adaptation.md",
    ],
    "Predict and search": [
        "docs/prediction.md",
        "docs/features.md",
        "docs/search.md",
        "docs/search-service.md",
        "docs/plots.md",
    ],
    "Serve": [
        "docs/serving.md",
        "docs/signatures.md",
        "docs/tensorflow-serving.md",
        "docs/operations.md",
        "docs/request-limits.md",
        "docs/litert.md",
    ],
    "Devices": [
        "docs/gpu.md",
        "docs/precision.md",
        "docs/distributed-training.md",
        "docs/several-machines.md",
    ],
    "Reference": [
        "docs/commands.md",
        "docs/api.md",
        "docs/checkpoints.md",
        "docs/run-directories.md",
        "docs/design.md",
    ],
    "Quality": [
        "docs/correctness.md",
        "docs/performance.md",
        "docs/tested-versions.md",
        "docs/limits.md",
        "tests/FAULTS.md",
        "benchmarks/README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    ],
}


def title(page: str) -> str:
    """Return the first heading of a page, without the marks of code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(r"^# (.*)$", text, re.MULTILINE)[1].replace("`", "")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation and the anchors that GitHub has."""
    config.nav = [{"Overview": "README.md"}]
    for section, pages in NAVIGATION.items():
        config.nav.append({section: [{title(page): page} for page in pages]})
    config.mdx_configs.setdefault("toc", {}).update(slugify=slugify(case="lower"), permalink=True)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs/ by those of the repository that belong to the site."""
    for file in list(files):
        if pathlib.Path(file.abs_src_path).is_relative_to(config.docs_dir):
            files.remove(file)
    for path in sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)}):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace drawings of Mermaid, which the theme would load from the network, by tables."""
    return re.sub(r"(?s)```mermaid\n(.*?)```\n", lambda match: table(match[1]), markdown)


def table(drawing: str) -> str:
    """Return the arrows of a drawing as a table: each node, and those that it leads to."""
    nodes = re.findall(r"^ *(\w+)\[(\w+)\]$", drawing, re.MULTILINE)
    names = {node: f"{node.removesuffix('_' + label)}/{label}" for node, label in nodes}
    arrows: dict[str, list[str]] = {}
    for start, end in re.findall(r"(\w+) --> (\w+)", drawing):
        arrows.setdefault(names[start], []).append(f"`{names.get(end, end)}`")
    rows = [f"| `{start}` | {', '.join(ends)} |" for start, ends in sorted(arrows.items())]
    return "\n".join(["| subpackage | imports |", "|---|---|", *rows, ""])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark short words and flags of commands, which docs/site.css does not break."""
    words = r"<code>(--[^<\s]{1,36}|[^<\s]{1,20})</code>"
    html = re.sub(words, r'<code class="word">\1</code>', html)
    return re.sub(r"(?<=>)(--\w+)(?=<)", r'<span class="word">\1</span>', html)
