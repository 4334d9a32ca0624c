// Who saves what: the figures of the window per template, tenant, model and replica.
import { html } from "./vendor/htm-preact.js";
import { CauseBar } from "./causes.js";
import { count, percent, seconds } from "./format.js";
import { RowTable } from "./table.js";

const COLUMNS = [
  { name: "Requests", cell: (row) => count(row.requests), value: (row) => row.requests },
  { name: "Hit rate", wide: true, cell: (row) => html`<${Rate} value=${row.token_hit_rate} />`, value: (row) => row.token_hit_rate },
  { name: "Saved", cell: (row) => seconds(row.saved_prefill_s), value: (row) => row.saved_prefill_s },
  { name: "Spent", cell: (row) => seconds(row.prefill_s), value: (row) => row.prefill_s },
  { name: "Missed for", cell: (row) => html`<${CauseBar} missed=${row.missed} />` },
  { name: "TTFT p50", cell: (row) => seconds(row.ttft_p50_s), value: (row) => row.ttft_p50_s },
  { name: "TTFT p95", cell: (row) => seconds(row.ttft_p95_s), value: (row) => row.ttft_p95_s },
  { name: "Prompt tokens", cell: (row) => count(row.prompt_tokens), value: (row) => row.prompt_tokens },
  { name: "Failed", cell: (row) => (row.failed > 0 ? html`<b class="bad">${count(row.failed)}</b>` : count(row.failed)), value: (row) => row.failed },
];

const tokensOf = (missed) => Object.fromEntries(Object.entries(missed).map(([cause, lost]) => [cause, lost.tokens]));

export function Table({ title, first, rows, said, note, none }) {
  return html`<${RowTable} title=${title} said=${said} first=${first} columns=${COLUMNS} none=${none} note=${"unregistered" in rows && note}
    rows=${Object.entries(rows).map(([name, row]) => ({ key: name, name, ...row, missed: tokensOf(row.missed) }))} />`;
}

export function Rate({ value }) {
  return html`<span class="rate"><span class="meter" aria-hidden="true"><i style=${{ width: `${100 * (value ?? 0)}%` }}></i></span><span>${percent(value)}</span></span>`;
}
