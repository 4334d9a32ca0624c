// Which documents earn the hits, and which cost what is missed.
import { html } from "./vendor/htm-preact.js";
import { CauseBar } from "./causes.js";
import { count, plural, seconds } from "./format.js";
import { Missing, usePolled } from "./polled.js";
import { RowTable } from "./table.js";
import { Rate } from "./tables.js";

const COLUMNS = [
  { name: "Requests", cell: (row) => count(row.requests), value: (row) => row.requests },
  { name: "Hit rate", wide: true, cell: (row) => html`<${Rate} value=${row.token_hit_rate} />`, value: (row) => row.token_hit_rate },
  { name: "Tokens", cell: (row) => count(row.tokens), value: (row) => row.tokens },
  { name: "Cached", cell: (row) => count(row.cached_tokens), value: (row) => row.cached_tokens },
  { name: "Saved", cell: (row) => seconds(row.saved_prefill_s), value: (row) => row.saved_prefill_s },
  { name: "Missed for", cell: (row) => html`<${CauseBar} missed=${row.missed} />` },
];

const WINDOWS = { all: ["30d", "last 30 days"] }; // documents are not kept for longer

export function Documents({ span, said, keyHeader }) {
  const [asked, spoken] = WINDOWS[span] ?? [span, said];
  const [report] = usePolled(`documents?window=${asked}`, keyHeader);
  if (report === null || report.problem) return html`<${Missing} title="Documents" said=${report} />`;
  if (!report.enabled) {
    return html`<section class="card"><h2>Documents</h2>
      <p class="note">Documents are not counted here: <code>[attribution] enabled</code> is false in the configuration.</p>
    </section>`;
  }
  const tenants = new Set(report.rows.map((row) => row.tenant));
  const named = (row) => (tenants.size > 1 ? `${row.tenant}: ${row.id}` : row.id);
  const rows = report.rows.map((row) => ({ key: `${row.tenant} ${row.id}`, name: named(row), ...row }));
  if (report.other.requests > 0) rows.push({ key: "", name: "all others", ...report.other });
  return html`<${RowTable} title="Documents" said=${`${spoken}; most tokens first`} first="Document" columns=${COLUMNS} rows=${rows}
    none=${html`No request of this window had documents: send the retrieved passages as <code>documents</code> in the body, or choose a longer window.`}
    note=${rows.length > 0 && `It would take about ${plural(report.distinct_prefixes, "block", "blocks")} to keep every prefix that was asked for in this window.`} />`;
}
