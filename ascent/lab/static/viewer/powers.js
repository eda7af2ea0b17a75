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
