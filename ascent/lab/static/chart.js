// One chart of curves over steps. uPlot keeps axes, scales and the dragged range; the lines are drawn in `curves.js`, each
// with its own steps, so that runs of different length need no common grid. Made once, then only told new numbers.
import { Component } from "./vendor/preact.mjs";
import uPlot from "./vendor/uplot.mjs";
import { drawBand, drawLine, drawMarked, drawMarks, drawOdd, lastOf, MARKS, powersOf, powerTicks, rangeOf, smoothed, valueAt } from "./curves.js";
import { grouped, html, indexAt, num, percent } from "./shared.js";

export const COLOURS = 8;
export const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 2], [1, 4], [10, 3, 2, 3, 2, 3]];
export const MANY = 8; // beyond so many, lines are thin, with marks instead of dashes, and without bands
const HIGH = 172;
const FONT = "12px Inter, system-ui, sans-serif";
const INCREMENTS = [1, 2, 5].flatMap((d) => Array.from({ length: 10 }, (_, e) => d * 10 ** e)).sort((a, b) => a - b);

// light-dark() is resolved on an element that is painted with it. Once a theme, not once a line.
const resolved = new Map();
document.addEventListener("themed", () => resolved.clear());
export function colourOf(name) {
  if (!resolved.has(name)) {
    const probe = document.getElementById("probe") ?? document.body.appendChild(Object.assign(document.createElement("i"), { id: "probe", hidden: true }));
    probe.style.color = `var(${name})`;
    resolved.set(name, getComputedStyle(probe).color);
  }
  return resolved.get(name);
}

// A number on an axis, with as many digits as tell it from its neighbours.
function tick(value, apart) {
  const size = Math.abs(value);
  if (size >= 1e6 || (apart < 1e-4 && size < 1)) return num(value);
  const digits = Math.max(0, -Math.floor(Math.log10(apart) + 1e-9));
  const [whole, part] = value.toFixed(+(digits + (String(+(apart / 10 ** -digits).toFixed(6)).includes(".") ? 1 : 0))).split(".");
  return (grouped(whole) + (part ? `.${part}` : "")).replace("-", "−");
}

// The one cursor of all charts of a page: a step, or null. Charts and listeners are told once a frame.
export class Cursor {
  step = null;
  followers = new Set();

  set(step) {
    if (step === this.step) return;
    this.step = step;
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      for (const follower of this.followers) follower(this.step);
    });
  }

  follow(follower) {
    this.followers.add(follower);
    return () => this.followers.delete(follower);
  }
}

// A line as in the chart: of its colour, with its dash, or (`marked`, where lines are many) its mark.
export const Swatch = ({ colour, marked, dash = DASHES[colour % DASHES.length] }) => html`<svg class=${`swatch s${colour % COLOURS}`} width="22" height="8" aria-hidden="true">
  <line x1="0" x2="22" y1="4" y2="4" stroke-dasharray=${marked ? "" : dash.join(" ")} />${marked && html`<path transform="translate(11 4)" d=${MARKS[colour % MARKS.length]} />`}</svg>`;

// ---- behind a chart: its numbers as a table, made when it is opened; and what there is to say of them ----
const MOST_ROWS = 1000;
const Table = ({ title, lines, say, axis }) => {
  const steps = [...new Set(lines.flatMap((line) => [...line.x]))].sort((a, b) => a - b);
  const wide = lines.some((line) => line.low);
  const cells = (line, step) => {
    const i = indexAt(line.x, step);
    const there = line.x[i] === step;
    const odd = line.odd.find(([at]) => at === step)?.[1];
    const value = !there ? "" : (odd ?? (Number.isNaN(line.y[i]) ? "" : say(line.y[i])));
    return html`<td>${value}</td>${wide && html`<td>${there && say(line.low?.[i])}</td><td>${there && say(line.high?.[i])}</td>`}`;
  };
  return html`<div class="scroll" role="region" tabindex="0" aria-label=${`${title}, as a table`}>
    <table>
      <thead><tr><th scope="col">${axis}</th>${lines.map((line) => html`<th scope="col">${line.label}</th>${wide && html`<th scope="col">smallest</th><th scope="col">largest</th>`}`)}</tr></thead>
      <tbody>${steps.slice(0, MOST_ROWS).map((step) => html`<tr key=${step}><th scope="row">${num(step)}</th>${lines.map((line) => cells(line, step))}</tr>`)}</tbody>
    </table>
    ${steps.length > MOST_ROWS && html`<p class="note">${steps.length - MOST_ROWS} more rows: zoom in to see them.</p>`}
  </div>`;
};

class Behind extends Component {
  render({ title, lines, say, axis, children }, { open }) {
    return html`<div class="behind-chart">
      <details onToggle=${(event) => this.setState({ open: event.currentTarget.open })}>
        <summary>Table</summary>
        ${open && html`<${Table} title=${title} lines=${lines} say=${say} axis=${axis} />`}
      </details>
      <p>${children}</p>
    </div>`;
  }
}

/* Props: name, title, unit, share (numbers from 0 to 1, said in percent), log (a log scale where that is possible), lines (of `lineOf`; null ones are left out),
   range [from, to], whole [first, last], smooth (steps), cursor (a Cursor), marks (steps at which something was noticed),
   y [low, high] (a fixed range), axis (what x counts, if not steps), grain, note, height, band (what a band is, if not the smallest and largest of a point's steps), onZoom(from, to) or onZoom(null) to zoom out, onOpen(step). */
export class Chart extends Component {
  get lines() {
    return this.props.lines;
  }

  say(value) {
    return typeof value !== "number" ? String(value ?? "–") : this.props.share ? percent(value) : num(value);
  }

  // The smallest part of the x axis that is told apart: a step.
  get grain() {
    return this.props.grain ?? 1;
  }

  snap(x) {
    return +(Math.round(x / this.grain) * this.grain).toPrecision(12);
  }

  options(width) {
    const axis = { stroke: () => colourOf("--quiet"), font: FONT, grid: { stroke: () => colourOf("--line"), width: 1 }, ticks: { show: false } };
    const ticks = (_, values, __, ___, apart) => values.map((v) => (v == null ? "" : this.powers ? num(+(10 ** v).toPrecision(3)) : this.props.share ? `${tick(100 * v, 100 * apart)}%` : tick(v, apart)));
    return {
      width, height: this.props.height ?? HIGH,
      padding: [9, 18, 0, 0],
      legend: { show: false },
      cursor: { x: false, y: false, points: { show: false }, drag: { x: this.props.onZoom != null, y: false, setScale: false, dist: 5 }, bind: { dblclick: () => () => this.props.onZoom?.(null) } },
      scales: { x: { time: false, range: () => this.span() }, y: { range: () => this.powers ?? this.props.y ?? rangeOf(this.lines, this.span(), this.props.share) } },
      axes: [
        { ...axis, size: 25, gap: 7, space: 56, incrs: () => INCREMENTS.map((n) => n * Math.min(1, this.grain)), values: (_, v) => v.map((n) => num(n)) },
        { ...axis, size: (_, texts) => Math.max(50, 10 + 7 * Math.max(0, ...(texts ?? []).map((t) => t.length))), gap: 4, space: 30, values: ticks },
      ],
      series: [{}, { show: true, points: { show: false } }],
      hooks: { draw: [(u) => this.draw(u)], setSelect: [(u) => this.selected(u)] },
    };
  }

  // The range in log10 where a log scale is asked for and possible. Shares have their own scale.
  get powers() {
    const { log, share, lines } = this.props;
    return log && !share ? powersOf(lines, this.span()) : null;
  }

  // What is on the x axis: half a step of room where there is only one.
  span() {
    const [from, to] = this.props.range;
    return from === to ? [from - 0.5, to + 0.5] : [from, to];
  }

  draw(u) {
    const { ctx, bbox } = u;
    const [y, x] = [u.scales.y, u.scales.x];
    const at = { ctx, left: bbox.left, top: bbox.top, width: bbox.width, height: bbox.height, x: [x.min, x.max], y: [y.min, y.max], log: this.powers != null, px: devicePixelRatio };
    const many = this.lines.length > MANY;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top - 2 * at.px, bbox.width + 2 * at.px, bbox.height + 4 * at.px);
    ctx.clip();
    drawMarked(at, this.props.marks ?? [], colourOf("--b"));
    for (const line of this.lines) {
      const colour = colourOf(`--s${line.colour % COLOURS}`);
      const dash = many ? [] : (line.dash ?? DASHES[line.colour % DASHES.length]);
      const smooth = smoothed(line, this.props.smooth);
      if (line.low && (!many || this.props.band)) drawBand(at, line, colour, (smooth ? 0.5 : 1) * (this.lines.length > 4 ? 0.06 : this.lines.length > 1 ? 0.12 : 0.17));
      const spread = line.x.length < 2 || (line.x.length - 1) * 8 * at.px < ((line.x[line.x.length - 1] - line.x[0]) * bbox.width) / (x.max - x.min);
      const points = (line.steps ?? line.bucket) === 1 && !many && (spread || line.gap < Infinity);
      drawLine(at, line, line.y, colour, { width: smooth ? 1 : many ? 1.4 : 1.9, dash: smooth ? [] : dash, alpha: smooth ? 0.32 : 1, points: points && !smooth });
      if (smooth) drawLine(at, line, smooth, colour, { width: many ? 1.6 : 2.1, dash });
      if (many) drawMarks(at, line, smooth ?? line.y, colour, line.colour);
      drawOdd(at, line, colour);
    }
    ctx.restore();
    this.point(this.props.cursor.step);
  }

  selected(u) {
    const { left, width } = u.select;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    if (width < 5) return;
    const [low, high] = [this.stepAt(left), this.stepAt(left + width)];
    this.props.onZoom?.(low, Math.max(high, low + this.grain));
  }

  // Drawn while it is near the screen; what changes elsewhere waits until it is.
  componentDidMount() {
    const themed = () => this.refresh(() => this.plot.redraw(false, true));
    const sizes = new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && this.plot && width !== this.plot.width) this.plot.setSize({ width, height: this.plot.height });
      this.point(this.props.cursor.step);
    });
    const near = new IntersectionObserver(([entry]) => {
      this.near = entry.isIntersecting;
      if (!this.near && this.hair) this.hair.hidden = true;
      if (!this.near) return;
      if (!this.plot) this.make();
      else if (this.stale) this.plot.setData(this.frame());
      this.stale = false;
      this.point(this.props.cursor.step);
    }, { rootMargin: "300px" });
    near.observe(this.place);
    sizes.observe(this.place);
    document.addEventListener("themed", themed);
    document.fonts?.ready.then(themed);
    this.leave = [this.props.cursor.follow((step) => this.point(step)), () => near.disconnect(), () => sizes.disconnect(), () => document.removeEventListener("themed", themed)];
  }

  make() {
    this.plot = new uPlot(this.options(Math.max(160, this.place.clientWidth)), this.frame(), this.place);
    const axis = this.plot.axes[1];
    const linear = axis.splits;
    axis.splits = (u, i, low, high, ...more) => (this.powers ? powerTicks(low, high) : linear(u, i, low, high, ...more));
    this.hair = this.plot.over.appendChild(Object.assign(document.createElement("div"), { className: "hair", hidden: true }));
    this.listen(this.plot.over);
  }

  frame() {
    return [this.span(), [null, null]];
  }

  refresh(draw) {
    if (this.near && this.plot) draw();
    else this.stale = true;
  }

  componentDidUpdate(before) {
    const { lines, range, smooth, log } = this.props;
    if (before.lines !== lines || before.log !== log || before.range[0] !== range[0] || before.range[1] !== range[1]) this.refresh(() => this.plot.setData(this.frame()));
    else if (before.smooth !== smooth || before.marks?.length !== this.props.marks?.length) this.refresh(() => this.plot.redraw(false));
    this.point(this.props.cursor.step);
  }

  componentWillUnmount() {
    for (const end of this.leave) end();
    this.plot?.destroy();
    this.plot = null;
  }

  // ---- the cursor ----
  stepAt(pixel) {
    const [from, to] = this.span();
    return this.snap(Math.min(to, Math.max(from, this.plot.posToVal(pixel, "x"))));
  }

  listen(over) {
    const stepOf = (event) => this.stepAt(event.clientX - over.getBoundingClientRect().left);
    let down = null;
    over.addEventListener("pointermove", (event) => this.props.cursor.set(stepOf(event)));
    over.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && this.props.cursor.set(null));
    over.addEventListener("pointerdown", (event) => (down = [event.clientX, event.clientY]));
    over.addEventListener("pointerup", (event) => {
      const still = down && Math.hypot(event.clientX - down[0], event.clientY - down[1]) < 4;
      down = null;
      if (!still || event.button !== 0) return;
      this.props.cursor.set(stepOf(event));
      if (event.pointerType === "mouse") this.clicked(stepOf(event));
    });
  }

  // A second click makes it a double click, which zooms out; so a single one waits a moment.
  clicked(step) {
    const [from, to] = this.props.whole ?? this.props.range;
    const zoomed = this.props.range[0] > from || this.props.range[1] < to;
    clearTimeout(this.opening);
    if (Date.now() - (this.before ?? 0) < 400) return;
    this.before = Date.now();
    this.opening = setTimeout(() => this.plot && this.props.onOpen?.(step), zoomed ? 280 : 0);
  }

  // The step under the cursor in every chart: a hair, and the numbers in the caption. Without one: the last numbers.
  point(step) {
    const { plot } = this;
    if (!plot || !this.near || !this.list) return;
    const [from, to] = this.span();
    const there = step != null && step >= from && step <= to;
    this.hair.hidden = !there;
    if (there) this.hair.style.transform = `translateX(${Math.round(plot.valToPos(step, "x"))}px)`;
    const places = this.list.querySelectorAll("output");
    this.lines.forEach((line, i) => {
      const found = there ? valueAt(line, step) : lastOf(line, to);
      const late = there && found && Math.abs(found.at - step) > line.bucket / 2 ? ` at ${num(found.at)}` : "";
      const gone = !there && found && found.at + line.bucket / 2 < from; // it has no point in sight
      const text = found && !gone ? this.say(found.value) + late : "–";
      if (places[i] && places[i].textContent !== text) places[i].textContent = text;
    });
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { cursor, onZoom, onOpen } = this.props;
    const [from, to] = this.props.range;
    const step = cursor.step ?? to;
    const one = Math.max(this.grain, this.lines[0]?.bucket ?? 1) * (event.shiftKey ? 10 : 1);
    const go = (next) => cursor.set(this.snap(Math.min(to, Math.max(from, next))));
    const zoom = (factor) => {
      const wide = Math.max(this.grain, (to - from) * factor);
      const low = this.snap(step - ((step - from) / (to - from || 1)) * wide);
      onZoom?.(low, this.snap(low + wide));
    };
    const act = {
      ArrowLeft: () => go(step - one), ArrowRight: () => go(step + one), Home: () => go(from), End: () => go(to),
      "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), 0: () => onZoom?.(null), Enter: () => onOpen?.(step),
      Escape: () => cursor.set(null),
    }[event.key];
    if (!act) return;
    act();
    event.preventDefault();
    event.stopPropagation();
  }

  render({ name, title, unit, note, lines, height, log, share, axis = "step", onZoom, onOpen, band: words }) {
    const strange = lines.reduce((n, line) => n + line.odd.length, 0);
    const wide = lines.find((line) => line.low);
    const many = lines.length > MANY;
    const band = many ? "" : ", band: smallest to largest";
    return html`<figure class="curves" data-chart=${name}>
      <figcaption><h3>${title}${unit && html` <span>${unit}</span>`}</h3>
        <ul class=${many ? "many" : ""} tabindex=${many ? 0 : null} aria-label=${`${title}: lines and their values`} ref=${(list) => (this.list = list)}>${lines.map((line) => html`<li key=${line.label} title=${line.full}><${Swatch} colour=${line.colour} dash=${line.dash} marked=${many} /><span>${line.label}</span><output></output></li>`)}</ul>
      </figcaption>
      <div class="plot" style=${{ minHeight: `${height ?? HIGH}px` }} role="application" tabindex="0" aria-roledescription="chart" ref=${(place) => (this.place = place)}
        aria-label=${`${title}. Arrows move over the ${axis}s${onZoom ? ", plus and minus zoom" : ""}${onOpen ? ", Enter opens the completions" : ""}; the numbers are in the table below.`} onKeyDown=${(e) => this.key(e)}></div>
      <${Behind} title=${title} lines=${lines} axis=${axis} say=${(v) => this.say(v)}>
        ${strange > 0 && html`<b>${strange} not finite, marked at the edge</b>`}
        ${wide && html`<span>${words ?? `mean of ${num(wide.bucket)} steps${band}`}</span>`}
        ${log && !share && lines.length > 0 && html`<span>${this.powers ? "log scale" : "not on a log scale: not all is above 0"}</span>`}
        ${note && html`<span>${note}</span>`}
      <//>
    </figure>`;
  }
}
