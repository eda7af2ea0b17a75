// One prompt side by side: what the runs said to it at about the same step.
import { Swatch } from "../../chart.js";
import { attempt, completionsLink, Component, count, Failure, get, HELD, html, nearest, num, runLink, setOf, shortOf } from "../../shared.js";

const nameOf = ({ set, key }) => `${set} ${key}`;
const placeOf = (name) => ({ set: setOf(name.split(" ")[0]), key: name.split(" ")[1] });
const COLUMNS = 6; // runs beside one another: one of each group

export class SideBySide extends Component {
  state = { prompts: null, told: {}, error: "" };

  get ids() {
    return this.props.found.groups.slice(0, COLUMNS).map((group) => group.ids.find((id) => this.props.of.includes(id)) ?? group.ids[0]);
  }

  // Another seed of a group: the runs that are not the first of theirs stand in the address.
  pick(group, id) {
    const others = this.props.of.filter((one) => !group.ids.includes(one));
    this.props.onSet({ of: id === group.ids[0] ? others : [...others, id] });
  }

  componentDidMount() {
    this.near = new IntersectionObserver(([entry]) => entry.isIntersecting && this.shared(), { rootMargin: "200px" });
    this.near.observe(this.place);
  }

  componentWillUnmount() {
    this.near.disconnect();
  }

  componentDidUpdate() {
    const now = this.ids.join("\n");
    if (this.state.prompts && this.asked !== now) this.shared();
    else if (this.state.prompts?.length && this.told !== `${now}\n${this.key}`) this.tell();
  }

  // The prompts that all of them have recorded, those of most steps first.
  async shared() {
    const ids = this.ids;
    if (this.asked === ids.join("\n")) return;
    this.asked = ids.join("\n");
    try {
      const lists = await Promise.all(ids.map((id) => get("/api/view/prompts", { id })));
      const keys = lists.slice(1).map((list) => new Set(list.prompts.map(nameOf)));
      if (this.asked === ids.join("\n")) this.setState({ prompts: lists[0].prompts.filter((p) => keys.every((set) => set.has(nameOf(p)))), greedy: lists[0].greedy, error: "" });
    } catch (error) {
      this.setState({ prompts: [], error: error.message });
    }
  }

  get chosen() {
    const { prompts } = this.state;
    const named = nameOf({ set: setOf(this.props.set) ?? "sampled", key: this.props.chosen });
    return prompts?.find((p) => nameOf(p) === named) ?? prompts?.[0];
  }

  get key() {
    return this.chosen && nameOf(this.chosen);
  }

  async tell() {
    const [ids, key, chosen] = [this.ids, this.key, this.chosen];
    this.told = `${ids.join("\n")}\n${key}`;
    await attempt(this, async () => {
      const found = await Promise.all(ids.map((id) => get("/api/view/prompt", { id, set: setOf(chosen.set), key: chosen.key })));
      if (this.key === key) this.setState({ told: Object.fromEntries(ids.map((id, i) => [id, found[i]])), error: "" });
    });
  }

  // The prompts of one set, as choices.
  options(set) {
    return this.state.prompts.filter((p) => p.set === set).map((p) => html`<option key=${nameOf(p)} value=${nameOf(p)}>${p.prompt.slice(0, 80)} (${count(p.steps, set === HELD ? "evaluation" : "step")})</option>`);
  }

  render({ found, at, marked, onSet }, { prompts, told, greedy, error }) {
    const ids = this.ids;
    const steps = [...new Set(ids.flatMap((id) => told[id]?.steps.map((s) => s.step) ?? []))].sort((a, b) => a - b);
    const step = at == null ? steps[steps.length - 1] : nearest(steps, at);
    const place = Math.max(0, steps.indexOf(step));
    const prompt = this.chosen;
    return html`<section class="beside" ref=${(element) => (this.place = element)}>
      <h2>One prompt, side by side</h2>
      <${Failure} text=${error} />
      ${prompts?.length === 0 && !error && html`<p class="note">${ids.length > 1 ? "These runs have recorded no prompt in common." : "No prompt was recorded."} Runs of one task and seed draw the same prompts; <code>--record-rollouts all</code> keeps them all.</p>`}
      ${prompt && html`<div class="tool-row plain">
          <label>Prompt <select id="prompt" value=${this.key} onChange=${(e) => onSet(placeOf(e.target.value))}>
            ${prompts.some((p) => p.set === HELD) ? html`<optgroup label=${greedy}>${this.options(HELD)}</optgroup><optgroup label="sampled">${this.options("sampled")}</optgroup>` : this.options("sampled")}</select></label>
          ${steps.length > 1 && html`<label>Step <input id="at" type="range" min="0" max=${steps.length - 1} value=${place} aria-valuetext=${`step ${step}`} onInput=${(e) => onSet({ at: steps[+e.target.value] })} /><output>${num(step)}</output></label>`}
        </div>
        <pre class="asked">${prompt.prompt}</pre>
        <div class="columns">${ids.map((id, i) => html`<${Column} key=${id} colour=${i} marked=${marked} id=${id} group=${found.groups[i]} run=${found.runs[id]} told=${told[id]} step=${step} onPick=${(other) => this.pick(found.groups[i], other)} />`)}</div>
        ${found.groups.length > COLUMNS && html`<p class="note">The first ${COLUMNS} settings, one run of each.</p>`}`}
    </section>`;
  }
}

const words = (r) => [`reward ${num(r.reward)}`, r.correct == null ? "" : r.correct ? "✓ right" : "✗ not right", r.truncated ? "✂ cut off" : ""].filter(Boolean).join(", ");

function Column({ id, group, run, told, step, colour, marked, onPick }) {
  const seed = run?.seed != null && ` (seed ${run.seed})`;
  const near = told && nearest(told.steps.map((s) => s.step), step);
  const here = told?.steps.find((s) => s.step === near);
  return html`<article>
    <h3 title=${group.name}><${Swatch} colour=${colour} marked=${marked} /> ${group.short}</h3>
    <p class="note">${group.ids.length > 1
      ? html`<label>Run <select value=${id} aria-label=${`Run of ${group.name}`} onChange=${(e) => onPick(e.target.value)}>${group.ids.map((one, i) => html`<option key=${one} value=${one}>${shortOf(one)}${group.seeds[i] != null && ` (seed ${group.seeds[i]})`}</option>`)}</select></label>`
      : html`Run <a href=${runLink(id)} title=${id}>${shortOf(id)}</a>${seed}`}</p>
    ${!here ? html`<p class="note">…</p>` : told.set === HELD ? html`
      <p class="note"><a href=${completionsLink(id, here.step, { set: HELD })}>step ${num(here.step)}</a>${here.step !== step && " (the nearest)"}: ${here.failed ? "no reward" : words(here.common)}</p>
      <pre>${here.common.text}</pre>` : html`
      <p class="note"><a href=${completionsLink(id, here.step)}>step ${num(here.step)}</a>${here.step !== step && " (the nearest)"}: ${count(here.size, "response")}, reward: mean ${num(here.mean)}${here.std != null && `, spread ${num(here.std)} (standard deviation)`}${here.right != null && `, ${here.right} right`}</p>
      ${here.best && html`<h4>Best <span>${words(here.best)}</span></h4><pre>${here.best.text}</pre>`}
      ${here.common && here.common.text !== here.best?.text && html`<h4>Most common <span>× ${here.common.count}, ${words(here.common)}</span></h4><pre>${here.common.text}</pre>`}`}
  </article>`;
}
