// The workers page: each rank's node, call, memory over time, restarts, last error, log and stack.
import { get, post } from "./api.js";
import { chart } from "./chart.js";
import { h, widget } from "./dom.js";
import { bytes, count, duration } from "./format.js";
import { empty, table } from "./table.js";
import { line, visible } from "./text.js";

const TONES = { busy: "busy", idle: "idle", starting: "busy", dead: "bad" };
const LOG_LIMIT = 200000;
const kept = { name: null, text: "", next: 0 };

/** A worker's log. Each update adds only new text. */
async function readLog(run, worker, signal) {
  const name = `${run}\n${worker}`;
  if (kept.name !== name) Object.assign(kept, { name, text: "", next: 0 });
  const { text, next } = await get("log", { run, worker, after: kept.next }, signal);
  kept.text = (kept.text + text).slice(-LOG_LIMIT);
  kept.next = next;
  return kept.text;
}

async function load({ run, params }, signal) {
  const data = await get("workers", { run }, signal);
  const chosen = data.workers.find((worker) => worker.rank === params.worker);
  return { ...data, log: chosen?.log ? await readLog(run, params.worker, signal) : null };
}

/** A growing text. Its end stays in view unless the user has scrolled up. */
function tail(node, text) {
  const show = (next) => {
    const atEnd = node.scrollHeight - node.scrollTop - node.clientHeight < 24;
    node.replaceChildren(...visible(next));
    if (atEnd) node.scrollTop = node.scrollHeight;
  };
  show(text);
  node.scrollTop = node.scrollHeight;
  return { update: show };
}

function detail(worker, log, { run, facts, set, say, reload }) {
  const ask = async () => {
    try {
      await post("stacks", { run, worker: worker.rank });
      say("Asked; the stack appears here when the rank answers.");
      reload();
    } catch (error) {
      say(error.message);
    }
  };
  const memory = (worker.memory ?? []).filter(([, value]) => value != null);
  const series = [{ x: memory.map(([time]) => time), y: memory.map(([, value]) => value), colour: "--s1", name: "" }];
  return h("section", { class: "panel pad detail", key: `w${worker.rank}` },
    h("div", { class: "row" }, h("h2", {}, line(worker.rank), h("small", {}, [worker.node, worker.device].filter(Boolean).join(" · "))), h("span", { class: "fill" }), facts?.status === "running" ? h("button", { on: { click: ask } }, "Ask for its stack") : null, h("button", { on: { click: () => set({ worker: "" }) } }, "Close")),
    worker.last_error ? h("div", {}, h("h3", { class: "bad-text" }, "Last error"), h("div", { class: "text log", tabindex: "0" }, visible(worker.last_error.text.slice(-6000)))) : null,
    memory.length > 1 ? h("div", {}, h("h3", {}, "Memory"), widget(chart, { series, axis: "time_s", form: "bytes", floor: 0, label: `memory of ${worker.rank} over time` }, { class: "chart" })) : null,
    worker.stack ? h("div", {}, h("h3", {}, "Stack"), h("div", { class: "text log", tabindex: "0" }, visible(worker.stack))) : null,
    h("h3", {}, "Log", h("small", {}, "the end of it, as it grows")), log ? widget(tail, log.slice(-20000), { class: "text log", tabindex: "0", role: "log", "aria-label": `log of ${worker.rank}` }) : h("p", { class: "soft small" }, log == null ? "It has no separate log: it runs in the driver's process, which prints its output." : "It has written nothing."));
}

function view(data, context) {
  const { params, set } = context;
  if (!data.workers.length) return empty("No worker yet.", "Ranks appear here when their groups start.");
  const columns = [
    { name: "rank", title: "Rank", value: (row) => row.rank, cell: (row) => h("button", { class: "quiet", "aria-expanded": String(params.worker === row.rank), on: { click: () => set({ worker: params.worker === row.rank ? "" : row.rank }) } }, line(row.rank)) },
    { name: "state", title: "State", value: (row) => row.state, cell: (row) => h("span", {}, h("span", { class: `dot ${TONES[row.state] ?? "idle"} ${row.state === "busy" ? "pulse" : ""}` }), row.state ?? "–", row.call ? h("span", { class: "soft" }, ` ${line(row.call, 60)}`) : null, row.since_s != null ? h("span", { class: "faint" }, ` for ${duration(row.since_s)}`) : null) },
    { name: "node", title: "Node", value: (row) => row.node, cell: (row) => line(row.node ?? "–", 60) }, { name: "device", title: "Device", value: (row) => row.device, cell: (row) => line(row.device ?? "–", 60) },
    { name: "memory", title: "Memory", n: true, value: (row) => row.memory_bytes, cell: (row) => (row.memory_limit_bytes ? `${bytes(row.memory_bytes)} of ${bytes(row.memory_limit_bytes)}` : bytes(row.memory_bytes)) },
    { name: "restarts", title: "Restarts", n: true, value: (row) => row.restarts, cell: (row) => count(row.restarts) },
    { name: "error", title: "Last error", wide: true, value: (row) => row.last_error?.text, cell: (row) => (row.last_error ? h("span", { class: "bad-text" }, line(row.last_error.text.trim().split("\n").pop(), 160)) : "") },
  ];
  const chosen = data.workers.find((worker) => worker.rank === params.worker);
  return [h("div", { class: "panel", key: "table" }, table(columns, data.workers, { sort: params.sort ?? "rank", sorts: (sort) => set({ sort }), key: (row) => row.rank, on: (row) => row.rank === params.worker, label: "workers" })), chosen ? detail(chosen, data.log, context) : h("p", { class: "faint small", key: "hint" }, "Choose a rank for its log, its memory and its stack.")];
}

const badge = (facts) => (facts.workers ? { text: count(facts.workers), tone: "" } : null);

export const workers = { title: "Workers", loads: ["run", "worker"], follows: ["live", "logs", "status"], load, view, badge };
