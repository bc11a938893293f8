// Formats numbers, times and sizes. Unknown values are an en dash.

const NONE = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** A number with three or four significant digits: 12,140 · 0.738 · 9.1e-7. */
export function number(value) {
  if (value == null || Number.isNaN(value)) return NONE;
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text =
    size === 0 ? "0"
    : size < 1e-3 || size >= 1e9 ? size.toExponential(1).replace("e+", "e").replace(".0e", "e")
    : size >= 1000 ? grouped.format(size)
    : Number.isInteger(size) ? String(size)
    : String(+size.toPrecision(size >= 100 ? 4 : 3));
  return value < 0 ? `−${text}` : text;
}

/** Axis labels, formatted by `form`, with enough decimals to differ: 0.9995 and 1, not "1" and "1". */
export function axisLabels(values, form = number) {
  const labels = values.map((value) => (value == null ? "" : form(value)));
  const known = values.filter((value) => value != null);
  if (new Set(known.map(form)).size === known.length) return labels;
  const [scale, unit] = form === percent ? [100, " %"] : [1, ""];
  if (form !== number && form !== percent) return labels.map((label, place) => (labels.indexOf(label) === place ? label : ""));
  const gap = Math.min(...known.slice(1).map((value, place) => scale * Math.abs(value - known[place])));
  const decimals = Math.min(12, Math.max(0, Math.ceil(-Math.log10(gap) - 1e-9) + (Number.isInteger(+(gap / 10 ** Math.floor(Math.log10(gap))).toPrecision(6)) ? 0 : 1)));
  const exact = new Intl.NumberFormat("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
  return values.map((value) => (value == null ? "" : exact.format(scale * value).replace("-", "−") + unit));
}

export const count = (value) => (value == null ? NONE : grouped.format(value));
export const percent = (share) => (share == null ? NONE : `${share > 0 && share < 0.01 ? (100 * share).toPrecision(1) : Math.round(100 * share)} %`);
export const signed = (value) => (value == null ? NONE : value > 0 ? `+${number(value)}` : number(value));

/** Seconds: 0.31 ms · 41 s · 3 min 5 s · 1 h 42 min · 2 d 4 h. */
export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 0.9995) return `${+(seconds * 1e3).toPrecision(3)} ms`;
  if (seconds < 59.95) return `${+seconds.toPrecision(seconds < 10 ? 2 : 3)} s`;
  const whole = Math.round(seconds);
  const [large, small, names] =
    whole < 3600 ? [Math.floor(whole / 60), whole % 60, ["min", "s"]]
    : whole < 86400 ? [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60), ["h", "min"]]
    : [Math.floor(whole / 86400), Math.floor((whole % 86400) / 3600), ["d", "h"]];
  return small ? `${large} ${names[0]} ${small} ${names[1]}` : `${large} ${names[0]}`;
}

/** A time since the start of a run: 2:29:10, or 0:41.250 if marks are less than a second apart. */
export function clock(seconds, spacing) {
  if (seconds == null || !Number.isFinite(seconds)) return NONE;
  const decimals = spacing >= 1 ? 0 : Math.min(6, Math.ceil(-Math.log10(spacing) - 1e-9));
  const whole = Math.floor(seconds + 0.5 * 10 ** -decimals);
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)];
  const rest = Math.max(0, seconds - hours * 3600 - minutes * 60).toFixed(decimals).padStart(decimals ? decimals + 3 : 2, "0");
  return `${hours ? `${hours}:${String(minutes).padStart(2, "0")}` : minutes}:${rest}`;
}

export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) [value, place] = [value / 1000, place + 1];
  return `${place && value < 100 ? +value.toPrecision(3) : Math.round(value)} ${units[place]}`;
}

/** How long ago a Unix time [s] was, in one unit. */
export function ago(at) {
  if (at == null) return NONE;
  const passed = Math.max(0, Date.now() / 1000 - at);
  if (passed < 2) return "now";
  const [size, name] = passed < 60 ? [1, "s"] : passed < 3600 ? [60, "min"] : passed < 86400 ? [3600, "h"] : [86400, "d"];
  return `${Math.floor(passed / size)} ${name} ago`;
}

export const moment = (at) => (at == null ? NONE : new Date(at * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC");

/** A metric's value, and separately its unit, which pages write smaller. */
export function measured(value, unit) {
  if (value == null) return [NONE, ""];
  if (unit === "0 to 1" || unit === "share") return [percent(value), ""];
  if (unit === "s") return [duration(value), ""];
  if (unit === "bytes") return [bytes(value), ""];
  return [number(value), unit === "count" ? "" : unit];
}
