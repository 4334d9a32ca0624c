// The causes of missed tokens as people read them, in the order in which they are stacked.
import { html } from "./vendor/htm-preact.js";
import { percent } from "./format.js";

export const CAUSES = {
  never_seen: { name: "Never seen", said: "new text; no cache could hold it", color: "--spent" },
  evicted: { name: "Evicted", said: "was held, and had to leave for other blocks", color: "--cause-evicted" },
  volatile: { name: "Volatile field", said: "a date, id or name in front of what is shared", color: "--cause-volatile" },
  document_order: { name: "Document order", said: "the same documents in another order", color: "--cause-order" },
  tool_order: { name: "Tool order", said: "the same tools in another order or spelling", color: "--cause-tools" },
  text_form: { name: "Text form", said: "the same text in another form: white space, Unicode", color: "--cause-form" },
  other_replica: { name: "On another replica", said: "held, but not where the request went", color: "--cause-replica" },
  namespace: { name: "Other namespace", said: "held for another tenant, salt or model", color: "--cause-namespace" },
  block_rounding: { name: "Block rounding", said: "the part of a block at the end of what is shared", color: "--cause-rounding" },
  below_minimum: { name: "Below one block", said: "too short to fill a block", color: "--cause-minimum" },
  bypass: { name: "Bypass", said: "asked not to use the cache", color: "--cause-bypass" },
};

// The key to the bars of a table whose rows missed tokens.
export function CauseKey({ rows }) {
  const causes = Object.keys(CAUSES).filter((cause) => rows.some(({ missed }) => missed[cause] > 0));
  if (causes.length === 0) return null;
  return html`<ul class="legend" aria-label="Causes of missed tokens">
    ${causes.map((cause) => html`<li key=${cause} title=${CAUSES[cause].said}><i style=${{ background: `var(${CAUSES[cause].color})` }}></i>${CAUSES[cause].name}</li>`)}
  </ul>`;
}

// Missed tokens by cause as one bar; in words for who cannot see it.
export function CauseBar({ missed }) {
  const parts = Object.keys(CAUSES).filter((cause) => missed[cause] > 0).sort((a, b) => missed[b] - missed[a]);
  if (parts.length === 0) return "–";
  const total = parts.reduce((sum, cause) => sum + missed[cause], 0);
  const said = parts.map((cause) => `${CAUSES[cause].name} ${percent(missed[cause] / total)}`).join(", ");
  return html`<span class="cause-bar" role="img" aria-label=${said} title=${said}>
    ${parts.map((cause) => html`<i key=${cause} style=${{ width: `${(100 * missed[cause]) / total}%`, background: `var(${CAUSES[cause].color})` }}></i>`)}
  </span>`;
}
