// An episode as a tree: its prompt and group, its branches, and a page of its turns.
import { h, widget } from "./dom.js";
import { count, number, signed } from "./format.js";
import { link } from "./route.js";
import { topOf } from "./sample_list.js";
import { block, line } from "./text.js";
import { ramp, scaleOf, tokens } from "./tokens.js";
import { promptTurns, responseTurns } from "./turns.js";

const FEW = 12; // branches and rows to show unfolded
const DEEPEST = 6; // levels of indentation

const figure = (label, value) => (value == null ? null : h("span", {}, `${label} `, h("b", {}, value)));
const versions = (range) => (range ? h("span", {}, range[0] === range[1] ? `v${range[0]}` : `v${range[0]} → v${range[1]}`) : null);
const several = (number, one) => `${count(number)} ${number === 1 ? one : one.endsWith("ch") ? `${one}es` : `${one}s`}`;
const indent = (depth) => ({ "--depth": String(Math.min(depth, DEEPEST)) });

/** A sampled turn in the form that the token views take. */
export const sampleOf = (turn, episode) => ({ id: `${episode.episode}/${turn.number}`, tokens: turn.texts, columns: turn.columns, turns: turn.messages, cut: turn.cut });

/** The way to an episode: its prompt, its group and the group's other episodes. */
function lineage(episode, { params, run, set }) {
  const top = topOf([{ rewards: episode.others.map((other) => other.reward) }]);
  const shade = (reward) => (reward == null ? "" : top > 0 && reward >= top * 0.999 ? "full" : reward > 0 ? "half" : "");
  const about = (other) => `${several(other.turns, "sampled turn")} and ${several(other.tokens, "token")} in ${several(other.rows, "row")}${other.truncated ? ", truncated" : ""}`;
  const chip = (other) => h("a", { class: `chip ${other.episode === episode.episode ? "on" : ""}`, key: other.episode, "aria-current": other.episode === episode.episode && "page", title: `episode ${other.episode}: ${about(other)}`, href: link("samples", { ...params, group: episode.group, episode: other.episode, turn: "", sample: "" }) },
    h("span", { class: "pips" }, h("i", { class: shade(other.reward) })), ` ${number(other.reward)}`);
  const row = (one, place) => h("a", { href: link("samples", { run, group: episode.group, sample: one.id }), title: `row #${one.id}: ${several(one.turns, "sampled turn")}, ${count(one.trained)} of ${several(one.tokens, "token")} trained${one.truncated ? ", truncated" : ""}` }, `row ${place + 1}`);
  const rows = h("span", { class: "row" }, episode.rows.map(row));
  return h("section", { class: "panel pad lineage", key: "lineage", "aria-label": "lineage" },
    h("p", { class: "row" }, h("span", { class: "faint small" }, "prompt"), h("span", { class: "mono" }, line(episode.prompt, 160) || "(no text)"), h("button", { on: { click: () => set({ episode: "", turn: "", group: episode.group, key: episode.prompt_key }) } }, "Over training")),
    h("p", { class: "row" }, h("span", { class: "faint small" }, "group"), h("a", { href: link("samples", { run, group: episode.group }) }, `group ${count(episode.group)}`), h("span", { class: "faint small" }, `step ${count(episode.step)} · rewards of its ${several(episode.others.length, "episode")}`), h("span", { class: "chips" }, episode.others.map(chip))),
    h("div", { class: "row" }, h("span", { class: "faint small" }, "episode"), h("span", { class: "mono" }, episode.episode), episode.rows.length > FEW ? h("details", {}, h("summary", {}, several(episode.rows.length, "row")), rows) : rows,
      episode.rows_made > episode.rows.length ? h("span", { class: "warn-text small" }, `${several(episode.rows_made - episode.rows.length, "more row")} not recorded or not shown`) : null,
      h("a", { class: "small", href: link("samples", { run, view: "table", filter: `episode = ${episode.episode}` }) }, "as table")));
}

/** The branches of the tree, each with a link to its first turn. */
function outline(episode, { params }) {
  const shown = (branch, place) => episode.turns.some((turn) => turn.branch === place);
  const ends = (branch) => branch.ends.map((row) => [figure("reward", number(episode.rows[row].reward)), episode.rows[row].truncated ? h("span", { class: "warn-text" }, "truncated") : null]);
  const entry = (branch, place) => h("li", { key: String(place), css: indent(branch.depth) },
    h("a", { href: link("samples", { ...params, turn: branch.first }), class: shown(branch, place) ? "on" : "" }, `branch ${place + 1}`), " ", h("span", { class: "mono" }, line(branch.title, 90)),
    h("span", { class: "meta" }, branch.parent != null ? h("span", {}, `after branch ${branch.parent + 1}`) : null, h("span", {}, several(branch.turns, "sampled turn")), h("span", {}, `${count(branch.trained)} of ${several(branch.tokens, "token")} trained`), h("span", {}, `row ${branch.rows.map((row) => (row == null ? "…" : row + 1)).join(", ")}`), ends(branch)));
  const list = h("ol", { class: "tree" }, episode.branches.map(entry));
  return h("section", { class: "panel pad", key: "tree", "aria-label": "branches" }, h("h3", {}, "Branches"), episode.branches.length > FEW ? h("details", {}, h("summary", {}, several(episode.branches.length, "branch")), list) : list);
}

function turnOf(turn, episode, by, scale, context) {
  const { run, render, params } = context;
  const name = `${episode.episode}/${turn.number}`;
  const depth = episode.branches[turn.branch].depth;
  const sample = turn.sampled ? sampleOf(turn, episode) : null;
  const drawn = turn.sampled
    ? turn.messages?.length && params.as !== "tokens" ? responseTurns(sample, by, scale, render) : widget(tokens, { sample, by, scale }, { class: "figured" })
    : turn.messages.length ? promptTurns(name, turn.messages, render) : block(name, turn.text, render);
  const trained = turn.sampled ? (turn.trained === turn.tokens ? null : turn.trained ? h("span", { class: "warn-text" }, `${count(turn.trained)} trained`) : h("span", { class: "warn-text" }, "not trained")) : h("span", {}, "not trained");
  return h("article", { class: `panel episode-turn ${turn.sampled ? "sampled" : "given"}`, key: `t${turn.number}`, css: indent(depth), "aria-label": `turn ${turn.number + 1}, ${turn.sampled ? "sampled" : "given"}` },
    h("div", { class: "meta" }, h("a", { href: link("samples", { ...params, turn: turn.number }), title: "permanent link" }, `${turn.number + 1}`), h("b", {}, turn.sampled ? "sampled" : "given"), h("span", {}, several(turn.tokens, "token")), trained,
      versions(turn.version), turn.sampled ? figure("mean log-probability", number(turn.logprob)) : null, turn.reward != null ? figure("reward", number(turn.reward)) : null, turn.advantage != null ? figure("advantage", signed(turn.advantage)) : null, turn.truncated ? h("span", { class: "warn-text" }, "truncated") : null,
      h("span", { class: "fill" }), h("span", { class: "faint" }, `branch ${turn.branch + 1}`), turn.sampled ? h("a", { href: link("samples", { run, group: episode.group, sample: turn.row }) }, `#${turn.row}`) : null),
    drawn, turn.cut ? h("p", { class: "faint small" }, `Cut: the turn has ${count(turn.cut)} tokens.`) : null);
}

function pager(episode, { params, set }) {
  const { first, last, total } = episode;
  if (!first && last >= total) return null;
  const size = Math.max(1, last - first);
  const turnTo = (turn) => {
    set({ turn });
    document.querySelector(".detail")?.scrollIntoView();
  };
  return h("div", { class: "row" },
    h("button", { disabled: first === 0, "aria-label": "earlier turns", on: { click: () => turnTo(Math.max(0, first - size) || "") } }, "‹"),
    h("span", { class: "small soft" }, `turns ${count(first + 1)} to ${count(last)} of ${count(total)}`),
    h("button", { disabled: last >= total, "aria-label": "later turns", on: { click: () => turnTo(last) } }, "›"));
}

/** Samples whose columns colour the tokens of an episode's page. */
export const sampledOf = (episode) => episode.turns.filter((turn) => turn.sampled);

export function episodeDetail(episode, by, colours, context) {
  const { params, set, run } = context;
  const scale = by ? scaleOf(sampledOf(episode), by) : null;
  return h("div", { class: "detail", key: `e${episode.episode}` },
    h("div", { class: "row" }, h("h2", {}, "Episode", h("small", {}, `${several(episode.total, "turn")} · ${several(episode.branches.length, "branch")} · ${several(episode.rows.length, "row")}`)), h("span", { class: "fill" }),
      h("button", { "aria-pressed": String(params.as === "tokens"), class: "chip", on: { click: () => set({ as: params.as === "tokens" ? "" : "tokens" }) } }, "as tokens"),
      h("a", { href: link("samples", { run, group: episode.group }) }, "Close")),
    lineage(episode, context),
    episode.has_texts ? null : h("p", { class: "panel notice" }, "The run's tokenizer is not on this machine, so turns appear as token ids. The page of each row shows its recorded text."),
    outline(episode, context),
    by ? h("div", { class: "row" }, colours, h("span", { class: "fill" }), ramp(by, scale)) : null,
    pager(episode, context),
    episode.turns.map((turn) => turnOf(turn, episode, by, scale, context)),
    pager(episode, context));
}
