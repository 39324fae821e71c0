// Dom: making and changing elements. Owns how text is inserted into the page: as text, never as markup.
// Guarantees to write only what changed.

const CUT = 120;
/* Longer names are cut here: the style sheet only hides the rest, and the layout of long text is slow. */

const shown = new WeakMap();
const listed = new WeakMap();

/** An element with classes and, if given, text. */
export function el(tag, classes = "", text = undefined) {
  const node = document.createElement(tag);
  if (classes) node.className = classes;
  if (text !== undefined) put(node, text);
  return node;
}

/** An element with children. */
export function box(tag, classes, ...children) {
  const node = el(tag, classes);
  node.append(...children);
  return node;
}

export function button(classes, text, label = "") {
  const node = el("button", classes, text);
  node.type = "button";
  if (label) node.setAttribute("aria-label", label);
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  return node;
}

/** Sets the text of a leaf. */
export function put(node, text) {
  if (shown.get(node) === text) return;
  shown.set(node, text);
  node.textContent = text;
}

/** Shows a name chosen by a tenant: cut if long, complete in the title. */
export function putName(node, text) {
  put(node, cut(text));
  attr(node, "title", text);
}

export function cut(text, max = CUT) {
  if (text.length <= max) return text;
  const kept = text.slice(0, max - 1);
  return `${/[\ud800-\udbff]$/.test(kept) ? kept.slice(0, -1) : kept}…`;
}

/** Sets an attribute, or removes it with null. */
export function attr(node, key, value) {
  if (value === null || value === undefined) {
    if (node.hasAttribute(key)) node.removeAttribute(key);
  } else if (node.getAttribute(key) !== String(value)) {
    node.setAttribute(key, value);
  }
}

export function style(node, key, value) {
  if (node.style.getPropertyValue(key) !== value) node.style.setProperty(key, value);
}

export function show(node, visible) {
  if (node.hidden === visible) node.hidden = !visible;
}

/**
 * Sets the children of `parent` to those of `items`, in their order. A known item keeps its element.
 * Keys may repeat, since actions of other runs have no names: repeats are distinguished by their order.
 */
export function keyed(parent, items, keyOf, create, update) {
  const before = listed.get(parent) ?? new Map();
  const after = new Map();
  const repeats = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    let key = keyOf(item);
    const seen = repeats.get(key) ?? 0;
    repeats.set(key, seen + 1);
    if (seen) key = `${key}\u0000${seen}`;
    let node = before.get(key);
    if (node === undefined) node = create(item);
    else before.delete(key);
    after.set(key, node);
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
  for (const node of before.values()) node.remove();
  listed.set(parent, after);
}

let numbered = 0;

/** A panel with a heading, a note beside it, and a body. */
export function panel(title, classes = "") {
  const root = el("section", `panel ${classes}`);
  const heading = el("h2", "", title);
  heading.id = `heading-${++numbered}`;
  root.setAttribute("aria-labelledby", heading.id);
  const note = el("span", "note");
  const head = box("div", "panel-head", heading, note);
  const body = el("div", "panel-body");
  root.append(head, body);
  return {root, head, note, body};
}
