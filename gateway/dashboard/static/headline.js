// The four figures one looks at first, over the chosen window.
import { html } from "./vendor/htm-preact.js";
import { count, percent, plural, seconds, share } from "./format.js";

export function Headline({ totals, said }) {
  const whole = totals.prefill_s + totals.saved_prefill_s;
  const saved = share(totals.saved_prefill_s, whole);
  return html`<section class="headline" aria-label=${`Headline figures, ${said}`}>
    <${Figure} name="Token hit rate" said=${said} value=${percent(totals.token_hit_rate)} main
      note=${totals.prompt_tokens > 0
        ? `${count(totals.cached_prompt_tokens)} of ${plural(totals.prompt_tokens, "prompt token", "prompt tokens")}`
        : "no prompt tokens yet"}
      part=${totals.token_hit_rate} />
    <${Figure} name="Prefill saved" said=${said} value=${seconds(totals.saved_prefill_s)}
      note=${saved === null ? "nothing spent yet" : html`${percent(saved)} of ${seconds(whole)}${money(totals)}${interval(totals)}${checked(totals)}`}
      part=${saved} />
    <${Figure} name="Time to first token" said=${said} value=${seconds(totals.ttft_p50_s)} unit="p50"
      second=${html`<b>${seconds(totals.ttft_p95_s)}</b> <small>p95</small>`}
      note=${`from arrival, where it is known; mean ${seconds(totals.ttft_mean_s)}`} />
    <${Figure} name="Requests" said=${said} value=${count(totals.requests)}
      note=${outcome(totals)} />
  </section>`;
}

// Nine times out of ten what was saved lies in here.
function interval({ saved_prefill_s: saved, saved_prefill_low_s: low, saved_prefill_high_s: high }) {
  return saved > 0 && html`<br /><span title="What was saved lies in here nine times out of ten">${seconds(low)} to ${seconds(high)}, at 90%</span>`;
}

const money = ({ saved_money: money }) => money && `; worth ${money.amount.toFixed(2)} ${money.currency}`;

// Requests that were kept from the cache show what the estimate is worth.
function checked({ calibration }) {
  return calibration && html`<br />${plural(calibration.requests, "request", "requests")} held out: ${seconds(calibration.measured_prefill_s)} measured, ${seconds(calibration.estimated_prefill_s)} estimated`;
}

function outcome({ requests, failed, aborted, completion_tokens: tokens }) {
  if (requests === 0) return "none in this window";
  return html`<span class=${failed > 0 ? "bad" : ""}>${count(failed)} failed</span>${aborted > 0 && `, ${count(aborted)} aborted`},
    ${" "}${plural(tokens, "token", "tokens")} generated`;
}

function Figure({ name, said, value, unit, second, note, part, main }) {
  return html`<div class=${`card figure ${main ? "main" : ""}`}>
    <h2>${name} <small>${said}</small></h2>
    <p class="value">
      <span>${value}${unit && html` <small>${unit}</small>`}</span>
      ${second && html`<span class="second">${second}</span>`}
    </p>
    ${part != null && html`<div class="meter" aria-hidden="true"><i style=${{ width: `${100 * part}%` }}></i></div>`}
    <p class="note">${note}</p>
  </div>`;
}
