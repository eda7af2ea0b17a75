// Figure 2: two hundred estimates of one gradient, with the exact one, bias and variance.
import { html } from "../../shared.js";
import { Axes, frame, nudge, Number, Shell } from "../../figures.js";

export const arrow = (store, dx) => (dx ? nudge(store, "samples", dx) : false);
export const space = (store) => store.set({ seed: (store.state.seed + 1) % 100 });

function Cloud({ store }) {
  const { drawing, texts } = store.look;
  const reach = drawing.reach;
  const side = Math.min(store.width, 560);
  const f = frame({ width: store.width, height: Math.round(side * 0.72), x: [-reach, reach], y: [-reach * 0.75, reach * 0.75], top: 22 });
  const ticks = [-1, -0.5, 0, 0.5, 1].map((t) => t * reach);
  const inside = ([x, y]) => Math.abs(x) <= reach && Math.abs(y) <= reach * 0.75;
  const held = ([x, y]) => [Math.max(-reach, Math.min(reach, x)), Math.max(-reach * 0.75, Math.min(reach * 0.75, y))];
  const beyond = drawing.dots.filter((d) => !inside(d)).length;
  const [mx, my] = held(drawing.mean);
  const label = `200 estimates of the gradient. Variance ${texts.variance_measured} measured, ${texts.variance} exact; bias ${texts.bias_measured} measured, ${texts.bias} exact.`;
  return html`<svg class="chart" role="img" aria-label=${label} width=${f.width} height=${f.height}>
    <${Axes} f=${f} xticks=${ticks} yticks=${ticks.filter((t) => Math.abs(t) <= reach * 0.75)} ylabel="orthogonal to it" xlabel="along ∇E[R], its length = 1" />
    ${drawing.dots.map((dot) => {
      const [x, y] = held(dot);
      return inside(dot)
        ? html`<circle class="estimate" cx=${f.sx(x)} cy=${f.sy(y)} r="4" />`
        : html`<path class="estimate beyond" d=${`M${f.sx(x)} ${f.sy(y) - 5}l5 5l-5 5l-5 -5z`} />`;
    })}
    <g class="mark exact"><line x1=${f.sx(0)} y1=${f.sy(0)} x2=${f.sx(1)} y2=${f.sy(0)} /><path d=${`M${f.sx(1)} ${f.sy(0)}l-9 -6v12z`} /></g>
    <g class="mark mean"><path d=${`M${f.sx(mx) - 8} ${f.sy(my)}h16M${f.sx(mx)} ${f.sy(my) - 8}v16`} /></g>
    ${drawing.expected && html`<circle class="mark expected" cx=${f.sx(held(drawing.expected)[0])} cy=${f.sy(held(drawing.expected)[1])} r="9" />`}
    ${beyond > 0 && html`<text class="direct quiet" x=${f.width - f.right} y=${f.top + 12} text-anchor="end">${beyond} beyond the edge (◆)</text>`}
  </svg>`;
}

export function Figure({ store }) {
  const s = (key) => store.text(key);
  return html`<${Shell} store=${store}>
    <div class="numbers">
      <${Number} label="bias, exact" value=${s("bias")} note=${`measured ${s("bias_measured")}, of which noise ${s("noise")}`} kind="b" />
      <${Number} label="variance, exact" value=${s("variance")} note=${`measured ${s("variance_measured")} from 200 dots`} kind="a" />
      <${Number} label="variance without a baseline" value=${s("variance_raw")} note=${`E[R] = ${s("chance")}`} />
    </div>
    <${Cloud} store=${store} />
    <ul class="legend">
      <li><svg width="16" height="16" aria-hidden="true"><circle class="estimate" cx="8" cy="8" r="4" /></svg>one estimate, from ${s("samples")} samples (${s("silent")} of 200 are 0)</li>
      <li><svg width="26" height="16" aria-hidden="true" class="mark exact"><line x1="2" x2="16" y1="8" y2="8" /><path d="M24 8l-9 -6v12z" /></svg>exact gradient</li>
      <li><svg width="20" height="20" aria-hidden="true"><circle class="mark expected" cx="10" cy="10" r="8" /></svg>exact mean of the estimates</li>
      <li><svg width="18" height="18" aria-hidden="true" class="mark mean"><path d="M1 9h16M9 1v16" /></svg>mean of the dots</li>
    </ul>
    ${s("why") && html`<p class="words">${s("why")}</p>`}
    <div class="transport"><button type="button" id="again" class="main" onClick=${() => space(store)}>Draw again</button></div>
  <//>`;
}
