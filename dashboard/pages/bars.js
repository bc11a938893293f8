// Small drawings: bars with numbers, large numbers, stacked histograms over steps.
import { h, s } from "./dom.js";

/** Large numbers with their names: [[name, value, tone]]. */
export const figures = (entries) => h("div", { class: "panel figures" }, entries.filter(Boolean).map(([name, value, tone]) => h("div", { class: "fact" }, h("span", { class: "label" }, name), h("span", { class: `value ${tone ? `${tone}-text` : ""}` }, value))));

/** Horizontal bars: [[name, value, text, colour]]. */
export function bars(entries) {
  const top = Math.max(1e-12, ...entries.map(([, value]) => value ?? 0));
  return h("div", { class: "bars" }, entries.map(([name, value, text, shade]) => [h("span", {}, name), h("span", { class: "track" }, h("i", { css: { width: `${(100 * (value ?? 0)) / top}%`, ...(shade ? { "--shade": `var(${shade})` } : {}) } })), h("span", {}, text)]));
}

const HIGH = 120;

/** Stacked columns over steps: [{step, counts: {value: rows}}], such as the staleness of rows. */
export function histogramOverSteps(rows, shades, label) {
  const keys = [...new Set(rows.flatMap((row) => Object.keys(row.counts)))].sort((a, b) => a - b);
  const wide = Math.max(2, Math.min(14, Math.floor(440 / rows.length)));
  const shade = (key) => shades[Math.min(shades.length - 1, keys.indexOf(key))];
  const columns = rows.map((row, place) => {
    const total = Object.values(row.counts).reduce((a, b) => a + b, 0) || 1;
    let foot = HIGH;
    return keys.map((key) => {
      const high = (HIGH * (row.counts[key] ?? 0)) / total;
      foot -= high;
      return high ? s("rect", { x: place * wide, y: foot, width: wide > 4 ? wide - 1 : wide, height: high, fill: `var(${shade(key)})` }, s("title", {}, `step ${row.step}: ${row.counts[key]} rows of ${key}`)) : null;
    });
  });
  const drawn = s("svg", { width: rows.length * wide, height: HIGH + 16, role: "img", "aria-label": label }, columns,
    s("text", { class: "small-label", x: 0, y: HIGH + 13 }, `step ${rows[0].step}`), rows.length > 12 ? s("text", { class: "small-label", x: rows.length * wide, y: HIGH + 13, "text-anchor": "end" }, String(rows[rows.length - 1].step)) : null);
  const legend = keys.map((key) => h("span", {}, h("i", { class: "swatch", css: { "--shade": `var(${shade(key)})` } }), key));
  return [h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, drawn), h("p", { class: "legend" }, legend)];
}
