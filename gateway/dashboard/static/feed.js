// The connection to the gateway's event stream: fetch instead of EventSource, because a key must travel in a header.
const SILENCE_MS = 10_000; // an update comes every second; after so long without one the connection is taken for dead
const FIRST_RETRY_MS = 1_000;
const LAST_RETRY_MS = 5_000;
const URL_EVENTS = new URL("../events", import.meta.url);

export class Locked extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Keeps one stream open until the returned function is called. `onUpdate` gets each update, `onLost` a reason when the
// stream ends (it is opened again by itself), `onLocked` the refusal when the gateway wants the admin key (it is not).
export function follow({ window: span, key, onUpdate, onLost, onLocked }) {
  let stopped = false;
  let controller;

  async function run() {
    let delay = FIRST_RETRY_MS;
    while (!stopped) {
      controller = new AbortController();
      try {
        await read(span, key, controller, (update) => {
          delay = FIRST_RETRY_MS;
          if (!stopped) onUpdate(update);
        });
        if (!stopped) onLost("The gateway ended the connection.");
      } catch (error) {
        if (stopped) return;
        if (error instanceof Locked) return onLocked(error);
        onLost(error.name === "AbortError" ? "The gateway has gone silent." : "The gateway cannot be reached.");
      }
      await new Promise((resolve) => setTimeout(resolve, delay));
      delay = Math.min(delay * 2, LAST_RETRY_MS);
    }
  }

  run();
  return () => {
    stopped = true;
    controller?.abort();
  };
}

async function read(span, key, controller, onUpdate) {
  const url = new URL(URL_EVENTS);
  url.searchParams.set("window", span);
  let watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
  try {
    const response = await fetch(url, {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      cache: "no-store",
      signal: controller.signal,
    });
    if (response.status === 401 || response.status === 403) {
      const body = await response.json().catch(() => null);
      throw new Locked(response.status, body?.error?.message ?? "");
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(watchdog);
      watchdog = setTimeout(() => controller.abort(), SILENCE_MS);
      const events = (text + value).split("\n\n");
      text = events.pop();
      for (const event of events) {
        const data = event.split("\n").find((line) => line.startsWith("data: "));
        if (data) onUpdate(JSON.parse(data.slice(6)));
      }
    }
  } finally {
    clearTimeout(watchdog);
  }
}
