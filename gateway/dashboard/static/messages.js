// What the page says when there is something to do: no request yet, no key, no connection, something degraded.
import { html, useRef, useState } from "./vendor/htm-preact.js";
import { time } from "./format.js";

export function Notices({ update, lost }) {
  const notices = [];
  if (lost) {
    notices.push([
      "bad",
      `${lost.reason} ${update ? `The figures are those of ${time(update.snapshot.time)}.` : ""} Trying again.`,
    ]);
  } else if (update) {
    for (const [name, row] of Object.entries(update.snapshot.replicas)) {
      if (row.state === "down") notices.push(["bad", `${name} is down: ${row.down_reason ?? "no reason given"}`]);
      if (row.state === "starting") notices.push(["info", `${name} is starting${row.down_reason ? `: ${row.down_reason}` : "."}`]);
    }
    const { state, reason, where } = update.snapshot.redis;
    if (state === "down") notices.push(["warn", `${where} is down (${reason.replace(/\.$/, "")}). Requests are served and counted all the same; other gateways’ figures are old.`]);
    if (state === "off") notices.push(["warn", `Statistics stay in this process: ${reason}`]);
  }
  return html`<div class="notices" aria-live="polite">
    ${notices.map(([kind, text]) => html`<p class=${`notice ${kind}`} key=${text}>${text}</p>`)}
  </div>`;
}

export function Unlock({ status, message, tried, onKey }) {
  const field = useRef(null);
  if (status === 403 && !tried) {
    return html`<section class="card centred"><h2>This dashboard is not open from here</h2><p>${message}</p></section>`;
  }
  const submit = (event) => {
    event.preventDefault();
    const entered = field.current.value.trim();
    if (entered) onKey(entered);
  };
  return html`<section class="card centred" aria-labelledby="unlock-title">
    <h2 id="unlock-title">This dashboard is the operator’s</h2>
    <p>Figures of all tenants are shown here, so the gateway asks for its admin key.</p>
    <form onSubmit=${submit}>
      <label for="admin-key">Admin key</label>
      <div class="field">
        <input id="admin-key" ref=${field} type="password" autocomplete="off" spellcheck=${false} required
          aria-invalid=${tried} aria-describedby="key-note" />
        <button type="submit" class="primary">Open</button>
      </div>
      <p id="key-note" class=${tried ? "note bad" : "note"}>
        ${tried ? `That key was not accepted. ${status === 403 ? message : ""}` : "It stays in this browser tab until you close it."}
      </p>
    </form>
  </section>`;
}

export function Empty({ snapshot, keyed }) {
  const ready = Object.values(snapshot.replicas).find((row) => row.state === "ready");
  const body = { model: ready?.model ?? "MODEL", messages: [{ role: "user", content: "Say hello in one sentence." }] };
  const command = `curl ${location.origin}/v1/chat/completions \\
  -H 'content-type: application/json' \\${keyed ? "\n  -H 'authorization: Bearer YOUR_API_KEY' \\" : ""}
  -d '${JSON.stringify(body)}'`;
  return html`<section class="card empty" aria-labelledby="empty-title">
    <div>
      <h2 id="empty-title">Waiting for the first request</h2>
      <p>
        Point any OpenAI client at <code>${location.origin}/v1</code>, or paste this into a terminal. Send the same prompt
        twice and watch the second one come from the cache.
      </p>
      <p>
        A RAG application gains most: send retrieved passages as <code>documents</code> in the body, and they
        are laid out so that as many leading tokens as possible are cached already.
      </p>
    </div>
    <${Command} text=${command} />
  </section>`;
}

function Command({ text }) {
  const [copied, setCopied] = useState(false);
  const copy = async () => {
    await navigator.clipboard.writeText(text);
    setCopied(true);
    setTimeout(() => setCopied(false), 2000);
  };
  return html`<div class="command">
    <pre tabindex="0"><code>${text}</code></pre>
    ${navigator.clipboard && html`<button type="button" onClick=${copy}>${copied ? "Copied" : "Copy"}</button>`}
  </div>`;
}
