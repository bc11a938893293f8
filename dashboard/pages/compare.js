// Comparison of two runs: settings, versions, metrics, curves and the first different sample.
import { get } from "./api.js";
import { load as loadCurves, panel } from "./curves.js";
import { h } from "./dom.js";
import { bytes, count, duration, number, percent, signed } from "./format.js";
import { joined, link } from "./route.js";
import { empty, table } from "./table.js";
import { block, line } from "./text.js";

async function load({ params }, signal) {
  if (!params.run || !params.with || params.run === params.with) return { choose: true };
  const [found, curves] = await Promise.all([get("compare", { a: params.run, b: params.with }, signal), loadCurves({ params: { run: params.run, runs: joined([params.with]) } }, signal)]);
  return { ...found, curves };
}

const MOST_ENTRIES = 24; // to show of a setting
const told = (value) => (value != null && typeof value === "object" ? Object.entries(value).map(([name, part]) => (Array.isArray(value) ? told(part) : `${name} ${told(part)}`)).join(", ") || "none" : String(value ?? "–"));
const brief = (value) => line(told(value), 200);

/** A setting's value, with an entry for each part of a setting such as a node. */
function shown(value) {
  if (value == null) return "–";
  if (typeof value === "number") return number(value);
  if (typeof value !== "object") return line(value, 300);
  const parts = Array.isArray(value) ? value.map((part) => ["", part]) : Object.entries(value);
  if (!parts.length) return "none";
  const more = parts.length - MOST_ENTRIES;
  return h("dl", { class: "parts" }, parts.slice(0, MOST_ENTRIES).map(([name, part]) => h("div", {}, name ? h("dt", {}, line(name, 60)) : null, h("dd", {}, brief(part)))), more > 0 ? h("div", {}, `… ${count(more)} more`) : null);
}

function differences(title, rows, data, same) {
  const columns = [{ name: "name", title: "", label: "name", cell: (row) => h("span", { class: "mono" }, line(row.name, 120)) }, { name: "a", title: line(data.a, 40), wraps: true, cell: (row) => shown(row.a) }, { name: "b", title: line(data.b, 40), wraps: true, cell: (row) => shown(row.b) }];
  return [h("h2", { key: `${title}-title` }, title), rows?.length ? h("div", { class: "panel", key: title }, table(columns, rows, { label: title, key: (row) => row.name })) : h("p", { class: "soft", key: title }, same)];
}

const FORMS = { bytes, s: duration, "0 to 1": percent };
const formOf = (row) => FORMS[row.unit] ?? number;
const OVERLAID = 6; // curves of both runs

/** The first curves of both runs; zooming in one opens the curves page. */
function overlaid({ curves, a, b }, { go }) {
  if (!curves.cards.length) return null;
  const set = (changes) => go("curves", { run: a, runs: joined([b]), ...changes });
  return [h("h2", { key: "curves-title" }, "Curves"), h("div", { class: "cards", key: "curves" }, curves.cards.slice(0, OVERLAID).map((card) => panel(card, curves, { params: {}, set })))];
}

function metrics(data, { params, set }) {
  const different = (data.metrics ?? []).filter((row) => row.a !== row.b);
  const equal = (data.metrics ?? []).length - different.length;
  const difference = (row) => (row.a == null || row.b == null ? null : row.b - row.a);
  const columns = [
    { name: "name", title: "Metric", value: (row) => row.name, cell: (row) => h("a", { href: link("curves", { run: data.a, runs: data.b, q: row.name }) }, line(row.name, 90)) }, { name: "a", title: line(data.a, 40), n: true, value: (row) => row.a, cell: (row) => formOf(row)(row.a) },
    { name: "b", title: line(data.b, 40), n: true, value: (row) => row.b, cell: (row) => formOf(row)(row.b) },
    { name: "difference", title: "Difference", n: true, value: difference, cell: (row) => { const by = difference(row); return by == null || formOf(row) === number ? signed(by) : `${by > 0 ? "+" : by < 0 ? "−" : ""}${formOf(row)(Math.abs(by))}`; } },
  ];
  return data.metrics?.length ? [h("h2", { key: "metrics-title" }, "Metrics", h("small", {}, `at the last step that both have${equal ? `; ${count(equal)} are equal and not listed` : ""}`)), h("div", { class: "panel", key: "metrics" }, table(columns, different, { sort: params.sort ?? "", sorts: (sort) => set({ sort }), label: "metrics", key: (row) => row.name }))] : null;
}

function first(data, { render }) {
  const found = data.first_difference;
  if (!found) return [h("h2", { key: "first-title" }, "Samples"), h("p", { class: "soft", key: "first" }, "All samples that both runs recorded are equal.")];
  const side = (name, sample) => h("div", { class: "panel response" }, h("p", { class: "meta" }, h("b", {}, line(name, 60)), sample ? h("span", {}, `reward ${number(sample.reward)}`) : null, sample?.id != null ? h("a", { href: link("samples", { run: name, group: sample.group, sample: sample.id }) }, `#${sample.id}`) : null), sample ? [block(`${name}/prompt`, sample.prompt, render, { class: "prompt" }), block(`${name}/response`, sample.response, render)] : h("p", { class: "soft" }, "It was not recorded here."));
  return [h("h2", { key: "first-title" }, "First sample that differs", h("small", {}, `step ${found.step ?? "–"}${found.token != null ? `, from token ${found.token}` : ""}`)), found.why ? h("p", { class: "soft", key: "first-why" }, `They differ in ${line(found.why, 300)}.`) : null, h("div", { class: "responses", key: "first" }, side(data.a, found.a), side(data.b, found.b))];
}

function picker({ params, set, runs }) {
  const pick = (name, label) => h("label", {}, label, h("select", { "aria-label": label, value: params[name] ?? "", on: { change: (event) => set({ [name]: event.target.value }) } }, h("option", { value: "" }, "choose a run"), runs.map((run) => h("option", { value: run.run, selected: run.run === params[name] }, line(run.run, 80)))));
  return h("div", { class: "toolbar", key: "toolbar" }, pick("run", "first"), pick("with", "second"), params.run && params.with ? [h("button", { "aria-label": "swap the two runs", on: { click: () => set({ run: params.with, with: params.run }) } }, "⇄"), h("a", { href: link("curves", { run: params.run, runs: params.with }) }, "Curves of both")] : null);
}

function view(data, context) {
  if (data.choose) return [picker(context), empty("Choose two runs.", "Settings, versions, data, metrics and the first different sample are shown side by side.")];
  const notes = (data.notes ?? []).map((note) => h("p", { class: "panel notice", role: "alert", key: note }, line(note, 2000)));
  return [picker(context), ...notes, differences("Settings", data.settings, data, "Both runs have the same settings."), differences("Versions", data.versions, data, "Both ran with the same versions."), differences("Data", data.data, data, "Both read the same data."), overlaid(data, context), metrics(data, context), first(data, context)];
}

export const compare = { title: "Compare", loads: ["run", "with"], follows: ["metrics", "status"], load, view };
