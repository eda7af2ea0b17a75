// The page /compare?id=A&id=B…: curves of several runs one upon another, seeds of a setting as a band, what differs in their
// settings, how they ended, and one prompt side by side. All of its state is in the address.
import { Chart, Cursor, Swatch } from "./chart.js";
import { Differences, Ends } from "./compare_tables.js";
import { SideBySide } from "./compare_prompt.js";
import { asked, askedAll, compareLink, Component, count, Failure, get, html, poll, queryOf, ready, render, runLink, tell } from "./shared.js";

const MOST = 50;
const PAUSE = 5000; // ms between two looks while a run is going on
const FEW = 4; // metrics that are asked for at once, after the first
const AXES = { step: "steps", samples: "samples", tokens: "tokens", seconds: "seconds" };
const BAND = "band: 95 % interval over seeds";
const number = (name) => (/^\d+$/.test(asked(name)) ? +asked(name) : null);
const filled = (values) => Float64Array.from(values, (value) => value ?? NaN);
const NONE = [];
const MANY = 8; // lines beyond which a chart gives them marks instead of dashes
const shortOf = (id) => id.split("/").pop();

// A line of the answer as a chart draws it; on another axis than steps a point is as wide as its distance to the next.
function lineOf(found, axis, label, colour) {
  const x = filled(found.x);
  const apart = x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) : 1;
  const bucket = axis === "step" ? found.bucket : Math.max(apart, 1e-9);
  const low = found.low ? filled(found.low) : null;
  const high = found.low ? filled(found.high) : null;
  return { label, colour, x, y: filled(found.mean), low, high, bucket, odd: found.nonfinite ?? [], gap: Infinity };
}

// What the address says.
const addressed = () => ({
  ids: [...new Set(askedAll("id"))], chosen: askedAll("metric"), x: AXES[asked("x")] ? asked("x") : "step", seeds: asked("seeds") === "lines" ? "lines" : "band",
  from: number("from"), to: number("to"), key: asked("key"), at: number("at"),
});

class Compare extends Component {
  constructor() {
    super();
    this.cursor = new Cursor();
    this.state = { found: null, curves: {}, error: "", adding: false, ...addressed() };
  }

  async componentDidMount() {
    await this.look();
    ready("Compare runs");
    this.stop = poll(() => this.live && this.look(), PAUSE);
    addEventListener("popstate", () => this.setState({ ...addressed(), curves: {} }, () => this.look()));
  }

  get live() {
    return !this.state.error && Object.values(this.state.found?.runs ?? {}).some((run) => run.status === "running");
  }

  // The first chart comes with everything else in one request; the others after it is drawn.
  async look() {
    const { ids, x } = this.state;
    if (!ids.length) return this.setState({ found: null, curves: {}, error: "" });
    const asking = (this.asking = {});
    const began = performance.now();
    try {
      const first = this.state.chosen[0];
      const found = await get("/api/view/compare", { id: ids, metric: first ?? null, x });
      if (this.asking !== asking) return;
      this.setState({ found, curves: { ...this.state.curves, ...this.drawn(found, found.curves) }, error: "" });
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      this.took = performance.now() - began;
      window.lab = { ...window.lab, took: this.took, drawn: performance.now() };
      await Promise.all([this.rest(asking, this.metrics().filter((metric) => !found.curves[metric])), this.ends(asking)]);
    } catch (error) {
      if (this.asking === asking) this.setState({ error: error.message });
    }
  }

  async ends(asking) {
    const ends = await get("/api/view/compare", { id: this.state.ids, part: "ends" });
    if (this.asking === asking) this.setState({ ends });
  }

  async rest(asking, missing) {
    for (let i = 0; i < missing.length; i += FEW) {
      const found = await get("/api/view/compare", { id: this.state.ids, metric: missing.slice(i, i + FEW), x: this.state.x, part: "curves" });
      if (this.asking !== asking) return;
      this.setState((state) => ({ curves: { ...state.curves, ...this.drawn(state.found, found.curves) } }));
    }
    window.lab = { ...window.lab, whole: true };
  }

  // The lines of each metric: a group's mean, or its runs one by one in the group's colour.
  drawn(found, curves) {
    const { seeds, x } = this.state;
    const several = found.groups.some((group) => group.ids.length > 1);
    const made = {};
    for (const [metric, answer] of Object.entries(curves)) {
      const lines = found.groups.flatMap((group, i) => {
        const line = answer.groups[group.name];
        if (!line) return [];
        const own = group.ids.filter((id) => answer.runs[id]);
        if (seeds !== "lines" || !own.length) return [lineOf(line, x, several ? `${group.name}, ${count(line.seeds, "seed")}` : group.name, i)];
        return own.map((id) => lineOf(answer.runs[id], x, `${group.name}: ${shortOf(id)}`, i));
      });
      made[metric] = { answer, lines };
    }
    return made;
  }

  // What is drawn: what the address names, else the first series of every chart.
  metrics() {
    const { chosen, found } = this.state;
    return chosen.length ? chosen : (found?.charts ?? []).map((chart) => chart.series[0].metric);
  }

  set(changes, again = true) {
    const clear = again ? { curves: {} } : {};
    this.setState({ ...changes, ...clear }, () => again && this.look());
    tell({ ...changes, ...("x" in changes ? { from: null, to: null } : {}) });
  }

  setIds(ids) {
    window.lab = { ...window.lab, whole: false };
    this.setState({ ids, curves: {}, adding: false }, () => this.look());
    tell({ id: ids }, true);
  }

  setSeeds(seeds) {
    tell({ seeds: seeds === "lines" ? seeds : null });
    this.setState({ seeds }, () => this.setState(({ curves, found }) => ({ curves: this.drawn(found, Object.fromEntries(Object.entries(curves).map(([m, c]) => [m, c.answer]))) })));
  }

  toggle(metric) {
    const now = this.metrics();
    const order = this.state.found.charts.flatMap((chart) => chart.series.map((s) => s.metric));
    const chosen = order.filter((m) => (m === metric) !== now.includes(m));
    if (!chosen.length) return;
    tell({ metric: chosen });
    this.setState({ chosen }, () => this.rest(this.asking, chosen.filter((m) => !this.state.curves[m])).catch((error) => this.setState({ error: error.message })));
  }

  whole() {
    let [low, high] = [Infinity, -Infinity];
    for (const { lines } of Object.values(this.state.curves)) {
      for (const { x } of lines) {
        if (!x.length) continue;
        low = Math.min(low, x[0]);
        high = Math.max(high, x[x.length - 1]);
      }
    }
    return low > high ? [0, 1] : [this.state.x === "step" ? Math.floor(low) : 0, Math.ceil(high)];
  }

  zoom(from, to) {
    const [first, last] = this.whole();
    const out = from == null || (from <= first && to >= last);
    const next = { from: out ? null : Math.max(first, from), to: out ? null : Math.min(last, to) };
    this.setState(next);
    tell(next);
  }

  get marked() {
    const { found, seeds } = this.state;
    return (seeds === "lines" ? Object.keys(found?.runs ?? {}) : (found?.groups ?? [])).length > MANY;
  }

  // What a file is asked for: the runs and what is seen of them.
  file(kind, more = {}) {
    const { ids, x, seeds } = this.state;
    return `/api/view/compare.${kind}?${queryOf({ id: ids, metric: this.metrics().slice(0, 12), x, seeds, ...more })}`;
  }

  charts() {
    const { curves, found, from, to, x } = this.state;
    const whole = this.whole();
    const range = [from ?? whole[0], to ?? whole[1]];
    const same = this.range?.[0] === range[0] && this.range?.[1] === range[1];
    this.range = same ? this.range : range;
    const alone = found.groups.some((g) => g.ids.length === 1) && (found.groups.some((g) => g.ids.length > 1) ? "one seed: no band" : "one seed each: no band");
    const places = found.charts.flatMap((chart) => chart.series.map((series) => ({ chart, series })));
    return this.metrics().map((metric) => {
      const { chart, series } = places.find((place) => place.series.metric === metric) ?? { chart: { title: metric, unit: "", series: [1] }, series: {} };
      const title = chart.series.length > 1 ? `${chart.title}, ${series.label}` : chart.title;
      return html`<${Chart} key=${metric} name=${metric} title=${title} unit=${x === "step" ? chart.unit : `${chart.unit ? `${chart.unit}, ` : ""}over ${AXES[x]}`} share=${chart.share}
        lines=${curves[metric]?.lines ?? NONE} range=${this.range} whole=${whole} cursor=${this.cursor} band=${BAND} note=${alone}
        onZoom=${(a, b) => this.zoom(a, b)} onOpen=${(step) => x === "step" && this.set({ at: step }, false)} />`;
    });
  }

  render(_, { ids, found, ends, error, x, seeds, adding, key, at }) {
    return html`<div>
      <p class="where"><a href=${`/runs?${queryOf({ pick: ids })}`}>All runs</a></p>
      <h1>Compare runs</h1>
      <${Failure} text=${error} />
      <${Chosen} ids=${ids} found=${found} marked=${this.marked} adding=${adding} onAdd=${() => this.setState({ adding: !adding })} onIds=${(next) => this.setIds(next)} />
      ${!ids.length && html`<p class="note">No run is chosen: add some, or mark them in the <a href="/runs">list of runs</a>.</p>`}
      ${found && ids.length > 0 && html`
        <div class="tool-row" role="toolbar" aria-label="Charts">
          <span class="choice" role="group" aria-label="Seeds">Seeds
            ${[["band", "as a band"], ["lines", "one by one"]].map(([name, words]) => html`<button type="button" aria-pressed=${String(seeds === name)} disabled=${!found.groups.some((g) => g.ids.length > 1)} onClick=${() => this.setSeeds(name)}>${words}</button>`)}</span>
          <label>Over <select id="x" value=${x} onChange=${(e) => this.set({ x: e.target.value, from: null, to: null })}>${found.axes.map((axis) => html`<option value=${axis}>${AXES[axis]}</option>`)}</select></label>
          ${this.state.from != null && html`<button type="button" onClick=${() => this.zoom(null)}>Zoom out</button>`}
          <span class="files">Save <a href=${this.file("png")} download>PNG</a> <a href=${this.file("svg")} download>SVG</a> <a href=${this.file("csv", { table: "curves" })} download>curves as CSV</a></span>
        </div>
        <${Chips} charts=${found.charts} shown=${this.metrics()} onToggle=${(metric) => this.toggle(metric)} />
        <div class="charts">${this.charts()}</div>
        ${found.charts.length === 0 && html`<p class="note">None of these runs has numbers to draw.</p>`}
        ${ends && found.groups.every((g) => ends.rows[g.name]) && html`<${Ends} found=${found} ends=${ends} marked=${this.marked} href=${this.file("csv", { table: "finals" })} />`}
        <${Differences} found=${found} href=${this.file("csv", { table: "settings" })} />
        <${SideBySide} found=${found} marked=${this.marked} chosen=${key} at=${at} onSet=${(changes) => this.set(changes, false)} />`}
    </div>`;
  }
}

// The groups with their runs; each can be taken away, others added.
class Chosen extends Component {
  async componentDidUpdate(before) {
    if (!this.props.adding || before.adding) return;
    try {
      const { runs } = await get("/api/view/runs");
      this.setState({ rows: runs, error: "" });
    } catch (error) {
      this.setState({ error: error.message });
    }
    document.getElementById("add-run")?.focus();
  }

  add(value) {
    const { ids, onIds } = this.props;
    if (this.state.rows.some((row) => row.id === value) && !ids.includes(value)) onIds([...ids, value]);
  }

  render({ ids, found, marked, adding, onAdd, onIds }, { rows, error }) {
    const groups = found ? found.groups.map((g) => ({ ...g, ids: g.ids.filter((id) => ids.includes(id)) })) : [];
    const free = (rows ?? []).filter((row) => !ids.includes(row.id));
    return html`<ul class="chosen" aria-label="Runs">
      ${groups.filter((g) => g.ids.length).map((g, i) => html`<li key=${g.name}>
        <${Swatch} colour=${i} marked=${marked} /><b>${g.title}</b>
        <span class="members">${g.ids.map((id) => html`<span key=${id} class="member"><a href=${runLink(id)} title=${`${id}: ${found.runs[id]?.said}`}>${shortOf(id)}</a><button type="button" class="plain" aria-label=${`Take ${id} away`} onClick=${() => onIds(ids.filter((other) => other !== id))}>×</button></span>`)}</span>
      </li>`)}
      ${ids.length < MOST && html`<li class="adding"><button type="button" aria-expanded=${String(adding)} onClick=${onAdd}>${adding ? "Done" : "Add a run"}</button>
        ${adding && html`<input id="add-run" list="other-runs" placeholder=${rows ? `one of ${count(free.length, "other run")}` : "…"} aria-label="Add a run" onChange=${(e) => this.add(e.target.value)} />
          <datalist id="other-runs">${free.slice(0, 500).map((row) => html`<option key=${row.id} value=${row.id}>${[row.task, row.label, row.status].filter(Boolean).join(", ")}</option>`)}</datalist>`}
        <${Failure} text=${error} /></li>`}
    </ul>`;
  }
}

// Which metrics are drawn: the charts in their order, each with its series.
const Chips = ({ charts, shown, onToggle }) => html`<details class="fold chips">
  <summary>Charts <span>${shown.length} of ${charts.reduce((n, chart) => n + chart.series.length, 0)}</span></summary>
  <div>${charts.map((chart) => html`<span class="choice" role="group" aria-label=${chart.title} key=${chart.key}>
    ${chart.series.length > 1 && html`<span>${chart.title}</span>`}
    ${chart.series.map((s) => html`<button type="button" key=${s.metric} aria-pressed=${String(shown.includes(s.metric))} onClick=${() => onToggle(s.metric)}>${chart.series.length > 1 ? s.label : chart.title}</button>`)}</span>`)}</div>
</details>`;

export { compareLink };
const place = document.getElementById("main");
place.replaceChildren();
render(html`<${Compare} />`, place);
