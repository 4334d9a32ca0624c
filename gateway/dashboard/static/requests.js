// The latest requests one by one: what each took from the cache, and what it waited for.
import { html } from "./vendor/htm-preact.js";
import { CauseBar } from "./causes.js";
import { count, seconds, share, time } from "./format.js";
import { Missing, usePolled } from "./polled.js";
import { RowTable } from "./table.js";
import { Rate } from "./tables.js";

const rate = (row) => share(row.cached_tokens, row.prompt_tokens);

const COLUMNS = [
  { name: "Template", cell: (row) => row.template, value: (row) => row.template },
  { name: "Hit rate", wide: true, cell: (row) => html`<${Rate} value=${rate(row)} />`, value: rate },
  { name: "Prompt tokens", cell: (row) => count(row.prompt_tokens), value: (row) => row.prompt_tokens },
  { name: "Cached tokens", cell: (row) => count(row.cached_tokens), value: (row) => row.cached_tokens },
  { name: "Generated tokens", cell: (row) => count(row.completion_tokens), value: (row) => row.completion_tokens },
  { name: "Missed for", cell: (row) => html`<${CauseBar} missed=${row.missed} />` },
  { name: "TTFT", cell: (row) => seconds(row.ttft_s), value: (row) => row.ttft_s },
  { name: "Saved", cell: (row) => (row.held_out ? "held out" : seconds(row.saved_prefill_s)), value: (row) => row.saved_prefill_s },
  { name: "Replica", cell: (row) => row.replica, value: (row) => row.replica },
  { name: "Tenant", cell: (row) => row.tenant, value: (row) => row.tenant },
  { name: "Status", cell: (row) => (row.status === "ok" ? "ok" : html`<b class="bad">${row.status}</b>`), value: (row) => row.status },
];

export function Requests({ keyHeader }) {
  const [report] = usePolled("requests", keyHeader);
  if (report === null || report.problem) return html`<${Missing} title="Requests" said=${report} />`;
  const rows = report.requests.map((row, i) => ({ key: `${row.finished_at} ${i}`, name: time(row.finished_at), ...row }));
  return html`<${RowTable} title="Requests" said="the last 200 that ended at this gateway, newest first" first="Time" columns=${COLUMNS}
    rows=${rows} none="No request has ended here since the gateway started: send one, and it shows within five seconds." note="Prompts and answers are not kept." />`;
}
