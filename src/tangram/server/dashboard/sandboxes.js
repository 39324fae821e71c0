// Sandboxes: the list of open, frozen and active sandboxes. Owns the page.

import {box, panel, put} from "./dom.js";
import {count, counted, duration, units} from "./format.js";
import {Table} from "./table.js";

export class SandboxesPage {
  constructor() {
    const {root, body, note} = panel("Sandboxes");
    this.note = note;
    this.table = new Table("Sandboxes", [
      {title: "Sandbox", width: 23, kind: "name", value: nameOf},
      {title: "Run", width: 14, kind: "run", value: (sandbox) => sandbox.run},
      {title: "Node", width: 9, kind: "name", value: (sandbox) => sandbox.node || "–"},
      {title: "State", width: 14, value: stateOf},
      {title: "Memory", right: true, value: (sandbox) => units(sandbox.memory_mib, "MiB")},
      {title: "Actions so far", right: true, value: (sandbox) => count(sandbox.actions)},
      {title: "Open for", right: true, value: openFor},
      {title: "Last used", right: true, value: lastUsed},
    ], (sandbox) => `${sandbox.run}\u0000${sandbox.name}`,
    "No sandbox is open. Sandboxes are listed here from their first action until they are closed.");
    body.append(this.table.root);
    this.root = box("div", "page", root);
  }

  update({view, place}) {
    const shown = place.run ? view.sandboxes.filter((sandbox) => sandbox.run === place.run) : view.sandboxes;
    const active = shown.filter((sandbox) => sandbox.active > 0).length;
    const total = place.run ? shown.length : view.sandboxes_total;
    const opening = shown.filter(isBeingOpened).length;
    const states = `${count(active)} active, ${count(shown.length - active - opening)} frozen`
      + (opening ? `, ${count(opening)} being opened` : "");
    const all = shown.length === total ? states : `the first ${count(shown.length)} are shown: ${states}`;
    put(this.note, total ? `${count(total)} open, ${all}` : "");
    this.table.update(shown, view.now_s);
  }
}

/** An instance is shown by its function: its own name is generated. */
function nameOf(sandbox) {
  return sandbox.function ? `${sandbox.function} (${sandbox.name})` : sandbox.name;
}

/** Its memory is reserved; it has a node once its first action, which creates it, is granted. */
function isBeingOpened(sandbox) {
  return !sandbox.active && !sandbox.node;
}

function stateOf(sandbox) {
  if (isBeingOpened(sandbox)) return "being opened";
  return sandbox.active ? `active, ${counted(sandbox.active, "action")}` : "frozen";
}

function openFor(sandbox, now) {
  return duration(Math.max(0, Math.round(now - sandbox.opened_s)));
}

function lastUsed(sandbox, now) {
  if (sandbox.active) return "now";
  if (isBeingOpened(sandbox)) return "–";
  const ago = Math.round(now - sandbox.last_used_s);
  return ago > 0 ? `${duration(ago)} ago` : "just now";
}
