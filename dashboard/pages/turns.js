// A conversation as turns: speakers, thinking, tool calls and results. Calls, results and long histories are folded.
import { h, widget } from "./dom.js";
import { count } from "./format.js";
import { block, line } from "./text.js";
import { part as partOf, tokens } from "./tokens.js";

const LATEST = 4; // unfolded turns of a prompt
const BRIEF = 24; // tokens of an answer to show unfolded, or four times as many characters
const BRIEF_ARGUMENT = 40; // characters of an argument in a title
const MOST_ARGUMENTS = 4; // in a title

/** A call in one line: add(a: 1, b: 2). */
const signature = (call) => `${line(call.name, 80)}(${call.arguments.slice(0, MOST_ARGUMENTS).map(([name, value]) => `${line(name, 40)}: ${line(value, BRIEF_ARGUMENT)}`).join(", ")}${call.arguments.length > MOST_ARGUMENTS ? ", …" : ""})`;

/** The arguments of the calls in a part, in full. */
const argumentsOf = (part, name, render) => part.calls?.map((call, place) => h("dl", { class: "keys small call-arguments" }, h("dt", { class: "faint" }, "calls"), h("dd", { class: "mono" }, line(call.name, 200)), call.arguments.map(([key, value]) => [h("dt", { class: "faint" }, line(key, 80)), h("dd", {}, block(`${name}/${place}/${key}`, value, render))])));

function titleOf(part, turn, size) {
  if (part.kind === "call") return `calls ${part.calls ? part.calls.map(signature).join(", ") : line(part.name, 80)}, ${size}`;
  if (part.kind === "result") return `${turn.name ? `${line(turn.name, 60)} answered` : "answer"}, ${size}`;
  return `${part.kind}, ${size}`;
}

const opens = (part) => part.kind === "thinking" || (part.kind === "result" && (part.from != null ? part.to - part.from <= BRIEF : (part.text ?? "").length <= 4 * BRIEF));

function turn(one, body, sizeOf, name, render) {
  const called = (part) => argumentsOf(part, `${name}/${one.parts.indexOf(part)}`, render);
  const parts = one.parts.map((part) => (part.kind === "text" ? body(part) : h("details", { class: part.kind, open: opens(part) }, h("summary", {}, titleOf(part, one, sizeOf(part))), called(part), body(part))));
  return h("div", { class: `turn ${one.role}`, role: "group", "aria-label": one.role }, h("h4", {}, line(one.name && one.role !== "tool" ? `${one.role} ${one.name}` : one.role, 60)), parts.length ? parts : h("p", { class: "faint small" }, "says nothing"));
}

/** The turns of a prompt. System turns and old ones are folded. */
export function promptTurns(name, turns, render) {
  const characters = (part) => `${count((part.text ?? "").length)} characters`;
  const drawn = turns.map((one, place) => {
    const body = (part) => block(`${name}/${place}/${one.parts.indexOf(part)}`, part.text, render);
    if (one.role !== "system") return turn(one, body, characters, `${name}/${place}`, render);
    return h("details", { class: "turn system" }, h("summary", {}, `system, ${count(one.parts.reduce((sum, part) => sum + (part.text ?? "").length, 0))} characters`), one.parts.map(body));
  });
  const early = turns.length > LATEST + 1 ? drawn.splice(0, drawn.length - LATEST) : [];
  return h("div", { class: "prompt conversation" }, early.length ? h("details", {}, h("summary", {}, `${count(early.length)} earlier turns`), early) : null, drawn);
}

/** The turns of a response: ranges of its tokens if the tokenizer is known, otherwise its text. */
export function responseTurns(sample, by, scale, render) {
  const size = (part) => (part.from != null ? `${count(part.to - part.from)} tokens` : `${count((part.text ?? "").length)} characters`);
  return h("div", { class: "conversation" }, sample.turns.map((one, place) => {
    const body = (part) => (part.from != null ? widget(tokens, { sample: partOf(sample, part.from, part.to), by, scale }, { class: "figured" }) : block(`${sample.id}/${place}/${one.parts.indexOf(part)}`, part.text, render));
    return turn(one, body, size, `${sample.id}/${place}`, render);
  }));
}
