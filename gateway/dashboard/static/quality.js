// The quality gate: what reordering documents earns, whether it harms answers, and the switch.
import { html, useCallback, useState } from "./vendor/htm-preact.js";
import { count, percent, plural, seconds } from "./format.js";
import { useAct } from "./polled.js";

const METRICS = {
  agreement: { name: "Disagreement", unit: "" },
  logprob: { name: "Log-probability lost", unit: " nats" },
  gold: { name: "Gold answers lost", unit: "" },
};
const SAID = { harmless: "harmless within the bound", undecided: "undecided", harmful: "outside its bound" };

export function Quality({ quality, keyHeader }) {
  const { templates, shadows } = quality;
  return html`<section class="card quality" aria-labelledby="quality-title">
    <h2 id="quality-title">Quality <small>does another order of documents harm answers; since each test began</small></h2>
    ${templates.length === 0
      ? html`<p class="note">Nothing was measured yet: <code>[quality]</code> in the configuration says which share of the
          requests keeps the application’s order (<code>holdout</code>) and which is asked again (<code>sample</code>).</p>`
      : templates.map((row) => html`<${Template} key=${row.template} row=${row} keyHeader=${keyHeader} />`)}
    ${templates.length > 0 && html`<p class="note">
      ${plural(shadows.compared, "request", "requests")} compared by this gateway, ${count(shadows.kept)} waiting for an idle
      moment, ${count(shadows.dropped)} dropped, ${count(shadows.failed)} failed.
    </p>`}
  </section>`;
}

function Template({ row, keyHeader }) {
  const metrics = Object.entries(METRICS).filter(([name]) => name in row.metrics);
  return html`<article class="judged" aria-label=${`Quality of ${row.template}`}>
    <div class="bar-title">
      <h3>${row.template} <span class=${`verdict ${row.reordering ? row.verdict : "off"}`}>
        ${row.reordering ? "reordered" : "switched off"}, ${SAID[row.verdict]}</span></h3>
      <${Switch} row=${row} keyHeader=${keyHeader} />
    </div>
    ${row.reason && html`<p class="advice">${sentence(row.reason)}</p>`}
    <dl>
      ${metrics.map(([name, { name: title, unit }]) => html`<div key=${name}><dt>${title}</dt><dd><${Measure} row=${row.metrics[name]} unit=${unit} /></dd></div>`)}
      ${["reordered", "preserved"].filter((arm) => arm in row.arms).map((arm) => html`<div key=${arm}>
        <dt>Hit rate ${arm === "preserved" ? "held out" : "reordered"}</dt>
        <dd>${percent(row.arms[arm].token_hit_rate)}
          <small>${seconds(row.arms[arm].ttft_p50_s)} TTFT p50, ${plural(row.arms[arm].requests, "request", "requests")}</small></dd>
      </div>`)}
    </dl>
  </article>`;
}

function Measure({ row, unit }) {
  return html`${signed(row.excess)}${unit}
    <small>${signed(row.low)} to ${signed(row.high)}, ${row.bound === null ? "not tested" : `${row.bound} allowed`},
      ${plural(row.pairs, "pair", "pairs")}</small>`;
}

const signed = (value) => `${value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;
const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function Switch({ row, keyHeader }) {
  const [busy, setBusy] = useState(false);
  const [said, send] = useAct(keyHeader, useCallback(() => setBusy(false), []));
  const apply = () => {
    setBusy(true);
    const settled = (now) => (now.reordering ? "Reordered again; a new test has begun." : "Switched off.");
    send("POST", `quality/${encodeURIComponent(row.template)}`, settled, { reordering: !row.reordering });
  };

  return html`<div class="switch">
    <span role="status">${said}</span>
    <button type="button" onClick=${apply} disabled=${busy}>${row.reordering ? "Switch off" : "Switch on again"}<span class="unseen"> for ${row.template}</span></button>
  </div>`;
}
