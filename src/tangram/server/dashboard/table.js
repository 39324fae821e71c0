// Table: rows with columns, updated in place. Owns the kinds of cells: text, names chosen by tenants, runs, actions and
// sentences. A known row keeps its element. Rows far below are created on scrolling. A click
// on a row of an action opens that action, unless another element handles it.

import {attr, box, button, el, keyed, put, putName, show} from "./dom.js";
import {count} from "./format.js";
import {putAction, putRun} from "./palette.js";
import {putSentence} from "./sentence.js";

const AT_FIRST = 40;
const AT_ONCE = 80;
/* Rows: a window full is created at once; hundreds would be slow. */

const MAKE = {
  run: () => button("run", ""),
  action: () => button("link", ""),
};

const FILL = {
  text: (node, text) => put(node, text),
  name: (node, text) => putName(node, text),
  sentence: (node, text) => putSentence(node, text),
  run: (node, run) => putRun(node, run),
  action: (node, [id, run]) => putAction(node, id, run),
};

export class Table {
  /** Columns are {title, kind, value(item, now), width in percent, wide, right, hint}; `empty`: the placeholder. */
  constructor(label, columns, keyOf, empty) {
    this.columns = columns;
    this.keyOf = keyOf;
    this.table = el("table");
    this.table.setAttribute("aria-label", label);
    const head = el("tr");
    for (const column of columns) {
      const cell = el("th", classesOf(column), column.title);
      cell.scope = "col";
      attr(cell, "title", column.hint ?? null);
      if (column.width) cell.style.setProperty("width", `${column.width}%`);
      head.append(cell);
    }
    this.rows = el("tbody");
    this.actionAt = columns.findIndex((column) => column.kind === "action");
    if (this.actionAt >= 0) this.rows.addEventListener("click", (event) => this.clickAction(event));
    this.table.append(box("thead", "", head), this.rows);
    this.empty = el("p", "empty", empty);
    this.more = el("p", "note");
    this.root = box("div", "table-area", this.table, this.more, this.empty);
    this.limit = AT_FIRST;
    new IntersectionObserver((seen) => {
      if (!seen.some((one) => one.isIntersecting) || this.limit >= this.items.length) return;
      this.limit += AT_ONCE;
      this.update(this.items, this.now);
    }, {rootMargin: "600px"}).observe(this.more);
  }

  update(items, now) {
    this.items = items;
    this.now = now;
    const rest = items.length - this.limit;
    show(this.more, rest > 0);
    put(this.more, rest > 0 ? `${count(rest)} more` : "");
    show(this.table, items.length > 0);
    show(this.empty, items.length === 0);
    const near = items.slice(0, this.limit);
    keyed(this.rows, near, this.keyOf, () => this.make(), (row, item) => this.fill(row, item, now));
  }

  clickAction(event) {
    if (event.target.closest("button") || !getSelection().isCollapsed) return; // a text selection, for copying
    const action = event.target.closest("tr").children[this.actionAt].firstChild;
    action.focus();
    action.click();
  }

  make() {
    const row = el("tr", this.actionAt >= 0 ? "opens" : "");
    for (const column of this.columns) {
      const cell = el("td", classesOf(column));
      const maker = MAKE[column.kind];
      cell.append(maker ? maker() : el("span", "cell"));
      row.append(cell);
    }
    return row;
  }

  fill(row, item, now) {
    this.columns.forEach((column, k) => {
      FILL[column.kind ?? "text"](row.children[k].firstChild, column.value(item, now));
    });
  }
}

function classesOf(column) {
  return [column.right && "right", column.wide && "wide"].filter(Boolean).join(" ");
}
