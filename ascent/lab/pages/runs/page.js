// The page /runs: every run below the folder, sorted, filtered, marked and compared; it refreshes itself.
import { COLUMNS, Row, Sparks } from "./row.js";
import { asked, askedAll, attempt, compareLink, Component, count, Failure, get, html, mount, poll, ready, STATUSES, tell, words } from "../../shared.js";

const PAUSE = 3000; // ms between two looks
const MORE = 100; // rows that are drawn at once, and that come when the end is scrolled to
const MOST = 50; // runs that one comparison takes

const textOf = (row) => [row.id, ...["task", "label", "status", "seed"].flatMap((k) => [words(row[k]), `${k === "label" ? "method" : k}:${words(row[k])}`]), row.note, row.said, ...row.tags, ...row.alerts].join(" ").toLowerCase();

const changed = (set, id, on) => new Set(on ? [...set, id] : [...set].filter((other) => other !== id));

class Runs extends Component {
  known = new Map(); // id: {row, json, text}
  sparks = new Sparks(() => this.setState({}));
  state = {
    rows: null, root: "", error: "", shown: MORE, editing: new Set(), minute: 0,
    picked: new Set(askedAll("pick")), q: asked("q"), status: asked("status"), tag: asked("tag"),
    sort: COLUMNS.some((c) => c.key === asked("sort")) ? asked("sort") : "updated",
    order: ["up", "down"].includes(asked("order")) ? asked("order") : asked("sort") ? "up" : "down",
  };

  async componentDidMount() {
    await this.look();
    ready("Runs");
    this.stop = poll(() => this.look(), PAUSE);
    this.end = new IntersectionObserver(([entry]) => entry.isIntersecting && this.setState((s) => ({ shown: s.shown + MORE })), { rootMargin: "600px" });
    if (this.foot) this.end.observe(this.foot);
  }

  // Rows that say the same stay the same objects, and are not drawn again.
  look() {
    return attempt(this, async () => {
      const { root, runs } = await get("/api/view/runs");
      const known = new Map();
      const rows = runs.map((row) => {
        const json = JSON.stringify(row);
        const before = this.known.get(row.id);
        const entry = before?.json === json ? before : { row, json, text: textOf(row) };
        known.set(row.id, entry);
        return entry.row;
      });
      this.known = known;
      this.sparks.keep(known);
      this.setState({ rows, root, error: "", minute: Math.floor(Date.now() / 60000) });
    });
  }

  // What moves in the document loses its focus (where the browser has no moveBefore): it is given back.
  getSnapshotBeforeUpdate() {
    return document.activeElement;
  }

  componentDidUpdate(_, __, focused) {
    if (focused && focused !== document.activeElement && focused.isConnected && focused.closest("#main")) focused.focus({ preventScroll: true });
    if (this.foot && this.end && this.observed !== this.foot) this.end.observe((this.observed = this.foot));
  }

  set(changes) {
    this.setState({ ...changes, shown: MORE });
    tell(changes);
  }

  sortBy(key) {
    const { sort, order } = this.state;
    const first = COLUMNS.find((c) => c.key === key).down ? "down" : "up";
    this.set({ sort: key, order: sort !== key ? first : order === "up" ? "down" : "up" });
  }

  pick(picked) {
    this.setState({ picked });
    tell({ pick: picked.size <= MOST ? [...picked] : [] });
  }

  edit(id, on) {
    this.setState({ editing: changed(this.state.editing, id, on) });
    if (!on) this.look();
  }

  found() {
    const { rows, q, status, tag, editing, sort, order } = this.state;
    const words = q.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) =>
      (!status || row.status === status) && (!tag || row.tags.includes(tag)) && words.every((word) => this.known.get(row.id).text.includes(word));
    const { of } = COLUMNS.find((c) => c.key === sort);
    const turn = order === "down" ? -1 : 1;
    const compare = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x == null || x === "" || y == null || y === "") return (x == null || x === "") - (y == null || y === "") || (a.id < b.id ? -1 : 1);
      const by = typeof x === "string" || typeof y === "string" ? String(x).localeCompare(String(y), "en", { numeric: true }) : x - y;
      return by * turn || (a.id < b.id ? -1 : 1);
    };
    return rows.filter((row) => fits(row) || editing.has(row.id)).sort(compare);
  }

  filters() {
    const { rows, q, status, tag } = this.state;
    const tally = (values) => values.reduce((n, value) => n.set(value, (n.get(value) ?? 0) + 1), new Map());
    const statuses = tally(rows.map((row) => row.status));
    const tags = [...tally(rows.flatMap((row) => row.tags))].sort((a, b) => b[1] - a[1]).slice(0, 14);
    return html`<div class="filters" role="search">
      <input type="search" id="filter" placeholder="Filter: name, task, method, seed:0, tag, note" aria-label="Filter the runs" value=${q} onInput=${(e) => this.set({ q: e.target.value })} />
      <div class="quick" role="group" aria-label="Only one status">${STATUSES.filter((s) => statuses.has(s)).map((s) => html`<button type="button" key=${s} aria-pressed=${s === status}
        onClick=${() => this.set({ status: s === status ? "" : s })}>${s} <span>${statuses.get(s)}</span></button>`)}</div>
      ${tags.length > 0 && html`<div class="quick" role="group" aria-label="Only one tag">${tags.map(([t, n]) => html`<button type="button" class="tag" key=${t} aria-pressed=${t === tag}
        onClick=${() => this.set({ tag: t === tag ? "" : t })}>${t} <span>${n}</span></button>`)}</div>`}
    </div>`;
  }

  chosen(found) {
    const { picked } = this.state;
    const ids = [...picked].filter((id) => this.known.has(id));
    return html`<div class="chosen">
      <label class="by">Sort by <select value=${this.state.sort} onChange=${(e) => this.sortBy(e.target.value)}>
        ${COLUMNS.map((c) => html`<option value=${c.key} selected=${c.key === this.state.sort}>${c.title || "curve"}</option>`)}</select></label>
      <span class="note" role="status">${found.length === this.state.rows.length ? count(found.length, "run") : `${count(found.length, "run")} of ${this.state.rows.length}`} in ${this.state.root}/</span>
      ${ids.length > 0 && html`<button type="button" class="plain" onClick=${() => this.pick(new Set())}>Clear ${ids.length}</button>`}
      ${ids.length < 1 || ids.length > MOST
        ? html`<button type="button" id="compare" disabled>${ids.length ? `Compare: at most ${MOST}` : "Compare: tick some runs"}</button>`
        : html`<a id="compare" class="button" href=${compareLink(ids)}>Compare ${ids.length}</a>`}
    </div>`;
  }

  head() {
    const { sort, order } = this.state;
    return html`<thead role="rowgroup"><tr role="row"><th role="columnheader" scope="col" class="c-tick"><span class="sr">Compare</span></th>
      ${COLUMNS.map((c) => html`<th role="columnheader" scope="col" key=${c.key} class=${`c-${c.key}`} aria-sort=${c.key === sort ? (order === "up" ? "ascending" : "descending") : "none"}>
        <button type="button" title=${`Sort by ${c.title}`} onClick=${() => this.sortBy(c.key)}>${c.title}<i aria-hidden="true">${c.key === sort ? (order === "up" ? "▲" : "▼") : ""}</i>${c.small && html`<small>${c.small}</small>`}</button></th>`)}</tr></thead>`;
  }

  render(_, { rows, root, error, picked, editing, shown, minute, tag }) {
    if (!rows) return html`<div><h1>Runs</h1><${Failure} text=${error} /></div>`;
    const found = this.found();
    const none = html`<div class="empty"><p>There is no run in <code>${root}/</code> yet. Two lines that make some:</p>
      <pre tabindex="0"><code>ascent train lecture${"\n"}ascent train sort</code></pre><p class="note">They appear here by themselves, from their first step on.</p></div>`;
    return html`<div>
      <div class="lines-of-top"><h1>Runs</h1>${rows.length > 0 && this.chosen(found)}</div>
      <${Failure} text=${error} />
      ${rows.length === 0 ? none : this.filters()}
      ${rows.length > 0 && (found.length === 0
        ? html`<p class="empty">None of the ${rows.length} runs fits. <button type="button" onClick=${() => this.set({ q: "", status: "", tag: "" })}>Clear the filters</button></p>`
        : html`<table class="runs" role="table" aria-label="Runs">${this.head()}<tbody role="rowgroup">
          ${found.slice(0, shown).map((row) => html`<${Row} key=${row.id} row=${row} picked=${picked.has(row.id)} editing=${editing.has(row.id)} minute=${minute} tag=${tag}
            spark=${this.sparks.of(row)} sparks=${this.sparks} onPick=${(on) => this.pick(changed(this.state.picked, row.id, on))} onEdit=${(on) => this.edit(row.id, on)} onTag=${(t) => this.set({ tag: t })} />`)}
        </tbody></table>`)}
      <p class="foot note" ref=${(foot) => (this.foot = foot)}>${found.length > shown ? `${found.length - shown} more below` : ""}</p>
    </div>`;
  }
}

mount(Runs);
