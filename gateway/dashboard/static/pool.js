// The block pool of each replica: what running requests hold, what the prefix cache holds, what is empty.
import { html } from "./vendor/htm-preact.js";
import { count, percent, plural, share } from "./format.js";

export function Pool({ replicas, said }) {
  const own = Object.entries(replicas).filter(([, row]) => row.state !== null);
  return html`<section class="card pool" aria-labelledby="pool-title">
    <div class="bar-title">
      <h2 id="pool-title">Block pool <small>now; evicted and preempted: ${said}</small></h2>
      <ul class="legend">
        <li><i class="used"></i>in use by running requests</li>
        <li><i class="cached"></i>cached, can be hit</li>
        <li><i class="free"></i>free</li>
      </ul>
    </div>
    ${own.length === 0 && html`<p class="note">No replica is known yet.</p>`}
    ${own.map(([name, row]) => html`<${Replica} key=${name} name=${name} row=${row} />`)}
  </section>`;
}

function Replica({ name, row }) {
  const kinds = { ready: "good", starting: "idle", stopped: "idle", down: "bad" };
  return html`<div class="replica">
    <div class="who">
      <strong>${name}</strong>
      <span class=${`pill ${kinds[row.state]}`}><i aria-hidden="true"></i>${row.state}</span>
      ${row.device && html`<small>${row.device} ${row.dtype}, ${row.policy.toUpperCase()}</small>`}
    </div>
    ${row.blocks ? html`<${Bar} name=${name} blocks=${row.blocks} />` : html`<p class="note">Nothing reported yet.</p>`}
    <dl>
      <div><dt>Running</dt><dd>${count(row.running)}</dd></div>
      <div><dt>Waiting</dt><dd>${count(row.waiting)}</dd></div>
      <div><dt>Evicted</dt><dd>${count(row.evictions)}</dd></div>
      <div><dt>Preempted</dt><dd>${count(row.preemptions)}</dd></div>
    </dl>
  </div>`;
}

function Bar({ name, blocks }) {
  const { used, cached, total, block_size: size } = blocks;
  const said = `${count(used)} used, ${count(cached)} cached, ${count(blocks.free)} free of ${count(total)} blocks`;
  const width = (part) => ({ width: `${100 * (share(part, total) ?? 0)}%` });
  return html`<div class="blocks">
    <div class="bar" role="img" aria-label=${`Block pool of ${name}: ${said}`}>
      <i class="used" style=${width(used)}></i><i class="cached" style=${width(cached)}></i>
    </div>
    <p class="note">
      ${said} <span>(${plural(cached * size, "token", "tokens")} cached, ${percent(share(used + cached, total))} filled)</span>
    </p>
  </div>`;
}
