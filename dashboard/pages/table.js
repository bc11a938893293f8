// A table that sorts by any column, by mouse or keyboard.
import { h } from "./dom.js";

function compare(a, b) {
  if (a == null || b == null) return (a == null) - (b == null);
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Rows in the order of `sort`: a column's name, with "-" before it for the largest first. Unknown values come last. */
export function sorted(columns, rows, sort) {
  const name = sort?.replace(/^-/, "");
  const column = columns.find((one) => one.name === name);
  if (!column) return rows;
  const [known, unknown] = [[], []];
  for (const row of rows) (column.value(row) == null ? unknown : known).push(row);
  known.sort((a, b) => compare(column.value(a), column.value(b)) * (sort.startsWith("-") ? -1 : 1));
  return [...known, ...unknown];
}

/** columns: [{name, title, value(row), cell(row), n: is a number, wide}]; options: sort, sorts(next): sets it, key(row), on(row): is chosen,
    note(row): a line below the row, over its whole width; served: the server has sorted. */
export function table(columns, rows, { sort, sorts, key, on, note, label, served }) {
  const head = (column) => {
    const direction = sort === column.name ? "ascending" : sort === `-${column.name}` ? "descending" : null;
    const next = direction === "descending" ? column.name : direction === "ascending" || column.n ? `-${column.name}` : column.name;
    const arrow = direction ? (direction === "ascending" ? " ↑" : " ↓") : "";
    const title = column.value && sorts ? h("button", { on: { click: () => sorts(next) } }, column.title, arrow) : column.title;
    return h("th", { scope: "col", class: column.n ? "n" : "", "aria-sort": direction }, title || h("span", { class: "hidden-text" }, column.label ?? ""));
  };
  const cells = (row) => columns.map((column) => h("td", { class: `${column.n ? "n" : ""} ${column.wide ? "wide" : column.wraps ? "wraps" : ""}` }, column.cell ? column.cell(row) : (column.value(row) ?? "–")));
  const body = (sorts && !served ? sorted(columns, rows, sort) : rows).flatMap((row, place) => {
    const name = key ? String(key(row)) : String(place);
    const below = note?.(row);
    return [
      h("tr", { key: name, class: `${on?.(row) ? "on" : ""} ${below ? "noted" : ""}` }, cells(row)),
      below ? h("tr", { key: `${name}/note`, class: `note ${on?.(row) ? "on" : ""}` }, h("td", { colspan: String(columns.length) }, h("div", {}, below))) : null,
    ];
  });
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, h("table", {}, h("thead", {}, h("tr", {}, columns.map(head))), h("tbody", {}, body)));
}

/** An empty page or part, with advice. */
export const empty = (title, ...text) => h("section", { class: "panel state", key: "empty" }, h("h2", {}, title), text.map((part) => h("p", {}, part)));
