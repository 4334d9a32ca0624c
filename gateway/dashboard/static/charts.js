// The charts over time. uPlot draws on a canvas; colours come from the style sheet, so that they follow the theme.
import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { FiguresOf } from "./figures.js";
import { CAUSES } from "./causes.js";
import { count, percent, seconds } from "./format.js";

const HEIGHT = 190;
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const FONT = "11px system-ui, sans-serif";

// Ten seconds with three requests say little: a hit rate covers the minute before it, a bar half a minute.
const SMOOTH_S = 60;
const BAR_S = 30;
const SHORTEST_S = 5 * 60; // a gateway that has just started is not shown as if seconds were hours
const TICKS_S = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600];

export function HitRateChart({ series, theme, changes }) {
  const data = useMemo(() => {
    const points = Math.max(1, Math.round(SMOOTH_S / series.step_s));
    return [series.time, rollingRate(series.cached_prompt_tokens, series.prompt_tokens, points)];
  }, [series]);
  return html`<${Chart} title="Token hit rate" data=${data} theme=${theme} format=${percent}
    said=${series.step_s < SMOOTH_S ? "each point covers a minute" : stepSaid(series.step_s)}
    range=${[0, 1]} splits=${[0, 0.25, 0.5, 0.75, 1]} axisFormat=${(value) => `${Math.round(100 * value)}%`}
    marks=${changes.map(({ time, before, after }) => ({ time, said: `${before} → ${after}` }))}
    lines=${[{ name: "hit rate", color: "--saved", fill: "--saved-fill", width: 2 }]} />`;
}

export function PrefillChart({ series, theme }) {
  const step = Math.max(series.step_s, BAR_S);
  const data = useMemo(() => {
    const [time, spent, saved] = grouped(step, series.time, series.prefill_s, series.saved_prefill_s);
    return [time, spent.map((value, i) => value + saved[i]), spent];
  }, [series]);
  return html`<${Chart} title="Prefill seconds" data=${data} theme=${theme} format=${seconds} said=${stepSaid(step)} bars=${step}
    value=${(line, values) => (line === 0 ? values[0] - values[1] : values[1])}
    lines=${[
      { name: "saved", color: "--saved" },
      { name: "spent", color: "--spent" },
    ]} />`;
}

// Stacked: each line of the plot is the sum of its cause and those below, drawn from the tallest to the lowest.
export function MissChart({ series, theme }) {
  const step = Math.max(series.step_s, BAR_S);
  const causes = Object.keys(CAUSES).filter((cause) => cause in series.missed).reverse();
  const data = useMemo(() => {
    const [time, ...columns] = grouped(step, series.time, ...causes.map((cause) => series.missed[cause]));
    for (let line = columns.length - 2; line >= 0; line--) columns[line] = columns[line].map((value, i) => value + columns[line + 1][i]);
    return [time, ...columns];
  }, [series]);
  return html`<${Chart} key=${causes.join()} title="Missed tokens" data=${data} theme=${theme} format=${count} axisFormat=${axisCount} said=${stepSaid(step)} bars=${step}
    value=${(line, values) => values[line] - (values[line + 1] ?? 0)}
    lines=${causes.map((cause) => ({ name: CAUSES[cause].name, color: CAUSES[cause].color }))} />`;
}

export function TtftChart({ series, theme }) {
  const data = useMemo(() => [series.time, series.ttft_p50_s, series.ttft_p95_s], [series]);
  return html`<${Chart} title="Time to first token" data=${data} theme=${theme} format=${seconds} said=${stepSaid(series.step_s)}
    lines=${[
      { name: "p50", color: "--used", width: 2 },
      { name: "p95", color: "--warn", width: 1.5, dash: [5, 4] },
    ]} />`;
}

const stepSaid = (step) => (step < 60 ? `per ${step} s` : step === 60 ? "per minute" : `per ${step / 60} min`);

// Sums of columns over longer steps.
function grouped(step, time, ...columns) {
  const starts = [];
  const sums = columns.map(() => []);
  time.forEach((at, i) => {
    const start = Math.floor(at / step) * step;
    if (starts.at(-1) !== start) {
      starts.push(start);
      for (const sum of sums) sum.push(0);
    }
    sums.forEach((sum, column) => (sum[sum.length - 1] += columns[column][i]));
  });
  return [starts, ...sums];
}

function rollingRate(parts, wholes, points) {
  let part = 0;
  let whole = 0;
  return parts.map((_, i) => {
    part += parts[i] - (i >= points ? parts[i - points] : 0);
    whole += wholes[i] - (i >= points ? wholes[i - points] : 0);
    return whole > 0 ? part / whole : null;
  });
}

// One chart with its legend. The legend shows the values under the cursor, or else the latest ones there are.
function Chart({ title, said, data, lines, format, theme, range, splits, axisFormat, bars, value, marks = [] }) {
  const box = useRef(null);
  const marked = useRef(marks); // drawn by the plot, whose options are made once
  marked.current = marks;
  const plot = useRef(null);
  const [hovered, setHovered] = useState(null);

  useEffect(() => {
    const options = plotOptions({ width: box.current.clientWidth, lines, range, splits, axisFormat: axisFormat ?? axisSeconds, bars, marked, onHover: setHovered });
    plot.current = new uPlot(options, data, box.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    observer.observe(box.current);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    const redraw = () => plot.current.redraw(false, true);
    scheme.addEventListener("change", redraw);
    return () => {
      scheme.removeEventListener("change", redraw);
      observer.disconnect();
      plot.current.destroy();
    };
  }, []);

  useEffect(() => plot.current.setData(data), [data]);
  useEffect(() => plot.current.redraw(false, true), [theme]);

  const index = hovered ?? latest(data);
  const valueAt = (line, moment) => {
    const values = data.slice(1).map((column) => (moment === null ? null : column[moment]));
    return values[line] == null ? null : (value?.(line, values) ?? values[line]);
  };
  const at = (line) => valueAt(line, index);
  const columnOf = (line) => data[0].map((_, moment) => valueAt(line, moment));
  const spoken = [...lines.map((line, i) => `${line.name} ${format(at(i))}`), ...marks.map((mark) => mark.said)].join(", ");
  return html`<figure class="card chart">
    <figcaption>
      <h2>${title} <small>${said}</small></h2>
      <ul class="legend">
        ${lines.map((line, i) => html`<li key=${line.name}><i style=${{ background: `var(${line.color})` }}></i>${line.name} <b>${format(at(i))}</b></li>`)}
      </ul>
    </figcaption>
    <div class="plot" ref=${box} role="img" aria-label=${`${title} over time; latest: ${spoken}`}></div>
    <${FiguresOf} title=${title} said=${said} time=${data[0]} columns=${lines.map((line, i) => ({ name: line.name, values: columnOf(i), format }))} />
  </figure>`;
}

function latest(data) {
  for (let i = data[0].length - 1; i >= 0; i--) if (data.slice(1).some((column) => column[i])) return i;
  return null;
}

const axisCount = (value) => count(value);
const axisSeconds = (value) => (value === 0 ? "0" : value < 1 ? `${+(1000 * value).toPrecision(3)} ms` : `${+value.toPrecision(3)} s`);

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function plotOptions({ width, lines, range, splits, axisFormat, bars, marked, onHover }) {
  const margin = (bars ?? 0) / 2; // so that the outermost bars are whole
  const axis = {
    stroke: () => color("--muted"),
    font: FONT,
    grid: { stroke: () => color("--line"), width: 1 },
    ticks: { show: false },
  };
  return {
    width,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, sync: { key: "time" }, points: bars ? { show: false } : { size: 7 }, y: false },
    scales: { x: { range: (_, min, max) => [Math.min(min, max - SHORTEST_S) - margin, max + margin] }, y: { range: range ? () => range : (_, __, max) => [0, max > 0 ? max * 1.08 : 1] } },
    axes: [
      { ...axis, grid: { show: false }, space: 64, size: 28, incrs: TICKS_S, gap: 8, values: (_, ticks) => ticks.map((tick) => clock.format(tick * 1000)) },
      { ...axis, size: 52, gap: 6, space: 34, splits: splits && (() => splits), values: (_, ticks) => ticks.map(axisFormat) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: () => color(line.color),
        fill: bars ? () => color(line.color) : line.fill && (() => color(line.fill)),
        width: bars ? 0 : line.width,
        dash: line.dash,
        spanGaps: true,
        points: { show: bars ? false : isolated, size: 4, fill: () => color(line.color) },
        paths: bars ? uPlot.paths.bars({ size: [0.7, 16] }) : uPlot.paths.linear(),
      })),
    ],
    hooks: { draw: [(plot) => drawMarks(plot, marked.current)], setCursor: [(plot) => onHover(plot.cursor.left >= 0 ? (plot.cursor.idx ?? null) : null)] },
  };
}

// What the operator changed, as a dashed line with its words, where it falls into what is shown.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.font = `${Math.round(11 * devicePixelRatio)}px system-ui, sans-serif`;
  ctx.strokeStyle = ctx.fillStyle = color("--muted");
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  for (const { time, said } of marks) {
    const x = plot.valToPos(time, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    const left = x + ctx.measureText(said).width + 8 * devicePixelRatio > bbox.left + bbox.width;
    ctx.textAlign = left ? "right" : "left";
    ctx.fillText(said, x + (left ? -4 : 4) * devicePixelRatio, bbox.top + 12 * devicePixelRatio);
  }
  ctx.restore();
}

// A line needs two points; a lone one would be invisible.
function isolated(plot, seriesIndex) {
  return plot.data[seriesIndex].filter((value) => value != null).length === 1;
}
