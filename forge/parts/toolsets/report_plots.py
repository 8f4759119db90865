"""Reports as pictures: curves over concurrency, and a heat map over concurrency and prompt length.

Knows no files. Colours are told apart with any kind of colour vision, and shapes repeat them;
what failed is drawn as failed.
"""

from __future__ import annotations

import io
import textwrap
from typing import Any

from forge.parts.ground.errors import RigError
from forge.parts.knowledge.report_compare import unusable_cell
from forge.parts.knowledge.report_schema import BenchCell, BenchReport, Distribution
from forge.parts.toolsets.report_text import (
    figure_text,
    report_caveats,
    report_subject_line,
)

# Okabe and Ito's set without yellow, which is lost on white: distinct in every colour vision.
_LINE_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_LINE_MARKERS = ("o", "s", "^", "D", "v", "P", "*")
_MOST_CURVES = len(_LINE_COLOURS)
_MOST_TILES = 24  # along one side of the heat map; beyond it the numbers are too small to read
_DPI = 110


def plot_curves(report: BenchReport) -> bytes:
    """PNG: output tokens/s, median TTFT and median TPOT against concurrency, a line a context.

    Doubtful cells are hollow, failed ones stand as x in a strip under the curves. Raises RigError
    NOT_FOUND where the plot package is missing or no cell has a concurrency.
    """
    cells = [cell for cell in report.cells if cell.concurrency is not None]
    contexts = sorted({cell.input_tokens for cell in cells})
    if not contexts:
        raise RigError("NOT_FOUND", f"{report.run.id} has no closed-loop cells to draw")
    shown = _spread(contexts, _MOST_CURVES)
    figure = _empty_figure(11.5, 4.9)
    panels = figure.subplots(1, 3)
    rates = any(c.metrics and c.metrics.output_tps is not None for c in cells)
    titles = (
        ("Output throughput" if rates else "Requests", "tokens/s" if rates else "requests/s"),
        ("Time to first token (median)", "ms"),
        ("Time per output token (median)", "ms"),
    )
    for number, (panel, (title, unit)) in enumerate(zip(panels, titles, strict=True)):
        points = _points(cells, shown, number, rates)
        _draw_panel(panel, points, shown, cells)
        panel.set_title(title, fontsize=10)
        panel.set_ylabel(unit)
        panel.set_xlabel("concurrent requests")
        values = [y for line in points.values() for _, y, _ in line]
        if values:
            strip = _draw_failures(panel, shown, cells)
            _set_scale(panel, values, number == 1, strip)
        else:
            panel.text(0.5, 0.5, "not measured", transform=panel.transAxes, ha="center")
            panel.set_yticks([])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        title="prompt tokens",
        loc="upper right",
        bbox_to_anchor=(0.998, 0.88),
        fontsize=8,
        title_fontsize=8,
        frameon=False,
    )
    notes = [_lengths(cells)]
    if len(shown) < len(contexts):
        notes.append(f"{len(shown)} of {len(contexts)} contexts drawn")
    if any(c.status != "ok" for c in cells):
        notes.append("x in the grey strip: failed or infeasible")
    if any(c.status == "ok" and unusable_cell(c) for c in cells):
        notes.append("hollow: not to be used")
    return _finished(figure, report, notes, right=1.05)


def plot_heatmap(report: BenchReport) -> bytes:
    """PNG: output tokens/s (requests/s where tokens were not counted) over concurrency and prompt
    length, the number in each tile. Failed and infeasible tiles are hatched and named."""
    cells = [cell for cell in report.cells if cell.concurrency is not None]
    columns = sorted({cell.concurrency for cell in cells if cell.concurrency is not None})
    rows = sorted({cell.input_tokens for cell in cells})
    if not cells:
        raise RigError("NOT_FOUND", f"{report.run.id} has no closed-loop cells to draw")
    columns, rows = _spread(columns, _MOST_TILES), _spread(rows, _MOST_TILES)
    rates = any(c.metrics and c.metrics.output_tps is not None for c in cells)
    figure = _empty_figure(3.4 + 0.62 * len(columns), 2.6 + 0.42 * len(rows))
    panel = figure.subplots()
    scale = _draw_tiles(panel, cells, columns, rows, rates)
    unit = "output tokens/s" if rates else "requests/s"
    if scale is not None:
        figure.colorbar(scale, ax=panel, label=unit)
    panel.set_xticks(range(len(columns)), [f"{c:,}" for c in columns])
    panel.set_yticks(range(len(rows)), [f"{r:,}" for r in rows])
    panel.set_xlabel("concurrent requests")
    panel.set_ylabel("prompt tokens")
    notes = [f"number in a tile: {unit}", _lengths(cells)]
    if len(cells) < len(columns) * len(rows):
        notes.append("blank: not planned")
    if any(c.status == "ok" and unusable_cell(c) for c in cells):
        notes.append("struck through: not to be used")
    return _finished(figure, report, notes, right=0.45)


def _draw_panel(
    panel: Any,
    points: dict[int, list[tuple[int, float, bool]]],
    contexts: list[int],
    cells: list[BenchCell],
) -> None:
    for index, context in enumerate(contexts):
        colour, marker = _LINE_COLOURS[index], _LINE_MARKERS[index]
        line = points[context]
        firm = [(x, y) for x, y, usable in line if usable]
        panel.plot([x for x, _ in firm], [y for _, y in firm], color=colour, lw=1.4)
        for good in (True, False):
            some = [(x, y) for x, y, usable in line if usable is good]
            panel.plot(
                [x for x, _ in some],
                [y for _, y in some],
                ls="none",
                marker=marker,
                ms=6,
                color=colour,
                mfc=colour if good else "white",
                label=f"{context:,}" if good else None,
                zorder=3,
            )
    loads = sorted({c.concurrency for c in cells if c.concurrency is not None})
    panel.set_xscale("log", base=2)
    close = any(b < 1.8 * a for a, b in zip(loads, loads[1:], strict=False))
    turn = 45 if close or len(loads) > 6 else 0
    panel.set_xticks(loads, [f"{c:,}" for c in loads], fontsize=8, rotation=turn)
    panel.xaxis.minorticks_off()
    panel.grid(True, color="#DDDDDD", lw=0.6)
    panel.set_axisbelow(True)


def _draw_failures(panel: Any, contexts: list[int], cells: list[BenchCell]) -> float:
    """An x for each failed cell in a grey strip under the curves, a row a context, so that none
    can be taken for a figure; returns the strip's share of the panel's height."""
    import matplotlib.patches

    lost = {
        context: [c.concurrency for c in cells if c.input_tokens == context and c.status != "ok"]
        for context in contexts
    }
    rows = [context for context in contexts if lost[context]]
    strip = 0.05 * len(rows)
    band = matplotlib.patches.Rectangle(
        (0, 0), 1, strip, transform=panel.transAxes, color="#EEEEEE", zorder=1.5
    )
    panel.add_patch(band)
    for row, context in enumerate(rows):
        panel.plot(
            lost[context],
            [0.05 * (row + 0.5)] * len(lost[context]),
            ls="none",
            marker="x",
            ms=6,
            mew=2,
            color=_LINE_COLOURS[contexts.index(context)],
            transform=panel.get_xaxis_transform(),
        )
    return strip


def _set_scale(panel: Any, values: list[float], logarithmic: bool, strip: float) -> None:
    """Room above the highest point, and `strip` of the height free below the lowest."""
    import matplotlib.ticker

    low, high = min(values), max(values)
    below = strip / (1 - strip)
    if logarithmic and low > 0:
        bottom, top = low / 1.4, high * 1.4
        panel.set_yscale("log")
        panel.set_ylim(bottom * (bottom / top) ** below, top)
        # Within two decades 1, 2 and 5 are labelled, over more of them the powers are enough.
        subs = (1.0, 2.0, 5.0) if high / low < 100 else (1.0,)
        panel.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
        panel.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        least = bottom
    else:
        top, least = high * 1.08 or 1.0, 0.0
        panel.set_ylim(-below * top, top)
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:,g}" if value >= least else "")


def _points(
    cells: list[BenchCell], contexts: list[int], panel: int, rates: bool
) -> dict[int, list[tuple[int, float, bool]]]:
    """For each context its (concurrency, value, usable) points of a panel, in order."""
    found: dict[int, list[tuple[int, float, bool]]] = {context: [] for context in contexts}
    for cell in sorted(cells, key=lambda c: c.concurrency or 0):
        m = cell.metrics
        if m is None or cell.input_tokens not in found:
            continue
        rate = m.output_tps if rates else m.request_rps
        value = (rate, _median_or_mean(m.ttft_ms), _median_or_mean(m.tpot_ms))[panel]
        if value is not None and cell.concurrency is not None:
            found[cell.input_tokens].append((cell.concurrency, value, not unusable_cell(cell)))
    return found


def _draw_tiles(
    panel: Any, cells: list[BenchCell], columns: list[int], rows: list[int], rates: bool
) -> Any:
    """Draw the tiles; returns what the colour bar needs, None where nothing has a value."""
    import matplotlib.cm
    import matplotlib.colors
    import matplotlib.patches

    def rate_of(cell: BenchCell) -> float | None:
        m = cell.metrics
        return None if m is None else (m.output_tps if rates else m.request_rps)

    usable = [v for c in cells if (v := rate_of(c)) is not None and not unusable_cell(c)]
    usable = usable or [v for c in cells if (v := rate_of(c)) is not None]
    top = max(usable, default=0.0)
    norm = matplotlib.colors.Normalize(0, top or 1.0, clip=True)
    scale: Any = matplotlib.cm.ScalarMappable(norm, "cividis")
    for cell in cells:
        if cell.concurrency not in columns or cell.input_tokens not in rows:
            continue
        x, y = columns.index(cell.concurrency), rows.index(cell.input_tokens)
        value, doubt = rate_of(cell), unusable_cell(cell)
        plain = value is not None
        tile = matplotlib.patches.Rectangle(
            (x - 0.5, y - 0.5),
            1,
            1,
            facecolor=scale.to_rgba(value) if value is not None else "#F2F2F2",
            edgecolor="white" if plain else "#999999",
            hatch=None if plain else "////",
            lw=1,
        )
        panel.add_patch(tile)
        if value is None:
            text, colour = cell.status.replace("_", " "), "#333333"
        else:
            text = figure_text(value)
            colour = "black" if top and value / top > 0.55 else "white"
        box = None if plain else {"facecolor": "#F2F2F2", "edgecolor": "none", "pad": 0.6}
        panel.text(x, y, text, ha="center", va="center", fontsize=7, color=colour, bbox=box)
        if plain and doubt:
            panel.plot([x - 0.45, x + 0.45], [y - 0.4, y + 0.4], color="#D55E00", lw=1.6)
    panel.set_xlim(-0.5, len(columns) - 0.5)
    panel.set_ylim(-0.5, len(rows) - 0.5)
    return scale if top else None


def _empty_figure(width: float, height: float) -> Any:
    """A figure of that many inches, at most 20 each way, drawn without a display."""
    try:
        import matplotlib.figure
    except ImportError:
        raise RigError(
            "NOT_FOUND",
            "plots need the package matplotlib, which is not installed",
            "pip install matplotlib, or show_report(view='text')",
        ) from None
    return matplotlib.figure.Figure(figsize=(min(width, 20), min(height, 20)), dpi=_DPI)


def _finished(figure: Any, report: BenchReport, notes: list[str], right: float) -> bytes:
    """Title over it, the load and the caveats under it, `right` inches free beside; then the PNG.

    Margins are given in inches: the automatic layout collapses under a long caption.
    """
    width, height = figure.get_size_inches()
    title = textwrap.wrap(report_subject_line(report), int(width * 10.5))
    work = report.workload
    # Corrections are sentences about memory and money; the text form of the report has them.
    doubts = [text for text in report_caveats(report) if not text.startswith("correction: ")]
    under = [f"load: {work.name} by {work.tool} {work.tool_version}".rstrip(), *notes, *doubts]
    small = textwrap.wrap("; ".join(note for note in under if note), int(width * 16))
    figure.subplots_adjust(
        left=0.85 / width,
        right=1 - right / width,
        top=1 - (0.45 + 0.2 * len(title)) / height,
        bottom=(0.75 + 0.14 * len(small)) / height,
        wspace=0.32,
    )
    figure.suptitle("\n".join(title), fontsize=11, fontweight="bold", y=1 - 0.12 / height, va="top")
    figure.text(0.15 / width, 0.1 / height, "\n".join(small), fontsize=7.5, color="#444444")
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _lengths(cells: list[BenchCell]) -> str:
    """The output lengths in words."""
    found = sorted({c.output_tokens for c in cells if c.output_tokens is not None})
    if not found:
        return "output length unknown"
    return f"{' / '.join(f'{n:,}' for n in found[:4])} output tokens"


def _spread(values: list[int], most: int) -> list[int]:
    """At most `most` of the sorted values, evenly spread, first and last included."""
    if len(values) <= most:
        return values
    step = (len(values) - 1) / (most - 1)
    return [values[round(i * step)] for i in range(most)]


def _median_or_mean(sample: Distribution | None) -> float | None:
    if sample is None:
        return None
    return sample.median if sample.median is not None else sample.mean
