// Figure 1: a response grows token by token, in one turn or two; it gets a reward, and each token an advantage.
import { html } from "../../shared.js";
import { Number, Shell } from "../../figures.js";

const PACE = 900;
let playing = null;

const last = (store) => store.look.drawing.length;
const go = (store, step) => store.set({ step: Math.max(0, Math.min(last(store), step)) });

function stop(store) {
  clearInterval(playing);
  playing = null;
  store.changed();
}

export function space(store) {
  if (playing) return stop(store);
  if (store.state.step >= last(store)) go(store, 0);
  playing = setInterval(() => {
    go(store, store.state.step + 1);
    if (store.state.step >= last(store)) stop(store);
  }, PACE);
  store.changed();
}

export function arrow(store, dx) {
  if (!dx) return false;
  if (playing) stop(store);
  go(store, store.state.step + dx);
}

export function reset(store) {
  if (playing) stop(store);
  store.set({ ...store.start }, true);
}

// A token that the policy wrote: below it its log-prob, the reward of its turn, and its advantage.
function Drawn({ store, token, event, action }) {
  const { drawing } = store.look;
  const step = Math.min(store.look.state.step, drawing.length);
  const there = event < step;
  const over = drawing.advantages !== null;
  const advantage = over ? drawing.advantages[action] : 0;
  const largest = over ? Math.max(1, ...drawing.advantages.map(Math.abs)) : 1;
  return html`<div class="slot">
    <span class=${`token ${there ? "there" : "empty"} ${event === step - 1 ? "newest" : ""}`}>${there ? token : "·"}</span>
    <span class="logp">${there ? store.text(`l${action}`) : ""}</span>
    ${drawing.turns ? html`<span class="paid">${action < drawing.answered ? `r ${store.text(`r${action}`)}` : ""}</span>` : ""}
    <span class=${`advantage ${over ? (advantage > 0 ? "up" : advantage < 0 ? "down" : "none") : "none"}`} data-height=${over ? Math.round((Math.abs(advantage) / largest) * 10) : 0}>
      ${over ? html`<i></i><b>${store.text(`c${action}`)}</b>` : ""}
    </span>
  </div>`;
}

function State({ store }) {
  const { drawing } = store.look;
  const step = Math.min(store.look.state.step, drawing.length);
  return html`<div class="sequence" role="group" aria-label="The state: prompt and tokens so far">
    <div class="block"><div class="caption">prompt</div><div class="tokens">${drawing.prompt.map((n) => html`<span class="token prompt">${n}</span>`)}</div></div>
    ${drawing.blocks.map((block) => html`<div class=${`block ${block.drawn ? "" : "observed"}`}><div class="caption">${block.caption}</div><div class="tokens">
      ${block.tokens.map(([event, token], i) => (block.drawn
        ? html`<${Drawn} store=${store} token=${token} event=${event} action=${block.action + i} />`
        : html`<span class=${`token ${event < step ? "seen" : "empty"}`}>${event < step ? token : "·"}</span>`))}
    </div>${block.drawn ? "" : html`<div class="caption">observed: no log-prob, no advantage</div>`}</div>`)}
  </div>`;
}

function Bars({ store }) {
  const { next } = store.look.drawing;
  if (!next) return null;
  return html`<div class="bars" role="img" aria-label=${`${next.caption}: ${next.ways.map((w) => `${w.label}: ${w.p.toFixed(2)}`).join(", ")}`}>
    <div class="caption">${next.caption}</div>
    ${next.ways.map((w) => html`<div class=${`bar ${w.label.length > 1 ? "wide" : ""}`}>
      <span class="token small">${w.label}</span>
      <svg width="100%" height="18" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100%" height="18" rx="4" /><rect class="fill" width=${`${(w.p * 100).toFixed(1)}%`} height="18" rx="4" /></svg>
      <span class="value">${w.p.toFixed(2)}</span>
    </div>`)}
  </div>`;
}

function Ending({ store }) {
  const { drawing } = store.look;
  if (drawing.advantages === null) return null;
  return html`<div class="ending">
    <div class="caption">the group that it is compared with: mean reward ${store.text("mean")}${drawing.values ? `; V before the first token ${store.text("value0")}` : ""}</div>
    <ol class="group">${drawing.group.map((g, i) => html`<li class=${i === 0 ? "this" : ""}><span>${g.text}</span><b>${g.reward}</b>${i === 0 ? html`<em>this one</em>` : ""}</li>`)}</ol>
  </div>`;
}

export function Figure({ store }) {
  const s = (key) => store.text(key);
  const { step } = store.state;
  const transport = html`<div class="transport" role="group" aria-label="Playing">
    <button type="button" id="back" disabled=${step === 0} onClick=${() => arrow(store, -1)}>Back</button>
    <button type="button" id="play" class="main" onClick=${() => space(store)}>${playing ? "Pause" : "Play"}</button>
    <button type="button" id="step" disabled=${step >= last(store)} onClick=${() => arrow(store, 1)}>Step</button>
    <button type="button" id="reset" onClick=${() => reset(store)}>Reset</button>
  </div>`;
  return html`<${Shell} store=${store}>
    <div class="numbers">
      <${Number} label="log π of the last token" value=${s("logp")} note=${s("where")} kind="a" />
      <${Number} label="running sum = log π(response)" value=${s("sum")} kind="a" />
      <${Number} label="reward" value=${s("reward").split(":")[0]} note=${s("verdict") || store.look.drawing.promise} kind="b" />
    </div>
    <${State} store=${store} />
    <div class="lower"><${Bars} store=${store} /><${Ending} store=${store} /></div>
    ${transport}
  <//>`;
}
