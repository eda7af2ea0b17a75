// Curves as arrays of numbers: where they have gaps, smoothing, their range, their value at a step, and their drawing.
// A line is {label, colour, x, y, low, high, bucket, odd, gap}; NaN stands for what was not measured.
import { indexAt } from "./shared.js";

export const filled = (values) => Float64Array.from(values, (value) => value ?? NaN);

// One metric of one run of `/api/view/curves` as a line; null if the run has none of it.
export function lineOf(run, metric, label, colour) {
  const found = run?.metrics[metric];
  if (!found) return null;
  const x = (run.steps ??= filled(run.x)); // shared by the lines of the run
  const y = filled(found.mean);
  const wide = run.bucket > 1 && found.low;
  const low = wide ? filled(found.low) : null;
  const high = wide ? filled(found.high) : null;
  return { label, metric, colour, x, y, low, high, bucket: run.bucket, odd: run.nonfinite?.[metric] ?? [], gap: bridge(x, y) };
}

// Points further apart than this are not joined. What is measured every ten steps has null between and is joined all
// the same; what is measured at every step has a gap where it was not.
function bridge(x, y) {
  const known = x.filter((_, i) => !Number.isNaN(y[i]));
  if (known.length === y.length) return Infinity;
  const apart = known.subarray(1).map((step, i) => step - known[i]).sort();
  const n = apart.length;
  return n ? Math.max(1.5 * apart[n >> 1], 1.05 * apart[Math.floor(0.9 * (n - 1))]) : 0;
}

// Exponential in steps: a value that is `steps` back counts 1/e; corrected for the start. Gaps stay.
export function smoothed(line, steps) {
  if (!steps) return null;
  if (line.smooth?.steps === steps) return line.smooth.y;
  let [sum, weight, last] = [0, 0, NaN];
  const found = line.y.map((value, i) => {
    if (Number.isNaN(value)) return NaN;
    const keep = Number.isNaN(last) ? 0 : Math.exp((last - line.x[i]) / steps);
    sum = keep * sum + value;
    weight = keep * weight + 1;
    last = line.x[i];
    return sum / weight;
  });
  line.smooth = { steps, y: found };
  return found;
}

// The smallest, the smallest above 0 and the largest that is drawn between two steps.
function extent(lines, [from, to]) {
  let [low, above, high] = [Infinity, Infinity, -Infinity];
  const take = (value) => {
    if (value < low) low = value;
    if (value > 0 && value < above) above = value;
    if (value > high) high = value;
  };
  for (const { x, y, low: lows, high: highs } of lines) {
    for (let i = 0; i < x.length; i += 1) {
      if (x[i] < from || x[i] > to) continue;
      take(y[i]);
      if (lows) take(lows[i]);
      if (highs) take(highs[i]);
    }
  }
  return [low, above, high];
}

// The range of the y axis: what is drawn, with some air; shares stay within 0 and 1.
export function rangeOf(lines, span, share) {
  const [low, , high] = extent(lines, span);
  if (low > high) return [0, 1];
  if (share && low >= 0 && high <= 1) return [0, high > 0.5 ? 1.02 : high === 0 ? 1 : high * 1.12];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
  const air = 0.07 * (high - low);
  return [low >= 0 && low < 0.4 * high ? 0 : low - air, high <= 0 && high > 0.4 * low ? 0 : high + air];
}

// A log scale is one of powers of ten: what is drawn is log10, and 0 lies at the lower edge. Only where nothing is below
// 0 and something above it between two steps; else null.
export function powersOf(lines, span) {
  const [low, above, high] = extent(lines, span);
  if (low < 0 || !(high > 0)) return null;
  const air = Math.max(0.05, 0.07 * Math.log10(high / above));
  return [Math.log10(above) - air, Math.log10(high) + air];
}

// Where a log axis has its ticks, as log10: powers of ten, or between them if there are too few.
export function powerTicks(low, high, most = 6) {
  const whole = (factors) => {
    const found = [];
    for (let e = Math.floor(low); e <= Math.ceil(high); e += 1) for (const f of factors) found.push(e + Math.log10(f));
    return found.filter((v) => v >= low && v <= high);
  };
  const tens = whole([1]);
  if (tens.length > most) return tens.filter((e) => e % Math.ceil(tens.length / most) === 0);
  const few = [[1], [1, 3], [1, 2, 5], [1, 1.5, 2, 3, 4, 5, 7]].map(whole).find((found) => found.length >= 2);
  return few ?? [low, (low + high) / 2, high];
}

// What a line says of a step: {at, value} of the point there, or of the last one measured before it; null: nothing.
export function valueAt(line, step) {
  const { x, y, gap, bucket } = line;
  if (!x.length) return null;
  const strange = line.odd.find(([at]) => Math.abs(at - step) < 0.5 * bucket);
  if (strange) return { at: step, value: strange[1] };
  let i = indexAt(x, step);
  if (x[i] - step > bucket / 2 || (step > x[x.length - 1] + bucket / 2)) return null;
  while (i >= 0 && Number.isNaN(y[i]) && step - x[i] <= gap) i -= 1;
  return i < 0 || Number.isNaN(y[i]) || (gap < Infinity && step - x[i] > gap) ? null : { at: x[i], value: y[i], i };
}

export function lastOf(line, to = Infinity) {
  const i = line.y.findLastIndex((value, j) => line.x[j] <= to && !Number.isNaN(value));
  return i < 0 ? null : { at: line.x[i], value: line.y[i], i };
}

// ---- drawing, in the pixels of a canvas: `at` is {ctx, left, top, width, height, x: [from, to], y: [low, high], log, px};
// with `log`, y is in log10 ----
const across = (at, step) => at.left + ((step - at.x[0]) * at.width) / (at.x[1] - at.x[0]);
const down = (at, value) => {
  const y = !at.log ? value : value > 0 ? Math.max(Math.log10(value), at.y[0]) : at.y[0];
  return at.top + ((at.y[1] - y) * at.height) / (at.y[1] - at.y[0]);
};

// Calls `each(left, top, fresh, i)` for every point that was measured; nothing joins a fresh one to the point before it.
function trace(at, { x, gap }, y, each) {
  let before = NaN;
  for (let i = 0; i < x.length; i += 1) {
    if (Number.isNaN(y[i])) continue;
    each(across(at, x[i]), down(at, y[i]), !(x[i] - before <= gap), i);
    before = x[i];
  }
}

export function drawBand(at, line, colour, alpha) {
  const { ctx } = at;
  const half = 0.6 * at.px;
  let back = [];
  const close = () => {
    for (const [left, foot] of back.reverse()) ctx.lineTo(left, foot);
    back = [];
  };
  ctx.beginPath();
  trace(at, line, line.high, (left, top, fresh, i) => {
    if (fresh) close();
    ctx[fresh ? "moveTo" : "lineTo"](left, top - half);
    back.push([left, down(at, line.low[i]) + half]);
  });
  close();
  ctx.globalAlpha = alpha;
  ctx.fillStyle = colour;
  ctx.fill();
  ctx.globalAlpha = 1;
}

export function drawLine(at, line, y, colour, { width, dash, alpha = 1, points = false }) {
  const { ctx, px } = at;
  ctx.globalAlpha = alpha;
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = width * px;
  ctx.lineJoin = "bevel";
  ctx.setLineDash(dash.map((d) => d * px));
  ctx.beginPath();
  const dots = []; // every point, or those that nothing joins
  let alone = false;
  trace(at, line, y, (left, top, fresh) => {
    ctx[fresh ? "moveTo" : "lineTo"](left, top);
    if (alone && !fresh && !points) dots.pop();
    if (fresh || points) dots.push([left, top]);
    alone = fresh;
  });
  ctx.stroke();
  ctx.setLineDash([]);
  for (const [left, top] of dots) {
    ctx.beginPath();
    ctx.arc(left, top, 2.3 * px, 0, 2 * Math.PI);
    ctx.fill();
  }
  ctx.globalAlpha = 1;
}

// A small shape, as an SVG path around its place.
function stamp({ ctx, px }, shape, left, top, paint = "fill") {
  ctx.save();
  ctx.translate(left, top);
  ctx.scale(px, px);
  ctx[paint](new Path2D(shape));
  ctx.restore();
}

// Where lines are many, a mark of its own shape every so often tells one from another (dashes are slow, and all look alike).
export const MARKS = ["M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0", "M-3-3h6v6h-6z", "M0-4l3.6 7h-7.2z", "M0-4l4 4l-4 4l-4-4z", "M-4-1h3v-3h2v3h3v2h-3v3h-2v-3h-3z", "M0 4l3.6-7h-7.2z"];

export function drawMarks(at, line, y, colour, index) {
  const every = 110 * at.px;
  let next = at.left + ((index * 37 * at.px) % every);
  at.ctx.fillStyle = colour;
  trace(at, line, y, (left, top) => {
    if (left < next) return;
    next = left + every;
    stamp(at, MARKS[index % MARKS.length], left, top);
  });
}

// What is not finite has no place on the axis: a mark at the edge, ▲ for inf, ▼ for −inf, ✕ for nan.
export function drawOdd(at, line, colour) {
  at.ctx.fillStyle = at.ctx.strokeStyle = colour;
  at.ctx.lineWidth = 1.6;
  for (const [step, kind] of line.odd) {
    if (step < at.x[0] || step > at.x[1]) continue;
    const below = kind.startsWith("-");
    const top = at.top + (below ? at.height - 4 * at.px : 4 * at.px);
    if (/inf/i.test(kind)) stamp(at, below ? "M-4-4h8l-4 8z" : "M-4 4h8l-4-8z", across(at, step), top);
    else stamp(at, "M-4-4l8 8m0-8l-8 8", across(at, step), top, "stroke");
  }
}

// Steps at which something was noticed: a dotted line with a small flag at its foot.
export function drawMarked(at, steps, colour) {
  const { ctx, px } = at;
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = px;
  for (const step of steps) {
    if (step < at.x[0] || step > at.x[1]) continue;
    const [left, foot] = [across(at, step), at.top + at.height];
    ctx.setLineDash([px, 4 * px]);
    ctx.beginPath();
    ctx.moveTo(left, at.top);
    ctx.lineTo(left, foot);
    ctx.stroke();
    ctx.setLineDash([]);
    stamp(at, "M0-9l6 3l-6 3z", left, foot);
  }
}
