// The charts over time: what each shows of the series, and over which steps.
import { html, useMemo } from "./vendor/htm-preact.js";
import { axisCount, axisPercent, Chart } from "./chart.js";
import { AGES, byAge } from "./ages.js";
import { CAUSES } from "./causes.js";
import { count, percent, seconds } from "./format.js";

// Ten seconds with three requests say little: a hit rate covers the minute before it, bars are at most sixty.
const SMOOTH_S = 60;
const BARS = 60;
const STEPS_S = [30, 60, 300, 600, 1800, 3600, 21_600, 43_200, 86_400];

export function HitRateChart({ series, said, changes }) {
  const data = useMemo(() => {
    const points = Math.max(1, Math.round(SMOOTH_S / series.step_s));
    return [series.time, rollingRate(series.cached_prompt_tokens, series.prompt_tokens, points)];
  }, [series]);
  return html`<${Chart} title="Token hit rate" data=${data} format=${percent}
    said=${`${said}, ${series.step_s < SMOOTH_S ? "each point covers a minute" : stepSaid(series.step_s)}`}
    range=${() => [0, 1]} splits=${[0, 0.25, 0.5, 0.75, 1]} axisFormat=${axisPercent}
    marks=${changes.map(({ time, before, after }) => ({ at: time, said: `${before} → ${after}` }))}
    lines=${[{ name: "hit rate", color: "--saved", fill: "--saved-fill", width: 2 }]} />`;
}

export function PrefillChart({ series, said }) {
  const step = barStep(series);
  const data = useMemo(() => {
    const [time, spent, saved] = grouped(step, series.time, series.prefill_s, series.saved_prefill_s);
    return [time, spent.map((value, i) => value + saved[i]), spent];
  }, [series]);
  return html`<${Chart} title="Prefill seconds" data=${data} format=${seconds} said=${`${said}, ${stepSaid(step)}`} bars=${step}
    value=${(line, values) => (line === 0 ? values[0] - values[1] : values[1])}
    lines=${[
      { name: "saved", color: "--saved" },
      { name: "spent", color: "--spent" },
    ]} />`;
}

export function TtftChart({ series, said }) {
  const data = useMemo(() => [series.time, series.ttft_p50_s, series.ttft_p95_s], [series]);
  return html`<${Chart} title="Time to first token" data=${data} format=${seconds} said=${`${said}, ${stepSaid(series.step_s)}`}
    lines=${[
      { name: "p50", color: "--used", width: 2 },
      { name: "p95", color: "--warn", width: 1.5, dash: [5, 4] },
    ]} />`;
}

export function LoadChart({ series, said }) {
  const step = barStep(series);
  const data = useMemo(() => grouped(step, series.time, series.requests), [series]);
  return html`<${Chart} title="Requests" data=${data} format=${count} axisFormat=${axisCount} said=${`${said}, ${stepSaid(step)}`} bars=${step}
    lines=${[{ name: "ended", color: "--used" }]} />`;
}

export function MissChart({ series, said }) {
  const causes = Object.keys(CAUSES).filter((cause) => cause in series.missed).reverse();
  return html`<${Stacked} key=${causes.join()} title="Missed tokens" series=${series} said=${said}
    columns=${causes.map((cause) => series.missed[cause])}
    lines=${causes.map((cause) => ({ name: CAUSES[cause].name, color: CAUSES[cause].color }))} />`;
}

// How long ago what had to be computed anew was evicted: little time says that the pool is too small for the traffic.
export function AgeChart({ series, said }) {
  const columns = useMemo(() => byAge(series), [series]);
  const shown = AGES.map((age, i) => ({ ...age, column: columns[i] })).filter(({ column }) => column.some((tokens) => tokens > 0));
  if (shown.length === 0) return null;
  return html`<${Stacked} key=${shown.map(({ name }) => name).join()} title="Evicted tokens asked for again" series=${series}
    said=${`${said}, by time since they left`}
    columns=${shown.map(({ column }) => column)} lines=${shown.map(({ name, color }) => ({ name, color }))} />`;
}

// Each line of the plot is the sum of its column and those after it, drawn from the tallest to the lowest.
function Stacked({ title, series, said, columns, lines }) {
  const step = barStep(series);
  const data = useMemo(() => {
    const [time, ...sums] = grouped(step, series.time, ...columns);
    for (let line = sums.length - 2; line >= 0; line--) sums[line] = sums[line].map((value, i) => value + sums[line + 1][i]);
    return [time, ...sums];
  }, [series]);
  return html`<${Chart} title=${title} data=${data} format=${count} axisFormat=${axisCount} said=${`${said}, ${stepSaid(step)}`} bars=${step}
    value=${(line, values) => values[line] - (values[line + 1] ?? 0)} lines=${lines} />`;
}

function stepSaid(step) {
  if (step < 60) return `per ${step} s`;
  if (step < 3600) return step === 60 ? "per minute" : `per ${step / 60} min`;
  return step === 3600 ? "per hour" : `per ${step / 3600} h`;
}

const barStep = ({ step_s: step, time }) => STEPS_S.find((longer) => longer % step === 0 && (step * time.length) / longer <= BARS) ?? step;

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
