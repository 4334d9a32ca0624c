// The replicas as the router sees them: their pools, what is believed of their caches, and whether they get requests.
import { html } from "./vendor/htm-preact.js";
import { CostCurves } from "./curves.js";
import { count, percent, plural, seconds } from "./format.js";
import { Missing, useAct, usePolled } from "./polled.js";
import { Pool } from "./pool.js";
import { RowTable } from "./table.js";
import { Rate } from "./tables.js";

const BREAKERS = { closed: ["good", "closed"], open: ["bad", "open"], half_open: ["idle", "half open"] };
const STATES = { ready: "good", starting: "idle", stopped: "idle", down: "bad" };
const FITTED = { steps: "fitted to its steps", ttft: "fitted to first tokens", nominal: "nothing measured yet" };

export function Replicas({ replicas, said, keyHeader }) {
  const [list, load] = usePolled("replicas", keyHeader);
  const [pins] = usePolled("pins", keyHeader);
  return html`
    <${Pool} replicas=${replicas} said=${said} pins=${pins?.replicas ?? {}} />
    ${list === null || list.problem
      ? html`<${Missing} title="Routing" said=${list} />`
      : html`<${Routing} list=${list} load=${load} keyHeader=${keyHeader} />
          <${Trust} replicas=${list.replicas} /><${CostCurves} replicas=${list.replicas} />`}
  `;
}

function Routing({ list, load, keyHeader }) {
  const [said, send] = useAct(keyHeader, load);
  const act = (id, action) =>
    send("POST", `replicas/${encodeURIComponent(id)}/${action}`, () => (action === "drain" ? `${id} gets no new requests.` : `${id} gets requests again.`));
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
      <div class="switch"><button type="button" onClick=${() => onAct(row.id, action)}>${row.draining ? "Resume" : "Drain"}<span class="unseen"> ${row.id}</span></button></div>
    </div>
    ${row.down_reason && html`<p class="note bad">${row.down_reason}</p>`}
    ${row.degraded.map((reason) => html`<p class="note" key=${reason}>${reason}</p>`)}
    <dl>
      <div><dt>In flight from here</dt><dd>${count(row.in_flight)}<small>${plural(row.waiting_tokens, "token", "tokens")} to compute</small></dd></div>
      <div><dt>Breaker</dt><dd><span class=${`pill ${kind}`}><i aria-hidden="true"></i>${name}</span>
        <small>${breaker.failures > 0 ? `${plural(breaker.failures, "failure", "failures")} in a row` : "no failure"}${breaker.state === "open" && `, tried again in ${seconds(breaker.retry_in_s)}`}</small></dd></div>
      <div><dt>Index of its cache</dt><dd>${index ? html`<${Believed} index=${index} />` : "–"}</dd></div>
      <div><dt>Prefill of 1,000 tokens</dt><dd>${curve.fitted_to === "nominal" ? "–" : seconds(curve.step_s + 1000 * curve.token_s)}
        <small>${FITTED[curve.fitted_to]}</small></dd></div>
    </dl>
  </article>`;
}

const Believed = ({ index }) =>
  html`<span class=${`pill ${index.believed ? "good" : "bad"}`}><i aria-hidden="true"></i>${index.believed ? "believed" : "not believed"}</span>
    <small>${plural(index.blocks, "block", "blocks")}, known from its ${index.source}</small>`;

// What was foretold of each cache against what the replica then said it had.
const TRUST = [
  { name: "Believed", cell: ({ index }) => (index.believed ? "yes" : html`<b class="bad">no</b>`), value: ({ index }) => (index.believed ? "yes" : "no") },
  { name: "Foretold, came true", wide: true, cell: ({ index }) => html`<${Rate} value=${index.precision} />`, value: ({ index }) => index.precision },
  { name: "Cached, was foretold", wide: true, cell: ({ index }) => html`<${Rate} value=${index.recall} />`, value: ({ index }) => index.recall },
  { name: "Requests", cell: ({ index }) => count(index.requests), value: ({ index }) => index.requests },
  { name: "Blocks", cell: ({ index }) => count(index.blocks), value: ({ index }) => index.blocks },
  { name: "Begun anew", cell: ({ index }) => count(index.resyncs), value: ({ index }) => index.resyncs },
  { name: "Known from", cell: ({ index }) => index.source, value: ({ index }) => index.source },
];

const BOUND = { name: "Blocks at most", cell: ({ index }) => count(index.capacity), value: ({ index }) => index.capacity };

const EVENTS = [
  { name: "Events taken", cell: ({ events }) => count(events?.messages), value: ({ events }) => events?.messages },
  { name: "Events lost", cell: ({ events }) => (events?.losses > 0 ? html`<b class="bad">${count(events.losses)}</b>` : count(events?.losses)), value: ({ events }) => events?.losses },
];

function Trust({ replicas }) {
  const columns = [...TRUST];
  if (replicas.some(({ index }) => index?.capacity)) columns.push(BOUND);
  if (replicas.some(({ events }) => events)) columns.push(...EVENTS);
  const rows = replicas.filter(({ index }) => index).map((row) => ({ key: row.id, name: row.id, ...row }));
  const problems = replicas.filter(({ events }) => events?.problem).map(({ id, events }) => `${id}: ${events.problem}`);
  return html`<${RowTable} title="Index trust" said="of the tokens of the latest requests; counted since each replica was first seen" first="Replica"
    columns=${columns} rows=${rows} none="Nothing is known of any cache yet: it is, once a replica is ready."
    note=${problems.length > 0
      ? problems.join(" ")
      : "The router places a request by the blocks it believes a replica to hold; a cache that is not believed counts as empty."} />`;
}
