// The replicas as the router sees them: what they serve, what is believed of their caches, and whether they get requests.
import { html } from "./vendor/htm-preact.js";
import { count, percent, plural, seconds } from "./format.js";
import { Missing, useAct, usePolled } from "./polled.js";

const BREAKERS = { closed: ["good", "closed"], open: ["bad", "open"], half_open: ["idle", "half open"] };
const STATES = { ready: "good", starting: "idle", stopped: "idle", down: "bad" };

export function Replicas({ keyHeader }) {
  const [list, load] = usePolled("replicas", keyHeader);
  const [said, send] = useAct(keyHeader, load);
  const act = (id, action) =>
    send("POST", `replicas/${encodeURIComponent(id)}/${action}`, () => (action === "drain" ? `${id} gets no new requests.` : `${id} gets requests again.`));
  if (list === null || list.problem) return html`<${Missing} title="Routing" said=${list} />`;
  return html`<section class="card routed" aria-labelledby="routed-title">
    <div class="bar-title">
      <h2 id="routed-title">Routing <small>now, as this gateway sees its replicas</small></h2>
      <span class="note" role="status">${said}</span>
    </div>
    ${list.discovery.map((problem) => html`<p class="note bad" key=${problem}>${problem}</p>`)}
    ${list.replicas.map((row) => html`<${Replica} key=${row.id} row=${row} onAct=${act} />`)}
  </section>`;
}

function Replica({ row, onAct }) {
  const { index, curve, breaker } = row;
  const [kind, name] = BREAKERS[breaker.state] ?? ["idle", breaker.state];
  const action = row.draining ? "resume" : "drain";
  return html`<article class="route" aria-label=${`Replica ${row.id}`}>
    <div class="bar-title">
      <h3>${row.id} <span class=${`pill ${row.draining ? "idle" : STATES[row.state]}`}><i aria-hidden="true"></i>${row.draining ? "draining" : row.state}</span>
        <small>${row.url ?? "engine of this gateway"}${row.info && `, ${row.info.model}`}</small></h3>
      <div class="switch"><button type="button" onClick=${() => onAct(row.id, action)}>${row.draining ? "Resume" : "Drain"}</button></div>
    </div>
    ${row.down_reason && html`<p class="note bad">${row.down_reason}</p>`}
    ${row.degraded.map((reason) => html`<p class="note" key=${reason}>${reason}</p>`)}
    <dl>
      <div><dt>In flight here</dt><dd>${count(row.in_flight)}<small>${plural(row.waiting_tokens, "token", "tokens")} to compute</small></dd></div>
      <div><dt>Breaker</dt><dd><span class=${`pill ${kind}`}><i aria-hidden="true"></i>${name}</span>
        <small>${breaker.failures > 0 ? `${plural(breaker.failures, "failure", "failures")} in a row` : "no failure"}${breaker.state === "open" && `, tried again in ${seconds(breaker.retry_in_s)}`}</small></dd></div>
      <div><dt>Index</dt><dd>${index ? html`<${Trust} index=${index} />` : "–"}</dd></div>
      <div><dt>Prefill cost</dt><dd>${curve.fitted_to === "nominal" ? "–" : seconds(curve.step_s + 1000 * curve.token_s)}
        <small>${curve.fitted_to === "nominal" ? "nothing measured yet" : `for 1,000 tokens, fitted to ${curve.fitted_to === "ttft" ? "first tokens" : "its steps"}`}</small></dd></div>
    </dl>
  </article>`;
}

function Trust({ index }) {
  const sure = index.precision === null ? "nothing foretold yet" : `${percent(index.precision)} of what was foretold came true, ${percent(index.recall)} of the hits were foretold`;
  return html`<span class=${`pill ${index.believed ? "good" : "bad"}`}><i aria-hidden="true"></i>${index.believed ? "believed" : "not believed"}</span>
    <small>${sure}; from its ${index.source}, ${plural(index.blocks, "block", "blocks")}${index.resyncs > 0 && `, begun anew ${plural(index.resyncs, "time", "times")}`}</small>`;
}
