// Figure 4: the clipped surrogate over the ratio, its gradient below, and the dead zone.
import { html } from "../../shared.js";
import { Axes, drag, frame, nudge, Number, path, Shell, snap } from "../../figures.js";

export const arrow = (store, dx, dy) => nudge(store, dx ? "ratio" : "A", dx || dy);

const XTICKS = [0, 0.5, 1, 1.5, 2];

function Rug({ f, rug }) {
  const y = f.height - 36;
  return html`<g class="rug">
    <line class="level" x1=${f.left} x2=${f.width - f.right} y1=${y} y2=${y} />
    ${rug.ratios.map((ratio, i) => {
      const x = f.sx(Math.min(ratio, f.x[1]));
      const up = rug.good[i];
      return html`<line class=${`${up ? "good" : "bad"} ${rug.clipped[i] ? "off" : ""}`} x1=${x} x2=${x} y1=${y} y2=${y + (up ? -11 : 11)} />`;
    })}
  </g>`;
}

function Zone({ f, zone, label }) {
  if (!zone) return null;
  const [x1, x2] = zone.map((v) => f.sx(v));
  return html`<g class="zone">
    <rect x=${x1} y=${f.top} width=${Math.max(0, x2 - x1)} height=${f.height - f.top - f.bottom} fill="url(#hatch)" />
    ${label && x2 - x1 > 70 && html`<text x=${(x1 + x2) / 2} y=${f.top + 16} text-anchor="middle">gradient 0</text>`}
  </g>`;
}

function Objective({ store }) {
  const { drawing, texts } = store.look;
  const small = store.width < 480;
  const f = frame({ width: store.width, height: small ? 270 : 310, x: [0, 2], y: [-2, 2], top: 22 });
  const { A, low, high } = store.state;
  const [ratio, objective] = drawing.point;
  const end = drawing.ratio.length - 1;
  const bound = (name, v, side) => html`<g class="bound" onPointerDown=${(e) => drag(e, f, (x) => store.set({ [name]: snap(store, name, side * (x - 1)) }))}>
    <line x1=${f.sx(v)} x2=${f.sx(v)} y1=${f.top} y2=${f.height - f.bottom} />
    <rect class="grip" data-handle=${name} x=${f.sx(v) - 10} y=${f.height - f.bottom - 46} width="20" height="46" />
    <path class="knob" d=${`M${f.sx(v) - 6} ${f.height - f.bottom - 30}h12v12l-6 7l-6 -7z`} />
  </g>`;
  const label = `Objective over the ratio. At ratio ${texts.ratio} and advantage ${texts.A} the objective is ${texts.objective}. ${texts.zone}`;
  return html`<svg class="chart" role="img" aria-label=${label} width=${f.width} height=${f.height}>
    <defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line x1="0" x2="0" y1="0" y2="7" class="hatch" /></pattern></defs>
    <${Zone} f=${f} zone=${drawing.zone} label=${true} />
    <${Axes} f=${f} xticks=${XTICKS} yticks=${[-2, -1, 0, 1, 2]} ylabel="objective" xlabel="ratio ρ = π / π_old" />
    ${bound("low", 1 - low, -1)} ${bound("high", 1 + high, 1)}
    <path class="line free" d=${path(f, drawing.ratio, drawing.unclipped)} />
    <path class="line main" d=${path(f, drawing.ratio, drawing.objective)} />
    <text class="direct quiet" x=${f.sx(2) - 4} y=${f.sy(drawing.unclipped[end]) + (A >= 0 ? -8 : 16)} text-anchor="end">unclipped ρ·A</text>
    <g class="handle" onPointerDown=${(e) => drag(e, f, (_, y) => store.set({ A: snap(store, "A", y) }))}>
      <circle class="reach" data-handle="A" cx=${f.sx(1)} cy=${f.sy(A)} r="18" />
      <rect class="knob" x=${f.sx(1) - 6} y=${f.sy(A) - 6} width="12" height="12" rx="2" />
      <text class="direct" x=${f.sx(1)} y=${f.sy(A) + (A >= 0 ? -14 : 24)} text-anchor="middle">A ${texts.A}</text>
    </g>
    <g class="handle" onPointerDown=${(e) => drag(e, f, (x) => store.set({ ratio: snap(store, "ratio", x) }))}>
      <line class="drop" x1=${f.sx(ratio)} x2=${f.sx(ratio)} y1=${f.sy(objective)} y2=${f.height - f.bottom} />
      <circle class="reach" data-handle="ratio" cx=${f.sx(ratio)} cy=${f.sy(objective)} r="20" />
      <circle class="dot" cx=${f.sx(ratio)} cy=${f.sy(objective)} r="7" />
      <text class="direct strong" x=${f.sx(ratio) + (ratio > 1.6 ? -12 : 12)} y=${f.sy(objective) + (A >= 0 ? 22 : -14)} text-anchor=${ratio > 1.6 ? "end" : "start"}>${texts.objective}</text>
    </g>
  </svg>`;
}

function Gradient({ store }) {
  const { drawing, texts } = store.look;
  const f = frame({ width: store.width, height: 200, x: [0, 2], y: [-2, 2], top: 22, bottom: 74 });
  const [ratio, , gradient] = drawing.point;
  const label = `Gradient of the objective by log π, over the ratio: ${texts.gradient} at ratio ${texts.ratio}. Below it the ratios of ${texts.rug_total} tokens, of which ${texts.rug_clipped} are clipped.`;
  return html`<svg class="chart" role="img" aria-label=${label} width=${f.width} height=${f.height}>
    <${Zone} f=${f} zone=${drawing.zone} />
    <${Axes} f=${f} xticks=${XTICKS} yticks=${[-2, 0, 2]} ylabel="gradient by log π" />
    <path class="line second" d=${path(f, drawing.ratio, drawing.gradient)} />
    <circle class="dot second" cx=${f.sx(ratio)} cy=${f.sy(gradient)} r="6" />
    <text class="direct strong second" x=${f.sx(ratio) + (ratio > 1.6 ? -11 : 11)} y=${f.sy(gradient) - 9} text-anchor=${ratio > 1.6 ? "end" : "start"}>${texts.gradient}</text>
    <${Rug} f=${f} rug=${drawing.rug} />
    <text class="axis-label" x=${f.left} y=${f.height - 4}>${texts.rug_total} ratios; up: A > 0, down: A ≤ 0; thick: clipped</text>
  </svg>`;
}

export function Figure({ store }) {
  const s = (key) => store.text(key);
  return html`<${Shell} store=${store}>
    <div class="numbers">
      <${Number} label="objective" value=${s("objective")} note=${`min(${s("unclipped")}, ${s("clipped")})`} kind="a" />
      <${Number} label="gradient by log π" value=${s("gradient")} note="by autograd" kind="b" />
      <${Number} label="clipped in that batch" value=${`${s("rug_clipped")} of ${s("rug_total")}`} note=${s("rug_from")} />
    </div>
    <${Objective} store=${store} />
    <${Gradient} store=${store} />
    <p class="words" id="zone" role="status">${s("zone")}</p>
  <//>`;
}
