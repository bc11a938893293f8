// The address holds what is looked at: #page?run=...&step=..., so that a link shows the same to somebody else.

export function parse() {
  const [page, rest = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { page: page || "runs", params: Object.fromEntries(new URLSearchParams(rest)) };
}

export function link(page, params = {}) {
  const filled = Object.entries(params).filter(([, value]) => value != null && value !== "" && value !== false);
  const text = new URLSearchParams(filled.map(([name, value]) => [name, value === true ? "1" : value])).toString();
  return `#${page}${text && `?${text}`}`;
}

/** Goes to a page; the browser's back button returns. */
export function go(page, params) {
  location.hash = link(page, params);
}

/** Changes parts of the address in place, without a new entry in the browser's history. */
export function set(changes) {
  const { page, params } = parse();
  history.replaceState(null, "", link(page, { ...params, ...changes }));
  dispatchEvent(new HashChangeEvent("hashchange"));
}

/** Names with commas between them, as an address has them; the server takes them apart in the same way. */
export const joined = (names) => names.map((name) => name.replaceAll("%", "%25").replaceAll(",", "%2C")).join(",");

export const parted = (text) => (text ?? "").split(",").filter(Boolean).map((name) => name.replaceAll("%2C", ",").replaceAll("%25", "%"));
