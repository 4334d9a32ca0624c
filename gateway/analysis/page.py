"""An analysis as one page that needs nothing else: no scripts, light and dark, wide and narrow."""

from __future__ import annotations

from html import escape
from typing import Final

from gateway.analysis.findings import findings
from gateway.analysis.report import Report
from gateway.attribution.causes import CAUSES, CauseRow

__all__ = ["render_page"]

_EXAMPLES: Final = 12
_HUES: Final = dict(zip(CAUSES, (210, 300, 265, 5, 45, 185, 75, 325, 235, 100, 340), strict=True))

_STYLE: Final = """
:root { color-scheme: light dark; --ground: #f4f6f8; --card: #fff; --text: #141a21; --muted: #5a6573; --line: #e2e6eb;
  --track: #e6eaef; --good: #0c8a66; --plain: #8894a2; --bound: #4a56d2; --tone: 46%; --here: #c4283c; }
@media (prefers-color-scheme: dark) { :root { --ground: #0d1116; --card: #151a21; --text: #e7ebf0; --muted: #98a3b1;
  --line: #252c36; --track: #262d37; --good: #34c99b; --plain: #6b7787; --bound: #8a94f7; --tone: 62%;
  --here: #ff6b7a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text); font: 14px/1.5 system-ui, sans-serif;
  font-variant-numeric: tabular-nums; }
main { max-width: 960px; margin: 0 auto; padding: 24px 16px; }
h1 { font-size: 20px; margin: 0 0 4px; overflow-wrap: anywhere; } h2 { font-size: 15px; margin: 0 0 12px; }
p { color: var(--muted); margin: 0 0 12px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px;
  margin: 0 0 20px; }
.row { display: grid; grid-template-columns: minmax(90px, 190px) 1fr 72px; gap: 4px 12px; align-items: center;
  margin: 0 0 8px; }
.row .name { overflow-wrap: anywhere; } .row .value { text-align: right; }
.track { background: var(--track); border-radius: 4px; height: 16px; overflow: hidden; display: flex; }
.track i { display: block; height: 100%; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 12px 0 0; color: var(--muted); padding: 0;
  list-style: none; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
dl { margin: 0; } dt { font-weight: 600; } dd { margin: 0 0 12px; color: var(--muted); }
figure { margin: 0 0 16px; } figcaption { color: var(--muted); margin: 0 0 4px; }
pre { margin: 0; padding: 10px 12px; background: var(--ground); border: 1px solid var(--line); border-radius: 6px;
  white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.5 ui-monospace, monospace; }
pre .before { color: var(--muted); } pre .here { color: var(--here); } pre .there { color: var(--good); }
@media (max-width: 520px) { .row { grid-template-columns: 1fr 64px; } .row .track { grid-column: 1 / -1; order: 3; } }
"""


def render_page(report: Report) -> str:
    """The page for ``report``."""
    analysis = report.analysis
    bad = f", {len(report.bad_lines):,} bad lines left out" if report.bad_lines else ""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Prefix cache analysis of {escape(report.name)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<main>\n<h1>Prefix cache analysis of {escape(report.name)}</h1>\n"
        f"<p>{analysis.requests:,} requests with {analysis.tokens:,} prompt tokens{bad}.</p>\n"
        + _hit_rates(report)
        + _causes(report)
        + _findings(report)
        + _examples(report)
        + f"<section>\n<h2>Suggested configuration</h2>\n<pre>{escape(report.configuration)}</pre>\n</section>\n"
        + "</main>\n</body>\n</html>\n"
    )


def _hit_rates(report: Report) -> str:
    rates = report.analysis.hit_rate
    bars = []
    for size in rates.as_is:
        cache = "cache without end" if size == "inf" else f"cache of {int(size):,} blocks"
        bars.append(_bar(f"as is, {cache}", rates.as_is[size], "plain"))
        bars.append(_bar(f"canonical, {cache}", rates.canonical[size], "good"))
    bars.append(_bar("bound for any order of documents", rates.position_independent, "bound"))
    return (
        "<section>\n<h2>Tokens found in the cache</h2>\n"
        "<p>Share of all prompt tokens: with the prompts as they are, and as the gateway would lay them out.</p>\n"
        + "".join(bars)
        + "</section>\n"
    )


def _bar(name: str, rate: float, colour: str) -> str:
    shown = f"{100 * rate:.2f} %"
    return (
        f'<div class="row"><span class="name">{name}</span>'
        f'<span class="track" role="img" aria-label="{name}: {shown}">'
        f'<i style="width: {100 * rate:.3f}%; background: var(--{colour})"></i></span>'
        f'<span class="value">{shown}</span></div>\n'
    )


def _causes(report: Report) -> str:
    at = "a cache without end" if report.causes_at == "inf" else f"a cache of {int(report.causes_at):,} blocks"
    bars = []
    for template in sorted(report.templates, key=lambda template: (-template.tokens, template.template)):
        rows = [row for row in report.analysis.causes if row.template == template.template]
        cached = template.tokens - sum(row.tokens for row in rows)
        label = ", ".join(f"{row.cause} {_percent(row.tokens, template.tokens)}" for row in rows)
        segments = [f'<i style="width: {100 * cached / template.tokens:.3f}%; background: var(--good)"></i>']
        segments += [
            f'<i style="width: {100 * row.tokens / template.tokens:.3f}%; background: {_colour(row)}"></i>'
            for row in rows
        ]
        bars.append(
            f'<div class="row"><span class="name">{escape(template.template)}</span>'
            f'<span class="track" role="img" aria-label="{escape(template.template)}: '
            f'cached {_percent(cached, template.tokens)}, {label}" title="{label}">{"".join(segments)}</span>'
            f'<span class="value">{template.requests:,}</span></div>\n'
        )
    present = dict.fromkeys(row.cause for row in report.analysis.causes)
    legend = ['<li><i style="background: var(--good)"></i>cached</li>']
    legend += [f'<li><i style="background: hsl({_HUES[cause]} 62% var(--tone))"></i>{cause}</li>' for cause in present]
    return (
        "<section>\n<h2>Why the rest was not</h2>\n"
        f"<p>Every missed token of the prompts as they are, in {at}, by template; on the right the requests.</p>\n"
        + "".join(bars)
        + f'<ul class="legend">{"".join(legend)}</ul>\n</section>\n'
    )


def _findings(report: Report) -> str:
    entries = [
        f"<dt>{finding.cause}: {100 * finding.share:.2f} % of all tokens, {finding.requests:,} requests</dt>"
        f"<dd>{escape(finding.text)}</dd>\n"
        for finding in findings(report)
    ]
    return f"<section>\n<h2>What that means</h2>\n<dl>\n{''.join(entries)}</dl>\n</section>\n" if entries else ""


def _examples(report: Report) -> str:
    figures = [_example(row) for row in report.analysis.causes if row.example is not None][:_EXAMPLES]
    if not figures:
        return ""
    return (
        "<section>\n<h2>Where prompts part</h2>\n"
        "<p>Of each cause and template the request that lost most to it: what both had, then "
        "its own text, and below what the earlier one had there.</p>\n" + "".join(figures) + "</section>\n"
    )


def _example(row: CauseRow) -> str:
    example = row.example
    assert example is not None
    there = ""
    if example.there:
        there = f'\n<span class="before">the earlier one:</span>\n<span class="there">{escape(example.there)}</span>'
    about = f"{row.cause}, {escape(row.template)}: {row.tokens:,} tokens of {row.requests:,} requests"
    return (
        f"<figure><figcaption>{about}; here from token {example.token:,} on</figcaption>"
        f'<pre><span class="before">{escape(example.text_before)}</span>'
        f'<span class="here">{escape(example.here)}</span>{there}</pre></figure>\n'
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %"


def _colour(row: CauseRow) -> str:
    return f"hsl({_HUES[row.cause]} 62% var(--tone))"
