// The left side of the samples page: groups with a pip for each reward, a table of samples, or SQL.
import { post } from "./api.js";
import { h } from "./dom.js";
import { count, number, signed } from "./format.js";
import { link } from "./route.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";

export const PAGE = 50;

/** A pip for each response: full for the best reward shown, half for one above the least. */
export function pips(rewards, top, limit = 16) {
  const shade = (reward) => (reward == null ? "" : top > 0 && reward >= top * 0.999 ? "full" : reward > 0 ? "half" : "");
  const text = `rewards ${rewards.slice(0, 32).map((reward) => number(reward)).join(", ")}`;
  return h("span", { class: "pips", role: "img", "aria-label": text, title: text }, rewards.slice(0, limit).map((reward) => h("i", { class: shade(reward) })), rewards.length > limit ? h("small", {}, `+${rewards.length - limit}`) : null);
}

export const topOf = (groups) => Math.max(0, ...groups.flatMap((group) => group.rewards.filter((reward) => reward != null)));

function pager(total, { params, set }) {
  const offset = Number(params.offset ?? 0);
  if (total <= PAGE) return null;
  return h("div", { class: "row pad", key: "pager" },
    h("button", { disabled: offset === 0, "aria-label": "earlier entries", on: { click: () => set({ offset: Math.max(0, offset - PAGE) || "" }) } }, "‹"),
    h("span", { class: "small soft" }, `${count(offset + 1)} to ${count(Math.min(total, offset + PAGE))} of ${count(total)}`),
    h("button", { disabled: offset + PAGE >= total, "aria-label": "later entries", on: { click: () => set({ offset: offset + PAGE }) } }, "›"));
}

/** A note that not all sample files have been read yet. */
const reading = ({ indexed }) => (indexed && indexed.read < indexed.files ? h("p", { class: "pad small soft", role: "status" }, `Reading: ${count(indexed.read)} of ${count(indexed.files)} files, the newest first.`) : null);

export function groupList(list, context) {
  const { params } = context;
  const top = topOf(list.groups);
  const entry = (group) => h("a", { key: String(group.group), class: `entry ${String(group.group) === String(params.group) ? "on" : ""}`, "aria-current": String(group.group) === String(params.group) && "true", href: link("samples", { ...params, group: group.group, sample: "", key: "", diff: "", episode: "", turn: "" }) },
    h("span", { class: "first" }, line(group.prompt, 90) || "(no text)"), pips(group.rewards, top, 8),
    h("small", {}, `${group.kind && group.kind !== "train" ? `${group.kind} · ` : ""}group ${count(group.group)} · step ${count(group.step)}`), h("small", {}, number(group.mean)));
  return h("div", { class: "list", key: "list", tabindex: "0", role: "region", "aria-label": "groups" }, reading(list), list.groups.length ? list.groups.map(entry) : h("p", { class: "pad soft" }, "No group matches."), pager(list.total, context));
}

const NUMBERS = new Set(["id", "group", "step", "reward", "advantage", "length", "version_min", "version_max"]);
const FIRST = ["id", "step", "reward", "advantage", "length", "prompt", "response"];

export function sampleTable(list, context) {
  const { params, set } = context;
  const names = [...FIRST, ...(list.columns ?? []).filter((name) => !FIRST.includes(name))].filter((name) => list.rows.some((row) => row[name] != null && typeof row[name] !== "object"));
  const open = (row) => link("samples", { ...params, view: "", group: row.group, sample: row.id });
  const cell = (name) => (row) => {
    const value = row[name];
    if (name === "id") return h("a", { href: open(row) }, String(value));
    if (name === "episode" && value) return h("a", { href: link("samples", { ...params, view: "", group: row.group, episode: value }) }, line(value));
    if (name === "advantage") return signed(value);
    return typeof value === "number" ? (NUMBERS.has(name) && Number.isInteger(value) ? count(value) : number(value)) : line(value, 120);
  };
  const columns = names.map((name) => ({ name, title: name.replaceAll("_", " "), n: list.rows.some((row) => typeof row[name] === "number"), wide: name === "prompt" || name === "response", value: (row) => row[name], cell: cell(name) }));
  if (!list.rows.length) return empty("No sample matches.", "Search looks at prompts and responses; the filter is a condition on columns, such as reward > 0.5 and step >= 10 and response ~ sorry.");
  // The server sorts all rows of the run, not only those of this page.
  const sorts = (sort) => set({ sort, offset: "" });
  return [reading(list), h("div", { class: "panel", key: "table" }, table(columns, list.rows, { sort: params.sort ?? "", sorts, key: (row) => row.id, label: "samples", served: true })), pager(list.total, context)];
}

const asked = { text: "", answer: null, error: null, busy: false };

export function sqlPanel({ run, render }) {
  const ask = async () => {
    asked.busy = true;
    render();
    try {
      [asked.answer, asked.error] = [await post("sql", { run, query: asked.text }), null];
    } catch (error) {
      asked.error = error;
    }
    asked.busy = false;
    render();
  };
  const area = h("textarea", { class: "mono", rows: "4", spellcheck: "false", "aria-label": "SQL", placeholder: "select step, avg(reward) from samples group by step order by step", value: asked.text, on: { input: (event) => (asked.text = event.target.value), keydown: (event) => event.key === "Enter" && (event.ctrlKey || event.metaKey) && ask() } });
  const { answer } = asked;
  const rows = answer?.rows ?? [];
  const shown = (value) => (value == null ? "–" : typeof value === "number" ? number(value) : line(typeof value === "object" ? JSON.stringify(value) : value, 300));
  const columns = (answer?.columns ?? []).map((name, place) => ({ name, title: line(name), n: rows.some((row) => typeof row[place] === "number"), wide: true, cell: (row) => shown(row[place]) }));
  return [
    h("div", { class: "panel pad sql", key: "sql" }, area, h("p", { class: "row" }, h("button", { disabled: asked.busy, on: { click: ask } }, asked.busy ? "Asking…" : "Ask (Ctrl + Enter)"), h("span", { class: "faint small" }, "DuckDB, for reading only: tables samples, metrics, timeline, rows and groups of this run."))),
    asked.error ? h("p", { class: "panel notice", role: "alert", key: "error" }, line(asked.error.message, 2000)) : null,
    answer ? h("div", { class: "panel", key: "answer" }, table(columns, rows, { label: "answer" })) : null,
    answer?.cut ? h("p", { class: "faint small", key: "cut" }, `Cut to ${count(rows.length)} rows.`) : null,
    ...(answer?.notes ?? []).map((note) => h("p", { class: "faint small", key: note }, note)),
  ];
}
