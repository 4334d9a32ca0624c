// Learned templates: which fields were found in system prompts that nobody declared, and what is done with them.
import { html, useState } from "./vendor/htm-preact.js";
import { count, percent, plural } from "./format.js";
import { Missing, useAct, usePolled } from "./polled.js";

const ACTIONS = { apply: "Move the fields", suggest: "Only propose", off: "Leave it alone" };
const STATES = { apply: "moved", suggest: "proposed", off: "left alone", declared: "left alone" };

export function Learned({ keyHeader }) {
  const [found, load] = usePolled("templates", keyHeader);
  const [said, send] = useAct(keyHeader, load);
  const decide = (proposal, hoist) =>
    send("POST", `templates/${proposal.id}`, (now) => `${now.name}: ${STATES[now.hoist]} from now on.`, { hoist });

  if (found === null || found.problem) return html`<${Missing} title="Volatile fields found" said=${found} />`;
  const { proposals, learning, hoist } = found;
  return html`<section class="card learned" aria-labelledby="learned-title">
    <div class="bar-title">
      <h2 id="learned-title">Volatile fields found <small>in system prompts of no registered template, since each was found</small></h2>
      <span class="note" role="status">${said}</span>
    </div>
    ${proposals.length === 0
      ? html`<p class="note">${nothing(hoist, learning)}</p>`
      : proposals.map((proposal) => html`<${Proposal} key=${proposal.id} proposal=${proposal} onDecide=${decide} />`)}
  </section>`;
}

function nothing(hoist, learning) {
  if (learning.observed === 0 && hoist !== "suggest" && hoist !== "apply") {
    return html`Nothing is looked for, as <code>canonical.hoist</code> is <code>${hoist}</code>.`;
  }
  return `None in ${plural(learning.observed, "prompt", "prompts")}: send some 14 requests of a template, and the fields in it are found.`;
}

function Proposal({ proposal, onDecide }) {
  const [busy, setBusy] = useState(false);
  const act = async (hoist) => {
    setBusy(true);
    await onDecide(proposal, hoist);
    setBusy(false);
  };
  const moved = proposal.fields.filter((field) => field.volatile);
  return html`<article class="proposal" aria-label=${proposal.name}>
    <div class="bar-title">
      <h3>
        ${proposal.name} <small>version ${proposal.version}, tenant ${proposal.tenant}, ${plural(proposal.requests, "request", "requests")}</small>
      </h3>
      <div class="switch">
        <b class=${proposal.hoist === "apply" ? "good" : ""}>${STATES[proposal.hoist]}</b>
        ${Object.entries(ACTIONS)
          .filter(([hoist]) => hoist !== proposal.hoist)
          .map(([hoist, label]) => html`<button type="button" key=${hoist} disabled=${busy} onClick=${() => act(hoist)}>${label}</button>`)}
      </div>
    </div>
    <pre class="prompt" tabindex="0">${proposal.literals.map(
      (literal, index) =>
        html`${index > 0 && html`<${Field} field=${proposal.fields[index - 1]} />`}${literal}`,
    )}</pre>
    <ul class="evidence">
      ${moved.map(
        (field) => html`<li key=${field.name}>
          <b>${field.name}</b> ${field.shape}: ${field.distinct > 31 ? "about " : ""}${plural(field.distinct, "value", "values")} in
          ${" "}${plural(field.requests, "request", "requests")}, another one than before in ${percent(field.changes / Math.max(1, field.requests - 1))},
          up to ${count(field.longest)} characters
        </li>`,
      )}
    </ul>
  </article>`;
}

function Field({ field }) {
  return field.volatile
    ? html`<mark>${field.name}</mark>`
    : html`<mark class="kept" title="Differs, and stays where it is: a few variants, or too long to move">…</mark>`;
}
