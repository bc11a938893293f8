// The alerts page: each alert with its time, its numbers and advice.
import { get } from "./api.js";
import { h } from "./dom.js";
import { ago, count, moment } from "./format.js";
import { link } from "./route.js";
import { empty } from "./table.js";
import { block, line } from "./text.js";

function entry(alert, place, { run, render }) {
  const where = alert.step != null ? `step ${count(alert.step)}` : "";
  return h("article", { class: `panel alert ${alert.kind === "error" ? "error" : ""}`, key: `${alert.at}${alert.rule}${place}` },
    h("div", {}, h("b", {}, `${alert.kind === "error" ? "✕" : "▲"} ${line((alert.rule ?? "").replaceAll("_", " "), 120)}`), block(`alert${place}`, alert.text ?? "", render, { class: (alert.text ?? "").includes("\n") ? "" : "prose" })),
    h("time", { title: moment(alert.at) }, alert.step != null ? h("a", { href: link("curves", { run, x: `${Math.max(0, alert.step - 20)}~${alert.step + 20}` }) }, where) : "", alert.at != null ? ` · ${ago(alert.at)}` : ""));
}

function view(data, context) {
  if (!data.alerts.length) return empty("No alert.", "Rules look at every step: a reward that jumps, groups without signal, a gap that grows, a rank that is silent.");
  const latest = [...data.alerts].sort((a, b) => (b.at ?? 0) - (a.at ?? 0));
  return h("div", { key: "list" }, latest.map((alert, place) => entry(alert, place, context)));
}

const badge = (facts) => (facts.alerts ? { text: count(facts.alerts), tone: "warn" } : null);

export const alerts = { title: "Alerts", loads: ["run"], follows: ["alerts", "status"], load: ({ run }, signal) => get("alerts", { run }, signal), view, badge };
