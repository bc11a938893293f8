// Smoothing, interpolation and averaging of curves.

const WIDEST = 0.1; // of the curve's length, on either side

/** Moving average with a centred triangular window. `strength` is 0 (no smoothing) to 1 (a tenth of the curve's length on either side).
    The window shrinks towards both ends, so the first and the last value are unchanged. */
export function smooth(values, strength) {
  const widest = Math.round(strength * WIDEST * values.length);
  if (!widest) return values;
  return values.map((value, at) => {
    if (value == null) return null;
    const half = Math.min(widest, at, values.length - 1 - at);
    let [sum, total] = [0, 0];
    for (let place = at - half; place <= at + half; place++) {
      if (values[place] == null) continue;
      const weight = half + 1 - Math.abs(place - at);
      sum += weight * values[place];
      total += weight;
    }
    return sum / total;
  });
}

/** The value of a curve at `at`, linearly interpolated; null outside of the curve. */
function valueAt({ x, y }, at) {
  if (!x.length || at < x[0] || at > x[x.length - 1]) return null;
  let low = 0;
  let high = x.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (x[middle] <= at) low = middle;
    else high = middle;
  }
  if (y[low] == null || y[high] == null) return y[low] ?? y[high];
  return x[high] === x[low] ? y[low] : y[low] + ((y[high] - y[low]) * (at - x[low])) / (x[high] - x[low]);
}

/** Mean of several runs, and mean plus and minus the standard deviation, where at least two runs have a value. */
export function together(curves) {
  const longest = curves.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  const mean = [];
  const low = [];
  const high = [];
  for (const at of longest.x) {
    const values = curves.map((curve) => valueAt(curve, at)).filter((value) => value != null);
    const middle = values.length ? values.reduce((a, b) => a + b) / values.length : null;
    const spread = values.length > 1 ? Math.sqrt(values.reduce((sum, v) => sum + (v - middle) ** 2, 0) / (values.length - 1)) : 0;
    mean.push(middle);
    low.push(middle == null ? null : middle - spread);
    high.push(middle == null ? null : middle + spread);
  }
  return { x: longest.x, mean, low, high };
}
