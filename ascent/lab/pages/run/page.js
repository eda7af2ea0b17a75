// The page /run?id=…: what became of a run, its alerts, its curves with one cursor, and all that is known of it. Live while it runs.
import { Chart, Cursor } from "../../chart.js";
import { filled, lineOf } from "../../curves.js";
import { Noting } from "../../noting.js";
import { asked, attempt, Badge, completionsLink, Component, count, date, Failure, get, HELD, html, inLab, keepScroll, mount, nearest, num, poll, ready, Smoothing, Tags, tell, words } from "../../shared.js";

const PAUSE = 2000; // ms between two looks at a run that runs
const KEYS = [["← →", "in a chart: move the cursor by a point (with Shift by ten)"], ["+ −", "zoom in and out around the cursor"], ["0", "zoom out wholly"], ["l", "log scale on and off"], ["Enter", "open the completions of the step"], ["Esc", "take the cursor away"]];
const AROUND = 10; // steps on either side of one that is to be seen, at least
const number = (name) => (/^-?\d+$/.test(asked(name)) ? +asked(name) : null);
const read = () => {
  const [from, to] = [number("from"), number("to")];
  return { from: to == null ? null : from, to: from == null ? null : to, smooth: Math.max(0, number("smooth") ?? 0), log: asked("log") === "1" };
};

class Run extends Component {
  id = asked("id");
  cursor = new Cursor();
  state = { about: null, curves: null, lines: [], error: "", ...read() };

  async componentDidMount() {
    const back = keepScroll();
    await this.look(true);
    if (this.state.curves && this.state.from != null) this.show(this.fit(this.state.from, this.state.to));
    back();
    addEventListener("popstate", () => this.back());
    addEventListener("keydown", (event) => {
      if (event.key === "l" && !event.ctrlKey && !event.metaKey && !event.altKey && !event.target.closest("input, select, textarea, dialog")) this.set({ log: !this.state.log });
    });
    this.cursor.set(number("step"));
    this.cursor.follow((step) => {
      clearTimeout(this.telling);
      this.telling = setTimeout(() => tell({ step }), 250);
    });
    ready(this.id);
    window.lab = { about: { keys: KEYS } };
    this.stop = poll(() => this.look(), this.state.about?.status === "foreign" ? 5 * PAUSE : PAUSE);
  }

  get live() {
    return ["running", "foreign"].includes(this.state.about?.status);
  }

  // Asks for what is new. The old arrays are dropped: a page that is open for a week holds what one that was just opened does.
  async look(first = false) {
    if (!first && !this.live && !this.state.error) return false;
    await attempt(this, async () => {
      const { from, to, curves } = this.state;
      const [found, about] = await Promise.all([
        get("/api/view/curves", { id: this.id, from, to, have: first || this.state.error ? null : curves?.revision }),
        first || this.state.error || Date.now() - this.looked > 5000 ? this.about() : null,
      ]);
      const ended = found.unchanged && found.status !== this.state.about.status;
      const said = about ?? (ended ? await this.about() : this.state.about);
      const zoomed = from !== this.state.from || to !== this.state.to; // meanwhile: that has asked for itself
      if (!zoomed) this.take(found.unchanged ? null : found.runs[this.id], said);
    });
    return true;
  }

  about() {
    this.looked = Date.now();
    return get("/api/view/run", { id: this.id });
  }

  take(curves, about = this.state.about) {
    const now = curves ?? this.state.curves;
    const same = !curves && JSON.stringify(about.charts) === JSON.stringify(this.state.about?.charts);
    const lines = same ? this.state.lines : about.charts.map((chart) => chart.series.map((s, i) => lineOf(now, s.metric, s.label, s.colour ?? i)).filter(Boolean));
    const marks = about.events.filter((e) => e.event === "alert").map((e) => e.step);
    this.setState({ curves: now, about, lines, marks, error: "" });
  }

  whole() {
    const { first, last } = this.state.curves ?? {};
    return [first ?? 0, last ?? 1];
  }

  range() {
    const [first, last] = this.whole();
    return [this.state.from ?? first, this.state.to ?? last];
  }

  // Two steps in either order as a part of the run that has some width; nulls: all of it.
  fit(from, to) {
    const [first, last] = this.whole();
    if (from == null) return { from: null, to: null };
    const clamp = (step) => Math.max(first, Math.min(step, last));
    const high = clamp(Math.max(from, to, first + 1));
    const low = clamp(Math.min(from, to, high - 1));
    return low <= first && high >= last ? { from: null, to: null } : { from: low, to: high };
  }

  // A zoom is an entry of its own in the history: Back undoes it.
  zoom(from, to) {
    this.show(this.fit(from, to), true);
  }

  back() {
    const { from, to, smooth, log } = read();
    this.setState({ smooth, log });
    this.show(this.fit(from, to));
  }

  // Steps that an alert names, and some around them where it names one; the cursor goes to the step it was raised at.
  see([from, to], step) {
    const [first, last] = this.whole();
    const around = from === to ? Math.max(AROUND, Math.round(0.03 * (last - first))) : 0;
    this.zoom(from - around, to + around);
    this.cursor.set(Math.max(from, Math.min(step, to)));
    document.querySelector(".charts").scrollIntoView({ block: "start" });
  }

  set(changes) {
    this.setState(changes);
    tell(Object.fromEntries(Object.entries(changes).map(([name, value]) => [name, value === true ? 1 : value || null])));
  }

  // Draws what is there in the new range at once, and asks for its exact points.
  async show(next, push = false) {
    const same = next.from === this.state.from && next.to === this.state.to;
    this.setState(next);
    tell(next, push);
    if (same) return;
    this.asking?.abort();
    this.asking = new AbortController();
    await attempt(this, async () => this.take((await get("/api/view/curves", { id: this.id, ...next }, this.asking.signal)).runs[this.id]));
  }

  // The accuracy of an evaluation is that of its answers; every other chart leads to what was sampled.
  open(step, chart) {
    const { held_out: held, recorded } = this.state.about;
    const answers = held.length > 0 && (chart === "accuracy" || !recorded.length);
    const at = nearest(answers ? held : recorded, step);
    tell({ step });
    if (at != null) location.assign(completionsLink(this.id, at, { set: answers ? HELD : null }));
  }

  render(_, { about, curves, lines, marks, error, from, smooth, log }) {
    if (!about) return html`<div><p><a href=${inLab("/runs")}>All runs</a></p><h1>${this.id || "Which run?"}</h1><${Failure} text=${this.id ? error : "The address names no run: it needs id=…"} /></div>`;
    const range = this.range();
    return html`<div>
      <${Failure} text=${error} />
      <${Top} about=${about} onSee=${(steps, step) => this.see(steps, step)} onNoted=${(notes) => this.take(null, { ...this.state.about, notes })} />
      ${about.charts.length > 0 && html`<${Tools} cursor=${this.cursor} range=${range} whole=${this.whole()} zoomed=${from != null} smooth=${smooth} about=${about}
        onZoom=${(a, b) => this.zoom(a, b)} onSmooth=${(steps) => this.set({ smooth: steps })} log=${log} onLog=${(on) => this.set({ log: on })} />`}
      <div class="charts">${about.charts.map((chart, i) => html`<${Chart} key=${chart.key} name=${chart.key} title=${chart.title} unit=${chart.unit} share=${chart.share}
        lines=${lines[i] ?? []} range=${range} whole=${this.whole()} smooth=${smooth} log=${log} cursor=${this.cursor} marks=${marks} onZoom=${(a, b) => this.zoom(a, b)} onOpen=${(step) => this.open(step, chart.key)} />`)}
        ${curves?.metrics["time/tail"] && html`<${Running} id=${this.id} cursor=${this.cursor} revision=${curves.revision} />`}</div>
      ${about.charts.length === 0 && html`<p class="note">No curves ${about.status === "running" ? "yet: they come with the first step." : "to draw."}</p>`}
      ${about.replicas?.length > 0 && html`<${Replicas} about=${about} />`}
      <${Below} about=${about} revision=${curves?.revision} />
    </div>`;
  }
}

// How many responses were decoded at once, over the time of the step under the cursor, or of the last one.
class Running extends Component {
  own = new Cursor();
  state = { step: null };

  componentDidMount() {
    this.leave = this.props.cursor.follow((step) => {
      clearTimeout(this.asking);
      this.asking = setTimeout(() => this.ask(step), 150);
    });
    this.ask(this.props.cursor.step);
  }

  componentDidUpdate(before) {
    if (before.revision !== this.props.revision && this.props.cursor.step == null) this.ask(null);
  }

  componentWillUnmount() {
    clearTimeout(this.asking);
    this.leave();
  }

  ask(step) {
    return attempt(this, async () => {
      const { running, ...found } = await get("/api/view/occupancy", { id: this.props.id, step: step == null ? null : Math.round(step) });
      if (!running?.length) return;
      const wide = found.seconds / running.length;
      const line = (label, colour, x, y) => ({ label, colour, x: filled(x), y: filled(y), low: null, high: null, bucket: wide, odd: [], gap: Infinity });
      const lines = [line("running", 0, running.map((_, i) => (i + 0.5) * wide), running), line("half of the maximum", 7, [0, found.seconds], [found.max_num_seqs / 2, found.max_num_seqs / 2])];
      this.setState({ ...found, lines, range: [0, found.seconds], grain: Math.min(1, 10 ** Math.floor(Math.log10(wide))) });
    });
  }

  render(_, { step, max_num_seqs, seconds, tail, lines, range, grain }) {
    if (step == null) return null;
    return html`<${Chart} name="running" title="Responses decoded at once" unit=${`over the seconds of step ${num(step)}`} axis="second" lines=${lines} range=${range} y=${[0, 1.05 * max_num_seqs]} grain=${grain} cursor=${this.own}
      note=${`tail: ${num(tail)} of ${num(seconds)} s, with fewer than half of ${num(max_num_seqs)} sequences running`} />`;
  }
}

// The row that stays in sight: smoothing, the range of steps, and the step under the cursor with its completions.
class Tools extends Component {
  componentDidMount() {
    this.leave = this.props.cursor.follow((step) => this.setState({ step }));
    this.setState({ step: this.props.cursor.step });
  }

  componentWillUnmount() {
    this.leave();
  }

  // What is being typed stays there, though the row is drawn again, until it is done.
  typed(which, event) {
    const given = Math.round(+event.target.value);
    const [from, to] = this.props.range;
    if (Number.isFinite(given) && event.target.value !== "") this.props.onZoom(which ? from : given, which ? given : to);
    this.setState({ draft: null });
  }

  field(which) {
    const { range, whole } = this.props;
    const draft = this.state.draft?.which === which ? this.state.draft.text : null;
    return html`<input id=${which ? "to" : "from"} type="number" aria-label=${which ? "To step" : "From step"} min=${whole[0]} max=${whole[1]} value=${draft ?? range[which]}
      onInput=${(e) => this.setState({ draft: { which, text: e.target.value } })} onChange=${(e) => this.typed(which, e)} />`;
  }

  render({ whole, zoomed, smooth, log, about, onZoom, onSmooth, onLog }, { step }) {
    const [at, held] = step == null ? [] : [nearest(about.recorded, step), nearest(about.held_out, step)];
    const some = about.recorded.length || about.held_out.length;
    return html`<div class="tool-row" role="toolbar" aria-label="Charts">
      <${Smoothing} smooth=${smooth} whole=${whole} onSmooth=${onSmooth} />
      <label><input id="log" type="checkbox" checked=${log} onChange=${(e) => onLog(e.target.checked)} /> Log scale</label>
      <span class="range">Steps ${this.field(0)} to ${this.field(1)}
        <button type="button" id="out" disabled=${!zoomed} onClick=${() => onZoom(null)}>Zoom out</button></span>
      <span class=${step == null ? "at" : "at on"}>${step == null
        ? html`<span class="note">${some ? "Drag to zoom, click a step for its completions" : "Drag to zoom; no completions were recorded"}</span>`
        : html`<b>step ${num(step)}</b> ${at != null && html`<a href=${completionsLink(about.id, at)}>completions${at === step ? "" : ` of step ${at}`}</a>`} ${held != null && html`<a href=${completionsLink(about.id, held, { set: HELD })}>answers, ${about.greedy}${held === step ? "" : `, of step ${held}`}</a>`}`}</span>
    </div>`;
  }
}

// ---- besides the curves: above them what became of the run, below them all that is known ----
const said = (name) => words(name).replaceAll(/[_-]/g, " ");

const Alert = ({ alert, id, onSee }) => {
  const { metrics, steps, rollouts } = alert.evidence ?? {};
  const show = rollouts?.show && rollouts.show !== "all" ? `, ${rollouts.show}` : "";
  return html`<li class="alert">
    <p><i aria-hidden="true">⚑</i> <b>${said(alert.name)}</b> <span class="note">step ${num(alert.step)}</span><br />${words(alert.text)}</p>
    ${alert.evidence && html`<p class="evidence">
      ${Object.entries(metrics ?? {}).map(([name, values]) => html`<span key=${name}><code>${name}</code> ${[values ?? []].flat().map((value) => num(value)).join(" → ")}</span>`)}
      ${steps?.length === 2 && html`<button type="button" class="plain" onClick=${() => onSee(steps, alert.step)}>${steps[0] === steps[1] ? `see step ${num(steps[0])}` : `zoom to steps ${num(steps[0])} to ${num(steps[1])}`}</button>`}
      ${rollouts?.step != null && html`<a href=${completionsLink(id, rollouts.step, { show: rollouts.show, q: rollouts.q })}>completions that show it (step ${num(rollouts.step)}${show}${rollouts.q ? `, “${rollouts.q}”` : ""})</a>`}
    </p>`}
  </li>`;
};

class Notes extends Component {
  render({ about, onNoted }, { editing }) {
    const { notes } = about;
    if (editing) return html`<div class="notes"><${Noting} id=${about.id} notes=${notes} onDone=${(saved) => (this.setState({ editing: false }), saved && onNoted(saved))} /></div>`;
    const any = notes.tags.length > 0 || notes.text;
    return html`<div class="notes"><${Tags} tags=${notes.tags} />${notes.text && html`<p class="text">${notes.text}</p>`}
      <button type="button" class="plain edit" onClick=${() => this.setState({ editing: true })}>${any ? "Edit tags and note" : "Add tags or a note"}</button></div>`;
  }
}

// Many events of one kind (an alert that was raised again) are folded after the first few.
const FEW = 4;

const Top = ({ about, onSee, onNoted }) => {
  const alerts = about.events.filter((event) => event.event === "alert");
  const facts = [words(about.task), words(about.label), about.seed == null ? "" : `seed ${words(about.seed)}`, about.started ? `started ${date(about.started)}` : ""];
  const item = (alert, i) => html`<${Alert} key=${i} alert=${alert} id=${about.id} onSee=${onSee} />`;
  return html`<header class="run-top">
    <p class="where"><a href=${inLab("/runs")}>All runs</a></p>
    <div class="title-row"><h1>${about.id}</h1><${Badge} status=${about.status} /><span class="said" role="status">${about.said}</span></div>
    <p class="facts">${facts.filter(Boolean).join(" · ")}</p>
    ${about.going_on && html`<p class="going-on">${about.going_on.words}${about.going_on.command && html` <code>${about.going_on.command}</code>`}</p>`}
    ${about.problems.length > 0 && html`<ul class="problems" aria-label="Problems">${about.problems.map((text) => html`<li key=${text}><i aria-hidden="true">!</i> ${text}</li>`)}</ul>`}
    ${alerts.length > 0 && html`<section aria-label="Alerts"><h2>${count(alerts.length, "alert")} <span>evidence to look at, no verdict</span></h2>
      <ul class="alerts">${alerts.slice(0, FEW).map(item)}</ul>
      ${alerts.length > FEW && html`<details><summary>${count(alerts.length - FEW, "more alert")}</summary><ul class="alerts">${alerts.slice(FEW).map(item)}</ul></details>`}</section>`}
    ${about.words.length > 0 && html`<div class="result">${about.words.map((text) => html`<p key=${text}>${words(text)}</p>`)}</div>`}
    <${Notes} about=${about} onNoted=${onNoted} />
  </header>`;
};

// Settings within settings, as task.name, task.length, …
function flat(value, name = "", found = []) {
  const inner = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : null;
  if (!inner || (name && inner.length === 0)) found.push([name, inner ? "{}" : typeof value === "string" ? value : JSON.stringify(value)]);
  else for (const [key, one] of inner) flat(one, name ? `${name}.${key}` : key, found);
  return found;
}

const Pairs = ({ of }) => html`<dl class="pairs">${flat(of).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

const Fold = ({ title, note, open, children }) => html`<details class="fold" open=${open}><summary>${title} <span>${note}</span></summary>${children}</details>`;

const notAlert = (event) => event.event !== "alert"; // alerts stand above the charts

const History = ({ about }) => {
  const rest = about.events.filter(notAlert);
  return html`<ul class="history">
    ${about.history.map((entry) => html`<li><b>${said(entry.event)}</b> ${words(entry.time)} <span class="note">${flat({ ...entry, event: undefined, time: undefined }).filter(([, v]) => v !== undefined).map(([k, v]) => `${k} ${v}`).join(", ")}</span></li>`)}
    ${rest.map((event) => html`<li><b>${said(event.name ?? event.event)}</b> step ${num(event.step)} <span class="note">${words(event.text)}</span></li>`)}
  </ul>`;
};

// Who drew what on a cluster, and who was lost.
const part = (value) => (value == null ? "" : `${Math.round(100 * value)} %`);
const Replicas = ({ about }) => html`<section class="below replicas" aria-label="Samplers of the cluster">
  <h2>Samplers of the cluster</h2>
  <div class="scroll" tabindex="0"><table>
    <thead><tr>${["", "state", "version", "tokens", "tokens per second", "idle", "loading weights", "times lost"].map((name) => html`<th key=${name} scope="col">${name}</th>`)}</tr></thead>
    <tbody>${about.replicas.map((row) => html`<tr key=${row.name}><th scope="row">${words(row.name)}</th><td>${words(row.state)}</td><td>${num(row.version)}</td><td>${row.tokens == null ? "" : num(row.tokens)}</td>
      <td>${row.rate == null ? "" : num(Math.round(row.rate))}</td><td>${part(row.idle)}</td><td>${part(row.loading)}</td><td>${row.lost == null ? "" : num(row.lost)}</td></tr>`)}</tbody>
  </table></div>
  ${about.replica_events.length > 0 && html`<ul class="history">${about.replica_events.map((event, i) => html`<li key=${i}><b>${words(event.replica)} ${said(event.event)}</b> ${date(event.time)} <span class="note">${words(event.why)}</span></li>`)}</ul>`}
</section>`;

const Below = ({ about }) => {
  const some = (thing) => Object.keys(thing).length > 0;
  return html`<section class="below" aria-label="About this run">
    ${about.objective && html`<h2>What it maximizes</h2><p class="objective">${words(about.objective)}</p>${about.formula && html`<pre class="formula" tabindex="0">${words(about.formula)}</pre>`}`}
    <h2>About this run</h2>
    ${some(about.config) && html`<${Fold} title="Config" note=${count(flat(about.config).length, "setting")}><${Pairs} of=${about.config} /><//>`}
    ${[["Versions", about.versions], ["System", about.machine]].map(([title, of]) => some(of) && html`<${Fold} title=${title} note=${flat(of).slice(0, 3).map(([k, v]) => `${k} ${v}`).join(", ")}><${Pairs} of=${of} /><//>`)}
    <${Fold} title="History" note=${count(about.history.length + about.events.filter(notAlert).length, "event")}><${History} about=${about} /><//>
  </section>`;
};

mount(Run);
