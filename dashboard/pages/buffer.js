// The sample buffer: waiting groups and their ages, drops by reason, leases, and bytes.
import { get } from "./api.js";
import { bars, figures, histogramOverSteps } from "./bars.js";
import { h } from "./dom.js";
import { bytes, count, duration } from "./format.js";
import { link } from "./route.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";
import { stepsChip, stepsOf } from "./zoom.js";

const SHADES = ["--s3", "--s6", "--s5", "--s2", "--s4", "--s7"];

function waiting(data, { params, set, run }) {
  const columns = [
    { name: "group", title: "Group", n: true, value: (row) => row.group, cell: (row) => h("a", { href: link("samples", { run, group: row.group }) }, count(row.group)) },
    { name: "for", title: "Waits for", wraps: true, value: (row) => row.for, cell: (row) => line(row.for, 400) },
    { name: "age", title: "Age", n: true, value: (row) => row.age_s, cell: (row) => duration(row.age_s) },
  ];
  return [h("h2", { key: "waiting-title" }, "Groups that wait", h("small", {}, "each with what it waits for")), data.waiting.length ? h("div", { class: "panel", key: "waiting" }, table(columns, data.waiting, { sort: params.sort ?? "-age", sorts: (sort) => set({ sort }), key: (row) => row.group, label: "groups that wait" })) : h("p", { class: "soft", key: "waiting" }, "None: every issued group is finished.")];
}

function leases(data) {
  const columns = [
    { name: "lease", title: "Lease", n: true, cell: (row) => count(row.lease) }, { name: "node", title: "Node", cell: (row) => line(row.node) }, { name: "rank", title: "Rank", cell: (row) => line(row.rank ?? "–") },
    { name: "rows", title: "Rows", n: true, cell: (row) => count(row.rows) }, { name: "age", title: "Held for", n: true, cell: (row) => duration(row.age_s) },
  ];
  return data.leases.length ? [h("h2", { key: "leases-title" }, "Leases"), h("div", { class: "panel", key: "leases" }, table(columns, data.leases, { label: "leases", key: (row) => row.lease }))] : null;
}

function ages({ ages: found }) {
  if (!found?.counts?.some(Boolean)) return null;
  const rows = found.counts.map((rows, place) => [found.edges_s[place + 1] == null ? `over ${duration(found.edges_s[place])}` : `to ${duration(found.edges_s[place + 1])}`, rows, count(rows)]);
  return h("section", { class: "panel pad" }, h("h3", {}, "Age of the rows in flight"), bars(rows));
}

function view(data, context) {
  const totals = data.totals ?? {};
  const known = Object.values(totals).some(Boolean);
  if (!known && !data.staleness?.length) return empty("The buffer is empty.", "Rows appear here when the first prompts are issued.");
  const { segments } = data;
  const [from, to] = stepsOf(context.params) ?? [-Infinity, Infinity];
  const staleness = (data.staleness ?? []).filter((row) => row.step >= from && row.step <= to);
  const drops = data.drops.map((drop) => [line(drop.reason, 80), drop.rows, count(drop.rows), "--bad"]);
  const space = segments && [["in segments", segments.bytes, bytes(segments.bytes)], segments.budget_bytes != null && ["budget", segments.budget_bytes, bytes(segments.budget_bytes), "--idle"]].filter(Boolean);
  return [
    h("h2", { class: "hidden-text", key: "title" }, "Buffer"),
    known && figures([["waiting", count(totals.waiting)], ["leased", count(totals.leased)], ["done", count(totals.done), "ok"], ["dropped", count(totals.dropped), totals.dropped ? "bad" : ""], segments && ["segments", count(segments.count)], segments && ["bytes", bytes(segments.bytes)]]),
    h("div", { class: "two", key: "two" },
      staleness.length ? h("section", { class: "panel pad" }, h("h3", {}, "Staleness", h("small", {}, `share of the trained rows by how many updates behind their version is (${data.staleness_of})`), stepsChip(context)), histogramOverSteps(staleness, SHADES, "staleness of the rows of each step")) : null,
      ages(data),
      h("section", { class: "panel pad" }, h("h3", {}, "Drops by reason"), drops.length ? bars(drops) : h("p", { class: "soft small" }, "No row was dropped.")),
      space && segments.bytes ? h("section", { class: "panel pad" }, h("h3", {}, "Segments"), bars(space)) : null),
    known ? [waiting(data, context), leases(data)] : null,
  ];
}

const badge = (facts) => (facts.rows_in_flight ? { text: count(facts.rows_in_flight), tone: "" } : null);

export const buffer = { title: "Buffer", loads: ["run"], follows: ["live", "metrics", "samples", "status"], load: ({ run }, signal) => get("buffer", { run }, signal), view, badge };
