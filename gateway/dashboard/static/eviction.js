// The eviction policy: what others and other pool sizes would have hit, and the switch.
import { html, useState } from "./vendor/htm-preact.js";
import { count, percent, seconds } from "./format.js";

const URL_POLICY = new URL("../../admin/policy", import.meta.url);

export function Eviction({ eviction, keyHeader }) {
  const { policy, policies, whatif } = eviction;
  return html`<section class="card eviction" aria-labelledby="eviction-title">
    <div class="bar-title">
      <h2 id="eviction-title">Eviction <small>what if, last hour</small></h2>
      <${Switch} policy=${policy} policies=${policies} keyHeader=${keyHeader} />
    </div>
    ${whatif === null
      ? html`<p class="note">Ghost caches are switched off (<code>whatif.enabled</code>).</p>`
      : html`<${WhatIf} whatif=${whatif} policy=${policy} />`}
  </section>`;
}

function Switch({ policy, policies, keyHeader }) {
  const [chosen, setChosen] = useState(null);
  const [said, setSaid] = useState("");
  const [busy, setBusy] = useState(false);

  async function apply(event) {
    event.preventDefault();
    setBusy(true);
    setSaid("");
    try {
      const response = await fetch(URL_POLICY, {
        method: "PUT",
        headers: { "content-type": "application/json", ...keyHeader },
        body: JSON.stringify({ policy: chosen ?? policy }),
      });
      const body = await response.json();
      const failed = Object.entries(body.replicas ?? {}).filter(([, result]) => result !== "ok");
      if (body.error) setSaid(body.error.message);
      else if (failed.length > 0) setSaid(failed.map(([name, result]) => `${name}: ${result}`).join("; "));
      else setSaid(`Now ${body.policy}.`);
    } catch {
      setSaid("The gateway cannot be reached.");
    }
    setBusy(false);
    setChosen(null);
  }

  return html`<form class="switch" onSubmit=${apply}>
    <label>Policy
      <select value=${chosen ?? policy} onChange=${(event) => setChosen(event.target.value)}>
        ${policies.map((name) => html`<option key=${name} value=${name}>${name}${name === policy ? " (in force)" : ""}</option>`)}
      </select>
    </label>
    <button type="submit" disabled=${busy || (chosen ?? policy) === policy}>Switch</button>
    <span role="status">${said}</span>
  </form>`;
}

function WhatIf({ whatif, policy }) {
  const sizes = [...new Set(whatif.rows.map((row) => row.size))].sort((a, b) => a - b);
  const names = [...new Set(whatif.rows.map((row) => row.policy))];
  const cell = (name, size) => whatif.rows.find((row) => row.policy === name && row.size === size);
  return html`
    <p class="advice">${whatif.recommendation.text}</p>
    ${whatif.rows.length > 0 &&
    html`<div class="scroll" role="region" aria-labelledby="eviction-title" tabindex="0">
      <table>
        <thead>
          <tr>
            <th scope="col">Policy</th>
            ${sizes.map((size) => html`<th scope="col">${count(cell(names[0], size).blocks)} blocks${size === 1 ? " (now)" : ""}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${names.map(
            (name) => html`<tr key=${name}>
              <th scope="row">${name}${name === policy ? " (in force)" : ""}</th>
              ${sizes.map((size) => html`<${Cell} row=${cell(name, size)} inForce=${name === policy && size === 1} />`)}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>`}
    <p class="note">
      Token hit rate over ${count(whatif.requests)} requests, estimated from ${percent(whatif.sampling_rate)} of the blocks;
      really hit: ${percent(whatif.token_hit_rate)}, estimated for the policy in force: ${percent(whatif.estimated_token_hit_rate)}.
    </p>
  `;
}

function Cell({ row, inForce }) {
  const sign = row.gain < 0 ? "−" : "+";
  const points = `${sign}${(100 * Math.abs(row.gain)).toFixed(1)} pts`;
  return html`<td class=${inForce ? "in-force" : ""}>
    ${percent(row.token_hit_rate)}
    ${!inForce && html`<small class=${row.gain < 0 ? "bad" : ""}>${points}, ${sign}${seconds(Math.abs(row.saved_prefill_s))}</small>`}
  </td>`;
}
