// Charts that are not over time: what other pool sizes would have hit by policy, and what prefill costs by length.
import { html, useMemo } from "./vendor/htm-preact.js";
import { axisPercent, Chart } from "./chart.js";
import { count, percent, seconds } from "./format.js";

const COLORS = ["--used", "--cause-order", "--cause-form", "--cause-replica", "--cause-volatile", "--cause-tools", "--cause-namespace", "--cause-bypass"];
const LENGTHS = 24; // points of a cost curve

// A line per policy over the sizes that the ghost caches follow, that in force drawn last and strongest.
export function PolicyCurves({ whatif, policy }) {
  const names = [...new Set(whatif.rows.map((row) => row.policy))].sort((a, b) => (a === policy) - (b === policy));
  const sizes = [...new Set(whatif.rows.map((row) => row.size))].sort((a, b) => a - b);
  const [blocks, ...rates] = useMemo(() => {
    const of = (name, size) => whatif.rows.find((row) => row.policy === name && row.size === size);
    return [sizes.map((size) => of(names[0], size).blocks), ...names.map((name) => sizes.map((size) => of(name, size).token_hit_rate))];
  }, [whatif]);
  const data = useMemo(() => [blocks, ...rates], [whatif]);
  const now = sizes.indexOf(1);
  const here = now >= 0 ? rates.at(-1)[now] : undefined;
  return html`<${Chart} key=${`${names} ${blocks}`} title="Hit rate by pool size" data=${data} format=${percent} axisFormat=${axisPercent}
    said=${`what if, last hour, ${count(whatif.requests)} requests`} range=${near} rest=${now >= 0 ? now : null}
    across=${{ name: "blocks in all pools", format: count, log: true, ticks: blocks }}
    marks=${here === undefined ? [] : [{ at: blocks[now], value: here, said: `now: ${policy}, ${count(blocks[now])} blocks` }]}
    lines=${names.map((name, i) => name === policy
      ? { name: `${name} (in force)`, color: "--saved", width: 3 }
      : { name, color: COLORS[i % COLORS.length], width: 1.5 })} />`;
}

// Differences between policies are small against their hit rates: the axis need not start at 0.
function near(_, low, high) {
  const room = Math.max(0.02, 0.3 * (high - low));
  return [Math.max(0, low - room), Math.min(1, high + room)];
}

// What computing a whole prompt costs on each replica, by the curve that was fitted to it.
export function CostCurves({ replicas }) {
  const fitted = replicas.filter(({ curve, info }) => curve.fitted_to !== "nominal" && info).slice(0, COLORS.length);
  const longest = Math.max(...fitted.map(({ info }) => info.max_model_len));
  const lengths = useMemo(() => Array.from({ length: LENGTHS + 1 }, (_, i) => Math.max(1, Math.round((i * longest) / LENGTHS))), [longest]);
  const data = useMemo(() => [lengths, ...fitted.map((row) => lengths.map((tokens) => cost(row, tokens)))], [replicas]);
  if (fitted.length === 0) return null;
  return html`<${Chart} key=${`${fitted.map(({ id }) => id)} ${longest}`} title="Prefill cost" data=${data} format=${seconds}
    said="now, fitted to what was measured; a whole prompt, nothing cached" rest=${LENGTHS / 2}
    across=${{ name: "prompt tokens", format: count, ticks: [0, 1, 2, 3, 4].map((part) => Math.round((part * longest) / 4)) }}
    lines=${fitted.map(({ id }, i) => ({ name: id, color: COLORS[i], width: 2 }))} />`;
}

// As the gateway's own estimate: per step, per token, and per token in front of each.
function cost({ curve, info }, tokens) {
  if (tokens > info.max_model_len) return null;
  const steps = Math.ceil(tokens / (info.max_batch_tokens || tokens));
  return curve.step_s * steps + curve.token_s * tokens + (curve.context_s * tokens * (tokens - 1)) / 2;
}
