// The prefixes that stay in the caches: what they take, where they are, and how long they stay.
import { html } from "./vendor/htm-preact.js";
import { count, percent, plural, share, time } from "./format.js";
import { Missing, useAct, usePolled } from "./polled.js";

const STATES = { resident: "resident", warmed: "warmed", warming: "being warmed", waiting: "waiting for a replica", not_resident: "not resident" };

export function Pins({ keyHeader }) {
  const [report, load] = usePolled("pins", keyHeader);
  const [said, send] = useAct(keyHeader, load);
  const remove = (pin) => send("DELETE", `pins/${encodeURIComponent(pin.id)}`, () => `${pin.id} is pinned no more.`);
  if (report === null || report.problem) return html`<${Missing} title="Pins" said=${report} />`;
  return html`<section class="card pins" aria-labelledby="pins-title">
    <div class="bar-title">
      <h2 id="pins-title">Pins <small>now; at most ${percent(report.max_share)} of a pool</small></h2>
      <span class="note" role="status">${said}</span>
    </div>
    ${Object.entries(report.replicas).map(([id, row]) => row.pinned_blocks > 0 && html`<p class="note" key=${id}>
      ${id}: ${count(row.resident_blocks)} of ${plural(row.pinned_blocks, "pinned block", "pinned blocks")} resident,
      ${" "}${percent(share(row.pinned_blocks, row.num_blocks))} of its pool.
    </p>`)}
    ${report.pins.length === 0 && html`<p class="note">Nothing is pinned. <code>POST /admin/pins</code> or <code>[[pins]]</code> keep a template, its documents or a chain of keys in the cache.</p>`}
    ${report.pins.map((pin) => html`<article class="pin" key=${pin.id} aria-label=${`Pin ${pin.id}`}>
      <div class="bar-title">
        <h3>${pin.template ?? pin.id} <small>${pin.documents.length > 0 && `with ${plural(pin.documents.length, "document", "documents")}, `}${pin.tenant !== null && `${pin.tenant}, `}${pin.tokens === null ? "by keys" : plural(pin.tokens, "token", "tokens")},
          ${" "}${STATES[pin.state]}${pin.expires !== null && `, until ${time(pin.expires)}`}</small></h3>
        ${pin.source !== "configuration" && html`<div class="switch"><button type="button" onClick=${() => remove(pin)}>Unpin<span class="unseen"> ${pin.template ?? pin.id}</span></button></div>`}
      </div>
      ${pin.problem && html`<p class="note bad">${pin.problem}</p>`}
    </article>`)}
  </section>`;
}
