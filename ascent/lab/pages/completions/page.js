// The recorded responses of a step, token by token; or (with a key in the address) one prompt over the steps.
import { asked, Component, count, Failure, get, grouped, HELD, html, mount, nearest, poll, ready, runLink, setOf, Sets, tell } from "../../shared.js";
import { Group } from "./group.js";
import { Prompt } from "./prompt.js";
import { COLOURS, Legend, Readout, scaleOf } from "./tokens.js";

const SHOWS = [["all", "all"], ["right", "right"], ["wrong", "wrong"], ["truncated", "cut off"], ["failed", "failed"], ["mixed", "mixed groups"]];
const SORTS = [["reward", "reward"], ["advantage", "advantage"], ["length", "length"], ["sample", "sample"]];
const FOLDS = [["yes", "folded"], ["no", "one by one"]];
const DEFAULTS = { set: "sampled", sort: "reward", show: "all", q: "", colour: "advantage", offset: "", fold: "yes" };
const PAUSE = 250; // ms of quiet before a search is sent
const AGAIN = 8000; // ms between two looks for further steps
const MOST_TICKS = 300;
const ANSWERS = 32; // greedy answers on a page: each is a group of its own

const read = () => ({
  id: asked("id"), key: asked("key"), step: asked("step"),
  ...Object.fromEntries(Object.entries(DEFAULTS).map(([name, value]) => [name, asked(name, value)])),
});

// What was recorded is a part of the step, as a rule: it is said how large a part.
function sampleOf({ shares, of, kind, set, greedy }) {
  if (!shares.all) return "";
  if (set === HELD) return `${count(shares.all, "answer")} recorded (${greedy})${shares.right == null ? "" : `, ${grouped(shares.right)} right`}`;
  const [groups, responses] = [count(shares.groups, "group"), count(shares.all, "response")];
  if (kind !== "ascent") return `${groups}, ${responses}`;
  if (!of) return `${groups}, ${responses} recorded; how many the step had is not known`;
  if (of.responses <= shares.all) return `All ${groups} of this step were recorded (${responses})`;
  return of.groups
    ? `A sample: ${grouped(shares.groups)} of ${count(of.groups, "group")} of this step were recorded (${grouped(shares.all)} of ${count(of.responses, "response")})`
    : `A sample: ${grouped(shares.all)} of ${count(of.responses, "response")} of this step were recorded, in ${groups}`;
}

// Why no ratio differs from 1, where all that are on the page are so: then nothing can be clipped.
function alike(tokens) {
  const rows = [...tokens.values()].filter((row) => row.ratio?.length);
  if (!rows.length || rows.some((row) => row.ratio.some((v) => typeof v !== "number" || Math.abs(v - 1) > 1e-4))) return "";
  return rows.every((row) => row.updates === 1)
    ? "All ratios here are 1: each response was seen by one update, whose policy is the one that logp_old is of."
    : "All ratios here are 1: the updates of this step did not move these log-probs.";
}

// All recorded steps as a small axis: marks, and a slider over them.
function Steps({ found, go }) {
  const { recorded, step } = found;
  const at = recorded.indexOf(step);
  const [first, last] = [recorded[0], recorded[recorded.length - 1]];
  const slide = (event) => {
    const to = +event.target.value;
    const near = nearest(recorded, to);
    const target = near === step && to !== step ? (to > step ? found.next : found.previous) ?? step : near;
    if (target === step) event.target.value = step;
    else go(target);
  };
  const every = Math.ceil(recorded.length / MOST_TICKS);
  const x = (s) => (last === first ? 50 : (100 * (s - first)) / (last - first));
  return html`<div class="c-steps">
    <button type="button" id="previous" aria-label="Previous recorded step" disabled=${found.previous == null} onClick=${() => go(found.previous)}>←</button>
    <div class="c-axis">
      <label for="step">Step <b>${grouped(step)}</b> <span>${recorded.length === 1 ? "the only one recorded" : `${at + 1} of ${count(recorded.length, "recorded step")}`}</span></label>
      <input id="step" type="range" min=${first} max=${last} step="1" value=${step} aria-valuetext=${`step ${step}`} disabled=${recorded.length < 2} onChange=${slide} />
      <svg class="c-ticks" width="100%" height="14" aria-hidden="true">${recorded.filter((_, i) => i % every === 0).map((s) => html`<line key=${s} x1=${`${x(s)}%`} x2=${`${x(s)}%`} y1="3" y2="11" />`)}<line class="here" x1=${`${x(step)}%`} x2=${`${x(step)}%`} y1="0" y2="14" /></svg>
      <p><span>${grouped(first)}</span><span>${last === first ? "" : grouped(last)}</span></p>
    </div>
    <button type="button" id="next" aria-label="Next recorded step" disabled=${found.next == null} onClick=${() => go(found.next)}>→</button>
  </div>`;
}

const Choice = ({ name, label, options, value, set }) => html`<label class="c-choice">${label}
  <select id=${name} value=${value} onChange=${(e) => set(e.target.value)}>${options.map(([key, text, off]) => html`<option key=${key} value=${key} selected=${key === value} disabled=${off}>${text}</option>`)}</select></label>`;

class Page extends Component {
  state = { asked: read(), found: null, tokens: new Map(), about: null, error: "", count: 0 };
  wanted = new Set();
  tell = (row, i, keyboard) => this.readout?.show(row, i, keyboard);

  componentDidMount() {
    addEventListener("popstate", () => this.setState({ asked: read() }, () => this.load()));
    addEventListener("keydown", (event) => this.key(event));
    poll(() => this.load(true), AGAIN); // a run that goes on records further steps
    window.lab = { about: { keys: [["← →", "the token before, after"], ["↑ ↓", "the line above, below"], ["Home End", "the first, the last token"], ["p n", "the recorded step before, after"], ["/", "search"]] } };
    this.load();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea, dialog")) return;
    const { found } = this.state;
    if (event.key === "n" && found?.next != null) this.go(found.next);
    else if (event.key === "p" && found?.previous != null) this.go(found.previous);
    else if (event.key === "/") {
      document.getElementById("search")?.focus();
      event.preventDefault();
    }
  }

  // Changes the address, and asks again where that changes what is shown.
  set(changes, push = false) {
    const next = { ...this.state.asked, ...changes };
    const plain = Object.fromEntries(Object.entries(changes).map(([k, v]) => [k, v === DEFAULTS[k] ? null : v]));
    tell(plain, push);
    this.setState({ asked: next }, () => "colour" in changes || "fold" in changes || this.load());
  }

  go(step) {
    this.set({ step: String(step), offset: "" }, true);
  }

  search(q) {
    this.setState({ typed: q });
    clearTimeout(this.typing);
    this.typing = setTimeout(() => this.set({ q, offset: "" }), PAUSE);
  }

  async load(quiet = false) {
    const { id, key, set, step, sort, show, q, offset } = this.state.asked;
    if (key || (quiet && this.busy)) return;
    this.busy = (this.busy ?? 0) + 1;
    this.stop?.abort();
    this.stop = new AbortController();
    try {
      const found = await get("/api/view/completions", { id, set, step, sort, show, q, offset, count: set === HELD ? ANSWERS : null }, this.stop.signal);
      const before = this.state.found;
      const fresh = !before || before.step !== found.step || before.id !== found.id || before.set !== found.set;
      if (fresh) this.wanted.clear();
      if (quiet && !fresh && before.recorded.length === found.recorded.length) return void (this.state.error && this.setState({ error: "" }));
      if (found.step != null) tell({ step: found.step });
      this.setState((state) => ({ asked: { ...state.asked, step: found.step == null ? step : String(found.step) }, found, error: "", tokens: fresh ? new Map() : state.tokens, about: fresh ? null : state.about, count: state.count + 1 }));
      ready(`Completions of ${id}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.setState({ error: error.message });
      ready("Completions");
    } finally {
      this.busy -= 1;
    }
  }

  // The tokens of a group, or of one of its responses, once.
  async ask(group, sample) {
    const { id, step, set } = this.state.found;
    const name = `${group}/${sample ?? ""}`;
    if (this.wanted.has(name) || this.wanted.has(`${group}/`)) return;
    this.wanted.add(name);
    try {
      const found = await get("/api/view/tokens", { id, set: setOf(set), step, group, sample });
      if (this.state.found.step !== step || this.state.found.set !== set) return;
      this.setState(({ tokens }) => {
        for (const row of found.rows) tokens.set(`${row.group}/${row.sample}`, row);
        return { tokens: new Map(tokens), about: { missing: found.missing, clip: found.clip } };
      });
    } catch (error) {
      this.wanted.delete(name);
      this.setState({ error: error.message });
    }
  }

  controls(found, { asked: now, typed }) {
    const { shares } = found;
    const held = found.set === HELD;
    const shows = SHOWS.filter(([key]) => !held || key !== "mixed").map(([key, text]) => [key, shares[key] == null ? `${text}: not known` : `${text} (${grouped(shares[key])})`, shares[key] == null]);
    return html`<div class="c-controls">
      <${Choice} name="show" label="Show" options=${shows} value=${now.show} set=${(show) => this.set({ show, offset: "" })} />
      ${!held && html`<${Choice} name="sort" label="Sort by" options=${SORTS} value=${now.sort} set=${(sort) => this.set({ sort })} />`}
      <label class="c-choice search">Search <input id="search" type="search" value=${typed ?? now.q} placeholder="in prompts and responses" onInput=${(e) => this.search(e.target.value)} /></label>
      ${found.kind === "ascent" && html`<${Choice} name="colour" label="Colour" options=${COLOURS.filter(([key]) => !held || key === "logp")} value=${held ? "logp" : now.colour} set=${(colour) => this.set({ colour })} />`}
      ${!held && html`<${Choice} name="fold" label="Identical" options=${FOLDS} value=${now.fold} set=${(fold) => this.set({ fold })} />`}
    </div>`;
  }

  pages(found) {
    if (found.total <= found.count) return null;
    const last = Math.min(found.offset + found.count, found.total);
    const turn = (offset) => {
      this.set({ offset: offset ? String(offset) : "" }, true);
      scrollTo({ top: 0 });
    };
    return html`<nav class="c-pages" aria-label="Pages of groups">
      <button type="button" disabled=${found.offset === 0} onClick=${() => turn(Math.max(0, found.offset - found.count))}>← Groups before</button>
      <span>${found.offset + 1} to ${last} of ${count(found.total, "group")}</span>
      <button type="button" disabled=${last >= found.total} onClick=${() => turn(last)}>Next groups →</button></nav>`;
  }

  said(found) {
    if (!found.groups.length) return found.shares.all ? "No response is like that: show all, or search for something else." : "";
    const filtered = found.responses !== found.shares.all;
    return filtered ? `Shown: ${count(found.responses, "response")} in ${count(found.total, "group")} of what was recorded.` : "";
  }

  render(_, state) {
    const { asked: now, found, tokens, about, error } = state;
    if (now.key) return html`<${Prompt} key=${now.set} id=${now.id} set=${now.set} name=${now.key} onSet=${(set) => this.set({ set }, true)} />`;
    const head = html`<header class="top-line"><p><a href=${runLink(now.id)}>← ${now.id || "runs"}</a></p><h1>Completions</h1></header>`;
    if (!found) return html`${head}<${Failure} text=${error} />${!error && html`<p class="note">Reading…</p>`}`;
    const largest = Math.max(0, ...found.groups.flatMap((g) => g.responses.map((r) => (typeof r.advantage === "number" ? Math.abs(r.advantage) : 0))));
    const held = found.set === HELD;
    const colour = held ? "greedy" : now.colour;
    const key = `${colour} ${largest}`;
    if (this.scaled?.key !== key) this.scaled = { key, scale: scaleOf(colour, largest) ?? scaleOf("advantage", largest) };
    const { scale } = this.scaled;
    const known = about?.missing.tokens ?? about?.missing[scale.field] ?? (scale.field === "clipped" ? about?.clip.words : null);
    return html`${head}<${Failure} text=${error} />
      ${found.problems.map((text) => html`<p class="error" role="alert" key=${text}>${text}</p>`)}
      <${Sets} ...${found} go=${(set) => this.set({ set, offset: "", show: now.show === "mixed" ? "all" : now.show }, true)} />
      ${found.step != null && html`<${Steps} found=${found} go=${(step) => this.go(step)} />`}
      ${found.asked != null && found.asked !== found.step && found.step != null && html`<p class="note" role="status">Nothing was recorded at step ${grouped(found.asked)}; this is the nearest one.</p>`}
      ${found.shares.all > 0 && this.controls(found, state)}
      <p class="note found" role="status"><b>${sampleOf(found)}</b> ${this.said(found)}</p>
      ${about && Object.entries(about.missing).map(([name, text]) => html`<p class="note" key=${name}>${text}.</p>`)}
      <div class="c-groups" data-count=${state.count}>${found.groups.map((group) => html`<${Group} key=${`${found.set}/${found.step}/${group.group}`} id=${now.id} set=${found.set} step=${found.step} group=${group} tokens=${tokens} ask=${(g, s) => this.ask(g, s)} scale=${scale} q=${now.q} tell=${this.tell} fold=${now.fold !== "no"} />`)}</div>
      ${this.pages(found)}
      ${found.kind === "ascent" && found.groups.length > 0 && html`<aside class="c-dock" aria-label="Numbers of a token"><${Legend} scale=${scale} absent=${known} note=${colour === "ratio" || colour === "clipped" ? alike(tokens) : ""} /><${Readout} here=${(readout) => (this.readout = readout)} /></aside>`}`;
  }
}

mount(Page);
