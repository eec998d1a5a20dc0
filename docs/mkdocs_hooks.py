"""Hooks of MkDocs: build the site from the files as they are in the repository.

The site has the directories of the repository, so that relative links work in both. README.md is
its first page, and the index of pages in README.md is its navigation.
"""

import pathlib
import re
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify
from pymdownx.superfences import fence_code_format

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Pages, and files that pages show or link to.
PATTERNS = (
    "*.md",
    "LICENSE",
    "docs/**/*.md",
    "docs/images/*",
    "benchmarks/*.md",
    "benchmarks/*.png",
    "tests/*.md",
    "examples/*.md",
    "examples/*.ipynb",
    "examples/*.py",
    "examples/serving/*.py",
)


def links(text: str, directory: pathlib.Path = ROOT) -> list[tuple[str, pathlib.Path]]:
    """Return the links of a Markdown text to other pages, as (title, path)."""
    found = re.findall(r"\[([^\]]+)\]\(([^)#:\s]+\.md)\)", text)
    return [(title, (directory / path).resolve()) for title, path in found]


def entry(title: str, path: pathlib.Path) -> dict[str, Any]:
    """Return the navigation entry of a page; an index page also has the pages that it lists."""
    page = path.relative_to(ROOT).as_posix()
    if path.name != "README.md" or path.parent.parent.name != "docs":
        return {title[0].upper() + title[1:]: page}
    listed = dict.fromkeys(
        other
        for _, other in links(path.read_text(encoding="utf-8"), path.parent)
        if other.parent == path.parent
    )
    pages = [other.relative_to(ROOT).as_posix() for other in listed]
    return {title[0].upper() + title[1:]: [page, *pages]}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set the navigation, the anchors that GitHub has, and the fence of drawings."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    index = text.partition("\n## Documentation\n")[2]
    config.nav = [{"Overview": "README.md"}]
    seen = set()
    for section in re.split(r"^- ", index, flags=re.MULTILINE)[1:]:
        name, _, pages = section.partition(":")
        entries = []
        for title, path in links(pages):
            item = entry(title, path)
            below = next(iter(item.values()))
            if path not in seen:
                entries.append(item)
            seen |= {ROOT / page for page in (below if isinstance(below, list) else [below])}
        config.nav.append({name: entries})
    config.mdx_configs.setdefault("toc", {}).update(slugify=slugify(case="lower"), permalink=True)
    mermaid = {"name": "mermaid", "class": "mermaid", "format": fence_code_format}
    config.mdx_configs.setdefault("pymdownx.superfences", {})["custom_fences"] = [mermaid]
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
