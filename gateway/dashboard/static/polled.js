// Figures that are too long for the feed: asked for while they are looked at.
import { html, useCallback, useEffect, useState } from "./vendor/htm-preact.js";

const PERIOD_MS = 5_000;

// Returns what `path` (below /admin/) last said, null before the first answer, and a function that asks again at once.
// `said.problem` instead of figures says in words why there are none.
export function usePolled(path, keyHeader) {
  const [said, setSaid] = useState(null);
  const load = useCallback(async () => {
    try {
      const response = await fetch(new URL(`../../admin/${path}`, import.meta.url), { headers: keyHeader, cache: "no-store" });
      const body = await response.json();
      setSaid(response.ok ? body : { problem: body.error?.message ?? `The gateway answered ${response.status}.` });
    } catch {
      // The feed says that the gateway is away; the figures that were there stay.
    }
  }, [path, keyHeader.authorization]);
  useEffect(() => {
    setSaid(null);
    load();
    const timer = setInterval(load, PERIOD_MS);
    return () => clearInterval(timer);
  }, [load]);
  return [said, load];
}

// What the operator does: returns what came of the last act in words, and a function that sends one and asks `load` again.
// `spoken` makes the words out of the answer, null where it has no body.
export function useAct(keyHeader, load) {
  const [said, setSaid] = useState("");
  const act = useCallback(
    async (method, path, spoken, body) => {
      setSaid("");
      try {
        const response = await fetch(new URL(`../../admin/${path}`, import.meta.url), {
          method,
          headers: body ? { "content-type": "application/json", ...keyHeader } : keyHeader,
          body: body && JSON.stringify(body),
        });
        const answer = response.status === 204 ? null : await response.json();
        setSaid(answer?.error ? answer.error.message : spoken(answer));
      } catch {
        setSaid("The gateway cannot be reached.");
      }
      await load();
    },
    [load, keyHeader.authorization],
  );
  return [said, act];
}

// What stands in place of figures that are not there.
export function Missing({ title, said }) {
  return html`<section class="card" aria-label=${title}><h2>${title}</h2><p class=${said ? "note bad" : "note"}>${said ? said.problem : "Loading…"}</p></section>`;
}
