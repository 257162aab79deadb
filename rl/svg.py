"""Line plots as inline SVG: small, no library, no network; colours come from the page's style."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

_WIDTH, _HEIGHT = 460, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 8, 26


@dataclass(frozen=True)
class Series:
    """A named line of (x, y) points; `dots` marks each point, for series with few; without `line` only those."""

    name: str
    points: Sequence[tuple[float, float]]
    dots: bool = False
    line: bool = True


def line_plot(
    title: str,
    note: str,
    series: Sequence[Series],
    floor: float | None = None,
    rule: float | None = None,
    percent: bool = False,
) -> str:
    """A figure with a title, a legend (if there is more than one series) and the lines.

    Args:
        floor: the y axis begins here at the latest.
        rule: a dashed horizontal line, drawn if it is within reach of the data.
        percent: y is a share, shown in percent.
    """
    finite = [
        replace(one, points=[(x, y) for x, y in one.points if y is not None and math.isfinite(x) and math.isfinite(y)])
        for one in series
    ]
    filled = [(number, one) for number, one in enumerate(finite) if one.points]
    head = f"<h3>{html.escape(title)}</h3><span class='note'>{html.escape(note)}</span>"
    if not filled:
        return f"<figure>{head}<p class='note'>no data</p></figure>"
    xs = [x for _, one in filled for x, _ in one.points]
    ys = [y for _, one in filled for _, y in one.points]
    low, high = min(ys), max(ys)
    if rule is not None and high < rule <= 1.5 * high:
        high = rule
    if floor is not None:
        low = min(low, floor)
    y_ticks = ticks(low, high)
    x_ticks = [tick for tick in ticks(min(xs), max(xs)) if tick.is_integer() and min(xs) <= tick <= max(xs)]
    frame = _Frame(min(xs), max(xs), min(low, y_ticks[0]), max(high, y_ticks[-1]))
    body = [_y_tick(frame, tick, percent, y_ticks) for tick in y_ticks]
    body += [f"<text x='{frame.x(t):.1f}' y='{_HEIGHT - 8}' text-anchor='middle'>{t:g}</text>" for t in x_ticks]
    if rule is not None and frame.low <= rule <= frame.high:
        y = frame.y(rule)
        body.append(f"<line class='rule' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>")
    for number, one in filled:
        body.append(_line(frame, number, one))
    legend = ""
    if len(filled) > 1:
        keys = (
            f"<span class='key'><i style='background:var(--s{number % 4})'></i>{html.escape(one.name)}</span>"
            for number, one in filled
        )
        legend = f"<div>{''.join(keys)}</div>"
    label = html.escape(f"{title}: {note}", quote=True)
    return (
        f"<figure>{head}<svg viewBox='0 0 {_WIDTH} {_HEIGHT}' role='img' aria-label='{label}'>{''.join(body)}</svg>"
        f"{legend}</figure>"
    )


@dataclass(frozen=True)
class _Frame:
    """Data range and its place on the canvas."""

    left: float
    right: float
    low: float
    high: float

    def x(self, value: float) -> float:
        span = self.right - self.left
        share = (value - self.left) / span if span else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        span = self.high - self.low
        share = (value - self.low) / span if span else 0.5
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers that cover [low, high]: steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, high + margin
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(float(number * step), 12) for number in range(first, last + 1)]


def _y_tick(frame: _Frame, tick: float, percent: bool, all_ticks: list[float]) -> str:
    y = frame.y(tick)
    largest = max(abs(value) for value in all_ticks)
    text = f"{100 * tick:g} %" if percent else (f"{tick:.1e}" if 0 < largest < 0.01 and tick else f"{tick:g}")
    return (
        f"<line class='grid' x1='{_LEFT}' x2='{_WIDTH - _RIGHT}' y1='{y:.1f}' y2='{y:.1f}'/>"
        f"<text x='{_LEFT - 6}' y='{y + 4:.1f}' text-anchor='end'>{text}</text>"
    )


def _line(frame: _Frame, number: int, series: Series) -> str:
    points = [(frame.x(x), frame.y(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    colour = number % 4
    text = f"<polyline class='s s{colour}' points='{path}'/>" if series.line else ""
    radius = 3 if series.line else 1.6
    if series.dots or len(points) == 1:
        text += "".join(f"<circle class='d{colour}' cx='{x:.1f}' cy='{y:.1f}' r='{radius}'/>" for x, y in points)
    return text
