// One chart with its legend, its figures and its file. uPlot draws on a canvas; colours come from the style sheet.
import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { FiguresOf } from "./figures.js";
import { count } from "./format.js";

const HEIGHT = 190;
const FONT = "11px system-ui, sans-serif";
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "2-digit" });

const MINUTE_S = 60;
const HOUR_S = 3_600;
const DAY_S = 86_400;
const SHORTEST_S = 5 * MINUTE_S; // a gateway that has just started is not shown as if seconds were hours
const SECONDS = [0.001, 0.01, 0.1, 1, 10].flatMap((ten) => [ten, 2 * ten, 5 * ten]).filter((step) => step < 30); // of an axis
const MINUTES = [0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1440, 2880, 7200].map((minutes) => minutes * MINUTE_S);
const TICKS_S = [60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, DAY_S, 2 * DAY_S, 5 * DAY_S, 10 * DAY_S];

// `data` is what uPlot draws: the moments (or what else is `across`: { name, format, log, ticks }), then a column per
// line. Stacked columns are sums; `value(line, values)` gives what a line itself is worth. The legend shows the values
// under the cursor, or else those at index `rest`, or the latest there are. `marks` are words at a moment or a point.
export function Chart({ title, said, data, lines, format, range, splits, axisFormat, bars, value, across, rest, marks = [] }) {
  const box = useRef(null);
  const marked = useRef(marks); // drawn by the plot, whose options are made once
  marked.current = marks;
  const plot = useRef(null);
  const [hovered, setHovered] = useState(null);

  useEffect(() => {
    const options = plotOptions({ width: box.current.clientWidth, lines, range, splits, axisFormat, bars, across, marked, onHover: setHovered });
    plot.current = new uPlot(options, data, box.current);
    const observer = new ResizeObserver(() => plot.current.setSize({ width: box.current.clientWidth, height: HEIGHT }));
    observer.observe(box.current);
    const redraw = () => plot.current.redraw(false, true);
    addEventListener("themechange", redraw);
    return () => {
      removeEventListener("themechange", redraw);
      observer.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current.setData(data), [data]);

  const valueAt = (line, index) => {
    if (index === null || data[line + 1][index] == null) return null;
    return value?.(line, data.slice(1).map((column) => column[index])) ?? data[line + 1][index];
  };
  const index = hovered !== null && hovered < data[0].length ? hovered : (rest ?? latest(data));
  const columns = lines.map(({ name }, line) => ({ name, format, values: data[0].map((_, i) => valueAt(line, i)) }));
  const spoken = [...lines.map(({ name }, line) => `${name} ${format(valueAt(line, index))}`), ...marks.map((mark) => mark.said)].join(", ");
  const label = across ? `${title} by ${across.name}; now: ${spoken}` : `${title} over time; latest: ${spoken}`;
  return html`<figure class="card chart">
    <figcaption>
      <h2>${title} <small>${said}</small></h2>
      <ul class="legend">
        ${lines.map(({ name, color }, line) => html`<li key=${name}><i style=${{ background: `var(${color})` }}></i>${name} <b>${format(valueAt(line, index))}</b></li>`)}
      </ul>
    </figcaption>
    <div class="plot" ref=${box} role="img" aria-label=${label}></div>
    ${across && html`<p class="across" aria-hidden="true">${across.name}</p>`}
    <${FiguresOf} title=${title} said=${said} across=${across} keys=${data[0]} columns=${columns} />
  </figure>`;
}

function latest(data) {
  for (let i = data[0].length - 1; i >= 0; i--) if (data.slice(1).some((column) => column[i])) return i;
  return null;
}

export const axisCount = (value) => count(value);
export const axisPercent = (value) => `${+(100 * value).toFixed(1)}%`;

function axisSeconds(value) {
  if (value === 0) return "0";
  if (value < 1) return `${+(1000 * value).toPrecision(3)} ms`;
  if (value < MINUTE_S) return `${+value.toPrecision(3)} s`;
  return value < HOUR_S ? `${+(value / MINUTE_S).toPrecision(3)} min` : `${+(value / HOUR_S).toPrecision(3)} h`;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function plotOptions({ width, lines, range, splits, axisFormat = axisSeconds, bars, across, marked, onHover }) {
  const margin = (bars ?? 0) / 2; // so that the outermost bars are whole
  const axis = {
    stroke: () => color("--muted"),
    font: FONT,
    grid: { stroke: () => color("--line"), width: 1 },
    ticks: { show: false },
  };
  const overTime = { range: (_, min, max) => [Math.min(min, max - SHORTEST_S) - margin, max + margin] };
  const overSizes = { time: false, distr: across?.log ? 3 : 1, log: 2, range: (_, min, max) => (across.log ? [min / 1.15, max * 1.15] : [min, max]) };
  const bottom = across
    ? { splits: () => across.ticks, values: (_, ticks) => ticks.map(across.format), filter: (_, ticks) => ticks }
    : { incrs: TICKS_S, values: (_, ticks) => ticks.map(moment) };
  return {
    width,
    height: HEIGHT,
    padding: [8, 18, 0, 0],
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, sync: across ? undefined : { key: "time" }, points: bars ? { show: false } : { size: 7 }, y: false },
    scales: { x: across ? overSizes : overTime, y: { range: range ?? ((_, __, max) => [0, max > 0 ? max * 1.08 : 1]) } },
    axes: [
      { ...axis, grid: { show: false }, space: 64, size: 28, gap: 8, ...bottom },
      { ...axis, size: 58, gap: 6, space: 34, splits: splits && (() => splits), incrs: axisFormat === axisSeconds ? [...SECONDS, ...MINUTES] : undefined, values: (_, ticks) => ticks.map(axisFormat) },
    ],
    series: [
      {},
      ...lines.map((line) => ({
        stroke: () => color(line.color),
        fill: bars ? () => color(line.color) : line.fill && (() => color(line.fill)),
        width: bars ? 0 : line.width,
        dash: line.dash,
        spanGaps: true,
        points: { show: bars ? false : across?.log ? true : isolated, size: across ? 5 : 4, fill: () => color(line.color) },
        paths: bars ? uPlot.paths.bars({ size: [0.7, 16] }) : uPlot.paths.linear(),
      })),
    ],
    hooks: { draw: [(plot) => drawMarks(plot, marked.current)], setCursor: [(plot) => onHover(plot.cursor.left >= 0 ? (plot.cursor.idx ?? null) : null)] },
  };
}

// Midnight and longer steps are told by their day.
function moment(unix) {
  const at = new Date(unix * 1000);
  return at.getHours() === 0 && at.getMinutes() === 0 ? day.format(at) : clock.format(at);
}

// What the operator changed, as a dashed line with its words where it falls into what is shown; a mark with a `value` is
// a ring around that point.
function drawMarks(plot, marks) {
  const { ctx, bbox } = plot;
  const dot = devicePixelRatio;
  ctx.save();
  ctx.font = `${Math.round(11 * dot)}px system-ui, sans-serif`;
  for (const { at, value, said } of marks) {
    ctx.strokeStyle = ctx.fillStyle = color("--muted");
    ctx.lineWidth = dot;
    const x = plot.valToPos(at, "x", true);
    if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
    ctx.setLineDash([4 * dot, 3 * dot]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.setLineDash([]);
    if (value !== undefined) {
      ctx.strokeStyle = ctx.fillStyle = color("--text");
      ctx.lineWidth = 2 * dot;
      ctx.beginPath();
      ctx.arc(x, plot.valToPos(value, "y", true), 6 * dot, 0, 2 * Math.PI);
      ctx.stroke();
    }
    const left = x + ctx.measureText(said).width + 8 * dot > bbox.left + bbox.width;
    ctx.textAlign = left ? "right" : "left";
    const start = x + (left ? -4 : 4) * dot;
    const y = bbox.top + 12 * dot;
    ctx.lineWidth = 4 * dot;
    ctx.strokeStyle = color("--card"); // so that words are read also where they cross a line
    ctx.strokeText(said, start, y);
    ctx.fillText(said, start, y);
  }
  ctx.restore();
}

// A line needs two points; a lone one would be invisible.
function isolated(plot, seriesIndex) {
  return plot.data[seriesIndex].filter((value) => value != null).length === 1;
}
