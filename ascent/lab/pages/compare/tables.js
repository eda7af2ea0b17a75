// The tables of a comparison: how the runs ended, and which of their settings differ.
import { Swatch } from "../../chart.js";
import { html, num, percent, runLink } from "../../shared.js";

const TITLES = {
  "eval/accuracy": "exactly right, greedy", accuracy: "exactly right, sampled", "eval/pairs/accuracy": "held-out pairs right", "eval/logp": "held-out log-prob",
  "exact/reward": "E[R]", "eval/reward": "reward, greedy", reward: "sampled reward", entropy: "entropy", kl: "KL", "completions/mean_length": "tokens a response",
  frac_reward_zero_std: "groups without signal", steps: "steps", responses: "responses", tokens: "tokens", seconds: "seconds",
};
const SHARES = ["eval/accuracy", "accuracy", "eval/pairs/accuracy", "frac_reward_zero_std"];

const grouped = (text) => text.replace(/^(-?\d+)/, (whole) => whole.replace(/\B(?=(\d{3})+$)/g, "\u2009"));

// 12.3 ± 0.4: no more digits than the half-width makes sense of.
function said(measure, mean, half, sign = false) {
  const share = SHARES.includes(measure);
  const whole = share ? 100 : 1;
  const plain = (value) => (share ? percent(value) : num(value));
  const size = (half ?? 0) * whole;
  const digits = size > 0 ? Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(size)))) : null;
  const fixed = (value) => (digits == null || size < 1e-5 || Math.abs(value * whole) >= 1e6 ? plain(value) : `${grouped((value * whole).toFixed(digits))}${share ? "%" : ""}`.replace("-", "−"));
  const text = `${sign && mean > 0 ? "+" : ""}${fixed(mean)}`;
  return size > 0 ? html`${text} <span class="half">± ${fixed(half)}</span>` : text;
}

export const Ends = ({ found, ends, href, marked, onBase }) => {
  const { measures, rows, notes, cautions, base } = ends;
  if (!measures.length) return null;
  const several = found.groups.length > 1;
  const chosen = found.groups.find((group) => group.name === base) ?? found.groups[0];
  return html`<section class="ends">
    ${cautions.length > 0 && html`<div class="cautions" role="note"><b>Before you subtract</b><ul>${cautions.map((text) => html`<li key=${text}>${text}</li>`)}</ul></div>`}
    <h2>How they ended <a class="file" href=${href} download>as CSV</a></h2>
    ${several && html`<p class="tool-row plain"><label>Differences to <select id="base" value=${chosen.ids[0]} onChange=${(e) => onBase(e.target.value)}>${found.groups.map((g) => html`<option key=${g.name} value=${g.ids[0]} title=${g.name}>${g.short}</option>`)}</select></label></p>`}
    <div class="scroll" role="region" tabindex="0" aria-label="How they ended">
      <table><thead><tr><th scope="col">setting</th>${measures.map((m) => html`<th scope="col" key=${m}>${TITLES[m] ?? m}</th>`)}</tr></thead>
        <tbody>${found.groups.map((group, i) => html`<tr key=${group.name}>
          <th scope="row" title=${group.title}><${Swatch} colour=${i} marked=${marked} /> ${group.short}${group.ids.length > 1 && ` × ${group.ids.length} seeds`}</th>
          ${measures.map((m) => {
            const cell = rows[group.name][m];
            return html`<td key=${m}>${cell ? html`<div>${said(m, cell.mean, cell.half)}</div>` : "–"}${cell?.difference != null && html`<div class="gap" title=${`to ${base}, paired over ${cell.pairs} seeds`}>${said(m, cell.difference, cell.difference_half, true)}</div>`}</td>`;
          })}</tr>`)}</tbody></table>
    </div>
    <p class="note">Last values: means over seeds ± half of the 95 % interval (Student's t).${several && html` Below them, the difference to <b>${base}</b>, paired by seed, where task and reward are the same.`}${notes.map((text) => html` ${text}`)}</p>
  </section>`;
};

// Cells of one group that say the same are one.
function cells(row, groups, order) {
  const found = [];
  for (const group of groups) {
    const values = group.ids.map((id) => row.values[order.get(id)]);
    if (values.every((value) => value === values[0])) found.push({ span: values.length, value: values[0] });
    else values.forEach((value) => found.push({ span: 1, value }));
  }
  return found;
}

export const Differences = ({ found, href }) => {
  const { difference, groups, order: ids } = found;
  if (ids.length < 2) return null;
  if (!difference.length) return html`<section><h2>Settings</h2><p class="note">All settings of these runs are the same, as far as they are known.</p></section>`;
  const order = new Map(ids.map((id, i) => [id, i]));
  return html`<section class="differences">
    <h2>Settings that differ <span>${difference.length}</span> <a class="file" href=${href} download>as CSV</a></h2>
    <div class="scroll" role="region" tabindex="0" aria-label="Settings that differ">
      <table><thead>
        <tr><th scope="col" rowspan="2">setting</th>${groups.map((g) => html`<th scope="colgroup" colspan=${g.ids.length} key=${g.name} title=${g.title}>${g.short}${g.ids.length > 1 && ` × ${g.ids.length} seeds`}</th>`)}</tr>
        <tr>${groups.flatMap((g) => g.ids.map((id) => html`<th scope="col" key=${id}><a href=${runLink(id)} title=${id}>${id.split("/").pop()}</a></th>`))}</tr>
      </thead><tbody>${difference.map((row) => html`<tr key=${row.name}><th scope="row">${row.name}</th>
        ${cells(row, groups, order).map((cell) => html`<td colspan=${cell.span}>${cell.value ?? html`<span class="none" aria-label="no such setting">–</span>`}</td>`)}</tr>`)}</tbody></table>
    </div>
  </section>`;
};
