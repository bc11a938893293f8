// The list of runs, with their status and a selection to overlay.
import { get } from "./api.js";
import { h, s } from "./dom.js";
import { ago, count, duration, number } from "./format.js";
import { dot, statusOf } from "./frame.js";
import { joined, link, parted } from "./route.js";
import { empty, sorted, table } from "./table.js";
import { line } from "./text.js";

const SHOWN = 200; // rows of the table; a folder may have thousands of runs

const chosen = (params) => parted(params.runs);

function spark(values) {
  const known = (values ?? []).filter((value) => value != null);
  if (known.length < 2) return null;
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const at = (value, place) => `${((place * 70) / (known.length - 1) + 1).toFixed(1)},${(17 - (15 * (value - low)) / (high - low || 1)).toFixed(1)}`;
  return s("svg", { class: "spark", width: 72, height: 18, "aria-hidden": "true" }, s("polyline", { points: known.map(at).join(" "), fill: "none", stroke: "var(--s1)", "stroke-width": 1.5 }));
}

/** The line below a run's row: its unreadable files, or its last alert. */
function trouble(run) {
  if (run.damage?.length) return h("span", { class: "bad-text clamped", title: line(run.damage.join("\n"), 2000) }, "✕ cannot be read: ", line(run.damage[0], 400));
  return run.trouble ? h("span", { class: "soft clamped", title: line(run.trouble.text, 1000) }, h("span", { class: "warn-text" }, "▲ "), line(run.trouble.text, 400)) : null;
}

function heldOut(run) {
  if (run.held_out == null) return "-";
  const lost = run.held_out_lost ? `, ${count(run.held_out_lost)} prompts lost` : "";
  return h("span", {}, `${number(run.held_out)} `, h("span", { class: "faint small" }, line(`${run.held_out_label ?? ""}${lost}`)));
}

function columns({ params, set }) {
  const marked = chosen(params);
  const mark = (run) => {
    const next = marked.includes(run.run) ? marked.filter((name) => name !== run.run) : [...marked, run.run];
    set({ runs: joined(next) });
  };
  return [
    { name: "chosen", title: "", label: "chosen", cell: (run) => h("input", { type: "checkbox", "aria-label": `choose ${line(run.run)}`, checked: marked.includes(run.run), on: { change: () => mark(run) } }) },
    { name: "run", title: "Run", value: (run) => run.run, cell: (run) => h("a", { href: link("curves", { run: run.run }) }, dot(run), line(run.run, 90)) },
    { name: "status", title: "Status", value: (run) => statusOf(run).word, cell: (run) => h("span", { class: `word ${statusOf(run).tone}` }, `${statusOf(run).sign} ${statusOf(run).word}`) },
    { name: "step", title: "Step", n: true, value: (run) => run.step, cell: (run) => (run.steps ? `${count(run.step)} / ${count(run.steps)}` : count(run.step)) },
    { name: "reward", title: "Reward", n: true, value: (run) => run.reward, cell: (run) => h("span", { class: "right" }, spark(run.spark), run.reward == null ? "-" : number(run.reward)) },
    { name: "loss", title: "Loss", n: true, value: (run) => run.loss, cell: (run) => (run.loss == null ? "-" : number(run.loss)) },
    { name: "heldout", title: "Held out", n: true, value: (run) => run.held_out, cell: heldOut },
    { name: "tokens", title: "Tokens/s", n: true, value: (run) => run.tokens_per_s, cell: (run) => number(run.tokens_per_s) },
    { name: "took", title: "Took", n: true, value: (run) => run.duration_s, cell: (run) => duration(run.duration_s) },
    { name: "updated", title: "Last written", n: true, value: (run) => run.updated_at, cell: (run) => ago(run.updated_at) },
  ];
}

function matching(data, params) {
  const words = (params.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  return data.runs.filter((run) => {
    const text = [run.run, statusOf(run).word, run.trouble?.text, JSON.stringify(run.settings ?? {})].join(" ").toLowerCase();
    return words.every((word) => text.includes(word)) && (!params.status || run.status === params.status);
  });
}

function view(data, context) {
  const { params, set } = context;
  const most = Number(params.most) || SHOWN;
  if (!data.runs.length) return [h("h1", { class: "hidden-text" }, "Runs"), empty("No run yet.", `Runs under ${line(data.folder ?? "this folder")} appear here as they start; nothing needs to be reloaded.`)];
  const rows = matching(data, params);
  const marked = chosen(params);
  const states = [...new Set(data.runs.map((run) => run.status))];
  const filter = h("input", { type: "search", placeholder: "Filter by name or setting", "aria-label": "filter runs", value: params.q ?? "", on: { input: (event) => set({ q: event.target.value }) } });
  const state = (name) => h("button", { class: "chip", "aria-pressed": String(params.status === name), on: { click: () => set({ status: params.status === name ? "" : name }) } }, `${statusOf({ status: name }).word} ${data.runs.filter((run) => run.status === name).length}`);
  const lay = marked.length ? h("a", { class: "button", href: link("curves", { run: marked[0], runs: joined(marked.slice(1)) }) }, `Curves of ${marked.length} ${marked.length === 1 ? "run" : "runs"}`) : h("span", { class: "faint small" }, "Tick runs to overlay their curves.");
  const two = marked.length === 2 ? h("a", { class: "button", href: link("compare", { run: marked[0], with: marked[1] }) }, "Compare the two") : null;
  const list = rows.length ? h("div", { class: "panel", key: "table" }, table(columns(context), sorted(columns(context), rows, params.sort ?? "-updated").slice(0, most), { sort: params.sort ?? "-updated", sorts: (sort) => set({ sort }), key: (run) => run.run, on: (run) => run.run === params.at, note: trouble, label: "runs" })) : empty("No run matches.", "The filter matches names, states, settings and problems.");
  return [h("div", { class: "toolbar", key: "toolbar" }, filter, h("span", { class: "chips" }, states.map(state)), h("span", { class: "fill" }), lay, two), list,
    rows.length > most ? h("p", { class: "row", key: "more" }, h("span", { class: "soft small" }, `${count(most)} of ${count(rows.length)} runs.`), h("button", { on: { click: () => set({ most: most + SHOWN }) } }, `${count(Math.min(SHOWN, rows.length - most))} more`)) : null];
}

function step(by) {
  return ({ params, set }, data) => {
    const rows = sorted(columns({ params, set }), matching(data, params), params.sort ?? "-updated");
    const at = rows.findIndex((run) => run.run === params.at) + by;
    if (rows.length) set({ at: rows[Math.max(0, Math.min(rows.length - 1, at))].run });
  };
}

const keys = {
  j: { what: "next run", does: step(1) },
  k: { what: "previous run", does: step(-1) },
  Enter: { what: "curves of the run", does: ({ params, go }) => params.at && go("curves", { run: params.at }) },
  x: { what: "choose the run", does: ({ params, set }) => params.at && set({ runs: joined(chosen(params).includes(params.at) ? chosen(params).filter((run) => run !== params.at) : [...chosen(params), params.at]) }) },
};

export const runs = { title: "Runs", loads: [], load: (context, signal) => get("runs", {}, signal), view, keys };
