// The address has the state of the page, #page?run=...&step=..., so that a link shows the same to others.

export function parse() {
  const [page, rest = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "runs", params: Object.fromEntries(new URLSearchParams(rest)) };
}

export function link(page, params = {}) {
  const filled = Object.entries(params).filter(([, value]) => value != null && value !== "" && value !== false);
  const text = new URLSearchParams(filled.map(([name, value]) => [name, value === true ? "1" : value])).toString();
  return `#${page}${text && `?${text}`}`;
}

/** Goes to a page, with an entry in the browser's history. */
export function go(page, params) {
  location.hash = link(page, params);
}

/** Changes parts of the address without an entry in the browser's history. */
export function set(changes) {
  const { page, params } = parse();
  history.replaceState(null, "", link(page, { ...params, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Joins names with commas for an address; `parted` on the server splits them. */
export const joined = (names) => names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");

export const parted = (text) => (text ?? "").split(",").filter(Boolean).map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
