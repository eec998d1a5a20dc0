"""Markdown tables and a plot of the results of benchmarks/serving.py."""

import statistics


def throughput_table(lines, backends):
    """Return a table of texts per second, and of the ratio of the first backend to each other."""
    first, *others = backends
    header = [
        "texts",
        "batch",
        *(f"{backend}, texts/s" for backend in backends),
        *(f"{first} / {other}" for other in others),
    ]
    rows = []
    for kind, batch in _distinct(lines, "texts", "batch"):
        rates = [
            _median(lines, "texts_per_second", backend=backend, texts=kind, batch=batch)
            for backend in backends
        ]
        ratios = (f"{rates[0] / rate:.2f}" for rate in rates[1:])
        rows.append([kind, batch, *map(_number, rates), *ratios])
    return _table(header, rows)


def latency_table(lines, backends):
    """Return a table of the latency of single texts and of the peak memory."""
    of_process = {"new_length_ms": "new length, ms", "again_ms": "again, ms", "peak_mb": "peak, MB"}
    header = ["texts", "backend", "p50 ms, batch 1", "p99 ms", *of_process.values()]
    rows = []
    for kind, backend in _processes(lines, backends):
        alone = {"backend": backend, "texts": kind, "batch": 1}
        metrics = [_median(lines, name, **alone) for name in ("p50_ms", "p99_ms")]
        metrics += [_median(lines, name, backend=backend, texts=kind) for name in of_process]
        rows.append([kind, backend, *map(_number, metrics)])
    return _table(header, rows)


def start_up_table(lines, backends):
    """Return a table of the parts of a cold start."""
    parts = {
        "imports_s": "Python and imports, s",
        "load_s": "load, s",
        "first_answer_s": "first answer, s",
        "cold_start_s": "cold start, s",
    }
    rows = []
    for kind, backend in _processes(lines, backends):
        seconds = (_median(lines, name, backend=backend, texts=kind) for name in parts)
        rows.append([kind, backend, *(f"{value:.2f}" for value in seconds)])
    return _table(["texts", "backend", *parts.values()], rows)


def machine(values):
    """Return a description of the processor from the result of serving_machine.py."""
    return (
        f"{values['processor']}; has {', '.join(values['features']) or 'no feature'}; "
        f"lacks {', '.join(values['missing']) or 'none'}; "
        f"last-level cache {values['cache_mb']:.0f} MiB; "
        f"read bandwidth of two threads {values['read_gb_per_s']:.1f} GB/s"
    )


def draw(lines, backends, title, path):
    """Plot texts per second, with a panel per kind of text and a group per batch size."""
    try:
        import matplotlib
    except ImportError:
        print("no plot: matplotlib is not installed")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    kinds = [kind for (kind,) in _distinct(lines, "texts")]
    figure, panels = pyplot.subplots(
        1, len(kinds), figsize=(5 * len(kinds), 4), squeeze=False, layout="constrained"
    )
    width = 0.8 / len(backends)
    for panel, kind in zip(panels[0], kinds, strict=True):
        of_kind = [line for line in lines if line["texts"] == kind]
        batches = [batch for (batch,) in _distinct(of_kind, "batch")]
        for number, backend in enumerate(backends):
            positions = [group + (number + 0.5) * width - 0.4 for group in range(len(batches))]
            rates = [
                _median(of_kind, "texts_per_second", backend=backend, batch=batch)
                for batch in batches
            ]
            panel.bar(positions, rates, width, label=backend)
        panel.set_xticks(range(len(batches)), [f"batch {batch}" for batch in batches])
        panel.set_title(f"{kind} texts")
        panel.grid(axis="y", alpha=0.3)
        panel.set_axisbelow(True)
    panels[0][0].set_ylabel("texts per second")
    figure.suptitle(title)
    bars = panels[0][0].get_legend_handles_labels()
    figure.legend(*bars, loc="outside lower center", ncols=len(backends))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _processes(lines, backends):
    """Return the pairs of kind of text and backend."""
    return [(kind, backend) for (kind,) in _distinct(lines, "texts") for backend in backends]


def _distinct(lines, *names):
    """Return the combinations of values, in order of appearance, of lines that have all names."""
    return dict.fromkeys(
        tuple(line[name] for name in names) for line in lines if all(name in line for name in names)
    )


def _median(lines, figure, **where):
    """Return the median over the rounds."""
    return statistics.median(
        line[figure]
        for line in lines
        if figure in line and all(line.get(name) == value for name, value in where.items())
    )


def _number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _table(header, rows):
    cells = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in cells)
