// What a picture or a table shows, to read and as a file. Every chart has both.
import { html, useState } from "./vendor/htm-preact.js";

const moment = new Intl.DateTimeFormat(undefined, { month: "short", day: "2-digit", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const ROWS = 200; // of the latest moments; the file has all of them

// `keys` (moments, or sizes of what is `across`) and the columns have the same length; a column is { name, values, format }.
export function FiguresOf({ title, said, across, keys, columns }) {
  const [open, setOpen] = useState(false);
  return html`<details class="figures" onToggle=${(event) => setOpen(event.target.open)}>
    <summary>Figures<span class="unseen"> of ${title}</span></summary>
    ${open && html`<${TableOf} title=${title} said=${said} across=${across} keys=${keys} columns=${columns} />`}
  </details>`;
}

function TableOf({ title, said, across, keys, columns }) {
  const first = across ? 0 : Math.max(0, keys.length - ROWS);
  const rows = keys.slice(first).map((key, i) => [key, columns.map(({ values, format }) => format(values[first + i]))]);
  if (!across) rows.reverse();
  const [name, told, filed] = across
    ? [across.name, across.format, (key) => key]
    : ["time", (key) => moment.format(new Date(key * 1000)), (key) => new Date(key * 1000).toISOString()];
  const lines = () => [
    [name, ...columns.map((column) => column.name)],
    ...keys.map((key, i) => [filed(key), ...columns.map(({ values }) => values[i])]),
  ];
  return html`
    <p class="note">
      ${said}${!across && "; newest first"}${first > 0 && `, the latest ${ROWS} of ${keys.length}`}. <${fileLink} title=${title} lines=${lines} />
    </p>
    <div class="scroll" role="region" aria-label=${`Figures of ${title}`} tabindex="0">
      <table>
        <thead><tr><th scope="col">${name[0].toUpperCase() + name.slice(1)}</th>${columns.map((column) => html`<th scope="col" key=${column.name}>${column.name}</th>`)}</tr></thead>
        <tbody>
          ${rows.map(([key, cells]) => html`<tr key=${key}>
            <th scope="row">${told(key)}</th>${cells.map((cell, i) => html`<td key=${i}>${cell}</td>`)}
          </tr>`)}
        </tbody>
      </table>
    </div>
  `;
}

// The file is made when it is asked for: `lines` gives its rows, of unrounded values; what there is not is empty.
export function fileLink({ title, lines }) {
  const file = `headstart-${title.toLowerCase().replaceAll(" ", "-")}.csv`;
  const fill = (event) => (event.currentTarget.href = `data:text/csv;charset=utf-8,${encodeURIComponent(csv(lines()))}`);
  return html`<a class="file" download=${file} href="#" aria-label=${`Download ${file}`} onClick=${fill}>CSV</a>`;
}

const csv = (lines) => lines.map((line) => line.map(csvCell).join(",")).join("\r\n") + "\r\n";

// Spreadsheets run what begins like a formula: names of documents and tenants come from outside.
function csvCell(value) {
  if (value == null) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
