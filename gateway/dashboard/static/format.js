// Figures as people read them. What has no meaning yet is a dash.
const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });

export const count = (value) =>
  value == null ? NONE : value < 1e6 ? whole.format(value) : compact.format(value);

export const percent = (fraction) =>
  fraction == null ? NONE : `${(100 * fraction).toFixed(1)}%`;

// Three significant digits: 8.3 ms, 420 ms, 1.25 s, 12.4 s, 2 min 05 s, 3 h 20 min.
export function seconds(value) {
  if (value == null) return NONE;
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${(1000 * value).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 59.95) return `${value.toFixed(value < 9.995 ? 2 : 1)} s`;
  const total = Math.round(value);
  if (total < 3600) return `${Math.floor(total / 60)} min ${String(total % 60).padStart(2, "0")} s`;
  return `${whole.format(Math.floor(total / 3600))} h ${String(Math.floor((total % 3600) / 60)).padStart(2, "0")} min`;
}

export const plural = (value, one, many) => `${count(value)} ${value === 1 ? one : many}`;

export const time = (unix) => clock.format(new Date(unix * 1000));

export const share = (part, whole) => (whole > 0 ? part / whole : null);
