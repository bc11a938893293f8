// The samples page: groups side by side, coloured tokens, conversations as turns, two responses compared, one prompt over training.
import { Gone, get } from "./api.js";
import { difference } from "./diff.js";
import { h, widget } from "./dom.js";
import { episodeDetail, sampledOf } from "./episode.js";
import { count, number, signed } from "./format.js";
import { link } from "./route.js";
import { PAGE, groupList, pips, sampleTable, sqlPanel, topOf } from "./sample_list.js";
import { empty } from "./table.js";
import { block, line, visible } from "./text.js";
import { stepsChip, stepsOf } from "./zoom.js";
import { SHADES, ramp, scaleOf, shadeOfColumn, tokens } from "./tokens.js";
import { promptTurns, responseTurns } from "./turns.js";

const AGAIN_MS = 700;
const MOST_PARTS = 8; // of a reward to show

async function load(context, signal) {
  const data = await read(context, signal).catch((error) => {
    if (error instanceof Gone || error.name === "AbortError") throw error;
    return { refused: error.message }; // keep the toolbar, to correct a filter
  });
  const indexed = data.list?.indexed;
  if (indexed && indexed.read < indexed.files) setTimeout(() => signal.aborted || context.reload(), AGAIN_MS);
  return data;
}

async function read({ run, params }, signal) {
  const steps = stepsOf(params);
  const filter = [params.filter, steps && `step >= ${steps[0]} and step <= ${steps[1]}`].filter(Boolean).join(" and ");
  const asked = { run, search: params.q, filter, sort: params.sort, offset: params.offset, limit: PAGE };
  if (params.view === "sql") return { sql: true };
  if (params.view === "table") return { list: await get("samples", asked, signal) };
  const list = await get("groups", asked, signal);
  if (params.episode) return { list, episode: await get("episode", { run, id: params.episode, turn: params.turn }, signal) };
  const id = params.group ?? list.groups[0]?.group;
  const [group, prompt] = await Promise.all([id == null ? null : get("group", { run, id }, signal), params.key ? get("prompt", { run, key: params.key }, signal) : null]);
  return { list, group, prompt };
}

const chip = (text, pressed, click, label) => h("button", { class: "chip", "aria-pressed": String(pressed), "aria-label": label, on: { click } }, text);

function toolbar({ params, set }) {
  const field = (name, placeholder, label) => h("input", { type: name === "q" ? "search" : "text", placeholder, "aria-label": label, value: params[name] ?? "", on: { change: (event) => set({ [name]: event.target.value, offset: "", group: "", sample: "", episode: "", turn: "" }) } });
  const view = (name, text) => chip(text, (params.view ?? "") === name, () => set({ view: name, offset: "", sort: "" }));
  return h("div", { class: "toolbar", key: "toolbar" }, h("span", { class: "chips", role: "group", "aria-label": "how samples are listed" }, view("", "groups"), view("table", "table"), view("sql", "SQL")),
    params.view === "sql" ? null : [field("q", "Search prompts and responses", "search the text of samples"), field("filter", "reward > 0.5 and response ~ sorry", "condition on columns: <= >= != = < > and ~ for text, joined by and"), params.filter || params.q ? h("button", { on: { click: () => set({ q: "", filter: "", offset: "" }) } }, "All") : null], stepsChip({ params, set }));
}

/** Whether tokens have only ids, because the tokenizer is not on the dashboard's machine. */
const unnamed = (sample) => Boolean(sample.response && sample.tokens?.length && sample.tokens.every((token) => /^⟨\d+⟩$/.test(token)));
const piecesOf = (sample) => (sample.tokens?.length && !unnamed(sample) ? sample.tokens : (sample.response ?? "").match(/\s*\S+/g) ?? []);

function versions(sample) {
  const known = (sample.columns?.version ?? []).filter((version) => version != null);
  if (!known.length) return null;
  const [low, high] = [known.reduce((a, b) => Math.min(a, b)), known.reduce((a, b) => Math.max(a, b))];
  return h("span", {}, low === high ? `v${low}` : `v${low} → v${high}`);
}

function response(sample, by, scale, context) {
  const { params, set, run, render } = context;
  const on = String(params.sample) === String(sample.id);
  const picked = (params.diff ?? "").split("~").filter(Boolean);
  const pick = () => set({ diff: (picked.includes(String(sample.id)) ? picked.filter((id) => id !== String(sample.id)) : [...picked, sample.id].slice(-2)).join("~") });
  const figure = (label, value) => (value == null ? null : h("span", {}, `${label} `, h("b", {}, value)));
  const length = sample.cut ?? sample.tokens?.length;
  const scalars = Object.entries(sample.scalars ?? {}).filter(([, value]) => value != null && typeof value !== "object");
  const body = sample.turns?.length && params.as !== "tokens" ? responseTurns(sample, by, scale, render) : sample.tokens?.length && (params.as === "tokens" || !unnamed(sample)) ? widget(tokens, { sample, by, scale }, { class: "figured" }) : block(`${sample.id}/response`, sample.response, render);
  return h("article", { class: `panel response ${on ? "on" : ""}`, key: `s${sample.id}`, "aria-label": `response ${sample.id}` },
    h("div", { class: "meta" }, figure("reward", number(sample.reward)), Object.entries(sample.parts ?? {}).slice(0, MOST_PARTS).map(([name, value]) => figure(line(name, 40), number(value))), sample.advantage != null ? figure("advantage", signed(sample.advantage)) : null, length != null ? h("span", {}, `${count(length)} tokens`) : null, versions(sample), sample.truncated ? h("span", { class: "warn-text" }, "truncated") : null,
      h("span", { class: "fill" }), sample.episode ? h("a", { href: link("samples", { ...params, group: sample.group ?? params.group, episode: sample.episode, sample: "", diff: "", key: "" }), title: "the whole episode as a tree of turns" }, "episode") : null, h("a", { href: link("samples", { run, group: sample.group ?? params.group, sample: sample.id }), title: "permanent link" }, `#${sample.id}`), chip("diff", picked.includes(String(sample.id)), pick, `compare response ${sample.id}`)),
    sample.own_prompt ? h("details", {}, h("summary", {}, "its own prompt"), sample.prompt_turns?.length ? promptTurns(`${sample.id}/prompt`, sample.prompt_turns, render) : block(`${sample.id}/prompt`, sample.prompt, render, { class: "prompt" })) : null,
    body,
    scalars.length ? h("details", {}, h("summary", {}, `${scalars.length} more columns`), h("dl", { class: "keys small" }, scalars.map(([name, value]) => [h("dt", { class: "faint" }, line(name)), h("dd", {}, typeof value === "number" ? number(value) : line(value, 500))]))) : null);
}

function compared(group, { params, set }) {
  const [a, b] = (params.diff ?? "").split("~").map((id) => group.samples.find((sample) => String(sample.id) === id));
  if (!a || !b) return params.diff ? h("p", { class: "panel notice", key: "diff" }, "Choose a second response to compare with.") : null;
  const parts = difference(piecesOf(a), piecesOf(b));
  const shown = { same: (text) => h("span", {}, visible(text)), gone: (text) => h("del", {}, visible(text)), new: (text) => h("ins", {}, visible(text)) };
  return h("section", { class: "panel pad", key: "diff" }, h("div", { class: "meta" }, h("h3", {}, "Difference"), h("span", {}, h("del", {}, `only #${a.id}`), ` reward ${number(a.reward)}`), h("span", {}, h("ins", {}, `only #${b.id}`), ` reward ${number(b.reward)}`), h("span", { class: "fill" }), h("button", { on: { click: () => set({ diff: "" }) } }, "Close")),
    h("div", { class: "text tokens", dir: "ltr" }, parts.map(([kind, list]) => shown[kind](list.join("")))));
}

function overTraining(prompt, { params, set }) {
  const top = topOf(prompt.visits);
  const row = (visit) => h("a", { class: "entry", key: String(visit.group), href: link("samples", { ...params, group: visit.group, sample: "", diff: "" }) }, h("span", { class: "first mono" }, line(visit.response, 140)), pips(visit.rewards, top), h("small", {}, `step ${count(visit.step)} · group ${count(visit.group)}`), h("small", {}, "best response"));
  return h("section", { class: "panel", key: "prompt" }, h("div", { class: "pad meta" }, h("h3", {}, "This prompt over training", h("small", {}, prompt.visits.length === 1 ? "generated for once so far" : `generated for ${count(prompt.visits.length)} times`)), h("span", { class: "fill" }), h("button", { on: { click: () => set({ key: "" }) } }, "Close")), prompt.visits.map(row));
}

/** [columns that colour tokens, the chosen one], the columns with a meaning first. */
function coloursOf(samples, params) {
  const columns = [...new Set(samples.flatMap((sample) => Object.keys(sample.columns ?? {})))];
  const known = [...Object.keys(SHADES).filter((name) => columns.includes(name)), ...columns.filter((name) => !(name in SHADES))];
  return [known, known.includes(params.by) ? params.by : (known.find((name) => name === "gap") ?? known[0])];
}

const colourChips = (known, by, set) => h("span", { class: "chips", role: "group", "aria-label": "tokens are coloured by" }, known.map((name) => chip(shadeOfColumn(name).title, name === by, () => set({ by: name }))));

/** The rows of each episode next to one another, below a line about it if an episode has several rows. */
function byEpisode(samples, draw) {
  const rows = new Map();
  for (const { episode } of samples) rows.set(episode, (rows.get(episode) ?? 0) + 1);
  const several = [...rows].some(([episode, number]) => episode && number > 1);
  const head = ({ episode }) => h("p", { class: "episode small soft", key: `e${episode}` }, `Episode of ${rows.get(episode) === 1 ? "one row" : `${count(rows.get(episode))} rows`}`);
  return samples.map((sample, place) => [several && sample.episode && sample.episode !== samples[place - 1]?.episode ? head(sample) : null, draw(sample)]);
}

function detail(data, context) {
  const { params, set, render } = context;
  const { group, episode } = data;
  if (episode) {
    const [known, by] = coloursOf(sampledOf(episode), params);
    return episodeDetail(episode, by, colourChips(known, by, set), context);
  }
  if (!group) return h("div", { class: "detail" }, empty("No sample is chosen."));
  if (group.waits) return h("div", { class: "detail", key: `g${group.group}` }, h("h2", {}, `Group ${count(group.group)}`, h("small", {}, "not recorded yet")), group.waits.map((text) => h("p", { class: "panel notice" }, line(text, 1000))));
  const [known, by] = coloursOf(group.samples, params);
  const scale = by ? scaleOf(group.samples, by) : null;
  const key = group.prompt_key;
  const other = group.turns?.length || group.samples.some((sample) => sample.turns?.length || unnamed(sample));
  return h("div", { class: "detail", key: `g${group.group}` },
    h("div", { class: "row" }, h("h2", {}, `Group ${count(group.group)}`, h("small", {}, `step ${count(group.step)} · ${group.samples.length} responses`)), h("span", { class: "fill" }),
      key != null ? h("button", { on: { click: () => set({ key: params.key ? "" : key }) } }, "Over training") : null,
      other ? chip("as tokens", params.as === "tokens", () => set({ as: params.as === "tokens" ? "" : "tokens" })) : null,
      chip("side by side", !params.stack, () => set({ stack: !params.stack }))),
    group.turns?.length && params.as !== "tokens" ? promptTurns(`${group.group}/prompt`, group.turns, render) : block(`${group.group}/prompt`, group.prompt, render, { class: "prompt" }),
    group.answer ? h("p", { class: "meta" }, "answer ", h("b", { class: "mono" }, line(group.answer, 300))) : null,
    data.prompt ? overTraining(data.prompt, context) : null,
    known.length ? h("div", { class: "row" }, colourChips(known, by, set), h("span", { class: "fill" }), ramp(by, scale)) : null,
    known.length ? h("p", { class: "faint small" }, "Point at a token for its figures, or go to a response with Tab and use the arrow keys. Underlined: written by a newer policy.") : null,
    compared(group, context),
    h("div", { class: `responses ${params.stack ? "stack" : ""}` }, byEpisode(group.samples, (sample) => response(sample, by, scale, context))));
}

function view(data, context) {
  const head = [h("h2", { class: "hidden-text", key: "title" }, "Samples"), toolbar(context)];
  if (data.sql) return [...head, sqlPanel(context)];
  if (data.refused) return [...head, h("p", { class: "panel notice", role: "alert", key: "refused" }, line(data.refused, 1000))];
  const { params, facts } = context;
  const filtered = params.q || params.filter || params.offset || params.x;
  if (!data.list.total && !filtered) return [...head.slice(0, 1), empty("No sample was recorded yet.", facts?.status === "running" ? "Samples are written when the update that trained on them is over." : "Driver(record_every=...) sets how often samples are written; 0 turns this off.")];
  if (params.view === "table") return [...head, sampleTable(data.list, context)];
  return [...head, h("div", { class: "panel split", key: "split" }, groupList(data.list, context), detail(data, context))];
}

function next(by) {
  return ({ params, set }, data) => {
    const groups = data.list?.groups ?? [];
    const at = groups.findIndex((group) => String(group.group) === String(params.group ?? groups[0]?.group)) + by;
    if (groups[at]) set({ group: groups[at].group, sample: "", diff: "", key: "", episode: "", turn: "" });
  };
}

function recolour({ params, set }, data) {
  const [all, by] = coloursOf(data.episode ? sampledOf(data.episode) : (data.group?.samples ?? []), params);
  const known = all.filter((name) => name in SHADES);
  const at = known.indexOf(by);
  if (known.length) set({ by: known[(at + 1) % known.length] });
}

function another(by) {
  return ({ params, set }, data) => {
    const ids = (data.group?.samples ?? []).map((sample) => String(sample.id));
    const at = Math.max(0, Math.min(ids.length - 1, ids.indexOf(String(params.sample)) + by));
    if (!ids.length) return;
    set({ group: data.group.group, sample: ids[at] });
    document.querySelector(".response.on")?.scrollIntoView({ block: "nearest" });
  };
}

const keys = {
  j: { what: "next group", does: next(1) }, k: { what: "previous group", does: next(-1) }, n: { what: "next response", does: another(1) }, p: { what: "previous response", does: another(-1) },
  c: { what: "colour by the next column", does: recolour }, b: { what: "side by side or below one another", does: ({ params, set }) => set({ stack: !params.stack }) },
};
const badge = (facts) => (facts.samples ? { text: facts.samples >= 10000 ? `${Math.round(facts.samples / 1000)}k` : count(facts.samples), tone: "" } : null);

export const samples = { title: "Samples", loads: ["run", "view", "q", "filter", "sort", "offset", "group", "key", "episode", "turn", "x", "axis"], follows: ["samples", "status"], load, view, keys, badge };
