// The most important curves in order, and all others by search. Overlays several runs.
import { get } from "./api.js";
import { chart } from "./chart.js";
import { h, widget } from "./dom.js";
import { ago, count, measured, number } from "./format.js";
import { joined, link, parted } from "./route.js";
import { smooth, together } from "./smooth.js";
import { empty } from "./table.js";
import { line } from "./text.js";
import { spanOf } from "./zoom.js";

const FOUND = 36;
const FEW = 20; // points that need no smoothing
const AXES = { step: "steps", time_s: "time", samples: "samples" };
const COLOURS = ["--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7", "--s8"];
const SMOOTHING = "0.2";
const UNITS = { "0 to 1": "", "of the reward": "", "of the gradient": "", "tokens/s": "", ratio: "", "nats/token": "nats a token" };

const runsOf = (params) => [params.run, ...parted(params.runs)].filter((run, place, all) => run && all.indexOf(run) === place);

/** The card of a metric from the search. */
function cardOf(metric) {
  const form = metric.unit === "bytes" ? "bytes" : metric.unit === "0 to 1" ? "share" : "number";
  return { ...metric, id: metric.name, title: metric.name, names: [metric.name], bands: {}, form, floor: metric.unit === "0 to 1" ? 0 : null };
}

function wanted({ cards, metrics }, search) {
  if (!search) return cards;
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const named = (metric) => words.every((word) => metric.name.toLowerCase().includes(word));
  const hits = (metric) => words.every((word) => `${metric.name} ${metric.meaning ?? ""}`.toLowerCase().includes(word));
  return metrics.filter(hits).sort((a, b) => named(b) - named(a)).slice(0, FOUND).map(cardOf);
}

export async function load({ params }, signal) {
  const runs = runsOf(params);
  const known = await get("metrics", { runs: joined(runs) }, signal);
  const cards = wanted(known, params.q);
  const names = [...new Set(cards.flatMap((card) => [...card.names, card.spread, card.beside, ...(card.lost ?? []), ...Object.values(card.bands ?? {}).flat()]))].filter(Boolean);
  const [start, end] = spanOf(params) ?? [];
  const asked = { runs: joined(runs), names: joined(names), axis: params.axis ?? "step", points: 600, start, end };
  const curves = names.length ? await get("curves", asked, signal) : { series: [], marks: [] };
  return { runs, metrics: known.metrics, cards, ...curves };
}

const last = (curve) => curve && (curve.y.findLast((value) => value != null) ?? null);
const short = (names, name) => (names.length > 1 ? name.split("/")[0] : "");

/** A card's series of one run: each metric smoothed, over its faint raw values, and its interval. */
function drawn(card, run, place, data, weight, large) {
  const find = (name) => name && data.series.find((one) => one.run === run && one.name === name);
  const several = data.runs.length > 1;
  const gentle = (y) => (y.length > FEW ? smooth(y, weight) : y);
  return (several ? card.names.slice(0, 1) : card.names).flatMap((name, index) => {
    const curve = find(name);
    if (!curve || !curve.x.length) return [];
    const shade = COLOURS[(several ? place : index) % COLOURS.length];
    const label = [several ? run : "", short(card.names, name)].filter(Boolean).join(" ");
    const [low, high] = (card.bands?.[name] ?? []).map(find);
    const spread = large && !several && find(card.spread);
    const parts = [];
    if (low && high) parts.push({ ...high, colour: shade, band: "high", name: `${label} upper end` }, { ...low, colour: shade, band: "low", name: `${label} lower end` });
    if (spread && spread.x.length === curve.x.length) {
      parts.push({ x: curve.x, y: curve.y.map((y, at) => y + spread.y[at]), colour: shade, band: "high", name: "mean + deviation" }, { x: curve.x, y: curve.y.map((y, at) => y - spread.y[at]), colour: shade, band: "low", name: "mean − deviation" });
    }
    const beside = !several && find(card.beside);
    if (large && beside) parts.push({ ...beside, y: gentle(beside.y), colour: "--s2", width: 1, name: beside.name.split("/").pop() });
    const exact = low && high; // do not smooth metrics with an interval
    if (weight && !exact && curve.x.length > FEW) parts.push({ x: curve.x, y: curve.y, colour: shade, faint: true, width: 1 });
    return [...parts, { x: curve.x, y: exact ? curve.y : gentle(curve.y), name: label, colour: shade, width: index ? 1.25 : 1.75 }];
  });
}

function banded(card, data, weight) {
  const curves = data.series.filter((one) => one.name === card.names[0] && one.x.length);
  if (!curves.length) return [];
  const all = together(curves.map((curve) => ({ x: curve.x, y: smooth(curve.y, weight) })));
  return [
    { x: all.x, y: all.high, colour: "--s1", band: "high", name: "mean + deviation" }, { x: all.x, y: all.low, colour: "--s1", band: "low", name: "mean − deviation" },
    { x: all.x, y: all.mean, colour: "--s1", width: 1.75, name: `mean of ${curves.length} runs` },
  ];
}

/** The latest values, of each run or each metric of the card. */
function nowOf(card, data) {
  const several = data.runs.length > 1;
  const values = data.runs.flatMap((run, place) => (several ? card.names.slice(0, 1) : card.names).map((name, index) => {
    const find = (other) => other && data.series.find((one) => one.run === run && one.name === other);
    const value = last(find(name));
    if (value == null) return null;
    const [text, unit] = formed(value, card);
    const [low, high] = (card.bands?.[name] ?? []).map((end) => last(find(end)));
    const notes = several ? [] : [short(card.names, name) || unit];
    if (!several && low != null && high != null) notes.push(`${formed(low, card)[0]} to ${formed(high, card)[0]}`);
    if (!several && last(find(card.spread)) != null) notes.push(`± ${formed(last(find(card.spread)), card)[0]}`);
    if (!several && last(find(card.beside)) != null) notes.push(`${card.beside.match(/\/(max)_|^(max)_/)?.slice(1).find(Boolean) ?? card.beside.split("/").pop()} ${formed(last(find(card.beside)), card)[0]}`);
    const lost = last(find((card.lost ?? []).find((one) => one.split("/")[0] === name.split("/")[0])));
    if (lost) notes.push(`${count(lost)} prompts lost`);
    const key = several || card.names.length > 1 ? h("i", { class: "key", css: { "--shade": `var(${COLOURS[(several ? place : index) % COLOURS.length]})` } }) : null;
    return h("span", {}, key, text, notes.some(Boolean) ? h("small", {}, ` ${notes.filter(Boolean).join(" · ")}`) : null);
  }));
  return values.filter(Boolean);
}

function formed(value, card) {
  if (card.form === "share") return measured(value, "share");
  if (card.form === "bytes") return measured(value, "bytes");
  return measured(value, UNITS[card.unit] ?? card.unit);
}

export function panel(card, data, { params, set }) {
  const weight = Number(params.smooth ?? SMOOTHING);
  const large = params.big === card.id;
  const series = params.band && data.runs.length > 1 ? banded(card, data, weight) : data.runs.flatMap((run, place) => drawn(card, run, place, data, weight, large));
  const marks = data.marks.filter((mark) => mark.run === data.runs[0]);
  const zoom = (from, to) => set({ t: "", x: from == null ? "" : `${+from.toPrecision(6)}~${+to.toPrecision(6)}` });
  const axis = params.axis ?? "step";
  const props = { series, marks, range: spanOf(params), log: Boolean(params.log), axis, floor: card.floor, form: card.form, zoom, label: `${card.title}: curve over ${AXES[axis]}` };
  const explain = [card.names.join(", "), card.meaning, card.good && `Good: ${card.good}.`, card.bad && `Bad: ${card.bad}.`].filter(Boolean).join("\n");
  const now = nowOf(card, data);
  return h("section", { class: `panel card ${large ? "large" : ""} ${now.length > 1 ? "many" : ""}`, key: card.id },
    h("div", { class: "top" }, h("h3", { class: "name", title: explain }, card.title, data.runs.length > 1 && card.names.length > 1 ? h("small", {}, short(card.names, card.names[0])) : null),
      h("button", { class: "grow", "aria-pressed": String(large), "aria-label": `${large ? "smaller" : "larger"}: ${card.title}`, on: { click: () => set({ big: large ? "" : card.id }) } }, large ? "▣" : "⤢")),
    h("div", { class: "now" }, now.length ? now : h("small", {}, "not measured yet")),
    large && card.meaning ? h("p", { class: "small soft" }, `${card.names.join(", ")}: ${card.meaning}.`, card.good ? ` Good: ${card.good}.` : "", card.bad ? ` Bad: ${card.bad}.` : "") : null,
    series.length ? widget(chart, props, { class: "chart" }) : h("div", { class: "chart faint small" }));
}

function toolbar(data, { params, set, runs }) {
  const weight = params.smooth ?? SMOOTHING;
  const axis = (name) => h("button", { class: "chip", "aria-pressed": String((params.axis ?? "step") === name), on: { click: () => set({ axis: name === "step" ? "" : name, x: "", t: "" }) } }, AXES[name]);
  const others = runs.filter((run) => !data.runs.includes(run.run));
  const add = others.length ? h("select", { "aria-label": "lay another run over", on: { change: (event) => event.target.value && set({ runs: joined([...data.runs.slice(1), event.target.value]) }) } }, h("option", { value: "" }, "+ another run"), others.map((run) => h("option", { value: run.run }, line(run.run, 60)))) : null;
  return h("div", { class: "toolbar", key: "toolbar" },
    h("input", { type: "search", placeholder: `Search ${data.metrics.length} metrics`, "aria-label": "search metrics", value: params.q ?? "", on: { input: (event) => set({ q: event.target.value }) } }),
    h("span", { class: "chips", role: "group", "aria-label": "axis" }, Object.keys(AXES).map(axis)),
    h("label", {}, "smooth", h("input", { type: "range", min: "0", max: "1", step: "0.05", value: weight, on: { input: (event) => set({ smooth: event.target.value }) } }), number(Number(weight))),
    h("label", {}, h("input", { type: "checkbox", checked: Boolean(params.log), on: { change: (event) => set({ log: event.target.checked }) } }), "log"),
    data.runs.length > 1 ? h("label", {}, h("input", { type: "checkbox", checked: Boolean(params.band), on: { change: (event) => set({ band: event.target.checked }) } }), "mean and band") : null,
    add,
    params.x ? h("button", { on: { click: () => set({ x: "", t: "" }) } }, "Whole run") : null);
}

function legend(data, { params, set }) {
  if (data.runs.length < 2) return null;
  const entry = (run, place) => h("span", { key: run }, h("i", { class: "key", css: { "--shade": `var(${COLOURS[place % COLOURS.length]})` } }), line(run, 60),
    place ? h("button", { class: "quiet", "aria-label": `leave out ${line(run)}`, on: { click: () => set({ runs: joined(data.runs.filter((other, at) => at && other !== run)) }) } }, "×") : null);
  return h("div", { class: "legend", key: "legend" }, data.runs.map(entry));
}

function view(data, context) {
  const { params, facts } = context;
  const head = [h("h2", { class: "hidden-text", key: "title" }, "Curves"), toolbar(data, context), legend(data, context)];
  if (!data.metrics.length) return [...head.slice(0, 1), empty("No step is over yet.", facts?.status === "running" ? "Curves begin with the first step." : "This run ended before its first step was over.")];
  if (!data.cards.length) return [...head, empty("No metric matches.", `There are ${data.metrics.length}; names, titles and meanings are searched.`)];
  const marked = [...new Set(data.marks.map((mark) => mark.kind))];
  const foot = marked.length ? h("p", { class: "faint small", key: "marks" }, `Vertical lines: ${marked.join(", ")}. Drag to zoom, double-click for the whole run.`) : null;
  const order = params.big ? [...data.cards].sort((a, b) => (b.id === params.big) - (a.id === params.big)) : data.cards;
  const early = facts && !facts.step ? h("p", { class: "panel notice", key: "early" }, facts.status === "running" ? "No step has finished yet: most curves begin with the first." : "This run ended before its first step was over.") : null;
  return [...head, early, warning(facts), h("div", { class: "cards", key: "cards" }, order.map((card) => panel(card, data, context))), foot];
}

/** The run's last alert. */
function warning(facts) {
  const last = facts?.why ? null : facts?.trouble;
  if (!last) return null;
  return h("p", { class: "panel alert", key: "alert" }, h("span", {}, h("b", {}, `▲ ${line((last.name ?? "alert").replaceAll("_", " "), 60)} `), line(last.text, 300)), h("a", { href: link("alerts", { run: facts.run }) }, `step ${number(last.step)} · ${ago(last.at)}`));
}

function zoomed(factor, move) {
  return ({ params, set }, data) => {
    const known = data.series.filter((one) => one.x.length);
    const whole = [Math.min(...known.map((one) => one.x[0])), Math.max(...known.map((one) => one.x[one.x.length - 1]))];
    const [from, to] = spanOf(params) ?? whole;
    const [middle, half] = [(from + to) / 2 + move * (to - from), ((to - from) / 2) * factor];
    const next = [Math.max(whole[0], middle - half), Math.min(whole[1], middle + half)];
    set({ t: "", x: factor > 1 && next[0] <= whole[0] && next[1] >= whole[1] ? "" : next.map((x) => +x.toPrecision(6)).join("~") });
  };
}

const keys = {
  "+": { what: "zoom in", does: zoomed(0.5, 0) },
  "-": { what: "zoom out", does: zoomed(2, 0) },
  ArrowLeft: { what: "earlier", does: zoomed(1, -0.25) },
  ArrowRight: { what: "later", does: zoomed(1, 0.25) },
  l: { what: "logarithmic", does: ({ params, set }) => set({ log: !params.log }) },
};

export const curves = {
  title: "Curves", loads: ["run", "runs", "axis", "q", "x"], follows: ["metrics", "alerts", "checkpoints", "status"], load, view, keys,
};
