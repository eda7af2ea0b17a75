// The page: theme, keys, the figure beside the lesson, and the numbers in the text that follow it.
import { render } from "./vendor/preact.mjs";
import { html, Store } from "./store.js";

const FIGURES = ["trajectory", "variance", "baselines", "clip", "training"];
const byId = (id) => document.getElementById(id);

// ---- light and dark ----
const dark = matchMedia("(prefers-color-scheme: dark)");
const theme = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");
function applyTheme(name) {
  if (name) document.documentElement.dataset.theme = name;
  const other = theme() === "dark" ? "light" : "dark";
  byId("theme").textContent = theme() === "dark" ? "☀" : "☾";
  byId("theme").setAttribute("aria-label", `Change to ${other}`);
  document.dispatchEvent(new Event("themed"));
}
byId("theme").addEventListener("click", () => {
  const name = theme() === "dark" ? "light" : "dark";
  localStorage.setItem("theme", name);
  applyTheme(name);
});
dark.addEventListener("change", () => applyTheme());
applyTheme(localStorage.getItem("theme"));

// ---- keys ----
const EVERYWHERE = [["?", "these keys"]];
const keys = byId("keys");
function showKeys(store) {
  const rows = [...(store?.about.keys ?? []), ...EVERYWHERE];
  render(
    html`<h2 id="keys-title">Keys</h2>
      <dl>${rows.map(([key, what]) => html`<dt>${key}</dt><dd>${what}</dd>`)}</dl>
      <button type="button" onClick=${() => keys.close()}>Close</button>`,
    keys,
  );
  keys.showModal();
}

function onKey(event, store, figure) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.closest("select, textarea, dialog")) return;
  if (event.target.closest("input") && (event.key.startsWith("Arrow") || event.target.type !== "range")) return; // those are the control's own
  if (event.key === "?") return showKeys(store);
  if (!figure) return;
  const act = {
    " ": () => event.target.closest("button, a, summary") || figure.space?.(store),
    ArrowLeft: () => figure.arrow?.(store, -1, 0),
    ArrowRight: () => figure.arrow?.(store, 1, 0),
    ArrowUp: () => byId("figure").contains(event.target) && figure.arrow?.(store, 0, 1),
    ArrowDown: () => byId("figure").contains(event.target) && figure.arrow?.(store, 0, -1),
    r: () => (figure.reset ? figure.reset(store) : store.set({ ...store.start }, true)),
  }[event.key];
  if (!act) return;
  const done = act();
  if (done !== false && !(done instanceof Element)) event.preventDefault();
}

// ---- the figure, and what the text says of it ----
function bind(store) {
  for (const output of document.querySelectorAll("[data-bind]")) {
    const text = store.said(output.dataset.bind);
    if (output.textContent !== text) output.textContent = text;
  }
}

function onLink(event, store) {
  const link = event.target.closest("a.set");
  if (!link) return;
  event.preventDefault();
  const kinds = Object.fromEntries(store.about.controls.map((c) => [c.name, c.kind]));
  const given = [...new URLSearchParams(link.dataset.set)];
  const changes = Object.fromEntries(given.map(([k, v]) => [k, kinds[k] === "slider" ? +v : v]));
  store.set(changes, link.dataset.fresh === "true");
  const box = byId("figure").getBoundingClientRect();
  if (box.top > innerHeight * 0.6) byId("figure").scrollIntoView({ behavior: "smooth" });
}

async function main() {
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  const place = byId("figure");
  byId("help").addEventListener("click", () => showKeys(window.lab));
  if (!place) {
    addEventListener("keydown", (event) => onKey(event, window.lab)); // a page of the viewer puts its keys there
    return;
  }
  const store = new Store(JSON.parse(place.dataset.given));
  window.lab = store;
  if (!FIGURES.includes(store.about.name)) throw new Error(`no figure ${store.about.name}`);
  const figure = await import(`./figures/${store.about.name}.js`);
  place.replaceChildren();
  place.tabIndex = -1;
  let waiting = false;
  const draw = () => {
    waiting = false;
    render(html`<${figure.Figure} store=${store} />`, place);
    bind(store);
  };
  store.listeners.push(() => {
    if (!waiting) requestAnimationFrame(draw);
    waiting = true;
  });
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width && width !== store.width) {
      store.width = width;
      store.changed();
    }
  }).observe(place);
  addEventListener("keydown", (event) => onKey(event, store, figure));
  addEventListener("click", (event) => onLink(event, store));
  figure.begin?.(store);
  draw();
  document.body.dataset.ready = "true";
}

main();
