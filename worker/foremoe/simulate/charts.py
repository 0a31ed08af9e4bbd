"""Charts as self-contained SVG text: no script, no external resource, readable in light and dark mode."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

WIDTH, HEIGHT = 880, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 12, 34

COLOURS = {
    "static": "#8a8f98",
    "eplb": "#d9822b",
    "lplb": "#9b59b6",
    "relibra": "#2a9d8f",
    "foremoe": "#2563eb",
}
CAUSE_COLOURS = {"expert": "#2563eb", "dense": "#93b4f5", "exchange": "#e0a526", "exposed_copy": "#d1495b"}
CAUSE_LABELS = {
    "expert": "experts",
    "dense": "attention and dense",
    "exchange": "dispatch and combine",
    "exposed_copy": "expert transfer, exposed",
}


def _ticks(low: float, high: float, count: int = 5) -> list[float]:
    step = 10 ** np.floor(np.log10(max(high - low, 1e-12) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    first = np.ceil(low / step) * step
    return [float(value) for value in np.arange(first, high + step / 2, step)]


def _frame(kind: str, label: str, body: Sequence[str], height: int = HEIGHT) -> str:
    return (
        f'<svg class="chart" data-chart="{kind}" role="img" aria-label="{escape(label)}" '
        f'viewBox="0 0 {WIDTH} {height}">' + "".join(body) + "</svg>"
    )


def lines(series: dict[str, Floats], *, label: str, x_label: str) -> str:
    """One line per strategy over micro-steps; the y axis starts at perfect balance, 1.0."""
    longest = max(values.size for values in series.values())
    high = max(1.05, max(float(values.max()) for values in series.values()))
    inner_w, inner_h = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def x_of(index: float) -> float:
        return _LEFT + inner_w * (index / max(1, longest - 1))

    def y_of(value: float) -> float:
        return _TOP + inner_h * (1 - (value - 1.0) / (high - 1.0))

    body = []
    for tick in _ticks(1.0, high):
        y = y_of(tick)
        body.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        body.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    for tick in _ticks(0, max(1, longest - 1), 8):
        if tick == int(tick):
            body.append(
                f'<text class="tick" x="{x_of(tick):.1f}" y="{HEIGHT - 18}" text-anchor="middle">{int(tick)}</text>'
            )
    body.append(f'<text class="axis" x="{WIDTH / 2}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>')
    for name, values in series.items():
        points = " ".join(f"{x_of(i):.1f},{y_of(float(value)):.1f}" for i, value in enumerate(values))
        body.append(
            f'<polyline fill="none" stroke="{COLOURS.get(name, "#444")}" stroke-width="2" points="{points}">'
            f"<title>{escape(name)}: mean {values.mean():.4f}, max {values.max():.4f}</title></polyline>"
        )
    return _frame("imbalance", label, body)


def heat_map(values_ML: Floats, *, label: str, high: float) -> str:
    """Layers down, micro-steps across; colour from balanced (pale) to `high` and above (dark)."""
    micro_steps, layers = values_ML.shape
    cell_h = max(3.0, min(16.0, 420 / layers))
    height = int(_TOP + cell_h * layers + _BOTTOM)
    cell_w = (WIDTH - _LEFT - _RIGHT) / micro_steps
    body = []
    for layer in range(layers):
        for micro_step in range(micro_steps):
            value = float(values_ML[micro_step, layer])
            shade = min(1.0, (value - 1.0) / max(high - 1.0, 1e-9))
            body.append(
                f'<rect x="{_LEFT + cell_w * micro_step:.1f}" y="{_TOP + cell_h * layer:.1f}" '
                f'width="{cell_w + 0.3:.1f}" height="{cell_h + 0.3:.1f}" fill="{_shade(shade)}">'
                f"<title>layer {layer}, micro-step {micro_step}: {value:.4f}</title></rect>"
            )
    for layer in range(0, layers, max(1, layers // 8)):
        y = _TOP + cell_h * (layer + 0.5) + 4
        body.append(f'<text class="tick" x="{_LEFT - 6}" y="{y:.1f}" text-anchor="end">{layer}</text>')
    body.append(
        f'<text class="axis" x="{WIDTH / 2}" y="{height - 6}" text-anchor="middle">'
        "micro-step (across), layer (down)</text>"
    )
    return _frame("heatmap", label, body, height)


def _shade(share: float) -> str:
    low, high = (226, 236, 252), (150, 22, 45)
    red, green, blue = (round(a + (b - a) * share) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def stacked_bars(rows: dict[str, dict[str, float]], *, label: str, unit: str) -> str:
    """One bar per row, split by cause."""
    bar_h, gap = 26, 10
    left = 110
    height = _TOP + (bar_h + gap) * len(rows) + _BOTTOM
    most = max(sum(parts.values()) for parts in rows.values()) or 1.0
    scale = (WIDTH - left - 110) / most
    body = []
    for index, (name, parts) in enumerate(rows.items()):
        y = _TOP + index * (bar_h + gap)
        x = float(left)
        body.append(f'<text class="name" x="{left - 8}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        for cause, value in parts.items():
            body.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(0.0, value * scale):.1f}" height="{bar_h}" '
                f'fill="{CAUSE_COLOURS[cause]}"><title>{escape(name)}, {CAUSE_LABELS[cause]}: '
                f"{value:.4g} {unit}</title></rect>"
            )
            x += value * scale
        body.append(f'<text class="tick" x="{x + 6:.1f}" y="{y + 18}">{sum(parts.values()):.4g} {unit}</text>')
    return _frame("time", label, body, height)
