// One prompt over the steps: its mean reward, and what was answered best and most often.
import { Component, completionsLink, count, Failure, get, grouped, html, num, ready, runLink } from "./shared.js";
import { Chart, Cursor } from "./chart.js";
import { Long } from "./group.js";

const line = (found) => ({
  label: "mean reward of its group", metric: "reward", colour: 0, low: null, high: null, bucket: 1, odd: [], gap: Infinity,
  x: Float64Array.from(found.steps, (s) => s.step),
  y: Float64Array.from(found.steps, (s) => (typeof s.mean === "number" ? s.mean : NaN)),
});

const Answer = ({ name, r, note }) => html`<div class="c-answer"><h4>${name} <span>reward ${num(r.reward)}${r.correct === true ? ", ✓ right" : r.correct === false ? ", ✗ wrong" : ""}${r.truncated ? ", ✂ cut off" : ""}${note ?? ""}</span></h4>
  ${r.text === "" ? html`<p class="note">An empty response.</p>` : html`<${Long} text=${r.text} most=${280} />`}</div>`;

export class Prompt extends Component {
  constructor() {
    super();
    this.state = { found: null, error: "" };
    this.cursor = new Cursor();
  }

  async componentDidMount() {
    const { id, name } = this.props;
    try {
      const found = await get("/api/view/prompt", { id, key: name });
      this.lines = [line(found)];
      this.setState({ found });
    } catch (error) {
      this.setState({ error: error.message });
    }
    ready(`A prompt of ${id}`);
  }

  open(step) {
    const { id } = this.props;
    const { steps } = this.state.found;
    const near = steps.reduce((a, b) => (Math.abs(b.step - step) < Math.abs(a.step - step) ? b : a));
    location.assign(completionsLink(id, near.step, { q: this.short() }));
  }

  // What finds this prompt among the others of a step.
  short() {
    return this.state.found.prompt.trim().split("\n")[0].slice(0, 120);
  }

  render({ id }, { found, error }) {
    const head = html`<header class="top-line"><p><a href=${runLink(id)}>← ${id}</a> <a href=${completionsLink(id)}>Completions</a></p><h1>A prompt over the steps</h1></header>`;
    if (!found) return html`${head}<${Failure} text=${error} />${!error && html`<p class="note">Looking through the recorded steps…</p>`}`;
    const [first, last] = [found.steps[0]?.step ?? 0, found.steps[found.steps.length - 1]?.step ?? 0];
    return html`${head}<${Failure} text=${error} />
      ${found.problems.map((text) => html`<p class="error" role="alert" key=${text}>${text}</p>`)}
      <div class="c-prompt"><h3>Prompt</h3><${Long} text=${found.prompt} name="of the prompt" /></div>
      <p class="note found">In ${grouped(found.found)} of ${count(found.recorded, "recorded step")}${found.left_out > 0 ? `; ${count(found.steps.length, "step")} of them are shown, evenly spread` : ""}.</p>
      ${found.steps.length > 1 && html`<div class="charts one"><${Chart} name="prompt" title="Reward" lines=${this.lines} range=${[first, last]} whole=${[first, last]} smooth=${0} cursor=${this.cursor} onOpen=${(step) => this.open(step)} /></div>`}
      <ol class="c-over">${found.steps.map((s) => html`<li key=${s.step} data-step=${s.step}>
        <div class="c-about"><h3><a href=${completionsLink(id, s.step, { q: this.short() })}>Step ${grouped(s.step)}</a></h3>
          <p class="c-small"><span>reward ${num(s.mean)} ± ${num(s.std)}</span>${s.right != null && html`<span>${s.right} of ${s.of} right</span>`}${s.failed > 0 && html`<span>${s.failed} failed</span>`}<span>${count(s.size, "response")}</span></p></div>
        ${s.best ? html`<${Answer} name="Best" r=${s.best} />` : html`<p class="note">No response has a reward.</p>`}
        ${s.common.count > 1 ? html`<${Answer} name="Most common" r=${s.common} note=${`, ${s.common.count} of ${s.size}`} />` : html`<p class="note">${s.size > 1 ? "All its responses differ." : ""}</p>`}
      </li>`)}</ol>`;
  }
}
