// What figures share: controls, numbers in large type, tables behind charts, Python to copy.
import { html } from "./shared.js";

const shown = (control, value) =>
  control.kind === "slider" ? String(+(+value).toPrecision(4)).replace("-", "−") : value;

export function Control({ control, store, label }) {
  const value = store.state[control.name];
  const id = `control-${control.name}`;
  const set = (given) => store.set({ [control.name]: given });
  if (control.kind === "name") return null;
  if (control.kind === "choice") {
    return html`<div class="control choice">
      <label for=${id}>${label ?? control.label}</label>
      <select id=${id} title=${control.help} value=${value} onChange=${(e) => set(e.target.value)}>
        ${control.options.map(([name, text]) => html`<option value=${name} selected=${name === value}>${text}</option>`)}
      </select>
    </div>`;
  }
  const some = control.values.length > 0;
  const range = some
    ? { min: 0, max: control.values.length - 1, step: 1, value: control.values.indexOf(value) }
    : { min: control.low, max: control.high, step: control.step, value };
  const read = (e) => set(some ? control.values[+e.target.value] : +(+e.target.value).toFixed(6));
  return html`<div class="control slider">
    <label for=${id}>${label ?? control.label}</label>
    <output for=${id}>${shown(control, value)}</output>
    <input id=${id} type="range" ...${range} title=${control.help} aria-valuetext=${shown(control, value)} onInput=${read} />
  </div>`;
}

export const Controls = ({ store, names }) => html`<div class="controls">
  ${store.about.controls
    .filter((c) => !names || names.includes(c.name))
    .map((control) => html`<${Control} key=${control.name} control=${control} store=${store} />`)}
</div>`;

// One number that matters, with what it is.
export const Number = ({ label, value, note, kind = "" }) => html`<div class=${`number ${kind}`}>
  <div class="label">${label}</div>
  <div class="value">${value}</div>
  ${note && html`<div class="note">${note}</div>`}
</div>`;

export const Tables = ({ tables }) => html`<details class="data">
  <summary>Numbers as a table</summary>
  ${tables.map(
    (table) => html`<div class="scroll" role="region" tabindex="0" aria-label=${table.caption}>
      <table>
        <caption>${table.caption}</caption>
        <thead><tr>${table.head.map((cell) => html`<th scope="col">${cell}</th>`)}</tr></thead>
        <tbody>${table.rows.map((row) => html`<tr>${row.map((cell) => html`<td>${cell}</td>`)}</tr>`)}</tbody>
      </table>
    </div>`,
  )}
</details>`;

async function copy(event, text) {
  const button = event.currentTarget;
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it below";
    button.closest("details, .snippet").querySelector("details").open = true;
  }
  setTimeout(() => (button.textContent = before), 1600);
}

export const Snippet = ({ look }) => html`<div class="snippet">
  <button type="button" id="copy" onClick=${(e) => copy(e, look.snippet)}>Copy the Python for this</button>
  ${look.command && html`<button type="button" id="copy-command" onClick=${(e) => copy(e, look.command)}>Copy the commands</button>`}
  <details>
    <summary>Show it</summary>
    <pre id="snippet" tabindex="0"><code>${look.snippet}</code></pre>
    ${look.command && html`<pre id="command" tabindex="0"><code>${look.command}</code></pre>`}
  </details>
</div>`;

export const Shell = ({ store, children, transport, controls = true }) => html`<div class="inner" data-asked=${store.asked} data-answered=${store.answered}>
  <div class="title"><h2>${store.about.title}</h2><p>${store.about.about}</p></div>
  ${store.error && html`<p class="error" role="alert">${store.error}</p>`}
  ${children}
  ${transport}
  ${controls && html`<${Controls} store=${store} />`}
  <div class="behind"><${Tables} tables=${store.look.tables} /><${Snippet} look=${store.look} /></div>
</div>`;
