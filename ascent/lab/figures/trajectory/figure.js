// Figure 1: a response grows token by token; the reward comes at the end, and credit is spread backwards.
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

function State({ store }) {
  const { drawing } = store.look;
  const step = Math.min(store.look.state.step, drawing.length);
  const over = drawing.credit !== null;
  const largest = over ? Math.max(1, ...drawing.credit.map(Math.abs)) : 1;
  return html`<div class="sequence" role="group" aria-label="The state: prompt and tokens so far">
    <div class="block"><div class="caption">prompt</div><div class="tokens">${drawing.prompt.map((n) => html`<span class="token prompt">${n}</span>`)}</div></div>
    <div class="block"><div class="caption">response</div><div class="tokens">
      ${drawing.tokens.map((n, t) => {
        const there = t < step;
        const credit = over ? drawing.credit[t] : 0;
        return html`<div class="slot">
          <span class=${`token ${there ? "there" : "empty"} ${t === step - 1 ? "newest" : ""}`}>${there ? n : "·"}</span>
          <span class="logp">${there ? store.text(`l${t}`) : ""}</span>
          <span class=${`credit ${over ? (credit > 0 ? "up" : credit < 0 ? "down" : "none") : "none"}`} data-height=${over ? Math.round((Math.abs(credit) / largest) * 10) : 0}>
            ${over ? html`<i></i><b>${store.text(`c${t}`)}</b>` : ""}
          </span>
        </div>`;
      })}
    </div></div>
  </div>`;
}

function Bars({ store }) {
  const { drawing } = store.look;
  const step = Math.min(store.look.state.step, drawing.length);
  if (step >= drawing.length) return null;
  const chances = drawing.chances[step];
  return html`<div class="bars" role="img" aria-label=${`Probabilities of the next number: ${chances.map((p, n) => `${n}: ${p.toFixed(2)}`).join(", ")}`}>
    <div class="caption">π(next number | state)</div>
    ${chances.map((p, n) => html`<div class="bar">
      <span class="token small">${n}</span>
      <svg width="100%" height="18" preserveAspectRatio="none" aria-hidden="true"><rect class="track" width="100%" height="18" rx="4" /><rect class="fill" width=${`${(p * 100).toFixed(1)}%`} height="18" rx="4" /></svg>
      <span class="value">${p.toFixed(2)}</span>
    </div>`)}
  </div>`;
}

function Ending({ store }) {
  const { drawing } = store.look;
  if (drawing.credit === null) return null;
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
      <${Number} label="log π of the last token" value=${s("logp")} note=${`token ${s("step")} of ${s("tokens")}`} kind="a" />
      <${Number} label="running sum = log π(response)" value=${s("sum")} kind="a" />
      <${Number} label="reward" value=${s("reward").split(":")[0]} note=${s("verdict") || "it comes at the end"} kind="b" />
    </div>
    <${State} store=${store} />
    <div class="lower"><${Bars} store=${store} /><${Ending} store=${store} /></div>
    ${transport}
  <//>`;
}
