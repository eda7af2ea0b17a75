// What figures share: controls, numbers in large type, tables behind charts, Python to copy; and drawing with axes, which can
// be dragged.
import { copy, html } from "./shared.js";

const text = (value) => String(value).replace("-", "−");

export function Control({ control, store }) {
  const value = store.state[control.name];
  const id = `control-${control.name}`;
  const set = (given) => store.set({ [control.name]: given });
  if (control.kind === "name") return null;
  if (control.kind === "choice") {
    return html`<div class="control choice">
      <label for=${id}>${control.label}</label>
      <select id=${id} title=${control.help} value=${value} onChange=${(e) => set(e.target.value)}>
        ${control.options.map(([name, text]) => html`<option value=${name} selected=${name === value}>${text}</option>`)}
      </select>
    </div>`;
  }
  const some = control.values.length > 0;
  const range = some
    ? { min: 0, max: control.values.length - 1, step: 1, value: control.values.indexOf(value) }
    : { min: control.low, max: control.high, step: control.step, value };
  const shown = text(+(+value).toPrecision(4));
  const read = (e) => set(some ? control.values[+e.target.value] : +(+e.target.value).toFixed(6));
  return html`<div class="control slider">
    <label for=${id}>${control.label}</label>
    <output for=${id}>${shown}</output>
    <input id=${id} type="range" ...${range} title=${control.help} aria-valuetext=${shown} onInput=${read} />
  </div>`;
}

// One number that matters, with what it is.
export const Number = ({ label, value, note, kind = "" }) => html`<div class=${`number ${kind}`}>
  <div class="label">${label}</div>
  <div class="value">${value}</div>
  ${note && html`<div class="note">${note}</div>`}
</div>`;

const Tables = ({ tables }) => html`<details class="data">
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

const Snippet = ({ look }) => html`<div class="snippet">
  <button type="button" id="copy" onClick=${(e) => copy(e, look.snippet)}>Copy the Python for this</button>
  ${look.command && html`<button type="button" id="copy-command" onClick=${(e) => copy(e, look.command)}>Copy the commands</button>`}
  <details>
    <summary>Show it</summary>
    <pre id="snippet" tabindex="0"><code>${look.snippet}</code></pre>
    ${look.command && html`<pre id="command" tabindex="0"><code>${look.command}</code></pre>`}
  </details>
</div>`;

// A figure: its title, what it draws, its controls, and the numbers and the Python behind it.
export const Shell = ({ store, children, controls = true }) => html`<div class="inner" data-asked=${store.asked} data-answered=${store.answered}>
  <div class="title"><h2>${store.about.title}</h2><p>${store.about.about}</p></div>
  ${store.error && html`<p class="error" role="alert">${store.error}</p>`}
  ${children}
  ${controls && html`<div class="controls">${store.about.controls.map((c) => html`<${Control} key=${c.name} control=${c} store=${store} />`)}</div>`}
  <div class="behind"><${Tables} tables=${store.look.tables} /><${Snippet} look=${store.look} /></div>
</div>`;

// ---- drawing: a frame with axes in the coordinates of its numbers, and dragging in them ----
export function frame({ width, height, x, y, left = 46, right = 16, top = 14, bottom = 38 }) {
  const w = width - left - right;
  const hgt = height - top - bottom;
  return {
    width, height, left, right, top, bottom, x, y,
    sx: (v) => left + ((v - x[0]) / (x[1] - x[0])) * w,
    sy: (v) => top + ((y[1] - v) / (y[1] - y[0])) * hgt,
    ix: (px) => x[0] + ((px - left) / w) * (x[1] - x[0]),
    iy: (py) => y[1] - ((py - top) / hgt) * (y[1] - y[0]),
  };
}

export const Axes = ({ f, xticks = [], yticks = [], xlabel, ylabel, drop = 17 }) => html`<g class="axes">
  ${yticks.map((v) => html`<g>
    <line class=${v === 0 ? "zero" : "grid"} x1=${f.left} x2=${f.width - f.right} y1=${f.sy(v)} y2=${f.sy(v)} />
    <text class="tick" x=${f.left - 8} y=${f.sy(v)} dy="0.34em" text-anchor="end">${text(v)}</text>
  </g>`)}
  ${xticks.map((v) => html`<g>
    <line class="grid" x1=${f.sx(v)} x2=${f.sx(v)} y1=${f.top} y2=${f.height - f.bottom} />
    <text class="tick" x=${f.sx(v)} y=${f.height - f.bottom + drop} text-anchor="middle">${text(v)}</text>
  </g>`)}
  ${xlabel && html`<text class="axis-label" x=${f.width - f.right} y=${f.height - 4} text-anchor="end">${xlabel}</text>`}
  ${ylabel && html`<text class="axis-label" x=${f.left} y=${f.top - 5}>${ylabel}</text>`}
</g>`;

export const path = (f, xs, ys) =>
  xs.map((x, i) => `${i ? "L" : "M"}${f.sx(x).toFixed(1)} ${f.sy(ys[i]).toFixed(1)}`).join("");

// Follow a pointer from here on, in the coordinates of the frame.
export function drag(event, f, move) {
  const handle = event.currentTarget;
  event.preventDefault();
  handle.setPointerCapture(event.pointerId);
  handle.onpointermove = (e) => {
    const box = handle.ownerSVGElement.getBoundingClientRect();
    move(f.ix(e.clientX - box.left), f.iy(e.clientY - box.top));
  };
  handle.onlostpointercapture = () => (handle.onpointermove = null);
}

export const controlOf = (store, name) => store.about.controls.find((control) => control.name === name);

// To the nearest step of a control, within its bounds.
export function snap(store, name, value) {
  const c = controlOf(store, name);
  const stepped = c.low + Math.round((value - c.low) / c.step) * c.step;
  return +Math.min(c.high, Math.max(c.low, stepped)).toFixed(6);
}

export const nudge = (store, name, by) => {
  const c = controlOf(store, name);
  if (c.values.length) {
    const at = c.values.indexOf(store.state[name]) + by;
    store.set({ [name]: c.values[Math.min(c.values.length - 1, Math.max(0, at))] });
  } else store.set({ [name]: snap(store, name, store.state[name] + by * c.step) });
};

export const Arrow = ({ x1, x2, y, kind }) => {
  const long = Math.abs(x2 - x1);
  if (long < 1) return html`<circle class=${`none ${kind}`} cx=${x1} cy=${y} r="3.5" />`;
  const head = Math.min(8, Math.max(4, long));
  const d = x2 >= x1 ? 1 : -1;
  return html`<g class=${`arrow ${kind}`}>
    <line x1=${x1} x2=${x2 - d * Math.min(head, long)} y1=${y} y2=${y} />
    <path d=${`M${x2} ${y}l${-d * head} ${-head * 0.62}v${head * 1.24}z`} />
  </g>`;
};
