// A response as tokens. The elements are made by hand and not by Preact, for there may be thousands; text goes in as text.
import { Component, html, num, percent, signed } from "../../shared.js";

// ---- numbers as colours: into which of a few classes a number falls, and what the classes mean ----
// A class is never colour alone: the line below a token is thicker the further out it is, and dashed on the side below
// the middle. A signed number has one of n4 … n1, z, p1 … p4, by the edges of its size.
const above = (size, edges) => edges.filter((edge) => size >= edge).length;
const sided = (value, edges) => (above(Math.abs(value), edges) ? `${value < 0 ? "n" : "p"}${above(Math.abs(value), edges)}` : "z");
const stepped = (value, edges) => `q${above(value, edges)}`;
const SURE = [0.95, 0.8, 0.5, 0.2, 0.05, 0.01];
const SPREAD = [0.1, 0.5, 1, 1.5, 2, 3];
const MOVED = [0.02, 0.05, 0.1, 0.2];
const SIDES = ["n4", "n3", "n2", "n1", "z", "p1", "p2", "p3", "p4"];
const STEPS = ["q0", "q1", "q2", "q3", "q4", "q5", "q6"];

// 1, 2 or 5 times a power of ten, at least this.
function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return +([1, 2, 5, 10].find((d) => d * power >= value * 0.999) * power).toPrecision(3);
}

const MARKS = { low: "n4", high: "p4", dual: "n2" };
const CLIPS = { low: "clipped low ▼", high: "clipped high ▲", dual: "dual clip ◆" };

// `largest` is the largest advantage of the page, so that the colours of one page can be compared.
export function scaleOf(colour, largest) {
  const top = nice(largest);
  const edges = [0.02, 0.25, 0.5, 0.75].map((part) => part * top);
  if (colour === "greedy") return { ...scaleOf("logp", largest), words: `probability of the token, in steps at ${SURE.map(percent).join(", ")}` };
  const scale = {
    advantage: { classes: SIDES, ends: [`−${num(top)}`, "0", `+${num(top)}`], of: (v) => sided(v, edges), words: "below 0: dashed line; above 0: solid line" },
    logp: { classes: STEPS, ends: ["p > 95%", "", "p < 1%"], of: (v) => stepped(-v, SURE.map((p) => -Math.log(p))), words: `probability when it was sampled, in steps at ${SURE.map(percent).join(", ")}` },
    entropy: { classes: STEPS, ends: ["0", "", "over 3 nats"], of: (v) => stepped(v, SPREAD), words: `in steps at ${SPREAD.join(", ")} nats` },
    ratio: {
      classes: SIDES, ends: ["under 0.83", "1", "over 1.2"], of: (v) => sided(Math.log(v), MOVED.map((m) => Math.log(1 + m))),
      words: "ρ at the last update that saw it, in steps at 2, 5, 10 and 20%; below 1: dashed line",
    },
    clipped: { classes: ["n4", "z", "p4"], ends: ["▼ low", "not clipped", "▲ high"], of: (v) => MARKS[v] ?? "z", words: "clipped tokens have a frame and a mark" },
  }[colour];
  return scale && { field: colour, ...scale };
}

export const COLOURS = [["advantage", "advantage"], ["logp", "log-prob"], ["entropy", "entropy"], ["ratio", "ratio"], ["clipped", "clipped or not"]];

// The class of a token; "odd": not a finite number; "": nothing is known.
function classOf(scale, row, i) {
  const values = row[scale.field];
  const value = values?.[i];
  if (values && scale.field === "clipped") return scale.of(value);
  return value == null ? "" : typeof value === "number" ? scale.of(value) : "odd";
}

// Every number of a token: its name, the field of the row that holds it, and how it is said.
const NUMBERS = [
  ["log-prob", "logp", (v) => num(v) + (typeof v === "number" ? ` (p ${percent(Math.exp(v))})` : "")], ["sampler's", "logp_sampler"], ["reference's", "logp_ref"],
  ["entropy", "entropy"], ["advantage", "advantage", signed], ["ratio", "ratio"], ["response's ratio", "sequence_ratio"], ["value", "value"],
  ["clipped", "clipped", (v) => (v ? CLIPS[v].replace("clipped ", "") : "no")],
];
const numbersOf = (row, i) => NUMBERS.filter(([, field]) => row[field] != null).map(([name, field, say = num]) => [name, say(Array.isArray(row[field]) ? row[field][i] : row[field])]);

// ---- tokens ----
export const FEW = 160; // tokens that are shown before more are asked for

// Spaces and line ends keep their place, so that what is selected and copied is the text; a mark stands over them.
function fill(span, piece) {
  if (piece === "") {
    span.classList.add("nothing");
    span.append("∅");
    return;
  }
  for (const [part, blank] of piece.matchAll(/( |\t|\r?\n|\r)|[^ \t\r\n]+/g)) {
    if (!blank) {
      span.append(part);
      continue;
    }
    const mark = document.createElement("i");
    mark.className = blank === " " ? "sp" : blank === "\t" ? "tab" : "nl";
    mark.textContent = blank.replace(/\r\n?/, "\n");
    span.append(mark);
  }
}

// Where a text has what was searched for.
export function placesOf(text, q) {
  const [low, sought, places] = [text.toLowerCase(), q.toLowerCase(), []];
  for (let at = sought ? low.indexOf(sought) : -1; at >= 0; at = low.indexOf(sought, at + sought.length)) places.push(at);
  return places;
}

// Which tokens hold a part of what was searched for.
function hits(pieces, q) {
  const found = new Set();
  const ends = [];
  let end = 0;
  for (const piece of pieces) ends.push((end += piece.length));
  let i = 0;
  for (const at of placesOf(pieces.join(""), q)) {
    while (i < ends.length && ends[i] <= at) i += 1;
    for (let j = i; j < ends.length && (j ? ends[j - 1] : 0) < at + q.length; j += 1) found.add(j);
  }
  return found;
}

// The heading of each message (its role and its turn's reward), by its first token. The style sheet shows the text, so that it cannot be copied.
function headsOf(row) {
  const heads = new Map();
  let at = 0;
  for (const { role, tokens, description } of row.messages ?? []) {
    const head = document.createElement("span");
    head.className = `c-message ${role}`;
    head.dataset.words = `${role}, ${description}`;
    heads.set(at, head);
    at += tokens;
  }
  return heads;
}

const shownPiece = (piece) => piece.replaceAll(" ", "␣").replaceAll("\t", "⇥").replace(/\r?\n|\r/g, "↵");

/* Props: row (of /api/view/tokens), scale, few (how many tokens), q, label, tell(row, i, keyboard) for the readout. */
export class Tokens extends Component {
  shouldComponentUpdate(next) {
    const { row, scale, few, q } = this.props;
    return row !== next.row || scale !== next.scale || few !== next.few || q !== next.q;
  }

  componentDidMount() {
    this.at = 0;
    this.place.addEventListener("focusin", (event) => this.on(event, true));
    this.made();
  }

  componentDidUpdate(before) {
    const { row, few, q } = this.props;
    if (before.row !== row || before.few !== few || before.q !== q) this.made();
    else this.paint();
  }

  made() {
    const { row, few, q } = this.props;
    const shown = row.pieces.slice(0, few);
    const found = hits(shown, q);
    const all = document.createDocumentFragment();
    const heads = headsOf(row);
    this.spans = shown.map((piece, i) => {
      const span = document.createElement("span");
      span.tabIndex = i === this.at ? 0 : -1;
      span.dataset.i = i;
      fill(span, piece);
      if (found.has(i)) span.classList.add("hit");
      if (row.mask?.[i] === false) span.classList.add("observed");
      if (heads.has(i)) all.append(heads.get(i));
      else if (i && row.mask && row.mask[i] !== row.mask[i - 1]) all.append(document.createElement("br"));
      span.dataset.kept = span.className;
      all.append(span);
      return span;
    });
    this.place.replaceChildren(all);
    this.paint();
  }

  paint() {
    const { row, scale } = this.props;
    this.spans.forEach((span, i) => {
      const clip = row.clipped?.[i];
      span.className = `t ${span.dataset.kept} ${classOf(scale, row, i)}${clip ? ` clip ${clip}` : ""}`;
    });
  }

  // The one token that Tab leads to.
  reach(i) {
    this.spans[this.at].tabIndex = -1;
    this.spans[i].tabIndex = 0;
    this.at = i;
  }

  // The token of the line above or below that is nearest.
  line(way) {
    const here = this.spans[this.at].getBoundingClientRect();
    let best = null;
    let top = null;
    for (let i = this.at + way; i >= 0 && i < this.spans.length; i += way) {
      const box = this.spans[i].getBoundingClientRect();
      if (Math.abs(box.top - here.top) < here.height / 2) continue;
      if (top === null) top = box.top;
      if (Math.abs(box.top - top) > here.height / 2) break;
      const apart = Math.abs(box.left - here.left);
      if (!best || apart < best.apart) best = { i, apart };
    }
    return best ? best.i : this.at;
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const to = { ArrowLeft: () => this.at - 1, ArrowRight: () => this.at + 1, ArrowUp: () => this.line(-1), ArrowDown: () => this.line(1), Home: () => 0, End: () => this.spans.length - 1 }[event.key];
    if (!to) return;
    this.reach(Math.max(0, Math.min(this.spans.length - 1, to())));
    this.spans[this.at].focus();
    event.preventDefault();
    event.stopPropagation();
  }

  on(event, keyboard) {
    const span = event.target.closest?.(".t");
    if (!span) return;
    const i = +span.dataset.i;
    if (keyboard) this.reach(i);
    this.props.tell(this.props.row, i, keyboard);
  }

  render({ label }) {
    return html`<div class="c-tokens" role="group" aria-label=${label} ref=${(place) => (this.place = place)}
      onKeyDown=${(e) => this.key(e)} onMouseOver=${(e) => this.on(e, false)}></div>`;
  }
}

// The numbers of one token, for the whole page; the keyboard's are also spoken.
export class Readout extends Component {
  componentDidMount() {
    this.props.here(this);
  }

  show(row, i, keyboard) {
    this.setState({ row, i, spoken: keyboard });
  }

  render(_, { row, i, spoken }) {
    if (!row || i >= row.pieces.length) return html`<p class="c-readout note">Point at a token, or move to it with Tab and the arrows: its numbers stand here.</p>`;
    const observed = row.mask?.[i] === false; // somebody else's words: the policy has no numbers for them
    const numbers = observed ? [["observed", "not drawn by the policy, and not trained"]] : numbersOf(row, i);
    const token = row.pieces[i] === "" ? "(no text)" : `“${shownPiece(row.pieces[i])}”`;
    const place = `token ${i + 1} of ${row.pieces.length}${row.turn ? `, turn ${row.turn[i] + 1}` : ""}`;
    return html`<div class="c-readout">
      <p><b class="piece">${token}</b> <span>${place}, id ${row.ids[i]}</span></p>
      <dl>${numbers.map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>
      <p class="sr" role="status" aria-live="polite">${spoken ? `${token}, ${place}: ${numbers.map((pair) => pair.join(" ")).join(", ")}` : ""}</p>
    </div>`;
  }
}

export const Legend = ({ scale, absent, note }) => html`<div class="c-legend">
  <span class="c-ramp" aria-hidden="true"><span>${scale.ends[0]}</span>${scale.classes.map((name, i) => html`<i class=${`t ${name}${scale.field === "clipped" && name !== "z" ? ` clip ${i ? "high" : "low"}` : ""}`} key=${name}>a</i>`)}<span>${scale.ends[2]}</span></span>
  <span class="note">${absent ?? scale.words}</span>
  ${note && html`<span class="note why">${note}</span>`}
</div>`;
