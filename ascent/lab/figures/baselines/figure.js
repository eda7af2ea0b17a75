// Figure 3: two states, a baseline to drag in each, the push of every action and the mean that stays.
import { html } from "../../shared.js";
import { Arrow, Axes, drag, frame, nudge, Number, Shell, snap } from "../../figures.js";

export const arrow = (store, dx, dy) => nudge(store, dx ? "b1" : "b2", dx || dy);

const PRESETS = [["none", "None"], ["value", "Value"], ["optimal", "Optimal"], ["far", "Far"]];
const near = (a, b) => Math.abs(a - b) < 0.26;

function Rewards({ store, index }) {
  const state = store.look.drawing.states[index];
  const name = `b${index + 1}`;
  const f = frame({ width: store.width, height: 100, x: [-10, 20], y: [0, 1], top: 30, bottom: 42, left: 20, right: 20 });
  const b = store.state[name];
  const y = f.height - f.bottom - 8;
  return html`<svg class="chart" role="img" width=${f.width} height=${f.height}
      aria-label=${`State ${index + 1}: rewards ${state.rewards.join(" and ")}, baseline ${store.text(name)}.`}>
    <${Axes} f=${f} xticks=${[-10, -5, 0, 5, 10, 15, 20]} drop=${32} />
    ${state.rewards.map((r, a) => html`<g>
      <line class=${`span ${r >= b ? "up" : "down"}`} x1=${f.sx(b)} x2=${f.sx(r)} y1=${y - a * 9} y2=${y - a * 9} />
      <circle class="reward" cx=${f.sx(r)} cy=${y - a * 9} r="5" />
      <text class="direct" x=${f.sx(r)} y=${f.top - 4} text-anchor=${(a === 0) === (index === 0) ? "start" : "end"} dx=${(a === 0) === (index === 0) ? -3 : 3}>R${a + 1} = ${r}</text>
    </g>`)}
    <g class="handle" onPointerDown=${(e) => drag(e, f, (x) => store.set({ [name]: snap(store, name, x) }))}>
      <line class="base" x1=${f.sx(b)} x2=${f.sx(b)} y1=${f.top} y2=${f.height - f.bottom} />
      <rect class="grip" data-handle=${name} x=${f.sx(b) - 13} y=${f.top - 4} width="26" height=${f.height - f.top - f.bottom + 26} />
      <path class="knob base" d=${`M${f.sx(b) - 7} ${f.height - f.bottom + 12}h14v-8l-7 -8l-7 8z`} />
    </g>
  </svg>`;
}

function Pushes({ store, index }) {
  const state = store.look.drawing.states[index];
  const rows = [
    ...state.arrows.map((value, a) => ({ value, kind: "a", label: `draw a${a + 1}` })),
    { value: state.expected, kind: "b", label: "on average" },
  ];
  const f = frame({ width: store.width, height: 124, x: [-12, 12], y: [0, 1], top: 8, bottom: 36, left: 92, right: 62 });
  const label = rows.map((r) => `${r.label} ${r.value.toFixed(2)}`).join(", ");
  return html`<svg class="chart pushes" role="img" width=${f.width} height=${f.height} aria-label=${`Pushes in state ${index + 1}: ${label}.`}>
    <${Axes} f=${f} xticks=${[-10, -5, 0, 5, 10]} />
    <line class="zero" x1=${f.sx(0)} x2=${f.sx(0)} y1=${f.top} y2=${f.height - f.bottom} />
    <line class="average" x1=${f.sx(state.expected)} x2=${f.sx(state.expected)} y1=${f.top} y2=${f.height - f.bottom} />
    ${rows.map((row, i) => {
      const y = f.top + 14 + i * 27;
      const shown = Math.max(f.x[0], Math.min(f.x[1], row.value));
      return html`<g>
        <text class=${`direct ${row.kind === "b" ? "second strong" : ""}`} x="0" y=${y} dy="0.35em">${row.label}</text>
        <${Arrow} x1=${f.sx(0)} x2=${f.sx(shown)} y=${y} kind=${row.kind} />
        <text class=${`direct value ${row.kind === "b" ? "second strong" : ""}`} x=${f.width} y=${y} dy="0.35em" text-anchor="end">${store.text(`push${index + 1}${i}`)}</text>
      </g>`;
    })}
    <text class="axis-label" x=${f.width - f.right} y=${f.height - 3} text-anchor="end">push on the log-odds of a1</text>
  </svg>`;
}

export function Figure({ store }) {
  const s = (key) => store.text(key);
  const { presets, stds } = store.look.drawing;
  const set = (name) => store.set({ b1: snap(store, "b1", presets[name][0]), b2: snap(store, "b2", presets[name][1]) });
  const here = (name) => near(store.state.b1, presets[name][0]) && near(store.state.b2, presets[name][1]);
  return html`<${Shell} store=${store}>
    <div class="numbers">
      <${Number} label="std of the weights R − b" value=${s("std")} note=${`none ${s("std_none")} · value ${s("std_value")}`} kind="a" />
      <${Number} label="variance of the push" value=${s("variance")} note=${`none ${s("variance_none")} · far ${s("variance_far")}`} kind="a" />
      <${Number} label="expected pushes" value=${`${s("expected1")}, ${s("expected2")}`} note="whatever the baselines are" kind="b" />
    </div>
    <div class="presets" role="group" aria-label="Baselines">
      ${PRESETS.map(([name, text]) => html`<button type="button" data-preset=${name} aria-pressed=${here(name)} onClick=${() => set(name)}>${text} <span>${stds[name]}</span></button>`)}
    </div>
    ${[0, 1].map((index) => html`<section class="state" aria-label=${`State ${index + 1}`}>
      <h3>State ${index + 1} <span>baseline ${s(`b${index + 1}`)}</span></h3>
      <${Rewards} store=${store} index=${index} />
      <${Pushes} store=${store} index=${index} />
    </section>`)}
  <//>`;
}
