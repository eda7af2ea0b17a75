// Figure 5: two trainings side by side, started, paused and stepped from here, followed as they are written.
import { html, post } from "../../shared.js";
import { Chart, Cursor, DASHES } from "../../chart.js";
import { lineOf } from "../../curves.js";
import { Follower } from "./follower.js";
import { Control, controlOf, Number, Shell } from "../../figures.js";

const SIDES = ["a", "b"];
const cursor = new Cursor();
export const runs = { a: null, b: null };
let lossReach = 0.5;
let seen = {};

const live = () => SIDES.filter((side) => runs[side] && !runs[side].ended);
const moving = () => live().filter((side) => !runs[side].status.paused && !runs[side].status.pausing);

function settings(store, side) {
  return JSON.stringify([store.state.world, ...Object.entries(store.state).filter(([k]) => k.startsWith(`${side}.`) && k !== `${side}.run`)]);
}

function follow(store, side, name) {
  runs[side]?.close();
  runs[side] = name ? new Follower(name, () => heard(store, side)) : null;
  seen[side] = settings(store, side);
  for (const key of Object.keys(store.live)) if (key.startsWith(`${side}.`)) delete store.live[key];
}

function heard(store, side) {
  const texts = runs[side]?.texts.at(-1) ?? {};
  for (const [key, text] of Object.entries(texts)) store.live[`${side}.${key}`] = text;
  while (Math.abs(runs[side]?.points.at(-1)?.loss ?? 0) > lossReach) lossReach *= 2;
  store.changed();
}

// The runs of the address, and settings that were changed since: their run is put away.
function agree(store) {
  for (const side of SIDES) {
    if (runs[side] && seen[side] !== settings(store, side)) {
      if (!runs[side].ended) post(`/api/trainings/${runs[side].name}/stop`).catch(() => {});
      follow(store, side, null);
      if (store.state[`${side}.run`]) store.set({ [`${side}.run`]: "" });
    }
  }
}

export function begin(store) {
  for (const side of SIDES) if (store.look.drawing.sides[side].run) follow(store, side, store.state[`${side}.run`]);
  store.listeners.unshift(() => agree(store));
}

async function attempt(store, work) {
  try {
    store.error = "";
    await work();
  } catch (error) {
    store.error = error.message;
  }
  store.changed();
}

const start = (store, steps) =>
  attempt(store, async () => {
    const missing = SIDES.filter((side) => !runs[side]);
    const names = await post("/api/trainings", { state: store.query(), sides: missing.length ? missing : SIDES, steps });
    for (const [side, name] of Object.entries(names)) follow(store, side, name);
    store.set(Object.fromEntries(Object.entries(names).map(([side, name]) => [`${side}.run`, name])));
  });

const command = (store, what) =>
  attempt(store, () =>
    Promise.all(live().map(async (side) => (runs[side].status = await post(`/api/trainings/${runs[side].name}/${what}`)))),
  );

const fresh = () => SIDES.some((side) => !runs[side]) || !live().length;

export function space(store) {
  if (moving().length) command(store, "pause");
  else if (fresh()) start(store, 1e9);
  else command(store, "play");
}

export function arrow(store, dx) {
  if (dx !== 1) return false;
  if (fresh() && !live().length) start(store, 1);
  else command(store, "step");
}

export function reset(store) {
  const had = SIDES.some((side) => runs[side]);
  command(store, "stop");
  for (const side of SIDES) follow(store, side, null);
  lossReach = 0.5;
  if (had) store.set({ "a.run": "", "b.run": "" });
  else store.set({ ...store.start }, true);
}

// A line for each side and metric: A and B have a colour and a dash of their own.
function Curves({ store, name, keys, ...more }) {
  const lines = SIDES.flatMap((side, i) => {
    const points = runs[side]?.points ?? [];
    const metrics = Object.fromEntries(keys.map(([key]) => [key, { mean: points.map((p) => p[key]) }]));
    const run = { x: points.map((p) => p.step), metrics, bucket: 1 };
    return keys.map(([key, text], k) => ({ ...lineOf(run, key, `${side.toUpperCase()} ${text}`.trim(), i), dash: DASHES[i + 2 * k] }));
  });
  const range = [0, store.look.drawing.steps];
  return html`<${Chart} name=${name} lines=${lines} range=${range} whole=${range} cursor=${cursor} ...${more} />`;
}

const MARKS = { right: ["✓", "right"], rewarded: ["△", "at least half the reward, but wrong"], wrong: ["·", "wrong"] };

function Responses({ side }) {
  const found = runs[side]?.responses;
  return html`<div class=${`responses ${side}`}>
    <h3>${side.toUpperCase()} <span>${found ? `responses of step ${found.step}` : "no responses yet"}</span></h3>
    ${found?.prompts.map((row) => html`<div class="row">
      <div class="prompt"><b>${row.prompt}</b> <span>mostly ${row.common}</span></div>
      <div class="cells" role="list">${row.responses.map((r) => html`<span role="listitem" class=${`cell ${r.mark}`} title=${`${r.text}: reward ${r.reward}, ${MARKS[r.mark][1]}`} aria-label=${`${r.text}, reward ${r.reward}, ${MARKS[r.mark][1]}`}>${MARKS[r.mark][0]}</span>`)}</div>
    </div>`)}
  </div>`;
}

function Status({ store, side }) {
  const run = runs[side];
  const error = store.look.drawing.sides[side].error;
  return html`<div class=${`status ${side}`} data-side=${side} data-status=${run?.status.status ?? "none"}>
    <b>${side.toUpperCase()}</b> <span role="status">${error ?? run?.status.words ?? "not started"}</span>
    ${run?.status.last_lines?.length > 0 && html`<pre class="last" tabindex="0">${run.status.last_lines.join("\n")}</pre>`}
  </div>`;
}

function Settings({ store }) {
  const names = store.about.controls.filter((c) => c.name.startsWith("a.") && c.kind !== "name").map((c) => c.name.slice(2));
  const control = (name) => html`<${Control} key=${name} control=${controlOf(store, name)} store=${store} />`;
  return html`<fieldset class="sides" disabled=${live().length > 0}>
    <legend>Settings${live().length > 0 ? " (reset to change them)" : ""}</legend>
    ${control("world")}
    ${SIDES.map((side) => html`<div class=${`side ${side}`} role="group" aria-label=${`Settings of ${side.toUpperCase()}`}>
      <h3>${side.toUpperCase()}</h3>
      ${names.map((name) => control(`${side}.${name}`))}
    </div>`)}
  </fieldset>`;
}

function curves(tables) {
  const rows = SIDES.flatMap((side) => (runs[side]?.texts ?? []).filter((t, i, all) => i === all.length - 1 || t.step % 10 === 0)
    .map((t) => [side.toUpperCase(), t.step, t.earned, t.right, t.spread, t.silent, t.clipped, t.lost]));
  const head = ["run", "step", "reward", "exactly right", "entropy", "groups without signal", "clipped", "loss"];
  return [...tables, { caption: "The curves, every tenth step", head, rows }];
}

export function Figure({ store }) {
  const s = (key) => store.text(key) || "–";
  const transport = html`<div class="transport" role="group" aria-label="Training">
    <button type="button" id="play" class="main" onClick=${() => space(store)}>${moving().length ? "Pause" : live().length && !fresh() ? "Continue" : "Train"}</button>
    <button type="button" id="step" disabled=${moving().length > 0} onClick=${() => arrow(store, 1)}>Step</button>
    <button type="button" id="reset" onClick=${() => reset(store)}>Reset</button>
    ${SIDES.map((side) => html`<${Status} store=${store} side=${side} />`)}
  </div>`;
  const look = { ...store.look, tables: curves(store.look.tables) };
  return html`<${Shell} store=${Object.assign(Object.create(store), { look })} controls=${false}>
    <div class="numbers">
      ${SIDES.map((side) => html`<${Number} label=${`${side.toUpperCase()}: reward`} value=${s(`${side}.earned`)} kind=${side} /><${Number} label=${`${side.toUpperCase()}: exactly right`} value=${s(`${side}.right`)} kind=${side} />`)}
    </div>
    ${transport}
    <p class="difference" id="difference">${s("difference")}</p>
    <div class="charts two-runs">
      <${Curves} store=${store} name="reward" title="Reward and what is exactly right" unit="as shares of the most there is" share height=${210} y=${[0, 1]} keys=${[["reward", "reward"], ["accuracy", "right"]]} />
      <${Curves} store=${store} name="entropy" title="Entropy" unit="nats per token" height=${128} y=${[0, 2]} keys=${[["entropy", ""]]} />
      <${Curves} store=${store} name="silent" title="Groups without signal" unit="all rewards equal" share height=${128} y=${[0, 1]} keys=${[["silent", ""]]} />
      <${Curves} store=${store} name="clip" title="Clipped tokens" share height=${128} y=${[0, 1]} keys=${[["clip", ""]]} />
      <${Curves} store=${store} name="loss" title="Loss" unit="last: it does not measure progress" height=${128} y=${[-lossReach, lossReach]} keys=${[["loss", ""]]} />
    </div>
    <ul class="legend">${Object.values(MARKS).map(([mark, text]) => html`<li><b>${mark}</b> ${text}</li>`)}</ul>
    <div class="both">${SIDES.map((side) => html`<${Responses} side=${side} />`)}</div>
    <${Settings} store=${store} />
  <//>`;
}
