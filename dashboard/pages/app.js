// The shell: pages by address, the list of runs, a run's header, updates, keys, and the color scheme.
import { Gone, get, isExported, listen } from "./api.js";
import { h, patch } from "./dom.js";
import { brand, headline, runLinks } from "./frame.js";
import { showHelp, stopDialog } from "./dialogs.js";
import { go, link, parse, parted, set } from "./route.js";
import { alerts } from "./alerts.js";
import { buffer } from "./buffer.js";
import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { graph } from "./graph.js";
import { runs } from "./runs.js";
import { samples } from "./samples.js";
import { timeline } from "./timeline.js";
import { weights } from "./weights.js";
import { workers } from "./workers.js";
import { keptOf } from "./zoom.js";

const PAGES = { runs, curves, graph, timeline, samples, buffer, workers, weights, alerts, compare };
const OF_A_RUN = ["curves", "graph", "timeline", "samples", "buffer", "workers", "weights", "alerts"];
const main = document.getElementById("main");
const shown = { key: null, data: null, route: parse(), error: null };
let known = { runs: [] };
let facts = null;
let connection = "live";
let loading = null;
let again = false;

const say = (text) => (document.getElementById("status").textContent = text);

function context() {
  const { page, params } = shown.route;
  return { page, params, run: params.run, runs: known.runs, facts, set, go, render, reload: () => load(true), say };
}

/** Parts of the address for which a page reads its data again. */
function keyOf({ page, params }) {
  return JSON.stringify([page, ...(PAGES[page].loads ?? ["run"]).map((name) => params[name])]);
}

function frame() {
  const { page, params } = shown.route;
  const run = params.run;
  const entry = (name) => {
    const badge = PAGES[name].badge?.(facts ?? {});
    const here = name === page;
    return h("a", { class: here ? "on" : "", href: link(name, { ...keptOf(params), run }), "aria-current": here && "page" }, PAGES[name].title, badge ? h("b", { class: badge.tone }, badge.text) : null);
  };
  const parts = [brand(connection), runLinks(known.runs, page, run, link)];
  if (run) parts.splice(1, 0, h("div", { class: "pages" }, h("h2", {}, "Run"), OF_A_RUN.map(entry)));
  patch(document.getElementById("nav"), parts);
  patch(document.getElementById("header"), headline(page, OF_A_RUN.includes(page) ? facts : null, connection, { title: PAGES[page].title, stop: () => stopDialog(run, say), help: help }));
  document.title = `${run ? `${run} · ` : ""}${PAGES[page].title} · Weft`;
}

function problem(error) {
  const { run } = shown.route.params;
  const gone = error instanceof Gone;
  const known = gone ? (isExported ? "Not in this file." : "The run is gone.") : "This page could not be read.";
  return h("section", { class: "panel state", key: "problem", role: "alert" },
    h("h2", {}, known), h("p", {}, error.message),
    gone && !isExported ? h("p", {}, run ? `Nothing is left at ${run}: its folder was moved or removed. What you see of other runs is not affected.` : null) : null,
    h("p", {}, h("button", { on: { click: () => load(true) } }, "Read again"), " ", h("a", { href: "#runs" }, "All runs")));
}

function render() {
  frame();
  main.dataset.shows = shown.error && !shown.data ? "problem" : shown.data && shown.key === keyOf(shown.route) ? shown.key : "";
  if (shown.error && !shown.data) return patch(main, [problem(shown.error)]);
  if (!shown.data) return;
  try {
    const stale = shown.error ? [h("p", { class: "panel notice", key: "stale", role: "alert" }, shown.error instanceof Gone && !isExported ? "The run is gone. This page shows the last data that was read." : `Not up to date: ${shown.error.message}`)] : [];
    patch(main, [...stale, h("div", { key: shown.route.page, class: `page ${shown.route.page}` }, PAGES[shown.route.page].view(shown.data, context()))]);
  } catch (error) {
    console.error(error);
    patch(main, [problem(error)]);
  }
}

const skeleton = () => h("div", { class: "page", key: "loading", "aria-busy": "true" }, h("p", { class: "hidden-text" }, "Loading"), [0, 1, 2].map(() => h("div", { class: "panel skeleton" })));

async function readRuns() {
  known = await get("runs");
  const wanted = shown.route.params.run;
  facts = wanted ? await get("run", { run: wanted }) : null;
}

/** Reads the page's data. If it changes during a read, reads again afterwards. */
async function load(quietly = false) {
  const { route } = shown;
  const key = keyOf(route);
  if (loading && loading.key === key) return void (again = true);
  loading?.abort.abort();
  const mine = (loading = { key, abort: new AbortController() });
  const fresh = key !== shown.key;
  const patience = fresh && !quietly ? setTimeout(() => shown.key !== key && patch(main, [skeleton()]), 150) : 0;
  try {
    const [data] = await Promise.all([PAGES[route.page].load(context(), mine.abort.signal), readRuns()]);
    if (loading !== mine) return;
    Object.assign(shown, { key, data, error: null });
  } catch (error) {
    if (error.name === "AbortError" || loading !== mine) return;
    if (fresh && error instanceof Gone) shown.data = null;
    Object.assign(shown, { key, error });
  } finally {
    clearTimeout(patience);
    if (loading === mine) loading = null;
  }
  if (!mine.abort.signal.aborted) render();
  if (fresh && !quietly) scrollTo(0, 0);
  if (again) {
    again = false;
    setTimeout(() => load(true), 1000);
  }
}

function routed() {
  const before = shown.route;
  shown.route = parse();
  if (!(shown.route.page in PAGES)) return go("runs");
  if (before.params.run !== shown.route.params.run) facts = null;
  if (keyOf(shown.route) === shown.key && shown.data) return render();
  const same = shown.data && ["run", "view", "with"].every((name) => before.params[name] === shown.route.params[name]) && before.page === shown.route.page;
  if (!same) shown.data = null;
  if (same) render();
  else {
    say(`${PAGES[shown.route.page].title}: loading`);
    frame();
  }
  load(same);
}

let due = 0;
function changed({ run, parts }) {
  const { page, params } = shown.route;
  const looked = run == null || page === "runs" || [params.run, params.with, ...parted(params.runs)].includes(run);
  const needs = PAGES[page].follows;
  if (!looked || document.hidden || (needs && parts && !parts.some((part) => needs.includes(part)))) return;
  clearTimeout(due);
  due = setTimeout(() => load(true), 100);
}

const help = () => showHelp(OF_A_RUN.map((name) => PAGES[name].title), PAGES[shown.route.page].keys ?? {});

function keyed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  if (event.key === "Enter" && event.target.closest("a, button, summary, [role=button]")) return;
  if (event.target.closest("input, select, textarea, [contenteditable]")) return event.key === "Escape" && event.target.blur();
  const { page, params } = shown.route;
  const own = PAGES[page].keys?.[event.key];
  const digit = OF_A_RUN[Number(event.key) - 1];
  const search = document.querySelector("input[type=search]");
  if (own && shown.data) own.does(context(), shown.data);
  else if (event.key === "?") help();
  else if (event.key === "0") go("runs");
  else if (event.key === "/" && search) search.focus();
  else if (digit && params.run) go(digit, { ...keptOf(params), run: params.run });
  else return;
  event.preventDefault();
}

addEventListener("hashchange", routed);
addEventListener("keydown", keyed);
document.addEventListener("visibilitychange", () => document.hidden || isExported || load(true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("theme")));
addEventListener("theme", render);
listen(changed, (state) => {
  if (state === "live" && connection === "lost") load(true);
  connection = state;
  frame();
});
// A dashboard of one run, and an exported one, open the run.
if (!location.hash) get("runs").then(({ single, runs: [only, ...others] }) => (single || isExported) && only && !others.length && !location.hash && go("curves", { run: only.run }), () => {});
routed();
