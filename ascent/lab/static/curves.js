// Curves as arrays of numbers: where they have gaps, smoothing, their range, their value at a step, and their drawing.
// A line is {label, colour, x, y, low, high, bucket, odd, gap}; NaN stands for what was not measured.

const filled = (values) => {
  const found = new Float64Array(values.length);
  for (let i = 0; i < values.length; i += 1) found[i] = values[i] ?? NaN;
  return found;
};

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
  const apart = new Float64Array(y.length);
  let n = 0;
  let last = NaN;
  for (let i = 0; i < y.length; i += 1) {
    if (Number.isNaN(y[i])) continue;
    if (!Number.isNaN(last)) apart[n++] = x[i] - last;
    last = x[i];
  }
  if (n === y.length - 1) return Infinity;
  const sorted = apart.subarray(0, n).sort();
  return n ? Math.max(1.5 * sorted[n >> 1], 1.05 * sorted[Math.floor(0.9 * (n - 1))]) : 0;
}

// Exponential in steps: a value that is `steps` back counts 1/e; corrected for the start. Gaps stay.
export function smoothed(line, steps) {
  if (!steps) return null;
  if (line.smooth?.steps === steps) return line.smooth.y;
  const { x, y } = line;
  const found = new Float64Array(y.length);
  let sum = 0;
  let weight = 0;
  let last = NaN;
  for (let i = 0; i < y.length; i += 1) {
    if (Number.isNaN(y[i])) {
      found[i] = NaN;
      continue;
    }
    const keep = Number.isNaN(last) ? 0 : Math.exp((last - x[i]) / steps);
    sum = keep * sum + y[i];
    weight = keep * weight + 1;
    last = x[i];
    found[i] = sum / weight;
  }
  line.smooth = { steps, y: found };
  return found;
}

// The smallest and largest that is drawn between two steps, with some air; shares stay within 0 and 1.
export function rangeOf(lines, [from, to], share) {
  let low = Infinity;
  let high = -Infinity;
  for (const { x, y, low: lows, high: highs } of lines) {
    const a = lows ?? y;
    const b = highs ?? y;
    for (let i = 0; i < x.length; i += 1) {
      if (x[i] < from || x[i] > to) continue;
      if (a[i] < low) low = a[i];
      if (b[i] > high) high = b[i];
    }
  }
  if (low > high) return [0, 1];
  if (share && low >= 0 && high <= 1) return [0, high > 0.5 ? 1.02 : high === 0 ? 1 : high * 1.12];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(0, low * 1.2), Math.max(0, high * 1.2)];
  const air = 0.07 * (high - low);
  return [low >= 0 && low < 0.4 * high ? 0 : low - air, high <= 0 && high > 0.4 * low ? 0 : high + air];
}

// The index whose step is nearest.
export function indexAt(x, step) {
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= step) low = middle;
    else high = middle;
  }
  return Math.abs(x[low] - step) <= Math.abs(x[high] - step) ? low : high;
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
  for (let i = line.y.length - 1; i >= 0; i -= 1) {
    if (line.x[i] <= to && !Number.isNaN(line.y[i])) return { at: line.x[i], value: line.y[i], i };
  }
  return null;
}

// ---- drawing, in the pixels of a canvas: `at` is {ctx, left, top, width, height, x: [from, to], y: [low, high], log, px};
// with `log`, y is in log10 ----
const down = (at, value) => {
  const y = !at.log ? value : value > 0 ? Math.max(Math.log10(value), at.y[0]) : at.y[0];
  return at.top + ((at.y[1] - y) * at.height) / (at.y[1] - at.y[0]);
};

function trace(at, line, y, each) {
  const kx = at.width / (at.x[1] - at.x[0]);
  const { x, gap } = line;
  let before = NaN;
  for (let i = 0; i < x.length; i += 1) {
    if (Number.isNaN(y[i])) continue;
    each(at.left + (x[i] - at.x[0]) * kx, down(at, y[i]), !(x[i] - before <= gap), i);
    before = x[i];
  }
}

export function drawBand(at, line, colour, alpha) {
  const { ctx } = at;
  const back = [];
  const close = () => {
    for (let j = back.length - 2; j >= 0; j -= 2) ctx.lineTo(back[j], back[j + 1]);
    back.length = 0;
  };
  const kx = at.width / (at.x[1] - at.x[0]);
  const half = 0.6 * at.px;
  let before = NaN;
  ctx.beginPath();
  for (let i = 0; i < line.x.length; i += 1) {
    if (Number.isNaN(line.low[i])) continue;
    const px = at.left + (line.x[i] - at.x[0]) * kx;
    const top = down(at, line.high[i]) - half;
    if (line.x[i] - before <= line.gap) ctx.lineTo(px, top);
    else {
      close();
      ctx.moveTo(px, top);
    }
    back.push(px, down(at, line.low[i]) + half);
    before = line.x[i];
  }
  close();
  ctx.globalAlpha = alpha;
  ctx.fillStyle = colour;
  ctx.fill();
  ctx.globalAlpha = 1;
}

export function drawLine(at, line, y, colour, { width = 2, dash = [], alpha = 1, points = false }) {
  const { ctx, px } = at;
  ctx.globalAlpha = alpha;
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = width * px;
  ctx.lineJoin = "bevel";
  ctx.setLineDash(dash.map((d) => d * px));
  ctx.beginPath();
  const alone = []; // pixels of points that nothing joins
  let began = null;
  trace(at, line, y, (left, top, fresh) => {
    if (fresh) {
      if (began) alone.push(...began);
      began = [left, top];
      ctx.moveTo(left, top);
    } else {
      began = null;
      ctx.lineTo(left, top);
    }
  });
  if (began) alone.push(...began);
  ctx.stroke();
  ctx.setLineDash([]);
  const size = 2.3 * px;
  if (points) trace(at, line, y, (left, top) => dot(ctx, left, top, size));
  else for (let j = 0; j < alone.length; j += 2) dot(ctx, alone[j], alone[j + 1], size);
  ctx.globalAlpha = 1;
}

function dot(ctx, left, top, size) {
  ctx.beginPath();
  ctx.arc(left, top, size, 0, 2 * Math.PI);
  ctx.fill();
}

// Where lines are many, a mark of its own shape every so often tells one from another (dashes are slow, and all look alike).
export const SHAPES = [
  (c, x, y, s) => c.arc(x, y, s, 0, 2 * Math.PI),
  (c, x, y, s) => c.rect(x - s, y - s, 2 * s, 2 * s),
  (c, x, y, s) => (c.moveTo(x, y - 1.3 * s), c.lineTo(x + 1.2 * s, y + s), c.lineTo(x - 1.2 * s, y + s), c.closePath()),
  (c, x, y, s) => (c.moveTo(x, y - 1.4 * s), c.lineTo(x + 1.4 * s, y), c.lineTo(x, y + 1.4 * s), c.lineTo(x - 1.4 * s, y), c.closePath()),
  (c, x, y, s) => (c.rect(x - 1.4 * s, y - 0.5 * s, 2.8 * s, s), c.rect(x - 0.5 * s, y - 1.4 * s, s, 2.8 * s)),
  (c, x, y, s) => (c.moveTo(x, y + 1.3 * s), c.lineTo(x + 1.2 * s, y - s), c.lineTo(x - 1.2 * s, y - s), c.closePath()),
];

export function drawMarks(at, line, y, colour, index) {
  const { ctx, px } = at;
  const every = 110 * px;
  let next = at.left + ((index * 37 * px) % every);
  ctx.fillStyle = colour;
  ctx.beginPath();
  trace(at, line, y, (left, top) => {
    if (left < next) return;
    next = left + every;
    ctx.moveTo(left, top);
    SHAPES[index % SHAPES.length](ctx, left, top, 2.8 * px);
  });
  ctx.fill();
}

// What is not finite has no place on the axis: a mark at the edge, ▲ for inf, ▼ for −inf, ✕ for nan.
export function drawOdd(at, line, colour) {
  const { ctx, px } = at;
  ctx.fillStyle = ctx.strokeStyle = colour;
  ctx.lineWidth = 1.6 * px;
  const s = 4 * px;
  for (const [step, kind] of line.odd) {
    if (step < at.x[0] || step > at.x[1]) continue;
    const x = at.left + ((step - at.x[0]) * at.width) / (at.x[1] - at.x[0]);
    const below = /^-/.test(kind);
    const y = below ? at.top + at.height - s : at.top + s;
    ctx.beginPath();
    if (/inf/i.test(kind)) {
      ctx.moveTo(x - s, below ? y - s : y + s);
      ctx.lineTo(x + s, below ? y - s : y + s);
      ctx.lineTo(x, below ? y + s : y - s);
      ctx.fill();
    } else {
      ctx.moveTo(x - s, y - s);
      ctx.lineTo(x + s, y + s);
      ctx.moveTo(x + s, y - s);
      ctx.lineTo(x - s, y + s);
      ctx.stroke();
    }
  }
}

// Steps at which something was noticed: a dotted line with a small flag at its foot.
export function drawMarked(at, steps, colour) {
  const { ctx, px } = at;
  if (!steps?.length) return;
  ctx.strokeStyle = ctx.fillStyle = colour;
  ctx.lineWidth = px;
  const foot = at.top + at.height;
  for (const step of steps) {
    if (step < at.x[0] || step > at.x[1]) continue;
    const x = at.left + ((step - at.x[0]) * at.width) / (at.x[1] - at.x[0]);
    ctx.setLineDash([px, 4 * px]);
    ctx.beginPath();
    ctx.moveTo(x, at.top);
    ctx.lineTo(x, foot);
    ctx.stroke();
    ctx.setLineDash([]);
    ctx.beginPath();
    ctx.moveTo(x, foot - 9 * px);
    ctx.lineTo(x + 6 * px, foot - 6 * px);
    ctx.lineTo(x, foot - 3 * px);
    ctx.fill();
  }
}

// The table behind a chart: a row for each step that any line has.
export function rowsOf(lines, most = 1000) {
  const steps = [...new Set(lines.flatMap((line) => [...line.x]))].sort((a, b) => a - b);
  const rows = steps.slice(0, most).map((step) => {
    const cells = lines.map((line) => {
      const i = line.x.length ? indexAt(line.x, step) : -1;
      if (i < 0 || line.x[i] !== step) return null;
      return { value: line.y[i], low: line.low?.[i], high: line.high?.[i], odd: line.odd.find(([at]) => at === step)?.[1] };
    });
    return { step, cells };
  });
  return { rows, left: steps.length - rows.length };
}

// ---- log scale ----
// A log scale is one of powers of ten: what is drawn is log10, and 0 lies at the lower edge. Only where nothing is below
// 0 and something above it between two steps; else null.
export function powersOf(lines, [from, to]) {
  let [low, high] = [Infinity, 0];
  for (const { x, y, low: lows, high: highs } of lines) {
    for (let i = 0; i < x.length; i += 1) {
      if (x[i] < from || x[i] > to) continue;
      const [a, b] = [lows?.[i] ?? y[i], highs?.[i] ?? y[i]];
      if (a < 0) return null;
      for (const value of [a, y[i], b]) if (value > 0 && value < low) low = value;
      if (b > high) high = b;
    }
  }
  if (!high) return null;
  const air = Math.max(0.05, 0.07 * Math.log10(high / low));
  return [Math.log10(low) - air, Math.log10(high) + air];
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
