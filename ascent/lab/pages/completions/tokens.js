// A response as tokens. The elements are made by hand and not by Preact, for there may be thousands; text goes in as text.
import { Component, html } from "/static/shared.js";
import { classOf, numbersOf } from "./scales.js";

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

// Which tokens hold a part of what was searched for.
function hits(pieces, q) {
  const found = new Set();
  if (!q) return found;
  const text = pieces.join("").toLowerCase();
  const sought = q.toLowerCase();
  const ends = [];
  let end = 0;
  for (const piece of pieces) ends.push((end += piece.length));
  let i = 0;
  for (let at = text.indexOf(sought); at >= 0; at = text.indexOf(sought, at + sought.length)) {
    while (i < ends.length && ends[i] <= at) i += 1;
    for (let j = i; j < ends.length && (j ? ends[j - 1] : 0) < at + sought.length; j += 1) found.add(j);
  }
  return found;
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
    this.spans = shown.map((piece, i) => {
      const span = document.createElement("span");
      span.tabIndex = i === this.at ? 0 : -1;
      span.dataset.i = i;
      fill(span, piece);
      if (found.has(i)) span.classList.add("hit");
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

  move(to) {
    const next = Math.max(0, Math.min(this.spans.length - 1, to));
    this.spans[this.at].tabIndex = -1;
    this.at = next;
    this.spans[next].tabIndex = 0;
    this.spans[next].focus();
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
    this.move(to());
    event.preventDefault();
    event.stopPropagation();
  }

  on(event, keyboard) {
    const span = event.target.closest?.(".t");
    if (!span) return;
    const i = +span.dataset.i;
    if (keyboard) {
      this.spans[this.at].tabIndex = -1;
      this.at = i;
      span.tabIndex = 0;
    }
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
    const numbers = numbersOf(row, i);
    const token = row.pieces[i] === "" ? "(no text)" : `“${shownPiece(row.pieces[i])}”`;
    const place = `token ${i + 1} of ${row.pieces.length}`;
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
