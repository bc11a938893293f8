// The range of a run to show, on all its pages: `x` on the axis of the curves (steps, unless `axis` is set), `t` in seconds on the timeline.
import { h } from "./dom.js";
import { number } from "./format.js";

/** Parts of the address that other pages of the same run keep. */
const KEPT = ["x", "t", "axis", "runs", "band", "smooth", "log"];

export const keptOf = (params) => Object.fromEntries(KEPT.filter((name) => params[name]).map((name) => [name, params[name]]));

/** [from, to] on the curves' axis, or null. */
export const spanOf = (params) => (params.x ? params.x.split("~").map(Number) : null);

/** [first, last] step of the range, or null for all steps or another axis. A range between two steps gives the step nearest to its middle. */
export function stepsOf(params) {
  const span = params.axis ? null : spanOf(params);
  if (!span) return null;
  const [first, last] = [Math.ceil(span[0]), Math.floor(span[1])];
  const nearest = Math.round((span[0] + span[1]) / 2);
  return first <= last ? [first, last] : [nearest, nearest];
}

/** A button with the shown steps, which returns to the whole run. */
export function stepsChip({ params, set }) {
  const steps = stepsOf(params);
  return steps && h("button", { class: "chip", "aria-pressed": "true", title: "Back to the whole run", on: { click: () => set({ x: "", t: "" }) } }, `steps ${number(steps[0])} to ${number(steps[1])} ✕`);
}
