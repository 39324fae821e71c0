// Tooltip: a small card beside the pointer with labels and values. There is one on the page.

import {box, el, put, show} from "./dom.js";

const GAP = 14;
const node = document.getElementById("tooltip");

/** Lines are [label, value, colour class or attribute]; the first one may be a title alone. */
export function showTooltip(x, y, title, lines) {
  const head = el("strong", "", title);
  const list = el("dl");
  for (const [label, value, colour] of lines) {
    const term = el("dt");
    if (colour) term.append(box("i", `swatch ${colour}`));
    term.append(el("span", "", label));
    list.append(term, el("dd", "", value));
  }
  node.replaceChildren(head, list);
  show(node, true);
  const left = x + GAP + node.offsetWidth > innerWidth ? x - GAP - node.offsetWidth : x + GAP;
  const top = y + GAP + node.offsetHeight > innerHeight ? y - GAP - node.offsetHeight : y + GAP;
  node.style.setProperty("left", `${Math.max(4, left)}px`);
  node.style.setProperty("top", `${Math.max(4, top)}px`);
}

export function hideTooltip() {
  show(node, false);
}

const announcement = document.getElementById("announcement");

/** Announces text to screen readers. */
export function announce(text) {
  put(announcement, text);
}
