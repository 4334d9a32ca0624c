// The page: what it is told by the feed, laid out. State lives here; everything below only draws.
import { html, render, useCallback, useEffect, useState } from "./vendor/htm-preact.js";
import { HitRateChart, LoadChart, PrefillChart, TtftChart } from "./charts.js";
import { Documents } from "./documents.js";
import { Eviction } from "./eviction.js";
import { follow } from "./feed.js";
import { Headline } from "./headline.js";
import { Learned } from "./learned.js";
import { Misses } from "./misses.js";
import { Empty, Notices, Unlock } from "./messages.js";
import { Pins } from "./pins.js";
import { Pool } from "./pool.js";
import { Quality } from "./quality.js";
import { Replicas } from "./replicas.js";
import { Requests } from "./requests.js";
import { Table } from "./tables.js";
import { Header } from "./header.js";
import { Navigation, useView } from "./views.js";

const KEY = "headstart.admin-key";
const WINDOW = "headstart.window";
const WINDOWS = {
  "5m": { label: "5 min", said: "last 5 minutes" },
  "15m": { label: "15 min", said: "last 15 minutes" },
  "1h": { label: "1 h", said: "last hour" },
  "24h": { label: "24 h", said: "last 24 hours" },
  "30d": { label: "30 d", said: "last 30 days" },
  all: { label: "All", said: "everything counted" },
};

function App() {
  const view = useView();
  const [span, setSpan] = useState(() => (localStorage.getItem(WINDOW) in WINDOWS ? localStorage.getItem(WINDOW) : "15m"));
  const [key, setKey] = useState(() => sessionStorage.getItem(KEY));
  const [update, setUpdate] = useState(null);
  const [lost, setLost] = useState(null); // { reason, since } while there is no connection
  const [locked, setLocked] = useState(null); // the gateway's refusal when it wants a key
  const [theme, setTheme] = useState(headstartTheme.chosen);

  useEffect(() => {
    setLocked(null);
    return follow({
      window: span,
      key,
      onUpdate: (next) => {
        setUpdate(next);
        setLost(null);
      },
      onLost: (reason) => setLost((before) => ({ reason, since: before?.since ?? Date.now() / 1000 })),
      onLocked: ({ status, message }) => {
        sessionStorage.removeItem(KEY);
        setLocked({ status, message, tried: key !== null });
      },
    });
  }, [span, key]);

  const chooseSpan = useCallback((next) => {
    localStorage.setItem(WINDOW, next);
    setSpan(next);
  }, []);

  const chooseTheme = useCallback((next) => {
    headstartTheme.choose(next);
    setTheme(next);
  }, []);

  const unlock = useCallback((entered) => {
    sessionStorage.setItem(KEY, entered);
    setKey(entered);
  }, []);

  const shown = update && !locked;
  return html`
    <a class="skip" href="#figures" onClick=${skip}>To the figures</a>
    <${Header} snapshot=${shown && update.snapshot} lost=${lost} locked=${locked !== null}
      span=${span} windows=${WINDOWS} onSpan=${chooseSpan} theme=${theme} onTheme=${chooseTheme} />
    ${shown && html`<${Navigation} view=${view} />`}
    <main id="figures" tabindex="-1" class=${lost ? "stale" : ""}>
      ${locked && html`<${Unlock} ...${locked} onKey=${unlock} />`}
      ${!locked && html`<${Notices} update=${update} lost=${lost} />`}
      ${shown && html`<${Figures} view=${view} update=${update} adminKey=${key} />`}
      ${!shown && !locked && !lost && html`<p class="waiting">Connecting to the gateway…</p>`}
    </main>
    ${shown && html`<${Footer} snapshot=${update.snapshot} />`}
  `;
}

// The hash names the view: what a link to a place would do is done by hand.
function skip(event) {
  event.preventDefault();
  document.getElementById("figures").focus();
}

function Figures({ view, update, adminKey }) {
  const { snapshot, series, ever, eviction, quality } = update;
  const said = WINDOWS[update.window].said;
  const keyHeader = adminKey ? { authorization: `Bearer ${adminKey}` } : {};
  const charted = update.window === "all" ? WINDOWS["30d"].said : said; // nothing is kept over time for longer
  const pool = html`<${Pool} replicas=${snapshot.replicas} said=${said} />`;
  if (ever === 0 && view === "overview") return html`<${Empty} snapshot=${snapshot} keyed=${adminKey !== null} />${pool}`;
  const views = {
    overview: () => html`
      <${Headline} totals=${snapshot.totals} said=${said} />
      <section class="charts" aria-label=${`Charts, ${charted}`}>
        <${HitRateChart} series=${series} said=${charted} changes=${eviction.changes} />
        <${PrefillChart} series=${series} said=${charted} />
        <${TtftChart} series=${series} said=${charted} />
        <${LoadChart} series=${series} said=${charted} />
      </section>
      ${pool}
      <${Table} title="Tenants" first="Tenant" rows=${snapshot.tenants} said=${said} />
    `,
    misses: () => html`<${Misses} span=${update.window} said=${said} series=${series} charted=${charted} keyHeader=${keyHeader} />`,
    templates: () => html`
      <${Table} title="Templates" first="Template" rows=${snapshot.templates} said=${said}
        none=${html`No request in this window: choose a longer one, or name your system prompts with <code>POST /v1/templates</code> and send some.`}
        note="Requests whose system prompt matches no registered template count as unregistered." />
      <${Learned} keyHeader=${keyHeader} />
    `,
    documents: () => html`<${Documents} span=${update.window} said=${said} keyHeader=${keyHeader} />`,
    replicas: () => html`
      <${Replicas} replicas=${snapshot.replicas} said=${said} keyHeader=${keyHeader} />
      <${Table} title="Replicas" first="Replica" rows=${snapshot.replicas} said=${said} />
    `,
    eviction: () => html`<${Eviction} eviction=${eviction} keyHeader=${keyHeader} /><${Pins} keyHeader=${keyHeader} />`,
    quality: () => html`<${Quality} quality=${quality} keyHeader=${keyHeader} />`,
    requests: () => html`<${Requests} keyHeader=${keyHeader} />`,
  };
  return views[view]();
}

function Footer({ snapshot }) {
  const { redis, gateways, version } = snapshot;
  const sharing = {
    ok: `Statistics are shared through ${redis.where}`,
    starting: `Connecting to ${redis.where}`,
    down: `${redis.where} is down; it is tried again`,
    off: "Statistics stay in this process",
  }[redis.state];
  return html`<footer>
    <span>${sharing}${gateways > 1 ? `, ${gateways} gateways` : ""}.</span>
    <span>Headstart ${version}</span>
  </footer>`;
}

render(html`<${App} />`, document.getElementById("app"));
