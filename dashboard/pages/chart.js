// A line chart, drawn by uPlot: bands, marks, zoom by dragging, one cursor for all charts of a page.
import { colour, h } from "./dom.js";
import { axisLabels, bytes, duration, number, percent } from "./format.js";
import { plain } from "./text.js";

const MARKS = { checkpoint: "--idle", evaluation: "--accent", restart: "--bad", alert: "--warn" };
const NEAR_PX = 5;
const CROWD = 60; // with more marks, draw only alerts and restarts
const TIMES = [0.001, 0.01, 0.1, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800];

/** Aligns all series on one x axis, with null where a series has no point. */
function joined(series) {
  const all = series.length === 1 ? series[0].x : [...new Set(series.flatMap((one) => one.x))].sort((a, b) => a - b);
  const place = new Map(all.map((x, index) => [x, index]));
  const columns = series.map((one) => {
    const y = new Array(all.length).fill(null);
    one.x.forEach((x, index) => (y[place.get(x)] = one.y[index]));
    return y;
  });
  return [all, ...columns];
}

/** The range of a vertical axis, with a margin, never empty; from 0 if that costs little height. */
function bounds(low, high, log, floor) {
  if (low == null || high == null) return log ? [0.1, 1] : [0, 1];
  if (log) return low > 0 ? [low / 1.3, high * 1.3] : [1e-9, Math.max(high, 1e-8)];
  if (floor != null && low >= floor) return [floor, high > floor ? high + (high - floor) * 0.06 : floor + 1];
  if (low >= 0 && low < 0.6 * high) return [0, high * 1.06];
  const margin = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - margin, high + margin];
}

const FORMS = { share: percent, bytes };
const formOf = (form) => FORMS[form] ?? number;
const axisText = (axis) => (axis === "time_s" ? duration : number);

/** props: series [{name, colour, x, y, width, faint, band}], marks, range [from, to] or null, log, axis, unit, zoom(from, to), label. */
export function chart(node, props) {
  let current = props;
  let plot = null;
  let signature = "";
  const tip = h("div", { class: "tip", hidden: true });

  const look = (one) => [one.colour, one.width, one.faint, one.band].join();
  const sign = () => [current.form, current.series.map(look).join(";"), current.log, current.axis, colour("--ink")].join("|");

  function drawMarks(u) {
    const { ctx, bbox } = u;
    const foot = bbox.top + bbox.height;
    const tall = { restart: bbox.height, alert: bbox.height };
    const inside = (current.marks ?? []).map((mark) => [mark, Math.round(u.valToPos(mark.x, "x", true)) + 0.5]).filter(([, x]) => x >= bbox.left && x <= bbox.left + bbox.width + 1);
    const crowded = inside.length > CROWD;
    ctx.save();
    for (const [mark, x] of inside) {
      if (crowded && !tall[mark.kind]) continue;
      ctx.strokeStyle = colour(MARKS[mark.kind] ?? "--idle");
      ctx.setLineDash(mark.kind === "alert" ? [3, 3] : []);
      ctx.lineWidth = tall[mark.kind] ? 1 : 2;
      ctx.beginPath();
      ctx.moveTo(x, foot - (tall[mark.kind] ?? (mark.kind === "evaluation" ? 9 : 5)));
      ctx.lineTo(x, foot);
      ctx.stroke();
    }
    ctx.restore();
  }

  function hover(u) {
    const { left, top, idx } = u.cursor;
    if (idx == null || left < 0 || !node.matches(":hover")) return void (tip.hidden = true);
    const x = u.data[0][idx];
    const lines = [`${current.axis === "time_s" ? "at" : (current.axis ?? "step")} ${axisText(current.axis)(x)}`];
    current.series.forEach((one, place) => {
      if (one.faint || one.silent) return;
      const y = u.data[place + 1][idx];
      if (y != null) lines.push(`${one.name ? `${plain(one.name)}  ` : ""}${formOf(current.form)(y)}`);
    });
    for (const mark of current.marks ?? []) if (Math.abs(u.valToPos(mark.x, "x") - left) < NEAR_PX) lines.push(`${mark.kind}: ${plain(mark.text ?? "")}`);
    tip.textContent = lines.slice(0, 12).join("\n");
    tip.hidden = false;
    const width = node.clientWidth;
    tip.style.left = left < width / 2 ? `${left + 60}px` : "auto";
    tip.style.right = left < width / 2 ? "auto" : `${Math.max(0, width - left - 30)}px`;
    tip.style.top = `${Math.min(top, node.clientHeight - 30)}px`;
  }

  function selected(u) {
    const { left, width } = u.select;
    if (width < 4) return;
    current.zoom?.(u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
  }

  function make() {
    plot?.destroy();
    const ink = colour("--ink3");
    const grid = { stroke: colour("--line"), width: 1 };
    const font = "10px system-ui, sans-serif";
    const format = axisText(current.axis);
    const series = current.series.map((one) => ({
      stroke: one.band ? "transparent" : colour(one.colour), width: one.width ?? 1.5, alpha: one.faint ? 0.25 : 1,
      spanGaps: true, points: { show: one.x.length < 2 }, label: one.name,
    }));
    const bands = [];
    current.series.forEach((one, place) => {
      if (one.band !== "high") return;
      const shade = colour(one.colour).replace(/^rgb\((.*)\)$/, "rgba($1, 0.16)");
      bands.push({ series: [place + 1, place + 2], fill: shade });
    });
    plot = new uPlot({
      width: Math.max(40, node.clientWidth), height: Math.max(40, node.clientHeight), legend: { show: false }, padding: [6, 20, 0, 0],
      scales: {
        x: { time: false, range: (u, low, high) => current.range ?? (u.data[0].length === 1 ? [u.data[0][0] - 1, u.data[0][0] + 1] : [low, high]) },
        y: { distr: current.log ? 3 : 1, range: (u, low, high) => bounds(low, high, current.log, current.floor) },
      },
      axes: [
        { stroke: ink, grid: { show: false }, ticks: { show: false }, font, size: 18, ...(current.axis === "time_s" ? { incrs: TIMES } : {}), gap: 3, space: 72, values: (u, at) => axisLabels(at, format) },
        { stroke: ink, grid, ticks: { show: false }, font, size: current.form === "bytes" ? 54 : 44, gap: 4, space: current.log ? 18 : 24, values: (u, at) => axisLabels(at, formOf(current.form)) },
      ],
      cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, sync: { key: "weft", scales: ["x", null] } },
      series: [{}, ...series], bands, hooks: { draw: [drawMarks], setCursor: [hover], setSelect: [selected] },
    }, joined(current.series), node);
    plot.over.ondblclick = () => current.zoom?.(null, null);
    plot.over.onmouseleave = () => (tip.hidden = true);
    node.append(tip);
    signature = sign();
  }

  function draw() {
    if (typeof uPlot === "undefined") return void (node.textContent = "Curves need the package uplot-python, which is not installed where the dashboard runs.");
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", current.label ?? "curve");
    if (!plot || sign() !== signature) make();
    else plot.setData(joined(current.series));
  }

  const watched = new ResizeObserver(() => plot?.setSize({ width: Math.max(40, node.clientWidth), height: Math.max(40, node.clientHeight) }));
  draw();
  watched.observe(node);
  return {
    update(next) {
      current = next;
      draw();
    },
    destroy() {
      watched.disconnect();
      plot?.destroy();
    },
  };
}
