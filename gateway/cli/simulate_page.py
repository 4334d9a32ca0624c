"""Hit-rate curves of a simulation as one page that needs nothing else: drawn as SVG, light and dark, no scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from gateway.cli.simulate import SimulationRow

__all__ = ["render_page"]

_WIDTH, _HEIGHT = 860, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 16, 44
_CEILING: Final = "opt"
_HUES: Final = (210, 28, 150, 340, 265, 55, 185, 5, 100, 305, 235, 125)

_STYLE: Final = """
:root { color-scheme: light dark; --ground: #f4f6f8; --card: #fff; --text: #141a21; --muted: #5a6573; --line: #e2e6eb;
  --tone: 42%; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1116; --card: #151a21; --text: #e7ebf0; --muted: #98a3b1;
  --line: #252c36; --tone: 66%; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 14px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 960px; margin: 0 auto; padding: 24px; }
h1 { font-size: 20px; margin: 0 0 4px; } h2 { font-size: 15px; margin: 0; overflow-wrap: anywhere; }
p { color: var(--muted); margin: 0 0 16px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px;
  margin: 0 0 20px; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--muted); font-size: 12px; }
.grid { stroke: var(--line); } .curve { fill: none; stroke-width: 2; stroke-linejoin: round; }
.curve.ceiling { stroke: var(--text); stroke-dasharray: 5 4; } .dot.ceiling { fill: var(--text); }
.swatch { display: inline-block; width: 14px; height: 0; border-top: 3px solid; margin-right: 8px;
  vertical-align: middle; }
.swatch.ceiling { border-top-style: dashed; border-color: var(--text); }
.hit { fill: transparent; }
.policy:hover .curve { stroke-width: 4; } .chart:has(.policy:hover) .policy:not(:hover, .ceiling) { opacity: 0.25; }
.scroll { overflow-x: auto; } .scroll .chart { min-width: 600px; }
th:first-child { position: sticky; left: 0; background: var(--card); }
table { border-collapse: collapse; width: 100%; margin-top: 12px; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child { text-align: left; font-weight: 500; } thead th { color: var(--muted); font-weight: 500; }
td.best { font-weight: 700; }
"""


def render_page(rows: Sequence[SimulationRow]) -> str:
    """The page for ``rows``: per trace a chart of token hit rates over cache sizes, and the figures as a table."""
    policies = list(dict.fromkeys(row.policy for row in rows))
    colours = {name: f"hsl({hue} 62% var(--tone))" for name, hue in zip(policies, _HUES * len(policies), strict=False)}
    sections = []
    for trace in dict.fromkeys(row.trace for row in rows):
        own = [row for row in rows if row.trace == trace]
        sections.append(_section(trace, own, policies, colours))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Eviction policies by cache size</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        "<h1>Eviction policies by cache size</h1>\n"
        "<p>Share of input tokens found in the cache. The dashed line is the optimum, which knows the future. "
        "Point at a curve for its figures.</p>\n" + "".join(sections) + "</main>\n</body>\n</html>\n"
    )


def _section(trace: str, rows: Sequence[SimulationRow], policies: Sequence[str], colours: dict[str, str]) -> str:
    name = escape(Path(trace).name)
    about = f"{rows[0].requests:,} requests, {rows[0].semantics} semantics"
    chart = _chart(f"Token hit rate by cache size on {name}", rows, policies, colours)
    return f"<section>\n<h2>{name}</h2>\n<p>{about}</p>\n{chart}{_table(rows, policies, colours)}</section>\n"


def _chart(label: str, rows: Sequence[SimulationRow], policies: Sequence[str], colours: dict[str, str]) -> str:
    sizes = sorted({row.blocks for row in rows})
    top = _ceiling(max(row.token_hit_rate for row in rows))
    low, high = log(sizes[0]), log(sizes[-1])

    def x(size: int) -> float:
        share = (log(size) - low) / (high - low) if high > low else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / top * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<div class="scroll"><svg class="chart" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">\n'
    ]
    for step in range(6):
        rate = top * step / 5
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(rate):.1f}" y2="{y(rate):.1f}"/>'
            f'<text x="{_LEFT - 8}" y="{y(rate) + 4:.1f}" text-anchor="end">{100 * rate:.3g} %</text>\n'
        )
    for size in sizes:
        anchor = "end" if len(sizes) > 1 and size == sizes[-1] else "middle"
        parts.append(f'<text x="{x(size):.1f}" y="{_HEIGHT - 22}" text-anchor="{anchor}">{size:,}</text>\n')
    parts.append(f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 4}" text-anchor="middle">blocks</text>\n')
    for policy in policies:
        own = sorted((row for row in rows if row.policy == policy), key=lambda row: row.blocks)
        ceiling = policy == _CEILING
        points = " ".join(f"{x(row.blocks):.1f},{y(row.token_hit_rate):.1f}" for row in own)
        stroke = "" if ceiling else f' style="stroke: {colours[policy]}"'
        fill = "" if ceiling else f' style="fill: {colours[policy]}"'
        extra = " ceiling" if ceiling else ""
        parts.append(f'<g class="policy{extra}"><polyline class="curve{extra}"{stroke} points="{points}"/>\n')
        for row in own:
            place = f'cx="{x(row.blocks):.1f}" cy="{y(row.token_hit_rate):.1f}"'
            parts.append(
                f'<circle class="dot{extra}"{fill} r="3.5" {place}/><circle class="hit" r="10" {place}>'
                f"<title>{policy}, {row.blocks:,} blocks: {100 * row.token_hit_rate:.2f} %</title></circle>\n"
            )
        parts.append("</g>\n")
    return "".join(parts) + "</svg></div>\n"


def _ceiling(rate: float) -> float:
    """A round top of the scale, at least ``rate``, that five steps divide evenly."""
    for top in (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        if rate <= top:
            return top
    return 1.0


def _table(rows: Sequence[SimulationRow], policies: Sequence[str], colours: dict[str, str]) -> str:
    sizes = sorted({row.blocks for row in rows})
    rates = {(row.policy, row.blocks): row.token_hit_rate for row in rows}
    best = {size: max((rates[name, size] for name in policies if name != _CEILING), default=None) for size in sizes}
    head = "".join(f'<th scope="col">{size:,} blocks</th>' for size in sizes)
    lines = []
    for name in policies:
        ceiling = name == _CEILING
        swatch = '<span class="swatch ceiling">' if ceiling else f'<span class="swatch" style="color: {colours[name]}">'
        classes = [' class="best"' if not ceiling and rates[name, size] == best[size] else "" for size in sizes]
        cells = "".join(
            f"<td{extra}>{100 * rates[name, size]:.2f} %</td>" for size, extra in zip(sizes, classes, strict=True)
        )
        lines.append(f'<tr><th scope="row">{swatch}</span>{name}</th>{cells}</tr>\n')
    return (
        f'<div class="scroll"><table>\n<thead><tr><th scope="col">Policy</th>{head}</tr></thead>\n<tbody>\n'
        + "".join(lines)
        + "</tbody>\n</table></div>\n"
    )
