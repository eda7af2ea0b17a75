// The page /compare?id=A&id=B…: curves of several runs one upon another, seeds of a setting as a band, what differs in their
// settings, how they ended, and one prompt side by side. All of its state is in the address.
import { Chart, Cursor, MANY } from "../../chart.js";
import { filled } from "../../curves.js";
import { asked, askedAll, attempt, Component, count, Failure, get, html, inLab, mount, num, poll, queryOf, ready, shortOf, Smoothing, tell } from "../../shared.js";
import { Chips, Chosen } from "./chosen.js";
import { SideBySide } from "./prompt.js";
import { Differences, Ends } from "./tables.js";

const PAUSE = 5000; // ms between two looks while a run is going on
const FEW = 4; // metrics that are asked for at once, after the first
const AXES = { step: "steps", samples: "samples", tokens: "tokens", seconds: "seconds" };
// What a band is, and where it ends: values of a share lie between 0 and 1, others may not be negative.
const bandOf = ([low, high] = []) => `band: 95 % interval over seeds${high != null ? ", drawn within 0 and 1" : low != null ? ", drawn down to 0" : ""}`;
const number = (name, part = /^\d+$/) => (part.test(asked(name)) ? +asked(name) : null);
const place = (name) => number(name, /^\d{1,15}(\.\d+)?$/);
const NONE = [];

// How finely seconds are told apart: a thousandth of all of them, or less.
const grainOf = (x, [low, high]) => (x === "seconds" ? Math.min(1, 10 ** Math.floor(Math.log10((high - low || 1) / 1000))) : 1);

// That a point is more than a step, if so.
function meanOf(lines) {
  const most = Math.max(1, ...lines.map((line) => line.steps));
  return most > 1 && `a point is the mean of ${lines.some((line) => line.steps !== most) ? "up to " : ""}${num(most)} steps: zoom in to see each`;
}

// A line of the answer as a chart draws it; on another axis than steps a point is as wide as its distance to the next.
function lineOf(found, axis, label, full, colour) {
  const x = filled(found.x);
  const apart = x.length > 1 ? (x[x.length - 1] - x[0]) / (x.length - 1) : 1;
  const bucket = axis === "step" ? found.bucket : Math.max(apart, 1e-9);
  const low = found.low ? filled(found.low) : null;
  const high = found.low ? filled(found.high) : null;
  return { label, full, colour, x, y: filled(found.mean), low, high, bucket, steps: found.bucket, odd: found.nonfinite ?? [], gap: Infinity };
}

const viewed = (from, to) => (from != null && to != null && from > to ? { from: to, to: from } : { from, to });

// What the address says.
const addressed = () => ({
  ids: [...new Set(askedAll("id"))], chosen: askedAll("metric"), x: AXES[asked("x")] ? asked("x") : "step", seeds: asked("seeds") === "lines" ? "lines" : "band",
  ...viewed(place("from"), place("to")), key: asked("key"), set: asked("set"), at: number("at"), base: asked("base"), smooth: number("smooth") ?? 0, of: askedAll("of"),
});

class Compare extends Component {
  cursor = new Cursor();
  state = { found: null, curves: {}, error: "", adding: false, ...addressed() };

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
    const { ids, x, from, to } = this.state;
    if (!ids.length) return this.setState({ found: null, curves: {}, error: "" });
    const asking = (this.asking = {});
    const began = performance.now();
    try {
      const first = this.state.chosen[0];
      const found = await get("/api/view/compare", { id: ids, metric: first ?? null, x, from, to });
      if (this.asking !== asking) return;
      const fresh = this.sees(from, to) ? this.drawn(found, found.curves) : {};
      this.setState({ found, curves: { ...this.state.curves, ...fresh }, error: "" });
      await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
      this.took = performance.now() - began;
      window.lab = { ...window.lab, took: this.took, drawn: performance.now() };
      await Promise.all([this.rest(asking, this.metrics().filter((metric) => !fresh[metric])), this.ends(asking)]);
    } catch (error) {
      if (this.asking === asking) this.setState({ error: error.message });
    }
  }

  async ends(asking) {
    const ends = await get("/api/view/compare", { id: this.state.ids, part: "ends", base: this.state.base });
    if (this.asking === asking) this.setState({ ends });
  }

  setBase(base) {
    tell({ base: base === this.state.ids[0] ? null : base });
    this.setState({ base }, () => attempt(this, () => this.ends(this.asking)));
  }

  sees(from, to) {
    return this.state.from === from && this.state.to === to;
  }

  // Further curves, as long as they are what is looked at.
  async rest(asking, missing, signal) {
    const { ids, x, from, to } = this.state;
    for (let i = 0; i < missing.length; i += FEW) {
      const found = await get("/api/view/compare", { id: ids, metric: missing.slice(i, i + FEW), x, from, to, part: "curves" }, signal);
      if (this.asking !== asking || !this.sees(from, to)) return;
      this.setState((state) => ({ curves: { ...state.curves, ...this.drawn(state.found, found.curves) }, error: "" }));
    }
    window.lab = { ...window.lab, whole: true };
    this.setState({});
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
        if (seeds !== "lines" || !own.length) return [lineOf(line, x, several ? `${group.short}, ${count(line.seeds, "seed")}` : group.short, group.title, i)];
        return own.map((id) => lineOf(answer.runs[id], x, `${group.short}: ${shortOf(id)}`, `${group.name}: ${id}`, i));
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
    const [base, of] = [ids.includes(this.state.base) ? this.state.base : "", this.state.of.filter((id) => ids.includes(id))];
    this.setState({ ids, base, of, curves: {}, adding: false }, () => this.look());
    tell({ id: ids, base, of }, true);
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
    this.setState({ chosen }, () => attempt(this, () => this.rest(this.asking, chosen.filter((m) => !this.state.curves[m]))));
  }

  // From where to where anything can be seen, zoomed or not.
  whole() {
    const { curves, x } = this.state;
    const ends = Object.values(curves).flatMap(({ answer }) => answer.whole ?? []);
    if (!ends.length) return [0, 1];
    const [low, high] = [Math.min(...ends), Math.max(...ends)];
    return x === "step" ? [Math.floor(low), Math.ceil(high)] : [0, x === "seconds" ? high : Math.ceil(high)];
  }

  // Draws what is there in the new range at once, and asks for its exact points.
  zoom(low, high) {
    const [first, last] = this.whole();
    const out = low == null || (low <= first && high >= last);
    const next = { from: out ? null : Math.max(first, low), to: out ? null : Math.min(last, high) };
    if (this.sees(next.from, next.to)) return;
    window.lab = { ...window.lab, whole: false };
    tell(next);
    this.setState(next, () => {
      this.zooming?.abort();
      this.zooming = new AbortController();
      attempt(this, () => this.rest(this.asking, this.metrics(), this.zooming.signal));
    });
  }

  // The groups of which nothing can be drawn over this axis.
  without() {
    const answers = Object.values(this.state.curves).map((c) => c.answer.groups);
    return window.lab?.whole ? this.state.found.groups.map((g) => g.name).filter((name) => !answers.some((groups) => groups[name])) : [];
  }

  get marked() {
    const { found, seeds } = this.state;
    return (seeds === "lines" ? Object.keys(found?.runs ?? {}) : (found?.groups ?? [])).length > MANY;
  }

  // What a file is asked for: the runs and what is seen of them.
  file(kind, more = {}) {
    const { ids, x, seeds, base, from, to } = this.state;
    return inLab(`/api/view/compare.${kind}?${queryOf({ id: ids, metric: this.metrics(), x, seeds, base, from, to, ...more })}`);
  }

  charts() {
    const { curves, found, from, to, x, smooth } = this.state;
    const whole = this.whole();
    const range = [from ?? whole[0], to ?? whole[1]];
    const same = this.range?.[0] === range[0] && this.range?.[1] === range[1];
    this.range = same ? this.range : range;
    const alone = found.groups.some((g) => g.ids.length === 1) && (found.groups.some((g) => g.ids.length > 1) ? "one seed: no band" : "one seed each: no band");
    const places = found.charts.flatMap((chart) => chart.series.map((series) => ({ chart, series })));
    return this.metrics().map((metric) => {
      const { chart, series } = places.find((place) => place.series.metric === metric) ?? { chart: { title: metric, unit: "", series: [1] }, series: {} };
      const said = !series.label || chart.title.toLowerCase().includes(series.label.toLowerCase());
      const title = said ? chart.title : `${chart.title}, ${series.label}`;
      return html`<${Chart} key=${metric} name=${metric} title=${title} unit=${x === "step" ? chart.unit : `${chart.unit ? `${chart.unit}, ` : ""}over ${AXES[x]}`} share=${chart.share || curves[metric]?.answer.bounds[1] === 1}
        lines=${curves[metric]?.lines ?? NONE} range=${this.range} whole=${whole} cursor=${this.cursor} smooth=${x === "step" ? smooth : 0} band=${bandOf(curves[metric]?.answer.bounds)} note=${[alone, meanOf(curves[metric]?.lines ?? NONE)].filter(Boolean).join("; ")} grain=${grainOf(x, whole)}
        onZoom=${(a, b) => this.zoom(a, b)} onOpen=${(step) => x === "step" && this.set({ at: step }, false)} />`;
    });
  }

  render(_, { ids, found, ends, error, x, seeds, adding, key, set, at, smooth, of }) {
    return html`<div>
      <p class="where"><a href=${inLab(`/runs?${queryOf({ pick: ids })}`)}>All runs</a></p>
      <h1>Compare runs</h1>
      <${Failure} text=${error} />
      <${Chosen} ids=${ids} found=${found} marked=${this.marked} adding=${adding} onAdd=${() => this.setState({ adding: !adding })} onIds=${(next) => this.setIds(next)} />
      ${!ids.length && html`<p class="note">No run is chosen: add some, or mark them in the <a href=${inLab("/runs")}>list of runs</a>.</p>`}
      ${found && ids.length > 0 && html`
        <div class="tool-row" role="toolbar" aria-label="Charts">
          <span class="choice" role="group" aria-label="Seeds">Seeds
            ${[["band", "as a band"], ["lines", "one by one"]].map(([name, words]) => html`<button type="button" aria-pressed=${String(seeds === name)} disabled=${!found.groups.some((g) => g.ids.length > 1)} onClick=${() => this.setSeeds(name)}>${words}</button>`)}</span>
          <label>Over <select id="x" value=${x} onChange=${(e) => this.set({ x: e.target.value, from: null, to: null })}>${found.axes.map((axis) => html`<option value=${axis}>${AXES[axis]}</option>`)}</select></label>
          <${Smoothing} smooth=${smooth} whole=${this.whole()} off=${x !== "step"} onSmooth=${(steps) => (this.setState({ smooth: steps }), tell({ smooth: steps || null }))} />
          ${x !== "step" && this.without().length > 0 && html`<span class="note">did not count ${AXES[x]}: ${this.without().join(", ")}</span>`}
          ${this.state.from != null && html`<button type="button" onClick=${() => this.zoom(null)}>Zoom out</button>`}
          <span class="files">Save <a href=${this.file("png")} download>PNG</a> <a href=${this.file("svg")} download>SVG</a> <a href=${this.file("csv", { table: "curves" })} download>curves as CSV</a></span>
        </div>
        <${Chips} charts=${found.charts} shown=${this.metrics()} onToggle=${(metric) => this.toggle(metric)} />
        <div class="charts">${this.charts()}</div>
        ${found.charts.length === 0 && html`<p class="note">None of these runs has numbers to draw.</p>`}
        ${ends && found.groups.every((g) => ends.rows[g.name]) && html`<${Ends} found=${found} ends=${ends} marked=${this.marked} href=${this.file("csv", { table: "finals" })} onBase=${(id) => this.setBase(id)} />`}
        <${Differences} found=${found} href=${this.file("csv", { table: "settings" })} />
        <${SideBySide} found=${found} marked=${this.marked} chosen=${key} set=${set} at=${at} of=${of} onSet=${(changes) => this.set(changes, false)} />`}
    </div>`;
  }
}

mount(Compare);
