// One prompt over the steps: its mean reward, and what was answered best and most often; of a held-out one, each answer.
import { attempt, Component, completionsLink, count, Failure, get, grouped, HELD, html, nearest, num, ready, runLink, setOf, Sets } from "../../shared.js";
import { Chart, Cursor } from "../../chart.js";
import { Long } from "./group.js";

const line = (found) => ({
  label: found.set === HELD ? "reward of the answer" : "mean reward of its group", metric: "reward", colour: 0, low: null, high: null, bucket: 1, odd: [], gap: Infinity,
  x: Float64Array.from(found.steps, (s) => s.step),
  y: Float64Array.from(found.steps, (s) => (typeof s.mean === "number" ? s.mean : NaN)),
});

const Answer = ({ name, r, note }) => html`<div class="c-answer"><h4>${name} <span>reward ${num(r.reward)}${r.correct === true ? ", ✓ right" : r.correct === false ? ", ✗ wrong" : ""}${r.truncated ? ", ✂ cut off" : ""}${note ?? ""}</span></h4>
  ${r.text === "" ? html`<p class="note">An empty response.</p>` : html`<${Long} text=${r.text} most=${280} />`}</div>`;

const MARKS = { right: "✓", wrong: "✗", failed: "!", unknown: "·" };
const stateOf = (s) => (s.failed ? "failed" : s.right == null ? "unknown" : s.right ? "right" : "wrong");
const SAID = { right: "✓ right", wrong: "✗ wrong", failed: "! no reward", unknown: "" };

// The greedy answer at each evaluation: a mark each in a strip, then a table. An answer like the one before it is said to be so.
const Answers = ({ found, link }) => html`<div class="c-strip" role="img" aria-label=${`Right in ${found.steps.filter((s) => s.right).length} of ${count(found.steps.length, "evaluation")}`}>
    ${found.steps.map((s) => html`<span key=${s.step} class=${stateOf(s)} title=${`step ${s.step}: ${SAID[stateOf(s)]}`}>${MARKS[stateOf(s)]}</span>`)}</div>
  <div class="scroll"><table class="c-answers"><thead><tr><th scope="col">Step</th><th scope="col">Right</th><th scope="col">Reward</th><th scope="col">Answer</th></tr></thead>
    <tbody>${found.steps.map((s, i) => html`<tr key=${s.step} data-step=${s.step} class=${stateOf(s)}>
      <th scope="row"><a href=${link(s.step)}>${grouped(s.step)}</a></th>
      <td><span class=${`c-mark ${stateOf(s)}`}>${SAID[stateOf(s)]}</span>${s.common.truncated && html` <span class="c-mark cut">✂ cut off</span>`}</td>
      <td>${num(s.mean)}</td>
      <td class="c-answer">${i > 0 && found.steps[i - 1].common.text === s.common.text ? html`<span class="note">the same</span>` : s.common.text === "" ? html`<span class="note">An empty response.</span>` : html`<${Long} text=${s.common.text} most=${280} />`}</td></tr>`)}</tbody></table></div>`;

export class Prompt extends Component {
  state = { found: null, error: "" };
  cursor = new Cursor();

  async componentDidMount() {
    const { id, set, name } = this.props;
    await attempt(this, async () => {
      const found = await get("/api/view/prompt", { id, set: setOf(set), key: name });
      this.lines = [line(found)];
      this.setState({ found });
    });
    ready(`A prompt of ${id}`);
  }

  open(step) {
    location.assign(this.link(nearest(this.state.found.steps.map((s) => s.step), step)));
  }

  // To a step, searched for what finds this prompt among the others.
  link(step) {
    const { id, set } = this.props;
    return completionsLink(id, step, { set: setOf(set), q: this.state.found.prompt.trim().split("\n")[0].slice(0, 120) });
  }

  render({ id, set, onSet }, { found, error }) {
    const head = html`<header class="top-line"><p><a href=${runLink(id)}>← ${id}</a> <a href=${completionsLink(id, null, { set: setOf(set) })}>Completions</a></p><h1>A prompt over the steps</h1></header>`;
    if (!found) return html`${head}<${Failure} text=${error} />${!error && html`<p class="note">Looking through the recorded steps…</p>`}`;
    const [first, last] = [found.steps[0]?.step ?? 0, found.steps[found.steps.length - 1]?.step ?? 0];
    return html`${head}<${Failure} text=${error} />
      ${found.problems.map((text) => html`<p class="error" role="alert" key=${text}>${text}</p>`)}
      ${found.sets.sampled > 0 && html`<${Sets} ...${found} go=${onSet} />`}
      <div class="c-prompt"><h3>Prompt</h3><${Long} text=${found.prompt} name="of the prompt" /></div>
      <p class="note found">${found.set === HELD ? `One answer (${found.greedy}) at each of ${count(found.found, "evaluation")}` : `In ${grouped(found.found)} of ${count(found.recorded, "recorded step")}`}${found.left_out > 0 ? `; ${count(found.steps.length, "step")} of them are shown, evenly spread` : ""}.</p>
      ${found.steps.length > 1 && html`<div class="charts one"><${Chart} name="prompt" title="Reward" lines=${this.lines} range=${[first, last]} whole=${[first, last]} smooth=${0} cursor=${this.cursor} onOpen=${(step) => this.open(step)} /></div>`}
      ${found.set === HELD ? html`<${Answers} found=${found} link=${(step) => this.link(step)} />` : html`<ol class="c-over">${found.steps.map((s) => html`<li key=${s.step} data-step=${s.step}>
        <div class="c-about"><h3><a href=${this.link(s.step)}>Step ${grouped(s.step)}</a></h3>
          <p class="c-small"><span>reward ${num(s.mean)}${s.std == null ? "" : ` ± ${num(s.std)}`}</span>${s.right != null && html`<span>${s.right} of ${s.of} right</span>`}${s.failed > 0 && html`<span>${s.failed} failed</span>`}<span>${count(s.size, "response")}</span></p></div>
        ${s.best ? html`<${Answer} name="Best" r=${s.best} />` : html`<p class="note">No response has a reward.</p>`}
        ${s.common.count > 1 ? html`<${Answer} name="Most common" r=${s.common} note=${`, ${s.common.count} of ${s.size}`} />` : html`<p class="note">${s.size > 1 ? "All its responses differ." : ""}</p>`}
      </li>`)}</ol>`}`;
  }
}
