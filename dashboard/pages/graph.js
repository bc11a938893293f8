// The run's graph, live: rows at each node, its group, rates, and versions and ages of weights.
import { get } from "./api.js";
import { h, s } from "./dom.js";
import { ago, bytes, count, duration, number } from "./format.js";
import { layout } from "./graph_layout.js";
import { link } from "./route.js";
import { empty, table } from "./table.js";
import { line } from "./text.js";

const WIDTH = 160;
const NARROWEST = 84; // width of a node beside others on a phone
const HEIGHT = 76;
const MARGIN = 10;
const GAP = 40; // minimum, between layers side by side
const DOWN_GAP = 32;
const [LANE, DOWN_LANE] = [28, 12]; // between edges of weights
const ARROWS = [["arrow", "tip-ink"], ["arrow-weights", "tip-accent"]];
const cut = (text, limit) => (text.length > limit ? `${text.slice(0, limit - 1)}…` : text);
const short = (name) => name.split("/").pop().split(".").pop();

function bar(node, x, y, width) {
  const parts = [[node.done, "tip-ok"], [node.leased, "tip-busy"], [node.waiting, "tip-idle"]];
  const inside = (node.leased ?? 0) + (node.waiting ?? 0);
  if (inside) parts[0][0] = Math.min(parts[0][0] ?? 0, inside); // keep rows in flight visible in a long run
  const total = parts.reduce((sum, [rows]) => sum + (rows ?? 0), 0);
  let at = x;
  return parts.map(([rows, shade]) => {
    if (!rows || !total) return null;
    const wide = Math.max(2, (rows / total) * (width - 24));
    const drawn = s("rect", { class: shade, x: at, y, width: Math.max(1, wide - 1), height: 6, rx: 2 });
    at += wide;
    return drawn;
  });
}

function noteOf(node) {
  if (node.note) return node.note;
  if (node.issued != null) return `${count(node.issued)} issued`;
  if (!node.waiting && !node.leased && !node.done) return "no rows yet";
  const flow = node.rate_out ? `${number(node.rate_out)} rows/s` : node.leased ? `${count(node.leased)} under way` : node.waiting ? `${count(node.waiting)} waiting` : "up to date";
  return flow;
}

function box(node, { x, y }, width, chosen, choose) {
  const letters = (size) => Math.floor((width - 24) / size);
  const runs = node.group ? `${node.group}${node.ranks > 1 ? ` · ${node.ranks} ranks` : ""}` : (node.shape ?? "");
  const rows = `${count(node.waiting)} rows waiting, ${count(node.leased)} leased, ${count(node.done)} done`;
  const listens = { click: () => choose(node.name), keydown: (event) => (event.key === "Enter" || event.key === " ") && (event.preventDefault(), event.stopPropagation(), choose(node.name)) };
  return s("g", { class: `node ${node.busy ? "busy" : ""} ${chosen ? "on" : ""}`, key: node.name, tabindex: 0, role: "button", "aria-pressed": String(chosen), "aria-label": `${node.name}, ${runs}, ${node.busy ? "busy" : "idle"}: ${rows}`, on: listens },
    s("title", {}, `${line(node.name)}\n${rows}`),
    s("rect", { class: "box", x, y, width, height: HEIGHT, rx: 8 }),
    s("circle", { class: node.busy ? "tip-busy pulse" : "tip-idle", cx: x + width - 14, cy: y + HEIGHT - 14, r: 4 }),
    s("text", { class: "nm", x: x + 12, y: y + 20 }, cut(line(short(node.name)), letters(7))),
    s("text", { class: "gr", x: x + 12, y: y + 35 }, cut(line(runs), letters(5.9))),
    bar(node, x + 12, y + 44, width),
    s("text", { class: "ct", x: x + 12, y: y + 66 }, cut(line(noteOf(node)), letters(6.2))));
}

function path(from, to, width, down) {
  const [x1, y1, x2, y2] = down ? [from.x + width / 2, from.y + HEIGHT, to.x + width / 2, to.y - 2] : [from.x + width, from.y + HEIGHT / 2, to.x - 2, to.y + HEIGHT / 2];
  const [mx, my] = [(x1 + x2) / 2, (y1 + y2) / 2];
  // A long edge keeps its direction until it has passed the layers between.
  if (!down && x2 - x1 > width) return { d: `M${x1} ${y1}L${x2 - 44} ${y1}C${x2 - 20} ${y1} ${x2 - 24} ${y2} ${x2} ${y2}`, x: mx, y: y1 };
  if (down && y2 - y1 > HEIGHT) return { d: `M${x1} ${y1}L${x1} ${y2 - 30}C${x1} ${y2 - 12} ${x2} ${y2 - 20} ${x2} ${y2}`, x: x1, y: my };
  return { d: down ? `M${x1} ${y1}C${x1} ${my} ${x2} ${my} ${x2} ${y2}` : `M${x1} ${y1}C${mx} ${y1} ${mx} ${y2} ${x2} ${y2}`, x: mx, y: my };
}

function flow(edge, places, width, down) {
  const [from, to] = [places[edge.from], places[edge.to]];
  if (!from || !to) return null;
  const { d, x, y } = path(from, to, width, down);
  const text = edge.rows ? count(edge.rows) : "";
  return s("g", { key: `${edge.from}>${edge.to}` }, s("path", { class: "edge", d, "marker-end": "url(#arrow)" }), s("title", {}, `${count(edge.rows ?? 0)} rows wait here\n${(edge.columns ?? []).map((name) => line(name)).join(", ")}`),
    text ? s("text", { class: "edge-label", x: down ? x + 6 : x, y: down ? y + 4 : y - 7, "text-anchor": down ? "start" : "middle" }, text) : null);
}

/** The label of a weights edge: version, versions behind, age, and time of the last transfer. */
function weightsText(edge) {
  const parts = [edge.version != null ? `weights v${edge.version}` : "weights"];
  if (edge.behind != null) parts.push(`${number(edge.behind)} updates old`);
  if (edge.age_s != null) parts.push(`${duration(edge.age_s)} ago`);
  const moved = [edge.bytes != null && bytes(edge.bytes), edge.transfer_s != null && `in ${duration(edge.transfer_s)}`, edge.pause_s != null && `pause ${duration(edge.pause_s)}`].filter(Boolean);
  return [parts.join(", "), moved.join(", ").replace(", in ", " in ")].filter(Boolean).join(" · ");
}

function weights(edges, nodes, places, size, width, down) {
  const at = (group, method) => {
    const own = nodes.filter((node) => node.group === group && places[node.name]);
    return places[(own.find((node) => node.name.endsWith(`.${method}`)) ?? own[0])?.name];
  };
  return edges.map((edge, lane) => {
    const [from, to] = [at(edge.from, "update"), at(edge.to, "generate")];
    if (!from || !to) return null;
    const low = (down ? size.width + 16 : size.height + 26) + lane * (down ? DOWN_LANE : LANE);
    const [x1, y1, x2, y2] = down ? [from.x + width, from.y + HEIGHT / 2, to.x + width + 2, to.y + HEIGHT / 2] : [from.x + width / 2, from.y + HEIGHT, to.x + width / 2, to.y + HEIGHT + 2];
    const d = down ? `M${x1} ${y1}C${low} ${y1} ${low} ${y1} ${low} ${y1 - 20}L${low} ${y2 + 20}C${low} ${y2} ${low} ${y2} ${x2} ${y2}` : `M${x1} ${y1}C${x1} ${low} ${x1} ${low} ${x1 - 40} ${low}L${x2 + 40} ${low}C${x2} ${low} ${x2} ${low} ${x2} ${y2}`;
    const text = weightsText(edge);
    return s("g", { key: `w${lane}` }, s("path", { class: "edge weights", d, "marker-end": "url(#arrow-weights)" }), s("title", {}, `${edge.from} → ${edge.to}: ${text}`),
      down ? null : s("text", { class: "edge-label weights", x: (x1 + x2) / 2, y: low + 16, "text-anchor": "middle" }, text));
  });
}

/** Edges without those that a path over other nodes implies. */
function shortest(edges) {
  const after = new Map();
  for (const edge of edges) after.set(edge.from, [...(after.get(edge.from) ?? []), edge.to]);
  const reaches = (from, to, seen = new Set()) => (after.get(from) ?? []).some((next) => next === to || (!seen.has(next) && seen.add(next) && reaches(next, to, seen)));
  return edges.filter((edge) => !(after.get(edge.from) ?? []).some((next) => next !== edge.to && reaches(next, edge.to)));
}

function map(name, data, { params, set }) {
  const nodes = data.nodes.filter((node) => (node.graph ?? "") === name);
  const names = nodes.map((node) => node.name);
  const edges = shortest(data.edges.filter((edge) => names.includes(edge.from) && names.includes(edge.to)));
  const room = innerWidth - (innerWidth > 760 ? 208 + 48 : 24) - 26 - 2 * MARGIN;
  const groups = new Set(nodes.map((node) => node.group));
  const followed = data.weights.filter((edge) => groups.has(edge.from) && groups.has(edge.to));
  const placed = (width, down) => layout(names, edges.map((edge) => [edge.from, edge.to]), { width, height: HEIGHT, gapAlong: down ? DOWN_GAP : (layers) => Math.max(GAP, Math.min(110, (room - layers * WIDTH) / Math.max(1, layers - 1))), gapAcross: down ? 12 : 30, down });
  const beside = placed(WIDTH, false);
  const down = beside.width > room && nodes.length > 2; // stack layers that do not fit side by side
  const lanes = followed.length ? (down ? 20 + followed.length * DOWN_LANE : 30 + followed.length * LANE) : 0;
  const across = down ? Math.round((placed(WIDTH, true).width + 12) / (WIDTH + 12)) : 1; // nodes in the widest layer
  const width = down ? Math.max(NARROWEST, Math.min(WIDTH, Math.floor((room - lanes + 12) / across) - 12)) : WIDTH;
  const size = down ? placed(width, true) : beside;
  for (const place of Object.values(size.places)) [place.x, place.y] = [place.x + MARGIN, place.y + MARGIN];
  const [wide, high] = [size.width + 2 * MARGIN + (down ? lanes : 0), size.height + 2 * MARGIN + (down ? 0 : lanes)];
  const named = (node) => `${name}:${node}`;
  const choose = (node) => set({ node: params.node === named(node) ? "" : named(node) });
  const markers = ARROWS.map(([id, shade]) => s("marker", { id, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" }, s("path", { class: shade, d: "M0 0L8 4L0 8z" })));
  return h("div", { class: "panel map", key: `map-${name}`, tabindex: "0", role: "region", "aria-label": `graph ${name}` },
    s("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "group", "aria-label": `nodes of the graph ${name}` }, s("defs", {}, markers),
      edges.map((edge) => flow(edge, size.places, width, down)), weights(followed, nodes, size.places, size, width, down),
      nodes.map((node) => box(node, size.places[node.name], width, params.node === named(node.name), choose))),
    down ? followed.map((edge) => h("p", { class: "small" }, `${edge.from} → ${edge.to}: ${weightsText(edge)}`)) : null);
}

function details(node, run) {
  const entry = (label, value) => (value == null || value === "" ? null : [h("dt", { class: "faint" }, label), h("dd", {}, value)]);
  const columns = (names) => (names?.length ? h("span", { class: "mono" }, names.join(", ")) : null);
  return h("section", { class: "panel pad", key: "details" }, h("h2", {}, line(node.name), h("small", {}, [node.shape, node.group && `run by ${node.group}`].filter(Boolean).join(" · "))),
    h("dl", { class: "keys" },
      entry("rows", `${count(node.waiting)} waiting, ${count(node.leased)} leased, ${count(node.done)} done`),
      entry("rate", node.rate_in != null || node.rate_out != null ? `${number(node.rate_in)} rows/s in, ${number(node.rate_out)} out` : null),
      entry("calls", node.calls != null ? `${count(node.calls)}${node.seconds ? `, ${duration(node.seconds)} in all, ${duration(node.seconds / Math.max(1, node.calls))} each` : ""}` : null),
      entry("reads", columns(node.reads)), entry("writes", columns(node.writes)),
      entry("code", node.code && h("span", { class: "mono" }, `${node.code.file}${node.code.line ? `:${node.code.line}` : ""}`))),
    h("p", { class: "row" }, node.group ? h("a", { href: link("curves", { run, q: `${node.group}/` }) }, `Metrics of ${node.group}`) : null, h("a", { href: link("timeline", { run }) }, "Timeline"), node.group ? h("a", { href: link("workers", { run }) }, "Workers") : null));
}

function view(data, context) {
  const { params, run } = context;
  if (!data.nodes.length) return empty("No graph.", "This run did not write its graph.");
  const graphs = [...new Set(data.nodes.map((node) => node.graph ?? ""))];
  const chosen = data.nodes.find((node) => `${node.graph ?? ""}:${node.name}` === params.node);
  const when = data.live ? "rows now" : data.at ? `rows as they were ${ago(data.at)}` : "rows at the end";
  const legend = h("p", { class: "legend", key: "legend" }, [["--ok", "done (drawn no longer than the rest)"], ["--busy", "leased: under way"], ["--idle", "waiting"]].map(([shade, word]) => h("span", {}, h("i", { class: "swatch", css: { "--shade": `var(${shade})` } }), word)), data.weights.length ? h("span", {}, "┄ weights") : null);
  const columns = [
    { name: "from", title: "From", value: (edge) => edge.from }, { name: "to", title: "To", value: (edge) => edge.to }, { name: "version", title: "Version", n: true, value: (edge) => edge.version },
    { name: "behind", title: "Updates behind", n: true, value: (edge) => edge.behind, cell: (edge) => number(edge.behind) }, { name: "age", title: "Age", n: true, value: (edge) => edge.age_s, cell: (edge) => duration(edge.age_s) },
    { name: "bytes", title: "Bytes", n: true, value: (edge) => edge.bytes, cell: (edge) => bytes(edge.bytes) }, { name: "took", title: "Took", n: true, value: (edge) => edge.transfer_s, cell: (edge) => duration(edge.transfer_s) }, { name: "pause", title: "Pause", n: true, value: (edge) => edge.pause_s, cell: (edge) => duration(edge.pause_s) },
  ];
  return [
    graphs.map((name, place) => [h("h2", { key: `title-${name}` }, name || "Graph", place ? null : h("small", {}, `${when}; the group that runs a node is under its name`)), map(name, data, context)]),
    legend, chosen ? details(chosen, run) : null,
    data.weights.length ? [h("h2", { key: "weights-title" }, "Weights"), h("div", { class: "panel", key: "weights" }, table(columns, data.weights, { label: "edges of weights" }))] : null,
  ];
}

export const graph = { title: "Graph", loads: ["run"], follows: ["live", "metrics", "status"], load: ({ run }, signal) => get("graph", { run }, signal), view };
