// A group: its prompt, and its responses. Tokens are asked for and made when a response comes near the screen.
import { Component, completionsLink, copy, count, HELD, html, num, setOf, signed } from "../../shared.js";
import { FEW, placesOf, Tokens } from "./tokens.js";

const AT_ONCE = 20000; // tokens of one group that are asked for together
const NEAR = "600px";

// A text with what was searched for marked.
function Marked({ text, q }) {
  const places = placesOf(text, q ?? "");
  const marked = places.flatMap((at, i) => [text.slice(i ? places[i - 1] + q.length : 0, at), html`<mark>${text.slice(at, at + q.length)}</mark>`]);
  return places.length ? [...marked, text.slice(places.at(-1) + q.length)] : text;
}

// Text that is cut after some lines, with a button for the rest.
export class Long extends Component {
  render({ text, q, most = 480, name }, { open }) {
    const long = text.length > most || text.split("\n").length > 7;
    const cut = long && !open && !placesOf(text, q ?? "").length;
    const lines = text.split("\n").slice(0, 6).join("\n").slice(0, most);
    return html`<div class="c-long"><div class="c-text"><${Marked} text=${cut ? `${lines} …` : text} q=${q} /></div>
      ${long && (cut || open) && html`<button type="button" class="plain" onClick=${() => this.setState({ open: !open })}>${open ? "Less" : `All ${name ?? ""} (${count(text.length, "character")})`}</button>`}</div>`;
  }
}

const Marks = ({ r }) => html`<span class="c-marks">
  ${r.status === "failed" && html`<span class="c-mark failed">! no reward</span>`}
  ${r.status !== "failed" && r.correct === true && html`<span class="c-mark right">✓ right</span>`}
  ${r.status !== "failed" && r.correct === false && html`<span class="c-mark wrong">✗ wrong</span>`}
  ${r.truncated && html`<span class="c-mark cut">✂ cut off</span>`}
</span>`;

class Response extends Component {
  componentDidMount() {
    this.watch = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting) return;
      this.watch.disconnect();
      this.setState({ near: true });
      this.props.need(this.props.r.sample);
    }, { rootMargin: NEAR });
    this.watch.observe(this.place);
  }

  componentWillUnmount() {
    this.watch.disconnect();
  }

  body({ r, row, scale, q, tell, group }, { near, all }) {
    if (row && near && row.pieces.length) {
      const few = all ? row.pieces.length : Math.min(FEW, row.pieces.length);
      const left = row.pieces.length - few;
      return html`<${Tokens} row=${row} scale=${scale} few=${few} q=${q} tell=${tell} label=${`Tokens of sample ${r.sample}, group ${group.group}`} />
        ${(left > 0 || all) && html`<button type="button" class="plain" onClick=${() => this.setState({ all: !all })}>${all ? "Fewer tokens" : `All ${count(row.pieces.length, "token")}`}</button>`}`;
    }
    if (r.text === "") return html`<p class="note">An empty response.</p>`;
    return html`<${Long} text=${r.text} q=${q} most=${900} name="of it" />`;
  }

  render(props, state) {
    const { r, held, times, open, onOpen } = props;
    const parts = Object.entries(r.parts);
    return html`<li class=${`c-response ${r.status}`} data-sample=${r.sample} ref=${(place) => (this.place = place)}>
      <div class="c-about">
        <p class="c-reward"><b>${r.status === "failed" ? "–" : num(r.reward)}</b> <span>reward</span> <${Marks} r=${r} />${times > 1 && html` <button type="button" class="c-times" aria-expanded=${String(open)} aria-label=${`${times} identical responses, ${open ? "fold them" : "show each"}`} title=${open ? "Fold them" : "The same text and reward: show each"} onClick=${onOpen}>× ${times}</button>`}</p>
        <p class="c-small">${!held && html`<span>sample ${r.sample}</span>`}${r.length != null && html`<span>${count(r.length, "token")}</span>`}${r.advantage != null && html`<span title="advantage, mean over its tokens">advantage ${signed(r.advantage)}</span>`}</p>
        ${parts.length > 0 && html`<dl class="c-parts">${parts.map(([name, value]) => html`<div key=${name}><dt>${name.replace(/^rewards\//, "")}</dt><dd>${num(value)}</dd></div>`)}</dl>`}
        ${r.extra && html`<dl class="c-parts">${Object.entries(r.extra).map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`}
        ${r.reason && html`<p class="c-reason">${r.reason}</p>`}
      </div>
      <div class="c-body">${this.body(props, state)}
        <div class="c-after"><button type="button" class="plain" onClick=${(e) => copy(e, r.text)}>Copy</button>
          <details onToggle=${(e) => this.setState({ open: e.currentTarget.open })}><summary>Plain text</summary>${state.open && html`<pre tabindex="0">${r.text}</pre>`}</details></div>
      </div>
    </li>`;
  }
}

// Responses with the same text and the same outcome, together, each such lot where its first one stands.
function alike(responses) {
  const lots = new Map();
  for (const r of responses) {
    const key = JSON.stringify([r.text, r.reward, r.status, r.correct, r.truncated]);
    lots.set(key, [...(lots.get(key) ?? []), r]);
  }
  return [...lots];
}

const KINDS = { "all right": "✓ all right", "all wrong": "✗ all wrong", mixed: "◐ mixed", equal: "= all equal" };

// The rewards of a group in numbers; one number has no spread.
function rewards({ mean, std, low, high, size }) {
  if (mean == null) return "no reward";
  if (size === 1) return `reward ${num(mean)}`;
  return std == null ? `reward: mean ${num(mean)}` : `reward: mean ${num(mean)}, spread ${num(std)}, ${num(low)} to ${num(high)}`;
}

/* Props: id, set, step, group, tokens (a Map "group/sample" -> row), ask(group, sample|null), scale, q, tell, fold (are identical responses shown once). */
export class Group extends Component {
  need(sample) {
    const { group, ask, tokens } = this.props;
    if (tokens === null) return;
    const long = group.responses.reduce((sum, r) => sum + (r.length ?? 0), 0) > AT_ONCE;
    ask(group.group, long ? sample : null);
  }

  // What is shown of the responses: all, or the first of each lot that is not opened.
  responses() {
    const { set, group, fold, tokens, scale, q, tell } = this.props;
    const one = (r, more) => html`<${Response} key=${r.sample} held=${set === HELD} r=${r} group=${group} row=${tokens?.get(`${group.group}/${r.sample}`)} scale=${scale} q=${q} tell=${tell} need=${(s) => this.need(s)} ...${more} />`;
    if (!fold) return group.responses.map((r) => one(r));
    return alike(group.responses).flatMap(([key, [first, ...others]]) => {
      const open = Boolean(this.state[key]);
      const head = one(first, { times: 1 + others.length, open, onOpen: () => this.setState({ [key]: !open }) });
      return open ? [head, ...others.map((r) => one(r))] : [head];
    });
  }

  render({ id, set, group, q }) {
    const held = set === HELD;
    const right = group.right != null && group.size > 1 && `${group.right} of ${group.of} right`;
    const about = held ? [] : [rewards(group), right, group.failed > 0 && `${group.failed} failed`];
    const left = group.size - group.shown;
    return html`<section class="c-group" aria-labelledby=${`group-${group.group}`} data-group=${group.group}>
      <header><h2 id=${`group-${group.group}`}>${held ? "Prompt" : "Group"} ${group.group}</h2>
        ${!held && KINDS[group.kind] && html`<span class="c-kind">${KINDS[group.kind]}</span>`}
        <span>${about.filter(Boolean).join(" · ")}</span>
        <a href=${completionsLink(id, null, { set: setOf(set), key: group.key })}>This prompt over the steps</a></header>
      <div class="c-prompt"><h3>Prompt</h3><${Long} text=${group.prompt} q=${q} name="of the prompt" /></div>
      ${group.answer != null && html`<div class="c-prompt"><h3>Wanted</h3><${Long} text=${group.answer} /></div>`}
      <ol class="c-responses">${this.responses()}</ol>
      ${left > 0 && html`<p class="note">${count(left, "more response")} of this group ${left === 1 ? "is" : "are"} not shown: ${left === 1 ? "it is" : "they are"} not what was asked for.</p>`}
    </section>`;
  }
}
