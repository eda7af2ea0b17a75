// Drawing: a frame with axes in the coordinates of its numbers, and dragging in them.
import { html } from "./shared.js";

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

const text = (v) => String(v).replace("-", "−");

export const Axes = ({ f, xticks = [], yticks = [], xlabel, ylabel, zero = true, drop = 17 }) => html`<g class="axes">
  ${yticks.map((v) => html`<g>
    <line class=${v === 0 && zero ? "zero" : "grid"} x1=${f.left} x2=${f.width - f.right} y1=${f.sy(v)} y2=${f.sy(v)} />
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
  const svg = event.currentTarget.ownerSVGElement;
  const handle = event.currentTarget;
  event.preventDefault();
  handle.setPointerCapture(event.pointerId);
  const follow = (e) => {
    const box = svg.getBoundingClientRect();
    move(f.ix(e.clientX - box.left), f.iy(e.clientY - box.top));
  };
  const done = () => {
    handle.removeEventListener("pointermove", follow);
    handle.removeEventListener("pointerup", done);
    handle.removeEventListener("pointercancel", done);
  };
  handle.addEventListener("pointermove", follow);
  handle.addEventListener("pointerup", done);
  handle.addEventListener("pointercancel", done);
}

// To the nearest step of a control, within its bounds.
export function snap(store, name, value) {
  const c = store.about.controls.find((control) => control.name === name);
  const stepped = c.low + Math.round((value - c.low) / c.step) * c.step;
  return +Math.min(c.high, Math.max(c.low, stepped)).toFixed(6);
}

export const nudge = (store, name, by) => {
  const c = store.about.controls.find((control) => control.name === name);
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
