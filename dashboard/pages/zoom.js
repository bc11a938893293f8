// The stretch of a run that is looked at. It goes with a person from page to page: `x` on the axis of the curves (steps, unless `axis` says
// otherwise), `t` in seconds on the timeline.
import { h } from "./dom.js";
import { number } from "./format.js";

/** Parts of the address that stay when a person goes to another page of the same run. */
const KEPT = ["x", "t", "axis", "runs", "band", "smooth", "log"];

export const keptOf = (params) => Object.fromEntries(KEPT.filter((name) => params[name]).map((name) => [name, params[name]]));

/** [from, to] of the curves' axis, or null. */
export const spanOf = (params) => (params.x ? params.x.split("~").map(Number) : null);

/** [first, last] step that is looked at, or null: all, or a stretch of another axis. A stretch between two steps is the step nearest to its middle. */
export function stepsOf(params) {
  const span = params.axis ? null : spanOf(params);
  if (!span) return null;
  const [first, last] = [Math.ceil(span[0]), Math.floor(span[1])];
  const nearest = Math.round((span[0] + span[1]) / 2);
  return first <= last ? [first, last] : [nearest, nearest];
}

/** Says which steps are looked at, and goes back to the whole run. */
export function stepsChip({ params, set }) {
  const steps = stepsOf(params);
  return steps && h("button", { class: "chip", "aria-pressed": "true", title: "Back to the whole run", on: { click: () => set({ x: "", t: "" }) } }, `steps ${number(steps[0])} to ${number(steps[1])} ✕`);
}
