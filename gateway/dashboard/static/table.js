// Any table of named rows: scrolls within its card, and can be had as a file. Cells may be markup, values are for the file.
import { html, useState } from "./vendor/htm-preact.js";
import { CauseKey } from "./causes.js";
import { fileLink } from "./figures.js";

const FIRST = 25;

// `rows` are objects with a unique `key` and a `name`; a column is { name, cell(row), value(row) }, `wide` where it
// needs more room. Of rows with missed tokens by cause the colours are told.
export function RowTable({ title, said, first, rows, columns, note, none = "Nothing in this window." }) {
  const [all, setAll] = useState(false);
  const id = `table-${title.toLowerCase().replaceAll(" ", "-")}`;
  const filed = columns.filter((column) => column.value);
  const lines = () => [[first.toLowerCase(), ...filed.map(({ name }) => name)], ...rows.map((row) => [row.name, ...filed.map(({ value }) => value(row))])];
  return html`<section class="card table" aria-labelledby=${id}>
    <div class="bar-title">
      <h2 id=${id}>${title} <small>${said}</small></h2>
      ${rows.length > 0 && html`<${fileLink} title=${title} lines=${lines} />`}
    </div>
    ${rows.length === 0
      ? html`<p class="note">${none}</p>`
      : html`<div class="scroll" role="region" aria-labelledby=${id} tabindex="0">
          <table class=${`by-${first.toLowerCase()}`}>
            <thead>
              <tr><th scope="col">${first}</th>${columns.map(({ name, wide }) => html`<th scope="col" key=${name} class=${wide ? "wide" : null}>${name}</th>`)}</tr>
            </thead>
            <tbody>
              ${(all ? rows : rows.slice(0, FIRST)).map(
                (row) => html`<tr key=${row.key}>
                  <th scope="row" title=${row.name}>${row.name}</th>${columns.map(({ name, cell }) => html`<td key=${name}>${cell(row)}</td>`)}
                </tr>`,
              )}
            </tbody>
          </table>
        </div>`}
    ${!all && rows.length > FIRST && html`<div class="switch"><button type="button" onClick=${() => setAll(true)}>Show all ${rows.length}</button></div>`}
    ${rows.some(({ missed }) => missed) && html`<${CauseKey} rows=${rows} />`}
    ${note && html`<p class="note">${note}</p>`}
  </section>`;
}
