// The timeline page: calls, idle gaps with their reasons, from the whole run to a millisecond.
import { get } from "./api.js";
import { h, widget } from "./dom.js";
import { clock, duration, percent } from "./format.js";
import { OWN_WORK, lanes, shadesOf } from "./lanes.js";
import { joined, parted } from "./route.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";
import { spanOf, stepsOf } from "./zoom.js";

const LISTED = 12;
const BESIDE = new Set(["recorder", "functions"]); // groups that cost nothing while they are idle
const WIDTH = 1200; // of a lane, in pixels, for the resolution of shares of time

const rangeOf = (params, data) => (params.t ? params.t.split("~").map(Number) : [data.start_s ?? 0, data.end_s || data.total_s || 1]);

function load({ run, params }, signal) {
  const [start, end] = params.t ? params.t.split("~") : params.axis === "time_s" ? (spanOf(params) ?? []) : [];
  const [first, last] = params.t ? [] : (stepsOf(params) ?? []);
  return get("timeline", { run, start, end, first, last, ranks: params.ranks, width: WIDTH }, signal);
}

/** Zooms to a range of time of at least 0.1 ms within the run, and to its steps on the pages of curves and samples. */
function zoomer({ set }, data) {
  const total = data.total_s || 1;
  return (start, end) => {
    if (start == null) return set({ t: "", x: "" });
    const width = Math.min(total, Math.max(1e-4, end - start));
    const from = Math.min(Math.max(0, start), total - width);
    if (width >= total * 0.999) return set({ t: "", x: "" });
    const steps = data.steps.filter((one) => one.end_s > from && one.end_s <= from + width);
    const [first, last] = steps.length ? [steps[0].step, steps[steps.length - 1].step] : [];
    // Round outwards, to include a step that ends with the range.
    set({ t: `${Math.floor(from * 1e5) / 1e5}~${Math.ceil((from + width) * 1e5) / 1e5}`, axis: "", x: last > first ? `${first}~${last}` : "" });
  };
}

function gaps(data, zoom) {
  const own = (lane) => (lane.kind === "rank" ? (lane.gaps ?? []).filter((gap) => gap.reason === "rank") : (lane.gaps ?? [])); // the others are its group's
  const found = data.lanes.filter((lane) => !BESIDE.has(lane.group)).flatMap((lane) => own(lane).map((gap) => ({ ...gap, lane: lane.lane })));
  const longest = found.sort((a, b) => b.end_s - b.start_s - (a.end_s - a.start_s)).slice(0, LISTED);
  const columns = [
    { name: "lane", title: "Idle", value: (gap) => gap.lane, cell: (gap) => line(gap.lane) },
    { name: "took", title: "For", n: true, value: (gap) => gap.end_s - gap.start_s, cell: (gap) => h("button", { "aria-label": `show this gap of ${duration(gap.end_s - gap.start_s)}`, on: { click: () => zoom(gap.start_s - 0.3 * (gap.end_s - gap.start_s), gap.end_s + 0.3 * (gap.end_s - gap.start_s)) } }, duration(gap.end_s - gap.start_s)) },
    { name: "from", title: "From", n: true, value: (gap) => gap.start_s, cell: (gap) => clock(gap.start_s, 0.1) },
    { name: "why", title: "Why", value: (gap) => gap.text, cell: (gap) => line(gap.text, 300) },
  ];
  return longest.length ? [h("h2", { key: "gaps-title" }, "Idle gaps", h("small", {}, "the longest of what is shown, and what each waited for")), h("div", { class: "panel", key: "gaps" }, table(columns, longest, { label: "idle gaps", key: (gap) => `${gap.lane}${gap.start_s}` }))] : null;
}

function critical(data) {
  const byNode = new Map();
  const nameOf = (part) => part.node ?? part.text;
  for (const part of data.critical ?? []) byNode.set(nameOf(part), (byNode.get(nameOf(part)) ?? 0) + part.end_s - part.start_s);
  const total = [...byNode.values()].reduce((a, b) => a + b, 0);
  if (!total) return null;
  const shades = shadesOf(data.nodes);
  const shade = (node) => shades[data.nodes.indexOf(node)] ?? "var(--idle)";
  const [start, end] = [data.critical[0].start_s, data.critical[data.critical.length - 1].end_s];
  const rows = [...byNode].sort((a, b) => b[1] - a[1]).slice(0, 8).map(([node, seconds]) => [
    h("span", { class: "mono" }, line(node)), h("span", { class: "track" }, h("i", { css: { width: `${(100 * seconds) / total}%`, "--shade": shade(node) } })), h("span", {}, `${duration(seconds)} · ${percent(seconds / total)}`),
  ]);
  return [h("h2", { key: "critical-title" }, "Critical path", h("small", {}, `what ${clock(start, 0.1)} to ${clock(end, 0.1)} went to, outlined above: shorten this, and a step is shorter`)), h("div", { class: "panel pad bars", key: "critical" }, rows)];
}

/** Nodes by colour; nodes of one colour share an entry. */
function legend(nodes) {
  const byShade = new Map();
  shadesOf(nodes).forEach((shade, place) => byShade.set(shade, [...(byShade.get(shade) ?? []), nodes[place]]));
  const named = { [OWN_WORK.weights]: "weights", [OWN_WORK.checkpoint]: "checkpoints", [OWN_WORK.recording]: "recording" };
  return [...byShade].map(([shade, names]) => h("span", { title: names.join(", ") }, h("i", { class: "swatch", css: { "--shade": shade } }), named[shade] ?? line(names.join(", "), 60)));
}

function view(data, context) {
  if (!data.lanes.length) return empty("Nothing has been called yet.", "Lanes begin with the first call of a worker group.");
  const zoom = zoomer(context, data);
  const range = rangeOf(context.params, data);
  const width = range[1] - range[0];
  const edge = width / 1000; // exclude a step that ends where the window begins
  const shown = data.steps.filter((step) => step.end_s > range[0] + edge && step.end_s <= range[1] + edge);
  const step = h("input", { type: "text", inputmode: "numeric", size: 8, placeholder: "step", "aria-label": "show one step, or some, such as 10-12", on: { change: (event) => {
    const [first, last] = event.target.value.split(/[-~: ]+/).map(Number);
    context.set({ t: "", axis: "", x: first >= 0 ? `${first}~${last || first}` : "" });
  } } });
  const unfolded = parted(context.params.ranks);
  const turn = (group) => context.set({ ranks: joined(unfolded.includes(group) ? unfolded.filter((name) => name !== group) : [...unfolded, group]) });
  const several = Object.entries(data.ranks ?? {});
  const ranks = several.length ? h("span", { class: "chips", role: "group", "aria-label": "groups with a lane for each rank" }, several.map(([group, number]) => h("button", { class: "chip", "aria-pressed": String(unfolded.includes(group)), on: { click: () => turn(group) } }, `${line(group, 40)}: ${number} ranks`))) : null;
  const button = (text, label, from, to) => h("button", { "aria-label": label, title: label, on: { click: () => zoom(from, to) } }, text);
  const middle = (range[0] + range[1]) / 2;
  return [
    h("div", { class: "toolbar", key: "toolbar" },
      h("span", { class: "soft" }, shown.length ? `Steps ${shown[0].step} to ${shown[shown.length - 1].step}, ` : "", duration(width), ` from ${clock(range[0], Math.min(1, width / 100))}`),
      ranks,
      h("span", { class: "fill" }),
      button("−", "zoom out (-)", middle - width, middle + width), button("+", "zoom in (+)", middle - width / 4, middle + width / 4),
      button("←", "earlier (left arrow)", range[0] - width / 2, range[1] - width / 2), button("→", "later (right arrow)", range[0] + width / 2, range[1] + width / 2),
      step, context.params.t || context.params.x ? button("Whole run", "the whole run (w)", null, null) : null),
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
  ArrowLeft: { what: "earlier", does: by(1, -0.25) }, ArrowRight: { what: "later", does: by(1, 0.25) }, w: { what: "whole run", does: ({ set }) => set({ t: "", x: "" }) },
  r: { what: "lanes of ranks", does: ({ params, set }, data) => set({ ranks: params.ranks ? "" : joined(Object.keys(data.ranks ?? {})) }) },
};

export const timeline = { title: "Timeline", loads: ["run", "t", "x", "axis", "ranks"], follows: ["timeline", "checkpoints", "status"], load, view, keys };
