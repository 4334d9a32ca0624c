// The bar at the top: what is served, whether the page is live, and the choice of window and theme.
import { html } from "./vendor/htm-preact.js";
import { time } from "./format.js";

const THEMES = { auto: ["light", "Theme: as the system"], light: ["dark", "Theme: light"], dark: ["auto", "Theme: dark"] };

export function Header({ snapshot, lost, locked, span, windows, onSpan, theme, onTheme }) {
  const [next, label] = THEMES[theme];
  return html`<header>
    <div class="brand">
      <img src="/dashboard/static/mark.svg" alt="" width="32" height="32" />
      <h1>Headstart</h1>
      ${snapshot && html`<${Models} replicas=${snapshot.replicas} />`}
    </div>
    <${Connection} snapshot=${snapshot} lost=${lost} locked=${locked} />
    <div class="controls">
      <fieldset class="segments">
        <legend class="unseen">Window of the figures</legend>
        ${Object.entries(windows).map(
          ([value, window]) => html`<label key=${value}>
            <input type="radio" name="window" value=${value} checked=${value === span} onChange=${() => onSpan(value)} />
            <span>${window.label}</span>
          </label>`,
        )}
      </fieldset>
      <button class="icon" type="button" title=${label} aria-label=${`${label}. Change it.`} onClick=${() => onTheme(next)}>
        <${ThemeIcon} theme=${theme} />
      </button>
    </div>
  </header>`;
}

function Models({ replicas }) {
  const models = [...new Set(Object.values(replicas).map((row) => row.model).filter(Boolean))];
  return models.length > 0 && html`<span class="model" title="Model served here">${models.join(", ")}</span>`;
}

function Connection({ snapshot, lost, locked }) {
  const [kind, text] = lost
    ? ["bad", `Disconnected since ${time(lost.since)}`]
    : locked
      ? ["idle", "Locked"]
      : snapshot
        ? ["good", "Live"]
        : ["idle", "Connecting"];
  return html`<span class=${`pill ${kind}`} role="status"><i aria-hidden="true"></i>${text}</span>`;
}

function ThemeIcon({ theme }) {
  const paths = {
    auto: html`<circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 2a6 6 0 0 1 0 12z" fill="currentColor" />`,
    light: html`<circle cx="8" cy="8" r="3.2" fill="currentColor" /><path d="M8 .8v2M8 13.2v2M.8 8h2M13.2 8h2M2.9 2.9l1.4 1.4M11.7 11.7l1.4 1.4M2.9 13.1l1.4-1.4M11.7 4.3l1.4-1.4" stroke="currentColor" stroke-width="1.5" stroke-linecap="round" />`,
    dark: html`<path d="M13.5 9.8A6 6 0 0 1 6.2 2.5a6 6 0 1 0 7.3 7.3z" fill="currentColor" />`,
  };
  return html`<svg viewBox="0 0 16 16" width="16" height="16" aria-hidden="true">${paths[theme]}</svg>`;
}
