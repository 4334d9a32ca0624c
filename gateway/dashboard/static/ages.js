// How long ago evicted tokens left the cache, in classes that people tell apart. The gateway's double from one second on.
export const AGES = [
  { name: "over 2 h", upTo: Infinity, color: "--age-5" },
  { name: "up to 2 h", upTo: 13, color: "--age-4" },
  { name: "up to 17 min", upTo: 10, color: "--age-3" },
  { name: "up to 2 min", upTo: 7, color: "--age-2" },
  { name: "up to 16 s", upTo: 4, color: "--age-1" },
  { name: "not known", upTo: -1, color: "--spent" },
];

// A column of tokens per class; with those of which it is not known they are all that was missed for eviction.
export function byAge({ time, missed, evicted_ages: ages }) {
  const columns = AGES.map(() => time.map(() => 0));
  const add = (column, tokens) => tokens.forEach((count, i) => (column[i] += count));
  for (const [age, tokens] of Object.entries(ages)) add(columns[AGES.findLastIndex(({ upTo }) => Number(age) <= upTo)], tokens);
  const known = time.map((_, i) => columns.reduce((sum, column) => sum + column[i], 0));
  add(columns.at(-1), (missed.evicted ?? []).map((tokens, i) => Math.max(0, tokens - known[i])));
  return columns;
}
