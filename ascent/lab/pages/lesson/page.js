// A lesson: the figure beside it, the numbers in the text that follow the figure, and the keys and links that set it.
import { forPage } from "../../app.js";
import { get, html, inLab, ready, render } from "../../shared.js";

// The state of a figure: kept in the address, sent to the library, and what the library says of it.
class Store {
  live = {}; // texts that come from a run, by the name that a lesson binds to
  width = 640;
  listeners = [];
  asked = 0; // how many states have been asked for, and answered: a test waits until they agree
  answered = 0;

  // What the page was given: about, look, start, error.
  constructor(given) {
    Object.assign(this, given);
    this.state = { ...given.look.state };
  }

  query() {
    const changed = this.about.controls.filter((c) => this.state[c.name] !== c.default);
    return new URLSearchParams(changed.map((c) => [c.name, this.state[c.name]])).toString();
  }

  address() {
    const names = this.about.controls.map((c) => c.name);
    if (names.every((name) => this.state[name] === this.start[name])) return location.pathname;
    const first = this.about.controls[0];
    return `${location.pathname}?${this.query() || new URLSearchParams({ [first.name]: first.default })}`;
  }

  set(changes, fresh = false) {
    const defaults = Object.fromEntries(this.about.controls.map((c) => [c.name, c.default]));
    this.state = { ...(fresh ? defaults : this.state), ...changes };
    this.error = "";
    this.asked += 1;
    this.changed();
    clearTimeout(this.writing);
    this.writing = setTimeout(() => history.replaceState(null, "", this.address()), 150);
    this.fetch();
  }

  // One request at a time; what changed meanwhile is asked for when it is back.
  async fetch() {
    if (this.busy) return;
    this.busy = true;
    let asked;
    do {
      asked = this.asked;
      try {
        this.look = await get(`/api/figure/${this.about.name}?${this.query()}`);
      } catch (error) {
        this.error = error.message;
      }
      this.answered = asked;
      this.changed();
    } while (asked !== this.asked);
    this.busy = false;
  }

  text(key) {
    return this.live[key] ?? this.look.texts[key] ?? "";
  }

  changed() {
    for (const listener of this.listeners) listener();
  }
}

function onKey(event, store, figure, place) {
  if (!forPage(event)) return;
  const act = {
    " ": () => event.target.closest("button, a, summary") || figure.space?.(store),
    ArrowLeft: () => figure.arrow?.(store, -1, 0),
    ArrowRight: () => figure.arrow?.(store, 1, 0),
    ArrowUp: () => place.contains(event.target) && figure.arrow?.(store, 0, 1),
    ArrowDown: () => place.contains(event.target) && figure.arrow?.(store, 0, -1),
    r: () => (figure.reset ? figure.reset(store) : store.set({ ...store.start }, true)),
  }[event.key];
  if (!act) return;
  const done = act();
  if (done !== false && !(done instanceof Element)) event.preventDefault();
}

function bind(store) {
  for (const output of document.querySelectorAll("[data-bind]")) {
    const text = store.text(output.dataset.bind);
    if (output.textContent !== text) output.textContent = text;
  }
}

function onLink(event, store, place) {
  const link = event.target.closest("a.set");
  if (!link) return;
  event.preventDefault();
  const kinds = Object.fromEntries(store.about.controls.map((c) => [c.name, c.kind]));
  const pairs = [...new URLSearchParams(link.dataset.set)];
  const changes = Object.fromEntries(pairs.map(([k, v]) => [k, kinds[k] === "slider" ? +v : v]));
  store.set(changes, link.dataset.fresh === "true");
  if (place.getBoundingClientRect().top > innerHeight * 0.6) place.scrollIntoView({ behavior: "smooth" });
}

async function show(place) {
  const store = new Store(JSON.parse(place.dataset.given));
  window.lab = store;
  const figure = await import(inLab(store.about.script));
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
  addEventListener("keydown", (event) => onKey(event, store, figure, place));
  addEventListener("click", (event) => onLink(event, store, place));
  figure.begin?.(store);
  draw();
  ready();
}

const place = document.getElementById("figure");
if (place) show(place);
