// The state of a figure: kept in the address, sent to the library, and what the library says of it.
import { get } from "/static/shared.js";

export class Store {
  constructor(given) {
    this.about = given.about;
    this.look = given.look;
    this.start = given.start;
    this.error = given.error;
    this.state = { ...given.look.state };
    this.live = {}; // texts that come from a run, by the name that a lesson binds to
    this.width = 640;
    this.listeners = [];
    this.busy = false;
    this.asked = 0; // how many states have been asked for, and answered: a test waits until they agree
    this.answered = 0;
  }

  defaults() {
    return Object.fromEntries(this.about.controls.map((c) => [c.name, c.default]));
  }

  query(state = this.state) {
    const changed = this.about.controls.filter((c) => state[c.name] !== c.default);
    return new URLSearchParams(changed.map((c) => [c.name, state[c.name]])).toString();
  }

  address() {
    const names = this.about.controls.map((c) => c.name);
    if (names.every((name) => this.state[name] === this.start[name])) return location.pathname;
    const first = this.about.controls[0];
    return `${location.pathname}?${this.query() || new URLSearchParams({ [first.name]: first.default })}`;
  }

  set(changes, fresh = false) {
    this.state = { ...(fresh ? this.defaults() : this.state), ...changes };
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
