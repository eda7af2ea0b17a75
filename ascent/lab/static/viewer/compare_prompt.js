// One prompt side by side: what the runs said to it at about the same step.
import { Swatch } from "./chart.js";
import { completionsLink, Component, count, Failure, get, html, nearest, num } from "./shared.js";

const COLUMNS = 6; // runs beside one another: the first of each group

class SideBySide extends Component {
  constructor() {
    super();
    this.state = { prompts: null, told: {}, error: "" };
  }

  get ids() {
    return this.props.found.groups.slice(0, COLUMNS).map((group) => group.ids[0]);
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
      const keys = lists.slice(1).map((list) => new Set(list.prompts.map((p) => p.key)));
      if (this.asked === ids.join("\n")) this.setState({ prompts: lists[0].prompts.filter((p) => keys.every((set) => set.has(p.key))), error: "" });
    } catch (error) {
      this.setState({ prompts: [], error: error.message });
    }
  }

  get key() {
    const { prompts } = this.state;
    return prompts?.some((p) => p.key === this.props.chosen) ? this.props.chosen : prompts?.[0]?.key;
  }

  async tell() {
    const [ids, key] = [this.ids, this.key];
    this.told = `${ids.join("\n")}\n${key}`;
    try {
      const found = await Promise.all(ids.map((id) => get("/api/view/prompt", { id, key })));
      if (this.key === key) this.setState({ told: Object.fromEntries(ids.map((id, i) => [id, found[i]])), error: "" });
    } catch (error) {
      this.setState({ error: error.message });
    }
  }

  render({ found, at, marked, onSet }, { prompts, told, error }) {
    const ids = this.ids;
    const steps = [...new Set(ids.flatMap((id) => told[id]?.steps.map((s) => s.step) ?? []))].sort((a, b) => a - b);
    const step = at == null ? steps[steps.length - 1] : nearest(steps, at);
    const place = Math.max(0, steps.indexOf(step));
    const prompt = prompts?.find((p) => p.key === this.key);
    return html`<section class="beside" ref=${(element) => (this.place = element)}>
      <h2>One prompt, side by side</h2>
      <${Failure} text=${error} />
      ${prompts?.length === 0 && !error && html`<p class="note">${ids.length > 1 ? "These runs have recorded no prompt in common." : "No prompt was recorded."} Runs of one task and seed draw the same prompts; <code>--record-rollouts all</code> keeps them all.</p>`}
      ${prompt && html`<div class="tool-row plain">
          <label>Prompt <select id="prompt" value=${this.key} onChange=${(e) => onSet({ key: e.target.value })}>${prompts.map((p) => html`<option key=${p.key} value=${p.key}>${p.prompt.slice(0, 80)} (${count(p.steps, "step")})</option>`)}</select></label>
          ${steps.length > 1 && html`<label>Step <input id="at" type="range" min="0" max=${steps.length - 1} value=${place} aria-valuetext=${`step ${step}`} onInput=${(e) => onSet({ at: steps[+e.target.value] })} /><output>${num(step)}</output></label>`}
        </div>
        <pre class="asked">${prompt.prompt}</pre>
        <div class="columns">${ids.map((id, i) => html`<${Column} key=${id} colour=${i} marked=${marked} id=${id} name=${found.groups[i].name} told=${told[id]} step=${step} />`)}</div>
        ${found.groups.length > COLUMNS && html`<p class="note">The first runs of the first ${COLUMNS} settings.</p>`}`}
    </section>`;
  }
}

const words = (r) => [`reward ${num(r.reward)}`, r.correct == null ? "" : r.correct ? "✓ right" : "✗ not right", r.truncated ? "✂ cut off" : ""].filter(Boolean).join(", ");

function Column({ id, name, told, step, colour, marked }) {
  const near = told && nearest(told.steps.map((s) => s.step), step);
  const here = told?.steps.find((s) => s.step === near);
  return html`<article>
    <h3><${Swatch} colour=${colour} marked=${marked} /> ${name}</h3>
    ${!here ? html`<p class="note">…</p>` : html`
      <p class="note"><a href=${completionsLink(id, here.step)}>step ${num(here.step)}</a>${here.step !== step && " (the nearest)"}: ${count(here.size, "response")}, reward ${num(here.mean)}${here.std != null && ` ± ${num(here.std)}`}${here.right != null && `, ${here.right} right`}</p>
      ${here.best && html`<h4>Best <span>${words(here.best)}</span></h4><pre>${here.best.text}</pre>`}
      ${here.common && here.common.text !== here.best?.text && html`<h4>Most common <span>× ${here.common.count}, ${words(here.common)}</span></h4><pre>${here.common.text}</pre>`}`}
  </article>`;
}

export { SideBySide };
