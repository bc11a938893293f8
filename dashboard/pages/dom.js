// Creates elements, and updates only what differs, so that focus, scroll position and text selection survive.
// Data becomes text nodes and attributes; no HTML is parsed.

const SVG = "http://www.w3.org/2000/svg";
const PROPERTIES = new Set(["value", "checked", "disabled", "open", "selected", "indeterminate"]);

function dispatch(event) {
  event.currentTarget.listens?.[event.type]?.(event);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value == null || value === false) {
      if (PROPERTIES.has(name)) node[name] = value ?? "";
    } else if (name === "key") node.key = value;
    else if (name === "on") {
      node.listens = value;
      for (const type of Object.keys(value)) node.addEventListener(type, dispatch);
    } else if (name === "css") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else if (PROPERTIES.has(name)) node[name] = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children.flat(Infinity)) if (child != null && child !== false) node.append(child);
  return node;
}

/** An HTML element. `on` has listeners by type, `css` styles; `key` identifies it among its siblings. */
export const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);

/** An SVG element. */
export const s = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);

/** An element whose component draws it: `make(node, props)` returns `{update(props), destroy()}`. */
export function widget(make, props, attributes) {
  const node = h("div", { "data-widget": "", ...attributes });
  node.make = make;
  node.props = props;
  return node;
}

function mount(node) {
  if (node.nodeType !== 1) return;
  if (node.make && !node.component) node.component = node.make(node, node.props);
  for (const inner of node.querySelectorAll("[data-widget]")) {
    if (!inner.component) inner.component = inner.make(inner, inner.props);
  }
}

function dispose(node) {
  if (node.nodeType !== 1) return;
  for (const inner of [node, ...node.querySelectorAll("[data-widget]")]) {
    inner.component?.destroy?.();
    inner.component = null;
  }
}

const alike = (old, next) => old.nodeType === next.nodeType && old.nodeName === next.nodeName && old.key === next.key && old.make === next.make;

function update(old, next) {
  if (old.nodeType === 3) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const type of Object.keys(next.listens ?? {})) old.addEventListener(type, dispatch); // added once, because it is the same function
  old.listens = next.listens;
  const kept = (name) => name === "style" || (name === "open" && old.nodeName === "DETAILS"); // keep what the user has unfolded
  for (const { name } of [...old.attributes]) if (!kept(name) && !next.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of next.attributes) if (!kept(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
  if (old.make) return void old.component?.update((old.props = next.props));
  if (old.style.cssText !== next.style.cssText) old.style.cssText = next.style.cssText;
  if (old !== document.activeElement) for (const name of ["value", "checked"]) if (name in next && old[name] !== next[name]) old[name] = next[name];
  if ("disabled" in next && old.disabled !== next.disabled) old.disabled = next.disabled;
  if (old.nodeName !== "TEXTAREA") patch(old, [...next.childNodes]);
}

/** Makes the children of `parent` equal `next`, and keeps elements that match. */
export function patch(parent, next) {
  const keyed = new Map();
  for (const child of parent.childNodes) if (child.key != null) keyed.set(child.key, child);
  let at = parent.firstChild;
  for (const node of next.flat(Infinity)) {
    if (node == null || node === false) continue;
    const wanted = typeof node === "string" ? document.createTextNode(node) : node;
    const found = wanted.key != null ? keyed.get(wanted.key) : at;
    if (found && alike(found, wanted)) {
      keyed.delete(wanted.key);
      if (found === at) at = at.nextSibling;
      else parent.insertBefore(found, at);
      update(found, wanted);
    } else {
      parent.insertBefore(wanted, at);
      mount(wanted);
    }
  }
  while (at) {
    const after = at.nextSibling;
    dispose(at);
    at.remove();
    at = after;
  }
}

/** A CSS colour, such as "--ink" or "color-mix(…)", in a form for canvases. */
export function colour(name) {
  const probe = document.getElementById("probe") ?? document.body.appendChild(h("i", { id: "probe", hidden: true }));
  probe.style.color = name.startsWith("--") ? `var(${name})` : name;
  return getComputedStyle(probe).color;
}
