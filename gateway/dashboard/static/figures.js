// What a picture shows, in figures: a table to read and the same as a file. Every chart has it.
import { html, useState } from "./vendor/htm-preact.js";

const moment = new Intl.DateTimeFormat(undefined, { month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const ROWS = 200; // of the latest moments; the file has all of them

// `time` and the columns have the same length; a column is { name, values, format }.
export function FiguresOf({ title, said, time, columns }) {
  const [open, setOpen] = useState(false);
  return html`<details class="figures" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Figures<span class="unseen"> of ${title}</span></summary>
    ${open && html`<${TableOf} title=${title} said=${said} time=${time} columns=${columns} />`}
  </details>`;
}

function TableOf({ title, said, time, columns }) {
  const first = Math.max(0, time.length - ROWS);
  const rows = time.slice(first).map((at, i) => [at, columns.map(({ values, format }) => format(values[first + i]))]);
  const file = `headstart-${title.toLowerCase().replaceAll(" ", "-")}.csv`;
  return html`
    <p class="note">
      ${said}; newest first${first > 0 && `, the latest ${ROWS} of ${time.length}`}.
      ${" "}<a download=${file} href=${`data:text/csv;charset=utf-8,${encodeURIComponent(csv(time, columns))}`}>Download ${file}</a>
    </p>
    <div class="scroll" role="region" aria-label=${`Figures of ${title}`} tabindex="0">
      <table>
        <thead><tr><th scope="col">Time</th>${columns.map(({ name }) => html`<th scope="col" key=${name}>${name}</th>`)}</tr></thead>
        <tbody>
          ${rows.reverse().map(([at, cells]) => html`<tr key=${at}>
            <th scope="row">${moment.format(new Date(at * 1000))}</th>${cells.map((cell, i) => html`<td key=${i}>${cell}</td>`)}
          </tr>`)}
        </tbody>
      </table>
    </div>
  `;
}

// Unrounded values, times as ISO 8601 in UTC; what was not measured is empty.
export function csv(time, columns) {
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const lines = time.map((at, i) => [new Date(at * 1000).toISOString(), ...columns.map(({ values }) => values[i] ?? "")].join(","));
  return [["time", ...columns.map(({ name }) => cell(name))].join(","), ...lines, ""].join("\r\n");
}
