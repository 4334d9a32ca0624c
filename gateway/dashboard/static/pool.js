// The block pool of each replica: what running requests hold, what the prefix cache holds, what is pinned, what is empty.
import { html } from "./vendor/htm-preact.js";
import { fileLink } from "./figures.js";
import { count, percent, plural, share } from "./format.js";
import { Squares, squaresFor } from "./squares.js";

// `pins` are those of `/admin/pins` by replica. With them pools are drawn block by block, else as a bar each.
export function Pool({ replicas, said, pins }) {
  const own = Object.entries(replicas).filter(([, row]) => row.state !== null);
  return html`<section class="card pool" aria-labelledby="pool-title">
    <div class="bar-title">
      <h2 id="pool-title">${pins ? "Block-pool map" : "Block pool"} <small>now; evicted and preempted: ${said}</small></h2>
      <ul class="legend">
        <li><i class="used"></i>in use by running requests</li>
        <li><i class="cached"></i>cached, can be hit</li>
        ${pins && html`<li><i class="pinned"></i>pinned, stays</li>`}
        <li><i class="free"></i>free</li>
      </ul>
      ${pins && html`<${fileLink} title="Block pools" lines=${() => lines(own, pins)} />`}
    </div>
    ${own.length === 0 && html`<p class="note">No replica is known yet: start the gateway with <code>--engines 1</code> or <code>--replica URL</code>.</p>`}
    ${own.map(([name, row]) => html`<${Replica} key=${name} name=${name} row=${row} many=${own.length} pins=${pins} />`)}
  </section>`;
}

const lines = (own, pins) => [
  ["replica", "used", "cached", "pinned", "free", "blocks", "tokens per block"],
  ...own.map(([name, { blocks }]) => [name, blocks?.used, blocks?.cached, pins[name]?.resident_blocks, blocks?.free, blocks?.total, blocks?.block_size]),
];

function Replica({ name, row, many, pins }) {
  const kinds = { ready: "good", starting: "idle", stopped: "idle", down: "bad" };
  const pinned = pins?.[name]?.resident_blocks ?? 0;
  return html`<div class="replica">
    <div class="who">
      <strong>${name}</strong>
      <span class=${`pill ${kinds[row.state]}`}><i aria-hidden="true"></i>${row.state}</span>
      ${row.device && html`<small>${row.device} ${row.dtype}</small>`}
    </div>
    ${row.blocks
      ? html`<${Filled} name=${name} blocks=${row.blocks} many=${many} pinned=${pins && pinned} />`
      : html`<p class="note">${row.state === "ready" ? "This server keeps to itself how its pool is filled." : "It tells of its pool once it is ready."}</p>`}
    <dl>
      <div><dt>Running</dt><dd>${count(row.running)}</dd></div>
      <div><dt>Waiting</dt><dd>${count(row.waiting)}</dd></div>
      <div><dt>Evicted</dt><dd>${count(row.evictions)}</dd></div>
      <div><dt>Preempted</dt><dd>${count(row.preemptions)}</dd></div>
    </dl>
  </div>`;
}

function Filled({ name, blocks, many, pinned }) {
  const { used, cached, free, total, block_size: size } = blocks;
  const said = `${count(used)} used, ${count(cached)} cached${pinned ? `, ${count(pinned)} of them pinned` : ""}, ${count(free)} free of ${plural(total, "block", "blocks")}`;
  const each = Math.max(1, Math.ceil(total / squaresFor(many)));
  const label = `Block pool of ${name}: ${said}`;
  const width = (part) => ({ width: `${100 * (share(part, total) ?? 0)}%` });
  return html`<div class="blocks">
    ${pinned === undefined
      ? html`<div class="bar" role="img" aria-label=${label}><i class="used" style=${width(used)}></i><i class="cached" style=${width(cached)}></i></div>`
      : html`<${Squares} label=${label} blocks=${blocks} pinned=${pinned} each=${each} />`}
    <p class="note">
      ${said} <span>(${plural(cached * size, "token", "tokens")} cached, ${percent(share(used + cached, total))} filled)</span>${pinned !== undefined && `; each square is ${plural(each, "block", "blocks")}`}
    </p>
  </div>`;
}
