// Shared by pages and figures: requests, the state in the address, number formats, badges and links.
// Everything that comes from a run is text: it goes through Preact's text nodes and attributes, never into HTML.
import { Component, h, render } from "./vendor/preact.mjs";
import htm from "./vendor/htm.mjs";

export { Component, render };
export const html = htm.bind(h);

export const GONE = "The lab does not answer. Is `ascent lab` still running?";

// ---- requests ----
// All addresses of the lab have a secret prefix, which this script takes from its own address.
const ROOT = new URL("..", import.meta.url).pathname.slice(0, -1);
export const inLab = (path) => ROOT + path;

// Change some parameters of a query: a list repeats its name; null, undefined and "" remove it.
function changed(query, given) {
  for (const [name, value] of Object.entries(given)) {
    query.delete(name);
    for (const one of [value].flat()) if (one != null && one !== "") query.append(name, one);
  }
  return query;
}

export const queryOf = (given) => changed(new URLSearchParams(), given).toString();

// Return the JSON of a path, or throw an Error with the message of the lab.
async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(inLab(path), options);
  } catch (error) {
    throw error.name === "AbortError" ? error : new Error(GONE);
  }
  const found = await answer.json().catch(() => ({ error: `The lab answered ${answer.status}.` }));
  if (found.error) throw new Error(found.error);
  return found;
}

export function get(path, given = {}, signal) {
  const query = queryOf(given);
  return ask(query ? `${path}?${query}` : path, { signal });
}

export const post = (path, body = {}) =>
  ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

// Calls `work` again and again while the tab is seen: `pause` ms after it is done. It ends when `work` gives false.
export function poll(work, pause) {
  let timer = null;
  let ended = false;
  const again = async () => {
    timer = null;
    if (ended || document.hidden) return;
    if ((await work()) === false) ended = true;
    else if (!ended) timer = setTimeout(again, pause);
  };
  const seen = () => {
    if (!document.hidden && timer == null && !ended) again();
  };
  document.addEventListener("visibilitychange", seen);
  timer = setTimeout(again, pause);
  return () => {
    ended = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", seen);
  };
}

// ---- the state in the address ----
export const asked = (name, otherwise = "") => new URLSearchParams(location.search).get(name) ?? otherwise;
export const askedAll = (name) => new URLSearchParams(location.search).getAll(name);

// Changes some of the address, in place; `push` keeps the former one for the Back button.
export function tell(changes, push = false) {
  const query = changed(new URLSearchParams(location.search), changes);
  const address = query.size ? `${location.pathname}?${query}` : location.pathname;
  if (address !== location.pathname + location.search) history[push ? "pushState" : "replaceState"](null, "", address);
}

const SETTLING = 600; // ms in which captions are filled, and a page that is tall enough still changes its height
const PATIENCE = 20000; // ms for the charts to come, on a busy machine

// Where the reader was on the page, by address and tab: kept when the page is left. What it gives goes back there, once
// the page is drawn, if the reader came by Back or reloaded; a reader who moves by then is left alone.
export function keepScroll() {
  const key = () => `scroll ${location.pathname}${location.search}`;
  const came = performance.getEntriesByType("navigation")[0]?.type;
  history.scrollRestoration = "manual";
  addEventListener("pagehide", () => sessionStorage.setItem(key(), scrollY));
  const kept = came === "back_forward" || came === "reload" ? sessionStorage.getItem(key()) : null;
  return () => {
    let until = kept == null ? 0 : performance.now() + PATIENCE;
    let there = false;
    for (const own of ["wheel", "pointerdown", "keydown"]) addEventListener(own, () => (until = 0), { once: true, passive: true });
    const again = (now) => {
      if (now > until) return;
      scrollTo(0, +kept);
      if (!there && Math.abs(scrollY - kept) < 1) [there, until] = [true, now + SETTLING];
      requestAnimationFrame(again);
    };
    requestAnimationFrame(again);
  };
}

// ---- number formats ----
const minus = (text) => text.replace("-", "−").replace("e+", "e");

// About four digits that matter; thousands get a thin space, tiny and huge ones an exponent.
export function num(value) {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "nan" : value < 0 ? "−inf" : "inf";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-4 || size >= 1e7)) return minus(value.toExponential(2));
  if (Number.isInteger(value) || size >= 1000) return minus(grouped(Math.round(value)));
  return minus(String(+value.toPrecision(4)));
}

export const grouped = (value) => String(value).replace(/\B(?=(\d{3})+$)/g, "\u2009");
export const percent = (value) => (value == null ? "–" : minus(`${+(100 * value).toPrecision(3)}%`));
export const count = (n, one, many = `${one}s`) => `${grouped(n)} ${n === 1 ? one : many}`;

export function ago(then, now = Date.now() / 1000) {
  if (then == null) return "–";
  const s = Math.max(0, now - then);
  if (s < 60) return "just now";
  if (s < 3600) return `${Math.floor(s / 60)} min ago`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ago`;
  return s < 30 * 86400 ? count(Math.floor(s / 86400), "day") + " ago" : date(then).slice(0, 10);
}

// 2026-03-01 14:07, by the clock of who looks.
export function date(then) {
  if (then == null) return "–";
  const d = new Date(then * 1000);
  const two = (n) => String(n).padStart(2, "0");
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())} ${two(d.getHours())}:${two(d.getMinutes())}`;
}

// ---- links ----
export const shortOf = (id) => id.split("/").pop();
export const runLink = (id, more = {}) => inLab(`/run?${queryOf({ id, ...more })}`);
export const completionsLink = (id, step, more = {}) => inLab(`/completions?${queryOf({ id, step, ...more })}`);
export const compareLink = (ids, more = {}) => inLab(`/compare?${queryOf({ id: ids, ...more })}`);

// The two sets of recorded responses; what was sampled needs no word in an address.
export const HELD = "held-out";
export const setOf = (set) => (set === HELD ? HELD : null);

// A switch between the sets, where there are both.
export const Sets = ({ sets, set, greedy, go }) => sets?.[HELD] > 0 && (sets.sampled > 0 || set !== HELD) ? html`<div class="c-sets" role="group" aria-label="Which responses">
  ${[["sampled", "sampled"], [HELD, greedy]].map(([key, text]) => html`<button type="button" key=${key} data-set=${key} aria-pressed=${key === set} onClick=${() => key !== set && go(key)}>${text}</button>`)}</div>` : null;

// Where in some sorted steps the nearest one is, and which it is; null where there are none.
export function indexAt(steps, step) {
  let low = 0;
  let high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

export const nearest = (steps, step) => (steps?.length ? steps[indexAt(steps, step)] : null);

// ---- pieces ----
// Each status has a shape of its own besides its colour and its word.
const SHAPES = { running: "▸", finished: "✓", interrupted: "‖", failed: "✕", died: "✕", unreadable: "?", foreign: "◇" };
export const STATUSES = Object.keys(SHAPES);
export const Badge = ({ status, said }) => html`<span class=${`badge ${STATUSES.includes(status) ? status : "unreadable"}`} title=${said ?? ""}>
  <i aria-hidden="true">${SHAPES[status] ?? "?"}</i>${status}</span>`;

export const Tags = ({ tags, onPick }) => tags?.length
  ? html`<span class="tags">${tags.map((tag) => onPick
      ? html`<button type="button" class="tag" key=${tag} title=${`Only runs tagged ${tag}`} onClick=${() => onPick(tag)}>${tag}</button>`
      : html`<span class="tag" key=${tag}>${tag}</span>`)}</span>`
  : null;

export const Failure = ({ text }) => (text ? html`<p class="error" role="alert">${text}</p>` : null);

// The title of the tab, and that the page has drawn what it was asked (a test waits for it).
export function ready(title) {
  if (title) document.title = `${title} · Ascent lab`;
  document.body.dataset.ready = "true";
}

// What a file holds where a word was expected.
export const words = (value) => (value == null ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));

// Draws a page, and tells what goes wrong while it asks; what the page itself breaks off is nothing wrong.
export function mount(Page) {
  const place = document.getElementById("main");
  place.replaceChildren();
  render(html`<${Page} />`, place);
}

export async function attempt(component, work) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") component.setState({ error: error.message });
  }
}

export const signed = (value) => (typeof value === "number" && value > 0 ? `+${num(value)}` : num(value));

// How much curves are smoothed. It counts in steps, so there is no smoothing over another axis (`off`).
const SMOOTH = [0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000];
export function Smoothing({ smooth, whole, off, onSmooth }) {
  const steps = SMOOTH.filter((s) => s === 0 || s === smooth || s <= (whole[1] - whole[0]) / 2);
  const said = off ? "over steps only" : smooth ? `${num(smooth)} steps` : "none";
  return html`<label class="smooth">Smoothing <input id="smooth" type="range" min="0" max=${steps.length - 1} step="1" disabled=${off} value=${off ? 0 : Math.max(0, steps.indexOf(smooth))} aria-valuetext=${said} onInput=${(e) => onSmooth(steps[+e.target.value])} />
    <output>${said}</output></label>`;
}

// Copies a text. Where the browser does not allow it, what stands beside the button is opened, to be copied by hand.
export async function copy(event, text) {
  const button = event.currentTarget;
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Select it below";
    button.parentElement.querySelector("details").open = true;
  }
  setTimeout(() => (button.textContent = before), 1600);
}
