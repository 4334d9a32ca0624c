// Figures that are too long for the feed: asked for while they are looked at. `null` until the first answer.
import { useCallback, useEffect, useState } from "./vendor/htm-preact.js";

const PERIOD_MS = 5_000;

// Returns what `path` (below /admin/) last said, and a function that asks again at once.
export function usePolled(path, keyHeader) {
  const [said, setSaid] = useState(null);
  const load = useCallback(async () => {
    const response = await fetch(new URL(`../../admin/${path}`, import.meta.url), { headers: keyHeader, cache: "no-store" }).catch(() => null);
    if (response?.ok) setSaid(await response.json());
  }, [path, keyHeader.authorization]);
  useEffect(() => {
    load();
    const timer = setInterval(load, PERIOD_MS);
    return () => clearInterval(timer);
  }, [load]);
  return [said, load];
}
