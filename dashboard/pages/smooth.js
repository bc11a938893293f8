// What is done to a curve before it is drawn.

const POINTS = 40;

/** Exponential moving average of weight `weight` (0: the curve itself), without the pull of its start towards 0. The weight is that of a
    curve of 40 points; one of more points is averaged over the same share of its length, so that a long run looks as smooth as a short one. */
export function smooth(values, chosen) {
  if (!chosen) return values;
  const weight = chosen ** (POINTS / Math.max(POINTS, values.length));
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    if (value == null) return null;
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

/** The value of a curve at `at`, on the line between its neighbours; null outside of it. */
export function valueAt({ x, y }, at) {
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

/** Several runs as one: the mean, and the mean plus and minus the standard deviation, where at least two of them have a value. */
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
