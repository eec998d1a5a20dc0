"""Write docs/performance.md, its plots and the tables of other pages from benchmarks/results.

    python benchmarks/report.py
    python benchmarks/report.py --print=build/benchmarks

A test fails if pages and results differ. With --print, tables of all figures of a directory are
printed, and nothing is written. Pages show the figures that `SHOWN`, `HEADLINES` and `TABLES`
select.
"""

import argparse
import json
import pathlib
import re
import textwrap

from results import RESULTS, ROOT, UNITS

OURS, ESTIMATE = "bert_tf", "estimate"
PAGE, README = ROOT / "docs" / "performance.md", ROOT / "README.md"
BEGIN, END = "<!-- from benchmarks/results -->", "<!-- end -->"
NO_RUN = "No run is recorded; the command prints the figures of your machine."
MAX_LINES = 120
TITLES = {
    "serving": "Serving BERT-base",
    "training": "Training",
    "gpu": "Training",
    "data": "Text and shards",
    "start_up": "Start-up",
    "learning": "Learning",
    "scale": "Costs by size",
    "retrieval": "Search with MiniLM",
}
# Pattern of "table: workload, unit" that the page shows, by benchmark; of a further processor it
# shows all rows of `ALWAYS_SHOWN`, and those that the ones before it lack.
SHOWN = {
    "serving": r"float32: (?!.*64 per|Python).*|"
    r"(bfloat16|int8): .*(one per request|short.*16 per).*",
    "training": r".*",
    "gpu": r"(Pretraining|Fine-tuning)(?!.*flat kernels).*, (sequences/s|examples/s|MFU|GB)",
    "data": r"(?!Data: (start|memory)).*",
    "start_up": r"Start: (?!weights|its graph|.*another shape).*",
    "retrieval": r".*/s",
}
ALWAYS_SHOWN = ("serving", "training")
HEADLINES = (
    r"Serving, float32: short texts, (one|16) per request.*",
    r"Serving, float32: long texts, one per request.*",
    r"Serving, (bfloat16|int8): short texts, 16 per request.*",
    r"Serving, float32: (load and first answer|peak memory).*",
    r"Pretraining, float32: .*, ms",
    r"Fine-tuning, float32: .*, examples/s",
    r"(Pretraining|Fine-tuning), bfloat16: base, \d+ x 128, (sequences|examples)/s",
)
# Page with a table between the markers: pattern of "table: workload, unit" that it shows.
TABLES = {
    "docs/results.md": r"Learning: .*|Search: .*, %",
    "docs/distillation.md": r"Distillation: .*",
    "docs/precision.md": r"Served metrics: .*",
    "docs/planning.md": r"(Pretraining step|Fine-tuning step|Request, BERT-base): .*",
    "docs/request-limits.md": r"Memory of a request: .*",
}
# File: title, pattern of "table: workload, unit" whose figures are its bars.
PLOTS = {
    "serving": ("Served texts per second", r"Serving, float32: .*16 per request.*"),
    "training": (
        "Training: sequences or examples per second",
        r"(Pretraining|Fine-tuning), b?float\d+: .*, (sequences|examples)/s",
    ),
}
PLOTTED = "docs/images/benchmark_{}.svg"
INTRODUCTION = f"""# Performance

```bash
make benchmark
```

The command measures your machine and prints tables like those below, which are generated from
`benchmarks/results`, with all figures. [What each script answers](../benchmarks/README.md).

- Programs of a row ran in turns with equal weights, rows and batches; processors used two threads.
- A figure is the median; the least and the largest value of {OURS} may follow. The ratio says how
  many times better {OURS} is than the best other program. The best is bold.
- "keras-hub" stands for its model in TensorFlow, "transformers" for its model in PyTorch. MFU is
  the rate of matrix products over the peak of the card.
"""


def load(directory):
    """Return the records of a directory by kind of machine and benchmark.

    The processor with the most results comes first, a GPU last.
    """
    found = {}
    for path in sorted(pathlib.Path(directory).glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["machine"]["kind"], {})[record["benchmark"]] = record
    return dict(sorted(found.items(), key=lambda item: ("gpu" in item[1], -len(item[1]))))


def rows_of(record, pattern=".*"):
    """Return {"table: workload, unit": {program: figure}} of what a pattern matches."""
    rows = {}
    for figure in record["figures"]:
        name = f"{figure['table']}: {figure['workload']}, {figure['unit']}"
        short = re.sub(r"^Serving, ", "", name)
        if re.fullmatch(pattern, name) or re.fullmatch(pattern, short):
            rows.setdefault(name, {})[figure["program"]] = figure
    return {name: row for name, row in rows.items() if OURS in row}


def number(value):
    """Return a number with three digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" in text or value >= 100 else f"{value:#.3g}".rstrip(".")


def others_of(row):
    """Return the figures of other programs."""
    return {name: figure for name, figure in row.items() if not name.startswith(OURS)}


def best_of(row):
    """Return the name of the best program."""
    more = UNITS[next(iter(row.values()))["unit"]]
    return (max if more else min)(row, key=lambda name: row[name]["median"])


def ratio_of(row):
    """Return how many times better bert_tf is than the best other program, or `None`."""
    others = others_of(row)
    if not others or ESTIMATE in others:
        return None
    ours, best = row[OURS]["median"], others[best_of(others)]["median"]
    if not ours or not best:
        return None
    return ours / best if UNITS[row[OURS]["unit"]] else best / ours


def cell(row, program):
    """Return the cell of a program in a row."""
    if program not in row:
        return ""
    figure, is_race = row[program], ratio_of(row) is not None
    text = number(figure["median"])
    if is_race and best_of(row) == program:
        text = f"**{text}**"
    if program == OURS:
        text += "" if figure["unit"] == "difference" else f" {figure['unit']}"
        if figure["min"] is not None and figure["repetitions"] > 1:
            text += f" ({number(figure['min'])} to {number(figure['max'])})"
    return text


def table(rows):
    """Return the lines of a Markdown table; rows of one workload that differ in unit are joined."""
    programs = dict.fromkeys(name for row in rows.values() for name in row)
    programs = sorted(programs, key=lambda name: name != OURS)
    has_ratio = any(ratio_of(row) is not None for row in rows.values())
    tables = [*dict.fromkeys(name.partition(": ")[0] for name in rows)]
    joined = {}
    for name, row in sorted(rows.items(), key=lambda of: tables.index(of[0].partition(": ")[0])):
        title = re.sub(r"^Serving, ", "", name).rpartition(", ")[0]
        title = title if len(tables) > 1 else title.partition(": ")[2]
        cells = [cell(row, program) for program in programs]
        joined.setdefault(title, []).append([*cells, *[ratio_cell(row)] * has_ratio])
    lines = [f"| | {' | '.join(programs)} |" + " ratio |" * has_ratio]
    lines.append("|---" * (len(programs) + 1 + has_ratio) + "|")
    for title, of_units in joined.items():
        cells = ("; ".join(filter(None, of_column)) for of_column in zip(*of_units, strict=True))
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def ratio_cell(row):
    """Return the cell of the ratio, in bold if bert_tf is better."""
    ratio = ratio_of(row)
    if ratio is None:
        return ""
    return f"**{ratio:.2f}**" if ratio >= 1 else f"{ratio:.2f}"


def machine_title(record):
    """Return the heading of a kind of machine."""
    machine = record["machine"]
    if machine["card"]:
        return f"GPU: {machine['card']}"
    return f"{machine['kind'].upper()}: {machine['processor']}"


def machine_line(record, known):
    """Return a sentence on a machine, and one on the versions if they are not the known ones."""
    machine, versions = record["machine"], record["versions"]
    parts = [machine["processor"]] if machine["card"] else []
    parts += [f"{machine['cores']} cores", f"{machine['memory_gb']:.0f} GB"]
    parts.append(f"memory read at {number(machine['read_gb_per_s']['median'])} GB/s")
    of_packages = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{'; '.join(parts)}." + (f" Versions: {of_packages}." if versions != known else "")


def sources_of(records):
    """Return commands, mode, commit and date of records, and the dates of programs run before."""
    found = {}
    for record in records:
        commands = re.findall(r"benchmarks/(\S+\.py(?: --[^\s;]*[^\s;,])*)", record["command"])
        run = f"{record['mode']} run, {record['commit'] or 'unknown commit'}, {record['date']}"
        for name, of in record.get("other_runs", {}).items():
            run += f"; {name} {of['date']}"
        for command in commands:
            command = re.sub(r" --(data=\S+|baselines=\w+|quick)", "", command)
            command = re.sub(r"(=\w+(?:,\w+){2}),[\w,]+", r"\1,...", command)
            found.setdefault(run, {})[f"`{command}`"] = None
    return ". ".join(f"{', '.join(spans)}: {run}" for run, spans in found.items()) + "."


def page(records):
    """Return docs/performance.md."""
    lines = INTRODUCTION.rstrip().split("\n")
    drawn = plots(records)
    for name, (title, _) in PLOTS.items():
        if name in drawn:
            image = f"images/{pathlib.Path(PLOTTED.format(name)).name}"
            lines += ["", f"![{title}, by program]({image})"]
    repeated, versions = set(), None  # Of the machines before.
    for of_kind in records.values():
        tables = {}
        for benchmark, pattern in SHOWN.items():
            rows = rows_of(of_kind[benchmark], pattern) if benchmark in of_kind else {}
            if benchmark not in ALWAYS_SHOWN:
                rows = {name: row for name, row in rows.items() if name not in repeated}
                repeated |= rows.keys()
            if rows:
                tables[benchmark] = table(rows)
        # Of all records of a machine, that of serving has the most programs.
        first = of_kind.get("serving", next(iter(of_kind.values())))
        text = f"{machine_line(first, versions)} {sources_of(of_kind[name] for name in tables)}"
        lines += ["", f"## {machine_title(first)}", "", *wrapped(text)]
        versions = first["versions"]
        for benchmark, of_benchmark in tables.items():
            heading = ["", f"### {TITLES[benchmark]}"] if len(tables) > 1 else []
            lines += [*heading, "", *of_benchmark]
    return "\n".join(lines) + "\n"


def wrapped(text):
    """Return the lines of a paragraph; a command is not broken."""
    spans = re.sub(r"`[^`]*`", lambda span: span[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(spans, 120, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def table_block(records, pattern):
    """Return the part of a page of `TABLES` between the markers."""
    lines = []
    for of_kind in records.values():
        for record in of_kind.values():
            rows = rows_of(record, pattern)
            if rows:
                source = f"{machine_title(record)}. {sources_of([record])}"
                lines += ["", *wrapped(source), "", *table(rows)]
    return "\n".join([BEGIN, *(lines or ["", NO_RUN]), "", END])


def readme_block(records):
    """Return the part of README between the markers, of the first processor and the first GPU."""
    lines, of_gpus = [], {}
    for of_kind in records.values():
        of_gpus.setdefault("gpu" in of_kind, of_kind)
    for of_kind in of_gpus.values():
        rows = {}
        for record in of_kind.values():
            for pattern in HEADLINES:
                rows |= rows_of(record, pattern)
        rows = {name: row for name, row in rows.items() if ratio_of(row) is not None}
        if not rows:
            continue
        first = next(iter(of_kind.values()))
        lines += ["", f"{machine_title(first)}:", "", f"| workload | {OURS} | best other | ratio |"]
        lines.append("|---|---|---|---|")
        for name, row in rows.items():
            unit, best, other = row[OURS]["unit"], best_of(row), best_of(others_of(row))
            texts = {program: number(figure["median"]) for program, figure in row.items()}
            texts[best] = f"**{texts[best]}**"
            ours, others = f"{texts[OURS]} {unit}", f"{texts[other]} ({other})"
            if best not in (OURS, other):
                ours += f"; {texts[best]} ({best.removeprefix(f'{OURS}, ')})"
            cells = name.removesuffix(f", {unit}"), ours, others, ratio_cell(row)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([BEGIN, *lines, "", END])


def with_block(path, block):
    """Return the text of a page with another block."""
    before, rest = path.read_text(encoding="utf-8").split(BEGIN)
    return f"{before}{block}{rest.split(END)[1]}"


def plots(records):
    """Return {name: SVG} of the plots that have figures, of the first kind that has them."""
    drawn = {}
    for name, (title, pattern) in PLOTS.items():
        for of_kind in records.values():
            rows = {}
            for record in of_kind.values():
                rows |= rows_of(record, pattern)
            rows = {name: row for name, row in rows.items() if len(row) > 1}
            if rows:
                where = machine_title(next(iter(of_kind.values())))
                drawn[name] = bars(f"{title} ({where})", rows)
                break
    return drawn


COLORS = "#1f5fa8 #d98324 #4f9d5d #a64d79 #7a6fb0 #8c8c8c #c2a83e".split()


def bars(title, rows):
    """Return an SVG of horizontal bars: a group per row, a bar per program."""
    width, left, bar, y = 720, 210, 16, 44
    programs = sorted(dict.fromkeys(p for row in rows.values() for p in row), key=OURS.__ne__)
    parts = []

    def write(x, y, text, anchor):
        place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
        parts.append(f'<text {place} fill="#222222">{text}</text>')

    for name, row in rows.items():
        label = name.partition(": ")[2].rpartition(", ")[0]
        write(left - 8, y + bar * len(row) / 2 + 4, label, "end")
        largest = max(figure["median"] for figure in row.values())
        for program in sorted(row, key=programs.index):
            value = row[program]["median"]
            length = (width - left - 150) * value / largest
            size = f'width="{length:.0f}" height="{bar - 2}"'
            color = COLORS[programs.index(program) % len(COLORS)]
            parts.append(f'<rect x="{left}" y="{y}" {size} fill="{color}"/>')
            write(left + length + 6, y + bar - 5, f"{number(value)}  {program}", "start")
            y += bar
        y += 14
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y}" '
        'font-family="sans-serif" font-size="12">'
    )
    background = f'<rect width="{width}" height="{y}" fill="#ffffff"/>'
    heading = f'<text x="12" y="24" font-size="15" fill="#222222">{title}</text>'
    return "\n".join([head, background, heading, *parts, "</svg>"]) + "\n"


def written(records):
    """Return {path: text} of all generated files."""
    files = {PAGE: page(records), README: with_block(README, readme_block(records))}
    for name, pattern in TABLES.items():
        files[ROOT / name] = with_block(ROOT / name, table_block(records, pattern))
    return files | {ROOT / PLOTTED.format(name): svg for name, svg in plots(records).items()}


def main():
    """Write the pages, or print tables, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--print", type=pathlib.Path, metavar="DIRECTORY")
    directory = parser.parse_args().print
    if directory:
        for of_kind in load(directory).values():
            for benchmark, record in of_kind.items():
                print(f"\n{TITLES[benchmark]}, {machine_title(record)}. {sources_of([record])}\n")
                print("\n".join(table(rows_of(record))))
                for program, reason in record["left_out"].items():
                    print(f"left out: {program}: {reason}")
        return
    for path, text in written(load(RESULTS)).items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
