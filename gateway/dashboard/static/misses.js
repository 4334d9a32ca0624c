// Why prompt tokens had to be computed: by cause, over time and per template, with the place where a prompt turned away.
import { html, useState } from "./vendor/htm-preact.js";
import { AgeChart, MissChart } from "./charts.js";
import { CAUSES } from "./causes.js";
import { fileLink } from "./figures.js";
import { count, percent, plural, seconds, share, time } from "./format.js";
import { Missing, usePolled } from "./polled.js";

const FIRST = 6; // of the places where prompts turn away; the rest on demand

export function Misses({ span, said, series, charted, keyHeader }) {
  const [report] = usePolled(`misses?window=${span}`, keyHeader);
  const [template, setTemplate] = useState("");
  const [all, setAll] = useState(false);
  if (report === null || report.problem) return html`<${Missing} title="Misses" said=${report} />`;
  if (report.enabled && report.prompt_tokens === 0) {
    return html`<section class="card"><h2>Misses <small>${said}</small></h2>
      <p class="note">No request in this window: choose a longer one, or send some, and each token that was not cached is told here with its cause.</p>
    </section>`;
  }
  if (!report.enabled) {
    return html`<section class="card"><h2>Misses</h2>
      <p class="note">Misses are not explained here: <code>[attribution] enabled</code> is false in the configuration.</p>
    </section>`;
  }
  const templates = [...new Set(report.rows.map((row) => row.template))].sort();
  const rows = report.rows.filter((row) => template === "" || row.template === template);
  return html`
    <section class="charts" aria-label=${`Charts, ${charted}`}>
      <${MissChart} series=${series} said=${charted} />
      <${AgeChart} series=${series} said=${charted} />
    </section>
    <${Causes} report=${report} said=${said} />
    <section class="card misses" aria-labelledby="turns-title">
      <div class="bar-title">
        <h2 id="turns-title">Where prompts turn away <small>${said}, most tokens first; examples: the latest costly one</small></h2>
        <div class="switch"><label>Template <select value=${template} onChange=${(event) => setTemplate(event.target.value)}>
          <option value="">all</option>${templates.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label></div>
      </div>
      ${rows.length === 0 && html`<p class="note">Nothing was missed in this window.</p>`}
      ${(all ? rows : rows.slice(0, FIRST)).map((row) => html`<${Turn} key=${`${row.cause} ${row.template}`} row=${row} />`)}
      ${!all && rows.length > FIRST && html`<div class="switch"><button type="button" onClick=${() => setAll(true)}>Show all ${rows.length}</button></div>`}
      ${report.redacted && rows.length > 0 && html`<p class="note">
        Letters and digits of prompts are blotted out; <code>[attribution] show_text = true</code> shows them to whoever has the admin key.
      </p>`}
    </section>
  `;
}

function Causes({ report, said }) {
  const rows = Object.entries(report.causes).filter(([, lost]) => lost.tokens > 0).sort(([, a], [, b]) => b.tokens - a.tokens);
  const lines = () => [["cause", "requests", "tokens", "prefill seconds"], ...rows.map(([cause, lost]) => [cause, lost.requests, lost.tokens, lost.prefill_s])];
  return html`<section class="card table" aria-labelledby="causes-title">
    <div class="bar-title">
      <h2 id="causes-title">Causes <small>${said}; ${count(report.missed_tokens)} of ${plural(report.prompt_tokens, "prompt token", "prompt tokens")} missed</small></h2>
      ${rows.length > 0 && html`<${fileLink} title="Causes" lines=${lines} />`}
    </div>
    ${rows.length === 0
      ? html`<p class="note">Nothing was missed in this window.</p>`
      : html`<div class="scroll" role="region" aria-labelledby="causes-title" tabindex="0"><table class="causes">
          <thead><tr><th scope="col">Cause</th><th scope="col">Requests</th><th scope="col">Tokens</th><th scope="col">Share</th><th scope="col">Prefill spent</th></tr></thead>
          <tbody>
            ${rows.map(([cause, lost]) => html`<tr key=${cause}>
              <th scope="row"><i style=${{ background: `var(${CAUSES[cause].color})` }} aria-hidden="true"></i>${CAUSES[cause].name}<small>${CAUSES[cause].said}</small></th>
              <td>${count(lost.requests)}</td><td>${count(lost.tokens)}</td>
              <td>${percent(share(lost.tokens, report.missed_tokens))}</td><td>${seconds(lost.prefill_s)}</td>
            </tr>`)}
          </tbody>
        </table></div>`}
  </section>`;
}

function Turn({ row }) {
  const { example } = row;
  return html`<article class="turn">
    <h3>
      <i style=${{ background: `var(${CAUSES[row.cause].color})` }} aria-hidden="true"></i>${CAUSES[row.cause].name}
      <small>${row.template}: ${plural(row.tokens, "token", "tokens")} of ${plural(row.requests, "request", "requests")}, ${percent(row.share)} of all missed,
      ${" "}${seconds(row.prefill_s)} to compute${row.evicted_ago_p50_s !== null && `, half of them evicted less than ${seconds(row.evicted_ago_p50_s)} before`}</small>
    </h3>
    ${example && html`
      <pre class="prompt" tabindex="0" aria-label="First divergent text"><span class="before">${example.text_before}</span><mark>${example.here || "(end)"}</mark>${
        example.there && html`${"\n"}<span class="unlike" aria-hidden="true">earlier: </span><mark class="kept">${example.there}</mark>`
      }</pre>
      <p class="note">${example.part}, at token ${count(example.token)}; ${plural(example.missed, "token", "tokens")} from there, ${time(example.at)}.</p>
    `}
  </article>`;
}
