// Text of a model: control and invisible characters become visible signs, and long texts are folded.
import { count } from "./format.js";
import { h } from "./dom.js";

const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb]|[\u{1d173}-\u{1d17a}\u{e0000}-\u{e0fff}]/gu;
const NAMES = { 0x1b: "ESC", 0x0d: "CR", 0x00: "NUL", 0x08: "BS", 0x07: "BEL", 0x7f: "DEL", 0x202e: "RLO", 0x202d: "LRO", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0xfeff: "BOM", 0xad: "SHY", 0x2028: "LSEP", 0x2029: "PSEP" };
const SHOWN = 4000;
const MORE = 20000;
const unfolded = new Map();

/** Nodes of a text, with a named sign for each control or invisible character. */
export function visible(text) {
  const nodes = [];
  let done = 0;
  for (const found of String(text).matchAll(HIDDEN)) {
    const code = found[0].codePointAt(0);
    const name = NAMES[code] ?? `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
    if (found.index > done) nodes.push(text.slice(done, found.index));
    nodes.push(h("span", { class: "control", title: `control character U+${code.toString(16).toUpperCase().padStart(4, "0")}` }, name));
    done = found.index + found[0].length;
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

/** The same as a string, for titles and canvases. */
export const plain = (text) => String(text).replace(HIDDEN, (sign) => `‹${NAMES[sign.codePointAt(0)] ?? "U+" + sign.codePointAt(0).toString(16).toUpperCase()}›`);

/** One line of at most `limit` characters. */
export function line(text, limit = 200) {
  const start = String(text ?? "").slice(0, limit + 1).replace(/\s+/g, " ");
  return plain(start.length > limit ? `${start.slice(0, limit)}…` : start);
}

/** A text block. A long one is folded, with a button that shows more. */
export function block(name, text, render, attributes = {}) {
  const whole = String(text ?? ""), limit = unfolded.get(name) ?? SHOWN, rest = whole.length - limit;
  const unfold = () => {
    unfolded.set(name, limit + MORE);
    render();
  };
  const more = rest > 0 ? h("button", { class: "more", on: { click: unfold } }, `${count(rest)} more characters: show ${count(Math.min(MORE, rest))}`) : null;
  return h("div", { ...attributes, class: `text ${attributes.class ?? ""}`, dir: "ltr" }, visible(whole.slice(0, limit)), more);
}
