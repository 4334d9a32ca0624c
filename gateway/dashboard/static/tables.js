// Who saves what: the figures of the window per template, tenant and replica.
import { html } from "./vendor/htm-preact.js";
import { count, percent, seconds } from "./format.js";

const COLUMNS = [
  ["Requests", (row) => count(row.requests)],
  ["Hit rate", (row) => html`<${Rate} value=${row.token_hit_rate} />`],
  ["Saved", (row) => seconds(row.saved_prefill_s)],
  ["Spent", (row) => seconds(row.prefill_s)],
  ["TTFT p50", (row) => seconds(row.ttft_p50_s)],
  ["TTFT p95", (row) => seconds(row.ttft_p95_s)],
  ["Prompt tokens", (row) => count(row.prompt_tokens)],
  ["Failed", (row) => (row.failed > 0 ? html`<b class="bad">${count(row.failed)}</b>` : count(row.failed))],
];

export function Table({ title, first, rows, said, note }) {
  const entries = Object.entries(rows);
  const id = `table-${first.toLowerCase()}`;
  return html`<section class="card table" aria-labelledby=${id}>
    <h2 id=${id}>${title} <small>${said}</small></h2>
    ${entries.length === 0
      ? html`<p class="note">Nothing in this window.</p>`
      : html`<div class="scroll" role="region" aria-labelledby=${id} tabindex="0">
          <table>
            <thead>
              <tr><th scope="col">${first}</th>${COLUMNS.map(([name]) => html`<th scope="col">${name}</th>`)}</tr>
            </thead>
            <tbody>
              ${entries.map(
                ([name, row]) => html`<tr key=${name}>
                  <th scope="row">${name}</th>${COLUMNS.map(([, cell]) => html`<td>${cell(row)}</td>`)}
                </tr>`,
              )}
            </tbody>
          </table>
        </div>`}
    ${note && "unregistered" in rows && html`<p class="note">${note}</p>`}
  </section>`;
}

function Rate({ value }) {
  return html`<span class="rate"><span class="meter" aria-hidden="true"><i style=${{ width: `${100 * (value ?? 0)}%` }}></i></span><span>${percent(value)}</span></span>`;
}
