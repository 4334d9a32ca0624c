// A pool as squares, each for as many blocks as it takes to keep the picture small.
import { html } from "./vendor/htm-preact.js";

const COLUMNS = 64;
const ROWS = 8;
const IN_ALL = 6_000; // squares of all pools together
const SIDE = 0.8;

// The most squares for each of so many pools.
export const squaresFor = (pools) => Math.max(COLUMNS, Math.min(COLUMNS * ROWS, Math.floor(IN_ALL / pools)));

// Ordered by what the blocks hold, `each` of them to a square.
export function Squares({ label, blocks, pinned, each }) {
  const { used, cached, free, total } = blocks;
  const fixed = Math.min(pinned, used + cached);
  const moving = Math.max(0, cached - fixed); // pinned blocks that are in use are drawn as pinned
  const parts = [
    ["used", used - Math.max(0, fixed - cached)],
    ["pinned", fixed],
    ["cached", moving],
    ["free", free],
  ];
  let next = 0;
  let owed = 0;
  const paths = parts.map(([kind, count], i) => {
    owed += count;
    // Whatever there is shows: at least one square, at most up to where all that follows still has its own.
    const end = i === parts.length - 1 ? Math.ceil(total / each) : Math.max(next + (count > 0 ? 1 : 0), Math.round(owed / each));
    let path = "";
    for (; next < end; next++) path += `M${next % COLUMNS} ${Math.floor(next / COLUMNS)}h${SIDE}v${SIDE}h-${SIDE}z`;
    return html`<path key=${kind} class=${kind} d=${path} />`;
  });
  const rows = Math.ceil(next / COLUMNS);
  return html`<svg class="squares" viewBox=${`0 0 ${COLUMNS} ${rows}`} role="img" aria-label=${label}>${paths}</svg>`;
}
