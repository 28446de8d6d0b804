"""Two panels from the document of a run: time over M, and fraction of the roofline over M. Needs matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito's, which people of every colour vision can tell apart."""
_MARKERS = "os^Dvp"
_INK, _FAINT = "#333333", "#d9d9d9"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "svg.hashsalt": "int8moe",  # the same document gives the same file
}
_DATES = {"svg": {"Date": None}, "png": {"Software": None}}
_MOST_TICKS = 9
_DASHES = (0, (5, 2.5))


def draw(document: dict[str, Any], file_format: str) -> bytes:
    """The plot as the bytes of a file.

    Args:
        document: from :func:`int8moe.benchmark.report.document`.
        file_format: "svg" or "png".
    """
    with rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 5.6), dpi=150, facecolor="white")
        room_for_titles = (0.0, 0.0, 1.0, 0.885)
        figure.set_layout_engine("constrained", rect=room_for_titles, w_pad=0.12, h_pad=0.08, wspace=0.05)
        time_axes, fraction_axes = figure.subplots(1, 2)
        tokens = [point["tokens"] for point in document["points"]]
        for axes in (time_axes, fraction_axes):
            _style(axes, tokens)
        handles = _draw_times(time_axes, document, tokens)
        _draw_fractions(fraction_axes, document, tokens)
        name = f"{document['shape']['name']}: INT8 mixture of experts"
        figure.suptitle(name, x=0.012, y=0.985, ha="left", va="top", fontsize=14, fontweight="bold")
        figure.text(0.012, 0.925, _subtitle(document), ha="left", va="top", fontsize=10)
        columns = len(handles) if len(handles) <= 3 else 2
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        stream = io.BytesIO()
        figure.savefig(stream, format=file_format, metadata=_DATES[file_format])
    return stream.getvalue()


def _subtitle(document: dict[str, Any]) -> str:
    shape, machine, found = document["shape"], document["machine"], document["disturbance"]
    threads = f"{document['threads']} thread{'s' if document['threads'] != 1 else ''}"
    parts = [
        f"{shape['num_experts']} experts, top-{shape['top_k']}, hidden {shape['hidden_size']}, "
        f"intermediate {shape['intermediate_size']}, {document['dtype']}",
        f"{machine['cpu']}, {threads}",
    ]
    if found["disturbed"]:
        parts.append(f"disturbed: others took {found['others'] + found['steal']:.0%} of the CPUs")
    return "   |   ".join(parts)


def _style(axes: Axes, tokens: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("tokens a call (M)")
    step = -(-len(tokens) // _MOST_TICKS)
    axes.xaxis.set_major_locator(FixedLocator([float(count) for count in tokens[::step]]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.grid(True, which="major", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(x=0.06)


def _draw_times(axes: Axes, document: dict[str, Any], tokens: list[int]) -> list[Line2D]:
    """Lines, their middle halves as bands, and a roofline for each different kernel; the handles for a legend."""
    handles: list[Line2D] = []
    rooflines: list[Line2D] = []
    seen: set[str] = set()
    for index, kernel in enumerate(document["kernels"]):
        rows = [point["kernels"][index] for point in document["points"]]
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        low, high = zip(*(row["quartile_seconds"] for row in rows), strict=True)
        axes.fill_between(tokens, _ms(low), _ms(high), color=colour, alpha=0.15, linewidth=0)
        handles += axes.plot(
            tokens, _ms([row["median_seconds"] for row in rows]), color=colour, marker=marker, markersize=5.5,
            label=kernel["label"],
        )  # fmt: skip
        if kernel["kernel"] in seen:
            continue
        seen.add(kernel["kernel"])
        known = all(row["roofline_seconds"] is not None for row in rows)
        what = "roofline" if known else "memory limit"
        limit = [row["roofline_seconds" if known else "memory_seconds"] for row in rows]
        alone = "_" if len(tokens) == 1 else ""  # a line through one point is not seen
        rooflines += axes.plot(
            tokens, _ms(limit), color=colour, linestyle=_DASHES, linewidth=1.3, marker=alone, markersize=16, label=what
        )
    if len(rooflines) == 1:
        rooflines[0].set_color(_INK)
    else:
        for line, name in zip(rooflines, dict.fromkeys(row["kernel"] for row in document["kernels"]), strict=True):
            line.set_label(f"{line.get_label()} of {name}")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("milliseconds a call")
    axes.set_title("Time, median and middle half", loc="left", fontsize=11)
    return [*handles, *rooflines]


def _draw_fractions(axes: Axes, document: dict[str, Any], tokens: list[int]) -> None:
    """Full markers where the roofline is known; hollow ones where only memory's limit is: at least that fraction."""
    highest, unknown = 1.0, False
    for index in range(len(document["kernels"])):
        rows = [point["kernels"][index] for point in document["points"]]
        colour, marker = _COLOURS[index % len(_COLOURS)], _MARKERS[index % len(_MARKERS)]
        values = [row["memory_fraction"] if row["fraction"] is None else row["fraction"] for row in rows]
        axes.plot(tokens, values, color=colour)
        for count, row, value in zip(tokens, rows, values, strict=True):
            hollow = row["fraction"] is None
            unknown = unknown or hollow
            axes.plot([count], [value], color=colour, marker=marker, markersize=5.5,
                      markerfacecolor="white" if hollow else colour)  # fmt: skip
        highest = max(highest, *values)
    axes.axhline(1.0, color=_INK, linestyle=_DASHES, linewidth=1.3)
    axes.set_ylim(0, highest * 1.08)
    axes.set_ylabel("fraction of the roofline")
    title = "Fraction of the roofline"
    axes.set_title(f"{title} (hollow: at least)" if unknown else title, loc="left", fontsize=11)


def _ms(seconds: Any) -> list[float]:
    return [1e3 * value for value in seconds]
