// The eviction policy: what others and other pool sizes would have hit, and the switch.
import { html, useCallback, useState } from "./vendor/htm-preact.js";
import { PolicyCurves } from "./curves.js";
import { count, percent, seconds } from "./format.js";
import { useAct } from "./polled.js";

export function Eviction({ eviction, keyHeader }) {
  const { policy, policies, whatif } = eviction;
  return html`
    <section class="card eviction" aria-labelledby="eviction-title">
      <div class="bar-title">
        <h2 id="eviction-title">Eviction <small>what if, last hour</small></h2>
        <${Switch} policy=${policy} policies=${policies} keyHeader=${keyHeader} />
      </div>
      ${whatif === null
        ? html`<p class="note">Ghost caches are switched off: <code>[whatif] enabled = true</code> in the configuration shows what other policies would hit.</p>`
        : html`<${WhatIf} whatif=${whatif} policy=${policy} />`}
    </section>
    ${whatif?.rows.length > 0 && html`<${PolicyCurves} whatif=${whatif} policy=${policy} />`}
  `;
}

const settled = (answer) => {
  const failed = Object.entries(answer.replicas).filter(([, result]) => result !== "ok");
  return failed.length > 0 ? failed.map(([name, result]) => `${name}: ${result}`).join("; ") : `Now ${answer.policy}.`;
};

function Switch({ policy, policies, keyHeader }) {
  const [chosen, setChosen] = useState(null);
  const [busy, setBusy] = useState(false);
  const done = useCallback(() => {
    setBusy(false);
    setChosen(null);
  }, []);
  const [said, send] = useAct(keyHeader, done);
  const apply = (event) => {
    event.preventDefault();
    setBusy(true);
    send("PUT", "policy", settled, { policy: chosen ?? policy });
  };
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
  if (whatif.rows.length === 0) {
    return html`<p class="note">Send requests: ghost caches follow them, and tell here what other policies and pool sizes would have hit.</p>`;
  }
  return html`
    <p class="advice">${whatif.recommendation.text}</p>
    <div class="scroll" role="region" aria-labelledby="eviction-title" tabindex="0">
      <table>
        <thead>
          <tr>
            <th scope="col">Policy</th>
            ${sizes.map((size) => html`<th scope="col" key=${size}>${count(cell(names[0], size).blocks)} blocks${size === 1 ? " (now)" : ""}</th>`)}
          </tr>
        </thead>
        <tbody>
          ${names.map(
            (name) => html`<tr key=${name}>
              <th scope="row">${name}${name === policy ? " (in force)" : ""}</th>
              ${sizes.map((size) => html`<${Cell} key=${size} row=${cell(name, size)} inForce=${name === policy && size === 1} />`)}
            </tr>`,
          )}
        </tbody>
      </table>
    </div>
    <p class="note">
      Token hit rate over ${count(whatif.requests)} requests, estimated from ${percent(whatif.sampling_rate)} of the blocks;
      really hit: ${percent(whatif.token_hit_rate)}, estimated for the policy in force: ${percent(whatif.estimated_token_hit_rate)}.
      Below each figure: the difference in points, and in seconds of prefill in the hour.
    </p>
  `;
}

function Cell({ row, inForce }) {
  if (inForce) return html`<td class="in-force">${percent(row.token_hit_rate)}<small>in force</small></td>`;
  const sign = row.gain < 0 ? "−" : "+";
  return html`<td>
    ${percent(row.token_hit_rate)}
    <small class=${row.gain < -0.0005 ? "bad" : ""}>${sign}${(100 * Math.abs(row.gain)).toFixed(1)} pts, ${sign}${seconds(Math.abs(row.saved_prefill_s))}</small>
  </td>`;
}
