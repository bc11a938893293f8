// Lanes of a timeline on a canvas: calls as bars, or shares of time for too many calls, ends of steps, the critical path.
import { colour, h } from "./dom.js";
import { clock, count, duration, percent } from "./format.js";
import { plain } from "./text.js";

const LANE = { group: 26, rank: 18 };
const BAR = { group: 16, rank: 10 };
const TOP = 22;
const of = (sizes, lane) => sizes[lane.kind] ?? sizes.group;
const HUES = ["--s1", "--s2", "--s3", "--s5", "--s4", "--s6"];
const MIXED = ["var(--ink)", "var(--panel)"]; // each further round of hues is darker or lighter
export const OWN_WORK = { weights: "var(--accent)", checkpoint: "var(--ink3)", evaluation: "var(--s7)", recording: "var(--idle)" };
const OWN = [[/weights|publish|canar/, "weights"], [/checkpoint/, "checkpoint"], [/^recorder\./, "recording"]];

/** CSS colours of nodes, different for all nodes of the graph and for weights, checkpoints and recording. */
export function shadesOf(nodes) {
  let next = 0;
  return nodes.map((name) => {
    const own = OWN.find(([pattern]) => pattern.test(name));
    if (own) return OWN_WORK[own[1]];
    const [hue, round] = [HUES[next % HUES.length], Math.floor(next++ / HUES.length)];
    if (!round) return `var(${hue})`;
    return `color-mix(in srgb, var(${hue}) ${Math.max(30, 70 - 16 * Math.floor((round - 1) / MIXED.length))}%, ${MIXED[(round - 1) % MIXED.length]})`;
  });
}

/** Round distances between marks of an axis: 1, 2 or 5 times a power of ten, minutes, hours. */
function spacing(seconds, marks) {
  const least = seconds / marks;
  for (const step of [30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400]) if (least > 20 && step >= least) return step;
  const power = 10 ** Math.floor(Math.log10(least || 1));
  return [1, 2, 5, 10].map((times) => times * power).find((step) => step >= least);
}

/** props: data (the timeline), range [start, end], zoom(start, end). */
export function lanes(node, props) {
  let current = props;
  let pressed = null;
  let drawn = [];
  const canvas = h("canvas", { role: "img" });
  const tip = h("div", { class: "tip", hidden: true });
  node.append(canvas, tip);
  const wide = () => node.clientWidth - 24;
  const left = () => (wide() < 520 ? 88 : 132);
  const right = () => (wide() < 520 ? 40 : 54);
  const scale = () => {
    const [start, end] = current.range;
    return (wide() - left() - right()) / (end - start || 1);
  };
  const heightTo = (place) => current.data.lanes.slice(0, place).reduce((sum, lane) => sum + of(LANE, lane), TOP);
  const xOf = (time) => left() + (time - current.range[0]) * scale();
  const timeOf = (x) => current.range[0] + (Math.min(wide() - right(), Math.max(left(), x)) - left()) / scale();

  function bars(ctx, lane, y) {
    const limit = wide() - right();
    const shades = shadesOf(current.data.nodes).map(colour);
    const special = OWN_WORK[lane.kind] && colour(OWN_WORK[lane.kind]);
    if (lane.bins) {
      const { t0, dt, nodes, shares } = lane.bins;
      for (let bin = 0; bin < shares.length; bin++) {
        const x = xOf(t0 + bin * dt);
        const end = Math.min(limit, xOf(t0 + (bin + 1) * dt));
        if (end < left() || x > limit) continue;
        let foot = y + 1 + of(BAR, lane);
        for (let place = 0; place < nodes.length; place++) {
          const high = of(BAR, lane) * shares[bin][place];
          ctx.fillStyle = special ?? shades[nodes[place]];
          ctx.fillRect(Math.max(left(), x), foot - high, end - Math.max(left(), x) + 0.4, high);
          foot -= high;
        }
      }
      return;
    }
    for (const call of lane.calls) {
      const [x, end] = [Math.max(left(), xOf(call[0])), Math.min(limit, xOf(call[1]))];
      if (end < left() || x > limit) continue;
      const width = Math.max(1, end - x);
      ctx.fillStyle = special ?? shades[call[2]];
      ctx.beginPath();
      ctx.roundRect(x, y + 1, width > 3 ? width - 0.6 : width, of(BAR, lane), width > 5 ? 2 : 0);
      ctx.fill();
      drawn.push({ x, end: x + width, y, lane, call });
    }
  }

  function axis(ctx, high) {
    const [start, end] = current.range;
    const step = spacing(end - start, Math.max(2, wide() / 110));
    ctx.fillStyle = colour("--ink3");
    ctx.strokeStyle = colour("--line");
    ctx.textAlign = "center";
    for (let time = Math.ceil(start / step) * step; time <= end + step * 1e-6; time += step) {
      const x = Math.round(xOf(time)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, TOP - 4);
      ctx.lineTo(x, high);
      ctx.stroke();
      ctx.fillText(clock(+time.toPrecision(12), step), x, 12);
    }
  }

  function steps(ctx, high) {
    const [start, end] = current.range;
    const inside = current.data.steps.filter((step) => step.end_s > start && step.end_s <= end);
    if (!inside.length || inside.length > wide() / 14) return;
    ctx.strokeStyle = colour("--ink3");
    ctx.fillStyle = colour("--ink3");
    ctx.setLineDash([2, 3]);
    ctx.textAlign = "right";
    const every = Math.ceil((inside.length * 34) / wide());
    inside.forEach((step, place) => {
      const x = Math.round(xOf(step.end_s)) + 0.5;
      ctx.beginPath();
      ctx.moveTo(x, TOP);
      ctx.lineTo(x, high - 12);
      ctx.stroke();
      if (place % every === 0) ctx.fillText(String(step.step), x, high);
    });
    ctx.setLineDash([]);
  }

  function critical(ctx, y, lane) {
    ctx.strokeStyle = colour("--ink");
    ctx.lineWidth = 1.5;
    for (const part of current.data.critical ?? []) {
      if (part.lane !== lane.lane) continue;
      const [x, end] = [Math.max(left(), xOf(part.start_s)), Math.min(wide() - right(), xOf(part.end_s))];
      if (end - x > 1) ctx.strokeRect(x + 0.5, y + 0.5, end - x - 1, 17);
    }
    ctx.lineWidth = 1;
  }

  function draw() {
    const { data } = current;
    const high = heightTo(data.lanes.length) + 18;
    const ratio = devicePixelRatio || 1;
    canvas.width = Math.max(1, Math.round(wide() * ratio));
    canvas.height = Math.round(high * ratio);
    canvas.style.height = `${high}px`;
    canvas.setAttribute("aria-label", `timeline from ${duration(current.range[0])} to ${duration(current.range[1])}: ${data.lanes.map((lane) => `${lane.lane} busy ${percent(lane.busy_share)}`).join(", ")}`);
    const ctx = canvas.getContext("2d");
    ctx.scale(ratio, ratio);
    ctx.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    drawn = [];
    axis(ctx, high - 16);
    data.lanes.forEach((lane, place) => {
      const y = heightTo(place) + (lane.kind === "rank" ? 2 : 4);
      const foot = y + of(BAR, lane) / 2 + 5;
      ctx.fillStyle = colour("--sunk");
      ctx.fillRect(left(), y, wide() - left() - right(), of(BAR, lane) + 2);
      bars(ctx, lane, y);
      critical(ctx, y, lane);
      ctx.fillStyle = colour(lane.kind === "rank" ? "--ink3" : "--ink2");
      ctx.textAlign = "right";
      const name = plain(lane.lane);
      ctx.fillText(wide() < 520 && name.length > 11 ? `${name.slice(0, 10)}…` : name.length > 20 ? `${name.slice(0, 19)}…` : name, left() - 10, foot);
      ctx.textAlign = "left";
      if (lane.busy_share != null) ctx.fillText(percent(lane.busy_share), wide() - right() + 8, foot);
    });
    steps(ctx, high - 2);
    if (pressed?.to != null) {
      ctx.fillStyle = colour("--accent").replace(/^rgb\((.*)\)$/, "rgba($1, 0.2)");
      ctx.fillRect(Math.min(pressed.from, pressed.to), TOP, Math.abs(pressed.to - pressed.from), high - TOP - 14);
    }
  }

  function tell(x, y) {
    const lane = current.data.lanes.find((_, place) => y >= heightTo(place) && y < heightTo(place + 1));
    if (!lane || x < left() || x > wide() - right()) return null;
    const time = timeOf(x);
    const hit = drawn.findLast((one) => one.lane === lane && x >= one.x - 1 && x <= one.end + 1);
    if (hit) {
      const [start, end, which, rows, step, worker] = hit.call;
      const inside = worker != null && worker < end - start ? `, ${duration(worker)} in the worker` : "";
      return `${plain(lane.lane)}: ${plain(current.data.nodes[which] ?? "")}\n${duration(end - start)}${inside}${rows ? `, ${count(rows)} rows` : ""}\nstep ${step}, at ${clock(start, 0.01)}`;
    }
    const gap = (lane.gaps ?? []).find((one) => time >= one.start_s && time <= one.end_s);
    if (gap) return `${plain(lane.lane)}: idle for ${duration(gap.end_s - gap.start_s)}\n${plain(gap.text ?? gap.reason)}`;
    if (lane.bins) {
      const bin = Math.floor((time - lane.bins.t0) / lane.bins.dt);
      const parts = (lane.bins.shares[bin] ?? []).map((share, which) => [share, lane.bins.nodes[which]]).filter(([share]) => share > 0.005);
      return parts.length ? `${plain(lane.lane)} at ${clock(time, 0.1)}\n${parts.map(([share, which]) => `${plain(current.data.nodes[which] ?? "")} ${percent(share)}`).join("\n")}` : null;
    }
    return null;
  }

  function moved(event) {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    if (pressed) {
      pressed.to = x;
      return draw();
    }
    const text = tell(x, y);
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    tip.style.left = x < wide() / 2 ? `${x + 24}px` : "auto";
    tip.style.right = x < wide() / 2 ? "auto" : `${wide() - x + 24}px`;
    tip.style.top = `${y + 16}px`;
  }

  canvas.addEventListener("pointermove", moved);
  canvas.addEventListener("pointerleave", () => (tip.hidden = true));
  canvas.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button) return;
    pressed = { from: event.clientX - canvas.getBoundingClientRect().left };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => {
    const chosen = pressed;
    pressed = null;
    if (chosen?.to != null && Math.abs(chosen.to - chosen.from) > 4) current.zoom(timeOf(Math.min(chosen.from, chosen.to)), timeOf(Math.max(chosen.from, chosen.to)));
    else draw();
  });
  canvas.addEventListener("dblclick", () => current.zoom(null, null));
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const [start, end] = current.range;
    const factor = Math.exp(event.deltaY * 0.004);
    const at = timeOf(event.clientX - canvas.getBoundingClientRect().left);
    current.zoom(at - (at - start) * factor, at + (end - at) * factor);
  }, { passive: false });

  const watched = new ResizeObserver(draw);
  watched.observe(node);
  return {
    update(next) {
      current = next;
      draw();
    },
    destroy: () => watched.disconnect(),
  };
}
