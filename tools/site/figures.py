"""Plotly figures as plain dicts: traces, axes with units, and the HTML that holds one."""

import html
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Readable on white and on dark gray, and told apart by the color-blind (Okabe and Ito, without black and yellow).
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c8c", "#a05a2c")
HEIGHT = 420  # pixels
# 1, 2 and 5 in each power of ten, each written in full: plotly would write "2" for 2,000.
_TICKS = [float(f"{digit}e{power}") for power in range(-6, 7) for digit in (1, 2, 5)]
_TEXTS = [f"{tick:,.0f}" if tick >= 1 else f"{tick:.6f}".rstrip("0") for tick in _TICKS]
LOGARITHMIC = {"type": "log", "tickmode": "array", "tickvals": _TICKS, "ticktext": _TEXTS}


@dataclass(frozen=True)
class Figure:
    """One plot of a page. title: its heading. says: what it shows, a sentence. records: names, "h200/serving"."""

    title: str
    says: str
    records: Sequence[str]
    traces: Sequence[dict]
    x: dict
    y: dict
    more: dict

    def page(self) -> str:
        """The figure's section in Markdown: heading, sentence, plot, links to its records. The page is in records/."""
        layout = {
            "height": HEIGHT,
            "colorway": COLORS,
            "margin": {"l": 10, "r": 10, "t": 10, "b": 10},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"size": 13},
            "legend": {"orientation": "h", "yref": "container", "y": 1, "yanchor": "top"},
            "xaxis": self.x,
            "yaxis": self.y,
            **self.more,
        }
        # A script ends at the first "</", in a string too.
        drawn = json.dumps({"data": list(self.traces), "layout": layout}).replace("</", "<\\/")
        label = html.escape(f"{self.title}. {self.says}")
        links = ", ".join(f"[{name}.json](../data/results/{name}.json)" for name in self.records)
        return (
            f"## {self.title}\n\n{self.says}\n\n```{{raw}} html\n"
            f'<div class="record-plot"><div role="img" aria-label="{label}"></div>\n'
            f'<script type="application/json">{drawn}</script></div>\n```\n\nData: {links}\n'
        )


def figure(
    title: str, says: str, records: Sequence[str], traces: Iterable[dict], x: dict, y: dict, **more: object
) -> Figure:
    """A figure. more: further settings of plotly's layout."""
    return Figure(title, says, records, list(traces), x, y, more)


def axis(title: str, log: bool = False, **more: object) -> dict:
    """An axis with its title, units included."""
    scale = LOGARITHMIC if log else {}
    return {"title": {"text": title, "standoff": 12}, "automargin": True, **scale, **more}


def categories(title: str) -> dict:
    """An axis of names. On a phone, plotly would rotate them, and their lines would overlap."""
    return axis(title, tickangle=0, tickfont={"size": 11})


def bars(name: str, x: Sequence, y: Sequence[float], **more: object) -> dict:
    return {"type": "bar", "name": name, "x": list(x), "y": list(y), **more}


def line(name: str, x: Sequence, y: Sequence[float], **more: object) -> dict:
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": list(x), "y": list(y), **more}


def dots(name: str, x: Sequence, y: Sequence[float], **more: object) -> dict:
    """Instead of bars where the axis is logarithmic: a bar's length would mean nothing there."""
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {"size": 12},
        "name": name,
        "x": list(x),
        "y": list(y),
        **more,
    }
