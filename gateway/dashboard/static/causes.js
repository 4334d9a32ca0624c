// The causes of missed tokens as people read them, in the order in which they are stacked.
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
