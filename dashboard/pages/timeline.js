// Who did what, when, and why a group stood idle; from the whole run to a millisecond.
import { get } from "./api.js";
import { h, widget } from "./dom.js";
import { clock, duration, percent } from "./format.js";
import { lanes, shadesOf } from "./lanes.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";

const LISTED = 12;
const WIDTH = 1200; // of a lane, in pixels: what lies closer comes as shares of time
const REASONS = { rows: "waits for rows", weights: "waits for weights", device: "waits for its device", disk: "waits for the disk", start: "starts", end: "nothing left to do" };

const rangeOf = (params, data) => (params.t ? params.t.split("~").map(Number) : [data.start_s ?? 0, data.end_s || data.total_s || 1]);

function load({ run, params }, signal) {
  const [start, end] = params.t ? params.t.split("~") : [];
  return get("timeline", { run, start, end, width: WIDTH }, signal);
}

/** Goes to a stretch of time, never narrower than a tenth of a millisecond, never beyond the run. */
function zoomer({ set }, data) {
  const total = data.total_s || 1;
  return (start, end) => {
    if (start == null) return set({ t: "" });
    const width = Math.min(total, Math.max(1e-4, end - start));
    const from = Math.min(Math.max(0, start), total - width);
    // Outwards: what ends exactly where the stretch does, a step say, is in it.
    set({ t: width >= total * 0.999 ? "" : `${Math.floor(from * 1e5) / 1e5}~${Math.ceil((from + width) * 1e5) / 1e5}` });
  };
}

/** When steps began and ended: first in all of the run, of which only some are told where it is long, then within that stretch. */
async function stretchOf(run, first, last) {
  const within = (steps, start, end) => [steps.findLast((one) => one.step < first)?.end_s ?? start, steps.find((one) => one.step >= last)?.end_s ?? end];
  const whole = await get("timeline", { run, width: WIDTH });
  if (!(first >= 0) || !whole.steps.length) return null;
  const [start, end] = within(whole.steps, 0, whole.total_s);
  const margin = (end - start) / 100; // times of steps are rounded
  const near = await get("timeline", { run, start: Math.max(0, start - margin), end: end + margin, width: WIDTH });
  return within(near.steps, start, end);
}

function gaps(data, zoom) {
  const found = data.lanes.filter((lane) => lane.kind === "group" || lane.kind === "rank").filter((lane) => lane.kind !== "rank" || !data.lanes.some((other) => other.kind === "group" && other.group === lane.group)).flatMap((lane) => (lane.gaps ?? []).map((gap) => ({ ...gap, lane: lane.lane })));
  const longest = found.sort((a, b) => b.end_s - b.start_s - (a.end_s - a.start_s)).slice(0, LISTED);
  const columns = [
    { name: "lane", title: "Idle", value: (gap) => gap.lane, cell: (gap) => line(gap.lane) },
    { name: "took", title: "For", n: true, value: (gap) => gap.end_s - gap.start_s, cell: (gap) => h("button", { "aria-label": `show this gap of ${duration(gap.end_s - gap.start_s)}`, on: { click: () => zoom(gap.start_s - 0.3 * (gap.end_s - gap.start_s), gap.end_s + 0.3 * (gap.end_s - gap.start_s)) } }, duration(gap.end_s - gap.start_s)) },
    { name: "from", title: "From", n: true, value: (gap) => gap.start_s, cell: (gap) => clock(gap.start_s, 0.1) },
    { name: "why", title: "Why", value: (gap) => gap.text, cell: (gap) => line(gap.text ?? REASONS[gap.reason] ?? gap.reason, 300) },
  ];
  return longest.length ? [h("h2", { key: "gaps-title" }, "Idle gaps", h("small", {}, "the longest of what is shown, and what each waited for")), h("div", { class: "panel", key: "gaps" }, table(columns, longest, { label: "idle gaps", key: (gap) => `${gap.lane}${gap.start_s}` }))] : null;
}

function critical(data) {
  const byNode = new Map();
  for (const part of data.critical ?? []) byNode.set(part.node ?? "waiting", (byNode.get(part.node ?? "waiting") ?? 0) + part.end_s - part.start_s);
  const total = [...byNode.values()].reduce((a, b) => a + b, 0);
  if (!total) return null;
  const shades = shadesOf(data.nodes);
  const shade = (node) => shades[data.nodes.indexOf(node)] ?? "--idle";
  const [start, end] = [data.critical[0].start_s, data.critical[data.critical.length - 1].end_s];
  const rows = [...byNode].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([node, seconds]) => [
    h("span", { class: "mono" }, line(node)), h("span", { class: "track" }, h("i", { css: { width: `${(100 * seconds) / total}%`, "--shade": `var(${shade(node)})` } })), h("span", {}, `${duration(seconds)} · ${percent(seconds / total)}`),
  ]);
  return [h("h2", { key: "critical-title" }, "Critical path", h("small", {}, `what ${clock(start, 0.1)} to ${clock(end, 0.1)} went to, outlined above: shorten this, and a step is shorter`)), h("div", { class: "panel pad bars", key: "critical" }, rows)];
}

/** Nodes by their colour: those that share one share an entry. */
function legend(nodes) {
  const byShade = new Map();
  shadesOf(nodes).forEach((shade, place) => byShade.set(shade, [...(byShade.get(shade) ?? []), nodes[place]]));
  const named = { "--accent": "weights", "--ink3": "checkpoints", "--idle": "recording" };
  return [...byShade].map(([shade, names]) => h("span", { title: names.join(", ") }, h("i", { class: "swatch", css: { "--shade": `var(${shade})` } }), named[shade] ?? line(names.join(", "), 60)));
}

function view(data, context) {
  if (!data.lanes.length) return empty("Nothing has been called yet.", "Lanes begin with the first call of a worker group.");
  const zoom = zoomer(context, data);
  const range = rangeOf(context.params, data);
  const width = range[1] - range[0];
  const edge = width / 1000; // a step that ends where the window begins is not in it
  const shown = data.steps.filter((step) => step.end_s > range[0] + edge && step.end_s <= range[1] + edge);
  const step = h("input", { type: "text", inputmode: "numeric", size: 8, placeholder: "step", "aria-label": "show one step, or some, such as 10-12", on: { change: (event) => {
    const [first, last] = event.target.value.split(/[-~: ]+/).map(Number);
    stretchOf(context.run, first, last || first).then((found) => (found ? zoom(...found) : context.say(`There is no step ${first}.`)), (error) => context.say(error.message));
  } } });
  const button = (text, label, from, to) => h("button", { "aria-label": label, title: label, on: { click: () => zoom(from, to) } }, text);
  const middle = (range[0] + range[1]) / 2;
  return [
    h("div", { class: "toolbar", key: "toolbar" },
      h("span", { class: "soft" }, shown.length ? `Steps ${shown[0].step} to ${shown[shown.length - 1].step}, ` : "", duration(width), ` from ${clock(range[0], Math.min(1, width / 100))}`),
      h("span", { class: "fill" }),
      button("−", "zoom out (-)", middle - width, middle + width), button("+", "zoom in (+)", middle - width / 4, middle + width / 4),
      button("←", "earlier (left arrow)", range[0] - width / 2, range[1] - width / 2), button("→", "later (right arrow)", range[0] + width / 2, range[1] + width / 2),
      step, context.params.t ? button("Whole run", "the whole run (0 zoom)", null, null) : null),
    h("div", { class: "panel", key: "lanes" }, widget(lanes, { data, range, zoom }, { class: "lanes" })),
    h("p", { class: "legend", key: "legend" }, legend(data.nodes), h("span", { class: "faint" }, data.lanes.some((lane) => lane.bins) ? "Shares of time; zoom in for single calls, idle gaps and their reasons. Drag, Ctrl + wheel, or + and -." : "Drag to zoom, Ctrl + wheel, double-click for the whole run.")),
    critical(data), gaps(data, zoom),
  ];
}

const by = (factor, move) => (context, data) => {
  const [from, to] = rangeOf(context.params, data);
  const [middle, half] = [(from + to) / 2 + move * (to - from), ((to - from) / 2) * factor];
  zoomer(context, data)(middle - half, middle + half);
};

const keys = {
  "+": { what: "zoom in", does: by(0.5, 0) }, "-": { what: "zoom out", does: by(2, 0) },
  ArrowLeft: { what: "earlier", does: by(1, -0.25) }, ArrowRight: { what: "later", does: by(1, 0.25) }, w: { what: "whole run", does: ({ set }) => set({ t: "" }) },
};

export const timeline = { title: "Timeline", loads: ["run", "t"], follows: ["timeline", "checkpoints", "status"], load, view, keys };
