// A response's tokens, coloured by one column, with all values of the token under the pointer or the arrow keys.
import { h } from "./dom.js";
import { count, number } from "./format.js";
import { plain, visible } from "./text.js";

const SHOWN = 3000;
const MORE = 10000;
const LEVELS = 6;

/** How each column colours a token: the `size` and `sign` of the shaded deviation, and the meaning of the scale's ends. */
export const SHADES = {
  logprob: { title: "log-probability", size: (v) => -v, ends: ["likely", "unlikely"], least: 1 },
  entropy: { title: "entropy", size: (v) => v, ends: ["certain", "undecided"], least: 0.5 },
  gap: { title: "gap", size: Math.abs, ends: ["trainer and generator agree", "they differ"], least: 1e-6 },
  trainer_logprob: { title: "trainer's log-probability", size: (v) => -v, ends: ["likely", "unlikely"], least: 1 },
  reference_logprob: { title: "reference's log-probability", size: (v) => -v, ends: ["likely", "unlikely"], least: 1 },
  ratio: { title: "ratio", size: (v) => Math.abs(Math.log(Math.max(1e-9, v))), sign: (v) => v - 1, ends: ["less likely now", "more likely now"], least: 1e-3 },
  advantage: { title: "advantage", size: Math.abs, sign: (v) => v, ends: ["worse", "better"], least: 1e-6 },
  mask: { title: "mask", size: () => 0, ends: ["grey and in italics: not trained on", ""], least: 1 },
  version: { title: "version", size: (v) => v, ends: ["oldest", "newest policy"], least: 1 },
};

export const shadeOfColumn = (name) => SHADES[name] ?? { title: name, size: Math.abs, sign: (v) => v, ends: ["below 0", "above 0"], least: 1e-9 };

/** Value of the darkest shade, for all shown responses: the 98th percentile, so that an outlier does not whiten the rest. */
export function scaleOf(samples, by) {
  const { size, least } = shadeOfColumn(by);
  const values = samples.flatMap((sample) => (sample.columns?.[by] ?? []).filter((value) => value != null));
  if (by === "version") return { from: values.reduce((a, b) => Math.min(a, b), Infinity), top: values.reduce((a, b) => Math.max(a, b), -Infinity) };
  const sizes = values.map(size).sort((a, b) => a - b);
  return { top: Math.max(least, sizes[Math.floor(sizes.length * 0.98)] ?? least) };
}

function classOf(value, by, scale) {
  if (value == null) return "";
  if (by === "mask") return "";
  const { size, sign } = shadeOfColumn(by);
  const level = by === "version" ? (scale.top > scale.from ? Math.round((LEVELS * (value - scale.from)) / (scale.top - scale.from)) : 0) : Math.min(LEVELS, Math.ceil((LEVELS * size(value)) / scale.top - 0.5));
  const cool = by === "version" || (sign && sign(value) > 0);
  return level > 0 ? `${cool ? "c" : "h"}${level}` : "";
}

export function ramp(by, scale) {
  const { title, ends, sign } = shadeOfColumn(by);
  const steps = by === "mask" ? [] : sign ? ["h6", "h3", "", "c3", "c6"] : by === "version" ? ["c1", "c3", "c6"] : ["h1", "h3", "h6"];
  const figures = by === "version" && Number.isFinite(scale.top) ? ` (v${scale.from} to v${scale.top})` : by === "mask" ? "" : ` (darkest: ${number(scale.top)})`;
  return h("span", { class: "ramp" }, `${title}: ${ends[0]} `, steps.map((shade) => h("i", { class: shade })), ` ${ends[1]}${figures}`);
}

const oldestOf = (sample) => (sample.columns?.version ?? []).reduce((a, b) => Math.min(a, b ?? a), Infinity);

/** A part of a response. */
export function part(sample, from, to) {
  const columns = Object.fromEntries(Object.entries(sample.columns ?? {}).map(([name, values]) => [name, values.slice(from, to)]));
  return { id: `${sample.id}/${from}`, tokens: sample.tokens.slice(from, to), columns, offset: from, of: sample.tokens.length, cut: sample.cut, oldest: oldestOf(sample) };
}

/** props: sample (tokens, columns), by, scale. */
export function tokens(node, props) {
  let current = props;
  let limit = SHOWN;
  let at = -1;
  let signature = "";
  const tip = h("div", { class: "tip", role: "status", hidden: true });
  const text = h("div", { class: "text tokens", dir: "ltr", tabindex: "0", role: "group", "aria-label": "tokens: arrow keys show the figures of each" });

  function figures(place) {
    const { sample } = current;
    text.querySelector(".at")?.classList.remove("at");
    at = place;
    const span = text.children[place];
    tip.hidden = !span;
    if (!span) return;
    span.classList.add("at");
    const parts = Object.entries(sample.columns ?? {}).filter(([, values]) => values[place] != null).map(([name, values]) => `${shadeOfColumn(name).title} ${name === "version" ? `v${values[place]}` : number(values[place])}`);
    tip.textContent = [`${count((sample.offset ?? 0) + place + 1)} of ${count(sample.cut ?? sample.of ?? sample.tokens.length)}: “${plain(sample.tokens[place]).replaceAll("\n", "⏎").slice(0, 60)}”`, ...parts].join("\n");
    const room = node.clientWidth;
    tip.style.left = span.offsetLeft < room / 2 ? `${span.offsetLeft}px` : "auto";
    tip.style.right = span.offsetLeft < room / 2 ? "auto" : `${Math.max(0, room - span.offsetLeft - span.offsetWidth)}px`;
    tip.style.top = `${span.offsetTop + span.offsetHeight + 4}px`;
  }

  function draw() {
    const { sample, by, scale } = current;
    const versions = sample.columns?.version ?? [];
    const oldest = sample.oldest ?? oldestOf(sample);
    const next = [sample.id, by, JSON.stringify(scale), sample.tokens.length, limit, sample.columns && Object.keys(sample.columns).join()].join("|");
    if (next === signature) return;
    signature = next;
    const values = sample.columns?.[by] ?? [];
    const mask = sample.columns?.mask ?? [];
    const spans = sample.tokens.slice(0, limit).map((token, place) => {
      const newer = versions[place] > oldest ? "newer" : "";
      const masked = mask[place] === 0;
      return h("span", { class: masked ? "masked" : `${classOf(values[place], by, scale)} ${newer}` }, visible(token));
    });
    text.replaceChildren(...spans);
    more.hidden = sample.tokens.length <= limit;
    more.textContent = `${count(sample.tokens.length - limit)} more tokens: show ${count(Math.min(MORE, sample.tokens.length - limit))}`;
    figures(-1);
  }

  const more = h("button", { class: "more", on: { click: () => ((limit += MORE), draw()) } });
  text.addEventListener("pointerover", (event) => {
    const span = event.target.closest(".tokens > span");
    if (span) figures([...text.children].indexOf(span));
  });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    event.stopPropagation();
    figures(Math.max(0, Math.min(text.children.length - 1, at + by)));
    text.children[at]?.scrollIntoView({ block: "nearest" });
  });
  text.addEventListener("pointerleave", () => figures(-1));
  text.addEventListener("blur", () => figures(-1));
  node.append(text, more, tip);
  draw();
  return {
    update(next) {
      if (next.sample.id !== current.sample.id) [limit, at] = [SHOWN, -1];
      current = next;
      draw();
    },
  };
}
