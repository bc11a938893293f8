// The weights page: each version's transfer, with its bytes, time and pause of generation.
import { get } from "./api.js";
import { figures } from "./bars.js";
import { chart } from "./chart.js";
import { h, widget } from "./dom.js";
import { ago, bytes, count, duration } from "./format.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";
import { stepsChip, stepsOf } from "./zoom.js";

const SHOWN = 40;

function view(data, { params, set }) {
  const known = data.versions ?? [];
  if (!known.length) return empty("No weights were sent.", "A run whose rollout follows its actor shows each version here.");
  const followers = [...new Set(known.map((one) => one.to))];
  const curve = (name, colour, key) => ({ x: known.map((one) => one.version), y: known.map((one) => one[key]), colour, name });
  const one = followers.length === 1;
  const series = one ? [curve("transfer", "--s1", "transfer_s"), curve("pause", "--s2", "pause_s")].filter((line) => line.y.some((value) => value != null)) : followers.map((to, place) => ({ ...curve(to, `--s${(place % 8) + 1}`, "transfer_s"), x: known.filter((v) => v.to === to).map((v) => v.version), y: known.filter((v) => v.to === to).map((v) => v.transfer_s) }));
  const columns = [
    { name: "version", title: "Version", n: true, value: (row) => row.version, cell: (row) => `v${row.version}` }, { name: "to", title: "To", value: (row) => row.to, cell: (row) => line(row.to) },
    { name: "step", title: "Step", n: true, value: (row) => row.step, cell: (row) => count(row.step) }, { name: "bytes", title: "Bytes", n: true, value: (row) => row.bytes, cell: (row) => bytes(row.bytes) },
    { name: "took", title: "Took", n: true, value: (row) => row.transfer_s, cell: (row) => duration(row.transfer_s) }, { name: "pause", title: "Pause", n: true, value: (row) => row.pause_s, cell: (row) => duration(row.pause_s) },
    { name: "at", title: "When", n: true, value: (row) => row.at, cell: (row) => ago(row.at) },
  ];
  const last = known[known.length - 1];
  return [
    h("h2", { class: "hidden-text", key: "title" }, "Weights"),
    stepsOf(params) ? h("div", { class: "toolbar", key: "toolbar" }, stepsChip({ params, set })) : null,
    h("div", { key: "figures" }, figures([["version", `v${last.version}`], ["last transfer", duration(last.transfer_s)], ["generation paused for", duration(last.pause_s)], last.bytes != null && ["size", bytes(last.bytes)], last.bytes && last.transfer_s && ["rate", `${bytes(last.bytes / last.transfer_s)}/s`]])),
    h("section", { class: "panel card large", key: "chart" }, h("h3", {}, "Transfer and pause", h("small", {}, "seconds, by version")), h("p", { class: "legend" }, series.map((line) => h("span", {}, h("i", { class: "key", css: { "--shade": `var(${line.colour})` } }), line.name))), widget(chart, { series, axis: "version", range: stepsOf(params), zoom: (from, to) => set({ t: "", axis: "", x: from == null ? "" : `${Math.floor(from)}~${Math.ceil(to)}` }), floor: 0, label: "time of each transfer" }, { class: "chart" })),
    h("div", { class: "panel", key: "table" }, table(columns, known.slice(-SHOWN), { sort: params.sort ?? "-version", sorts: (sort) => set({ sort }), key: (row) => `${row.to}${row.version}`, label: "versions" })),
    known.length > SHOWN ? h("p", { class: "faint small", key: "cut" }, `The last ${SHOWN} of ${count(known.length)}.`) : null,
  ];
}

export const weights = { title: "Weights", loads: ["run"], follows: ["timeline", "live", "metrics", "status"], load: ({ run }, signal) => get("weights", { run }, signal), view };
