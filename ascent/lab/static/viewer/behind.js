// Behind a chart: its numbers as a table, made when it is opened; and what there is to say of them, beside the handle.
import { Component } from "../vendor/preact.mjs";
import { html } from "../store.js";
import { rowsOf } from "./curves.js";
import { num } from "./shared.js";

const Table = ({ title, lines, say }) => {
  const { rows, left } = rowsOf(lines);
  const wide = lines.some((line) => line.low);
  const cell = (c) => (!c ? "" : (c.odd ?? (Number.isNaN(c.value) ? "" : say(c.value))));
  return html`<div class="scroll" role="region" tabindex="0" aria-label=${`${title}, as a table`}>
    <table>
      <thead><tr><th scope="col">step</th>${lines.map((line) => html`<th scope="col">${line.label}</th>${wide && html`<th scope="col">smallest</th><th scope="col">largest</th>`}`)}</tr></thead>
      <tbody>${rows.map(({ step, cells }) => html`<tr key=${step}><th scope="row">${num(step)}</th>${cells.map((c) => html`<td>${cell(c)}</td>${wide && html`<td>${c && say(c.low)}</td><td>${c && say(c.high)}</td>`}`)}</tr>`)}</tbody>
    </table>
    ${left > 0 && html`<p class="note">${left} more rows: zoom in to see them.</p>`}
  </div>`;
};

export class Behind extends Component {
  render({ title, lines, say, children }, { open }) {
    return html`<div class="behind-chart">
      <details onToggle=${(event) => this.setState({ open: event.currentTarget.open })}>
        <summary>Table</summary>
        ${open && html`<${Table} title=${title} lines=${lines} say=${say} />`}
      </details>
      <p>${children}</p>
    </div>`;
  }
}
