// The frame of every page: the brand, the list of runs, and a run's header with its latest numbers.
import { h, s } from "./dom.js";
import { ago, count, duration, measured, number } from "./format.js";
import { line } from "./text.js";

/** Name, colour and sign of each status; the sign repeats the colour's meaning. */
const STATUS = {
  running: { word: "running", tone: "busy", sign: "▶" },
  done: { word: "done", tone: "ok", sign: "✓" },
  stopped: { word: "stopped", tone: "idle", sign: "■" },
  failed: { word: "failed", tone: "bad", sign: "✕" },
  damaged: { word: "damaged", tone: "bad", sign: "✕" },
  killed: { word: "killed", tone: "bad", sign: "✕" },
  empty: { word: "no step yet", tone: "idle", sign: "○" },
  unknown: { word: "unknown", tone: "idle", sign: "?" },
};
export const statusOf = (run) => STATUS[run?.status] ?? { word: run?.status ?? "", tone: "idle", sign: "○" };

export function dot(run) {
  const { word, tone } = statusOf(run);
  return h("span", { class: `dot ${tone} ${run?.status === "running" ? "pulse" : ""}`, role: "img", "aria-label": word, title: word });
}

const LINES = ["M3 7c6 0 6 10 12 10h6", "M3 17c6 0 6-10 12-10h6", "M3 12h18"];
const CONNECTION = { lost: "reconnecting", exported: "exported" };

export function brand(connection) {
  const mark = s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, LINES.map((d) => s("path", { d })));
  const word = CONNECTION[connection];
  return h("div", { class: "brand" }, h("a", { href: "#runs" }, mark, "Weft"), word ? h("span", { class: `chip ${connection}`, role: "status" }, word) : null);
}

const PLACES = 8;

/** The most recent runs, always including the current one. */
export function runLinks(runs, page, run, link) {
  const latest = [...runs].sort((a, b) => (b.updated_at ?? 0) - (a.updated_at ?? 0));
  const listed = latest.slice(0, PLACES);
  const here = latest.find((other) => other.run === run);
  if (here && !listed.includes(here)) listed.push(here);
  const target = page === "runs" || page === "compare" ? "curves" : page;
  const entry = (other) => h("a", { key: other.run, href: link(target, { run: other.run }), class: other.run === run ? "on" : "", title: line(other.run) }, h("span", { class: "run-name" }, dot(other), " ", line(other.name, 60)));
  return h("div", { class: "runs" }, h("h2", {}, "Runs"), listed.map(entry),
    h("a", { href: "#runs", class: page === "runs" ? "on" : "", "aria-current": page === "runs" && "page" }, "All runs", h("b", {}, count(runs.length))),
    h("a", { href: link("compare", { run }), class: page === "compare" ? "on" : "", "aria-current": page === "compare" && "page" }, "Compare"));
}

const fact = (name, value) => h("div", { class: "fact", key: name }, h("span", { class: "label" }, name), h("span", { class: "value" }, value));

function figures(facts) {
  const parts = [];
  const steps = facts.steps ? `${count(facts.step)} of ${count(facts.steps)}` : count(facts.step);
  parts.push(fact("step", steps));
  if (facts.steps) {
    const share = Math.min(1, (facts.step ?? 0) / facts.steps);
    parts.push(h("progress", { key: "progress", max: "1", value: String(share), "aria-label": "share of the steps that are done" }));
  }
  if (facts.status === "running" && facts.left_s != null) parts.push(fact("left", duration(facts.left_s)));
  else parts.push(fact("took", duration(facts.duration_s)));
  if (facts.tokens_per_s != null) parts.push(fact("tokens/s", number(facts.tokens_per_s)));
  if (facts.staleness != null) parts.push(fact("staleness", facts.max_staleness != null ? `${number(facts.staleness)} of ${facts.max_staleness}` : number(facts.staleness)));
  if (facts.gap != null) parts.push(fact("log-probability gap", measured(facts.gap, "nats").join(" ")));
  return parts;
}

export function headline(page, facts, connection, { title, stop, help }) {
  const theme = h("button", { class: "quiet", title: "light or dark", "aria-label": "light or dark", on: { click: turn } }, "◐");
  const keys = h("button", { class: "quiet", title: "keys (?)", "aria-label": "keys", on: { click: help } }, "?");
  if (!facts) return [h("h1", { key: "title" }, title), h("span", { class: "fill", key: "fill" }), theme, keys];
  const { word, tone } = statusOf(facts);
  const about = facts.status === "running" ? word : `${word} ${ago(facts.updated_at)}`;
  return [
    h("h1", { key: "title" }, dot(facts), line(facts.name, 80)),
    h("span", { class: `word ${tone}`, key: "word" }, about),
    ...figures(facts),
    h("span", { class: "fill", key: "fill" }),
    facts.status === "running" && connection !== "exported" ? h("button", { key: "stop", on: { click: stop } }, "Stop…") : null,
    theme, keys,
    facts.why ? h("p", { class: "why bad", key: "why" }, line(facts.why, 400)) : null,
    facts.damage?.length ? h("p", { class: "why bad", key: "damage", title: line(facts.damage.join("\n"), 2000) }, `Cannot be read: ${line(facts.damage[0], 300)}${facts.damage.length > 1 ? `, and ${count(facts.damage.length - 1)} more` : ""}`) : null,
  ];
}

/** Light or dark: the system's preference until the user chooses (theme.js remembers it). */
function turn() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("weft-theme", root.dataset.theme);
  } catch {} // without storage, use the system's preference
  dispatchEvent(new Event("theme"));
}
